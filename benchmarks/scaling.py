"""What a fleet reuses as it grows, by the rule of its gateway: the tables of docs/scaling.md.

`python -m benchmarks.scaling [--only NAME]`. Everything is simulated (`benchmarks.simulator`): the real
scheduler, and engines that only simulate time. The same seeds give the same figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.simulator.load import LoadProfile, Synthetic
from benchmarks.simulator.simulation import ONE_SIDECAR, WAYS, Files, FleetShape, Simulation
from benchmarks.simulator.timed_engine import EngineRates

BOTH: Final = (Files.LOCAL, Files.SHARED)
SHORT: Final = {
    "turns": 4,
    "system_tokens": 3000,
    "first_tokens": 800,
    "turn_tokens": 400,
    "reply_tokens": 120,
}
NETWORKS: Final = (1.25e8, 1.25e9, 1.25e10)  # bytes per second: 1, 10 and 100 Gbit/s


def agents(engines: int, each: int, **more: Any) -> LoadProfile:
    return Synthetic(conversations=each * engines, **more).load()


def gateways() -> Iterator[tuple[LoadProfile, FleetShape]]:
    """Compare gateways of four engines with four slots each, with twice as many conversations as slots."""
    for files in BOTH:
        for way in WAYS:
            yield agents(4, 8), FleetShape(engines=4, way=way, files=files)


def growth() -> Iterator[tuple[LoadProfile, FleetShape]]:
    """Simulate the same load per engine, with 1 to 500 engines."""
    for engines in (1, 4, 16, 64, 500):
        load = agents(engines, 5, **SHORT)
        for files in BOTH if engines > 1 else (Files.LOCAL,):
            for way in ("consistent-hash", "cache-aware") if engines > 1 else (ONE_SIDECAR,):
                yield load, FleetShape(engines=engines, way=way, files=files)


def crowds() -> Iterator[tuple[LoadProfile, FleetShape]]:
    """Vary the conversations per engine of four slots."""
    for each in (2, 4, 8, 12):
        for files in Files:
            yield agents(4, each), FleetShape(engines=4, way="cache-aware", files=files)


def networks() -> Iterator[tuple[LoadProfile, FleetShape]]:
    """Vary the network to the shared store; every turn may go to another engine."""
    for network in NETWORKS:
        for token_bytes in (16384, 65536, 262144):
            rates = EngineRates(network=network, token_bytes=token_bytes)
            yield agents(4, 6), FleetShape(engines=4, way="round-robin", files=Files.SHARED, rates=rates)


TABLES: Final[dict[str, Callable[[], Iterator[tuple[LoadProfile, FleetShape]]]]] = {
    "gateways": gateways,
    "growth": growth,
    "crowds": crowds,
    "networks": networks,
}


def rows_of(name: str) -> list[dict[str, Any]]:
    rows = []
    for load, shape in TABLES[name]():
        outcome = Simulation(load, shape).run()
        each = len(load.conversations) / shape.engines
        told = {"conversations": each, "network": shape.rates.network, "token_bytes": shape.rates.token_bytes}
        rows.append({"table": name, **outcome.shown(), **told})
        console.print(
            f"{name} {shape.engines} {shape.way} {shape.files}: {outcome.took:.0f} s", highlight=False
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--only", choices=TABLES, action="append", help="tables to make; others are dropped")
    args = parser.parse_args(arguments)
    rows = [row for name in args.only or TABLES for row in rows_of(name)]
    shown = (
        "table",
        "engines",
        "way",
        "files",
        "conversations",
        "hit_rate",
        "large_cache",
        "waited",
        "first_token_p95",
    )
    table = Table(*shown)
    for row in rows:
        table.add_row(*(str(row[name]) for name in shown))
    console.print(table)
    keep("scaling", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
