"""`slotkeeper demo`: one session of two agents, sent to a stock engine directly and through the sidecar.

Each way has a fresh engine with the same flags, so the difference is the sidecar's. Between the two
tasks of each agent the engine is killed and started again.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.agents import SECOND_TASK, agents
from slotkeeper.bench.measure import Sample, Totals, totals
from slotkeeper.bench.models import MissingExtraError, Tiny, build
from slotkeeper.bench.play import play
from slotkeeper.bench.sessions import Turn
from slotkeeper.bench.target import Target
from slotkeeper.engine.launch import EngineBinary, NoEngineError, find_engine
from slotkeeper.engine.process import EngineDiedError

CONTEXT_TOKENS: Final = 32768  # of each slot
DIRECT: Final = "stock, directly"
THROUGH: Final = "through Slotkeeper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One engine, and what stands in front of it if anything does."""

    engine: lab.Restartable
    sidecar: Sidecar | None

    @property
    def base(self) -> str:
        return lab.url_of(self.sidecar) if self.sidecar else self.engine.base

    async def before(self, turn: Turn) -> None:
        """Kill the engine while nobody asks, and start it again."""
        if turn.label != SECOND_TASK:
            return
        if self.sidecar:
            await lab.rested(self.sidecar)
        await self.engine.restart()
        if self.sidecar:
            await lab.ready(self.sidecar)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the requests of one way cost, and what the sidecar had computed of its own."""

    samples: list[Sample]
    spent: lab.Spent

    @property
    def totals(self) -> Totals:
        return totals(self.samples)

    @property
    def waited_for(self) -> int:
        """Tokens computed while a client waited."""
        return self.totals.computed + self.spent.plant

    @property
    def computed(self) -> int:
        return self.waited_for + self.spent.idle

    @property
    def ratio(self) -> float:
        return self.computed / max(1, self.totals.oracle)


ROWS: Final[Mapping[str, Callable[[Played], int]]] = {
    "requests": lambda played: played.totals.requests,
    "prompt tokens": lambda played: played.totals.prompt,
    "  computed, while a client waited": lambda played: played.waited_for,
    "  computed ahead, in pauses": lambda played: played.spent.idle,
    "  oracle: the least possible": lambda played: played.totals.oracle,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where the session is played."""

    binary: EngineBinary
    model: Path
    folder: Path

    @asynccontextmanager
    async def open(self, way: str) -> AsyncIterator[Scene]:
        """A fresh engine."""
        slots = self.folder / ("direct" if way == DIRECT else "through")
        slots.mkdir()
        flags = lab.stock_flags(self.binary, self.model, slots, context_tokens=CONTEXT_TOKENS)
        async with lab.restartable(self.binary, flags, self.folder / f"{way}.log") as engine:
            if way == DIRECT:
                yield Scene(engine=engine, sidecar=None)
            else:
                async with lab.keeping(engine) as sidecar:
                    yield Scene(engine=engine, sidecar=sidecar)


async def demo(*, engine: str | None, model: str) -> int:
    """Play, compare, print. Returns the exit code."""
    console = Console()
    try:
        tiny = Tiny(model)
    except ValueError:
        console.print(f"There is no tiny model {model}; there are {', '.join(Tiny)}.")
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="slotkeeper-demo-") as folder:
            stage = Stage(binary=find_engine(engine), model=build(tiny), folder=Path(folder))
            _introduce(console, stage)
            found = await _both(stage, console)
    except (NoEngineError, MissingExtraError, EngineDiedError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    return _report(console, found)


def _introduce(console: Console, stage: Stage) -> None:
    console.print(
        f"Two agents with one system prompt, and a title request for each, on {stage.model.stem} and "
        f"llama-server {stage.binary.kind}, stock flags, two slots. After their first task the engine is "
        "killed and started again.",
        highlight=False,
    )


async def _both(stage: Stage, console: Console) -> dict[str, Played]:
    requests = _length()
    columns = (TextColumn("{task.description:<20}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    found: dict[str, Played] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        for way in (DIRECT, THROUGH):
            task = progress.add_task(way, total=requests)
            async with stage.open(way) as scene, Target(scene.base) as target:
                step = _step(progress, task)
                samples = await play(agents(), target, session=way, seen=step, before=scene.before)
                found[way] = Played(samples=samples, spent=lab.spent(scene.sidecar))
    return found


def _step(progress: Progress, task: TaskID) -> Callable[[Sample], None]:
    return lambda _: progress.advance(task)


def _length() -> int:
    """How many requests the session has, whatever is answered."""
    script = agents()
    next(script)
    count = 1
    while True:
        try:
            script.send({"role": "assistant", "content": ""})
        except StopIteration:
            return count
        count += 1


def _report(console: Console, found: dict[str, Played]) -> int:
    direct, through = found[DIRECT], found[THROUGH]
    table = Table("", DIRECT, THROUGH, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figure in ROWS.items():
        table.add_row(name, *(f"{figure(played):,}" for played in (direct, through)))
    waits = (_milliseconds(played.totals.first_token_p50) for played in (direct, through))
    table.add_row("time to first token, median", *waits)
    console.print(table)
    console.print(_sentence(direct, through), highlight=False)
    failures = [s for played in found.values() for s in played.samples if s.failure]
    for sample in failures:
        console.print(
            f"[red]failed[/red] {sample.session}, {sample.label}: {escape(str(sample.failure))}",
            highlight=False,
        )
    return 1 if failures else 0


def _sentence(direct: Played, through: Played) -> str:
    saved = direct.computed - through.computed
    if saved <= 0:
        return "Slotkeeper saved nothing here: the engine's own cache did as well."
    share = saved / direct.computed
    return (
        f"Slotkeeper saved {saved:,} of {direct.computed:,} prompt tokens ({share:.0%}): the engine computed "
        f"{through.ratio:.2f} times what a perfect cache would, instead of {direct.ratio:.2f}."
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.0f} ms"
