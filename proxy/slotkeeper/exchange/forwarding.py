"""Connections to an engine: sends it requests, and copies the bytes of its answers back unchanged.

The engine is trusted, and what it streams comes by the event, so this side reads HTTP/1.1 itself: bytes go
from the engine's socket to the client's without a task in between, as long as the client takes them.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import struct
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

from aiohappyeyeballs import start_connection
from aiohttp import ClientConnectionResetError, web
from httptools import HttpParserError, HttpResponseParser
from multidict import CIMultiDict

from slotkeeper.api import head as names
from slotkeeper.api.errors import ClientFault, UpstreamFault
from slotkeeper.api.head import forwardable
from slotkeeper.engine.answers import NO_DESCRIPTOR, EngineFrozenError, Health
from slotkeeper.engine.client import LOOP_STATUS, EngineAddress
from slotkeeper.runtime.link import EngineLink

CHUNK: Final = 64 * 1024
READ_AHEAD: Final = 2 * CHUNK  # bytes of an answer that wait for a slow client; then the engine has to wait
MAX_HEAD_BYTES: Final = 256 * 1024  # of an answer
WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})  # methods that need no Content-Length
EVENT_STREAM: Final = "text/event-stream"


Address = tuple[int, int, int, str, tuple[Any, ...]]  # as `getaddrinfo` returns it


class BrokenOff(Exception):  # noqa: N818 - a fact about the engine; our error for it is UpstreamFault
    """The engine closed the connection, or sent what is not HTTP, before the end of its answer."""


class EngineAnswer(asyncio.Protocol):
    """The answer to one request, which has a connection of its own.

    llama-server answers a bad key at once and closes the connection with the upload unread. The next write
    then fails, and asyncio and uvloop close a connection at a failed write, although the answer may still be
    in the socket. So the socket is read to its end when a connection is lost.
    """

    status = 0  # until the head has arrived
    reason = ""

    def __init__(self, *, bodiless: bool = False) -> None:
        """`bodiless`: the answer has a head only, whatever its Content-Length says."""
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._bodiless = bodiless
        self._parser = HttpResponseParser(self)
        # As aiohttp reads answers, and browsers: servers behind a gateway write all of these.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self._transport: asyncio.Transport | None = None
        self._head_bytes = 0
        self._has_head = self._ended = False
        self._delimited = True  # the body's length is known from the head, or it has chunks
        self._error: BaseException | None = None
        self._chunks: list[bytes] = []  # of the body, not taken yet
        self._kept = 0  # their bytes, while reading is paused or may be
        self._reading = self._writing = True  # neither is paused
        self._taker: Callable[[bytes], bool] | None = None  # gets the bytes as they arrive
        self._refused = False  # the last bytes did not fit the taker
        self._news: asyncio.Future[None] | None = None  # something has changed

    # -- the head ------------------------------------------------------------------------------------

    @property
    def content_type(self) -> str:
        """The media type without parameters, in lower case; empty if the answer names none."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def content_length(self) -> int | None:
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() else None

    async def ask(self, head: bytes, pieces: Iterator[bytes]) -> None:
        """Send a request and wait for the head of its answer, which may come before all is sent.

        Raises BrokenOff.
        """
        if self._transport is None:
            raise AssertionError("only a connection that is there can be asked")
        self._transport.write(head + next(pieces, b""))
        for piece in pieces:
            await asyncio.sleep(0)  # others are served between two pieces
            while not (self._writing or self._has_head or self._error):
                await self._changed()
            if self._has_head or self._error:
                break
            self._transport.write(piece)
        while not self._has_head:
            self._check()
            await self._changed()

    # -- the body ------------------------------------------------------------------------------------

    async def read(self) -> bytes:
        """Return the bytes that have arrived, or the next ones; empty at the end. Raises BrokenOff."""
        while not (self._chunks or self._ended):
            self._check()
            await self._changed()
        return self._arrived()

    async def deliver(self, take: Callable[[bytes], bool]) -> bool:
        """Give `take` all bytes as they arrive, until it returns False; return whether the body has ended.

        Raises BrokenOff, and what `take` raises.
        """
        self._refused = False
        if self._chunks:
            self._refused = not take(self._arrived())
        self._taker = take
        try:
            while not (self._refused or self._ended):
                self._check()
                await self._changed()
        finally:
            self._taker = None
        if self._refused:
            return False
        self._check()
        return True

    def _arrived(self) -> bytes:
        chunks, self._chunks, self._kept = self._chunks, [], 0
        if not self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _changed(self) -> None:
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, by which the engine learns that nobody waits for its answer any more."""
        if self._transport is not None:
            self._transport.abort()

    # -- the connection ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # of a socket

    def data_received(self, data: bytes) -> None:
        if self._ended or self._error:
            return
        self._parse(data)
        if self._taker is None:
            self._hold_back()
            self._wake()
            return
        if self._chunks:
            self._hand_over(self._taker)
        if self._ended or self._taker is None:
            self._wake()

    def _parse(self, data: bytes) -> None:
        self._head_bytes += 0 if self._has_head else len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserError:
            if not self._ended:  # what follows the end does not matter
                self._fail(BrokenOff("the engine sent what is not HTTP"))
        if not self._has_head and self._head_bytes > MAX_HEAD_BYTES:
            self._fail(BrokenOff("the head of the engine's answer has no end"))

    def _hold_back(self) -> None:
        """Let the engine wait if the client takes less than it sends."""
        if self._kept > READ_AHEAD and self._reading and self._transport and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def _hand_over(self, take: Callable[[bytes], bool]) -> None:
        try:
            self._refused = not take(self._arrived())
        except Exception as error:  # noqa: BLE001 - `deliver` raises it
            self._fail(error)
        if self._refused or self._error:
            self._taker = None

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self._transport and (left := _unread(self._transport)):
            self.data_received(left)
        if self._has_head and not self._delimited and exc is None and self._error is None:
            self._ended = True  # such a body ends with its connection
        elif not self._ended:
            self._fail(BrokenOff("the engine closed the connection"))
        self._wake()

    def pause_writing(self) -> None:
        self._writing = False

    def resume_writing(self) -> None:
        self._writing = True
        self._wake()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self.close()
        self._wake()

    # -- what the parser calls -----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._has_head:  # an answer of 100 may come first
            self.reason = ""
            self.headers.clear()

    def on_status(self, text: bytes) -> None:
        if not self._has_head:
            self.reason += _text(text)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # else a trailer
            self.headers.add(_text(name), _text(value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._has_head or status < 200:
            return
        self.status, self._has_head, self._ended = status, True, self._bodiless
        chunked = "chunked" in self.headers.get("Transfer-Encoding", "").lower()
        self._delimited = chunked or "Content-Length" in self.headers

    def on_body(self, data: bytes) -> None:
        if not self._ended:
            self._chunks.append(data)
            self._kept += len(data)

    def on_message_complete(self) -> None:
        self._ended = self._has_head


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _unread(transport: asyncio.Transport) -> bytes:
    """Read what the socket has received: it is non-blocking, and closed only after `connection_lost`."""
    pieces: list[bytes] = []
    if transport.get_extra_info("sslcontext"):
        return b""
    with suppress(OSError):
        plug = transport.get_extra_info("socket").fileno()
        while piece := os.read(plug, CHUNK):
            pieces.append(piece)
    return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class Origin:
    """A server, by the base URL that the user gave."""

    host: str
    port: int
    tls: bool
    named: str  # in the Host header
    path: str  # with which all its paths begin
    auth: str | None  # of a URL with user and password

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, base: str) -> Self:
        parts = urlsplit(base)
        host, tls = parts.hostname or "", parts.scheme == "https"
        bracketed = f"[{host}]" if ":" in host else host
        named = bracketed if parts.port in {None, 443 if tls else 80} else f"{bracketed}:{parts.port}"
        auth = None
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            auth = f"Basic {b64encode(pair.encode()).decode()}"
        return cls(host, parts.port or (443 if tls else 80), tls, named, parts.path, auth)

    @property
    def is_address(self) -> bool:
        with suppress(ValueError):
            return bool(ip_address(self.host.partition("%")[0]))
        return False


# -- requests and answers --------------------------------------------------------------------------------

CONNECT_SECONDS: Final = 5.0
RETRY_AFTER: Final = 2  # seconds: a llama-server that is starting or restarting
ADDRESS_SECONDS: Final = 60.0  # for which the addresses of a host name are remembered
NEXT_ADDRESS_SECONDS: Final = 0.25  # after which the next address of a host name is tried as well (RFC 8305)
CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# Our own headers are not forwarded, and a body is framed anew.
NOT_SENT: Final = (
    "host",
    "content-length",
    "expect",
    names.STREAM_ID,  # `send` adds what the engine gets of it
    names.BYPASS,
    names.CONVERSATION,
    names.PRIORITY,
    names.PROGRESS,
    names.MAX_WAIT,
)
MOST_HEADERS: Final = 100  # that llama-server takes in one request (CPPHTTPLIB_HEADER_MAX_COUNT)
ALWAYS_SENT: Final = 1  # Host
OF_HOP: Final = (names.HOPS, "Connection")  # added to each request, if there is room
# Our own headers that are left out first if the client sends nearly as many as the engine takes.
LESS_NEEDED: Final = (
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "X-Forwarded-For",
    names.TRACE_PARENT,
    names.REQUEST_ID,
)
GONE: Final = (ConnectionResetError, ClientConnectionResetError, BrokenPipeError)
RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


IN_A_CIRCLE: Final = (
    "this request has come through this sidecar before: its --upstream leads back to it; "
    "point it at llama-server itself"
)


class NotSent(UpstreamFault):
    """There was no connection, so no byte reached the engine: another engine may get the request."""


class Upstream:
    """The HTTP client of the data port. It opens one connection for each request.

    llama-server closes idle connections at any time. If a POST fails on a reused connection, it may or may
    not have begun, so it could neither be sent again nor dropped. A new connection, which is also nginx's
    default, avoids that.
    """

    def __init__(self, name: str, auth: Mapping[str, str] | None = None) -> None:
        """`name` identifies this sidecar in the requests that it sends, so that it detects loops.

        `auth` replaces the clients' keys; None: their keys are forwarded.
        """
        self.name = name
        self._auth = auth
        self._addresses: dict[tuple[str, int], tuple[float, list[Address]]] = {}
        self._tls: ssl.SSLContext | None = None

    def outgoing(
        self,
        request: web.BaseRequest,
        body: bytes | None,
        request_id: str,
        *,
        trace_parent: str | None = None,
        stream_ids: Iterable[str] = (),
    ) -> CIMultiDict[str]:
        """Return the headers to forward, as `send` describes them.

        They are the client's without hop-by-hop headers and ours, with X-Forwarded-* added, but without those
        of ours that the engine would not take beside the client's own.
        """
        headers = CIMultiDict(forwardable(request.headers.items(), drop=NOT_SENT))
        headers[names.REQUEST_ID] = request_id
        if hops := names.hops(request.headers):
            headers[names.HOPS] = ", ".join(hops)
        if body:
            headers["Content-Length"] = str(len(body))
        if request.remote:
            known = headers.popall("X-Forwarded-For", [])
            headers["X-Forwarded-For"] = ", ".join([*known, request.remote])
        headers.setdefault("X-Forwarded-Proto", request.scheme)
        headers.setdefault("X-Forwarded-Host", request.host)
        if self._auth is not None:
            for name in names.AUTH:
                headers.popall(name, None)
            headers.update(self._auth)
        for stream_id in stream_ids:
            headers.add(names.STREAM_ID, stream_id)
        if trace_parent is not None:
            headers[names.TRACE_PARENT] = trace_parent
        return _fitting(headers, request)

    async def send(
        self,
        address: EngineAddress,
        request: web.BaseRequest,
        body: bytes | None,
        request_id: str,
        *,
        trace_parent: str | None = None,
        held: bool = True,
        stream_ids: Iterable[str] = (),
        path: str | None = None,
    ) -> EngineAnswer:
        """Forward a request. Raises UpstreamFault if the engine cannot be reached or closes the connection.

        `trace_parent` names our own span; without it the client's header is forwarded. `held`: a router must
        not load a model for the request. `stream_ids`: the values of X-Conversation-Id. `path`, with a query,
        takes the place of the client's.
        """
        wanted = target(request) if path is None else path
        headers = self.outgoing(request, body, request_id, trace_parent=trace_parent, stream_ids=stream_ids)
        passed = address.passed_on(wanted, held=held)
        return await self._sent(address.base, passed, headers, method=request.method, body=body)

    async def post(
        self, base: str, path: str, body: bytes, request: web.BaseRequest, request_id: str
    ) -> EngineAnswer:
        """Send `body` with the headers of `request`, in its place. Raises as `send` does."""
        headers = self.outgoing(request, body, request_id)
        return await self._sent(base, path, headers, method="POST", body=body)

    async def look(
        self, base: str, path: str, headers: CIMultiDict[str], *, seconds: float
    ) -> UpstreamAnswer:
        """Send a GET with only these headers, for at most `seconds`. Raises as `send` does."""
        try:
            async with asyncio.timeout(seconds), await self._sent(base, path, headers) as answer:
                return await UpstreamAnswer.of(answer)
        except TimeoutError as error:
            raise UpstreamFault(f"the engine at {base} did not answer within {seconds:g} s") from error

    async def _sent(
        self,
        base: str,
        path: str,
        headers: CIMultiDict[str],
        *,
        method: str = "GET",
        body: bytes | None = None,
    ) -> EngineAnswer:
        _name_hop(headers, self.name)
        origin = Origin.of(base)
        if not body and method not in WITHOUT_BODY:
            headers["Content-Length"] = "0"
        if origin.auth is not None:
            headers.setdefault("Authorization", origin.auth)
        head = _head(method, origin.path + path, origin.named, headers)
        answer = EngineAnswer(bodiless=method == "HEAD")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._connect(origin, answer)
        except TimeoutError as error:
            raise NotSent(
                f"the engine at {base} did not accept a connection within {CONNECT_SECONDS:g} s; "
                "is its machine there, and its process running?",
                status=504,
                retry_after=RETRY_AFTER,
            ) from error
        except (OSError, UnicodeError) as error:  # the latter for a name that no host can have
            raise NotSent(_why_not(base, error), status=503, retry_after=RETRY_AFTER) from error
        try:
            await answer.ask(head, _pieces(body or b""))
        except BrokenOff as error:
            raise UpstreamFault(
                f"the engine at {base} closed the connection without an answer", retry_after=RETRY_AFTER
            ) from error
        except BaseException:
            answer.close()
            raise
        return answer

    async def _connect(self, origin: Origin, answer: EngineAnswer) -> None:
        """Connect `answer` to the server. Raises OSError."""
        loop, tls = asyncio.get_running_loop(), None
        if origin.tls:
            tls = self._tls = self._tls or ssl.create_default_context()
        name = origin.host if tls else None
        found = [] if origin.is_address else await self._resolved(origin)
        if len(found) > 1:
            plug = await start_connection(found, happy_eyeballs_delay=NEXT_ADDRESS_SECONDS, interleave=1)
            await loop.create_connection(lambda: answer, sock=plug, ssl=tls, server_hostname=name)
            return
        host, port = found[0][4][:2] if found else (origin.host, origin.port)
        await loop.create_connection(lambda: answer, host, port, ssl=tls, server_hostname=name)

    async def _resolved(self, origin: Origin) -> list[Address]:
        """Return the addresses of a host name. Raises OSError."""
        loop, key = asyncio.get_running_loop(), (origin.host, origin.port)
        until, found = self._addresses.get(key, (0.0, []))
        if loop.time() >= until:
            found = list(await loop.getaddrinfo(*key, type=socket.SOCK_STREAM))
            self._addresses[key] = loop.time() + ADDRESS_SECONDS, found
        return found


def _head(method: str, path: str, host: str, headers: Mapping[str, str]) -> bytes:
    """Return the bytes of a request's head. Raises ClientFault for a value that would be more than one."""
    target = path.partition("#")[0]
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    text = "\n".join(lines)
    if text.count("\n") >= len(lines) or "\r" in text or "\0" in text:
        raise ClientFault("a header of this request has a line break, or a zero byte, within its value")
    return (text.replace("\n", "\r\n") + "\r\n\r\n").encode("utf-8", "surrogateescape")


def _pieces(body: bytes) -> Iterator[bytes]:
    """Divide a body: the upload of a large one must not block the event loop."""
    view = memoryview(body)
    return (bytes(view[start : start + CHUNK]) for start in range(0, len(body), CHUNK))


def _why_not(base: str, error: Exception) -> str:
    """Return a sentence that says why there is no connection to an engine."""
    if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
        return (
            f"no file descriptor is left for a connection to the engine at {base}; "
            "let Slotkeeper have more open files (ulimit -n)"
        )
    return f"the engine at {base} does not accept connections; is llama-server running there?"


@asynccontextmanager
async def answering(link: EngineLink) -> AsyncIterator[None]:
    """Run a block that waits for an engine. Raises UpstreamFault (504) if the engine is frozen.

    Also (508) if there is no engine but this sidecar itself, because a request may have no room for our name.
    """
    if link.health is Health.LOOP:
        raise UpstreamFault(IN_A_CIRCLE, status=LOOP_STATUS)
    try:
        async with link.pulse.answer():
            yield
    except EngineFrozenError as error:
        raise UpstreamFault(
            f"the engine at {link.address.base} has said nothing for {link.frozen_after:g} s, not even to "
            "GET /health; is its process stopped, or its machine out of memory?",
            status=504,
            retry_after=RETRY_AFTER,
        ) from error


def target(request: web.BaseRequest) -> str:
    """Return path and query byte for byte as the client wrote them. Raises ClientFault.

    They are appended to the engine's address, so a target such as "@elsewhere/" must be refused.
    """
    path = request.raw_path
    if not path.startswith("/"):  # the absolute form, http://host/path, as for a proxy
        path = str(request.rel_url)
    if not path.startswith("/"):
        raise ClientFault("the target of this request is not a path: begin it with /")
    return path


def _fitting(headers: CIMultiDict[str], request: web.BaseRequest) -> CIMultiDict[str]:
    """Return the headers without those of ours that the engine would not take beside the client's own."""
    for name in LESS_NEEDED:
        if _room(headers) > len(OF_HOP):
            break
        if name not in request.headers:
            headers.popall(name, None)
    return headers


def _room(headers: CIMultiDict[str]) -> int:
    """Return how many more headers the engine takes in a request with these."""
    return MOST_HEADERS - ALWAYS_SENT - len(headers)


def _name_hop(headers: CIMultiDict[str], name: str) -> None:
    """Add this sidecar to those on the way; without room for that header, to the Connection header.

    The client may leave no room for either. Such a request goes no further in a circle either: each sidecar
    in it sees by its own requests that its engine is none (`Health.LOOP`).
    """
    hops = [*names.hops(headers), name]
    for each in OF_HOP:
        headers.popall(each, None)
    if _room(headers) >= len(OF_HOP):
        headers[names.HOPS] = ", ".join(hops)
        headers["Connection"] = "close"
    elif _room(headers):
        headers["Connection"] = ", ".join(["close", *(names.HOP_PREFIX + hop for hop in hops)])


def prepared(answer: EngineAnswer, request_id: str) -> web.StreamResponse:
    """Return the head for the client: the engine's, without hop-by-hop headers.

    Raises UpstreamFault for a control character: the parser accepts some that must not be written.
    """
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in forwardable(answer.headers.items()):
        if CONTROL.search(value):
            raise UpstreamFault(f"the engine's answer has a control character in its header {name}")
        response.headers.add(name, value)
    response.headers[names.REQUEST_ID] = request_id
    return response


def flows(answer: EngineAnswer) -> bool:
    """Whether events may be added to and removed from this answer: uncompressed SSE without a length."""
    plain = "Content-Encoding" not in answer.headers and "Content-Length" not in answer.headers
    return plain and answer.content_type == EVENT_STREAM


async def copy(
    answer: EngineAnswer,
    put: Callable[[bytes], bool],
    write: Callable[[bytes], Awaitable[None]],
    seen: Callable[[bytes], None],
    through: Sequence[Callable[[bytes], bytes]] = (),
    *,
    read: bytes = b"",
) -> None:
    """Copy every chunk: the client gets what the functions of `through` leave of it, then `seen` all of it.

    `put` writes bytes at once, or returns False, and then `write` waits until the client takes them. `read`
    are bytes of the answer that were read before. Raises UpstreamFault if the engine breaks off, and GONE
    errors if the client does.
    """
    chunk = passing = b""

    def take(arrived: bytes) -> bool:
        nonlocal chunk, passing
        chunk = passing = arrived
        for step in through:
            passing = step(passing)
        if passing and not put(passing):
            return False
        seen(arrived)
        return True

    try:
        held_up = bool(read) and not take(read)
        while held_up or not await answer.deliver(take):
            await write(passing)
            seen(chunk)
            held_up = False
    except BrokenOff as error:
        raise _broken_off() from error


async def whole(answer: EngineAnswer, seen: Callable[[bytes], None]) -> bytes:
    """Read a whole answer that is not copied. Raises UpstreamFault if the engine breaks off."""
    chunks = []
    while chunk := await _next(answer):
        chunks.append(chunk)
        seen(chunk)
    return b"".join(chunks)


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """A short, whole answer that can be sent to any number of clients."""

    status: int
    reason: str | None
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @classmethod
    async def of(cls, answer: EngineAnswer) -> UpstreamAnswer:
        """Read an answer. Raises UpstreamFault if the engine breaks off."""
        body = await whole(answer, lambda _: None)
        kept = tuple(forwardable(answer.headers.items(), drop=("Content-Length",)))
        return cls(answer.status, answer.reason, kept, body)

    def response(self, request_id: str) -> web.Response:
        response = web.Response(status=self.status, reason=self.reason, body=self.body)
        for name in {name for name, _ in self.headers}:
            response.headers.popall(name, None)
        for name, value in self.headers:
            response.headers.add(name, value)
        response.headers[names.REQUEST_ID] = request_id
        return response


async def _next(answer: EngineAnswer) -> bytes:
    """Return the next bytes as they arrive; empty at the end. Raises UpstreamFault."""
    try:
        return await answer.read()
    except BrokenOff as error:
        raise _broken_off() from error


def _broken_off() -> UpstreamFault:
    return UpstreamFault("the engine broke off in the middle of its answer")


def abort(request: web.BaseRequest) -> None:
    """Reset the client's connection, so that an incomplete answer does not look complete.

    An HTTP/1.0 client takes a normal close for the end of the body.
    """
    if request.transport is None:
        return
    plug = request.transport.get_extra_info("socket")
    if plug is not None:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    request.transport.abort()
