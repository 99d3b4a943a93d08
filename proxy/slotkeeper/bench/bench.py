"""`slotkeeper bench`: one recorded piece of agents' work on the user's own engine, stock beside Slotkeeper.

Rivals, which are other proxies, may play it too.

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
from slotkeeper.bench.lab import Served, served
from slotkeeper.bench.measure import Sample, impossible, notes, times_of, totals
from slotkeeper.bench.rivals import SILENCE_SECONDS, Rival, RivalError, serving
from slotkeeper.bench.target import CHAT, Script, Shot, Target, play
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.engine.child.launch import EngineBinary, free_port
from slotkeeper.engine.child.process import EngineDiedError, EngineProcess
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


AnyWay = Way | Rival


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
    # All flags as `up` chooses them, with further ones at the end, and the URL
    advised: Callable[[Path, Sequence[str]], tuple[Sequence[str], str]]

    ways = tuple(Way)

    @asynccontextmanager
    async def running(self, way: AnyWay, folder: Path) -> AsyncIterator[Running]:
        """Start the engine. Raises EngineDiedError."""
        slots = folder / "slots"
        slots.mkdir(mode=0o700)
        needed = way.engine if isinstance(way, Rival) else ()
        args, base = self._plain() if way is Way.STOCK else self.advised(slots, needed)
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
    async def running(self, way: AnyWay, folder: Path) -> AsyncIterator[Running]:  # noqa: ARG002
        yield Running(base=self.base)

    def slot_dir(self, folder: Path) -> Path | None:  # noqa: ARG002
        return self.folder


Engine = OwnEngine | FoundEngine


@dataclass(slots=True, kw_only=True)
class Leg:
    """One round by one way."""

    samples: list[Sample]
    used: Used
    slots: int | None = None  # of its engine
    started: bool = True


@dataclass(slots=True, kw_only=True)
class Bench:
    """All that was measured so far."""

    engine: Mapping[str, str]  # what it says of itself
    legs: dict[AnyWay, list[Leg]] = field(default_factory=dict)

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
    answered = found.failed < found.requests
    return {
        "slots": min((leg.slots for leg in legs if leg.slots), default=None),
        "requests": found.requests,
        "failed": found.failed,
        "not_started": sum(not leg.started for leg in legs) or None,
        "prompt_tokens": found.prompt if answered else None,
        "computed_tokens": found.computed if answered else None,
        "least_tokens": found.oracle if answered else None,
        "waited_ratio": found.sums.waited,
        "total_ratio": found.total,
        "waited_seconds": found.waits.waited_seconds if answered else None,
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


async def bench(engine: Engine, *, minutes: float, console: Console, rivals: Sequence[Rival] = ()) -> Bench:
    """Play rounds until the time is over, at least one. On Ctrl-C return what there is.

    Raises BenchError, EngineDiedError.
    """
    ways: tuple[AnyWay, ...] = (*engine.ways, *rivals)
    found = Bench(engine={}, legs={way: [] for way in ways})
    until, longest = time.monotonic() + 60 * minutes, 0.0
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=_length())
        with suppress(asyncio.CancelledError):
            while not found.rounds or time.monotonic() + longest <= until:
                began = time.monotonic()
                for way in random.sample(ways, len(ways)):
                    progress.reset(bar, description=f"round {len(found.legs[way]) + 1}: {way.value}")
                    found.legs[way].append(await _leg(engine, way, found, progress, bar))
                longest = max(longest, time.monotonic() - began)
    if sum(map(bool, found.legs.values())) < LEAST_WAYS or not any(found.legs[way] for way in engine.ways):
        raise BenchError(
            "Fewer than two ways have played a round to its end, so there is nothing to compare."
        )
    return found


async def _leg(engine: Engine, way: AnyWay, found: Bench, progress: Progress, bar: TaskID) -> Leg:
    session = f"round {len(found.legs[way]) + 1}"
    try:
        return await _played(engine, way, found, session, lambda _: progress.advance(bar))
    except (RivalError, EngineDiedError) as error:
        if isinstance(way, Way):
            raise
        failed = Sample(session=session, label="start", failure=str(error))
        return Leg(samples=[failed] * _length(), used=Used(), started=False)


async def _played(
    engine: Engine, way: AnyWay, found: Bench, session: str, seen: Callable[[Sample], Any]
) -> Leg:
    """Play a round. Raises BenchError, EngineDiedError, RivalError."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotkeeper-bench-")))
        running = await stack.enter_async_context(engine.running(way, folder))
        described, slots = await _described(engine, running.base)
        base, proxy, silence = running.base, None, None
        if isinstance(way, Rival):
            rival = serving(
                way,
                upstream=running.base,
                slots=slots,
                slot_dir=engine.slot_dir(folder),
                log=folder / "rival.log",
            )
            theirs = await stack.enter_async_context(rival)
            base, proxy, silence = theirs.url, theirs.pid, SILENCE_SECONDS
        else:
            found.engine = found.engine or described
            if way.rules is not None:
                ours = await stack.enter_async_context(_sidecar(engine, way, running, folder))
                base, proxy = ours.url, ours.pid
        # The engine renders the prompts for the oracle: a rival may not forward such a request.
        target = Target(base, [running.base], renders=running.base, silence_seconds=silence)
        await stack.enter_async_context(target)
        await target.fire(WARM_UP)
        meter = await stack.enter_async_context(Meter(engine=running.pid, sidecar=proxy))
        samples = await play(_script(), target, session=session, seen=seen)
    return Leg(samples=samples, used=meter.used, slots=slots)


@asynccontextmanager
async def _sidecar(engine: Engine, way: Way, running: Running, folder: Path) -> AsyncIterator[Served]:
    words = ["--rules", f"all={way.rules}"]
    if slots := engine.slot_dir(folder):
        words += ["--slot-dir", str(slots)]
    async with AsyncExitStack() as stack:
        try:
            ours = await stack.enter_async_context(served(running.base, [*QUIET, *words]))
        except TimeoutError:
            raise BenchError("The sidecar does not serve; `slotkeeper doctor` may say why.") from None
        yield ours


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


async def _described(engine: Engine, base: str) -> tuple[dict[str, str], int | None]:
    """Return build and model's name without a path, and the number of slots. Raises BenchError."""
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
    }, props.get("total_slots")


def troubles(found: Bench) -> list[str]:
    """Return what makes the figures doubtful."""
    samples = {way.value: [s for leg in legs for s in leg.samples] for way, legs in found.legs.items()}
    return list(notes(samples, alike=ALIKE_TOKENS))


def code_of(found: Bench) -> int:
    """Return the exit code: 1 if a request failed, except through a rival, or figures are impossible."""
    legs = [(way, leg.samples) for way, those in found.legs.items() for leg in those]
    failed = any(sample.failure for way, samples in legs if isinstance(way, Way) for sample in samples)
    return int(failed or any(impossible(samples, alike=ALIKE_TOKENS) for _, samples in legs))
