"""The tables of a replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slotkeeper.bench.measure import Sample, Totals, by_session, later, totals

WIDTH: Final = 120  # where the output is no terminal: a table cut to 80 columns tells nothing
SHOWN_FAILURES: Final = 10

Samples = Mapping[str, Sequence[Sample]]  # by the name of the server that they were sent to


def wide_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def comparison(samples: Samples) -> Table:
    """Per session and in total, the servers under one another."""
    table = Table(
        "session",
        "server",
        *(
            "requests",
            "prompt",
            "computed",
            "cached",
            "oracle",
            "computed\n/oracle",
            "first token\np50",
            "p95",
        ),
        title="tokens by the engine's own count",
        caption="oracle: the prompt tokens that no cache could have saved",
    )
    for column in table.columns[2:]:
        column.justify = "right"
    sessions = {server: by_session(found) for server, found in samples.items()}
    for session in next(iter(sessions.values()), {}):
        _rows(table, session, {server: found.get(session, []) for server, found in sessions.items()})
    _rows(table, "[bold]all[/bold]", samples)
    rest = {server: later(found) for server, found in samples.items()}
    _rows(table, "[bold]all but each\nsession's first[/bold]", rest)
    return table


def notes(samples: Samples) -> Iterator[str]:
    """What a reader must know of the figures, and every kind of failure."""
    for server, found in samples.items():
        summary = totals(found)
        if summary.failed:
            yield f"[red]{summary.failed} of {summary.requests} requests failed[/red] at {server}:"
            yield from _failures(found)
        if summary.uncounted:
            yield f"{summary.uncounted} answers of {server} are without an oracle: not in computed/oracle."
        if inexact := sum(not sample.exact for sample in found):
            yield f"{inexact} prompts had another length at {server} than rendered: oracle about right."


def _failures(found: Sequence[Sample]) -> Iterator[str]:
    kinds: dict[str, list[Sample]] = {}
    for sample in found:
        if sample.failure:
            kinds.setdefault(sample.failure, []).append(sample)
    for failure, same in list(kinds.items())[:SHOWN_FAILURES]:
        yield f"  {len(same)} times, first {same[0].session} {same[0].label}: {escape(failure)}"
    if len(kinds) > SHOWN_FAILURES:
        yield f"  and {len(kinds) - SHOWN_FAILURES} other failures"


def _rows(table: Table, name: str, samples: Samples) -> None:
    for number, (server, found) in enumerate(samples.items()):
        last = number == len(samples) - 1
        table.add_row("" if number else name, server, *_cells(totals(found)), end_section=last)


def _cells(found: Totals) -> tuple[str, ...]:
    failed = f" ([red]{found.failed} failed[/red])" if found.failed else ""
    return (
        f"{found.requests}{failed}",
        f"{found.prompt:,}",
        f"{found.computed:,}",
        f"{found.cached:,}",
        f"{found.oracle:,}",
        "-" if found.ratio is None else f"{found.ratio:.2f}",
        seconds(found.first_token_p50),
        seconds(found.first_token_p95),
    )


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"
