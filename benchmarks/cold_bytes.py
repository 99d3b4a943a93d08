"""What a growing conversation costs in the cold folder, and how fast it comes back.

`python -m benchmarks.cold_bytes [--gib 1] [--layers 4] [--turns 40] [--repeats 5] [--only [MODEL ...]]`. An
engine computes a conversation of 40 turns that grows from 2,000 to 20,000 tokens, and its slot is saved after
each turn. Each state moves to the cold folder. What is written there, without windows, recurrent states and
checkpoints, is divided by the bytes that the new tokens have in all layers. Then the last state is brought
back, in parts and whole, in turn, and the fastest of each counts. The same with files that are made up and
have a real model's proportions.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from hashlib import sha256
from io import FileIO
from itertools import product
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import httpx
from rich.table import Table

from benchmarks.figures import BUILDS, console, keep
from benchmarks.large_files import ROW_BYTES, noise, write_slot_file
from slotkeeper.bench import lab
from slotkeeper.bench.lab import Restartable
from slotkeeper.bench.models import Tiny
from slotkeeper.engine.slotfile import Band, Division, SlotFile, divided, read
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.store import files
from slotkeeper.store.folders import run_folder
from slotkeeper.store.index import Kept
from slotkeeper.store.intake import SavedFile
from slotkeeper.store.shared_store.shared import SharedStore
from slotkeeper.store.store import Store

FIRST, LAST = 2_000, 20_000  # tokens
ENGINE: Final = "a fingerprint"
WORDS: Final = 900  # ids of ordinary words in the tiny models

Row = dict[str, Any]


class Written:
    """The bytes of all files that were new in a cold folder since the beginning, each time it is asked."""

    def __init__(self, cold: Path) -> None:
        self._cold = cold
        self._before: dict[Path, tuple[int, int]] = {}
        self._total = 0

    def __call__(self) -> int:
        found = (*self._cold.iterdir(), *self._cold.glob(f"{files.RUN_FOLDER}/*"))
        stats = {path: path.stat() for path in found if path.is_file()}
        now = {path: (stat.st_ino, stat.st_size) for path, stat in stats.items()}
        self._total += sum(size for path, (_, size) in now.items() if self._before.get(path) != now[path])
        self._before = now
        return self._total


class Taken:
    """What the files of a conversation consist of: rows of tokens, and parts that are new with each state."""

    def __init__(self) -> None:
        self.token = 0  # bytes of one token's keys and values, in the layers that keep all tokens
        self.states = 0  # bytes of windows, recurrent states and checkpoints that were not there before
        self._seen: set[bytes] = set()

    def add(self, file: FileIO, size: int) -> None:
        found = read(file, size)
        if not isinstance(found, SlotFile) or (division := divided(file, found)) is None:
            raise ValueError("the file has no parts")
        growing = [band for band in division.bands if sum(band.counts) == len(found.tokens)]
        self.token = sum(band.width for band in growing)
        for recipe, band in zip(division.parts(), _of_parts(division), strict=True):
            if band not in growing:
                part = b"".join(map(bytes, files.bytes_of(recipe, file, files.Halt())))
                digest = sha256(part).digest()
                self.states += len(part) if digest not in self._seen else 0
                self._seen.add(digest)


def _of_parts(division: Division) -> Iterator[Band]:
    return (band for band in division.bands for _ in band.counts)


def ids(n: int) -> list[int]:
    return [5 + (i * 7919 + i // 13) % WORDS for i in range(n)]


class Conversation:
    """One conversation whose states are moved to the cold tier after each turn.

    `total` returns the bytes that were written there since the beginning.
    """

    def __init__(self, store: Store, hot: Path, total: Callable[[], int], turns: int) -> None:
        self.hot = hot
        self.ends = [FIRST + (LAST - FIRST) * turn // (turns - 1) for turn in range(turns)]
        self.written, self.whole, self.taken = 0, 0, Taken()
        self._store, self._total = store, total

    async def moves(self, name: str, size: int, tokens: Tokens) -> Kept:
        """Keep a saved file, move it, and count the bytes that were written for it."""
        with files.open_ours(self.hot / name) as file:
            self.taken.add(file, size)
        if len(tokens) == FIRST:
            self.taken.states = 0  # the first save is all new
        kept = await self._store.keep(name, SavedFile(fingerprint=ENGINE, tokens=tokens, written=size))
        before = self._total()
        await self._store.demote(kept.id)
        if len(tokens) > FIRST:
            self.written += self._total() - before
            self.whole += size
        return kept

    async def goes_on(self, engine: Restartable) -> Kept:
        """Compute and save all turns on an engine. Returns the last state."""
        async with httpx.AsyncClient(base_url=engine.base, timeout=600) as http:
            for end in self.ends:
                asked = {"prompt": ids(end), "n_predict": 0, "id_slot": 0}
                (await http.post("/completion", json=asked)).raise_for_status()
                name = await self._store.temporary()
                saved = await http.post("/slots/0?action=save", json={"filename": name})
                size = saved.raise_for_status().json()["n_written"]
                kept = await self.moves(name, size, Tokens(ids(end)))
        return kept

    async def is_made_up(self, layers: int) -> Kept:
        """Write the files of all turns, as a model with so many layers would. Returns the last state."""
        keys, _ = noise(0)
        for end in self.ends:
            name = await self._store.temporary()
            tokens, size = write_slot_file(self.hot / name, keys[: end * ROW_BYTES], layers)
            kept = await self.moves(name, size, tokens)
        return kept

    def figures(self) -> Row:
        new, own = LAST - FIRST, self.taken.token
        rows = self.written - self.taken.states
        return {
            "token_bytes": own,
            "per_token": rows / new,
            "states_per_turn": self.taken.states / (len(self.ends) - 1),
            "ratio": rows / (new * own) if own else None,
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
    with patch.object(run_folder, "parts_of", return_value=None):
        yield


@asynccontextmanager
async def a_store(hot: Path, cold: Path | SharedStore) -> AsyncIterator[Store]:
    store = Store(hot, cold)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def tiny(model: Tiny, build: str, folder: Path, turns: int, repeats: int) -> Row:
    hot, cold = folder / "slots", folder / "cold"
    room = 2 * (LAST + 1024)
    async with (
        lab.tiny_engine(model, build, folder, context_tokens=room) as engine,
        a_store(hot, cold) as store,
    ):
        talk = Conversation(store, hot, Written(cold), turns)
        last = await talk.goes_on(engine)
        await store.offer(last.id, ENGINE)
        back = await brought_back(store, last, repeats)
    return {"model": model.value, "build": build, **talk.figures(), **back}


async def made_up(layers: int, folder: Path, turns: int, repeats: int) -> Row:
    """The same with files of a real model's proportions, without an engine."""
    hot, cold = folder / "hot", folder / "cold"
    async with a_store(hot, cold) as store:
        talk = Conversation(store, hot, Written(cold), turns)
        last = await talk.is_made_up(layers)
        await store.offer(last.id, ENGINE)
        back = await brought_back(store, last, repeats)
    return {"model": "", "build": "", **talk.figures(), **back}


async def large(gib: float, folder: Path, repeats: int) -> Row:
    """A file as large as that of a real model, which is brought back."""
    hot, cold = folder / "hot", folder / "cold"
    async with a_store(hot, cold) as store:
        name = await store.temporary(int(gib * 2**30))
        tokens, size = write_slot_file(hot / name, *noise(gib))
        kept = await store.keep(name, SavedFile(fingerprint=ENGINE, tokens=tokens, written=size))
        return {"model": f"{gib:g} GiB", "build": "", **await brought_back(store, kept, repeats)}


def table(rows: Sequence[Row]) -> Table:
    shown = Table(
        title="bytes written to the cold folder, and the time to bring a state back", title_justify="left"
    )
    head = (
        "of a token",
        "written",
        "÷ own",
        "states, kB",
        "÷ files",
        "parts, s",
        "whole, s",
        "÷ whole",
        "cpu",
    )
    for name in ("model", "build"):
        shown.add_column(name)
    for name in head:
        shown.add_column(name, justify="right")
    for row in rows:
        sizes = [f"{row[key]:,.0f}" if row.get(key) else "-" for key in ("token_bytes", "per_token")]
        ratio = f"{row['ratio']:.2f}" if row.get("ratio") else "-"
        states = f"{row['states_per_turn'] / 1000:,.0f}" if "states_per_turn" in row else "-"
        smaller = f"1/{row['smaller']:.0f}" if row.get("smaller") else "-"
        times = [f"{row[key]:.3f}" for key in ("parts_seconds", "whole_seconds")]
        brought = [f"{row[key]:.2f}" for key in ("restore_ratio", "cpu_ratio")]
        shown.add_row(
            row["model"] or "made up", row["build"], *sizes, ratio, states, smaller, *times, *brought
        )
    return shown


async def measure(chosen: argparse.Namespace) -> list[Row]:
    rows, turns, repeats = [], chosen.turns, chosen.repeats
    for build, model in product(BUILDS, chosen.only):
        with tempfile.TemporaryDirectory(prefix="slotkeeper-cold-") as folder:
            rows.append(await tiny(Tiny(model), build, Path(folder), turns, repeats))
    if chosen.layers:
        with tempfile.TemporaryDirectory(prefix="slotkeeper-cold-") as folder:
            rows.append(await made_up(chosen.layers, Path(folder), turns, repeats))
    if chosen.gib:
        with tempfile.TemporaryDirectory(prefix="slotkeeper-cold-") as folder:
            rows.append(await large(chosen.gib, Path(folder), repeats))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_bytes", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the synthetic file; 0: none")
    parser.add_argument(
        "--layers", type=int, default=4, help="of 4 KiB a token, of the files that are made up; 0: none"
    )
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5, help="restores of each kind")
    parser.add_argument("--only", nargs="*", default=[model.value for model in Tiny], help="models")
    chosen = parser.parse_args(arguments)
    rows = asyncio.run(measure(chosen))
    console.print(table(rows))
    keep("cold_bytes", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
