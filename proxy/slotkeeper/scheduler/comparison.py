"""Places on engines of different speed and load, compared in seconds.

What counts is when the answer is over, and how long others wait for that. Prompts are computed one after the
other, and while the engine computes one, nothing is generated for the requests that run there beside it. So
each token of prefill costs its time once for its own client and once for each of theirs: the product of new
prefill tokens and batch size by which LMetric (OSDI '26) places requests, here in seconds.

There is no threshold: a conversation stays where its state is as long as that is the cheapest, and goes
elsewhere once waiting costs more than computing or restoring it there.

Engines are of one speed as long as the middle halves of what they have shown overlap: else noise would take
a slot from a conversation on one machine, while one is empty on its twin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from slotkeeper.scheduler.costs import Rates, Speed
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.types import EngineId


@dataclass(frozen=True, slots=True)
class Comparison:
    """What engines have shown, to compare places on them."""

    prefill: Mapping[EngineId, float]  # tokens a second
    decode: Mapping[EngineId, float]
    reply: float  # tokens of an answer

    @classmethod
    def of(cls, tables: Collection[EngineTable]) -> Self:
        return cls(
            _speeds(tables, lambda rates: (rates.prefills, rates.prefill)),
            _speeds(tables, lambda rates: (rates.decodes, rates.decode)),
            fmean(table.rates.reply for table in tables) if tables else 0.0,
        )

    def seconds(
        self,
        table: EngineTable,
        price: float,
        now: float,
        *,
        computes: int = 0,
        lost: float = 0.0,
        until: float = 0.0,
    ) -> float:
        """Until the answer is over, with what later requests and others lose by it.

        `price` is in tokens of prefill there. Of them `computes` are the request's own, and `lost` those of
        a state that is overwritten: it will be computed again where that is quickest. The slot is free in
        `until` seconds.
        """
        held_up = max(until, table.work.ahead(now), table.stalled(now))
        beside = len(table.work.served) - (until > 0)
        here = (price - lost + computes * beside) / self.prefill[table.engine]
        later = lost / max(self.prefill.values())
        return held_up + here + later + self.reply / self.decode[table.engine]


def _speeds(
    tables: Collection[EngineTable], of: Callable[[Rates], tuple[Speed, float]]
) -> dict[EngineId, float]:
    """Of each engine; one that has shown too little yet is taken to be like the others."""
    known = sorted(
        ((of(table.rates)[0], table.engine) for table in tables if of(table.rates)[0].known),
        key=lambda one: one[0].middle,
    )
    if not known:
        return dict.fromkeys((t.engine for t in tables), fmean(of(t.rates)[1] for t in tables))
    alike: list[list[tuple[Speed, EngineId]]] = []
    for speed, engine in known:
        if alike and speed.low <= max(other.high for other, _ in alike[-1]):
            alike[-1].append((speed, engine))
        else:
            alike.append([(speed, engine)])
    usual = fmean(speed.middle for speed, _ in known)
    found = dict.fromkeys((table.engine for table in tables), usual)
    for group in alike:
        found |= dict.fromkeys((engine for _, engine in group), fmean(speed.middle for speed, _ in group))
    return found


def share_guesses(tables: Collection[EngineTable]) -> None:
    """An engine that has shown nothing yet is taken to be like the others."""
    for name in ("prefill", "decode", "reply"):
        shown = [getattr(table.rates, name) for table in tables if name in table.rates.measured]
        for table in tables if shown else ():
            if name not in table.rates.measured:
                setattr(table.rates, name, fmean(shown))
