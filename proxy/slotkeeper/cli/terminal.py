"""How commands print: where to, figures as people read them, tables that fit, requests one a line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from typing import Any, Final, Literal

import orjson
from pydantic import ByteSize
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slotkeeper.observe.request_record import RUNNING, Doing
from slotkeeper.observe.standard_error import StandardError

PIPED: Final = 160  # columns where no terminal sets a width


def console() -> Console:
    """Of standard output. What its encoding lacks becomes a question mark."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED
    return Console(width=wide, highlight=False)


def say(document: Any) -> None:
    """One line of JSON."""
    print(orjson.dumps(document).decode(), flush=True)  # noqa: T201


def complain(command: str, what: object) -> None:
    StandardError().write(f"slotkeeper {command}: {what}\n")


# -- figures; what is not known is a dash ----------------------------------------------------------------

UNKNOWN: Final = "-"
SPANS: Final = ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"))
EIGHTHS: Final = " ▏▎▍▌▋▊▉"
FULL: Final = "█"
EMPTY: Final = "·"
LEVELS: Final = "▁▂▃▄▅▆▇█"
SHORT_ID: Final = 8  # letters at the end of an id, which stand for it


def tokens(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count:,}"


def seconds(value: float | None) -> str:
    """How long something took: 3.2 ms, 340 ms, 12.3 s, 4 min."""
    if value is None:
        return UNKNOWN
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 1:
        return f"{value * 1e3:.{int(value < 0.01)}f} ms"
    return f"{value:.1f} s" if value < 100 else span(value)


def span(value: float | None) -> str:
    """In one unit, rounded down. Clocks of two machines may differ, so never less than 0."""
    if value is None:
        return UNKNOWN
    whole = max(0, int(value))
    count, unit = next(((whole // long, unit) for long, unit in SPANS if whole >= long), (0, "s"))
    return f"{count} {unit}"


def age(moment: str, now: float) -> str:
    """Since a time as the admin port writes it, in seconds since the epoch."""
    return span(now - datetime.fromisoformat(moment).timestamp())


def clock(moment: str) -> str:
    """The local time of day of a time as the admin port writes it."""
    return f"{datetime.fromisoformat(moment).astimezone():%H:%M:%S}"


def moment(text: str) -> str:
    """The same with its date."""
    return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}"


def size(count: int) -> str:
    return ByteSize(count).human_readable(separator=" ")


def ratio(value: float | None) -> str:
    """1.00 is a perfect cache."""
    return UNKNOWN if value is None else f"{value:.2f}"


def percent(part: float, whole: float) -> str:
    """Rounded down, so that only all of it is 100 %."""
    return f"{int(100 * part / whole)} %" if whole else UNKNOWN


def short(id_: str) -> str:
    return id_[-SHORT_ID:]


def one_line(text: str) -> str:
    """Unprintable characters as Python writes them: what a client sends may hold anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) or "(nothing)"


def bar(part: float, whole: float, width: int) -> str:
    """`width` cells, full where part = whole; whatever is not nothing can be seen."""
    share = min(max(part / whole, 0.0), 1.0) if whole else 0.0
    whole_cells, eighth = divmod(ceil(share * width * 8), 8)
    drawn = FULL * whole_cells + (EIGHTHS[eighth] if eighth else "")
    return drawn.ljust(width, EMPTY)


def lane(begin: float, end: float, whole: float, width: int) -> str:
    """A bar that begins where its time begins; at least one cell."""
    if whole <= 0:
        return FULL
    first = min(int(begin / whole * width), width - 1)
    last = min(max(ceil(end / whole * width), first + 1), width)
    return " " * first + FULL * (last - first)


def sparkline(shares: Sequence[float | None]) -> str:
    """One cell for each share of 0 to 1; None is a dot."""
    top = len(LEVELS) - 1
    return "".join(EMPTY if share is None else LEVELS[round(min(max(share, 0), 1) * top)] for share in shares)


# -- tables that fit -------------------------------------------------------------------------------------

GAP: Final = 2  # cells between two columns
LAST: Final = 18  # cells at least for the last column, whose words may be cut

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, and how much it matters where the terminal is narrow."""

    head: str
    cell: Callable[[Row], str]
    keep: int | None = None  # those with the least go first; None: never
    right: bool = True
    style: Callable[[Row], str] | str = ""

    def text(self, row: Row) -> Text:
        """Never read as markup: it may hold what a client sent."""
        return Text(self.cell(row), self.style(row) if callable(self.style) else self.style)


def fitted(columns: Sequence[Column], rows: Sequence[Row], width: int) -> Table:
    """At most `width` cells wide, as long as there are columns that may be left out."""
    cells = {column: [column.text(row) for row in rows] for column in columns}
    widths = {column: _width(column, cells[column]) for column in columns}
    left = _chosen(widths, width)
    beside = sum(widths[column] + GAP for column in left[:-1])
    widths[left[-1]] = max(min(widths[left[-1]], width - beside), 1)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), collapse_padding=True)
    for column in left:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(
            column.head, justify=justify, width=widths[column], no_wrap=True, overflow="ellipsis"
        )
    for texts in zip(*(cells[column] for column in left), strict=True):
        table.add_row(*texts)
    return table


def _width(column: Column, texts: Sequence[Text]) -> int:
    return max(cell_len(column.head), *(text.cell_len for text in texts), 0)


def _chosen(widths: dict[Column, int], width: int) -> list[Column]:
    left = list(widths)
    least = widths | {left[-1]: min(widths[left[-1]], LAST)}
    while sum(least[column] + GAP for column in left) - GAP > width:
        spare = [column for column in left if column.keep is not None]
        if not spare:
            break
        left.remove(min(spare, key=lambda column: column.keep or 0))
    return left


# -- names of conversations (conversation/naming.py makes them), and what a request does now --------------

# Cells of a name, by the columns that there are at least.
NAMES: Final = ((180, 48), (100, 24), (0, 20))


def conversation_name(row: Row, now: float | None = None) -> str:
    """Its conversation's name; with its age where nothing says what it is about."""
    name = row.get("name")
    if not name:
        return UNKNOWN
    began = row.get("conversation_began")
    if row.get("about") or now is None or began is None:
        return one_line(name)
    return one_line(f"{name}, {age(began, now)}")


def shortened(name: str, width: int) -> str:
    """For a table of so many columns."""
    room = next(cells for columns, cells in NAMES if width >= columns)
    return name if len(name) <= room else name[: room - 1] + "…"


def activity(now: Row | None) -> str:
    """Of `now` as the admin port has it; empty for what has ended."""
    if now is None:
        return ""
    match now["doing"]:
        case Doing.QUEUED:
            return f"queued, place {now['place']}" if now["place"] else "waits for an engine"
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

SUCCEEDED: Final = "ok"  # the outcome that is not shown


def requests(rows: Sequence[Row], width: int, now: float) -> Table:
    """Of summaries as `/api/requests` has them; `now` in seconds since the epoch."""
    return fitted(
        COLUMNS, [row | {"shown_name": shortened(conversation_name(row, now), width)} for row in rows], width
    )


def verdict(row: Row) -> str:
    """The verdict, and how it ended unless it ended well."""
    if under_way := activity(row.get("now")):
        return under_way
    said = row["verdict"] if row["outcome"] == SUCCEEDED else f"{row['outcome']} {row['verdict']}"
    return one_line(said.strip() or UNKNOWN)


def verdict_style(row: Row) -> str:
    """Of its verdict: whether something went wrong, was computed twice, or is under way."""
    if row["outcome"] == RUNNING:
        return "cyan"
    if row["outcome"] != SUCCEEDED:
        return "red"
    return "yellow" if row["cause"] or row["lost"] else ""


def repeated_style(row: Row) -> str:
    return "yellow" if row["repeated"] else ""


COLUMNS: Final = (
    Column("time", lambda row: clock(row["came"]), keep=7),
    Column("id", lambda row: short(row["id"]), right=False),
    Column("conversation", lambda row: row["shown_name"], keep=9, right=False),
    Column("kind", lambda row: row["kind"] or UNKNOWN, keep=3, right=False),
    Column("prompt", lambda row: tokens(row["prompt_tokens"]), keep=8),
    Column("reused", lambda row: tokens(row["reused"]), keep=1),
    Column("computed", lambda row: tokens(row["computed"]), keep=10),
    Column("oracle", lambda row: tokens(row["oracle"]), keep=4),
    Column("repeated", lambda row: tokens(row["repeated"]), keep=6, style=repeated_style),
    Column("first", lambda row: seconds(row["first_token_seconds"]), keep=5),
    Column("decision", lambda row: row["decision"] or UNKNOWN, keep=2, right=False),
    Column("verdict", verdict, right=False, style=verdict_style),
)
