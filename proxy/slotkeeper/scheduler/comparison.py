"""Places on engines of different speed and load, compared in seconds.

What counts is when the answer is over, and how long others wait for that. Prompts are computed one after the
other, and while the engine computes one, nothing is generated for the requests that run there beside it. So
each token of prefill costs its time once for its own client and once for each of theirs: the product of new
prefill tokens and batch size by which LMetric (OSDI '26) places requests, here in seconds.

There is no threshold: a conversation stays where its state is as long as that is the cheapest, and goes
elsewhere once waiting costs more than computing or restoring it there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean

from slotkeeper.scheduler.table import EngineTable


@dataclass(frozen=True, slots=True)
class Comparison:
    """One place. `price` is in tokens of prefill of its engine; `computes` of them are the request's own."""

    table: EngineTable
    price: float
    computes: int = 0
    until: float = 0.0  # seconds until the slot is free

    def seconds(self, reply: float, now: float) -> float:
        """Until an answer of `reply` tokens is over, with what later requests and others lose by it."""
        rates, work = self.table.rates, self.table.work
        held_up = max(self.until, work.ahead(now), self.table.stalled(now))
        beside = len(work.served) - (self.until > 0)
        return held_up + (self.price + self.computes * beside) / rates.prefill + reply / rates.decode


def mean_reply(tables: Collection[EngineTable]) -> float:
    """Tokens of an answer, as requests have been lately."""
    return fmean(table.rates.reply for table in tables) if tables else 0.0


def share_guesses(tables: Collection[EngineTable]) -> None:
    """An engine that has shown nothing yet is taken to be like the others."""
    for name in ("prefill", "decode", "reply"):
        shown = [getattr(table.rates, name) for table in tables if name in table.rates.measured]
        for table in tables if shown else ():
            if name not in table.rates.measured:
                setattr(table.rates, name, fmean(shown))
