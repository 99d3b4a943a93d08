"""A stand-in for llama-swap: it answers as the program does, commit 0bdb3720 of August 2026.

`SwapLike` starts and stops the servers of its models by functions of the test: real engines (`served_by`), or
servers within the test. `engine/test_swap_like.py` compares its answers and events with those of the program
where that is on the PATH. `legacy` answers as proxy/proxymanager.go of 2025 does by its source, before it had
events. Left out are filters, peers, selectors, profiles and the matrix. A load takes less time than the
program's, which looks at a server's /health after 0.25 seconds, and then each second.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from email import message_from_bytes
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

from slotkeeper.engine.child.launch import EngineBinary
from slotkeeper.engine.child.process import EngineDiedError, EngineProcess
from slotkeeper.runtime.tasks import Tasks

BY_BODY: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"),
    *("/v1/messages/count_tokens", "/v1/rerank", "/completion", "/infill"),
)
VERSIONLESS: Final = ("/v/chat/completions", "/v/completions", "/v/messages", "/v/responses")
BY_FORM: Final = ("/v1/audio/transcriptions", "/v1/images/edits")
HOP_BY_HOP: Final = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
HEALTH_SECONDS: Final = 0.05  # between two questions; those of the program are a second apart
LIMIT: Final = 10  # requests to one model at once
EXITED: Final = "upstream command exited prematurely"
UNLOADED: Final = "group: model unloaded"  # what a load in progress fails with if its model is unloaded
CODES: Final = {  # of an error by its status: the type and the code
    401: ("authentication_error", "unauthorized"),
    404: ("invalid_request_error", "not_found"),
    429: ("rate_limit_error", "concurrency_limit"),
    503: ("server_error", "service_unavailable"),
}
LOG: Final = "a line of the log\n" * 8000  # the first event is longer than a line that aiohttp reads at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    """One model: how its server is started and stopped. `start` returns its URL, and raises if it fails."""

    start: Callable[[], Awaitable[str]]
    stop: Callable[[], Awaitable[object]]
    cmd: str = ""
    aliases: tuple[str, ...] = ()
    unlisted: bool = False
    ttl: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapGroup:
    """Models of which a load unloads the others (`swap`), and those of other groups (`exclusive`)."""

    members: tuple[str, ...]
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False


@dataclass(slots=True)
class _Process:
    state: str = "stopped"
    url: str = ""
    busy: int = 0
    used_at: float = 0.0


@dataclass
class SwapLike:
    """The gateway. `loads` records every load: the model, and the path of the request that caused it."""

    models: Mapping[str, Swapped]
    groups: Sequence[SwapGroup] = ()
    api_key: str = ""
    legacy: bool = False
    lists_aliases: bool = False  # its setting `includeAliasesInList`
    loads: list[tuple[str, str]] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    _processes: dict[str, _Process] = field(default_factory=dict)
    _swaps: dict[str, tuple[str, ...]] = field(default_factory=dict)  # loads under way, and what they unload
    _failures: dict[str, Exception] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _ears: set[asyncio.Queue[dict[str, Any]]] = field(default_factory=set)
    _bugs: list[BaseException] = field(default_factory=list)
    _unloads: int = 0  # unloads in progress; nothing else begins meanwhile

    def __post_init__(self) -> None:
        self._tasks = Tasks(self._bugs.append)
        self._processes = {name: _Process() for name in self.models}
        if not self.groups:
            self.groups = (SwapGroup(members=tuple(self.models)),)

    # -- for tests ---------------------------------------------------------------------------------

    def state(self, model: str) -> str:
        return self._processes[model].state

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28, middlewares=[self._checked])
        app.router.add_get("/health", self._health)
        app.router.add_get("/running", self._running)
        app.router.add_get("/v1/models", self._listed)
        app.router.add_get("/models", self._listed)
        app.router.add_get("/unload", self._unloaded)
        app.router.add_post("/api/models/unload", self._unloaded)
        app.router.add_post("/api/models/unload/{model:.*}", self._unloaded)
        if not self.legacy:
            app.router.add_get("/api/events", self._events)
        for path in BY_BODY:
            app.router.add_post(path, self._by_body)
        for path in VERSIONLESS:
            app.router.add_post(path, self._by_body)
        for path in BY_FORM:
            app.router.add_post(path, self._by_form)
        app.router.add_get("/props", self._by_query)
        app.router.add_route("*", "/upstream/{path:.*}", self._by_path)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        return app

    async def close(self) -> None:
        await self._tasks.close()
        for name, process in self._processes.items():
            if process.state != "stopped":
                await self.models[name].stop()
        assert not self._bugs

    # -- its own routes ----------------------------------------------------------------------------

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.paths.append(request.path)
        keys = (
            request.headers.get("Authorization", "").removeprefix("Bearer "),
            request.headers.get("X-Api-Key"),
        )
        if self.api_key and request.path != "/health" and self.api_key not in keys:
            return self._error(401, "unauthorized: invalid or missing API key")
        answer: web.StreamResponse = await handler(request)
        return answer

    def _error(self, status: int, message: str) -> web.Response:
        if self.legacy:
            return web.Response(status=status, text=message)
        kind, code = CODES.get(status, ("server_error", "internal_error"))
        error = {"message": message, "type": kind, "param": None, "code": code}
        headers = {"Retry-After": "1"} if status == 429 else {}
        return web.json_response({"src": "llama-swap", "error": error}, status=status, headers=headers)

    async def _unknown(self, request: web.Request) -> web.Response:
        allowed = request.method != "POST" or request.path != "/unload"
        text = "404 page not found\n" if allowed else "Method Not Allowed\n"
        return web.Response(status=404 if allowed else 405, text=text)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _running(self, _: web.Request) -> web.Response:
        shown = ("ready",) if self.legacy else ("starting", "ready", "stopping")
        running = [
            {
                "model": name,
                "state": process.state,
                "cmd": self.models[name].cmd,
                "proxy": process.url,
                "ttl": self.models[name].ttl,
                "name": "",
                "description": "",
            }
            for name, process in sorted(self._processes.items())
            if process.state in shown
        ]
        return web.json_response({"running": running})

    async def _listed(self, _: web.Request) -> web.Response:
        entries = []
        for name, model in self.models.items():
            if not model.unlisted:
                about = {"type": "model", **({"aliases": model.aliases} if model.aliases else {})}
                aliases = model.aliases if self.lists_aliases else ()
                entries.append(self._entry(name, name, about))
                entries += [self._entry(name, each, {"type": "alias", "modelID": name}) for each in aliases]
        return web.json_response(
            {"object": "list", "data": sorted(entries, key=lambda entry: str(entry["id"]))}
        )

    def _entry(self, model: str, name: str, about: Mapping[str, Any]) -> dict[str, Any]:
        entry = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "llama-swap"}
        if self.legacy:
            return entry
        status = "unloaded" if self.state(model) == "stopped" else "loaded"
        return {**entry, "meta": {"llamaswap": about}, "status": {"value": status}}

    def _told(self) -> dict[str, Any]:
        models = [
            {
                "id": name,
                "name": "",
                "description": "",
                "state": self.state(name),
                "unlisted": model.unlisted,
                "peerID": "",
                **({"aliases": list(model.aliases)} if model.aliases else {}),
            }
            for name, model in sorted(self.models.items())
        ]
        return _event("modelStatus", models)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        queue.put_nowait(_event("logData", {"source": "proxy", "data": LOG}))
        queue.put_nowait(self._told())
        queue.put_nowait(_event("uiConfig", {}))
        queue.put_nowait(_event("profileChanged", {"active": None}))
        queue.put_nowait(_event("inflight", {"operation": "snapshot"}))
        self._ears.add(queue)
        try:
            while True:
                said = orjson.dumps(await queue.get())
                await response.write(b"event:message\ndata:" + said + b"\n\n")
        finally:
            self._ears.discard(queue)

    async def _unloaded(self, request: web.Request) -> web.Response:
        """Stop models, and cut their running answers. As in the program, nothing else begins meanwhile."""
        named = request.match_info.get("model")
        names = [*self.models] if named is None else [name for name in [self._real(named)] if name]
        if not names:
            return self._error(404, "model not found")
        self._unloads += 1
        try:
            for name in names:
                if name in self._swaps:
                    self._failures[name] = RuntimeError(UNLOADED)
                await self._stop(name)
        finally:
            self._unloads -= 1
            await self._tell()
        if request.path == "/api/models/unload":
            return web.json_response({"msg": "ok"})
        return web.Response(text="OK")

    # -- requests to models ------------------------------------------------------------------------

    def _real(self, named: str) -> str | None:
        return next((name for name, model in self.models.items() if named in {name, *model.aliases}), None)

    async def _by_body(self, request: web.Request) -> web.StreamResponse:
        try:
            named = str(orjson.loads(await request.read()).get("model") or "")
        except orjson.JSONDecodeError:
            named = ""
        return await self._named(request, named)

    async def _by_form(self, request: web.Request) -> web.StreamResponse:
        head = f"Content-Type: {request.headers.get('Content-Type', '')}\r\n\r\n"
        for part in message_from_bytes(head.encode() + await request.read()).walk():
            if part.get_param("name", header="content-disposition") == "model":
                return await self._named(request, str(part.get_payload()))
        return await self._named(request, "")

    async def _named(self, request: web.Request, named: str) -> web.StreamResponse:
        model = self._real(named)
        if model is None:
            return self._error(
                404, "no router for requested model" if named else "no model id could be identified"
            )
        return await self._served(request, model, _unversioned(request.raw_path))

    async def _by_query(self, request: web.Request) -> web.StreamResponse:
        model = self._real(request.query.get("model", ""))
        if model is None:
            return self._error(404, "no model id could be identified")
        return await self._served(request, model, request.raw_path)

    async def _by_path(self, request: web.Request) -> web.StreamResponse:
        words = request.match_info["path"].split("/")
        for end in range(1, len(words) + 1):
            if (model := self._real("/".join(words[:end]))) is not None:
                if end == len(words):
                    raise web.HTTPMovedPermanently(f"{request.path}/")
                query = f"?{request.query_string}" if request.query_string else ""
                return await self._served(request, model, "/" + "/".join(words[end:]) + query)
        return self._error(404, "model not found")

    async def _served(self, request: web.Request, model: str, path: str) -> web.StreamResponse:
        process = self._processes[model]
        try:
            await self._ready(model, request.path)
        except Exception as error:  # noqa: BLE001 - as the program does
            return self._error(500, f"unspecific error: {error}")
        if not process.url:
            return self._error(503, f"[{model}] process is not ready")
        if process.busy >= LIMIT:
            return self._error(429, "Too many requests")
        process.busy += 1
        try:
            return await self._proxied(request, process.url + path)
        finally:
            process.busy -= 1
            process.used_at = time.monotonic()
            await self._tell()

    async def _proxied(self, request: web.Request, url: str) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        no_limit = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(auto_decompress=False, timeout=no_limit) as session:
            body = await request.read() or None
            try:
                answer = await session.request(request.method, url, data=body, headers=headers)
            except (aiohttp.ClientError, OSError):
                return web.Response(status=502)
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            # The program ends an answer whose server has ended as if it were whole.
            with suppress(aiohttp.ClientError, OSError):
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            answer.close()
            return response

    # -- swaps -------------------------------------------------------------------------------------

    def _leaves(self, model: str) -> tuple[str, ...]:
        """Return the models that a load of this one unloads."""
        own = next(group for group in self.groups if model in group.members)
        found = []
        for name, process in self._processes.items():
            if name == model or (process.state == "stopped" and name not in self._swaps):
                continue
            group = next(group for group in self.groups if name in group.members)
            if own.swap if group is own else own.exclusive and not group.persistent:
                found.append(name)
        return tuple(found)

    def _collides(self, model: str, leaves: tuple[str, ...]) -> bool:
        return any(
            other in leaves or model in theirs or set(leaves) & set(theirs)
            for other, theirs in self._swaps.items()
            if other != model
        )

    async def _ready(self, model: str, path: str) -> None:
        """Wait until the model is loaded, and load it if need be. Raises what its start raises."""
        async with self._changed:
            while True:
                if model in self._swaps:  # join it
                    await self._changed.wait_for(lambda: model not in self._swaps)
                    if error := self._failures.get(model):
                        raise error
                    continue
                leaves = self._leaves(model)
                free = not self._collides(model, leaves) and not self._unloads
                if self.state(model) == "ready" and not leaves and free:
                    return
                if free and not any(self._processes[name].busy for name in leaves):
                    self._swaps[model] = leaves
                    self.loads.append((model, path))
                    self._tasks.start(self._swap(model, leaves))
                    continue
                await self._changed.wait()

    async def _swap(self, model: str, leaves: tuple[str, ...]) -> None:
        self._failures.pop(model, None)
        await asyncio.gather(*(self._stop(name) for name in leaves))
        process = self._processes[model]
        await self._is(model, "starting")
        try:
            process.url = await self.models[model].start()
            process.used_at = time.monotonic()
            await self._is(model, "ready")
        except Exception as error:  # noqa: BLE001 - told to the clients
            self._failures.setdefault(model, error)
            await self._is(model, "stopped")
        finally:
            self._swaps.pop(model, None)
            await self._tell()
        if self.models[model].ttl and process.state == "ready":
            await self._expires(model)

    async def _expires(self, model: str) -> None:
        process, ttl = self._processes[model], self.models[model].ttl
        while process.state == "ready":
            await asyncio.sleep(ttl / 10)
            if process.state == "ready" and not process.busy and time.monotonic() - process.used_at > ttl:
                await self._stop(model)

    async def _stop(self, model: str) -> None:
        if self.state(model) != "stopped":
            self.stops.append(model)
            await self._is(model, "stopping")
            await self.models[model].stop()
            self._processes[model].url = ""
            await self._is(model, "stopped")

    async def _is(self, model: str, state: str) -> None:
        self._processes[model].state = state
        for ear in self._ears:
            ear.put_nowait(self._told())
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _unversioned(path: str) -> str:
    return path.removeprefix("/v") if path.startswith("/v/") else path


def _event(kind: str, data: Any) -> dict[str, Any]:
    return {"type": kind, "data": orjson.dumps(data).decode()}


@asynccontextmanager
async def serving(gateway: SwapLike) -> AsyncIterator[str]:
    """Run the gateway; yield its URL. A client that disconnects cancels its request, as with the program."""
    runner = web.AppRunner(gateway.app(), handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
        await gateway.close()


async def answering(
    stack: AsyncExitStack, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> str:
    """Serve every path of a model's server by `answer` until the stack is closed; return its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    server = await stack.enter_async_context(TestServer(app))
    return str(server.make_url("")).rstrip("/")


def served_by(
    binary: EngineBinary,
    args: Sequence[str],
    base: str,
    log: Path,
    *,
    proxy: str = "",
    hook: str = "",
    **more: Any,
) -> Swapped:
    """Return a model that a real engine with these flags serves at `base`.

    Its requests go to `proxy`. `hook` is its cmdStop: a command line with ${PID}, which no shell reads.
    """
    running: list[EngineProcess] = []

    async def start() -> str:
        process = EngineProcess(binary, args, base=base, log=log)
        running.append(process)
        process.start()
        try:
            await process.wait_ready()
        except EngineDiedError as error:
            raise RuntimeError(EXITED) from error
        if proxy:
            await _healthy(proxy)
        return proxy or base

    async def stop() -> None:
        while running:
            process = running.pop()
            if hook:
                words = shlex.split(hook.replace("${PID}", str(process.pid)))
                stopping = await asyncio.create_subprocess_exec(*words)
                await stopping.wait()
                await process.wait()
            await process.stop()

    return Swapped(start=start, stop=stop, cmd=shlex.join(binary.command(args)), **more)


async def _healthy(base: str) -> None:
    """Wait until this server answers /health, as llama-swap does before it sends requests there."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{base}/health") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(HEALTH_SECONDS)
