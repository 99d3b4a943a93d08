"""Sending one control call to an engine and reading its answer: connections, time limits, errors.

Over a connector of its own, so that a busy data plane cannot starve it.
Which calls there are is said in `client`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from io import BytesIO
from typing import Any, Final

import aiohttp
import orjson

from slotkeeper.engine.errors import EngineError, EngineFrozenError, EngineGoneError, EngineSilentError
from slotkeeper.wire.headers import AUTH

CONNECT_SECONDS: Final = 5.0
BRIEF_SECONDS: Final = 5.0  # a call this short is not watched
KEEP_SECONDS: Final = 4.0  # llama-server closes an idle connection after 5
CONNECTIONS: Final = 16  # idle work and control calls of all slots; llama-server keeps np + 4 threads
NO_ROUTE: Final = frozenset({404, 405, 410, 501})

Headers = Mapping[str, str]


def within(seconds: float | None) -> aiohttp.ClientTimeout:
    """A time limit for a whole call; None = as long as it takes."""
    return aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)


class Pulse:
    """When one engine was last heard of, and all that waits for it, to be broken off once it is frozen.

    So no call needs a time limit of its own: a prefill may take an hour, as long as its engine is alive.
    """

    def __init__(self) -> None:
        self.heard_at = time.monotonic()
        self.frozen = False
        self._waiting: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"<Pulse {'frozen' if self.frozen else 'alive'}, {len(self._waiting)} wait>"

    def heard(self) -> None:
        """It has said something, to whomever: a token, the progress of a prefill, an answer."""
        self.heard_at = time.monotonic()

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[None]:
        """Around what waits for the engine. Raises EngineFrozenError, at once where it is frozen already."""
        if self.frozen:
            raise EngineFrozenError
        try:
            async with asyncio.timeout(None) as limit:
                self._waiting.add(limit)
                try:
                    yield
                finally:
                    self._waiting.discard(limit)
        except TimeoutError as error:
            if limit.expired():
                raise EngineFrozenError from error
            raise

    def stop(self) -> None:
        """It is frozen: break off all that waits for it."""
        self.frozen, now = True, asyncio.get_running_loop().time()
        for limit in self._waiting:
            limit.reschedule(now)


class EngineHttp:
    """One engine's address and key, and the connections to it. `close` it."""

    def __init__(self, base: str, *, api_key: str | None = None, pulse: Pulse | None = None) -> None:
        self.base = base.rstrip("/")
        self.pulse = pulse or Pulse()
        self._own = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"{self.base}{' with key' if self._own else ''}"

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def json(
        self,
        method: str,
        path: str,
        *,
        limits: aiohttp.ClientTimeout,
        headers: Headers | None = None,
        body: Mapping[str, Any] | None = None,
        once: bool = False,
    ) -> Any:
        """The document that the engine answers; arguments and errors as for `ask`."""
        async with self.ask(method, path, limits=limits, headers=headers, body=body, once=once) as response:
            data = await response.read()
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise EngineError(response.status, f"{path}: not JSON", foreign=True) from error

    @asynccontextmanager
    async def ask(
        self,
        method: str,
        path: str,
        *,
        limits: aiohttp.ClientTimeout,
        headers: Headers | None = None,
        body: Mapping[str, Any] | None = None,
        once: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 200; leaving before its end closes the connection.

        With `headers` that hold a credential our own key stays away: the engine would read one of the two.
        `once`: never sent a second time, whatever happens to the connection.
        Raises EngineError for every other status, EngineGoneError when there is no answer.
        """
        brief = limits.total is not None and limits.total <= BRIEF_SECONDS
        async with (
            nullcontext() if brief else self.pulse.answer(),
            self._asked(method, path, limits=limits, headers=headers, body=body, once=once) as response,
        ):
            yield response

    @asynccontextmanager
    async def _asked(
        self,
        method: str,
        path: str,
        *,
        limits: aiohttp.ClientTimeout,
        headers: Headers | None,
        body: Mapping[str, Any] | None,
        once: bool,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = orjson.dumps(body) if body is not None else None
        own = {} if any(name in AUTH for name in headers or ()) else self._own
        headers = {**own, **(headers or {})}

        async def send(session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
            stream = BytesIO(data) if data is not None else None  # aiohttp warns of bytes above 1 MiB
            return await session.request(
                method, self.base + path, data=stream, headers=headers, timeout=limits
            )

        try:
            async with self._connected(once) as session:
                try:
                    response = await send(session)
                except aiohttp.ClientConnectorError:
                    raise
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    if once:
                        raise
                    response = await send(session)  # it had closed an idle connection
                async with response:
                    if response.status != 200:
                        raise _refusal(response.status, await response.read())
                    yield response
        except TimeoutError as error:  # before the others: aiohttp's are both
            raise EngineSilentError(f"{self.base}{path}: {error!r}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineGoneError(f"{self.base}{path}: {error!r}") from error

    @asynccontextmanager
    async def _connected(self, once: bool) -> AsyncIterator[aiohttp.ClientSession]:
        """The session with its idle connections; for what is sent once, a connection that never was idle.

        The engine may close an idle one in the moment that we send, and then its state is unknown.
        """
        if once:
            async with self._new_session() as session:
                yield session
        else:
            if self._session is None:  # made at the first call because it belongs to the running loop
                self._session = self._new_session()
            yield self._session

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=KEEP_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Content-Type": "application/json"},
        )


def _refusal(status: int, data: bytes) -> EngineError:
    """A proxy in front may refuse for the engine; but what has no such route at all is none."""
    return EngineError(status, message_in(data), foreign=status in NO_ROUTE and _own_message(data) is None)


def message_in(data: bytes) -> str:
    """The text of an error body, whatever its shape; a page for browsers is not quoted."""
    own = _own_message(data)
    if own is not None:
        return own
    return "a page of HTML" if is_markup(data) else data[:200].decode(errors="replace")


def is_markup(data: bytes) -> bool:
    return data.lstrip().startswith(b"<")


def _own_message(data: bytes) -> str | None:
    """In llama-server's shape; None in any other."""
    try:
        return str(orjson.loads(data)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
