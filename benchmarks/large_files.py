"""Snapshots of real size: event loop delay while one is hashed, copied and checked, and MB/s.

`python -m benchmarks.large_files [--gib 2] [--hot DIR] [--cold DIR]`. The files are synthetic and complete. A
task that sleeps for 5 ms at a time records how late it wakes up, alone and beside each operation of the
store.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from benchmarks.figures import console, keep
from slotkeeper.engine.slotfile import ByteSpan, SlotFile
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store.intake import Editor, SavedFile, SlotFileEdit
from slotkeeper.store.store import Store

TICK_SECONDS: Final = 0.005
ALONE_SECONDS: Final = 5.0
TOKENS: Final = 20_000
ROW_BYTES: Final = 2048  # one token in one layer: 8 heads of 128 elements of 16 bits
OFTEN: Final = 500
ENGINE: Final = "a fingerprint"


class Ticker:
    """Measures in milliseconds how late a task wakes up that only sleeps."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def run(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            self.late.append(1000 * (time.perf_counter() - before - TICK_SECONDS))

    def figures(self) -> dict[str, float]:
        percentiles = statistics.quantiles(self.late, n=100, method="inclusive")
        return {
            "median_ms": statistics.median(self.late),
            "p99_ms": percentiles[98],
            "max_ms": max(self.late),
        }


async def beside(work: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """Run `work`, and return the event loop's delays meanwhile and the time of the work."""
    ticker, began = Ticker(), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        ticking = tasks.create_task(ticker.run())
        await work()
        ticking.cancel()
    return {"seconds": time.perf_counter() - began} | ticker.figures()


def noise(gib: float) -> tuple[bytes, int]:
    """Return the keys of 20,000 tokens in one layer, and how many layers make up the size."""
    keys = os.urandom(TOKENS * ROW_BYTES)
    return keys, max(1, round(gib * 2**30 / (2 * len(keys))))


def write_slot_file(path: Path, keys: bytes, layers: int) -> tuple[Tokens, int]:
    """Write a dense model's state (engine.md 2.2), with the same keys and values in all layers.

    Returns the tokens and the size in bytes.
    """
    count = len(keys) // ROW_BYTES
    tokens = Tokens(range(count))
    words = struct.pack("<III", 0x67677371, 2, count + 4) + struct.pack("<iii", -1, 1, count)
    with path.open("wb") as file:
        file.write(words + tokens.packed + struct.pack("<i", 0))
        file.write(struct.pack("<II", 1, count))
        file.write(b"".join(struct.pack("<iIi", position, 1, 0) for position in range(count)))
        file.write(struct.pack("<II", 0, layers))
        for _ in range(2 * layers):
            file.write(struct.pack("<iQ", 1, ROW_BYTES) + keys)
        return tokens, file.tell()


def _copied(_: object, found: SlotFile) -> SlotFileEdit:
    return SlotFileEdit(recipe=(ByteSpan(0, found.size),))


class Bench:
    """One store, and the measurements of each operation."""

    def __init__(self, hot: Path, cold: Path, gib: float) -> None:
        self.store = Store(hot, cold)
        self.operations: dict[str, dict[str, float]] = {}
        self._hot = hot
        self._gib = gib

    async def measure(self) -> None:
        """Measure all operations. Raises StoreError if a folder has no room."""
        self.operations["nothing"] = await beside(lambda: asyncio.sleep(ALONE_SECONDS))
        await self.store.open()
        try:
            await self._keep("keep", None)
            await self._keep("keep, edited", _copied)
            store, kept = self.store, self.store.listing()[0]
            size = kept.manifest.size
            await self._note(f"{OFTEN} offers, hashed before", 0, lambda: self._offer_often(kept.id))
            await self._note("offer, not hashed before", size, lambda: store.verify(kept.id))
            await self._note("demote", size, lambda: store.demote(kept.id))
            await self._note("offer, from the cold tier", size, lambda: store.offer(kept.id, ENGINE))
        finally:
            await self.store.close()

    async def _keep(self, operation: str, edit: Editor | None) -> None:
        name = await self.store.temporary(int(self._gib * 2**30))
        tokens, size = write_slot_file(self._hot / name, *noise(self._gib))
        saved = SavedFile(fingerprint=ENGINE, tokens=tokens, written=size, edit=edit)
        await self._note(operation, size, lambda: self.store.keep(name, saved))

    async def _offer_often(self, snapshot: SnapshotId) -> None:
        for _ in range(OFTEN):
            await self.store.offer(snapshot, ENGINE)

    async def _note(self, operation: str, size: int, work: Callable[[], Awaitable[object]]) -> None:
        found = await beside(work)
        self.operations[operation] = found | {"mb_per_second": size / found["seconds"] / 1e6}


def table(operations: Mapping[str, Mapping[str, float]], gib: float) -> Table:
    shown = Table(title=f"how late the event loop is, ms, beside a file of {gib:g} GiB", title_justify="left")
    shown.add_column("operation")
    for name in ("s", "MB/s", "median", "p99", "max"):
        shown.add_column(name, justify="right")
    for name, found in operations.items():
        rate = f"{found['mb_per_second']:.0f}" if found.get("mb_per_second") else "-"
        lag = (f"{found[key]:.2f}" for key in ("median_ms", "p99_ms", "max_ms"))
        shown.add_row(name, f"{found['seconds']:.2f}", rate, *lag)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_files", description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of each file; there are three at a time")
    parser.add_argument("--hot", type=Path, help="where to make the hot folder, such as a tmpfs")
    parser.add_argument("--cold", type=Path, help="where to make the cold folder")
    chosen = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="slotkeeper-hot-", dir=chosen.hot) as hot,
        tempfile.TemporaryDirectory(prefix="slotkeeper-cold-", dir=chosen.cold) as cold,
    ):
        bench = Bench(Path(hot), Path(cold), chosen.gib)
        asyncio.run(bench.measure())
        console.print(table(bench.operations, chosen.gib))
        keep("large_files", {"gib": chosen.gib, "hot": hot, "cold": cold, "operations": bench.operations})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
