"""Control calls to one engine: its address, how a call is sent, which calls there are, and their answers.

This module makes no decisions, and clients' requests are forwarded elsewhere. Control calls have their own
connector, so that a busy data plane cannot starve them.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp
import orjson

from slotkeeper.api.head import AUTH
from slotkeeper.engine.answers import (
    NO_DESCRIPTOR,
    PREFILL,
    Continuation,
    EngineError,
    EngineFrozenError,
    EngineGoneError,
    EngineSilentError,
    EngineUnaskedError,
    Guess,
    Health,
    MediaPrompt,
    PrefillResult,
    RestoreResult,
    SaveResult,
    TimedAnswer,
    lora_field,
    seconds,
    view,
)
from slotkeeper.scheduler.policies.adapters import Scales
from slotkeeper.scheduler.types import NO_ROUTER, EngineId, ModelName, SlotId, SlotView

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
        self.calls += 1
        try:
            async with (
                nullcontext() if limits.kind is CallKind.BRIEF else self.pulse.answer(),
                self._asked(method, path, limits=limits, headers=headers, body=body) as response,
            ):
                yield response
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
        timeout = aiohttp.ClientTimeout(total=limits.seconds, sock_connect=CONNECT_SECONDS)
        if not any(name in AUTH for name in sent):  # else they hold a credential of the client
            sent = {**self._own, **sent}
        if self.barred and path != RUNNING:
            raise EngineGoneError(f"{url}: the model is not loaded")

        async def send(session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
            stream = BytesIO(data) if data is not None else None  # aiohttp warns of bytes above 1 MiB
            return await session.request(method, url, data=stream, headers=sent, timeout=timeout)

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
            kind = EngineUnaskedError if getattr(error, "errno", None) in NO_DESCRIPTOR else EngineGoneError
            raise kind(f"{url}: {error!r}") from error

    async def _heard(
        self, send: Send, session: aiohttp.ClientSession, *, kept: bool, method: str, kind: CallKind
    ) -> aiohttp.ClientResponse:
        """Send a call, and once more if the engine had closed the connection, which was idle (`kept`).

        A POST that llama-swap answers with 502 got no answer from the model's server: llama-swap keeps
        connections to that server, which closes them at any time, and it sends only a GET again. We send a
        POST again if it changes nothing. Raises aiohttp.ServerDisconnectedError.
        """
        again = 1 + (kind is not CallKind.TASK)
        while again:
            try:
                response = await send(session)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not kept:
                    raise
                response = await send(session)
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


# -- the calls -------------------------------------------------------------------------------------------

# These routes never enter the engine's task queue (engine.md 1.4, 1.7).
QUICK: Final = CallLimits(CallKind.BRIEF, BRIEF_SECONDS)
EXACT_VOCABULARIES: Final = frozenset({1, 2})  # llama_vocab_type: SPM and BPE
PIECES_AT_ONCE: Final = 10_000  # ids; an answer of 300 KB
TEXT: Final = CallLimits(CallKind.TEXT, 60.0)  # megabytes to tokenize
# The rest of a batch, then 8 GB to a disk at 20 MB per second: an engine that takes longer is stuck.
LONG: Final = CallLimits(CallKind.TASK, 600.0)
PATIENT: Final = CallLimits(CallKind.TASK, None)  # a prefill takes minutes
UNAUTHORIZED: Final = 401
LOOP_STATUS: Final = 508  # a sidecar's answer to a request that has passed through it before
OWN_PROPS: Final = frozenset(  # one of these is in every llama-server's /props
    {"total_slots", "default_generation_settings", "build_info", "model_path", "is_sleeping", "role"}
)
OF_SERVERS: Final = {503: Health.LOADING, LOOP_STATUS: Health.LOOP}  # by the status of a refusal
# A router with `autoload=false`: 400 "model is not loaded" or "not found", 500 while it starts or ends.
OF_MODELS: Final = {400: Health.UNLOADED, 500: Health.LOADING, 503: Health.LOADING}
# llama-swap: 502 if its process cannot be reached, 409 for a path that must not load it (`ignorePaths`).
OF_SWAPPED: Final = {409: Health.UNLOADED, 500: Health.LOADING, 502: Health.LOADING, 503: Health.LOADING}
READY: Final = "ready"  # a state in llama-swap's listing
NO_KEY: Final = "unauthorized: invalid or missing API key"  # llama-swap's words, and of no llama-server


def is_router(props: Mapping[str, Any]) -> bool:
    """Whether this is a router's answer to GET /props."""
    return props.get("role") == "router"


def running_in(said: Any) -> dict[str, dict[str, Any]] | None:
    """Return the models in llama-swap's answer to GET /running; None for any other server's answer."""
    running = said.get("running") if isinstance(said, dict) else None
    if not isinstance(running, list):
        return None
    return {str(one.get("model")): one for one in running if isinstance(one, dict)}


class ControlClient:
    """The connections to one server. Use as an async context manager, or `close` it."""

    def __init__(
        self, base: str | EngineAddress, *, api_key: str | None = None, pulse: Pulse | None = None
    ) -> None:
        self._http = EngineHttp(base, api_key=api_key, pulse=pulse)
        self.base = self._http.base

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._http!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()


class EngineClient(ControlClient):
    """The control routes of one engine.

    Except `health` and `bar`, all methods raise EngineError for a refusal, and EngineGoneError without an
    answer.
    """

    def __init__(
        self, base: str | EngineAddress, *, api_key: str | None = None, pulse: Pulse | None = None
    ) -> None:
        super().__init__(base, api_key=api_key, pulse=pulse)
        self.computed = 0  # prompt tokens of completed prefills and guesses
        # Random, and new with each start (both builds). "": not shown to us; None: not read last time.
        self.marker: str | None = None

    @property
    def busy(self) -> bool:
        """Whether any call is in progress."""
        return self._http.calls > 0

    def bar(self, *, barred: bool) -> None:
        """Send nothing from now on, not even the next call of a probe in progress; or send again."""
        self._http.barred = barred

    async def health(
        self, *, headers: Headers | None = None, seconds: float = BRIEF_SECONDS, served: bool = False
    ) -> Health:
        """Return the engine's health, and keep its media marker. Never raises or wakes a sleeping engine.

        `seconds` limits each of up to three calls; a call that takes longer means SILENT. `served`: it served
        at the last look, so one call is enough.
        """
        self.marker = None
        limits, address = CallLimits(CallKind.BRIEF, seconds), self._http.address
        known = OF_SERVERS if not address.model else OF_SWAPPED if address.swaps else OF_MODELS
        try:
            if address.swaps and not await self._is_ready(limits, headers):
                return Health.UNLOADED
            if not (served or address.model):  # a router answers for itself
                await self._http.json("GET", "/health", limits=limits)
            props = await self._props(limits, headers)
        except EngineError as error:
            if error.foreign:
                return Health.FOREIGN if address.model else await self._swapper(limits, headers)
            # /health needs no key, /props does: a 401 comes from an engine that is up.
            self.marker = "" if error.status == UNAUTHORIZED else None
            return known.get(error.status, Health.OK)
        except EngineSilentError:
            return Health.SILENT
        except EngineUnaskedError:
            return Health.UNASKED
        except EngineGoneError:
            return Health.DOWN
        if OWN_PROPS.isdisjoint(props):
            return Health.FOREIGN
        self.marker = str(props.get("media_marker", "?"))
        if is_router(props):
            return Health.ROUTER
        return Health.SLEEPING if props.get("is_sleeping") else Health.OK

    async def _is_ready(self, limits: CallLimits, headers: Headers | None) -> bool:
        """Whether llama-swap has loaded this model. Asked before /upstream/MODEL/, which would load it."""
        said = running_in(await self._http.json("GET", RUNNING, limits=limits, headers=headers)) or {}
        return said.get(self._http.address.model, {}).get("state") == READY

    async def _swapper(self, limits: CallLimits, headers: Headers | None) -> Health:
        """Tell llama-swap, whose /health is not llama-server's, from any other server. Never raises."""
        try:
            said = await self._http.json("GET", RUNNING, limits=limits, headers=headers)
        except EngineError as error:
            return Health.SWAPPER if NO_KEY in error.message else Health.FOREIGN
        except EngineUnaskedError:
            return Health.UNASKED
        except EngineGoneError:
            return Health.DOWN
        return Health.FOREIGN if running_in(said) is None else Health.SWAPPER

    async def props(self, *, headers: Headers | None = None) -> dict[str, Any]:
        """Return GET /props. Does not wake a sleeping engine."""
        return await self._props(QUICK, headers)

    async def _props(self, limits: CallLimits, headers: Headers | None) -> dict[str, Any]:
        props = await self._http.json("GET", "/props", limits=limits, headers=headers)
        return props if isinstance(props, dict) else {}

    async def slots(self, *, headers: Headers | None = None) -> tuple[SlotView, ...]:
        """Return GET /slots. Wakes a sleeping engine, so ask `health` first when idle."""
        listed = await self._http.json("GET", "/slots", limits=QUICK, headers=headers)
        return tuple(view(slot) for slot in listed)

    async def rouse(self, *, headers: Headers | None = None) -> None:
        """Make a sleeping engine load its model, as any task would; returns when it is loaded."""
        async with self._http.ask("GET", "/slots", limits=LONG, headers=headers) as response:
            await response.read()

    async def metrics(self) -> str:
        """Return the Prometheus text. Wakes a sleeping engine."""
        async with self._http.ask("GET", "/metrics", limits=QUICK) as response:
            return await response.text()

    async def models(self, *, headers: Headers | None = None) -> dict[str, Any]:
        """Return the entry of the model that is served (engine.md 1.1); a router lists all its models."""
        listed = await self._http.json("GET", "/v1/models", limits=QUICK, headers=headers)
        address, entries = self._http.address, listed.get("data") or []
        model = "" if address.swaps else address.model
        return dict(next((entry for entry in entries if not model or entry.get("id") == model), {}))

    async def lora_adapters(self, *, headers: Headers | None = None) -> list[dict[str, Any]]:
        """Return path and scale of each adapter. Enters the task queue: it would wake a sleeping engine."""
        return list(await self._http.json("GET", "/lora-adapters", limits=LONG, headers=headers))

    async def saves_slots(self, *, headers: Headers | None = None) -> bool:
        """Whether slots can be saved to files. Do not ask a sleeping engine: it may wake.

        An unknown action changes nothing: 501 without --slot-save-path, else 400 (both builds).
        """
        try:
            await self._http.json("POST", "/slots/0?action=none", limits=QUICK, headers=headers, body={})
        except EngineError as error:
            if error.status in {400, 501}:
                return error.status == 400
            raise
        return False

    async def apply_template(self, chat: Mapping[str, Any], *, headers: Headers | None = None) -> str:
        """Return the text that the chat route would evaluate; OpenAI chat bodies only (engine.md 1.4)."""
        answer = await self._http.json("POST", "/apply-template", limits=TEXT, headers=headers, body=chat)
        return str(answer["prompt"])

    async def count_chat(self, chat: Mapping[str, Any], *, headers: Headers | None = None) -> int:
        """Return the exact number of tokens of a chat. This computes nothing and takes no slot."""
        path = "/v1/chat/completions/input_tokens"
        answer = await self._http.json("POST", path, limits=TEXT, headers=headers, body=chat)
        return int(answer.get("input_tokens", 0))

    async def tokenize(
        self,
        content: str | Sequence[str | int],
        *,
        add_special: bool,
        parse_special: bool,
        headers: Headers | None = None,
    ) -> list[int]:
        """Return token ids; with both flags set, on a rendered chat, exactly those of the chat route."""
        body = {"content": content, "add_special": add_special, "parse_special": parse_special}
        answer = await self._http.json("POST", "/tokenize", limits=TEXT, headers=headers, body=body)
        return list(answer["tokens"])

    async def tokenize_long(
        self,
        content: str | Sequence[str | int],
        *,
        add_special: bool,
        parse_special: bool,
        headers: Headers | None = None,
        most: int | None = None,
    ) -> array[int]:
        """Return what `tokenize` returns, for texts of any length; EngineError for more than `most` ids."""
        body = {"content": content, "add_special": add_special, "parse_special": parse_special}
        return await self._http.ids("/tokenize", limits=TEXT, headers=headers, body=body, most=most)

    async def longest_token(self, *, headers: Headers | None = None) -> int | None:
        """Return the most characters that one token of the vocabulary stands for; None if there is no limit.

        Only for tokenizers that give a token for every character: others leave characters out, or give one
        token for a whole unknown word.
        """
        meta = (await self.models(headers=headers)).get("meta") or {}
        if meta.get("vocab_type") not in EXACT_VOCABULARIES or not meta.get("n_vocab"):
            return None
        longest = 1
        for start in range(0, int(meta["n_vocab"]), PIECES_AT_ONCE):
            ids = list(range(start, min(start + PIECES_AT_ONCE, int(meta["n_vocab"]))))
            body = {"content": ids, "with_pieces": True}
            answer = await self._http.json("POST", "/tokenize", limits=TEXT, headers=headers, body=body)
            longest = max(longest, *(len(token["piece"]) for token in answer["tokens"]))
        return longest

    async def detokenize(self, ids: Sequence[int], *, headers: Headers | None = None) -> str:
        """Return the text of these tokens."""
        body = {"tokens": list(ids)}
        answer = await self._http.json("POST", "/detokenize", limits=TEXT, headers=headers, body=body)
        return str(answer["content"])

    async def prefill(
        self,
        ids: Sequence[int] | MediaPrompt,
        slot: SlotId,
        *,
        headers: Headers | None = None,
        progress: Callable[[int, int], object] | None = None,
        lora: Scales | None = None,
    ) -> PrefillResult:
        """Evaluate a prompt in one slot; the slot then holds exactly these tokens (engine.md 1.5).

        After each batch, `progress` gets the numbers of processed and of cached prompt tokens. The slot must
        be idle: the engine neither refuses nor waits safely (engine.md T1). A cancelled call closes its
        connection. The engine notices that when it writes (engine.md T10), so the answer is a stream with
        progress: the engine stops at its next batch.
        """
        prompt = ids.body if isinstance(ids, MediaPrompt) else list(ids)
        body = {"prompt": prompt, "id_slot": slot, **PREFILL, **lora_field(lora)}
        last, ends = dict[str, Any](), list[int]()
        async for last in self._streamed(body, headers):
            if said := last.get("prompt_progress"):
                ends.append(said["processed"])
                if progress:
                    progress(said["processed"], said["cache"])
        if "timings/prompt_n" not in last:  # the key is the path, not a nested object
            raise EngineError(200, message_in(orjson.dumps(last)))
        self.computed += last["timings/prompt_n"]
        return PrefillResult(
            computed=last["timings/prompt_n"],
            cached=last["timings/cache_n"],
            held=last["tokens_cached"],
            slot=SlotId(last["id_slot"]),
            seconds=last["timings/prompt_ms"] / 1000,
            cuts=tuple(end for end in ends if last["timings/cache_n"] < end < len(ids)) if ends else None,
        )

    async def _streamed(
        self, body: Mapping[str, Any], headers: Headers | None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the data of each event of a streamed completion."""
        async with self._http.ask(
            "POST", "/completion", limits=PATIENT, headers=headers, body=body
        ) as response:
            async for line in response.content:
                self._http.pulse.answered()
                if line.startswith(b"data: {"):
                    yield orjson.loads(line[6:])

    async def guess(
        self, ids: Sequence[int], most: int, *, headers: Headers | None = None, lora: Scales | None = None
    ) -> Guess:
        """Return the `most` likeliest tokens after a prompt. The engine chooses the slot.

        The answer is a stream, because only streams report where batches ended.
        """
        fields = {"n_predict": 1, "cache_prompt": True, "n_probs": most, "temperature": 0}
        body = {"prompt": list(ids), **fields, "stream": True, "return_progress": True, **lora_field(lora)}
        last, ends, steps = dict[str, Any](), list[int](), list[dict[str, Any]]()
        async for said in self._streamed(body, headers):
            last = said
            steps += said.get("completion_probabilities", ())
            if progress := said.get("prompt_progress"):
                ends.append(progress["processed"])
        if "timings" not in last:
            raise EngineError(200, message_in(orjson.dumps(last)))
        cached = last["timings"]["cache_n"]
        self.computed += last["timings"]["prompt_n"]
        odds = tuple((t["id"], t["logprob"]) for step in steps for t in step["top_logprobs"])
        cuts = tuple(end for end in ends if cached < end < len(ids)) if ends else None
        return Guess(odds=odds, held=last["tokens_cached"], slot=SlotId(last["id_slot"]), cuts=cuts)

    async def continued(self, ids: Sequence[int], tokens: int, most: int) -> Continuation:
        """Return the `most` likeliest tokens at each of `tokens` steps. The engine chooses the slot."""
        asked = {"n_predict": tokens, "ignore_eos": True, "n_probs": most, "temperature": 0}
        doc = await self._http.json("POST", "/completion", limits=LONG, body={"prompt": list(ids), **asked})
        self.computed += doc["timings"]["prompt_n"]
        places = doc.get("completion_probabilities", ())
        steps = tuple(tuple((t["id"], t["logprob"]) for t in place["top_logprobs"]) for place in places)
        return Continuation(steps=steps, held=doc["tokens_cached"], slot=SlotId(doc["id_slot"]))

    async def timed_answer(self, ids: Sequence[int], slot: SlotId, tokens: int) -> TimedAnswer:
        """Generate `tokens`, two or more, after a prompt in one idle slot."""
        asked = {"n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": True}
        body = {"prompt": list(ids), "id_slot": slot, **asked}
        doc = await self._http.json("POST", "/completion", limits=LONG, body=body)
        timings = doc["timings"]
        self.computed += timings["prompt_n"]
        each = timings["predicted_ms"] / 1000 / max(1, timings["predicted_n"] - 1)  # from the first token on
        return TimedAnswer(token_seconds=each, held=doc["tokens_cached"])

    async def save(self, slot: SlotId, filename: str, *, headers: Headers | None = None) -> SaveResult:
        """Write an idle slot's state to a file in the engine's own folder (engine.md 2)."""
        answer = await self._act(slot, "save", headers, filename=filename)
        took = seconds(answer, "save_ms")
        return SaveResult(tokens=answer["n_saved"], written=answer["n_written"], seconds=took)

    async def restore(self, slot: SlotId, filename: str, *, headers: Headers | None = None) -> RestoreResult:
        """Load a file into an idle slot. After any error the slot is empty (engine.md 2.1).

        A damaged file can kill the engine (engine.md T2): only restore files whose bytes were verified.
        """
        answer = await self._act(slot, "restore", headers, filename=filename)
        took = seconds(answer, "restore_ms")
        return RestoreResult(tokens=answer["n_restored"], read=answer["n_read"], seconds=took)

    async def erase(self, slot: SlotId, *, headers: Headers | None = None) -> int:
        """Empty an idle slot; return its number of tokens. Also needs --slot-save-path."""
        return int((await self._act(slot, "erase", headers))["n_erased"])

    async def _act(self, slot: SlotId, action: str, headers: Headers | None, **body: str) -> dict[str, Any]:
        """Wait for the current batch, then act while all slots are blocked (engine.md 2.3).

        The engine may act even if the call was cancelled first: after that, the slot's contents are unknown.
        Never sent twice (see `EngineHttp.ask`; a file can kill the engine: T2).
        """
        path = f"/slots/{slot}?action={action}"
        return dict(await self._http.json("POST", path, limits=LONG, headers=headers, body=body))
