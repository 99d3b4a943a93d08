"""More agents than slots: prompt tokens computed for conversations that take turns in two slots.

`python -m benchmarks.crowd [--builds b10434 ...] [--models tiny-hybrid ...] [--conversations 2 4 8]
[--gaps 0 50 500] [--kill no yes] [--busy 0 2] [--runs 1] [--all]`. Without any of these: the cells that have
a target (4 conversations, 50 ms between requests), and from there more and fewer conversations, other gaps.

Figures are measured at the engine: `waited` and `total` are divided by an oracle that this benchmark computes
from exact token ids. `waited` is what the engine evaluated for requests (its figures in the answers) and what
was planted for them; `total` is its counter `llamacpp:prompt_tokens_total`, summed over a kill -9 and restart
in the middle. The sidecar's figures for plants and idle work must add up to that: "else" is the remainder,
such as the few tokens of a probe after a restart.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Final

from rich.progress import Progress
from rich.table import Table

from benchmarks.busy import busy_loops
from benchmarks.crowd_agents import REQUESTS, Order, Replies, crowd
from benchmarks.figures import BUILDS, console, keep
from benchmarks.ways import Scene, Way, opened
from slotkeeper.bench import lab
from slotkeeper.bench.measure import Sample, totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import Counter, Target, Turn, play
from slotkeeper.observe.log import configure

CONVERSATIONS: Final = (2, 4, 8)
GAPS: Final = (0, 50, 500)  # milliseconds
BUSY: Final = (0, 2)  # busy loops beside the measurement
MAIN: Final = (4, 50)  # conversations and gap of the cells with a target
WAITED: Final = {"b10434": 1.10, "b11549": 1.05}  # targets
TOTAL: Final = 1.20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    build: str
    model: Tiny
    conversations: int
    gap_ms: int
    killed: bool  # kill -9 in the middle
    busy: int

    @property
    def targeted(self) -> bool:
        return (self.conversations, self.gap_ms) == MAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Prompt tokens of one run."""

    requests: int
    failed: int
    inexact: int  # prompts that differ from what the oracle saw
    oracle: int
    client: int  # evaluated for requests, by the answers' figures
    plant: int  # computed by the sidecar for requests
    idle: int  # computed by the sidecar in idle time
    counted: int  # all tokens, by the engine's counter

    @property
    def waited(self) -> float:
        return (self.client + self.plant) / self.oracle

    @property
    def total(self) -> float:
        return self.counted / self.oracle

    @property
    def unaccounted(self) -> int:
        return self.counted - self.client - self.plant - self.idle


async def measure(
    cell: Cell,
    *,
    seed: int = 1,
    order: Order = Order.TURNS,
    replies: Replies = Replies.SCRIPTED,
    seen: Callable[[Sample, Scene], Any] = lambda *_: None,
) -> Found:
    """Run one cell once. `seen` is called with each answer."""
    async with AsyncExitStack() as stack:
        stack.enter_context(busy_loops(cell.busy))
        scene = await stack.enter_async_context(opened(Way.UP, cell.build, cell.model))
        target = await stack.enter_async_context(Target(scene.base))
        counter = await stack.enter_async_context(Counter([scene.engine.base]))
        await counter.read()
        left_until_killed = cell.conversations * REQUESTS // 2 if cell.killed else -1

        async def before(_: Turn) -> None:
            nonlocal left_until_killed
            await asyncio.sleep(cell.gap_ms / 1000)
            if left_until_killed == 0 and scene.sidecar:
                await counter.read()
                await lab.restarted(scene.engine, scene.sidecar)
                await counter.read()  # read before the restarted engine has counted more than the old one
            left_until_killed -= 1

        script = crowd(cell.conversations, seed=seed, order=order, replies=replies)
        samples = await play(
            script, target, session="crowd", before=before, seen=lambda sample: seen(sample, scene)
        )
        return _found(samples, scene, await counter.read() or 0)


def _found(samples: Sequence[Sample], scene: Scene, counted: int) -> Found:
    all_of_it, spent = totals(samples), scene.spent()
    return Found(
        requests=all_of_it.requests,
        failed=all_of_it.failed + all_of_it.uncounted,
        inexact=sum(not sample.exact for sample in samples),
        oracle=all_of_it.oracle,
        client=all_of_it.sums.client,
        plant=spent.plant,
        idle=spent.idle,
        counted=counted,
    )


def cells(chosen: argparse.Namespace) -> Iterator[Cell]:
    """Yield the chosen cells; if no shape is chosen, those with a target and some others."""
    kinds = product(chosen.builds, chosen.models)
    named = any((chosen.conversations, chosen.gaps, chosen.kill, chosen.busy, chosen.all))
    shapes: Sequence[tuple[int, int, str, int]]
    if named:
        shapes = tuple(
            product(
                chosen.conversations or (CONVERSATIONS if chosen.all else MAIN[:1]),
                chosen.gaps or (GAPS if chosen.all else MAIN[1:]),
                chosen.kill or ("no", "yes"),
                chosen.busy or (BUSY if chosen.all else BUSY[:1]),
            )
        )
    else:
        others = [(n, MAIN[1], "no", 0) for n in CONVERSATIONS if n != MAIN[0]]
        others += [(MAIN[0], gap, "no", 0) for gap in GAPS if gap != MAIN[1]]
        shapes = (*((*MAIN, kill, busy) for kill, busy in product(("no", "yes"), BUSY)), *others)
    for (build, model), (conversations, gap, kill, busy) in product(kinds, shapes):
        yield Cell(
            build=build,
            model=model,
            conversations=conversations,
            gap_ms=gap,
            killed=kill == "yes",
            busy=busy,
        )


async def run(chosen: argparse.Namespace) -> list[tuple[Cell, list[Found]]]:
    wanted = list(cells(chosen))
    found = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("cells", total=len(wanted) * chosen.runs)
        for cell in wanted:
            runs = []
            for number in range(chosen.runs):
                seed = chosen.seed + number
                runs.append(await measure(cell, seed=seed, order=chosen.order, replies=chosen.replies))
                progress.advance(task)
            found.append((cell, runs))
    return found


def table(rows: Sequence[tuple[Cell, Sequence[Found]]]) -> Table:
    """Return a table.

    Its tokens are of the run with the most waiting; its ratios are the worst of all runs.
    """
    shown = Table(title="prompt tokens computed, two slots (ratios to the oracle; the worst run)")
    for name in ("build", "model"):
        shown.add_column(name, no_wrap=True)
    for name in (
        "convs",
        "gap",
        "kill",
        "busy",
        "oracle",
        "client",
        "plant",
        "idle",
        "else",
        "waited",
        "total",
    ):
        shown.add_column(name, justify="right")
    for cell, runs in rows:
        worst = max(runs, key=lambda one: one.waited)
        tokens = (worst.oracle, worst.client, worst.plant, worst.idle, worst.unaccounted)
        shown.add_row(
            cell.build,
            cell.model.value,
            str(cell.conversations),
            str(cell.gap_ms),
            "yes" if cell.killed else "",
            str(cell.busy or ""),
            *(f"{number:,}" for number in tokens),
            _ratio(cell, worst.waited, WAITED.get(cell.build)),
            _ratio(cell, max(one.total for one in runs), TOTAL),
        )
    return shown


def _ratio(cell: Cell, value: float, target: float | None) -> str:
    if target is None or not cell.targeted:
        return f"{value:.2f}"
    return f"[{'green' if value <= target else 'red'}]{value:.3f}[/]"


def _figures(cell: Cell, runs: Sequence[Found]) -> dict[str, Any]:
    ratios = [asdict(one) | {"waited": one.waited, "total": one.total} for one in runs]
    return asdict(cell) | {"runs": ratios}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crowd", description=__doc__)
    parser.add_argument("--builds", nargs="+", default=list(BUILDS))
    parser.add_argument("--models", nargs="+", type=Tiny, default=list(Tiny))
    parser.add_argument("--conversations", nargs="+", type=int)
    parser.add_argument("--gaps", nargs="+", type=int, help="milliseconds between requests")
    parser.add_argument("--kill", nargs="+", choices=("no", "yes"), help="kill -9 the engine in the middle")
    parser.add_argument("--busy", nargs="+", type=int, help="number of busy loops beside it")
    parser.add_argument("--all", action="store_true", help="every combination")
    parser.add_argument("--runs", type=int, default=1, help="runs of each cell, each with the next seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--order", type=Order, default=Order.TURNS, help=", ".join(Order))
    parser.add_argument("--replies", type=Replies, default=Replies.SCRIPTED, help=", ".join(Replies))
    parser.add_argument(
        "--name", default="crowd", help="name of the file of figures, for a part of the table"
    )
    chosen = parser.parse_args(arguments)
    configure("error", "console")
    rows = asyncio.run(run(chosen))
    console.print(table(rows))
    console.print(f"targets: waited {WAITED}, total {TOTAL}, at {MAIN[0]} conversations and {MAIN[1]} ms")
    work = {"order": chosen.order.value, "replies": chosen.replies.value}
    keep(chosen.name, work | {"rows": [_figures(cell, runs) for cell, runs in rows]})
    return int(any(one.failed or one.inexact for _, runs in rows for one in runs))


if __name__ == "__main__":
    raise SystemExit(main())
