"""Connections to an engine: sends it requests, and copies the bytes of its answers back unchanged.

llama-server answers a bad key at once and closes the connection with the upload unread. The next write then
fails, and asyncio and uvloop close a connection at a failed write, although the answer may still be in the
socket. So we read the answer before we close the connection.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from slotkeeper.api import head as names
from slotkeeper.api.errors import ClientFault, UpstreamFault
from slotkeeper.api.head import forwardable
from slotkeeper.engine.answers import NO_DESCRIPTOR, EngineFrozenError, Health
from slotkeeper.engine.client import LOOP_STATUS, EngineAddress
from slotkeeper.runtime.link import EngineLink

PIECE: Final = 64 * 1024


class Connector(aiohttp.TCPConnector):
    """Makes connections that deliver all received bytes before they report that they are lost."""

    @property
    def force_close(self) -> bool:
        """Keep aiohttp from adding a Connection header, for which there may be no room: `_name_hop` adds it.

        The connections are closed after one request all the same.
        """
        return False

    async def connect(self, *args: Any, **kwargs: Any) -> aiohttp.connector.Connection:
        connection = await super().connect(*args, **kwargs)
        transport, handler = connection.transport, connection.protocol
        if transport is not None and handler is not None and not transport.get_extra_info("sslcontext"):
            transport.set_protocol(_ToTheEnd(handler, transport))
        return connection


class _ToTheEnd(asyncio.Protocol):
    """A protocol between a transport and its original protocol, which reads the socket to its end."""

    def __init__(self, handler: asyncio.Protocol, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.data_received = handler.data_received  # type: ignore[method-assign]  # called for every chunk
        self.eof_received = handler.eof_received  # type: ignore[method-assign]
        self.pause_writing = handler.pause_writing  # type: ignore[method-assign]
        self.resume_writing = handler.resume_writing  # type: ignore[method-assign]
        self._lost = handler.connection_lost

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and (left := _unread(self._transport)):
            self.data_received(left)
        self._lost(exc)


def _unread(transport: asyncio.Transport) -> bytes:
    """Read what the socket has received: it is non-blocking, and closed only after `connection_lost`."""
    pieces = []
    with suppress(OSError):
        plug = transport.get_extra_info("socket").fileno()
        while piece := os.read(plug, PIECE):
            pieces.append(piece)
    return b"".join(pieces)


# -- requests and answers --------------------------------------------------------------------------------

CONNECT_SECONDS: Final = 5.0
RETRY_AFTER: Final = 2  # seconds: a llama-server that is starting or restarting
NO_LIMIT: Final = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
CHUNK: Final = 64 * 1024
CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# Our own headers are not forwarded. aiohttp frames the body itself.
NOT_SENT: Final = (
    "host",
    "content-length",
    "expect",
    names.STREAM_ID,  # `send` adds what the engine gets of it
    names.BYPASS,
    names.CONVERSATION,
    names.PRIORITY,
    names.MAX_WAIT,
)
MOST_HEADERS: Final = 100  # that llama-server takes in one request (CPPHTTPLIB_HEADER_MAX_COUNT)
ALWAYS_SENT: Final = 1  # Host, which aiohttp adds
OF_HOP: Final = (names.HOPS, "Connection")  # added to each request, if there is room
# Our own headers that are left out first if the client sends nearly as many as the engine takes.
LESS_NEEDED: Final = (
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "X-Forwarded-For",
    names.TRACE_PARENT,
    names.REQUEST_ID,
)
GONE: Final = (ConnectionResetError, aiohttp.ClientConnectionResetError, BrokenPipeError)
BROKEN: Final = (aiohttp.ClientError, TimeoutError, OSError)
EVENT_STREAM: Final = "text/event-stream"
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
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=Connector(limit=0, force_close=True, ttl_dns_cache=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=CHUNK,
            max_line_size=CHUNK,
            max_field_size=CHUNK,
        )

    async def close(self) -> None:
        await self._session.close()

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
    ) -> aiohttp.ClientResponse:
        """Forward a request. Raises UpstreamFault if the engine cannot be reached or closes the connection.

        `trace_parent` names our own span; without it the client's header is forwarded. `held`: a router must
        not load a model for the request. `stream_ids`: the values of X-Conversation-Id. `path`, with a query,
        takes the place of the client's.
        """
        wanted = target(request) if path is None else path
        url = URL(address.base + address.passed_on(wanted, held=held), encoded=True)
        headers = self.outgoing(request, body, request_id, trace_parent=trace_parent, stream_ids=stream_ids)
        return await self._sent(address.base, url, headers, method=request.method, body=body)

    async def post(
        self, base: str, path: str, body: bytes, request: web.BaseRequest, request_id: str
    ) -> aiohttp.ClientResponse:
        """Send `body` with the headers of `request`, in its place. Raises as `send` does."""
        headers = self.outgoing(request, body, request_id)
        return await self._sent(base, URL(base + path, encoded=True), headers, method="POST", body=body)

    async def look(
        self, base: str, path: str, headers: CIMultiDict[str], *, seconds: float
    ) -> aiohttp.ClientResponse:
        """Send a GET with only these headers, for at most `seconds`. Raises as `send` does."""
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        return await self._sent(base, URL(base + path, encoded=True), headers, limit=limit)

    async def _sent(
        self,
        base: str,
        url: URL,
        headers: CIMultiDict[str],
        *,
        method: str = "GET",
        body: bytes | None = None,
        limit: aiohttp.ClientTimeout = NO_LIMIT,
    ) -> aiohttp.ClientResponse:
        _name_hop(headers, self.name)
        # A large body is a stream, so that its upload does not block the event loop. And aiohttp pauses
        # between two pieces: so a connection that a write has broken is read to its end before the next write
        # fails (`Connector`).
        data = BytesIO(body) if body and len(body) > CHUNK else body or None
        try:
            return await self._session.request(
                method,
                url,
                headers=headers,
                data=data,
                allow_redirects=False,
                timeout=limit,
            )
        except aiohttp.ClientConnectorError as error:
            raise NotSent(_why_not(base, error), status=503, retry_after=RETRY_AFTER) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise NotSent(
                f"the engine at {base} did not accept a connection within {CONNECT_SECONDS:g} s; "
                "is its machine there, and its process running?",
                status=504,
                retry_after=RETRY_AFTER,
            ) from error
        except BROKEN as error:
            raise UpstreamFault(
                f"the engine at {base} closed the connection without an answer", retry_after=RETRY_AFTER
            ) from error


def _why_not(base: str, error: OSError) -> str:
    """Return a sentence that says why there is no connection to an engine."""
    if error.errno in NO_DESCRIPTOR:
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


def prepared(answer: aiohttp.ClientResponse, request_id: str) -> web.StreamResponse:
    """Return the head for the client: the engine's, without hop-by-hop headers.

    Raises UpstreamFault for a control character: aiohttp accepts some that it must not write.
    """
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in forwardable(answer.headers.items()):
        if CONTROL.search(value):
            raise UpstreamFault(f"the engine's answer has a control character in its header {name}")
        response.headers.add(name, value)
    response.headers[names.REQUEST_ID] = request_id
    return response


def flows(answer: aiohttp.ClientResponse) -> bool:
    """Whether events may be added to and removed from this answer: uncompressed SSE without a length."""
    plain = "Content-Encoding" not in answer.headers and "Content-Length" not in answer.headers
    return plain and answer.content_type == EVENT_STREAM


async def copy(
    answer: aiohttp.ClientResponse,
    write: Callable[[bytes], Awaitable[None]],
    seen: Callable[[bytes], None],
    through: Sequence[Callable[[bytes], bytes]] = (),
    *,
    read: bytes = b"",
) -> None:
    """Copy every chunk: `write` gets what the functions of `through` leave of it, then `seen` all of it.

    `read` are bytes of the answer that were read before. Raises UpstreamFault if the engine breaks off, and
    GONE errors if the client does.
    """
    while chunk := read or await _next(answer):
        passing = chunk
        for step in through:
            passing = step(passing)
        if passing:
            await write(passing)
        seen(chunk)
        read = b""


async def whole(answer: aiohttp.ClientResponse, seen: Callable[[bytes], None]) -> bytes:
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
    async def of(cls, answer: aiohttp.ClientResponse) -> UpstreamAnswer:
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


async def _next(answer: aiohttp.ClientResponse) -> bytes:
    """Return the next bytes as they arrive; empty at the end. Raises UpstreamFault."""
    try:
        return await answer.content.readany()
    except BROKEN as error:
        raise UpstreamFault("the engine broke off in the middle of its answer") from error


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
