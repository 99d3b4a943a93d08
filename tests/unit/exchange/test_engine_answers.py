"""How the answer of an engine is read: its head, its body, its end, and what is not HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from patience import PATIENCE
from slotkeeper.api.errors import ClientFault, UpstreamFault
from slotkeeper.exchange.forwarding import (
    MAX_HEAD_BYTES,
    READ_AHEAD,
    BrokenOff,
    EngineAnswer,
    NotSent,
    Origin,
    Upstream,
    copy,
)

HEAD = b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

Say = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(say: Say) -> AsyncIterator[int]:
    """Run a server that says something to each connection, and yield its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await say(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


def saying(*pieces: bytes) -> Say:
    """Say the pieces one after the other once a head has come, and close the connection."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)

    return say


@asynccontextmanager
async def asked(say: Say, *, bodiless: bool = False) -> AsyncIterator[EngineAnswer]:
    answer = EngineAnswer(bodiless=bodiless)
    async with server(say) as port, asyncio.timeout(PATIENCE):
        await asyncio.get_running_loop().create_connection(lambda: answer, "127.0.0.1", port)
        async with answer:
            await answer.ask(HEAD, iter(()))
            yield answer


async def body_of(answer: EngineAnswer) -> bytes:
    pieces = []
    while piece := await answer.read():
        pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"], b"hello"),
        ([b"HTTP/1.1 2", b"00 O", b"K\r\nContent-Le", b"ngth: 5\r\n\r", b"\nhe", b"llo"], b"hello"),
        ([CHUNKED + b"2\r\nhe\r\n", b"3\r\nllo\r\n0\r\nX-Trailer: 1\r\n\r\n"], b"hello"),
        ([b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo"], b"hello"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\nhel", b"lo"], b"hello"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"], b"hello"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello and what nobody announced"], b"hello"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"], b""),
    ],
    ids=[
        "whole",
        "in pieces",
        "chunks",
        "until its end",
        "not in chunks",
        "after a 100",
        "more than announced",
        "empty",
    ],
)
async def test_every_framing_is_read_to_its_end(pieces, body):
    async with asked(saying(*pieces)) as answer:
        assert (answer.status, answer.reason) == (200, "OK")
        assert await body_of(answer) == body
        assert "X-Trailer" not in answer.headers


@pytest.mark.parametrize(
    "status", [b"204 No Content", b"304 Not Modified", b"200 OK"], ids=["204", "304", "HEAD"]
)
async def test_an_answer_without_a_body_ends_with_its_head(status):
    said = b"HTTP/1.1 " + status + b"\r\nContent-Length: 5\r\n\r\n"
    async with asked(saying(said), bodiless=status.startswith(b"200")) as answer:
        assert answer.content_length == 5
        assert await body_of(answer) == b""


async def test_a_head_keeps_repeated_headers_their_order_and_their_bytes():
    fields = b"A: 1 \r\nB: \xff\xc3\xa4\r\na: 2\r\nContent-Type: Text/HTML; charset=x\r\n"
    said = b"HTTP/1.1 200 Fine so far\r\n" + fields + b"\r\n"
    async with asked(saying(said)) as answer:
        named = [(name, value.encode("utf-8", "surrogateescape")) for name, value in answer.headers.items()]
    assert named[:3] == [("A", b"1"), ("B", b"\xff\xc3\xa4"), ("a", b"2")]
    assert answer.reason == "Fine so far"
    assert answer.content_type == "text/html"
    assert answer.content_length is None


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 O",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES,
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
    ids=["nothing", "a part", "not HTTP", "no end", "only a 100"],
)
async def test_without_a_head_there_is_no_answer(said):
    with pytest.raises(BrokenOff):
        async with asked(saying(said)):
            pass


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel",
        CHUNKED + b"3\r\nhel\r\n",
        CHUNKED + b"3\r\nhel\r\nnot a length\r\n",
    ],
    ids=["length", "chunks", "not HTTP"],
)
async def test_a_body_that_breaks_off_is_read_as_far_as_it_came_and_never_looks_whole(said):
    async with asked(saying(said)) as answer:
        assert await answer.read() == b"hel"
        for _ in range(2):
            with pytest.raises(BrokenOff):
                await answer.read()
    taken: list[bytes] = []
    async with asked(saying(said)) as answer:
        with pytest.raises(UpstreamFault):
            await copy(answer, lambda _: True, never, taken.append)
    assert b"".join(taken) == b"hel"


async def never(_: bytes) -> None:
    raise AssertionError("what was put need not be written")


async def test_bytes_that_cannot_be_put_are_written_in_order_and_what_comes_meanwhile_follows():
    events = [b"event %d\n\n" % number for number in range(20)]
    out: list[bytes] = []

    def put(piece: bytes) -> bool:
        if len(out) % 3 == 1:
            return False
        out.append(piece)
        return True

    async def write(piece: bytes) -> None:
        await asyncio.sleep(0.03)
        out.append(piece)

    seen: list[bytes] = []
    pieces = (b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    async with asked(saying(CHUNKED, *pieces, b"0\r\n\r\n")) as answer:
        await copy(
            answer, put, write, seen.append, [lambda piece: piece.replace(b"event", b"EVENT")], read=b""
        )
    assert b"".join(seen) == b"".join(events)
    assert b"".join(out) == b"".join(events).replace(b"event", b"EVENT")


async def test_an_error_of_the_client_ends_the_copy_and_the_connection():
    def put(_: bytes) -> bool:
        raise ConnectionResetError("the client is gone")

    ended = asyncio.Event()

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"3\r\nhel\r\n")
        with suppress(ConnectionError):
            await reader.read()
        ended.set()

    async with asked(say) as answer:
        with pytest.raises(ConnectionResetError, match="the client is gone"):
            await copy(answer, put, never, lambda _: None)
    async with asyncio.timeout(PATIENCE):
        await ended.wait()


async def test_an_engine_waits_while_its_answer_is_not_read():
    total, sent = 64 * READ_AHEAD, 0

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(bytes(READ_AHEAD))
            sent += READ_AHEAD
            await writer.drain()

    async with asked(say) as answer:
        before = -1
        while before != sent:  # until it waits
            before = sent
            await asyncio.sleep(0.1)
        assert sent < total
        assert len(await answer.read()) < 4 * READ_AHEAD
        assert len(await body_of(answer)) > total / 2


# -- requests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "origin"),
    [
        ("http://engine:8080", Origin("engine", 8080, tls=False, named="engine:8080", path="", auth=None)),
        ("http://engine", Origin("engine", 80, tls=False, named="engine", path="", auth=None)),
        ("https://engine/llm", Origin("engine", 443, tls=True, named="engine", path="/llm", auth=None)),
        ("http://[::1]:80", Origin("::1", 80, tls=False, named="[::1]", path="", auth=None)),
        (
            "http://me:p%40ss@engine:1",
            Origin("engine", 1, tls=False, named="engine:1", path="", auth="Basic bWU6cEBzcw=="),
        ),
    ],
)
def test_the_url_of_an_engine_says_where_and_as_whom_it_is_asked(base, origin):
    assert Origin.of(base) == origin
    assert origin.is_address == (origin.host == "::1")


async def heard(base: str, path: str, method: str, headers: CIMultiDict[str], body: bytes | None) -> bytes:
    """Return the bytes of a request as the engine gets them. `base` has a {} for the port."""
    got = bytearray()

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readuntil(b"\r\n\r\n"))
        if body:
            got.extend(await reader.readexactly(len(body)))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with server(say) as port, asyncio.timeout(PATIENCE):
        answer = await Upstream("me")._sent(base.format(port), path, headers, method=method, body=body)
        answer.close()
    return bytes(got)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_request_has_its_path_and_headers_byte_for_byte(host):
    headers = CIMultiDict({"X-Text": "\udcff\u00e4", "Content-Length": "4"})
    got = await heard(f"http://{host}:{{}}/llm", "/v1/a%20b?c=%23#part", "POST", headers, b"body")
    lines = got.split(b"\r\n")
    assert lines[0] == b"POST /llm/v1/a%20b?c=%23 HTTP/1.1"
    assert lines[1].startswith(b"Host: " + host.encode() + b":")
    assert b"X-Text: \xff\xc3\xa4" in lines
    assert b"Connection: close" in lines
    assert got.endswith(b"\r\n\r\nbody")


@pytest.mark.parametrize(("method", "counted"), [("POST", True), ("DELETE", True), ("GET", False)])
async def test_a_method_that_may_have_a_body_says_that_it_has_none(method, counted):
    got = await heard("http://127.0.0.1:{}", "/", method, CIMultiDict(), None)
    assert (b"Content-Length: 0" in got.split(b"\r\n")) == counted


async def test_a_large_body_arrives_whole():
    body = bytes(range(256)) * 4096
    headers = CIMultiDict({"Content-Length": str(len(body))})
    assert (await heard("http://127.0.0.1:{}", "/", "POST", headers, body)).endswith(body)


@pytest.mark.parametrize("value", ["a\nb", "a\r\nX: b", "a\0b"])
async def test_a_header_that_would_be_two_is_refused(value):
    with pytest.raises(ClientFault, match="line break"):
        await Upstream("me")._sent("http://127.0.0.1:9", "/", CIMultiDict({"X": value}))


@pytest.mark.parametrize("host", ["127.0.0.1:9", "no-such-host.invalid:80", "." * 70 + ":80"])
async def test_without_a_connection_nothing_was_sent(host):
    with pytest.raises(NotSent, match="does not accept connections"):
        await Upstream("me")._sent(f"http://{host}", "/", CIMultiDict())


async def test_an_answer_that_does_not_come_in_time_is_a_fault():
    async def say(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with server(say) as port:
        with pytest.raises(UpstreamFault, match="did not answer within"):
            await Upstream("me").look(f"http://127.0.0.1:{port}", "/props", CIMultiDict(), seconds=0.1)


async def test_the_headers_of_a_client_reach_the_engine_once():
    request = make_mocked_request("GET", "/", headers={"Authorization": "Bearer k", "Host": "us"})
    assert "Host" not in Upstream("me").outgoing(request, None, "id")
