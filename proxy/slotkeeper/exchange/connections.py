"""Client connections: limits in all and for one address, TLS, and log lines about malformed requests.

The HTTP server would log a traceback for every malformed request, so any client could fill the log. Here
they are counted, and logged once a minute. A client that opens connections and sends nothing, or a byte at a
time, must not use up the connections of other clients, nor the descriptors that the admin port, the engines
and the slot files need.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from slotkeeper.observe.log import Seldom, get_logger
from slotkeeper.observe.metrics import ConnectionCut, Metrics
from slotkeeper.runtime.tasks import Tasks

log = get_logger(__name__)


class TlsError(Exception):
    """The certificate or key file cannot be used; the message says what to do."""


class Tls:
    """A certificate and its SSL context for servers. The context stays; reloads apply to new connections."""

    def __init__(self, cert: Path, key: Path | None) -> None:
        """Load the files, both PEM; without `key` the key is in the certificate's file. Raises TlsError."""
        self._cert = cert
        self._key = key
        self.context = _context(cert, key)

    def reload(self) -> None:
        """Read the files again. Raises TlsError; then the old certificate stays in use."""
        _context(self._cert, self._key)  # a key that does not fit must not get into the context in use
        _load(self.context, self._cert, self._key)
        log.info("certificate_read", file=str(self._cert))


def _context(cert: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, cert, key)
    return context


def _load(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # no prompt for a password
    except ssl.SSLError as error:
        raise TlsError(
            f"{cert}{f' and {key}' if key else ''}: {error.reason or error}; it needs a certificate, "
            "followed by those between it and the root, and its key without a password, both as PEM"
        ) from None
    except OSError as error:
        raise TlsError(f"{_unread(cert, key)}: {error.strerror or error}") from None


def _unread(cert: Path, key: Path | None) -> Path:
    """Return the file that could not be read: ssl does not say which of the two it was."""
    try:
        cert.open("rb").close()
    except OSError:
        return cert
    return key or cert


# -- log lines of the HTTP server ------------------------------------------------------------------------


class Complaints(logging.Logger):
    """The `logger` of an HTTP server. It is outside the logging hierarchy and has no handlers."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(__name__)
        self._metrics = metrics
        self._seldom = Seldom(log)

    def debug(self, *args: Any, exc_info: Any = None, **_: Any) -> None:
        """Called when a client speaks another protocol from the start; all other messages are dropped."""
        if isinstance(exc_info, HttpProcessingError):
            self._malformed(exc_info, args)

    def exception(self, *args: Any, exc_info: Any = True, **_: Any) -> None:
        """Called when a client sends something malformed later; any other error is our own fault."""
        if isinstance(exc_info, HttpProcessingError):
            self._malformed(exc_info, args)
        else:
            log.error("connection_failed", exc_info=exc_info)

    def _malformed(self, error: HttpProcessingError, args: tuple[Any, ...]) -> None:
        """Count and log a malformed request. The error's text quotes the request, so it is not logged."""
        self._metrics.cut(ConnectionCut.MALFORMED)
        _, *clients = args
        self._seldom.warning(
            "malformed_request", error=type(error).__name__, client=clients[0] if clients else None
        )


# -- limits ----------------------------------------------------------------------------------------------

DESCRIPTORS: Final = 65_536  # enough for any use
RESERVE: Final = 256  # descriptors for everything but clients: engines, files, the admin port
LEAST: Final = 16  # connections that are always allowed, however few descriptors there are
SITE_BITS: Final = 64  # network bits of an IPv6 address: one host may own all addresses with this prefix
CLOSING_SECONDS: Final = 30.0  # for a client to read the last 64 KiB of an answer
LOOKS: Final = 4  # checks of all connections within the shortest deadline

Network = IPv4Network | IPv6Network


class Connections:
    """The client connections of one port. A protocol factory for `loop.create_server`."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        most: int,
        of_one: int,
        head_seconds: float,
        trusted: Sequence[Network] = (),
        tls: ssl.SSLContext | None = None,
        replaces: bool = False,
    ) -> None:
        """Set the limits: `most` connections in all, `of_one` from one address.

        `head_seconds` is the deadline for the first request's head. The limit `of_one` does not apply to
        `trusted` proxies, which speak for many clients. With `tls` a connection counts from before its
        handshake, and so does its deadline. If it `replaces`, a new connection is never refused at a limit:
        the connection that has been idle for longest is closed for it. That needs the middleware `attend`.
        """
        self._replaces = replaces
        self._tls = tls
        self._handshakes = Tasks(lambda error: log.error("connection_failed", exc_info=error))
        self._metrics = metrics
        self._most = most
        self._of_one = of_one
        self._head_seconds = head_seconds
        self._trusted = tuple(trusted)
        self._open: dict[asyncio.BaseProtocol, _Connection] = {}
        self._by_address: Counter[str] = Counter()
        self._seldom = Seldom(log)
        self._handlers: Callable[[], web.RequestHandler] | None = None
        self._next_look: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)

    def open(self, handlers: Callable[[], web.RequestHandler]) -> None:
        """Start to admit clients; `handlers` makes the request handler of each connection."""
        self._handlers = handlers
        self._look()

    async def close(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        await self._handshakes.close()

    def begun(self, handler: asyncio.BaseProtocol) -> None:
        """Note that the first head has arrived: from then on the server's keep-alive timeout is enough."""
        connection = self._open.get(handler)
        if connection is not None:
            connection.begun = True

    @web.middleware
    async def attend(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note the time of each request, so that `_make_room` finds connections that are idle."""
        connection = self._open.get(request.protocol)
        if connection is None:  # it has just been closed
            return await handler(request)
        connection.begun = connection.busy = True
        try:
            return await handler(request)
        finally:
            connection.busy, connection.since = False, asyncio.get_running_loop().time()

    def admit(self, connection: _Connection) -> None:
        """Admit a new connection, or abort it if a limit is reached."""
        refused = self._refused(connection.address)
        if refused is not None and self._replaces:
            self._make_room(connection.address if refused is ConnectionCut.ADDRESS else None)
            refused = None
        if refused is not None or self._handlers is None:
            self.cut(connection, refused or ConnectionCut.FULL)
            return
        handler = self._handlers()
        self._by_address[connection.address] += 1
        self._open[handler] = connection
        if self._tls is None:
            connection.let_in(handler)
            return
        try:
            plug = connection.taken()
        except OSError:
            self.left(connection, handler)
            self.cut(connection, ConnectionCut.FULL)
            return
        connection.next_handler = handler
        connection.shaking = shaking = self._handshakes.start(self._secure(connection, plug, self._tls))
        shaking.add_done_callback(lambda _: self._shaken(connection, handler, plug))

    async def _secure(self, connection: _Connection, plug: socket.socket, tls: ssl.SSLContext) -> None:
        """Do the TLS handshake; on success the connection is admitted by `connection_made`."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, plug, ssl=tls, ssl_handshake_timeout=self._head_seconds
            )
        except OSError:  # includes errors of ssl and timeouts
            self._metrics.cut(ConnectionCut.HANDSHAKE)
            self._seldom.warning(
                "connection_refused", why=ConnectionCut.HANDSHAKE.value, client=connection.address
            )

    def _shaken(self, connection: _Connection, handler: web.RequestHandler, plug: socket.socket) -> None:
        if connection.handler is None:
            self.left(connection, handler)
            plug.close()

    def _refused(self, address: str) -> ConnectionCut | None:
        """Return the limit that is reached for this address; None if there is room."""
        if len(self._open) >= self._most:
            return ConnectionCut.FULL
        if self._by_address[address] >= self._of_one and not is_in(address, self._trusted):
            return ConnectionCut.ADDRESS
        return None

    def _make_room(self, address: str | None) -> None:
        """Close the connection that has been idle for longest; without an idle one, the oldest busy one.

        With an `address`, one from there.
        """
        there = (item for item in self._open.items() if address in {None, item[1].address})
        handler, connection = min(there, key=lambda item: (item[1].busy, item[1].since))
        self.left(connection, handler)
        if connection.shaking is not None:
            connection.shaking.cancel()
        self.cut(connection, ConnectionCut.REPLACED)

    def left(self, connection: _Connection, handler: asyncio.BaseProtocol) -> None:
        if self._open.pop(handler, None) is not None:
            self._by_address[connection.address] -= 1
            if self._by_address[connection.address] <= 0:
                del self._by_address[connection.address]

    def cut(self, connection: _Connection, why: ConnectionCut) -> None:
        if connection.transport is not None:
            connection.transport.abort()
        self._metrics.cut(why)
        self._seldom.warning("connection_refused", why=why.value, client=connection.address)

    def _look(self) -> None:
        """Abort clients that sent no head in time, or that do not read the end of an answer; repeat."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in tuple(self._open.values()):
            if connection.handler is None:  # the handshake has its own deadline
                continue
            if connection.closing is not None:
                if now - connection.closing > CLOSING_SECONDS:
                    self.cut(connection, ConnectionCut.CLOSING)
            elif connection.transport is not None and connection.transport.is_closing():
                connection.closing = now
            elif not connection.begun and now - connection.since > self._head_seconds:
                self.cut(connection, ConnectionCut.HEAD)
        self._next_look = loop.call_later(self._head_seconds / LOOKS, self._look)


class _Connection(asyncio.Protocol):
    """One connection: sits between a transport and its handler, which exists once it is admitted."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.handler: web.RequestHandler | None = None
        self.transport: asyncio.Transport | None = None
        self.address = "?"
        self.since = 0.0  # loop time of its accept, or of the end of its last request (`attend`)
        self.begun = False
        self.busy = False  # a request is being answered (`attend`)
        self.shaking: asyncio.Task[None] | None = None  # its TLS handshake
        self.closing: float | None = None  # loop time at which it was first seen closing
        self.next_handler: web.RequestHandler | None = None  # the handler that waits for the handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self.next_handler is not None:
            self.let_in(self.next_handler)
            return
        self.address = site_of(transport.get_extra_info("peername"))
        self.since = asyncio.get_running_loop().time()
        self._connections.admit(self)

    def taken(self) -> socket.socket:
        """Return a copy of the socket and close the plain transport, which could read the TLS handshake.

        Raises OSError if there is no free descriptor.
        """
        if self.transport is None:
            raise AssertionError("only a connection that was accepted can be taken")
        try:
            plug: socket.socket = self.transport.get_extra_info("socket").dup()
        finally:
            self.transport.abort()  # closes the descriptor that was copied, and sends nothing to the client
        plug.setblocking(False)
        return plug

    def let_in(self, handler: web.RequestHandler) -> None:
        if self.transport is None:
            raise AssertionError("only a connection that is there can be let in")
        self.handler = handler
        self.data_received = handler.data_received  # type: ignore[method-assign]  # saves a call for each chunk
        self.eof_received = handler.eof_received  # type: ignore[method-assign]
        self.pause_writing = handler.pause_writing  # type: ignore[method-assign]
        self.resume_writing = handler.resume_writing  # type: ignore[method-assign]
        self.transport.set_protocol(self)  # else uvloop would keep the methods that it saw first
        handler.connection_made(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.handler is not None:
            self._connections.left(self, self.handler)
            self.handler.connection_lost(exc)


class Site(web.TCPSite):
    """A listening port whose connections are limited by a `Connections`."""

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, *, connections: Connections, backlog: int
    ) -> None:
        super().__init__(runner, host, port, backlog=backlog)
        self._connections = connections

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        server = self._runner.server
        if server is None:
            raise AssertionError("a runner is set up before its sites start")
        await web.BaseSite.start(self)
        self._server = await asyncio.get_running_loop().create_server(
            self._connections, self._host, self._port, backlog=self._backlog
        )
        self._connections.open(server)

    async def stop(self) -> None:
        await self._connections.close()
        await super().stop()


def site_of(peer: object) -> str:
    """Return the address by which connections are counted: for IPv6 the network, which one host may own."""
    host = str(peer[0]) if isinstance(peer, tuple) and peer else "?"
    if ":" not in host:
        return host
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # a header may hold anything
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ip_network((int(address), SITE_BITS), strict=False).network_address)


def is_in(address: str, networks: Sequence[Network]) -> bool:
    """Whether the address is in any of the networks."""
    if not networks:
        return False
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return any(found in network for network in networks)


def asker(request: web.BaseRequest, trusted: Sequence[Network]) -> str:
    """Return the client's address: the last hop that is no trusted proxy. X-Forwarded-For names the hops."""
    client = request.remote or "?"
    if trusted and is_in(client, trusted):
        named = ",".join(request.headers.getall("X-Forwarded-For", [])).split(",")
        hops = [*filter(None, map(str.strip, named)), client]
        client = next((address for address in reversed(hops) if not is_in(address, trusted)), hops[0])
    return site_of((client,))


def room_for(most: int, descriptors: int) -> int:
    """Return how many client connections fit beside everything else that needs a descriptor."""
    return min(most, max(LEAST, descriptors - RESERVE))
