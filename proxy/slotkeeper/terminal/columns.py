"""Tables that fit: where the terminal is narrow, the columns that matter least are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

GAP: Final = 2  # cells between two columns
LAST: Final = 18  # cells at least for the last column, whose words may be cut

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
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
