"""The rows of `benchmarks.waiting` as a table: each round's ratio, else the worst of a workload's rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Final

MIB: Final = 2**20
KEY: Final = ("model", "work", "pause", "busy")  # rounds of one workload have these in common

MAX_RATIOS: Final = 3  # of rounds, shown one by one

COLUMNS: Final = (
    "work",
    "stock, s",
    "ours ÷ stock",
    "stock ÷ least",
    "ours ÷ least",
    "whole answers",
    "p95",
    "beside prefill, ms",
    "longest stall, ms",
    "engine, MiB",
    "sidecar, MiB",
    "written, MiB",
    "idle tokens",
)

Row = dict[str, Any]


def grouped(found: Iterable[Row]) -> Iterator[tuple[Row, Sequence[str]]]:
    """Yield for each workload its first row, and the cells of COLUMNS."""
    same: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        same.setdefault(tuple(row[name] for name in KEY), []).append(row)
    works = list(dict.fromkeys(work for _, work, _, _ in same))

    def order(key: tuple[Any, ...]) -> tuple[Any, ...]:
        model, work, pause, busy = key
        return model, busy, works.index(work), pause or 0.0

    for key in sorted(same, key=order):
        those = same[key]
        yield those[0], _cells(those)


def _cells(those: Sequence[Row]) -> Sequence[str]:
    first = those[0]
    stock = sorted(row["stock_seconds"] for row in those)
    ratios = sorted(row["ours_seconds"] / row["stock_seconds"] for row in those)
    return (
        first["work"] if first["pause"] is None else f"{first['work']}, {first['pause']:g} s",
        f"{stock[0]:.1f}-{stock[-1]:.1f}",  # shows how much the machine varied
        ", ".join(f"{ratio:.2f}" for ratio in _told(ratios)),
        _worst(those, "stock_seconds", "least_seconds"),
        _worst(those, "ours_seconds", "least_seconds"),
        _worst(those, "ours_answered", "stock_answered"),
        _worst(those, "ours_p95", "stock_p95"),
        _beside(those),
        _stalls(those),
        _most(those, "ours_engine_bytes", "stock_engine_bytes"),
        f"{max(row['sidecar_bytes'] for row in those) / MIB:.0f}",
        f"{max(row['written_bytes'] for row in those) / MIB:,.0f}",
        f"{max(row['idle'] for row in those)}",
    )


def _told(ratios: Sequence[float]) -> Sequence[float]:
    """Return sorted ratios; of more than three the least, the median and the most."""
    return ratios if len(ratios) <= MAX_RATIOS else (ratios[0], median(ratios), ratios[-1])


def _worst(those: Sequence[Row], name: str, other: str) -> str:
    known = [row[name] / row[other] for row in those if row.get(name) and row.get(other)]
    return f"{max(known):.2f}" if len(known) == len(those) else "-"


def _stalls(those: Sequence[Row]) -> str:
    """Return our longest stall and stock's, of the round in which they differ most."""
    stalls = [(row["ours_stall"] or 0.0, row["stock_stall"] or 0.0) for row in those]
    ours, stock = max(stalls, key=lambda pair: pair[0] - pair[1])
    return f"{1000 * ours:.0f}/{1000 * stock:.0f}"


def _beside(those: Sequence[Row]) -> str:
    """Return our milliseconds beside the prefill of a request and stock's, of the worst round."""
    known = [(row["ours_beside"], row["stock_beside"]) for row in those if row.get("ours_beside") is not None]
    if not known:
        return "-"
    ours, stock = max(known, key=lambda pair: pair[0] - pair[1])
    return f"{1000 * ours:.0f}/{1000 * stock:.0f}"


def _most(those: Sequence[Row], name: str, other: str) -> str:
    return " / ".join(f"{max(row[one] for row in those) / MIB:,.0f}" for one in (name, other))
