"""Sends one control call to an engine and reads its answer: connections, time limits, errors.

Control calls have their own connector, so that a busy data plane cannot starve them.
The module `client` lists the calls.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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
NOT_REACHED: Final = 502  # llama-swap's answer if the model's server closes the connection

Headers = Mapping[str, str]

# -- the address: a server with one model, or one model of a router or of llama-swap ---------------------
# A router reads the model's name from the body of a POST and from the query of a GET. It would load a model
# that is not loaded and evict another, so each of our calls has `autoload=false` (engine.md 13).
#
# llama-swap passes /upstream/MODEL/PATH on to PATH of that model's server, and loads the model first if it is
# not loaded. No query prevents that: whether the model is loaded must be asked before (docs/models.md).

NO_AUTOLOAD: Final = "autoload=false"
_MARK: Final = "#"  # no base URL has a fragment
UPSTREAM: Final = "/upstream/"
RUNNING: Final = "/running"  # llama-swap's own route for the states of its models; loads none
# llama-swap's routes without a version: it passes /v/PATH on as /PATH.
VERSIONLESS: Final = frozenset(
    {
        *("/v/chat/completions", "/v/completions", "/v/embeddings", "/v/messages", "/v/responses"),
        *("/v/messages/count_tokens", "/v/rerank", "/v/reranking"),
    }
)
# Routes that llama-swap passes on by the model in the body, after its filters for that model.
BY_BODY: Final = VERSIONLESS | frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"),
        *("/v1/messages/count_tokens", "/v1/rerank", "/v1/reranking", "/rerank", "/reranking"),
        *("/completion", "/infill", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/voices"),
        *("/v1/images/generations", "/v1/images/edits", "/sdapi/v1/txt2img", "/sdapi/v1/img2img"),
        *("/audioapi/v1/tasks/run", "/v1/models"),
    }
)


Send = Callable[[aiohttp.ClientSession], Awaitable[aiohttp.ClientResponse]]


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A base URL, and the model's name if a router is there, or llama-swap (`swaps`)."""

    base: str
    model: ModelName = NO_ROUTER
    swaps: bool = False

    @classmethod
    def of(cls, engine: str) -> Self:
        """Parse an engine's id: a base URL, or BASE#MODEL for a model of a router."""
        base, _, model = engine.partition(_MARK)
        return cls(base.rstrip("/"), ModelName(model))

    @property
    def engine(self) -> EngineId:
        return EngineId(f"{self.base}{_MARK}{self.model}" if self.model else self.base)

    def url(self, method: str, path: str) -> str:
        """Return the URL of a control call."""
        if not self.model:
            return self.base + path
        if self.swaps:
            return self.base + (path if path == RUNNING else self._behind(path))
        named = f"model={quote(self.model, safe='')}&" if method == "GET" else ""
        return f"{self.base}{path}{'&' if '?' in path else '?'}{named}{NO_AUTOLOAD}"

    def body(self, method: str, body: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the body of a control call, with the model's name if a router is there."""
        if not self.model or self.swaps or method == "GET":
            return body
        return {**(body or {}), "model": self.model}

    def passed_on(self, target: str, *, held: bool) -> str:
        """Return the path and query for forwarding a client's request; `held`: its model is loaded.

        llama-swap gets a request on the route that the client used, if it knows that route: what its
        configuration changes in requests of this model is changed as without us.
        """
        if self.model and self.swaps:
            path = target.partition("?")[0]
            return target if path in BY_BODY or path.startswith(UPSTREAM) else self._behind(target)
        if not self.model or not held:
            return target
        return f"{target}{'&' if '?' in target else '?'}{NO_AUTOLOAD}"

    def _behind(self, target: str) -> str:
        """Return the path at llama-swap for a path of this model's own server."""
        return f"{UPSTREAM}{quote(self.model, safe='/')}{target}"


# -- kinds of calls --------------------------------------------------------------------------------------


class CallKind(Enum):
    """The kind of a control call. Only a task changes the engine's state."""

    BRIEF = "brief"  # answered at once: its own time limit is enough to notice a frozen engine
    TEXT = "text"  # up to megabytes of text to tokenize
    TASK = "task"  # waits in the engine's queue


# llama-server has np + 4 threads for connections, and an idle connection keeps one until it is closed. Idle
# connections that are used in turn are never closed: sixteen of them once kept all threads, and the engine
# served no new connection (docs/engine.md 1.1). So we keep few; other calls open and close their own.
KEPT: Final = 2
TEXTS: Final = 16  # further connections for texts; each further call of another kind opens its own


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The kind of a call and the limit of its whole duration in seconds; None: no limit."""

    kind: CallKind
    seconds: float | None

    @property
    def timeout(self) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=self.seconds, sock_connect=CONNECT_SECONDS)


class Pulse:
    """The time of an engine's last sign of life, and all calls that wait for it; cancels them if it freezes.

    So no call needs its own time limit: a prefill may take an hour, as long as the engine is alive.
    """

    def __init__(self) -> None:
        self.answered_at = time.monotonic()
        self.frozen = False
        self._waiting: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"<Pulse {'frozen' if self.frozen else 'alive'}, {len(self._waiting)} wait>"

    @property
    def busy(self) -> bool:
        """Whether any call waits for the engine."""
        return bool(self._waiting)

    def answered(self) -> None:
        """Note a sign of life, of any call: a token, the progress of a prefill, an answer."""
        self.answered_at = time.monotonic()

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[None]:
        """Run a block that waits for the engine. Raises EngineFrozenError if the engine is or gets frozen."""
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
        """Mark the engine as frozen and cancel all calls that wait for it."""
        self.frozen, now = True, asyncio.get_running_loop().time()
        for limit in self._waiting:
            limit.reschedule(now)


class EngineHttp:
    """One engine's address and key, and the connections to it. The owner must `close` it."""

    def __init__(
        self, base: str | EngineAddress, *, api_key: str | None = None, pulse: Pulse | None = None
    ) -> None:
        self.address = EngineAddress.of(base) if isinstance(base, str) else base
        self.base = self.address.base
        self.pulse = pulse or Pulse()
        self._own = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._sessions: dict[CallKind | None, aiohttp.ClientSession] = {}
        self._kept_in_use = 0
        self.calls = 0  # calls in progress
        self.barred = False  # whether nothing may be sent: llama-swap would load the model for it

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
        """Return the JSON document that the engine answers; arguments and errors as for `ask`."""
        async with self.ask(method, path, limits=limits, headers=headers, body=body) as response:
            data = await response.read()
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise EngineError(response.status, f"{path}: not JSON", foreign=True) from error

    async def ids(
        self,
        path: str,
        *,
        limits: CallLimits,
        headers: Headers | None,
        body: Mapping[str, Any],
        most: int | None,
    ) -> array[int]:
        """Return the numbers of the one list that the engine answers; other arguments as for `ask`.

        They are read piece by piece: a whole answer of megabytes would stop the event loop, and take ten
        times its size as Python's integers. Raises as `ask` does, and EngineError for more than `most`.
        """
        found, rest, ended = array("i"), b"", b""
        async with self.ask("POST", path, limits=limits, headers=headers, body=body) as response:
            async for piece in response.content.iter_any():
                self.pulse.answered()
                rest = (rest + piece).rpartition(b"[")[2]
                rest, ended, _ = rest.partition(b"]")
                whole, comma, left = rest.rpartition(b",")
                if comma:
                    found.extend(_numbers(path, whole))
                    rest = left
                if ended:
                    break
                if most is not None and len(found) > most:
                    raise EngineError(response.status, f"{path}: more than {most} tokens")
        found.extend(_numbers(path, rest))
        return found

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
        """Send a call and yield the answer, whose status is 200; leaving early closes the connection.

        If `headers` hold a credential, our own key is not sent: the engine would read only one of the two.
        A task is never sent twice: a restarted engine could get it. It would then restore the file that
        killed the engine before, or save an empty slot under our file's name.
        Raises EngineError for every other status, and EngineGoneError if there is no answer or nothing may be
        sent (`barred`).
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
        sent, url = headers or {}, self.address.url(method, path)
        if not any(name in AUTH for name in sent):  # else they hold a credential of the client
            sent = {**self._own, **sent}
        if self.barred and path != RUNNING:
            raise EngineGoneError(f"{url}: the model is not loaded")

        async def send(session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
            stream = BytesIO(data) if data is not None else None  # aiohttp warns of bytes above 1 MiB
            return await session.request(method, url, data=stream, headers=sent, timeout=limits.timeout)

        try:
            async with (
                self._connected(limits.kind) as (session, kept),
                await self._heard(send, session, kept=kept, method=method, kind=limits.kind) as response,
            ):
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                yield response
        except TimeoutError as error:  # first, because aiohttp's timeouts are also ClientErrors
            raise EngineSilentError(f"{url}: {error!r}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineGoneError(f"{url}: {error!r}") from error

    async def _heard(
        self, send: Send, session: aiohttp.ClientSession, *, kept: bool, method: str, kind: CallKind
    ) -> aiohttp.ClientResponse:
        """Send a call. A POST that llama-swap answers with 502 got no answer from the model's server.

        llama-swap keeps connections to that server, which closes them at any time. It sends only a GET again.
        We send a POST again if it changes nothing. Raises aiohttp.ServerDisconnectedError.
        """
        again = 1 + (kind is not CallKind.TASK)
        while again:
            response = await _sent(send, session, kept=kept)
            if response.status != NOT_REACHED or method != "POST" or not self.address.swaps:
                return response
            response.close()
            again -= 1
        raise aiohttp.ServerDisconnectedError("llama-swap got no answer from the model's server")

    @asynccontextmanager
    async def _connected(self, kind: CallKind) -> AsyncIterator[tuple[aiohttp.ClientSession, bool]]:
        """Yield a session, and whether its connection may have been idle: the engine may have closed it."""
        if kind is CallKind.TASK or self._kept_in_use == KEPT:
            yield self._session(kind), False
            return
        self._kept_in_use += 1
        try:
            yield self._session(None), True
        finally:
            self._kept_in_use -= 1

    def _session(self, kind: CallKind | None) -> aiohttp.ClientSession:
        """Return the session for a kind of call; None: the one that keeps its connections.

        Sessions are made on first use, because each belongs to the running event loop.
        """
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


def _numbers(path: str, text: bytes) -> list[int]:
    """Return numbers that are separated by commas. Raises EngineError for anything else."""
    try:
        return list(orjson.loads(b"[" + text + b"]"))
    except orjson.JSONDecodeError as error:
        raise EngineError(200, f"{path}: not a list of numbers", foreign=True) from error


async def _sent(send: Send, session: aiohttp.ClientSession, *, kept: bool) -> aiohttp.ClientResponse:
    """Send a request, and once more if the engine had closed the connection, which was idle (`kept`)."""
    try:
        return await send(session)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
        if not kept:
            raise
        return await send(session)


def _refusal(status: int, data: bytes) -> EngineError:
    """Return the error for a status other than 200.

    It is `foreign` (the server is no engine) only if the server has no such route and the error has another
    shape than llama-server's. Any other refusal can come from a proxy in front of the engine.
    """
    return EngineError(status, message_in(data), foreign=status in NO_ROUTE and _own_message(data) is None)


def message_in(data: bytes) -> str:
    """Return the text of an error body of any shape; a page of HTML is not quoted."""
    own = _own_message(data)
    if own is not None:
        return own
    return "a page of HTML" if is_markup(data) else data[:200].decode(errors="replace")


def is_markup(data: bytes) -> bool:
    return data.lstrip().startswith(b"<")


def _own_message(data: bytes) -> str | None:
    """Return the message of an error body in llama-server's shape; None for any other shape."""
    try:
        return str(orjson.loads(data)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
