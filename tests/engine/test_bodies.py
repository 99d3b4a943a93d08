"""Bodies and paths that can be read in two ways, beside a running answer on the real engine (engine.md T1).

Each row of the table is a spelling that the sidecar and the engine once read differently, or could. The test
sends each first to the engine; the row has the expected status. Then it sends each through the sidecar while
slot 0 generates another client's answer, which must be the same as without the second request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import orjson
import pytest

from chaos.raw import dial
from engine.conftest import SAME_IN_ANY_BATCH
from patience import PATIENCE
from slotkeeper.bench import lab
from slotkeeper.engine.client import EngineClient

TOKENS: Final = 300  # at 1500 a second the other request still arrives in the middle
SPOKEN: Final = 8  # tokens after which it arrives
VICTIM: Final = "Of a lighthouse keeper who counts ships. " * 60
OTHER: Final = "Of a miller who lost his wheel. " * 60
BYPASS: Final = {"X-Slotkeeper-Bypass": "1"}


@dataclass(frozen=True, slots=True)
class Row:
    """One spelling.

    `engine`: the status of the engine's own answer; `ours`: the sidecar's, with an idle engine.
    """

    name: str
    more: bytes = b""  # further bytes of the object
    before: bytes = b""
    behind: bytes = b""
    path: str = "/completion"
    headers: dict[str, str] = field(default_factory=dict)
    engine: int = 200
    ours: int = 200

    @property
    def body(self) -> bytes:
        prompt = orjson.dumps(OTHER)
        return self.before + b'{"prompt":%s,"n_predict":4%s}' % (prompt, self.more) + self.behind


DEEP: Final = b',"x":' + b"[" * 3000 + b"]" * 3000
SLOT: Final = b',"id_slot":0'
TABLE: Final = [
    Row("plain", SLOT),
    Row("NUL behind it", SLOT, behind=b"\0", ours=400),
    Row("NUL and more behind it", SLOT, behind=b'\0{"id_slot":-1}', ours=400),
    Row("nested deeper than we read", DEEP + SLOT, ours=400),
    Row("escaped key", b',"id\\u005fslot":0'),
    Row("escaped key last", b',"id_slot":-1,"\\u0069d_slot":0'),
    Row("escaped key first", b',"id\\u005fslot":0,"id_slot":0.0'),
    Row("key twice", b',"id_slot":-1,"id_slot":0'),
    Row("a fraction", b',"id_slot":0.9'),
    Row("an exponent", b',"id_slot":0e0'),
    Row("false", b',"id_slot":false'),
    Row("wraps at 32 bits", b',"id_slot":4294967296'),
    Row("wraps at 64 bits", b',"id_slot":18446744073709551614'),
    Row("beyond 64 bits", b',"id_slot":18446744073709551616'),
    Row("beyond an integer", b',"id_slot":1e30'),
    Row("negative", b',"id_slot":-2'),
    Row("a word", b',"id_slot":"0"'),
    Row("byte order mark", SLOT, before=b"\xef\xbb\xbf"),
    Row("two copies as a fraction", b',"n":1.9' + SLOT),
    Row("bypass", SLOT, headers=BYPASS),
    Row("bypass with an escaped key", b',"id\\u005fslot":0', headers=BYPASS),
    Row("%u in the path", SLOT, path="/completio%u006e", ours=400),
    Row("%u for a slash", SLOT, path="/v1%u002fcompletions", ours=400),
    Row("encoded slash", SLOT, path="/v1%2fcompletions", ours=400),
    Row("encoded letter", SLOT, path="/%63ompletion"),
    Row("query", SLOT, path="/completion?id_slot=-1"),
    Row("fragment", SLOT, path="/completion#x"),
    Row("tab behind the path", SLOT, path="/completion\t", ours=400),
    Row("dot segments", SLOT, path="/x/../completion", engine=404, ours=400),
    Row("doubled slash", SLOT, path="//completion", engine=404, ours=400),
    Row("type of a form", SLOT, headers={"Content-Type": "application/x-www-form-urlencoded"}),
    Row("charset", SLOT, headers={"Content-Type": "application/json; charset=utf-16"}),
    Row("encoding that is none", SLOT, headers={"Content-Encoding": "none"}, ours=400),
]
# Bodies that neither can read: the engine answers 400, or 500 on b10434.
NEITHER: Final = [
    Row("UTF-16", before=b"\xff\xfe"),
    Row("two byte order marks", before=b"\xef\xbb\xbf" * 2),
    Row("NUL before it", before=b"\0"),
    Row("more behind it", SLOT, behind=b"x"),
    Row("invalid UTF-8", b',"x":"\xff"'),
    Row("overlong UTF-8", b',"x":"\xc0\xaf"'),
    Row("surrogate in UTF-8", b',"x":"\xed\xa0\x80"'),
    Row("lone surrogate", b',"x":"\\ud800"'),
    Row("control character", b',"x":"\x01"'),
    Row("no number", b',"x":NaN'),
    Row("too large a number", b',"x":1e400'),
    Row("leading zero", b',"x":01'),
    Row("plus sign", b',"x":+1'),
    Row("comment", b",/**/" + SLOT[1:]),
    Row("trailing comma", b","),
    Row("other space", b",\x0b" + SLOT[1:]),
]


async def sent(address: str, row: Row) -> tuple[int, bytes]:
    """Send a request over a socket, since no client would write it; return status and body."""
    async with dial(address) as wire:
        await wire.post(row.path, row.body, {"Connection": "close", **row.headers})
        head = await wire.head()
        return head.status, await wire.body(head)


async def words(url: str) -> AsyncIterator[str]:
    """Yield the victim's answer, pinned to slot 0, token by token."""
    body: dict[str, Any] = {"prompt": VICTIM, "n_predict": TOKENS, "id_slot": 0, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    async with (
        aiohttp.ClientSession(url) as client,
        client.post("/completion", json=body, headers={"Connection": "close"}) as answer,
    ):
        assert answer.status == 200
        async for line in answer.content:
            if line.startswith(b"data: {"):
                yield str(orjson.loads(line[6:]).get("content", ""))


async def beside(url: str, row: Row) -> tuple[str, int]:
    """Send a request in the middle of the victim's answer; return that answer's text, and the status."""
    await sent(
        url, Row("", SLOT)
    )  # moved to the RAM cache when the victim starts: the engine would load it into the busy slot
    speaking = words(url)
    said = [await anext(speaking) for _ in range(SPOKEN)]
    async with asyncio.TaskGroup() as group:
        other = group.create_task(sent(url, row))
        said += [word async for word in speaking]
    return "".join(said), other.result()[0]


@pytest.fixture
def two_slots(engine_factory, build):
    """Start an engine with two slots: a request that is not read as one for slot 0 goes to the free slot."""
    return engine_factory("tiny-dense", build, args=["-np", "2", "-c", "16384", *SAME_IN_ANY_BATCH])


async def test_no_spelling_of_a_request_changes_a_running_answer(two_slots):
    expected = "".join([word async for word in words(two_slots.base)])
    assert "".join([word async for word in words(two_slots.base)]) == expected, (
        "the same prompt, the same text"
    )
    engine = {row.name: (await sent(two_slots.base, row))[0] for row in TABLE}
    assert engine == {row.name: row.engine for row in TABLE}, (
        "the engine reads some of these differently than before"
    )
    async with lab.sidecar(two_slots.base) as url:
        found = {row.name: await beside(url, row) for row in TABLE}
    assert [name for name, (text, _) in found.items() if text != expected] == []
    assert {name: status for name, (_, status) in found.items()} == {row.name: row.ours for row in TABLE}


async def test_the_engine_alone_lets_some_spellings_change_a_running_answer(two_slots):
    """Otherwise the test above shows nothing: tell the users of this build that T1 is fixed."""
    expected = "".join([word async for word in words(two_slots.base)])
    spoiled = [row.name for row in TABLE[:6] if (await beside(two_slots.base, row))[0] != expected]
    assert spoiled


async def test_a_body_that_neither_server_can_read_never_reaches_the_engine(two_slots):
    for row in NEITHER:
        assert (await sent(two_slots.base, row))[0] in {400, 500}, row.name
    async with lab.sidecar(two_slots.base) as url:
        for row in NEITHER:
            status, body = await sent(url, row)
            assert (status, orjson.loads(body)["error"]["type"]) == (400, "invalid_request_error"), row.name


@pytest.mark.parametrize(
    ("n", "named"), [("2.0", "id_slot"), ("2", "id\\u005fslot"), ("4294967298", "id_slot"), ("2", "x")]
)
async def test_the_copies_of_a_request_are_counted_in_every_spelling(engine_factory, build, n, named):
    """Two copies take two slots: nothing is pinned to either meanwhile."""
    engine = engine_factory("tiny-dense", build, args=["-np", "2", "-c", "16384", *SAME_IN_ANY_BATCH])
    asked = f'"n":{n},"{named}":0,"n_predict":{TOKENS},"temperature":0,"ignore_eos":true}}'
    copies = b'{"prompt":%s,' % orjson.dumps(VICTIM) + asked.encode()
    expected = await contents(engine.base, copies)
    assert len(expected) == 2
    async with lab.sidecar(engine.base) as url, asyncio.TaskGroup() as group:
        await contents(url, other_in(0))  # moved to the RAM cache when the copies start
        running = group.create_task(contents(url, copies))
        async with asyncio.timeout(PATIENCE):
            while not await seen_at_work(engine.base, 2, running):  # on a busy machine the poll may be late
                running = group.create_task(contents(url, copies))
        await contents(url, other_in(1))
    assert running.result() == expected


async def test_a_negative_slot_number_wraps_as_in_the_engine(engine_factory, build):
    engine = engine_factory("tiny-dense", build, args=["-np", "3", "-c", "16384"])
    async with lab.sidecar(engine.base) as url:
        for named in (-2, -3, -4, -5, 4, 2**32 + 1, 1 - 2**32):
            row = Row("", b',"id_slot":%d,"response_fields":["id_slot"]' % named)
            taken = [orjson.loads((await sent(base, row))[1]) for base in (engine.base, url)]
            assert taken[0] == taken[1], named


def other_in(slot: int) -> bytes:
    return b'{"prompt":%s,"n_predict":4,"id_slot":%d}' % (orjson.dumps(OTHER), slot)


async def seen_at_work(base: str, slots: int, running: asyncio.Task[list[str]]) -> bool:
    """Whether this many slots were seen busy before the request ended."""
    async with EngineClient(base) as client:
        while not running.done():
            if sum(view.busy for view in await client.slots()) >= slots:
                return True
    return False


async def contents(url: str, body: bytes) -> list[str]:
    """Return the texts of one answer to /completion."""
    async with (
        aiohttp.ClientSession(url) as client,
        client.post("/completion", data=body, headers={"Connection": "close"}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        told = await answer.json()
        return [one["content"] for one in (told if isinstance(told, list) else [told])]
