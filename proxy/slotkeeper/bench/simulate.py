"""`slotkeeper simulate`: the real scheduler with many simulated engines.

Two bounds are compared with the gateways' rules: one sidecar that chooses among all engines itself, and one
large cache, which reuses the longest prefix that any earlier prompt or reply had. Figures are those of
`slotkeeper.scheduler.figures`; the oracle is that of the whole fleet, even beyond what one machine can know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Final

from slotkeeper.bench.gateways import GATEWAYS, Choose
from slotkeeper.bench.measure import percentile
from slotkeeper.bench.simulated_fleet import (
    Asked,
    Moved,
    SimulatedSidecar,
    SimulatedStore,
    VirtualClock,
)
from slotkeeper.bench.simulated_load import LoadProfile, SimulatedTurn
from slotkeeper.bench.timed_engine import EngineRates, traits_of
from slotkeeper.scheduler.costs import GIB, Limits
from slotkeeper.scheduler.effects import Report
from slotkeeper.scheduler.engine_model import Memory
from slotkeeper.scheduler.figures import Sums, of_request, oracle
from slotkeeper.scheduler.prompt_tree import PromptTree

ONE_SIDECAR: Final = "one-sidecar"
WAYS: Final = (*GATEWAYS, ONE_SIDECAR)


class Files(StrEnum):
    """Where snapshots of slots are kept."""

    NONE = "none"
    LOCAL = "local"  # a folder for each sidecar
    SHARED = "shared"  # a folder for each sidecar, and one store for all


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """The parameters of one fleet."""

    engines: int
    way: str  # how a sidecar is chosen: one of `WAYS`
    files: Files = Files.LOCAL
    slots: int = 4
    memory: Memory = Memory.DENSE
    rates: EngineRates = field(default_factory=EngineRates)
    hot_bytes: int = 64 * GIB  # of each sidecar's folder
    store_bytes: int = 1024 * GIB


@dataclass(slots=True)
class Simulated:
    """The results of one fleet."""

    shape: FleetShape
    sums: Sums = field(default_factory=Sums)
    moved: Moved = field(default_factory=Moved)
    known: int = 0  # prompt tokens that one large cache would have reused
    first: list[float] = field(default_factory=list)  # seconds to the first token
    requests: list[int] = field(default_factory=list)  # of each sidecar
    seconds: float = 0.0  # of simulated time
    took: float = 0.0  # of real time

    @property
    def large_cache(self) -> float:
        """The hit rate of one large cache."""
        return self.known / self.sums.prompt_tokens if self.sums.prompt_tokens else 0.0

    @property
    def busiest(self) -> float:
        """Requests of the busiest sidecar, divided by the mean."""
        return max(self.requests) * len(self.requests) / max(1, sum(self.requests))

    def shown(self) -> dict[str, Any]:
        """Return the results for JSON."""
        shape, sums = self.shape, self.sums
        return {
            "engines": shape.engines,
            "way": shape.way,
            "files": shape.files.value,
            "requests": sums.requests,
            "prompt_tokens": sums.prompt_tokens,
            "hit_rate": _rounded(sums.hit_rate),
            "large_cache": round(self.large_cache, 4),
            "waited": _rounded(sums.waited),
            "total": _rounded(sums.total),
            **{
                f"first_token_p{percent}": _rounded(percentile(self.first, percent))
                for percent in (50, 95, 99)
            },
            "saved_bytes": self.moved.saved,
            "restored_bytes": self.moved.restored,
            "sent_bytes": self.moved.sent,
            "fetched_bytes": self.moved.fetched,
            "busiest": round(self.busiest, 2),
            "seconds": round(self.seconds, 1),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


class Fleet:
    """The sidecars, and the rule that chooses between them."""

    def __init__(
        self, shape: FleetShape, clock: VirtualClock, reports: Callable[[Report, Asked], None]
    ) -> None:
        traits = traits_of(shape.memory, shape.slots, shape.rates, files=shape.files is not Files.NONE)
        shared = shape.files is Files.SHARED
        store = SimulatedStore(shape.store_bytes, shape.rates) if shared else None
        limits = Limits(hot_bytes=shape.hot_bytes, cold_bytes=shape.store_bytes if shared else 0)
        names = [f"e{n}" for n in range(shape.engines)]
        groups = [names] if shape.way == ONE_SIDECAR else [[name] for name in names]
        make = partial(SimulatedSidecar, store=store, reports=reports)
        self.sidecars = [make(group, traits, shape.rates, limits, clock) for group in groups]
        self.choose: Choose = GATEWAYS[shape.way](self.sidecars) if shape.way in GATEWAYS else lambda *_: 0


class Simulation:
    """One load on one fleet."""

    def __init__(self, load: LoadProfile, shape: FleetShape) -> None:
        self._clock = VirtualClock()
        self._tree = PromptTree()
        self._known: dict[int, int] = {}  # tokens that one large cache has of each unfinished turn's prompt
        self.outcome = Simulated(shape)
        self._fleet = Fleet(shape, self._clock, self._report)
        self._left = len(load.conversations)
        self.outcome.requests = [0] * len(self._fleet.sidecars)
        for name, begin in load.conversations.items():
            self._next(name, begin(), pause=False)

    @property
    def sidecars(self) -> Sequence[SimulatedSidecar]:
        return self._fleet.sidecars

    def run(self) -> Simulated:
        begun = time.monotonic()
        self._clock.run_until(lambda: self._left == 0)
        outcome = self.outcome
        outcome.seconds, outcome.took = self._clock.now, time.monotonic() - begun
        for sidecar in self._fleet.sidecars:
            for name in ("saved", "restored", "sent", "fetched", "idle"):
                setattr(outcome.moved, name, getattr(outcome.moved, name) + getattr(sidecar.moved, name))
        outcome.sums.idle = outcome.moved.idle
        return outcome

    def _next(self, name: str, turns: Iterator[SimulatedTurn], *, pause: bool = True) -> None:
        turn = next(turns, None)
        if turn is None:
            self._left -= 1
            return
        sent = max(turn.at, self._clock.now + (turn.pause if pause else 0.0))
        self._clock.at(sent, lambda: self._send(name, turn, turns))

    def _send(self, name: str, turn: SimulatedTurn, turns: Iterator[SimulatedTurn]) -> None:
        self._known[id(turn)] = min(self._tree.longest(turn.prompt), len(turn.prompt) - 1)
        chosen = self._fleet.choose(name, turn.prompt)
        self.outcome.requests[chosen] += 1

        def over() -> None:
            self._tree.add(turn.prompt + turn.reply, self._clock.now)
            self._next(name, turns)

        self._fleet.sidecars[chosen].ask(name, turn, over)

    def _report(self, report: Report, asked: Asked) -> None:
        usage, known, outcome = report.usage, self._known.pop(id(asked.turn)), self.outcome
        if usage is None:
            raise AssertionError("a simulated engine always reports figures")
        outcome.known += known
        outcome.first.append(asked.first - asked.came)
        outcome.sums.add(
            **of_request(usage, oracle(usage, known), report.reused_seconds, report.step_seconds),
            client=usage.evaluated,
            plant=usage.planted,
        )


def shapes_of(
    engines: Sequence[int], ways: Sequence[str], files: Sequence[Files], **more: Any
) -> list[FleetShape]:
    """Return every combination; with one engine there is no choice of a sidecar and no shared store."""
    alone = dict.fromkeys(Files.LOCAL if where is Files.SHARED else where for where in files)
    return [
        FleetShape(engines=count, way=way, files=where, **more)
        for count in engines
        for where in (alone if count == 1 else files)
        for way in ((ONE_SIDECAR,) if count == 1 else ways)
    ]
