"""The tables of docs/scaling.md, from docs/figures.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

Row = dict[str, Any]
Measured = Callable[[str], Any]
SHOWN: Final = (4, 500)  # engines
FILES: Final = ("local", "shared")  # where snapshots are


def of(measured: Measured, table: Callable[..., str]) -> Mapping[str, Callable[[], str]]:
    """Return the function that writes each block, by the block's name.

    `measured` returns the figures of a benchmark by its name; `table` formats a head and rows.
    """

    def rows(name: str) -> Iterator[Row]:
        return (row for row in measured("scaling") if row["table"] == name)

    def gateways() -> str:
        head = ("who chooses", "waited, local", "waited, shared", "TTFT p95, s, local", "TTFT p95, s, shared")
        found = _by_files(rows("gateways"), "way")
        return table(
            head, ((way, *_of_files(_waited, mine), *_of_files(_p95, mine)) for (way,), mine in found)
        )

    def growth() -> str:
        head = (
            "engines",
            "who chooses",
            "one large cache",
            "hit rate, local",
            "hit rate, shared",
            "TTFT p95, s, local",
            "TTFT p95, s, shared",
        )
        shown = (row for row in rows("growth") if row["engines"] in SHOWN)
        found = _by_files(shown, "engines", "way")
        return table(
            head,
            (
                (
                    f"{engines}",
                    way,
                    _rate(mine["local"], "large_cache"),
                    *_of_files(_rate, mine),
                    *_of_files(_p95, mine),
                )
                for (engines, way), mine in found
            ),
        )

    def crowds() -> str:
        head = (
            "conversations for each engine",
            "waited, no snapshots",
            "local",
            "shared",
            "TTFT p95, s, no snapshots",
            "local",
            "shared",
        )
        ways = ("none", *FILES)
        found = _by_files(rows("crowds"), "conversations")
        return table(
            head,
            (
                (f"{number:g}", *_of_files(_waited, mine, ways), *_of_files(_p95, mine, ways))
                for (number,), mine in found
            ),
        )

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
        "scaling-fleets": fleets,
    }


def _by_files(rows: Iterable[Row], *names: str) -> Iterable[tuple[tuple[Any, ...], dict[str, Row]]]:
    """Yield the values of some fields, and their rows by where snapshots are."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), {})[row["files"]] = row
    return found.items()


def _of_files(
    figure: Callable[[Row], str], mine: Mapping[str, Row], ways: Iterable[str] = FILES
) -> Iterator[str]:
    """Yield a figure for each place of snapshots; a dash where it was not measured."""
    return (figure(mine[way]) if way in mine else "-" for way in ways)


def _rate(row: Row, name: str = "hit_rate") -> str:
    return f"{row[name]:.3f}"


def _waited(row: Row) -> str:
    return f"{row['waited']:.2f}"


def _p95(row: Row) -> str:
    return f"{row['first_token_p95']:.1f}"


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
