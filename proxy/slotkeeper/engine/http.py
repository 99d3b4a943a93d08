"""Sending one control call to an engine and reading its answer: connections, time limits, errors.

Over a connector of its own, so that a busy data plane cannot starve it.
Which calls there are is said in `client`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp
import orjson

from slotkeeper.api.head import AUTH
from slotkeeper.engine.answers import EngineError, EngineFrozenError, EngineGoneError, EngineSilentError
from slotkeeper.scheduler.types import NO_ROUTER, EngineId, ModelName

CONNECT_SECONDS: Final = 5.0
BRIEF_SECONDS: Final = 5.0
KEEP_SECONDS: Final = 4.0  # llama-server closes an idle connection after 5
NO_ROUTE: Final = frozenset({404, 405, 410, 501})

Headers = Mapping[str, str]

# -- where: a server of its own, or one model of a router ----------------------------------------------------
# A router finds the model in the body of a POST and in the query of a GET, and would load any that is named,
# evicting another. So every call of ours says `autoload=false` (engine.md 13).

NO_AUTOLOAD: Final = "autoload=false"
_MARK: Final = "#"  # no base URL has a fragment


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A base URL, and which model is meant there."""

    base: str
    model: ModelName = NO_ROUTER

    @classmethod
    def of(cls, engine: str) -> Self:
        base, _, model = engine.partition(_MARK)
        return cls(base.rstrip("/"), ModelName(model))

    @property
    def engine(self) -> EngineId:
        return EngineId(f"{self.base}{_MARK}{self.model}" if self.model else self.base)

    def url(self, method: str, path: str) -> str:
        """Of a control call."""
        if not self.model:
            return self.base + path
        named = f"model={quote(self.model, safe='')}&" if method == "GET" else ""
        return f"{self.base}{path}{'&' if '?' in path else '?'}{named}{NO_AUTOLOAD}"

    def body(self, method: str, body: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Of a control call, with the model that it is for."""
        if not self.model or method == "GET":
            return body
        return {**(body or {}), "model": self.model}

    def passed_on(self, target: str, *, held: bool) -> str:
        """Path and query with which a client's request goes on; `held`: its model is loaded, as we know."""
        if not self.model or not held:
            return target
        return f"{target}{'&' if '?' in target else '?'}{NO_AUTOLOAD}"


# -- what ------------------------------------------------------------------------------------------------


class CallKind(Enum):
    """What a control call asks for. Only a task changes the engine's state."""

    BRIEF = "brief"  # answered at once, so a frozen engine needs no other sign
    TEXT = "text"  # megabytes to tokenize
    TASK = "task"  # waits in the engine's queue


# llama-server has np + 4 threads for connections, and an idle connection keeps one until it is closed. Idle
# connections that are used in turn are never closed: sixteen of them once kept all threads, and no new
# connection was served any more (docs/engine.md 1.1). So few are kept; other calls open and close their own.
KEPT: Final = 2
TEXTS: Final = 16  # connections for texts beside those; any other call has one


@dataclass(frozen=True, slots=True)
class CallLimits:
    """`seconds` is for a whole call; None: as long as it takes."""

    kind: CallKind
    seconds: float | None

    @property
    def timeout(self) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=self.seconds, sock_connect=CONNECT_SECONDS)


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

    @property
    def busy(self) -> bool:
        """Whether anything waits for it."""
        return bool(self._waiting)

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
        self.address = EngineAddress.of(base)
        self.base = self.address.base
        self.pulse = pulse or Pulse()
        self._own = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._sessions: dict[CallKind | None, aiohttp.ClientSession] = {}
        self._kept_in_use = 0
        self.calls = 0  # under way

    def __repr__(self) -> str:
        return f"{self.address.engine}{' with key' if self._own else ''}"

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def json(
        self,
        method: str,
        path: str,
        *,
        limits: CallLimits,
        headers: Headers | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        """The document that the engine answers; arguments and errors as for `ask`."""
        async with self.ask(method, path, limits=limits, headers=headers, body=body) as response:
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
        limits: CallLimits,
        headers: Headers | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 200; leaving before its end closes the connection.

        With `headers` that hold a credential our own key stays away: the engine would read one of the two.
        A task is never sent twice. The engine's successor could get it: the file that killed its predecessor,
        or an order to save its empty slot under the name of ours.
        Raises EngineError for every other status, EngineGoneError when there is no answer.
        """
        async with (
            self._counted(),
            nullcontext() if limits.kind is CallKind.BRIEF else self.pulse.answer(),
            self._asked(method, path, limits=limits, headers=headers, body=body) as response,
        ):
            yield response

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    @asynccontextmanager
    async def _asked(
        self,
        method: str,
        path: str,
        *,
        limits: CallLimits,
        headers: Headers | None,
        body: Mapping[str, Any] | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        body = self.address.body(method, body)
        data = orjson.dumps(body) if body is not None else None
        headers, url = self._with_credential(headers or {}), self.address.url(method, path)

        async def send(session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
            stream = BytesIO(data) if data is not None else None  # aiohttp warns of bytes above 1 MiB
            return await session.request(method, url, data=stream, headers=headers, timeout=limits.timeout)

        try:
            async with self._connected(limits.kind) as (session, kept):
                try:
                    response = await send(session)
                except aiohttp.ClientConnectorError:
                    raise
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    if not kept:
                        raise
                    response = await send(session)  # it had closed an idle connection
                async with response:
                    if response.status != 200:
                        raise _refusal(response.status, await response.read())
                    yield response
        except TimeoutError as error:  # before the others: aiohttp's are both
            raise EngineSilentError(f"{url}: {error!r}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineGoneError(f"{url}: {error!r}") from error

    def _with_credential(self, headers: Headers) -> Headers:
        """With our own key, unless they hold one."""
        own = {} if any(name in AUTH for name in headers) else self._own
        return {**own, **headers}

    @asynccontextmanager
    async def _connected(self, kind: CallKind) -> AsyncIterator[tuple[aiohttp.ClientSession, bool]]:
        """A session, and whether its connection may have been idle before: then it may be closed by now."""
        if kind is CallKind.TASK or self._kept_in_use == KEPT:
            yield self._session(kind), False
            return
        self._kept_in_use += 1
        try:
            yield self._session(None), True
        finally:
            self._kept_in_use -= 1

    def _session(self, kind: CallKind | None) -> aiohttp.ClientSession:
        """None: the one that keeps its connections. Made when needed: it belongs to the running loop."""
        if kind not in self._sessions:
            if kind is None:
                connector = aiohttp.TCPConnector(limit=KEPT, keepalive_timeout=KEEP_SECONDS)
            else:
                limit = TEXTS if kind is CallKind.TEXT else 0
                connector = aiohttp.TCPConnector(limit=limit, force_close=True)
            self._sessions[kind] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Content-Type": "application/json"},
            )
        return self._sessions[kind]


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
