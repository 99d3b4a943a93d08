"""The tables of docs/scaling.md, from docs/figures.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

Row = dict[str, Any]
Measured = Callable[[str], Any]
GIB: Final = 2**30


def of(measured: Measured, table: Callable[..., str]) -> Mapping[str, Callable[[], str]]:
    """Return the function that writes each block, by the block's name.

    `measured` returns the figures of a benchmark by its name; `table` formats a head and rows.
    """

    def rows(name: str) -> Iterator[Row]:
        return (row for row in measured("scaling") if row["table"] == name)

    def gateways() -> str:
        head = ("who chooses", "snapshots", "hit rate", "waited", "TTFT p50", "p95", "fetched", "busiest")
        return table(head, map(_of_gateway, rows("gateways")))

    def growth() -> str:
        head = (
            "engines",
            "who chooses",
            "snapshots",
            "requests",
            "hit rate",
            "one large cache",
            "waited",
            "TTFT p95",
        )
        return table(head, map(_of_growth, rows("growth")))

    def crowds() -> str:
        head = (
            "conversations for each engine",
            "snapshots",
            "hit rate",
            "one large cache",
            "waited",
            "TTFT p95",
        )
        return table(head, map(_of_crowd, rows("crowds")))

    def networks() -> str:
        head = ("line to the store", "KiB a token", "hit rate", "waited", "TTFT p50", "p95", "fetched")
        return table(head, map(_of_network, rows("networks")))

    def decisions() -> str:
        head = ("engines", "slots", "request of a conversation", "p50", "p95", "p99")
        return table(head, map(_of_decision, measured("placement")))

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
        "scaling-networks": networks,
        "scaling-decisions": decisions,
        "scaling-fleets": fleets,
    }


def _rate(row: Row, name: str = "hit_rate") -> str:
    return f"{row[name]:.3f}"


def _waited(row: Row) -> str:
    return f"{row['waited']:.2f}"


def _first(row: Row, percent: int) -> str:
    return f"{row[f'first_token_p{percent}']:.1f} s"


def _fetched(row: Row) -> str:
    return f"{row['fetched_bytes'] / GIB:.0f} GiB"


def _of_gateway(row: Row) -> Sequence[str]:
    waits = (_first(row, 50), _first(row, 95))
    return row["way"], row["files"], _rate(row), _waited(row), *waits, _fetched(row), f"{row['busiest']:.2f}"


def _of_growth(row: Row) -> Sequence[str]:
    rates = (_rate(row), _rate(row, "large_cache"), _waited(row), _first(row, 95))
    return f"{row['engines']}", row["way"], row["files"], f"{row['requests']:,}", *rates


def _of_crowd(row: Row) -> Sequence[str]:
    rates = (_rate(row), _rate(row, "large_cache"), _waited(row), _first(row, 95))
    return f"{row['conversations']:g}", row["files"], *rates


def _of_network(row: Row) -> Sequence[str]:
    line = f"{row['network'] * 8 / 1e9:g} Gbit/s"
    waits = (_first(row, 50), _first(row, 95))
    return line, f"{row['token_bytes'] // 1024}", _rate(row), _waited(row), *waits, _fetched(row)


def _of_decision(row: Row) -> Sequence[str]:
    times = (f"{row[name]:.1f} ms" for name in ("p50", "p95", "p99"))
    return f"{row['engines']}", f"{row['engines'] * row['slots']}", row["request"], *times


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
