"""How long clients wait for the tokens of answers. All such figures are defined here.

For one answer: the time to its first token, and its longest stall, which is the longest time between two
events of its stream from the first token on. Of many answers: the sum of the times to a first token, their
50th and 95th percentiles, and the longest stall. Metrics, dashboard, `why`, `top`, log, `replay`, `demo` and
benchmarks read these figures and compute none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from slotkeeper.api.answer import AnswerReader


class TokenTimes:
    """When the tokens of one answer came, in seconds on the clock of `read`."""

    __slots__ = ("_events", "_last", "first", "stall")

    def __init__(self) -> None:
        self.first: float | None = None  # when the first token came; None: none has
        self.stall: float | None = None  # the longest stall; None: fewer than two events, or no stream
        self._last = 0.0
        self._events = 0

    def read(self, reader: AnswerReader, clock: Callable[[], float]) -> bool:
        """Take the time, if the chunk that `reader` has just read ended an event.

        Returns whether a figure has changed, which few of the chunks do.

        An answer that is no stream has a first token, which is its first byte, and no stall.
        """
        events = reader.events
        if self.first is None:
            if not reader.first_token():
                return False
            self._events, self.first = events, clock()
            self._last = self.first
            return True
        if events == self._events:  # a part of an event, or a comment
            return False
        now = clock()
        gap, self._last, self._events = now - self._last, now, events
        if self.stall is not None and gap <= self.stall:
            return False
        self.stall = gap
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The figures of many answers, in seconds; None without any."""

    answers: int  # whose first token came
    waited_seconds: float  # the sum of their times to a first token
    first_token_p50: float | None
    first_token_p95: float | None
    stall_seconds: float | None  # the longest stall of one answer

    def shown(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {n: round(v, 6) if isinstance(v, float) else v for n, v in asdict(self).items()}


def waits(answers: Iterable[tuple[float | None, float | None]]) -> Waits:
    """Sum up answers, each by its seconds to the first token and its longest stall; None: unknown."""
    found = tuple(answers)
    first = [seconds for seconds, _ in found if seconds is not None]
    return Waits(
        answers=len(first),
        waited_seconds=sum(first),
        first_token_p50=percentile(first, 50),
        first_token_p95=percentile(first, 95),
        stall_seconds=max((stall for _, stall in found if stall is not None), default=None),
    )


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return the smallest value that `percent` % of the values do not exceed; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = -(-len(ordered) * percent // 100)  # rounded up
    return ordered[max(0, int(rank) - 1)]
