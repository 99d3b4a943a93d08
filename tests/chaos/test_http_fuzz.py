"""A few of the answers and requests that `make fuzz` generates by the thousand; a failure shows its seed."""

from chaos.fuzz_http import Fuzz

SEED = 1
COUNT = 200


async def test_an_answer_in_any_framing_arrives_unchanged_or_looks_broken(fake, sidecar):
    fuzz = Fuzz(fake, sidecar, SEED)
    assert [line async for line in fuzz.answers(COUNT)] == []
    assert fuzz.tally["answers sound, whole"] > COUNT / 4
    assert fuzz.tally["answers torn, broken"] > 0


async def test_the_engine_gets_only_complete_requests_in_any_framing(fake, sidecar):
    fuzz = Fuzz(fake, sidecar, SEED)
    assert [line async for line in fuzz.requests(COUNT)] == []
    assert fuzz.tally["requests sound, whole, heard"] > COUNT / 4


async def test_an_answer_whose_headers_cannot_be_forwarded_gives_502(fake, sidecar):
    """aiohttp reads such a header but refuses to write it: that is a 502, not a failure of the sidecar."""
    fuzz = Fuzz(fake, sidecar, SEED)
    raw = b"HTTP/1.1 200 OK\r\nX-A: \x01\r\nContent-Length: 2\r\n\r\n{}"
    assert await fuzz.status(raw) == 502
