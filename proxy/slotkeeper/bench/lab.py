"""A laboratory for tests and benchmarks: a real engine on a tiny model, and a sidecar in front of it.

Each is a context manager and ends with its block.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx

from slotkeeper.app import Sidecar, running
from slotkeeper.bench.models import Fat, Model, Tiny, build
from slotkeeper.bench.target import counted
from slotkeeper.engine.child.launch import (
    CONTEXT_TOKENS,
    EngineBinary,
    EngineKind,
    find_engine,
    free_port,
    recommended,
)
from slotkeeper.engine.child.process import EngineProcess
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.slots.table import SlotState
from slotkeeper.scheduler.types import EngineId
from slotkeeper.settings import Settings

LOOK_SECONDS: Final = 0.02
READY_SECONDS: Final = 120.0  # the probe sends some 50 prompts, and the machine may be busy
SERVED_SECONDS: Final = 60.0  # until a sidecar in its own process is ready
REST_SECONDS: Final = 300.0  # a save that took seconds on a busy machine waits for a rest of a minute or two
ANY_PORT: Final = "127.0.0.1:0"
PREFILLED: Final = "slotkeeper_prefill_tokens_total"
PAUSE_SECONDS: Final = 0.05  # until a conversation is saved, short so that tests need not wait
DRAFTS: Final = ("--spec-type", "draft-mtp")
WITH_DRAFTS: Final = (Tiny.HYBRID_MTP, Fat.HYBRID_MTP)  # models with an MTP block


def stock_flags(
    binary: EngineBinary, model: Path, folder: Path, *, slots: int = 2, context_tokens: int = 65536
) -> list[str]:
    """Return the flags of a user who read llama-server's manual, not ours. `context_tokens` is per slot.

    One thread: the models are so small that a second gains nothing, and on a busy machine two threads wait
    for each other (b11549: a hundred times slower).
    """
    words = (
        f"-m {model} --host 127.0.0.1 --port {free_port()} -c {context_tokens * slots} -np {slots} -t 1"
        f" --jinja --slots --metrics --fit off --slot-save-path {folder}"
    ).split()
    return [*words, *_no_device(binary)]


def up_flags(
    binary: EngineBinary, model: Path, folder: Path, *, slots: int = 2, context_tokens: int = CONTEXT_TOKENS
) -> list[str]:
    """Return the flags of `slotkeeper up`, with one thread and without fitting to a device."""
    advised = recommended(
        binary.known,
        port=free_port(),
        slot_dir=folder,
        slots=slots,
        context_tokens=context_tokens,
        eager_thinning=binary.eager_thinning,
    )
    return [*advised, "-m", str(model), "-t", "1", "--fit", "off", *_no_device(binary)]


def _no_device(binary: EngineBinary) -> tuple[str, ...]:
    """Return flags that turn devices off for the packaged builds, which have none or a software one.

    A user's own build keeps its devices.
    """
    return () if binary.kind is EngineKind.LLAMA_SERVER else ("--device", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Prompt tokens of a sidecar's own prefills so far."""

    plant: int = 0  # before a request was forwarded: its client waited for them
    idle: int = 0  # in idle time


def spent(started: Sidecar | None) -> Spent:
    """Return the sidecar's own prefills, by the engine's count, also cancelled ones; 0 without a sidecar."""
    if started is None:
        return Spent()
    metrics = started.driver.metrics
    counted = {
        name: int(metrics.registry.get_sample_value(PREFILLED, {"purpose": name}) or 0)
        for name in ("plant", "idle")
    }
    return Spent(plant=counted["plant"] + metrics.planting, idle=counted["idle"])


async def evaluated(base: str) -> int:
    """Return the prompt tokens that an engine has evaluated, by its own counter."""
    async with EngineClient(base) as client:
        return counted(await client.metrics())


class Restartable:
    """An engine that can be killed and started again, with the same flags and at the same address."""

    def __init__(self, binary: EngineBinary, flags: Sequence[str], log: Path) -> None:
        self.flags = replace(EngineFlags.parse(flags), build=binary.build)
        self.base = self.flags.base
        self._binary = binary
        self._args = tuple(flags)
        self._log = log
        self.process = self._new()

    def __repr__(self) -> str:
        return f"<Restartable {self.process!r}>"

    def kill(self) -> None:
        """Kill the engine as a power cut would: it writes and reports nothing."""
        self.process.kill()

    async def start(self, *more: str) -> None:
        """Start the engine, unless it runs, and wait until it serves. Raises EngineDiedError.

        The flags `more` apply to this start only.
        """
        if self.process.returncode is not None:
            self.process = self._new(more)
        if self.process.pid is None:
            self.process.start()
        await self.process.wait_ready()

    async def restart(self) -> None:
        """Kill the engine and start it again. Raises EngineDiedError."""
        self.kill()
        await self.start()

    def _new(self, more: Sequence[str] = ()) -> EngineProcess:
        return EngineProcess(self._binary, (*self._args, *more), base=self.base, log=self._log)


@asynccontextmanager
async def restartable(binary: EngineBinary, flags: Sequence[str], log: Path) -> AsyncIterator[Restartable]:
    """Start an engine that can be killed and restarted. Raises EngineDiedError if it does not start."""
    mortal = Restartable(binary, flags, log)
    try:
        await mortal.start()
        yield mortal
    finally:
        await mortal.process.stop()


@asynccontextmanager
async def tiny_engine(
    model: Model,
    engine: str,
    folder: Path,
    *args: str,
    context_tokens: int = 8192,
    recipe: Callable[..., list[str]] = stock_flags,
) -> AsyncIterator[Restartable]:
    """Start an engine on a model, with the flags of `recipe` and `args`; `engine` is for `find_engine`.

    Slot files and the log are in `folder`. A model with an MTP block uses it for speculative decoding.
    """
    slots = folder / "slots"
    slots.mkdir()
    binary = find_engine(engine)
    flags = recipe(binary, build(model), slots, context_tokens=context_tokens)
    drafts = DRAFTS if model in WITH_DRAFTS else ()
    async with restartable(binary, [*flags, *drafts, *args], folder / "engine.log") as started:
        yield started


@asynccontextmanager
async def engine(binary: EngineBinary, flags: Sequence[str], log: Path) -> AsyncIterator[EngineProcess]:
    """Start an engine. Raises EngineDiedError if it does not start."""
    async with restartable(binary, flags, log) as started:
        yield started.process


def settings_of(**values: Any) -> Settings:
    """Return settings of these values, which may override the constants of `Settings`, too."""
    constants = {name for name in values if name not in Settings.model_fields}
    own = {name: _fixed(name, values.pop(name)) for name in constants}
    kind: type[Settings] = type("SettingsOfTests", (Settings,), own)
    return kind(**values)


def _fixed(name: str, value: Any) -> property:
    getattr(Settings, name)  # fails for a name that is neither a setting nor a constant
    return property(lambda _: value)


@asynccontextmanager
async def in_front_of(base: str, flags: EngineFlags | None = None, **settings: Any) -> AsyncIterator[Sidecar]:
    """Run a sidecar that has probed the engine at `base`. `settings` override those of the laboratory."""
    ours: dict[str, Any] = {
        "upstream": (base,),
        "listen": ANY_PORT,
        "admin_listen": ANY_PORT,
        "drain_delay": 0,
        "read_flags": False,  # off unless a test wants it
        "drain_timeout": 5,
    }
    async with running(
        settings_of(**(ours | settings)), {EngineId(base): flags} if flags else None
    ) as started:
        await ready(started)
        yield started


@asynccontextmanager
async def sidecar(base: str, flags: EngineFlags | None = None, **settings: Any) -> AsyncIterator[str]:
    """Run a sidecar; yield the URL of its data port once it has probed the engine at `base`."""
    async with in_front_of(base, flags, **settings) as started:
        yield url_of(started)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A sidecar in its own process."""

    url: str
    admin: str  # URL of its admin port
    pid: int


@asynccontextmanager
async def served(
    upstream: str, words: Sequence[str], stderr: int | None = None, *, tree: Path | None = None
) -> AsyncIterator[Served]:
    """Run `slotkeeper serve` in its own process, as users do; `words` are further arguments.

    `tree`: another checkout to run it from. Raises TimeoutError if it is not ready in time.
    """
    port, admin = free_port(), free_port()
    fixed = f"serve --upstream {upstream} --listen 127.0.0.1:{port} --admin-listen 127.0.0.1:{admin}"
    line = [*f"{fixed} --drain-delay 0 --drain-timeout 1".split(), *words]
    path = {"PYTHONPATH": str(tree / "proxy")} if tree else {}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "slotkeeper", *line, stderr=stderr, env={**os.environ, **path}
    )
    try:
        async with asyncio.timeout(SERVED_SECONDS), httpx.AsyncClient() as client:
            while not await _answers(client, f"http://127.0.0.1:{admin}/readyz"):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)
        yield Served(url=f"http://127.0.0.1:{port}", admin=f"http://127.0.0.1:{admin}", pid=process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


@asynccontextmanager
async def keeping(engine: Restartable, **settings: Any) -> AsyncIterator[Sidecar]:
    """Run a sidecar that keeps snapshots in the engine's folder, and saves soon after each request."""
    ours = {"slot_dir": engine.flags.slot_save_path, "save_pause": PAUSE_SECONDS}
    async with in_front_of(engine.base, engine.flags, **(ours | settings)) as started:
        yield started


def url_of(started: Sidecar) -> str:
    """Return the URL of the sidecar's data port."""
    return f"http://{started.addresses[0]}"


async def ready(started: Sidecar) -> None:
    """Wait until all engines are probed and all routers' models are known. Raises TimeoutError."""
    engines = started.driver.engines

    def known(link: EngineLink) -> bool:
        router = engines.routers.get(link.engine)
        return link.ready or not link.listed or (router is not None and bool(router.listing.models))

    async with asyncio.timeout(READY_SECONDS):
        while not all(map(known, engines.links.values())):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(LOOK_SECONDS)


async def restarted(mortal: Restartable, started: Sidecar) -> None:
    """Kill the engine, start it again, and wait until the sidecar has probed it. Raises TimeoutError."""
    (link,) = started.driver.links.values()
    before = link.process
    await mortal.restart()
    async with asyncio.timeout(READY_SECONDS):
        while not link.ready or link.process == before:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(LOOK_SECONDS)


async def rested(started: Sidecar) -> None:
    """Wait until all idle work is done: all slots are idle and saved. Raises TimeoutError."""
    async with asyncio.timeout(REST_SECONDS):
        while not _rests(started):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(LOOK_SECONDS)


def _rests(started: Sidecar) -> bool:
    placement = started.driver.placement
    if started.driver.learning:
        return False
    tables = placement.tables.values()
    seen = not any(table.unseen for table in tables)  # before GET /slots was read, no idle work begins
    idle = all(state is SlotState.IDLE for table in tables for state in table.states)
    return seen and idle and not placement.unsaved(started.driver.now())
