"""What one request cost, what many cost together, and the least that any cache could have paid.

Tokens are the engine's own count, always; only the oracle is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slotkeeper.core.tokens import Tokens
from slotkeeper.core.tree import PromptTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request, answered or not. None is what could not be known."""

    session: str
    label: str
    prompt: int | None = None  # tokens
    computed: int | None = None
    cached: int | None = None
    oracle: int | None = None
    first_token_seconds: float | None = None
    exact: bool = True  # the engine's prompt was as long as the one that the oracle saw
    failure: str | None = None

    @property
    def counted(self) -> bool:
        """Whether the engine said what it computed."""
        return self.failure is None and self.computed is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over samples; `ratio` only over those whose oracle is known."""

    requests: int
    failed: int
    uncounted: int  # answered, but without figures or without an oracle
    prompt: int
    computed: int
    cached: int
    oracle: int
    ratio: float | None
    first_token_p50: float | None  # seconds
    first_token_p95: float | None


class Oracle:
    """Remembers all that was ever computed, and so knows what a perfect cache need not compute again."""

    def __init__(self) -> None:
        self._tree = PromptTree()

    def __repr__(self) -> str:
        return f"<Oracle {self._tree!r}>"

    def least(self, prompt: Tokens) -> int:
        """Tokens that must be computed for this prompt: always one, to have something to sample from."""
        return len(prompt) - min(self._tree.longest(prompt), len(prompt) - 1)

    def saw(self, tokens: Tokens) -> None:
        """This was computed."""
        self._tree.add(tokens)


def totals(samples: Iterable[Sample]) -> Totals:
    everything = tuple(samples)
    counted = [sample for sample in everything if sample.counted]
    known = [sample for sample in counted if sample.oracle is not None]
    least = sum(sample.oracle or 0 for sample in known)
    waits = [s.first_token_seconds for s in everything if s.first_token_seconds is not None and not s.failure]
    failed = sum(sample.failure is not None for sample in everything)
    return Totals(
        requests=len(everything),
        failed=failed,
        uncounted=len(everything) - failed - len(known),
        prompt=sum(sample.prompt or 0 for sample in counted),
        computed=sum(sample.computed or 0 for sample in counted),
        cached=sum(sample.cached or 0 for sample in counted),
        oracle=least,
        ratio=sum(sample.computed or 0 for sample in known) / least if least else None,
        first_token_p50=percentile(waits, 50),
        first_token_p95=percentile(waits, 95),
    )


def later(samples: Iterable[Sample]) -> list[Sample]:
    """Without the first request of each session, which no cache can help."""
    begun: set[str] = set()
    kept = []
    for sample in samples:
        if sample.session in begun:
            kept.append(sample)
        begun.add(sample.session)
    return kept


def by_session(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """In the order in which the sessions began."""
    sessions: dict[str, list[Sample]] = {}
    for sample in samples:
        sessions.setdefault(sample.session, []).append(sample)
    return sessions


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The smallest value that at least so many percent of the values do not exceed; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = -(-len(ordered) * percent // 100)  # rounded up
    return ordered[max(0, int(rank) - 1)]
