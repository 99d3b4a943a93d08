"""The tables of docs/scaling.md, from docs/figures.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

Row = dict[str, Any]
Measured = Callable[[str], Any]
SHOWN: Final = (1, 4, 64, 500)  # engines


def of(measured: Measured, table: Callable[..., str]) -> Mapping[str, Callable[[], str]]:
    """Return the function that writes each block, by the block's name.

    `measured` returns the figures of a benchmark by its name; `table` formats a head and rows.
    """

    def rows(name: str) -> Iterator[Row]:
        return (row for row in measured("scaling") if row["table"] == name)

    def gateways() -> str:
        return table(("who chooses", "snapshots", "waited", "TTFT p95"), map(_of_gateway, rows("gateways")))

    def growth() -> str:
        head = ("engines", "who chooses", "snapshots", "hit rate", "one large cache", "TTFT p95")
        return table(head, (_of_growth(row) for row in rows("growth") if row["engines"] in SHOWN))

    def crowds() -> str:
        head = ("conversations for each engine", "snapshots", "waited", "TTFT p95")
        return table(head, map(_of_crowd, rows("crowds")))

    def decisions() -> str:
        slowest: dict[int, Row] = {}
        for row in measured("placement"):
            slowest[row["engines"]] = max(row, slowest.get(row["engines"], row), key=lambda one: one["p99"])
        return table(("engines", "slots", "p50", "p99"), map(_of_decision, slowest.values()))

    def fleets() -> str:
        head = (
            "gateway",
            "snapshots",
            "requests",
            "failed of the killed pod's",
            "others failed",
            "waited",
            "hit rate",
            "one engine",
        )
        runs = ("fleet-smg-shared", "fleet-haproxy-shared", "fleet-haproxy-local")
        found = [row for name in runs for row in measured(name)]
        return table(head, map(_of_fleet, found))

    return {
        "scaling-gateways": gateways,
        "scaling-growth": growth,
        "scaling-crowds": crowds,
        "scaling-decisions": decisions,
        "scaling-fleets": fleets,
    }


def _rate(row: Row, name: str = "hit_rate") -> str:
    return f"{row[name]:.3f}"


def _waited(row: Row) -> str:
    return f"{row['waited']:.2f}"


def _p95(row: Row) -> str:
    return f"{row['first_token_p95']:.1f} s"


def _of_gateway(row: Row) -> Sequence[str]:
    return row["way"], row["files"], _waited(row), _p95(row)


def _of_growth(row: Row) -> Sequence[str]:
    return (
        f"{row['engines']}",
        row["way"],
        row["files"],
        _rate(row),
        _rate(row, "large_cache"),
        _p95(row),
    )


def _of_crowd(row: Row) -> Sequence[str]:
    return f"{row['conversations']:g}", row["files"], _waited(row), _p95(row)


def _of_decision(row: Row) -> Sequence[str]:
    return (
        f"{row['engines']}",
        f"{row['engines'] * row['slots']}",
        f"{row['p50']:.1f} ms",
        f"{row['p99']:.1f} ms",
    )


def _of_fleet(row: Row) -> Sequence[str]:
    errors = (f"{len(row['errors_of_the_killed'])}", f"{len(row['other_errors'])}")
    return (
        row["gateway"],
        row["snapshots"],
        f"{row['requests']}",
        *errors,
        f"{row['waited']:.2f}",
        _rate(row),
        _rate(row, "hit_rate_of_one"),
    )
