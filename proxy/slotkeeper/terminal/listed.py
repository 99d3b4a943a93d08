"""Requests as a table, one a line: of `why` without an id, and of `top`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table

from slotkeeper.observe.why.record import RUNNING
from slotkeeper.terminal.called import called, doing, fitting
from slotkeeper.terminal.columns import Column, Row, fitted
from slotkeeper.terminal.figures import UNKNOWN, clock, one_line, seconds, short, tokens

WELL: Final = "ok"  # the outcome that need not be told


def requests(rows: Sequence[Row], width: int, now: float) -> Table:
    """Of summaries as `/api/requests` has them; `now` in seconds since the epoch."""
    return fitted(COLUMNS, [row | {"called": fitting(called(row, now), width)} for row in rows], width)


def told(row: Row) -> str:
    """The verdict, and how it ended unless it ended well."""
    if under_way := doing(row.get("now")):
        return under_way
    said = row["verdict"] if row["outcome"] == WELL else f"{row['outcome']} {row['verdict']}"
    return one_line(said.strip() or UNKNOWN)


def shade(row: Row) -> str:
    """Of its verdict: whether something went wrong, was computed twice, or is under way."""
    if row["outcome"] == RUNNING:
        return "cyan"
    if row["outcome"] != WELL:
        return "red"
    return "yellow" if row["cause"] or row["lost"] else ""


def repeated(row: Row) -> str:
    return "yellow" if row["repeated"] else ""


COLUMNS: Final = (
    Column("time", lambda row: clock(row["came"]), keep=7),
    Column("id", lambda row: short(row["id"]), right=False),
    Column("conversation", lambda row: row["called"], keep=9, right=False),
    Column("kind", lambda row: row["kind"] or UNKNOWN, keep=3, right=False),
    Column("prompt", lambda row: tokens(row["prompt_tokens"]), keep=8),
    Column("reused", lambda row: tokens(row["reused"]), keep=1),
    Column("computed", lambda row: tokens(row["computed"]), keep=10),
    Column("oracle", lambda row: tokens(row["oracle"]), keep=4),
    Column("repeated", lambda row: tokens(row["repeated"]), keep=6, style=repeated),
    Column("first", lambda row: seconds(row["first_token_seconds"]), keep=5),
    Column("decision", lambda row: row["decision"] or UNKNOWN, keep=2, right=False),
    Column("verdict", told, right=False, style=shade),
)
