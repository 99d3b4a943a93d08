"""What a growing conversation costs in the cold folder, and how fast it comes back.

`python -m benchmarks.cold_bytes [--gib 1] [--turns 40] [--repeats 5] [--only tiny-dense ...]`. An engine
computes a conversation of 40 turns that grows from 2,000 to 20,000 tokens, and its slot is saved after each
turn. Each state moves to the cold folder. What is written there is divided by the bytes that the new tokens
have in all layers. Then the last state is brought back, in parts and whole, in turn, and the fastest
of each counts; also a synthetic file with a real model's proportions.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import httpx
from rich.table import Table

from benchmarks.figures import BUILDS, console, keep
from benchmarks.large_files import write_slot_file
from slotkeeper.bench import lab
from slotkeeper.bench.lab import Restartable
from slotkeeper.bench.models import Tiny
from slotkeeper.engine.slotfile import SlotFile
from slotkeeper.engine.slotfile_reader import read
from slotkeeper.engine.slotfile_runs import divided
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.store import files, run_folder
from slotkeeper.store.index import Kept
from slotkeeper.store.intake import SavedFile
from slotkeeper.store.store import Store

FIRST, LAST = 2_000, 20_000  # tokens
ENGINE: Final = "a fingerprint"
WORDS: Final = 900  # ids of ordinary words in the tiny models

Row = dict[str, Any]


def on_disk(cold: Path) -> dict[Path, tuple[int, int]]:
    """Return all files of the cold folder with their inode and size."""
    found = (*cold.iterdir(), *cold.glob(f"{files.RUN_FOLDER}/*"))
    seen = {path: path.stat() for path in found if path.is_file()}
    return {path: (stat.st_ino, stat.st_size) for path, stat in seen.items()}


def token_bytes(data: bytes) -> int:
    """Return the bytes of one token's keys and values in all layers; 0 if the model has none."""
    found = read(BytesIO(data), len(data))
    division = divided(BytesIO(data), found) if isinstance(found, SlotFile) else None
    return sum(band.width for band in division.bands if len(band.counts) > 1) if division else 0


def ids(n: int) -> list[int]:
    return [5 + (i * 7919 + i // 13) % WORDS for i in range(n)]


class Conversation:
    """One conversation whose states are moved to the cold folder after each turn."""

    def __init__(self, store: Store, hot: Path, cold: Path) -> None:
        self.written, self.whole, self.newest = 0, 0, list[Kept]()
        self._store, self._hot, self._cold = store, hot, cold

    async def moves(self, name: str, size: int, tokens: Tokens) -> Kept:
        """Keep a saved file, move it, and count the bytes that were written for it."""
        kept = await self._store.keep(name, SavedFile(fingerprint=ENGINE, tokens=tokens, written=size))
        before = on_disk(self._cold)
        await self._store.demote(kept.id)
        new = [now for path, now in on_disk(self._cold).items() if before.get(path) != now]
        self.written += sum(size for _, size in new)
        self.whole += size
        self.newest = [kept]
        return kept

    async def goes_on(self, engine: Restartable, turns: int) -> Row:
        """Return the bytes written for each byte of the new tokens' own."""
        ends = [FIRST + (LAST - FIRST) * turn // (turns - 1) for turn in range(turns)]
        async with httpx.AsyncClient(base_url=engine.base, timeout=600) as http:
            for number, end in enumerate(ends):
                asked = {"prompt": ids(end), "n_predict": 0, "id_slot": 0}
                (await http.post("/completion", json=asked)).raise_for_status()
                name = await self._store.temporary()
                saved = await http.post("/slots/0?action=save", json={"filename": name})
                size = saved.raise_for_status().json()["n_written"]
                data = (self._hot / name).read_bytes()
                await self.moves(name, size, Tokens(ids(end)))
                if not number:
                    self.written = self.whole = 0  # the first save is all new
        own = token_bytes(data)
        new = LAST - FIRST
        return {
            "token_bytes": own,
            "per_token": self.written / new,
            "ratio": self.written / (new * own) if own else None,
            "whole_ratio": self.whole / (new * own) if own else None,
            "smaller": self.whole / self.written,
        }


async def brought_back(store: Store, kept: Kept, repeats: int) -> Row:
    """Return the seconds to bring a state back from the cold folder, in parts and whole, in turn."""
    taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(repeats):
        for in_parts, times in taken.items():
            with nullcontext() if in_parts else kept_whole():
                await store.demote(kept.id)
            began, worked = time.perf_counter(), time.process_time()
            await store.offer(kept.id, ENGINE)
            times.append((time.perf_counter() - began, time.process_time() - worked))
    (parts, parts_cpu), (whole, whole_cpu) = (
        map(min, zip(*taken[way], strict=True)) for way in (True, False)
    )
    return {
        "parts_seconds": parts,
        "whole_seconds": whole,
        "restore_ratio": parts / whole,
        "cpu_ratio": parts_cpu / whole_cpu,
    }


@contextmanager
def kept_whole() -> Iterator[None]:
    with patch.object(run_folder, "divided", return_value=None):
        yield


async def tiny(model: Tiny, build: str, folder: Path, turns: int, repeats: int) -> Row:
    async with lab.tiny_engine(model, build, folder, context_tokens=2 * (LAST + 1024)) as engine:
        hot, cold = folder / "slots", folder / "cold"
        store = Store(hot, cold)
        await store.open()
        try:
            talk = Conversation(store, hot, cold)
            row = await talk.goes_on(engine, turns)
            await store.offer(talk.newest[0].id, ENGINE)
            row |= await brought_back(store, talk.newest[0], repeats)
        finally:
            await store.close()
    return {"model": model.value, "build": build, **row}


async def synthetic(gib: float, folder: Path, repeats: int) -> Row:
    """A file as large as that of a real model, which is brought back."""
    hot, cold = folder / "hot", folder / "cold"
    store = Store(hot, cold)
    await store.open()
    try:
        name = await store.temporary(int(gib * 2**30))
        tokens, size = write_slot_file(hot / name, gib)
        kept = await store.keep(name, SavedFile(fingerprint=ENGINE, tokens=tokens, written=size))
        return {"model": f"{gib:g} GiB", "build": "", **await brought_back(store, kept, repeats)}
    finally:
        await store.close()


def table(rows: Sequence[Row]) -> Table:
    shown = Table(
        title="bytes written to the cold folder, and the time to bring a state back", title_justify="left"
    )
    head = ("of a token", "written", "÷ own", "whole files", "parts, s", "whole, s", "÷ whole", "cpu")
    for name in ("model", "build"):
        shown.add_column(name)
    for name in head:
        shown.add_column(name, justify="right")
    for row in rows:
        ratios = [f"{row[key]:.2f}" if row.get(key) else "-" for key in ("ratio", "whole_ratio")]
        sizes = [f"{row[key]:,.0f}" if row.get(key) else "-" for key in ("token_bytes", "per_token")]
        times = [f"{row[key]:.3f}" for key in ("parts_seconds", "whole_seconds")]
        brought = [f"{row[key]:.2f}" for key in ("restore_ratio", "cpu_ratio")]
        shown.add_row(row["model"], row["build"], *sizes, *ratios, *times, *brought)
    return shown


async def measure(chosen: argparse.Namespace) -> list[Row]:
    rows = []
    for build in BUILDS:
        for model in chosen.only:
            with tempfile.TemporaryDirectory(prefix="slotkeeper-cold-") as folder:
                rows.append(await tiny(Tiny(model), build, Path(folder), chosen.turns, chosen.repeats))
    if chosen.gib:
        with tempfile.TemporaryDirectory(prefix="slotkeeper-cold-") as folder:
            rows.append(await synthetic(chosen.gib, Path(folder), chosen.repeats))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_bytes", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the synthetic file; 0: none")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5, help="restores of each kind")
    parser.add_argument("--only", nargs="+", default=[model.value for model in Tiny], help="models")
    chosen = parser.parse_args(arguments)
    rows = asyncio.run(measure(chosen))
    console.print(table(rows))
    keep("cold_bytes", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
