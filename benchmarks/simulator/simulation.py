"""One load on one fleet: the real scheduler with many simulated engines.

Two bounds are compared with the gateways' rules: one sidecar that chooses among all engines itself, and one
large cache, which reuses the longest prefix that any earlier prompt or reply had. Figures are those of
`slotkeeper.scheduler.requests.figures`; the oracle is that of the whole fleet, even beyond what one machine
can know.

A gateway's rule chooses a sidecar for each request. It sees what a gateway can see: the conversation's name,
the prompt, and the number of unfinished requests that it sent to each sidecar. Only LMetric also sees the
contents and the pending tokens of engines, which it needs.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from math import sqrt
from typing import Any, Final, Protocol

from benchmarks.simulator.fleet import (
    Asked,
    Moved,
    SimulatedSidecar,
    SimulatedStore,
)
from benchmarks.simulator.load import LoadProfile, SimulatedTurn
from benchmarks.simulator.timed_engine import EngineRates, traits_of
from benchmarks.simulator.virtual_clock import VirtualClock
from slotkeeper.api.answers.answer import percentile
from slotkeeper.scheduler.effects import Report
from slotkeeper.scheduler.prompts.prompt_tree import PromptTree
from slotkeeper.scheduler.prompts.tokens import WIDTH, Tokens
from slotkeeper.scheduler.requests.figures import Counted, Sums, oracle
from slotkeeper.scheduler.slots.engine_model import Memory
from slotkeeper.scheduler.snapshots.budgets import GIB, Limits

POINTS: Final = 160  # points of each sidecar on the ring, as in ketama and HAProxy at weight one
MATCHED: Final = 256 * WIDTH  # bytes of a block: prompts are compared block by block
# SMG 1.13, `smg launch --help`: --cache-threshold, --balance-abs-threshold, --balance-rel-threshold.
SMG_SHARE: Final = 0.3
SMG_ABOVE: Final = 64
SMG_TIMES: Final = 1.5
SMG_LEAST: Final = 4
HOURLY_BYTES: Final = 64 * GIB  # that a sidecar may write in an hour: the default of a disk of 1 TiB


class Worker(Protocol):
    """A sidecar as a gateway sees it."""

    @property
    def in_flight(self) -> int: ...  # unfinished requests that were sent to it

    @property
    def pending(self) -> int: ...  # prompt tokens that its engines have not computed yet

    def held(self, prompt: Tokens) -> int: ...  # the longest prefix of this prompt in a slot, in tokens


Choose = Callable[[str, Tokens], int]  # conversation's name, prompt -> index of the chosen sidecar


def round_robin(workers: Sequence[Worker]) -> Choose:
    """Choose each sidecar in turn."""
    sent = 0

    def choose(_: str, __: Tokens) -> int:
        nonlocal sent
        sent += 1
        return (sent - 1) % len(workers)

    return choose


def consistent_hash(workers: Sequence[Worker]) -> Choose:
    """Choose by the conversation's name on a ring: a sidecar that comes or goes moves only its own share."""
    points = sorted((_digest(b"%d/%d" % (n, p)), n) for n in range(len(workers)) for p in range(POINTS))
    places = [place for place, _ in points]

    def choose(conversation: str, _: Tokens) -> int:
        at = bisect_right(places, _digest(conversation.encode()))
        return points[at % len(points)][1]

    return choose


def cache_aware(workers: Sequence[Worker]) -> Choose:
    """Choose by SMG's rule: the sidecar that got the longest prefix of this prompt, if that is long enough.

    If that sidecar has far more requests than the mean, or no prefix is long enough, choose the one with the
    fewest.
    """
    owners: dict[bytes, int] = {}  # the chained digest of blocks -> the sidecar that got them last

    def choose(_: str, prompt: Tokens) -> int:
        loads = [worker.in_flight for worker in workers]
        chain = _chain(prompt)
        known = next((n for n in range(len(chain), 0, -1) if chain[n - 1] in owners), 0)
        chosen = loads.index(min(loads))
        if known and known * MATCHED >= SMG_SHARE * len(prompt.packed):
            owner = owners[chain[known - 1]]
            chosen = chosen if _too_loaded(loads[owner], sum(loads) / len(loads)) else owner
        owners.update(dict.fromkeys(chain, chosen))
        return chosen

    return choose


def _too_loaded(load: int, mean: float) -> bool:
    above = min(SMG_ABOVE, max(SMG_LEAST, 2 * sqrt(mean)))
    return load > mean + above and load > SMG_TIMES * mean


def lmetric(workers: Sequence[Worker]) -> Choose:
    """Choose by LMetric (OSDI'26): least new prompt tokens, with pending ones, times the batch."""

    def price(worker: Worker, prompt: Tokens) -> tuple[float, int]:
        new = len(prompt) - worker.held(prompt) + worker.pending
        return new * (1 + worker.in_flight), worker.in_flight

    def choose(_: str, prompt: Tokens) -> int:
        return min(range(len(workers)), key=lambda n: price(workers[n], prompt))

    return choose


GATEWAYS: Final[dict[str, Callable[[Sequence[Worker]], Choose]]] = {
    "round-robin": round_robin,
    "consistent-hash": consistent_hash,
    "cache-aware": cache_aware,
    "lmetric": lmetric,
}


def _chain(prompt: Tokens) -> list[bytes]:
    digest, chain = b"", []
    for at in range(0, len(prompt.packed) - MATCHED + 1, MATCHED):
        digest = blake2b(digest + prompt.packed[at : at + MATCHED], digest_size=8).digest()
        chain.append(digest)
    return chain


def _digest(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest())


# -- the simulation -------------------------------------------------------------------------------------

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
        cold = shape.store_bytes if shared else 0
        limits = Limits(hot_bytes=shape.hot_bytes, cold_bytes=cold, hourly_bytes=HOURLY_BYTES)
        names = [f"e{n}" for n in range(shape.engines)]
        groups = [names] if shape.way == ONE_SIDECAR else [[name] for name in names]
        make = partial(SimulatedSidecar, store=store, reports=reports)
        self.sidecars = [make(dict.fromkeys(group, shape.rates), traits, limits, clock) for group in groups]
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

        def ended() -> None:
            self._tree.add(turn.prompt + turn.reply, self._clock.now)
            self._next(name, turns)

        self._fleet.sidecars[chosen].ask(name, turn, ended)

    def _report(self, report: Report, asked: Asked) -> None:
        usage, known, outcome = report.usage, self._known.pop(id(asked.turn)), self.outcome
        if usage is None:
            raise AssertionError("a simulated engine always reports figures")
        outcome.known += known
        outcome.first.append(asked.first - asked.asked_at)
        outcome.sums.count(
            Counted(
                usage=usage,
                oracle=oracle(usage, known),
                unknown=None,
                reused_seconds=report.reused_seconds,
                step_seconds=report.step_seconds,
            )
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
