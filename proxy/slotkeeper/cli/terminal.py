"""Output of the commands: streams, figures for people, tables that fit the terminal, lists of requests."""

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
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED: Final = 160  # columns if standard output is no terminal


def console() -> Console:
    """Return a console for standard output. Characters that its encoding lacks become question marks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED
    return Console(width=wide, highlight=False)


def say(document: Any) -> None:
    """Print a document as one line of JSON."""
    print(orjson.dumps(document).decode(), flush=True)  # noqa: T201


# -- figures; an unknown value is a dash -----------------------------------------------------------------

UNKNOWN: Final = "-"
SPANS: Final = ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"))
EIGHTHS: Final = " ▏▎▍▌▋▊▉"
FULL: Final = "█"
EMPTY: Final = "·"
LEVELS: Final = "▁▂▃▄▅▆▇█"
SHORT_ID: Final = 8  # last letters of an id that are shown for it


def tokens(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count:,}"


def seconds(value: float | None) -> str:
    """Return a duration as text: 3.2 ms, 340 ms, 12.3 s, 4 min."""
    if value is None:
        return UNKNOWN
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 1:
        return f"{value * 1e3:.{int(value < 0.01)}f} ms"
    return f"{value:.1f} s" if value < 100 else span(value)


def span(value: float | None) -> str:
    """Return a duration in one unit, rounded down; never negative, as clocks of two machines may differ."""
    if value is None:
        return UNKNOWN
    whole = max(0, int(value))
    count, unit = next(((whole // long, unit) for long, unit in SPANS if whole >= long), (0, "s"))
    return f"{count} {unit}"


def age(moment: str, now: float) -> str:
    """Return the time since `moment`, in the admin port's format; `now` in seconds since the epoch."""
    return span(now - datetime.fromisoformat(moment).timestamp())


def clock(moment: str) -> str:
    """Return the local time of day of a time as the admin port writes it."""
    return f"{datetime.fromisoformat(moment).astimezone():%H:%M:%S}"


def moment(text: str) -> str:
    """Return the local date and time of a time as the admin port writes it."""
    return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}"


def size(count: int) -> str:
    from pydantic import ByteSize  # noqa: PLC0415 - takes longer to load than all else here

    return ByteSize(count).human_readable(separator=" ")


def ratio(value: float | None) -> str:
    """Return a ratio to the oracle as text; 1.00 is a perfect cache."""
    return UNKNOWN if value is None else f"{value:.2f}"


def percent(part: float, whole: float) -> str:
    """Return a percentage, rounded down so that only the whole is 100 %."""
    return f"{int(100 * part / whole)} %" if whole else UNKNOWN


def short(id_: str) -> str:
    return id_[-SHORT_ID:]


def one_line(text: str) -> str:
    """Escape unprintable characters as Python does: a client's text may hold anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) or "(nothing)"


def bar(part: float, whole: float, width: int) -> str:
    """Return a bar of `width` cells that shows part / whole; a part above 0 is always visible."""
    share = min(max(part / whole, 0.0), 1.0) if whole else 0.0
    whole_cells, eighth = divmod(ceil(share * width * 8), 8)
    drawn = FULL * whole_cells + (EIGHTHS[eighth] if eighth else "")
    return drawn.ljust(width, EMPTY)


def lane(begin: float, end: float, whole: float, width: int) -> str:
    """Return a bar on a time line of `width` cells for `whole` seconds; at least one cell long."""
    if whole <= 0:
        return FULL
    first = min(int(begin / whole * width), width - 1)
    last = min(max(ceil(end / whole * width), first + 1), width)
    return " " * first + FULL * (last - first)


def sparkline(shares: Sequence[float | None]) -> str:
    """Return one cell for each share from 0 to 1; None is a dot."""
    top = len(LEVELS) - 1
    return "".join(EMPTY if share is None else LEVELS[round(min(max(share, 0), 1) * top)] for share in shares)


# -- tables that fit -------------------------------------------------------------------------------------

GAP: Final = 2  # cells between two columns
LAST: Final = 18  # fewest cells of the last column, whose words may be cut

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, and its priority on a narrow terminal."""

    head: str
    cell: Callable[[Row], str]
    keep: int | None = None  # priority: the lowest is dropped first; None: never dropped
    right: bool = True
    style: Callable[[Row], str] | str = ""

    def text(self, row: Row) -> Text:
        """Return the cell of a row. It is not parsed as markup, as it may hold a client's text."""
        return Text(self.cell(row), self.style(row) if callable(self.style) else self.style)


def fitted(columns: Sequence[Column], rows: Sequence[Row], width: int) -> Table:
    """Return a table at most `width` cells wide; columns are dropped by priority until it fits."""
    cells = {column: [column.text(row) for row in rows] for column in columns}
    widths = {
        column: max(cell_len(column.head), *(text.cell_len for text in texts), 0)
        for column, texts in cells.items()
    }
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


def _chosen(widths: dict[Column, int], width: int) -> list[Column]:
    left = list(widths)
    least = widths | {left[-1]: min(widths[left[-1]], LAST)}
    while sum(least[column] + GAP for column in left) - GAP > width:
        spare = [column for column in left if column.keep is not None]
        if not spare:
            break
        left.remove(min(spare, key=lambda column: column.keep or 0))
    return left


# -- names of conversations (conversation/naming.py makes them), and a running request's stage ------------

# The fewest columns of a terminal, and the cells of a name there.
NAMES: Final = ((180, 48), (100, 24), (0, 20))


def conversation_name(row: Row, now: float | None = None) -> str:
    """Return the name of a request's conversation; with its age if no text of it makes the name."""
    name = row.get("name")
    if not name:
        return UNKNOWN
    began = row.get("conversation_began")
    if row.get("about") or now is None or began is None:
        return one_line(name)
    return one_line(f"{name}, {age(began, now)}")


def shortened(name: str, width: int) -> str:
    """Return a name shortened for a table `width` cells wide."""
    room = next(cells for columns, cells in NAMES if width >= columns)
    return name if len(name) <= room else name[: room - 1] + "…"


def activity(now: Row | None) -> str:
    """Return what a request does now, from the admin port's `now`; "" if it has ended."""
    return "" if now is None else str(now["text"])


# -- a table of requests ---------------------------------------------------------------------------------

SUCCEEDED: Final = "ok"  # the outcome that is not shown


def requests(rows: Sequence[Row], width: int, now: float) -> Table:
    """Return a table of the summaries of `/api/requests`; `now` in seconds since the epoch."""
    return fitted(
        COLUMNS, [row | {"shown_name": shortened(conversation_name(row, now), width)} for row in rows], width
    )


def verdict(row: Row) -> str:
    """Return the verdict, with the outcome if the request failed; for a running one what it does now."""
    if under_way := activity(row.get("now")):
        return under_way
    text = row["verdict"] if row["outcome"] == SUCCEEDED else f"{row['outcome']} {row['verdict']}"
    return one_line(text.strip() or UNKNOWN)


def verdict_style(row: Row) -> str:
    """Return the style of a verdict: running cyan, failed red, tokens computed twice yellow."""
    if activity(row.get("now")):
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
