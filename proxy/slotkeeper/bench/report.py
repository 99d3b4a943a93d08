"""The tables of a replay."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slotkeeper.bench.measure import Sample, Totals, by_session, impossible, later, totals

WIDTH: Final = 120  # where the output is no terminal: a table cut to 80 columns tells nothing
SHOWN_FAILURES: Final = 10
CAPTION: Final = (
    "waited: what clients waited for, by the oracle, which is what no cache could have saved; "
    "total: with what was computed in pauses (prefill amplification)"
)

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
            "reused",
            "computed",
            "idle",
            "oracle",
            "waited",
            "total",
            "first token\np50",
            "p95",
        ),
        title="tokens by the engine's own count",
        caption=CAPTION,
    )
    for column in table.columns[2:]:
        column.justify = "right"
    sessions = {server: by_session(found) for server, found in samples.items()}
    faulty = {server for server, found in samples.items() if impossible(found)}
    for session in next(iter(sessions.values()), {}):
        _rows(table, session, {server: found.get(session, []) for server, found in sessions.items()}, faulty)
    _rows(table, "[bold]all[/bold]", samples, faulty)
    rest = {server: later(found) for server, found in samples.items()}
    _rows(table, "[bold]all but each\nsession's first[/bold]", rest, faulty)
    return table


def notes(samples: Samples) -> Iterator[str]:
    """What a reader must know of the figures, and every kind of failure."""
    for server, found in samples.items():
        summary = totals(found)
        if summary.failed:
            yield f"[red]{summary.failed} of {summary.requests} requests failed[/red] at {server}:"
            yield from _failures(found)
        if summary.uncounted:
            yield f"{summary.uncounted} answers of {server} are without an oracle: taken for all new."
        if not summary.idle_known:
            yield (
                f"{server} does not tell what its engine computes besides: no total. Start the engine with "
                "--metrics, or name it with --engine."
            )
        if short := impossible(found):
            yield (
                f"[red]A fault of measurement[/red] at {server}: {short:,} tokens less than is possible are "
                "said to have been computed. Its engine, or a file, has known these prompts before, or "
                "another engine has answered."
            )
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


def _rows(table: Table, name: str, samples: Samples, faulty: Collection[str]) -> None:
    for number, (server, found) in enumerate(samples.items()):
        last = number == len(samples) - 1
        table.add_row(
            "" if number else name, server, *_cells(totals(found), server in faulty), end_section=last
        )


def _cells(found: Totals, faulty: bool) -> tuple[str, ...]:
    """What cannot be is no result: instead of its ratios that is said."""
    failed = f" ([red]{found.failed} failed[/red])" if found.failed else ""
    return (
        f"{found.requests}{failed}",
        f"{found.prompt:,}",
        f"{found.sums.reused:,}",
        f"{found.computed:,}",
        f"{found.sums.idle:,}" if found.idle_known else "-",
        f"{found.oracle:,}",
        *(("[red]fault[/red]", "") if faulty else (ratio(found.sums.waited), ratio(found.total))),
        seconds(found.first_token_p50),
        seconds(found.first_token_p95),
    )


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"
