"""The rows of `benchmarks.waiting` as a table: each round's ratio, else the worst of a workload's rounds.

Pairs are Slotkeeper's figure / stock's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Final

MIB: Final = 2**20
GIB: Final = 2**30
KEY: Final = ("model", "work", "pause", "busy")  # rounds of one workload have these in common

MAX_RATIOS: Final = 3  # of rounds, shown one by one

COLUMNS: Final = (
    "work",
    "stock, s",
    "ours ÷ stock",
    "stock ÷ least",
    "ours ÷ least",
    "whole answers",
    "p95, s",
    "beside prefill, ms",
    "longest stall, ms",
    "engine, GiB",
    "sidecar, MiB",
    "written, MiB",
    "idle tokens",
)

Row = dict[str, Any]


def grouped(found: Iterable[Row]) -> Iterator[tuple[Row, Sequence[str]]]:
    """Yield for each workload its first row, and the cells of COLUMNS."""
    for those in rounds(found):
        yield those[0], _cells(those)


def rounds(found: Iterable[Row]) -> Iterator[Sequence[Row]]:
    """Yield the rows of each workload."""
    same: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        same.setdefault(tuple(row[name] for name in KEY), []).append(row)
    works = list(dict.fromkeys(work for _, work, _, _ in same))

    def order(key: tuple[Any, ...]) -> tuple[Any, ...]:
        model, work, pause, busy = key
        return model, busy, works.index(work), pause or 0.0

    for key in sorted(same, key=order):
        yield same[key]


def ratios(those: Sequence[Row]) -> list[float]:
    """Return the sums of times to first token, ÷ stock's, in ascending order."""
    return sorted(row["ours_seconds"] / row["stock_seconds"] for row in those)


def worst_round(those: Sequence[Row], name: str, other: str) -> tuple[float, float] | None:
    """Return two figures of the round with the largest ratio; None if one is unknown in some round."""
    known = [(row[name], row[other]) for row in those if row.get(name) and row.get(other)]
    return max(known, key=lambda pair: pair[0] / pair[1]) if len(known) == len(those) else None


def _cells(those: Sequence[Row]) -> Sequence[str]:
    first = those[0]
    stock = sorted(row["stock_seconds"] for row in those)
    return (
        first["work"] if first["pause"] is None else f"{first['work']}, {first['pause']:g} s",
        f"{stock[0]:.1f}-{stock[-1]:.1f}",  # shows how much the machine varied
        ", ".join(f"{ratio:.2f}" for ratio in _told(ratios(those))),
        _ratio(worst_round(those, "stock_seconds", "least_seconds")),
        _ratio(worst_round(those, "ours_seconds", "least_seconds")),
        _ratio(worst_round(those, "ours_answered", "stock_answered")),
        _pair(worst_round(those, "ours_p95", "stock_p95"), 1, digits=2),
        _beside(those),
        _pair(worst_round(those, "ours_stall", "stock_stall"), 1000),
        _pair((_most(those, "ours_engine_bytes"), _most(those, "stock_engine_bytes")), 1 / GIB, digits=2),
        f"{_most(those, 'sidecar_bytes') / MIB:.0f}",
        f"{_most(those, 'written_bytes') / MIB:,.0f}",
        f"{_most(those, 'idle')}",
    )


def _told(found: Sequence[float]) -> Sequence[float]:
    """Return sorted ratios; of more than three the least, the median and the most."""
    return found if len(found) <= MAX_RATIOS else (found[0], median(found), found[-1])


def _beside(those: Sequence[Row]) -> str:
    """Return the milliseconds beside the prefill of a request, of the round in which they differ most."""
    known = [(row["ours_beside"], row["stock_beside"]) for row in those if row.get("ours_beside") is not None]
    return _pair(max(known, key=lambda pair: pair[0] - pair[1], default=None), 1000)


def _most(those: Sequence[Row], name: str) -> int:
    most: int = max(row[name] for row in those)
    return most


def _ratio(pair: tuple[float, float] | None) -> str:
    return "-" if pair is None else f"{pair[0] / pair[1]:.2f}"


def _pair(pair: tuple[float, float] | None, scale: float, *, digits: int = 0) -> str:
    return "-" if pair is None else "/".join(f"{scale * figure:.{digits}f}" for figure in pair)
