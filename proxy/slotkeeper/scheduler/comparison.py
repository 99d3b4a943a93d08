"""Compare places on engines of different speed and load, in seconds.

What counts is when the answer ends, and how long other requests wait because of it. An engine computes one
prompt after the other, and generates nothing for its running requests meanwhile. So each token of prefill
costs its time once for its own client, and once more for each running request. LMetric (OSDI '26) places
requests by this product of new prefill tokens and batch size; here it is in seconds.

There is no threshold. A conversation stays where its state is while that is the cheapest place. It moves as
soon as waiting there costs more than computing or restoring its state elsewhere.

Engines count as equally fast while the middle halves of their measured speeds overlap. Otherwise noise could
take a slot from a conversation on one machine while an equal machine has an empty one.
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
    """The measured speeds of several engines, used to compare places on them."""

    prefill: Mapping[EngineId, float]  # tokens per second
    decode: Mapping[EngineId, float]  # tokens per second for one answer
    reply: float  # tokens of a usual answer

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
        """Return the seconds until the answer ends, plus what later requests and other clients lose.

        `price` is in tokens of prefill on this engine. `computes` of them are the request's own. `lost` of
        them belong to a state that is overwritten, which will be computed again on the fastest engine. The
        slot is free in `until` seconds.
        """
        held_up = max(until, table.work.ahead(now), table.stalled(now))
        beside = len(table.work.served) - (until > 0)
        here = (price - lost + computes * beside) / self.prefill[table.engine]
        later = lost / max(self.prefill.values())
        return held_up + here + later + self.reply / self.decode[table.engine]


def _speeds(
    tables: Collection[EngineTable], of: Callable[[Rates], tuple[Speed, float]]
) -> dict[EngineId, float]:
    """Return the speed of each engine. One with too few measurements gets the mean of the others."""
    known = sorted(
        ((of(table.rates)[0], table.engine) for table in tables if of(table.rates)[0].known),
        key=lambda one: one[0].middle,
    )
    if not known:
        return dict.fromkeys((t.engine for t in tables), fmean(of(t.rates)[1] for t in tables))
    groups: list[list[tuple[Speed, EngineId]]] = []
    for speed, engine in known:
        if groups and speed.low <= max(other.high for other, _ in groups[-1]):
            groups[-1].append((speed, engine))
        else:
            groups.append([(speed, engine)])
    usual = fmean(speed.middle for speed, _ in known)
    speeds = dict.fromkeys((table.engine for table in tables), usual)
    for group in groups:
        speeds |= dict.fromkeys((engine for _, engine in group), fmean(speed.middle for speed, _ in group))
    return speeds


def share_guesses(tables: Collection[EngineTable]) -> None:
    """Give an engine without measurements the mean of the others."""
    for name in ("prefill", "decode", "reply"):
        shown = [getattr(table.rates, name) for table in tables if name in table.rates.measured]
        for table in tables if shown else ():
            if name not in table.rates.measured:
                setattr(table.rates, name, fmean(shown))
