"""The measured cost of requests, the least possible cost (the oracle), and tables of both.

All token counts are the engine's own; only the oracle is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slotkeeper.api.answers.answer import (
    Prefilled,
    PrefillTimes,
    Waited,
    Waits,
    least_seconds,
    prefill_times,
    waits,
)
from slotkeeper.scheduler.prompts.prompt_tree import PromptTree
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.figures import Counted, Sums, Unknown, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request, answered or not. None means unknown."""

    session: str
    label: str
    usage: Usage | None = None
    idle: int | None = None  # tokens that its engines computed since the last request, except for this one
    oracle: int | None = None
    generated: int = 0  # tokens that its slot holds after the prompt, and whose ids are unknown
    rewritten: bool = False  # whether a rule changed the request; the oracle is of the request as sent
    first_token_seconds: float | None = None
    prefill_seconds: float | None = None  # of `usage.evaluated` tokens, by the engine's own count
    stall_seconds: float | None = None  # the longest of its answer; only of a stream
    exact: bool = True  # whether the engine's prompt was as long as the oracle's
    failure: str | None = None

    @property
    def counted(self) -> bool:
        """Whether the engine reported what it computed."""
        return self.failure is None and self.usage is not None

    @property
    def prompt(self) -> int | None:
        return self.usage.prompt if self.usage else None

    @property
    def computed(self) -> int | None:
        """Tokens computed while the client waited."""
        return self.usage.computed if self.usage else None

    @property
    def reused(self) -> int | None:
        return self.usage.reused if self.usage else None

    def least_seconds(self, times: PrefillTimes | None) -> float | None:
        """Return the least time to the first token on an engine with these times; None: unknown."""
        return least_seconds(times, self.oracle, self.usage.prompt) if self.usage else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The cost of many requests together."""

    requests: int
    failed: int
    uncounted: int  # answered, but without figures or without an oracle
    sums: Sums  # of requests with figures
    idle_known: bool  # whether a counter showed the tokens that were computed for no request
    waits: Waits

    @property
    def least_seconds(self) -> float | None:
        """The least that all of them together can have waited; None: unknown."""
        return self.waits.least_seconds if self.waits.compared == self.waits.answers else None

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
    """Remembers all computed prompts, and so knows what a perfect cache would reuse."""

    def __init__(self) -> None:
        self._tree = PromptTree()

    def __repr__(self) -> str:
        return f"<Oracle {self._tree!r}>"

    def least(self, prompt: Tokens) -> int:
        """Return the tokens that a perfect cache computes for this prompt: at least one, to sample from."""
        return len(prompt) - min(self._tree.longest(prompt), len(prompt) - 1)

    def saw(self, tokens: Tokens) -> None:
        """Note that these tokens were computed."""
        self._tree.add(tokens)


def times_of(samples: Iterable[Sample]) -> PrefillTimes | None:
    """Return how long the engine of these requests takes for a prefill; None: they do not show it."""
    return prefill_times(
        Prefilled(tokens=one.usage.evaluated, context=one.usage.cached, seconds=one.prefill_seconds)
        for one in samples
        if one.failure is None and one.usage and one.prefill_seconds
    )


def totals(samples: Iterable[Sample], times: PrefillTimes | None = None) -> Totals:
    """Sum up requests. `times`: of their engine, for the least that they can have waited."""
    everything = tuple(samples)
    sums, uncounted = Sums(), 0
    for sample in everything:
        uncounted += sample.failure is None and (sample.usage is None or sample.oracle is None)
        if sample.failure is None and sample.usage:
            unknown = Unknown.NO_TOKENS if sample.oracle is None else None
            sums.count(Counted(usage=sample.usage, oracle=sample.oracle, unknown=unknown))
            sums.add(idle=sample.idle or 0)
    answered = [sample for sample in everything if not sample.failure]
    return Totals(
        requests=len(everything),
        failed=sum(sample.failure is not None for sample in everything),
        uncounted=uncounted,
        sums=sums,
        idle_known=all(sample.idle is not None for sample in everything),
        waits=waits(
            Waited(one.first_token_seconds, one.stall_seconds, one.least_seconds(times)) for one in answered
        ),
    )


def impossible(samples: Iterable[Sample], *, alike: int = 0) -> int:
    """Return by how many tokens the reported work is below what is possible: a fault of measurement.

    Work may be below the oracle for tokens that idle work computed before, for requests that a rule rewrote,
    and for tokens that the oracle did not see: replies, and prompts that could not be rendered. `alike`: the
    tokens with which a prompt may by chance begin as one from before these samples.
    """
    short, explained = 0, 0
    for sample in samples:
        if sample.failure is not None or sample.usage is None:
            continue
        explained += (sample.idle or 0) + sample.generated
        if sample.oracle is None or not sample.exact:
            explained += sample.usage.prompt
        elif not sample.rewritten:
            short += max(0, sample.oracle - sample.usage.work - alike)
    return max(0, short - explained)


def later(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples without each session's first request, for which no cache can help."""
    begun: set[str] = set()
    kept = []
    for sample in samples:
        if sample.session in begun:
            kept.append(sample)
        begun.add(sample.session)
    return kept


def by_session(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Return the samples by session, in the order in which the sessions began."""
    sessions: dict[str, list[Sample]] = {}
    for sample in samples:
        sessions.setdefault(sample.session, []).append(sample)
    return sessions


# -- tables ----------------------------------------------------------------------------------------------

WIDTH: Final = 140  # columns if the output is no terminal: a table cut to 80 columns is useless
SHOWN_FAILURES: Final = 10
CAPTION: Final = (
    "waited: tokens that clients waited for / oracle, the least that any cache must compute; "
    "total: the same with tokens computed in idle time (prefill amplification); "
    "least: the least possible sum, which is the time of the oracle's tokens at the engine's own speed; "
    "stall: the longest gap between two events of one streamed answer"
)

Samples = Mapping[str, Sequence[Sample]]  # by the name of the server that they were sent to


def wide_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def comparison(samples: Samples) -> Table:
    """Return the table of figures by session and in total, one row for each server."""
    table = Table(
        "session",
        "server",
        *(
            "requests",
            "prompt",
            "reused",
            "computed",
            "idle",
            "oracle",
            "waited",
            "total",
            "first token\nsum",
            "least",
            "p50",
            "p95",
            "stall",
        ),
        title="tokens by the engine's own count",
        caption=CAPTION,
    )
    for column in table.columns[2:]:
        column.justify = "right"
    sessions = {server: by_session(found) for server, found in samples.items()}
    judged = {server: _Judged.of(found) for server, found in samples.items()}
    for session in next(iter(sessions.values()), {}):
        _rows(table, session, {server: found.get(session, []) for server, found in sessions.items()}, judged)
    _rows(table, "[bold]all[/bold]", samples, judged)
    rest = {server: later(found) for server, found in samples.items()}
    _rows(table, "[bold]all but each\nsession's first[/bold]", rest, judged)
    return table


def notes(samples: Samples, *, alike: int = 0) -> Iterator[str]:
    """Yield caveats on the figures, and every kind of failure. `alike`: see `impossible`."""
    for server, found in samples.items():
        summary = totals(found)
        if summary.failed:
            yield f"[red]{summary.failed} of {summary.requests} requests failed[/red] at {server}:"
            yield from _failures(found)
        if summary.uncounted:
            yield f"{summary.uncounted} answers of {server} have no oracle: they are in no ratio."
        if not summary.idle_known and summary.failed < summary.requests:
            yield (
                f"{server} does not report all tokens that its engine computes: no total. Start the engine "
                "with --metrics, or name it with --engine."
            )
        if short := impossible(found, alike=alike):
            yield (
                f"[red]A fault of measurement[/red] at {server}: {short:,} tokens less than is possible are "
                "said to have been computed. Its engine, or a file, has known these prompts before, or "
                "another engine has answered."
            )
        if inexact := sum(not sample.exact for sample in found):
            yield f"{inexact} prompts had another length at {server} than rendered: oracle approximate."


def _failures(found: Sequence[Sample]) -> Iterator[str]:
    kinds: dict[str, list[Sample]] = {}
    for sample in found:
        if sample.failure:
            kinds.setdefault(sample.failure, []).append(sample)
    for failure, same in list(kinds.items())[:SHOWN_FAILURES]:
        yield f"  {len(same)} times, first {same[0].session} {same[0].label}: {escape(failure)}"
    if len(kinds) > SHOWN_FAILURES:
        yield f"  and {len(kinds) - SHOWN_FAILURES} other failures"


@dataclass(frozen=True, slots=True)
class _Judged:
    """What all requests to one server show about it."""

    faulty: bool  # whether the figures are impossible
    times: PrefillTimes | None  # of its engine

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Judged:
        return cls(bool(impossible(samples)), times_of(samples))


def _rows(table: Table, name: str, samples: Samples, judged: Mapping[str, _Judged]) -> None:
    for number, (server, found) in enumerate(samples.items()):
        last = number == len(samples) - 1
        table.add_row("" if number else name, server, *_cells(found, judged[server]), end_section=last)


def _cells(samples: Sequence[Sample], judged: _Judged) -> tuple[str, ...]:
    """Return the cells of one row; with a fault of measurement the word "fault" replaces the ratios."""
    found = totals(samples, judged.times)
    failed = f" ([red]{found.failed} failed[/red])" if found.failed else ""
    return (
        f"{found.requests}{failed}",
        f"{found.prompt:,}",
        f"{found.sums.reused:,}",
        f"{found.computed:,}",
        f"{found.sums.idle:,}" if found.idle_known else "-",
        f"{found.oracle:,}",
        *(("[red]fault[/red]", "") if judged.faulty else (ratio(found.sums.waited), ratio(found.total))),
        seconds(found.waits.waited_seconds),
        seconds(found.least_seconds),
        seconds(found.waits.first_token_p50),
        seconds(found.waits.first_token_p95),
        seconds(found.waits.stall_seconds),
    )


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"
