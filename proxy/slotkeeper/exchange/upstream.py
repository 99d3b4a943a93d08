"""Sending bytes to an engine and copying its answer back, chunk by chunk, changing nothing.

llama-server refuses a bad key, answers and closes with the upload unread. What is written to it then fails,
and asyncio and uvloop close a connection whose write failed at once, though the answer may still lie in the
socket. So the answer is read before the connection is given up.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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
from slotkeeper.engine.answers import EngineFrozenError
from slotkeeper.engine.http import EngineAddress
from slotkeeper.runtime.link import EngineLink

PIECE: Final = 64 * 1024


class Connector(aiohttp.TCPConnector):
    """Its connections hand over all that was received before they report that they are lost."""

    async def connect(self, *args: Any, **kwargs: Any) -> aiohttp.connector.Connection:
        connection = await super().connect(*args, **kwargs)
        transport, handler = connection.transport, connection.protocol
        if transport is not None and handler is not None and not transport.get_extra_info("sslcontext"):
            transport.set_protocol(_ToTheEnd(handler, transport))
        return connection


class _ToTheEnd(asyncio.Protocol):
    """Between a transport and the protocol that was its own."""

    def __init__(self, handler: asyncio.Protocol, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.data_received = handler.data_received  # type: ignore[method-assign]  # of every chunk
        self.eof_received = handler.eof_received  # type: ignore[method-assign]
        self.pause_writing = handler.pause_writing  # type: ignore[method-assign]
        self.resume_writing = handler.resume_writing  # type: ignore[method-assign]
        self._lost = handler.connection_lost

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and (left := _unread(self._transport)):
            self.data_received(left)
        self._lost(exc)


def _unread(transport: asyncio.Transport) -> bytes:
    """What was received, and not read: the socket is closed after `connection_lost`, and does not block."""
    pieces = []
    with suppress(OSError):
        plug = transport.get_extra_info("socket").fileno()
        while piece := os.read(plug, PIECE):
            pieces.append(piece)
    return b"".join(pieces)


# -- there and back --------------------------------------------------------------------------------------

CONNECT_SECONDS: Final = 5.0
RETRY_AFTER: Final = 2  # seconds: a llama-server that is starting or restarting
NO_LIMIT: Final = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
CHUNK: Final = 64 * 1024
CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# Our own hints stay with us. aiohttp frames the body itself.
NOT_SENT: Final = (
    "host",
    "content-length",
    "expect",
    names.BYPASS,
    names.CONVERSATION,
    names.PRIORITY,
    names.MAX_WAIT,
)
GONE: Final = (ConnectionResetError, aiohttp.ClientConnectionResetError, BrokenPipeError)
BROKEN: Final = (aiohttp.ClientError, TimeoutError, OSError)
EVENT_STREAM: Final = "text/event-stream"
RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


class NotSent(UpstreamFault):
    """No connection, so no byte reached the engine: another one may have the request."""


class Upstream:
    """The data plane's client. One connection for each request.

    llama-server closes idle connections when it likes, and a POST that dies on a reused one may or
    may not have begun: it could neither be sent again nor given up. A fresh connection, as nginx
    makes by default, has no such doubt.
    """

    def __init__(self, name: str, auth: Mapping[str, str] | None = None) -> None:
        """`name`: of this sidecar, added to what it sends, so that it knows what comes back to it.

        `auth` goes out in place of clients' keys; None: theirs go on.
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

    def outgoing(self, request: web.BaseRequest, body: bytes | None, request_id: str) -> CIMultiDict[str]:
        """The headers with which this request goes on."""
        headers = outgoing(request, body, request_id)
        if self._auth is not None:
            for name in names.AUTH:
                headers.popall(name, None)
            headers.update(self._auth)
        return headers

    async def send(
        self,
        address: EngineAddress,
        request: web.BaseRequest,
        body: bytes | None,
        request_id: str,
        *,
        trace_parent: str | None = None,
        held: bool = True,
    ) -> aiohttp.ClientResponse:
        """Forward a request. Raises UpstreamFault when the engine cannot be reached or hangs up.

        `trace_parent` names our own span; without one the client's goes on. `held`: a router is not to load
        a model for it.
        """
        url = URL(address.base + address.passed_on(target(request), held=held), encoded=True)
        headers = self.outgoing(request, body, request_id)
        if trace_parent is not None:
            headers[names.TRACE_PARENT] = trace_parent
        return await self._sent(address.base, url, headers, method=request.method, body=body)

    async def post(
        self, base: str, path: str, body: bytes, request: web.BaseRequest, request_id: str
    ) -> aiohttp.ClientResponse:
        """Send this in place of the request, with its headers. Raises as `send` does."""
        headers = self.outgoing(request, body, request_id)
        return await self._sent(base, URL(base + path, encoded=True), headers, method="POST", body=body)

    async def look(
        self, base: str, path: str, headers: CIMultiDict[str], *, seconds: float
    ) -> aiohttp.ClientResponse:
        """GET something of the engine's with these headers and no others. Raises as `send` does."""
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
        headers[names.HOPS] = ", ".join([*names.hops(headers.popall(names.HOPS, [])), self.name])
        try:
            return await self._session.request(
                method,
                url,
                headers=headers,
                data=_framed(body) if body else None,
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
    """In a sentence, why there is no connection to an engine."""
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return (
            f"no file descriptor is left for a connection to the engine at {base}; "
            "let Slotkeeper have more open files (ulimit -n)"
        )
    return f"the engine at {base} does not accept connections; is llama-server running there?"


@asynccontextmanager
async def answering(link: EngineLink) -> AsyncIterator[None]:
    """Around all that waits for an engine. Raises UpstreamFault (504) when that is frozen."""
    try:
        async with link.pulse.answer():
            yield
    except EngineFrozenError as error:
        raise UpstreamFault(
            f"the engine at {link.address.base} has said nothing for {link.frozen_after:g} s, not even to "
            "GET /health (--engine-frozen-after); is its process stopped, or its machine out of memory?",
            status=504,
            retry_after=RETRY_AFTER,
        ) from error


def target(request: web.BaseRequest) -> str:
    """Path and query as the client wrote them, byte for byte.

    They are put behind the engine's address, so a target such as "@elsewhere/" must not get there.
    """
    path = request.raw_path
    if not path.startswith("/"):  # the absolute form, http://host/path, as one writes to a proxy
        path = str(request.rel_url)
    if not path.startswith("/"):
        raise ClientFault("the target of this request is not a path: begin it with /")
    return path


def _framed(body: bytes) -> bytes | BytesIO:
    """Large bodies in pieces, so that an upload does not hold the loop.

    Also because aiohttp pauses between two of them: a connection that a write has broken is then read to its
    end before the next write fails (`Connector`).
    """
    return body if len(body) <= CHUNK else BytesIO(body)


def outgoing(request: web.BaseRequest, body: bytes | None, request_id: str) -> CIMultiDict[str]:
    """The client's headers, less this hop's and our own, plus where it came from."""
    headers = CIMultiDict(forwardable(request.headers.items(), drop=NOT_SENT))
    headers[names.REQUEST_ID] = request_id
    if body:
        headers["Content-Length"] = str(len(body))
    if request.remote:
        known = headers.popall("X-Forwarded-For", [])
        headers["X-Forwarded-For"] = ", ".join([*known, request.remote])
    headers.setdefault("X-Forwarded-Proto", request.scheme)
    headers.setdefault("X-Forwarded-Host", request.host)
    return headers


def prepared(answer: aiohttp.ClientResponse, request_id: str) -> web.StreamResponse:
    """The head of the client's answer: the engine's own, less this hop's headers.

    Raises UpstreamFault for one that must not be written: aiohttp reads more than it writes.
    """
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in forwardable(answer.headers.items()):
        if CONTROL.search(value):
            raise UpstreamFault(f"the engine's answer has a control character in its header {name}")
        response.headers.add(name, value)
    response.headers[names.REQUEST_ID] = request_id
    return response


def flows(answer: aiohttp.ClientResponse) -> bool:
    """Whether lines may be put into this answer and taken out: plain events, of no stated length."""
    plain = "Content-Encoding" not in answer.headers and "Content-Length" not in answer.headers
    return plain and answer.content_type == EVENT_STREAM


async def copy(
    answer: aiohttp.ClientResponse,
    write: Callable[[bytes], Awaitable[None]],
    seen: Callable[[bytes], None],
    through: Callable[[bytes], bytes] = bytes,
    *,
    read: bytes = b"",
) -> None:
    """Every chunk as it comes, shown to `seen` after `write` had what `through` leaves of it.

    `read` was read of it before. Raises UpstreamFault when the engine breaks off, and GONE errors when the
    client does.
    """
    while chunk := read or await _next(answer):
        if passing := through(chunk):
            await write(passing)
        seen(chunk)
        read = b""


async def whole(answer: aiohttp.ClientResponse, seen: Callable[[bytes], None]) -> bytes:
    """All of an answer that is not copied. Raises UpstreamFault when the engine breaks off."""
    chunks = []
    while chunk := await _next(answer):
        chunks.append(chunk)
        seen(chunk)
    return b"".join(chunks)


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """A short one, whole, as it may be given to any number of clients."""

    status: int
    reason: str | None
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @classmethod
    async def of(cls, answer: aiohttp.ClientResponse) -> UpstreamAnswer:
        """Raises UpstreamFault when the engine breaks off."""
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
    """The next bytes, in whatever pieces they come; none at the end."""
    try:
        return await answer.content.readany()
    except BROKEN as error:
        raise UpstreamFault("the engine broke off in the middle of its answer") from error


def abort(request: web.BaseRequest) -> None:
    """Break the client's connection: a half answer must not look whole.

    With a reset, because an HTTP/1.0 client takes an ordinary end for the end of the body.
    """
    if request.transport is None:
        return
    plug = request.transport.get_extra_info("socket")
    if plug is not None:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    request.transport.abort()
