"""Stand-ins for programs that start llama-server for their users. None of them is the program itself.

Each does what the source of its program does (August 2026) with real engines: its flags, a random port at
each start, what its own port answers, what it does to an idle model. Left out: downloads, other backends,
fitting to memory, and everything that only a GPU needs. Of LM Studio, whose source is not public, there are
only answers that its users have reported (`LM_STUDIO_SAYS`).

* Lemonade (lemonade-sdk/lemonade e385039): src/cpp/server/backends/llamacpp/llamacpp_server.cpp (`load`,
  `downsize`), eviction_engine.cpp, server.cpp (routes), utils/platform/process_linux.cpp (a stop)
* Ollama (ollama/ollama fb30760): llm/llama_server.go (`startLlamaServer`), server/sched.go, server/routes.go
* Unsloth Studio (unslothai/unsloth 015bdef): studio/backend/core/inference/llama_cpp.py (the command,
  `save_slots_for_resume`), llama_keepwarm.py, main.py
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

from patience import PATIENCE
from slotkeeper.bench import lab
from slotkeeper.engine.child.launch import free_port

STOP_SECONDS: Final = 5.0  # from SIGTERM to SIGKILL, in Lemonade and in Unsloth Studio
HEALTH_SECONDS: Final = 0.05
CONTEXT: Final = 8192
FORWARDED: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

# What users have quoted: lmstudio-ai/lmstudio-bug-tracker, issues 618 and 2085.
LM_STUDIO_SAYS: Final = '{"error":"Unexpected endpoint or method. (GET /props)"}'


@dataclass
class Managed:
    """One manager with two models of which one is loaded at a time. `command` starts a llama-server.

    `prompt_tokens` are those of all its engines so far, by their own counters, except of killed ones.
    """

    command: Sequence[str]
    environ: Mapping[str, str] = field(repr=False)
    models: Mapping[str, Path]
    folder: Path
    loaded: str = ""
    base: str = ""
    process: asyncio.subprocess.Process | None = None
    bases: list[str] = field(default_factory=list)  # where its engines have been
    prompt_tokens: int = 0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    # -- what differs between the programs -----------------------------------------------------------

    def flags(self, model: Path, port: int) -> list[str]:
        """Return the arguments of llama-server."""
        raise NotImplementedError

    async def idle(self) -> None:
        """Do what the program does to an idle model before it unloads it."""

    async def resumed(self) -> None:
        """Do what the program does when a model is loaded again."""

    def routes(self, app: web.Application) -> None:
        """Add what the program's own port answers, besides requests for models."""
        raise NotImplementedError

    # -- processes -----------------------------------------------------------------------------------

    async def load(self, model: str) -> None:
        """Start the engine of a model on another port, and end that of the other model before."""
        async with self._lock:
            if self.loaded == model:
                return
            await self._stop()
            port = free_port()
            self.base = f"http://127.0.0.1:{port}"
            words = [*self.command, *self.flags(self.models[model], port)]
            self.bases.append(self.base)
            log = (self.folder / "engine.log").open("ab")
            self.process = await asyncio.create_subprocess_exec(
                *words, stdout=log, stderr=log, env={**os.environ, **self.environ}, start_new_session=True
            )
            log.close()
            self.loaded = model
            await self._healthy()
            await self.resumed()

    async def unload(self) -> None:
        async with self._lock:
            await self.idle()
            await self._stop()

    async def crashed(self) -> None:
        """Kill the engine, as the kernel does that is out of memory; the next request loads the model."""
        async with self._lock:
            self.prompt_tokens += await lab.evaluated(self.base)
            assert self.process
            os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
            self.process, self.loaded = None, ""

    async def counted(self) -> int:
        return self.prompt_tokens + (await lab.evaluated(self.base) if self.process else 0)

    async def close(self) -> None:
        async with self._lock:
            if self.process:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                await self.process.wait()

    async def _stop(self) -> None:
        if self.process is None:
            return
        self.prompt_tokens += await lab.evaluated(self.base)
        self.process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
        self.process, self.loaded = None, ""

    async def _healthy(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                assert self.process
                assert self.process.returncode is None, (self.folder / "engine.log").read_text()[-2000:]
                with suppress(aiohttp.ClientError):
                    async with session.get(f"{self.base}/health") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(HEALTH_SECONDS)

    # -- the program's own port ----------------------------------------------------------------------

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        for path in FORWARDED:
            app.router.add_post(path, self._forwarded)
        self.routes(app)
        return app

    async def _forwarded(self, request: web.Request) -> web.Response:
        """Load the request's model if need be, and pass the body on."""
        body = orjson.loads(await request.read())
        await self.load(body["model"])
        status, data = await self.asked("POST", request.path, body)
        return web.Response(status=status, body=data, content_type="application/json")

    async def asked(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Send a call to the engine, as the program itself does; 502 without an answer."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                async with session.request(method, self.base + path, json=body) as answer:
                    return answer.status, await answer.read()
            except aiohttp.ClientError as error:
                return 502, orjson.dumps({"error": {"message": repr(error)}})


class LemonadeLike(Managed):
    """Lemonade with `llamacpp.args` "--slot-save-path ..." and auto_evict=true; `idle` is its downsize."""

    def flags(self, model: Path, port: int) -> list[str]:
        ours = ["--slot-save-path", str(self.folder / "slots"), *small()]  # as the user's llamacpp_args
        words = f"-m {model} --ctx-size {CONTEXT} --port {port} --jinja --metrics"
        return [*words.split(), *ours]

    async def idle(self) -> None:
        """Erase every slot (`downsize`): a failure is only logged."""
        status, data = await self.asked("GET", "/slots")
        for slot in orjson.loads(data) if status == 200 else ():
            await self.asked("POST", f"/slots/{slot['id']}?action=erase", {})

    def routes(self, app: web.Application) -> None:
        for prefix in ("/api/v0", "/api/v1", "/v0", "/v1"):
            app.router.add_get(f"{prefix}/health", self._health)
        app.router.add_get("/live", _json({"status": "ok"}))
        app.router.add_get("/{path:(?!api|v0|v1|static|live|status|internal).*}", _page)

    async def _health(self, _: web.Request) -> web.Response:
        alive = {
            "model_name": self.loaded,
            "backend_url": f"{self.base}/v1",
            "recipe": "llamacpp",
            "pinned": False,
        }
        loaded = [alive] if self.process else []
        said = {"status": "ok", "version": "9.0.0", "model_loaded": self.loaded or None}
        return web.json_response({**said, "all_models_loaded": loaded, "max_models": {"llm": 1}})


class OllamaLike(Managed):
    """Ollama with a model whose chats it leaves to llama-server's own template."""

    placeholder = False  # whether it renders the chats itself

    def flags(self, model: Path, port: int) -> list[str]:
        words = f"--model {model} --port {port} --host 127.0.0.1 --no-webui --offline -c {CONTEXT} -np 1"
        logs = "--log-verbosity 4 --no-log-prefix --no-log-timestamps"
        template = "--no-jinja --chat-template chatml" if self.placeholder else ""
        rest = "--flash-attn off -b 512 -ub 512"
        return known([*f"{words} {logs} {template} {rest}".split(), *small()], self.command)

    def routes(self, app: web.Application) -> None:
        app.router.add_get("/", _text("Ollama is running"))
        app.router.add_get("/api/version", _json({"version": "0.20.0"}))
        app.router.add_route("*", "/{path:.*}", _text("404 page not found", 404))


class ServeLike(Managed):
    """`llama serve`, which is llama-server: it sleeps by itself, and a service starts it at the same port."""

    def flags(self, model: Path, port: int) -> list[str]:
        self.base = (self.bases or [self.base])[0]
        port = int(self.base.rpartition(":")[2])
        words = f"-m {model} --port {port} -c {CONTEXT} -np 1 --jinja --slots --sleep-idle-seconds 3"
        return [*words.split(), "--slot-save-path", str(self.folder / "slots"), *small()]

    async def idle(self) -> None:
        """Another program erases the slot."""
        await self.asked("POST", "/slots/0?action=erase", {})

    async def unload(self) -> None:
        """Wait until it sleeps: all its slots are lost."""
        async with asyncio.timeout(PATIENCE):
            while not orjson.loads((await self.asked("GET", "/props"))[1]).get("is_sleeping"):
                await asyncio.sleep(HEALTH_SECONDS)

    def routes(self, app: web.Application) -> None:
        """It has no other port."""


class LmStudioLike(Managed):
    """Only what LM Studio says to a path that it does not know."""

    def routes(self, app: web.Application) -> None:
        app.router.add_route("*", "/{path:.*}", _json(orjson.loads(LM_STUDIO_SAYS)))


class StudioLike(Managed):
    """Unsloth Studio with its idle unload on, which saves the slots and restores them at the next load."""

    saved: tuple[tuple[int, str], ...] = ()

    def flags(self, model: Path, port: int) -> list[str]:
        words = f"-m {model} --port {port} --parallel 1 --flash-attn on --no-context-shift -c {CONTEXT}"
        more = f"--alias tiny --metrics --slot-save-path {self.folder / 'slots'} --jinja"
        return known([*words.split(), *more.split(), *small()], self.command)

    async def idle(self) -> None:
        name = f"resume-{len(self.bases)}-slot0.bin"
        status, data = await self.asked("POST", "/slots/0?action=save", {"filename": name})
        held = status == 200 and orjson.loads(data).get("n_saved", 0) > 0
        self.saved = ((0, name),) if held else ()

    async def resumed(self) -> None:
        for slot, name in self.saved:
            await self.asked("POST", f"/slots/{slot}?action=restore", {"filename": name})
            (self.folder / "slots" / name).unlink(missing_ok=True)
        self.saved = ()

    def routes(self, app: web.Application) -> None:
        said = {"status": "healthy", "service": "Unsloth UI Backend", "chat_only": True}
        app.router.add_get("/api/health", _json(said))
        app.router.add_get("/{path:(?!api|v1).*}", _page)


def small() -> list[str]:
    """Return flags that only make the tests quick, and count tokens; the programs do not give them."""
    return ["-t", "1", "--device", "none", "--metrics"]


def known(flags: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return flags without those that the packaged library, which is no whole llama-server, lacks."""
    library = any("xllama" in word for word in command)
    gone = {"--no-webui", "--offline", "--no-log-prefix", "--no-log-timestamps", "--no-context-shift"}
    pairs = {"--log-verbosity"}
    kept, skip = list[str](), False
    for flag in flags:
        if skip or (library and flag in gone | pairs):
            skip = library and flag in pairs
            continue
        kept.append(flag)
    return kept


Handler = Callable[[web.Request], Awaitable[web.Response]]


def _json(said: Any) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(said)

    return answer


def _text(text: str, status: int = 200) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    return answer


async def _page(_: web.Request) -> web.Response:
    return web.Response(text="<!DOCTYPE html><html><body>an app</body></html>", content_type="text/html")


@asynccontextmanager
async def serving(stand_in: Managed) -> AsyncIterator[str]:
    """Serve a manager's own port; yield its URL."""
    try:
        async with TestServer(stand_in.app()) as server:
            yield str(server.make_url("")).rstrip("/")
    finally:
        await stand_in.close()
