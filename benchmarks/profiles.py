"""Seconds on engines of real proportions: each workload through the sidecar, and on the engine alone.

`python -m benchmarks.profiles [--profile NAME or FILE ...] [--work NAME ...]`. A FILE is the output of
`slotkeeper doctor --measure --json`: your own engine. Both legs are simulated (`benchmarks.simulator`) with
the same clients, which wait for each answer and think as long. The stock leg sends each request as it comes,
and the engine chooses the slot.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from rich.table import Table

from benchmarks.engine_profiles import PROFILES, EngineProfile, read_profile
from benchmarks.figures import console, keep
from benchmarks.profile_work import WORK, Phase, Step
from benchmarks.simulator.fleet import Asked, SimulatedSidecar
from benchmarks.simulator.load import SimulatedTurn
from benchmarks.simulator.timed_engine import Task, TimedEngine
from benchmarks.simulator.virtual_clock import VirtualClock
from slotkeeper.api.answers.answer import percentile
from slotkeeper.scheduler.effects import Report
from slotkeeper.scheduler.snapshots.budgets import GIB, Limits

SLOTS: Final = 2
SLOT_TOKENS: Final = 21 * 1024  # context of each slot: the longest prompt with its answer has 21,114
OWN_SECONDS: Final = 0.003  # that the sidecar takes for a request (docs/benchmarks.md, first byte)
AWAY: Final = 20.0  # seconds that a killed engine is away
LUNCH: Final = 30.0  # seconds without a request before it is killed
HOUR: Final = 3600.0
LIMITS: Final = Limits(hot_bytes=16 * GIB, hourly_bytes=64 * GIB)  # as on a disk of 1 TiB, nearly full
SEEDS: Final = (1, 2, 3, 4, 5)  # runs of each workload


class Served(Protocol):
    """What clients talk to."""

    def ask(self, conversation: str, turn: SimulatedTurn, ended: Callable[[], None]) -> None: ...

    def restart(self, seconds: float) -> None: ...


@dataclass(slots=True)
class Waits:
    """The waits of one leg, in seconds."""

    first: list[float] = field(default_factory=list)  # to the first token of each answer
    stall: float = 0.0  # the longest time between two tokens of an answer
    seconds: float = 0.0  # until the last answer ended
    computed: int = 0  # prompt tokens, also in idle time
    requests: list[Asked] = field(default_factory=list)  # of one run

    def answered(self, asked: Asked) -> None:
        self.requests.append(asked)
        self.first.append(asked.first - asked.asked_at)
        self.stall = max(self.stall, asked.stall)

    def add(self, run: Waits, seconds: float, engine: TimedEngine) -> None:
        self.first += run.first
        self.stall = max(self.stall, run.stall)
        self.seconds += seconds
        self.computed += engine.computed

    @property
    def p95(self) -> float:
        return percentile(self.first, 95) or 0.0


class StockEngine:
    """The engine without a sidecar. While it is away, clients try again until it is back."""

    def __init__(self, profile: EngineProfile, clock: VirtualClock, slots: int = SLOTS) -> None:
        self.engine = TimedEngine(profile.traits(slots), profile.rates, clock)
        self.waits = Waits()
        self._clock, self._back_at = clock, 0.0

    def ask(self, _: str, turn: SimulatedTurn, ended: Callable[[], None]) -> None:
        asked = Asked(turn, self._clock.now, ended)
        self._clock.at(self._back_at, lambda: self._run(asked))

    def _run(self, asked: Asked) -> None:
        turn = asked.turn
        task: Task = self.engine.run(
            turn.prompt, turn.reply, None, ended=lambda: self._ended(asked, task), hash_chain=turn.hash_chain
        )

    def _ended(self, asked: Asked, task: Task) -> None:
        asked.first, asked.stall = task.first, task.stall
        self.waits.answered(asked)
        asked.ended()

    def restart(self, seconds: float) -> None:
        self.engine.kill()
        self._back_at = self._clock.now + seconds


def sidecar(
    profile: EngineProfile,
    clock: VirtualClock,
    slots: int = SLOTS,
    limits: Limits | None = None,
    *,
    user: str = "",
) -> tuple[SimulatedSidecar, Waits]:
    waits = Waits()

    def reports(_: Report, asked: Asked) -> None:
        waits.answered(asked)

    served = SimulatedSidecar(
        {"engine": profile.rates},
        profile.traits(slots),
        limits or LIMITS,
        clock,
        store=None,
        reports=reports,
        own_seconds=OWN_SECONDS,
        user=user,
    )
    return served, waits


def play(served: Served, engine: TimedEngine, phases: Iterator[Phase], clock: VirtualClock) -> None:
    """Let all clients finish each phase; the engine is killed between two."""
    for number, phase in enumerate(phases):
        if number:
            until = clock.now + LUNCH
            clock.at(until, lambda: None)
            clock.run_until(lambda until=until: clock.now >= until and engine.quiet)  # type: ignore[misc]
            served.restart(AWAY)
        left = dict(phase)
        for name in phase:
            _goes_on(served, clock, name, left)
        clock.run_until(lambda left=left: not left)  # type: ignore[misc]


def _goes_on(served: Served, clock: VirtualClock, name: str, left: dict[str, Iterator[Step]]) -> None:
    step = next(left[name], None)
    if step is None:
        del left[name]
        return
    unanswered = len(step)

    def ended() -> None:
        nonlocal unanswered
        unanswered -= 1
        if not unanswered:
            _goes_on(served, clock, name, left)

    def send() -> None:
        for number, turn in enumerate(step):
            served.ask(name if number == 0 else f"{name}/{number}", turn, ended)

    clock.at(clock.now + step[0].pause, send)


def compared(profile: EngineProfile, work: str, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Return the waits of both legs, taken together over runs with other pauses and lengths."""
    stock, ours = Waits(), Waits()
    for seed in seeds:
        clock = VirtualClock()
        alone = StockEngine(profile, clock)
        play(alone, alone.engine, WORK[work](seed), clock)
        stock.add(alone.waits, clock.now, alone.engine)
        clock = VirtualClock()
        served, waits = sidecar(profile, clock)
        (engine,) = served.engines.values()
        play(served, engine, WORK[work](seed), clock)
        ours.add(waits, clock.now, engine)
    return _figures(profile.name, work, stock, ours)


def _figures(profile: str, work: str, stock: Waits, ours: Waits) -> dict[str, Any]:
    if len(stock.first) != len(ours.first):
        raise AssertionError("the two legs have different requests")
    saved = (sum(stock.first) - sum(ours.first)) / ours.seconds * HOUR
    return {
        "profile": profile,
        "work": work,
        "requests": len(ours.first),
        "stock": _rounded(sum(stock.first)),
        "ours": _rounded(sum(ours.first)),
        "ratio": _rounded(sum(ours.first) / sum(stock.first)),
        "p95_ratio": _rounded(ours.p95 / stock.p95),
        "stall_ratio": _rounded(ours.stall / stock.stall),
        "stock_computed": stock.computed,
        "computed": ours.computed,
        "saved_an_hour": _rounded(saved),
    }


def _rounded(value: float) -> float:
    return round(value, 3)


def named_profile(name: str) -> EngineProfile:
    """Return the profile of this name or in this file. Raises ArgumentTypeError."""
    known = {profile.name: profile for profile in PROFILES}
    if name in known:
        return known[name]
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name} is no profile and no file")
    return read_profile(Path(name))


def _origin(profile: EngineProfile) -> str:
    """Return where the figures of an engine are from, and whether its machine can hold it."""
    spare = profile.spare_bytes(SLOTS, SLOT_TOKENS)
    known = profile.machine_bytes > 0
    lacks = f"; two full slots need {-spare / GIB:.1f} GiB more than there is" if known and spare < 0 else ""
    return f"{profile.name}: {profile.source}; --cache-ram {profile.ram_cache_mib}{lacks}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description=__doc__)
    names = ", ".join(profile.name for profile in PROFILES)
    parser.add_argument(
        "--profile", action="append", type=named_profile, help=f"{names}, or a file", metavar="NAME"
    )
    parser.add_argument("--work", action="append", choices=WORK)
    chosen = parser.parse_args(arguments)
    profiles = chosen.profile or PROFILES
    rows = [compared(profile, work) for profile in profiles for work in chosen.work or WORK]
    table = Table(title="seconds to the first token, beside the stock engine (simulated)")
    for column in (
        "profile",
        "work",
        "stock, s",
        "ours, s",
        "ratio",
        "p95",
        "longest stall",
        "saved an hour, s",
    ):
        table.add_column(column, justify="left" if column in {"profile", "work"} else "right")
    for row in rows:
        ratios = (f"{row[name]:.3f}" for name in ("ratio", "p95_ratio", "stall_ratio"))
        seconds = (f"{row[name]:.1f}" for name in ("stock", "ours"))
        table.add_row(row["profile"], row["work"], *seconds, *ratios, f"{row['saved_an_hour']:.0f}")
    console.print(table)
    for profile in profiles:
        console.print(_origin(profile))
    if not chosen.profile and not chosen.work:
        keep("profiles", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
