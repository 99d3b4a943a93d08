"""Requests and conversations in a terminal: their names, what they do now, one a line.

The names themselves are made by the sidecar (conversation/naming.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table

from slotkeeper.cli.terminal import UNKNOWN, Column, Row, age, clock, fitted, one_line, seconds, short, tokens
from slotkeeper.observe.request_record import RUNNING, Doing

# Cells of a name, by the columns that there are at least.
NAMES: Final = ((180, 48), (100, 24), (0, 20))


def called(row: Row, now: float | None = None) -> str:
    """Its conversation's name; with its age where nothing says what it is about."""
    name = row.get("name")
    if not name:
        return UNKNOWN
    began = row.get("conversation_began")
    if row.get("about") or now is None or began is None:
        return one_line(name)
    return one_line(f"{name}, {age(began, now)}")


def fitting(name: str, width: int) -> str:
    """For a table of so many columns."""
    room = next(cells for columns, cells in NAMES if width >= columns)
    return name if len(name) <= room else name[: room - 1] + "…"


def doing(now: Row | None) -> str:
    """Of `now` as the admin port has it; empty for what has ended."""
    if now is None:
        return ""
    match now["doing"]:
        case Doing.QUEUED:
            return f"in line, place {now['place']}" if now["place"] else "waits for an engine"
        case Doing.PREFILL:
            return prefill(now)
        case _:
            return str(now["doing"])


def prefill(now: Row) -> str:
    if now["percent"] is None:
        return "prefill"
    about = "about " if now["estimated"] else ""
    left = f", {seconds(now['seconds_left'])} left" if now["seconds_left"] is not None else ""
    return f"prefill {about}{now['percent']} %{left}"


# -- requests as a table, one a line ---------------------------------------------------------------------

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
