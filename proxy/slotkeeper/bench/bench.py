"""`slotkeeper bench`: one recorded piece of agents' work on the user's own engine, stock beside Slotkeeper.

Two agents with one system prompt call tools in turn, and their client asks for titles; the agents write the
time into the system prompt anew for their second task, as many do. Each round plays this once by every way,
in random order. All tokens are the engine's own counts, all times the client's clock.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from slotkeeper import __version__
from slotkeeper.bench.consumption import Meter, Used
from slotkeeper.bench.demo import agents
from slotkeeper.bench.lab import served
from slotkeeper.bench.measure import Sample, impossible, notes, times_of, totals
from slotkeeper.bench.target import CHAT, Script, Shot, Target, play
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.engine.child.launch import EngineBinary, free_port
from slotkeeper.engine.child.process import EngineProcess
from slotkeeper.engine.client import EngineClient

QUIET: Final = ("--log-level", "error")
SLOTS: Final = 2  # of an engine that is started here
CONTEXT_TOKENS: Final = 32_768  # of each
# Each leg's prompts begin with a random number. Its first digits may be those of a leg before.
ALIKE_TOKENS: Final = 4
LEAST_WAYS: Final = 2  # that can be compared
# Nobody counts it: an engine's first pass is slow, and every prompt begins as one that the engine has seen.
WARM_UP: Final = Shot(
    session="",
    label="warm-up",
    path=CHAT,
    body={"messages": [{"role": "system", "content": "Project 0"}, {"role": "user", "content": "?"}]}
    | {"max_tokens": 1},
    headers={},
)
CLOCKS: Final = ("Current time: 2026-03-02 09:14:07\n\n", "Current time: 2026-03-02 09:41:52\n\n")


class Way(StrEnum):
    """A way to the engine; the value is its name in reports."""

    STOCK = "stock"  # with the flags that it has, or with none of ours
    BEST_FLAGS = "stock, best flags"  # those of `slotkeeper up`
    OBSERVE = "Slotkeeper"  # rules only observe, as by default
    FIX = "Slotkeeper, rules fix"

    @property
    def rules(self) -> str | None:
        """The mode of the rules; None: no sidecar."""
        return {Way.OBSERVE: "observe", Way.FIX: "fix"}.get(self)


class BenchError(Exception):
    """The work cannot be done; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An engine that runs, with its process if it was started here."""

    base: str
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEngine:
    """The user's model, in an engine that each leg starts anew."""

    binary: EngineBinary
    words: Sequence[str]  # the model, and the user's own flags
    advised: Callable[[Path], tuple[Sequence[str], str]]  # all flags as `up` chooses them, and the URL

    ways = tuple(Way)

    @asynccontextmanager
    async def running(self, way: Way, folder: Path) -> AsyncIterator[Running]:
        """Start the engine. Raises EngineDiedError."""
        slots = folder / "slots"
        slots.mkdir(mode=0o700)
        args, base = self._plain() if way is Way.STOCK else self.advised(slots)
        process = EngineProcess(self.binary, args, base=base, log=folder / "engine.log")
        process.start()
        try:
            await process.wait_ready()
            yield Running(base=process.base, pid=process.pid)
        finally:
            await process.stop()

    def _plain(self) -> tuple[Sequence[str], str]:
        """Return only the flags that the measurement needs, and the URL."""
        port = free_port()
        fixed = f"--host 127.0.0.1 --port {port} --ctx-size {CONTEXT_TOKENS * SLOTS} --jinja --metrics"
        return [*fixed.split(), *self.words], f"http://127.0.0.1:{port}"

    def slot_dir(self, folder: Path) -> Path | None:
        return folder / "slots"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEngine:
    """An engine that runs. Each leg's prompts begin differently, so none finds what another has left."""

    base: str
    folder: Path | None = None  # its --slot-save-path, as this machine sees it

    ways = (Way.STOCK, Way.OBSERVE, Way.FIX)

    @asynccontextmanager
    async def running(self, way: Way, folder: Path) -> AsyncIterator[Running]:  # noqa: ARG002
        yield Running(base=self.base)

    def slot_dir(self, folder: Path) -> Path | None:  # noqa: ARG002
        return self.folder


Engine = OwnEngine | FoundEngine


@dataclass(slots=True, kw_only=True)
class Leg:
    """One round by one way."""

    samples: list[Sample]
    used: Used


@dataclass(slots=True, kw_only=True)
class Bench:
    """All that was measured so far."""

    engine: Mapping[str, str]  # what it says of itself
    legs: dict[Way, list[Leg]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """The whole rounds: those that all ways have played. A first one may lack ways."""
        return min((len(legs) for legs in self.legs.values() if legs), default=0)

    def report(self) -> dict[str, Any]:
        """Return the report for JSON: figures, the machine and the engine; no prompt, path or address."""
        return {
            "slotkeeper": __version__,
            "date": time.strftime("%Y-%m-%d"),
            "machine": {"cores": os.cpu_count(), "processor": processor(), "system": platform.system()},
            "engine": dict(self.engine),
            "rounds": self.rounds,
            "ways": {way.value: figures(legs[: self.rounds]) for way, legs in self.legs.items() if legs},
        }


def figures(legs: Sequence[Leg]) -> dict[str, Any]:
    """Return the figures of one way. None: unknown. Times are in seconds, sums over all rounds."""
    samples = [sample for leg in legs for sample in leg.samples]
    found = totals(samples, times_of(samples))
    return {
        "requests": found.requests,
        "failed": found.failed,
        "prompt_tokens": found.prompt,
        "computed_tokens": found.computed,
        "least_tokens": found.oracle,
        "waited_ratio": found.sums.waited,
        "total_ratio": found.total,
        "waited_seconds": found.waits.waited_seconds,
        "first_token_p50": found.waits.first_token_p50,
        "first_token_p95": found.waits.first_token_p95,
        "stall_seconds": found.waits.stall_seconds,
        "round_seconds": [totals(leg.samples).waits.waited_seconds for leg in legs],
        **Used.together(leg.used for leg in legs).shown(),
    }


def processor() -> str:
    """Return the name of this machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


async def bench(engine: Engine, *, minutes: float, console: Console) -> Bench:
    """Play rounds until the time is over, at least one. On Ctrl-C return what there is.

    Raises BenchError, EngineDiedError.
    """
    found = Bench(engine={}, legs={way: [] for way in engine.ways})
    until, longest = time.monotonic() + 60 * minutes, 0.0
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=_length())
        with suppress(asyncio.CancelledError):
            while not found.rounds or time.monotonic() + longest <= until:
                began = time.monotonic()
                for way in random.sample(engine.ways, len(engine.ways)):
                    progress.reset(bar, description=f"round {found.rounds + 1}: {way.value}")
                    found.legs[way].append(await _leg(engine, way, found, progress, bar))
                longest = max(longest, time.monotonic() - began)
    if sum(map(bool, found.legs.values())) < LEAST_WAYS:
        raise BenchError(
            "Fewer than two ways have played a round to its end, so there is nothing to compare."
        )
    return found


async def _leg(engine: Engine, way: Way, found: Bench, progress: Progress, bar: TaskID) -> Leg:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotkeeper-bench-")))
        running = await stack.enter_async_context(engine.running(way, folder))
        found.engine = found.engine or await _described(engine, running.base)
        base, sidecar = running.base, None
        if way.rules is not None:
            words = ["--rules", f"all={way.rules}"]
            if slots := engine.slot_dir(folder):
                words += ["--slot-dir", str(slots)]
            try:
                ours = await stack.enter_async_context(served(running.base, [*QUIET, *words]))
            except TimeoutError:
                raise BenchError("The sidecar does not serve; `slotkeeper doctor` may say why.") from None
            base, sidecar = ours.url, ours.pid
        target = await stack.enter_async_context(Target(base, [running.base]))
        await target.fire(WARM_UP)
        meter = await stack.enter_async_context(Meter(engine=running.pid, sidecar=sidecar))
        session = f"round {found.rounds + 1}"
        samples = await play(_script(), target, session=session, seen=lambda _: progress.advance(bar))
    return Leg(samples=samples, used=meter.used)


def _script() -> Script:
    """Return the work, with a first line that no other leg has."""
    head = f"Project {secrets.token_hex(8)}.\n"
    return agents([head + clock for clock in CLOCKS])


def _length() -> int:
    """Return the number of requests of a leg; it does not depend on the answers."""
    script, count = _script(), 1
    next(script)
    with suppress(StopIteration):
        while script.send({"role": "assistant", "content": ""}):
            count += 1
    return count


async def _described(engine: Engine, base: str) -> dict[str, str]:
    """Return the engine's build, and its model's name without a path. Raises BenchError."""
    try:
        async with EngineClient(base) as client:
            props = await client.props()
    except (EngineError, EngineGoneError) as error:
        raise BenchError(f"No llama-server answers at {base}: {error}") from error
    model = str(props.get("model_alias") or props.get("model_path") or "unknown")
    build = engine.binary.build if isinstance(engine, OwnEngine) else 0  # a library's own answer is "unknown"
    return {
        "build": f"b{build}" if build else str(props.get("build_info") or "unknown"),
        "model": Path(model).name,
        "slots": str(props.get("total_slots") or "unknown"),
    }


def troubles(found: Bench) -> list[str]:
    """Return what makes the figures doubtful."""
    samples = {way.value: [s for leg in legs for s in leg.samples] for way, legs in found.legs.items()}
    return list(notes(samples, alike=ALIKE_TOKENS))


def code_of(found: Bench) -> int:
    """Return the exit code: 1 if a request failed, or the figures are impossible."""
    samples = [leg.samples for legs in found.legs.values() for leg in legs]
    faulty = (impossible(each, alike=ALIKE_TOKENS) or any(one.failure for one in each) for each in samples)
    return int(any(faulty))
