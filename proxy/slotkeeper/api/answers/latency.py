"""How long clients wait for the tokens of answers. All such figures are defined here.

For one answer: the time to its first token, and its longest stall, which is the longest time between two
events of its stream from the first token on. Of many answers: the sum of the times to a first token, their
50th and 95th percentiles, and the longest stall. Metrics, dashboard, `why`, `top`, log, `replay`, `demo` and
benchmarks read these figures and compute none.

The least that a client can wait for a first token is the time in which its engine computes the tokens that
any cache must compute, in one pass and without a queue: `least_seconds`. `PrefillTimes` says how long that
takes. Waits are compared with it only over requests for which both are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from operator import mul
from typing import Any, Final, NamedTuple

from slotkeeper.api.answers.answer import AnswerReader


@dataclass(slots=True, eq=False)
class TokenTimes:
    """When the tokens of one answer came, in seconds on the clock of `read`."""

    first: float | None = None  # when the first token came; None: none has
    stall: float | None = None  # the longest stall; None: fewer than two events, or no stream
    _last: float = 0.0
    _events: int = 0

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
    compared: int  # answers whose least wait is known
    compared_seconds: float | None  # the sum of their times to a first token
    least_seconds: float | None  # the sum of their least waits

    def shown(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {n: round(v, 6) if isinstance(v, float) else v for n, v in asdict(self).items()}


class Waited(NamedTuple):
    """The figures of one answer, in seconds; None: unknown."""

    first_token: float | None
    stall: float | None
    least: float | None  # the least time to its first token


def waits(answers: Iterable[Waited]) -> Waits:
    """Sum up answers."""
    found = tuple(answers)
    first = [one.first_token for one in found if one.first_token is not None]
    compared = [
        (one.first_token, one.least) for one in found if one.first_token is not None and one.least is not None
    ]
    return Waits(
        answers=len(first),
        waited_seconds=sum(first),
        first_token_p50=percentile(first, 50),
        first_token_p95=percentile(first, 95),
        stall_seconds=max((one.stall for one in found if one.stall is not None), default=None),
        compared=len(compared),
        compared_seconds=sum(waited for waited, _ in compared) if compared else None,
        least_seconds=sum(least for _, least in compared) if compared else None,
    )


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return the smallest value that `percent` % of the values do not exceed; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = -(-len(ordered) * percent // 100)  # rounded up
    return ordered[max(0, int(rank) - 1)]


# -- the least that a client can wait --------------------------------------------------------------------

UBATCH_TOKENS: Final = 512  # tokens of a stock engine's ubatch, for which prefill rates are reported
MEASURED: Final = 6  # prefills that are needed to fit three figures to them
UNLIKE: Final = 2.0  # the longest must have this many times the tokens of the shortest
ROUNDS: Final = 30  # of weighting: each lessens the weight of prefills that took unusually long
NOISE: Final = 0.01  # relative: no prefill counts as better fitted than this
EQUAL: Final = 1e-9  # relative: what is left of a diagonal if two columns tell the same
REMEMBERED: Final = 32  # last prefills of an engine, from which its times follow
NEW_SHARE: Final = 0.25  # of them, after which they are fitted again: a fit takes milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """One prefill, by its engine's own figures."""

    tokens: int  # that were computed
    context: int  # tokens in front of them
    seconds: float

    @property
    def depths(self) -> float:
        """The tokens in front of each computed token, summed up."""
        return _depths(self.tokens, self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimes:
    """How long one engine takes for a prefill."""

    pass_seconds: float  # for any number of tokens: a pass through the model, which reads all weights
    token_seconds: float  # for each token
    depth_seconds: float  # for each token, and for each token of context in front of it

    def seconds(self, tokens: int, context: int) -> float:
        """Return the time to compute `tokens` behind `context` others."""
        return self.pass_seconds + tokens * self.token_seconds + _depths(tokens, context) * self.depth_seconds


def prefill_times(prefills: Iterable[Prefilled]) -> PrefillTimes | None:
    """Fit the times of an engine to prefills of it; None if these are too few or too much alike.

    Least absolute relative errors, so that a few prefills beside other work have no effect.
    """
    found = [one for one in prefills if one.tokens > 0 and one.seconds > 0]
    tokens = [one.tokens for one in found]
    if len(found) < MEASURED or max(tokens) < UNLIKE * min(tokens):
        return None
    rows = [(1.0, float(one.tokens), one.depths) for one in found]
    times = [one.seconds for one in found]
    # No part may be negative: if one is, the prefills do not show it, and it is left out.
    for parts in ((0, 1, 2), (0, 1), (1, 2), (1,)):
        fitted = _least_errors([[row[part] for part in parts] for row in rows], times)
        if fitted and min(fitted) >= 0:
            each = dict(zip(parts, fitted, strict=True))
            return PrefillTimes(
                pass_seconds=each.get(0, 0.0), token_seconds=each[1], depth_seconds=each.get(2, 0.0)
            )
    return None


@dataclass(slots=True, eq=False)
class EngineSpeed:
    """How long an engine takes for a prefill, by its last ones."""

    times: PrefillTimes | None = None  # None: its prefills have not told them yet
    _seen: deque[Prefilled] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _new: int = 0  # of `_seen`, since the last fit

    def took(self, prefill: Prefilled) -> None:
        """Take in a prefill that ran beside no other request. Times that new ones do not tell stay."""
        self._seen.append(prefill)
        self._new += 1
        if self._new >= NEW_SHARE * len(self._seen):
            self.times, self._new = prefill_times(self._seen) or self.times, 0


def least_seconds(times: PrefillTimes | None, oracle: int | None, prompt: int) -> float | None:
    """Return the least time to the first token of a prompt, of which `oracle` tokens must be computed.

    None: the engine's times or the oracle are unknown.
    """
    return None if times is None or oracle is None else times.seconds(oracle, prompt - oracle)


def _depths(tokens: int, context: int) -> float:
    return tokens * context + tokens * (tokens - 1) / 2


def _least_errors(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float] | None:
    """Return the factors with the least sum of relative errors; None if the rows do not decide them."""
    scaled = [[value / time for value in row] for row, time in zip(rows, times, strict=True)]
    weights = [1.0] * len(scaled)
    factors: list[float] | None = None
    for _ in range(ROUNDS):
        factors = _least_squares(scaled, weights)
        if factors is None:
            return None
        predicted = [sum(map(mul, factors, row)) for row in scaled]
        weights = [1 / max(NOISE, abs(1 - one)) for one in predicted]
    return factors


def _least_squares(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float] | None:
    """Return the factors that make each row closest to 1; None if the rows do not decide them."""
    size = range(len(rows[0]))
    matrix = [
        [
            *(sum(w * row[i] * row[j] for row, w in zip(rows, weights, strict=True)) for j in size),
            sum(w * row[i] for row, w in zip(rows, weights, strict=True)),
        ]
        for i in size
    ]
    whole = [matrix[i][i] for i in size]
    for i in size:  # elimination; the matrix is positive definite, so no rows need to be exchanged
        if matrix[i][i] <= EQUAL * whole[i]:
            return None
        for j in size:
            if j != i:
                share = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - share * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][-1] / matrix[i][i] for i in size]
