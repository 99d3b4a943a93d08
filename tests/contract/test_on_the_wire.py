"""HTTP as sent and received: framing, headers and limits, against a scripted engine."""

import asyncio
import gzip
import json

import orjson
import pytest

from chaos.fake_answers import PATHS, request_body
from chaos.fake_engine import Fault
from chaos.fake_http import Heard
from chaos.raw import Wire, dial
from slotkeeper.api.head import Api
from slotkeeper.app import KEEPALIVE_SECONDS

CHAT = PATHS[Api.CHAT]
ASK = orjson.dumps(request_body(Api.CHAT, stream=False))


async def head_of(wire: Wire, *lines: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send these lines; return status and body."""
    await wire.send("\r\n".join((*lines, "", "")).encode("latin-1") + body)
    head = await wire.head()
    return head.status, await wire.body(head)


def heard_at(fake, path: str) -> Heard:
    """Return the last request for this path: looks of the sidecar itself may have come after it."""
    return [heard for heard in fake.heard if heard.path == path][-1]


def custom(fake, *lines: str, body: bytes = b"") -> None:
    fake.script.append(Fault.CUSTOM)
    fake.custom = "\r\n".join((*lines, "", "")).encode("latin-1") + body


async def test_repeated_headers_are_forwarded_and_hop_by_hop_headers_are_not(fake, data):
    custom(
        fake,
        "HTTP/1.1 200 Fine",
        "Content-Type: application/json",
        "Set-Cookie: a=1; Path=/",
        "Set-Cookie: b=2",
        "X-Thing: \xe9",
        "X-Thing: two",
        "Connection: keep-alive, X-Hop",
        "X-Hop: not for you",
        "Content-Length: 2",
        body=b"{}",
    )
    async with dial(data) as wire:
        lines = (f"POST {CHAT} HTTP/1.1", "Host: x", "X-Twice: 1", "X-Twice: 2", "Cookie: c=3")
        mine = ("Connection: X-Mine", "X-Mine: 1", "TE: trailers", "X-Forwarded-For: 10.0.0.1")
        await wire.send(("\r\n".join((*lines, *mine, f"Content-Length: {len(ASK)}", "", ""))).encode() + ASK)
        head = await wire.head()
        assert await wire.body(head) == b"{}"
    assert head.all("Set-Cookie") == ["a=1; Path=/", "b=2"]
    assert head.all("X-Thing") == ["\xe9", "two"] or head.all("X-Thing")[1] == "two"
    assert not head.all("X-Hop")
    (heard,) = fake.ran
    assert heard.header("X-Twice") == ["1", "2"]
    assert heard.header("Cookie") == ["c=3"]
    assert heard.header("X-Forwarded-For") == ["10.0.0.1, 127.0.0.1"]
    assert not heard.header("X-Mine")
    assert not heard.header("TE")


async def test_a_compressed_answer_is_forwarded_unchanged(fake, data):
    packed = gzip.compress(b'{"choices":[]}' * 500)
    custom(
        fake,
        "HTTP/1.1 200 OK",
        "Content-Type: application/json",
        "Content-Encoding: gzip",
        f"Content-Length: {len(packed)}",
        body=packed,
    )
    async with dial(data) as wire:
        await wire.post(CHAT, ASK, {"Accept-Encoding": "gzip"})
        head = await wire.head()
        assert await wire.body(head) == packed
    assert head["Content-Encoding"] == "gzip"
    assert head["Content-Length"] == str(len(packed))
    assert fake.ran[0].header("Accept-Encoding") == ["gzip"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_compressed_stream_is_forwarded_unchanged(fake, data, stream):
    packed = gzip.compress(b"data: {}\n\n" * 50 + b"\n\n", mtime=0) + b"\n\n" * 3
    chunked = b"".join(b"%x\r\n%s\r\n" % (1, packed[at : at + 1]) for at in range(len(packed))) + b"0\r\n\r\n"
    custom(
        fake,
        "HTTP/1.1 200 OK",
        "Content-Type: text/event-stream",
        "Content-Encoding: gzip",
        "Transfer-Encoding: chunked",
        body=chunked,
    )
    async with dial(data) as wire:
        await wire.post(CHAT, request_body(Api.CHAT, stream=stream))
        assert await wire.body(await wire.head()) == packed


async def test_the_sidecar_adds_no_headers_that_describe_a_client(fake, data):
    async with dial(data) as wire:
        assert (await head_of(wire, "GET /nothing?x=%2f HTTP/1.1", "Host: x"))[0] == 404
    heard = heard_at(fake, "/nothing?x=%2f")
    names = {name.lower() for name, _ in heard.headers}
    assert not names & {"accept", "accept-encoding", "user-agent", "content-type", "cookie", "content-length"}


async def test_a_client_that_waits_for_100_continue_gets_it(fake, data):
    async with dial(data) as wire:
        lines = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(ASK)}\r\n\r\n"
        )
        await wire.send(lines.encode())
        assert (await wire.head()).status == 100
        await wire.send(ASK)
        assert (await wire.head()).status == 200
    assert not fake.ran[0].header("Expect")


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_an_http_1_0_client_gets_no_chunked_answer(fake, data, connection):
    """The end of the connection is the end of its answer, so the connection is closed at once."""
    body = orjson.dumps(request_body(Api.CHAT, stream=True))
    lines = f"POST {CHAT} HTTP/1.0\r\nConnection: {connection}\r\nContent-Length: {len(body)}\r\n\r\n"
    async with dial(data) as wire, asyncio.timeout(KEEPALIVE_SECONDS / 2):
        await wire.send(lines.encode() + body)
        head = await wire.head()
        assert not head.all("Transfer-Encoding")
        rest, reset = await wire.rest()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert not reset


async def test_a_chunked_body_reaches_the_engine_with_a_length(fake, data):
    async with dial(data) as wire:
        await wire.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for at in range(0, len(ASK), 7):
            await wire.send(b"%x;ext=1\r\n%s\r\n" % (len(ASK[at : at + 7]), ASK[at : at + 7]))
        await wire.send(b"0\r\n\r\n")
        assert (await wire.head()).status == 200
    (heard,) = fake.ran
    assert heard.body.replace(b'"id_slot":0,', b"") == ASK
    assert heard.header("Content-Length") == [str(len(heard.body))]
    assert not heard.header("Transfer-Encoding")


@pytest.mark.parametrize("api", PATHS)
async def test_a_pinned_body_differs_only_by_the_slot_and_an_unpinned_body_not_at_all(fake, data, api):
    body = json.dumps(request_body(api, stream=False, odd=[1e3, "\u00e9"]), indent=3).encode()
    async with dial(data) as wire:
        await wire.post(PATHS[api], body)
        head = await wire.head()
        await wire.body(head)
    heard = fake.ran[-1]
    slots = head.all("X-Slotkeeper-Slot")
    spliced = b'"id_slot":%s,' % slots[0].encode() if slots else b""
    assert bool(slots) == api.pinnable
    assert heard.body == body[:1] + spliced + body[1:]
    assert heard.header("Content-Length") == [str(len(heard.body))]


@pytest.mark.parametrize("target", ["@elsewhere.example/x", ".example/x", ":1/x", "*", "x", "http:/x"])
async def test_a_target_that_is_not_a_path_is_refused_and_never_sent_to_another_host(fake, data, target):
    async with dial(data) as wire:
        await wire.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert 400 <= (await wire.head()).status < 500


async def test_a_target_with_a_host_is_sent_to_the_engine_with_its_path_only(fake, data):
    async with dial(data) as wire:
        status, _ = await head_of(wire, "GET http://elsewhere.example/health?a=%2f HTTP/1.1", "Host: x")
    assert status == 200
    assert heard_at(fake, "/health?a=%2f")


@pytest.mark.parametrize("broken", [b"zz\r\n", b"-5\r\nhello", b"5\r\nhelloXX"])
async def test_a_body_with_broken_framing_never_reaches_the_engine(fake, sidecar, data, broken):
    async with dial(data) as wire:
        await wire.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        await asyncio.sleep(0.02)
        await wire.send(broken)
        async with dial(data) as other:
            await other.post(CHAT, ASK)
            assert (await other.head()).status == 200
    assert len(fake.ran) == 1


async def test_an_error_answer_to_head_has_no_body(fake, data):
    await fake.die()
    async with dial(data) as wire:
        await wire.send(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\nHEAD /props HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await wire.head()).status == 503
        assert (await wire.head()).status == 503, "the next head comes right after the first"


async def test_an_unsafe_request_id_is_replaced(fake, data):
    async with dial(data) as wire:
        await wire.post("/tokenize", {"content": "x"}, {"X-Request-Id": "a b\x01"[:3] + "x" * 200})
        head = await wire.head()
    assert len(head["X-Request-Id"]) <= 128
    assert heard_at(fake, "/tokenize").header("X-Request-Id") == head.all("X-Request-Id")


async def test_long_headers_are_forwarded_in_both_directions(fake, data):
    custom(fake, "HTTP/1.1 200 OK", f"X-Long: {'y' * 30000}", "Content-Length: 2", body=b"{}")
    async with dial(data, window=2**18) as wire:
        await wire.post(CHAT, ASK, {"X-Long": "x" * 7000})
        head = await wire.head()
    assert len(head["X-Long"]) == 30000
    assert len(fake.ran[0].header("X-Long")[0]) == 7000
