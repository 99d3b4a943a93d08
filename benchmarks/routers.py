"""Real routers over tiny models, and conversations with several of them."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import orjson

from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny, build
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.engine.child.launch import find_engine, free_port
from slotkeeper.engine.routers.router_client import RouterClient
from slotkeeper.scheduler.policies.router import ModelStatus
from slotkeeper.scheduler.types import ModelName

BUILD: Final = "b10434"  # the newer build is a library without router mode
LIBRARY_BUILD: Final = "b11549"  # for llama-swap, which starts any server
MODELS: Final = {"coder": Tiny.DENSE, "writer": Tiny.HYBRID}
ALIAS: Final = "gpt-x"  # alias of the first model
CONTEXT: Final = 16384
LOOK_SECONDS: Final = 0.05
PATIENCE: Final = 120.0  # seconds until a wait counts as failed
CONTROL_SECONDS: Final = 60.0  # for one answer; a stalled router would never answer

PRESET: Final = f"""[*]
slots = true
metrics = true
jinja = true
np = 2
kvu = off
c = {CONTEXT}
cache-ram = 0
t = 1
stop-timeout = 5
"""


def preset(folder: Path, **more: str) -> Path:
    """Write a preset of the models, and of `more` (name and path); return its path."""
    paths = {name: str(build(tiny)) for name, tiny in MODELS.items()} | more
    sections = [f"[{name}]\nmodel = {path}\n" for name, path in paths.items()]
    sections[0] += f"alias = {ALIAS}\n"
    file = folder / "models.ini"
    file.write_text(PRESET + "".join(sections))
    return file


def router_flags(folder: Path, *, most: int = 1, **more: str) -> list[str]:
    """Return the flags of a router that loads at most this many models. Slot files are in `folder`/slots."""
    slots = folder / "slots"
    slots.mkdir(exist_ok=True)
    words = f"--models-preset {preset(folder, **more)} --models-max {most} --slot-save-path {slots}"
    return f"{words} --host 127.0.0.1 --port {free_port()} --device none".split()


@asynccontextmanager
async def router(folder: Path, *args: str, most: int = 1, **more: str) -> AsyncIterator[lab.Restartable]:
    """Run a router with `router_flags` and these arguments."""
    flags = [*router_flags(folder, most=most, **more), *args]
    async with lab.restartable(find_engine(BUILD), flags, folder / "router.log") as started:
        yield started


# -- llama-swap ------------------------------------------------------------------------------------------

PROGRAM: Final = "llama-swap"  # must be on PATH


@dataclass
class Program:
    """A process of llama-swap. `words` start it; it can be started again at the same address.

    Its models save their slots in `slots`.
    """

    words: Sequence[str]
    log: Path
    base: str
    slots: Path
    process: asyncio.subprocess.Process | None = None

    @classmethod
    @asynccontextmanager
    async def of(cls, folder: Path, config: Mapping[str, Any]) -> AsyncIterator[Program]:
        """Run the program with this configuration, which it reads from a file in `folder`."""
        file, listen = folder / "llama-swap.yaml", f"127.0.0.1:{free_port()}"
        file.write_bytes(orjson.dumps(config))  # JSON is YAML
        words = (PROGRAM, "--config", str(file), "--listen", listen)
        program = cls(words, folder / "llama-swap.log", f"http://{listen}", folder / "slots")
        try:
            await program.start()
            yield program
        finally:
            await program.stop()

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(*self.words, stdout=log, stderr=log)
        async with asyncio.timeout(PATIENCE), fresh_client(self.base) as client:
            while not await _answers(client):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(LOOK_SECONDS)

    async def stop(self) -> None:
        if self.process:
            self.process.terminate()
            await self.process.wait()


@asynccontextmanager
async def llama_swap(
    folder: Path, *, together: bool = False, cache_mib: int = 0, build_name: str = LIBRARY_BUILD
) -> AsyncIterator[Program]:
    """Run llama-swap with the models, of which one is loaded at a time, or all `together`."""
    slots, binary, models = folder / "slots", find_engine(build_name), dict[str, Any]()
    slots.mkdir(exist_ok=True)
    for name, tiny in MODELS.items():
        flags = lab.stock_flags(binary, build(tiny), slots, context_tokens=CONTEXT // 2)
        port = flags[flags.index("--port") + 1]
        models[name] = {
            "cmd": shlex.join(binary.command([*flags, "--cache-ram", str(cache_mib)])),
            "proxy": f"http://127.0.0.1:{port}",
            "env": [f"{key}={value}" for key, value in binary.settings.items()],
        }
    groups = {"all": {"swap": not together, "exclusive": not together, "members": [*models]}}
    async with Program.of(folder, {"models": models, "groups": groups}) as program:
        yield program


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        await client.get("/health")
    except httpx.TransportError:
        return False
    return True


async def resident_in_llama_swap(folder: Path, turns: int) -> Sequence[Talk]:
    """Play the same conversations with all models loaded, each conversation in its own slot."""
    found = talks()
    async with llama_swap(folder, together=True) as started, fresh_client(started.base) as client:
        for _ in range(turns):
            for n, talk in enumerate(found):
                await talk.turn(client, id_slot=n // len(MODELS))
    return found


async def status(base: str, model: str) -> ModelStatus:
    """Return the state of a model, by the router's listing, which loads no model."""
    async with RouterClient(base) as client:
        listing = await client.listing()
    return next(entry.status for entry in listing.models if entry.name == ModelName(model))


async def comes_to(base: str, model: str, wanted: ModelStatus) -> None:
    """Wait until the router reports this state of the model. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                if await status(base, model) is wanted:
                    return
            except (EngineError, EngineGoneError):
                pass
            await asyncio.sleep(LOOK_SECONDS)


def child_of(started: lab.Restartable, model: str) -> int:
    """Return the process that has this model loaded."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has just ended
            continue
        if parent == started.process.pid and words[words.index("--alias") + 1 :][:1] == [model]:
            return int(path.parent.name)
    raise AssertionError(f"{model} is not loaded")


# -- conversations ---------------------------------------------------------------------------------------


class NoAnswerError(Exception):
    """The engine or the router answered with an error."""


@dataclass
class Talk:
    """One conversation with one model, whose questions are fixed."""

    model: str
    name: str
    words: int = 400  # in its first message
    each: int = 60  # in each later one
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    computed: int = 0  # prompt tokens, by the engine's own figures
    answers: list[str] = field(default_factory=list)
    path: str = "/v1/chat/completions"

    def asks(self) -> list[Mapping[str, Any]]:
        """Return the messages of its next turn."""
        turn = len(self.answers)
        count = self.each if turn else self.words
        text = " ".join(f"{self.name}{turn}x{n}" for n in range(count))
        self.messages.append({"role": "user", "content": text})
        return self.messages

    async def turn(self, client: httpx.AsyncClient, **more: Any) -> httpx.Response:
        """Send one turn. Raises NoAnswerError for every answer that is not complete."""
        body = {"model": self.model, "messages": self.asks(), "max_tokens": 4, "temperature": 0, **more}
        response = await client.post(self.path, json=body)
        if response.status_code != 200:
            raise NoAnswerError(response.text)
        said = response.json()
        self.computed += said["timings"]["prompt_n"]
        message = said["choices"][0]["message"]
        self.messages.append({"role": "assistant", "content": message["content"]})
        self.answers.append(message["content"])
        return response


def talks(each: int = 2) -> list[Talk]:
    """Return this many conversations with each model, in turn."""
    return [Talk(model, f"{model}{n}") for n in range(each) for model in MODELS]


def fresh_client(base: str, *, seconds: float = PATIENCE) -> httpx.AsyncClient:
    """Return a client that makes a connection for each request, because a router closes them."""
    return httpx.AsyncClient(base_url=base, timeout=seconds, limits=httpx.Limits(max_keepalive_connections=0))


async def resident(folder: Path, turns: int) -> Sequence[Talk]:
    """Play the same conversations with all models loaded, each conversation in its own slot."""
    found = talks()
    async with router(folder, most=0) as started:
        async with RouterClient(started.base) as control:
            for model in MODELS:
                await control.load(ModelName(model))
                await comes_to(started.base, model, ModelStatus.LOADED)
        async with fresh_client(started.base) as client:
            for _ in range(turns):
                for n, talk in enumerate(found):
                    await talk.turn(client, id_slot=n // len(MODELS))
    return found
