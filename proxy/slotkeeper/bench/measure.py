"""What one request cost, what many cost together, and the least that any cache could have paid.

Tokens are the engine's own count, always; only the oracle is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slotkeeper.scheduler.figures import Sums, Usage
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.tree import PromptTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request, answered or not. None is what could not be known."""

    session: str
    label: str
    usage: Usage | None = None
    idle: int | None = None  # tokens that its engines computed since the request before, and not for it
    oracle: int | None = None
    generated: int = 0  # tokens that its slot holds behind the prompt, and whose ids are not known
    rewritten: bool = False  # a rule changed it on the way: the oracle is of what was sent
    first_token_seconds: float | None = None
    exact: bool = True  # the engine's prompt was as long as the one that the oracle saw
    failure: str | None = None

    @property
    def counted(self) -> bool:
        """Whether the engine said what it computed."""
        return self.failure is None and self.usage is not None

    @property
    def prompt(self) -> int | None:
        return self.usage.prompt if self.usage else None

    @property
    def computed(self) -> int | None:
        """While its client waited."""
        return self.usage.computed if self.usage else None

    @property
    def reused(self) -> int | None:
        return self.usage.reused if self.usage else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What many requests cost together."""

    requests: int
    failed: int
    uncounted: int  # answered, but without figures or without an oracle
    sums: Sums  # of those with figures
    idle_known: bool  # whether an engine's counter told what was computed for no request
    first_token_p50: float | None  # seconds
    first_token_p95: float | None

    @property
    def prompt(self) -> int:
        return self.sums.prompt_tokens

    @property
    def computed(self) -> int:
        return self.sums.computed

    @property
    def oracle(self) -> int:
        return self.sums.oracle

    @property
    def total(self) -> float | None:
        return self.sums.total if self.idle_known else None


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
    sums, uncounted = Sums(), 0
    for sample in everything:
        uncounted += sample.failure is None and (sample.usage is None or sample.oracle is None)
        if sample.failure is None and (usage := sample.usage):
            sums.add(
                requests=1,
                prompt_tokens=usage.prompt,
                reused=usage.reused,
                computed=usage.computed,
                client=usage.evaluated,
                plant=usage.planted,
                idle=sample.idle or 0,
                oracle=usage.computed if sample.oracle is None else sample.oracle,
            )
    waits = [s.first_token_seconds for s in everything if s.first_token_seconds is not None and not s.failure]
    return Totals(
        requests=len(everything),
        failed=sum(sample.failure is not None for sample in everything),
        uncounted=uncounted,
        sums=sums,
        idle_known=all(sample.idle is not None for sample in everything),
        first_token_p50=percentile(waits, 50),
        first_token_p95=percentile(waits, 95),
    )


def impossible(samples: Iterable[Sample]) -> int:
    """How many tokens less than is possible are said to have been computed: a fault of measurement.

    Less than the oracle may be what idle work computed before, what a rule put right, and what earlier
    requests left that the oracle did not see: replies, and prompts that could not be rendered.
    """
    short, explained = 0, 0
    for sample in samples:
        if sample.failure is not None or sample.usage is None:
            continue
        explained += (sample.idle or 0) + sample.generated
        if sample.oracle is None or not sample.exact:
            explained += sample.usage.prompt
        elif not sample.rewritten:
            short += max(0, sample.oracle - sample.usage.work)
    return max(0, short - explained)


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
