"""One sidecar over a fast and a slow engine, compared with static splits of the same agents.

`python -m benchmarks.simulated_engines`. Time to the first token, in simulated time (`benchmarks.simulator`),
so that no other work on the machine disturbs it. Each agent waits for its answer, thinks, and asks again. A
few agents show the engines' speeds first, and leave their states in the slots. A split gives the fast engine
a fixed number of agents, at least half; what the best one is depends on the load, and is known only
afterwards. With files, each machine saves and restores slots at the speed of its disk.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean, quantiles
from typing import Any, Final

from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.simulator.fleet import Asked, SimulatedSidecar
from benchmarks.simulator.load import SimulatedTurn, Synthetic
from benchmarks.simulator.timed_engine import EngineRates, traits_of
from benchmarks.simulator.virtual_clock import VirtualClock
from slotkeeper.scheduler.effects import Report
from slotkeeper.scheduler.slots.engine_model import Memory
from slotkeeper.scheduler.snapshots.budgets import Limits

FAST: Final = EngineRates(prefill=3000.0, decode=60.0)
SLOTS: Final = 2  # of each engine
AGENT: Final = Synthetic(
    systems=1, system_tokens=1500, first_tokens=1500, turn_tokens=500, reply_tokens=24, begin_within=0.0
)
SHOWING: Final = replace(AGENT, conversations=4, turns=4, pause=0.2, seed=0)
SEEDS: Final = 5  # runs of one load, whose waits are taken together
P95: Final = 94  # index among the 99 cut points of `quantiles`


@dataclass(frozen=True, slots=True)
class Work:
    """Agents at work: how many, their turns, and the seconds between an answer and the next question."""

    agents: int
    turns: int
    think: float

    def load(self, seed: int) -> Synthetic:
        return replace(AGENT, conversations=self.agents, turns=self.turns, pause=self.think, seed=seed)


def worked(clock: VirtualClock, agents: Synthetic, front: Callable[[int], SimulatedSidecar]) -> None:
    """Run agents at the sidecars that `front` gives for their numbers, until all have their answers."""
    left = agents.conversations

    def goes_on(sidecar: SimulatedSidecar, name: str, turns: Iterator[SimulatedTurn]) -> None:
        nonlocal left
        turn = next(turns, None)
        if turn is None:
            left -= 1
            return
        clock.at(
            clock.now + turn.pause, lambda: sidecar.ask(name, turn, partial(goes_on, sidecar, name, turns))
        )

    for number, (name, turns) in enumerate(agents.load().conversations.items()):
        goes_on(front(number), f"{agents.seed}/{name}", turns())
    clock.run_until(lambda: left == 0)


def waits(slower: float, fast: int | None, work: Work, *, files: bool, seed: int) -> list[float]:
    """Return each wait for a first token, in seconds.

    `fast`: number of agents at the fast engine; None: one sidecar over both.
    """
    slow = replace(FAST, prefill=FAST.prefill / slower, decode=FAST.decode / slower)
    groups = [{"fast": FAST, "slow": slow}] if fast is None else [{"fast": FAST}, {"slow": slow}]
    clock, found = VirtualClock(), []

    def reports(_: Report, asked: Asked) -> None:
        found.append(asked.first - asked.asked_at)

    traits = traits_of(Memory.DENSE, SLOTS, FAST, files=files)
    sidecars = [
        SimulatedSidecar(group, traits, Limits(), clock, store=None, reports=reports) for group in groups
    ]
    worked(clock, SHOWING, lambda number: sidecars[number % len(sidecars)])
    found.clear()
    at_fast = work.agents if fast is None else fast
    worked(clock, work.load(seed), lambda number: sidecars[int(number >= at_fast)])
    return found


def p95(seconds: Sequence[float]) -> float:
    return quantiles(seconds, n=100)[P95]


def compared(
    slower: float, agents: int, *, turns: int = 6, think: float = 0.2, files: bool = True
) -> dict[str, Any]:
    """Compare one sidecar with the best of the static splits, each by its own measure."""
    work = Work(agents, turns, think)

    def all_waits(fast: int | None) -> list[float]:
        runs = (waits(slower, fast, work, files=files, seed=seed) for seed in range(1, SEEDS + 1))
        return [wait for run in runs for wait in run]

    ours, splits = all_waits(None), [all_waits(fast) for fast in range(agents // 2, agents + 1)]
    return {
        "slower": slower,
        **asdict(work),
        "files": files,
        "p95": p95(ours),
        "p95_ratio": p95(ours) / min(map(p95, splits)),
        "mean_ratio": fmean(ours) / min(map(fmean, splits)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated_engines", description=__doc__)
    parser.add_argument("--slower", nargs="+", type=float, default=[2, 3, 6])
    parser.add_argument("--agents", nargs="+", type=int, default=[4, 8, 12])
    parser.add_argument("--think", nargs="+", type=float, default=[0.2, 2])
    chosen = parser.parse_args(arguments)
    shown = Table(title="time to the first token, beside the best static split (simulated)")
    names = ("slot folder", "one is slower", "agents", "think, s", "p95, s", "of the best split", "mean")
    for name in names:
        shown.add_column(name, justify="right")
    rows = [
        compared(slower, agents, think=think, files=files)
        for files in (True, False)
        for slower in chosen.slower
        for agents in chosen.agents
        for think in chosen.think
    ]
    for row in rows:
        ratios = (f"{row[name]:.2f}" for name in ("p95", "p95_ratio", "mean_ratio"))
        folder = "yes" if row["files"] else "no"
        shown.add_row(folder, f"{row['slower']:g} x", str(row["agents"]), f"{row['think']:g}", *ratios)
    console.print(shown)
    keep("simulated_engines", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
