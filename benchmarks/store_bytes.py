"""What a growing conversation uploads to a shared store, in bytes and requests, and how fast it comes back.

`python -m benchmarks.store_bytes [--layers 1 4] [--gib 1] [--turns 40] [--repeats 2] [--least KIB ...]`. The
files are made up and have a real model's proportions: 4 KiB for each token in each layer. A conversation of
40 turns grows from 2,000 to 20,000 tokens, and each state is uploaded. The store is a folder behind a
simulated line: each request waits for 30 ms, and each stream has 90 MB/s, as S3 is said to have (Amazon's
performance guidelines: 85 to 90 MB/s for each request). Then the last state is brought back, in parts and as
one object, in turn, and the fastest of each counts.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from benchmarks.cold_bytes import ENGINE, Conversation, a_store
from benchmarks.figures import console, keep
from benchmarks.large_files import noise, write_slot_file
from slotkeeper.engine.slotfile import PartSizes
from slotkeeper.store.intake import SavedFile
from slotkeeper.store.shared_store.objects import PART, Objects, ObjectSeen
from slotkeeper.store.shared_store.part_objects import IN_STORE
from slotkeeper.store.shared_store.shared import SharedStore
from slotkeeper.store.store import Store

WHOLE: Final = PartSizes(least=1 << 60)
DELAY_SECONDS: Final = 0.03
STREAM_BYTES: Final = 90e6  # a second

Row = dict[str, Any]


class Line(Objects):
    """A store behind a line, which counts requests and the bytes that are uploaded."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), lambda *_: None)
        self.requests = self.uploaded = 0
        self.delay, self.rate = DELAY_SECONDS, STREAM_BYTES

    async def _takes(self, size: int, requests: int = 1, streams: int = 1) -> None:
        self.requests += requests
        await asyncio.sleep(self.delay + size / self.rate / streams)

    async def create(self, path: str, data: bytes) -> bool:
        self.uploaded += len(data)
        await self._takes(len(data))
        return await super().create(path, data)

    async def mark(self, path: str) -> None:
        await self._takes(0)
        await super().mark(path)

    async def stream_up(self, path: str, chunks: AsyncIterable[bytes]) -> None:
        size = 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal size
            async for chunk in chunks:
                size += len(chunk)
                yield chunk

        await super().stream_up(path, counted())
        self.uploaded += size
        await self._takes(size, requests=2 + -(-size // PART), streams=4)

    async def read(self, path: str, most: int) -> bytes:
        data = await super().read(path, most)
        await self._takes(len(data))
        return data

    async def stream_down(self, path: str) -> AsyncIterator[memoryview]:
        await self._takes(0)
        began, size = time.perf_counter(), 0
        async for chunk in super().stream_down(path):
            size += len(chunk)
            await asyncio.sleep(max(0.0, began + size / self.rate - time.perf_counter()))
            yield chunk

    async def size(self, path: str) -> int | None:
        await self._takes(0)
        return await super().size(path)

    async def listing(self, folder: str, *, existing: bool = False) -> AsyncIterator[ObjectSeen]:
        await self._takes(0)
        async for seen in super().listing(folder, existing=existing):
            yield seen

    async def remove(self, path: str) -> None:
        await self._takes(0)
        await super().remove(path)


async def grown(layers: int, least: int, turns: int, folder: Path) -> Row:
    """Upload a conversation turn by turn."""
    line = Line(folder / "store")
    sizes = PartSizes(least=least, most=max(least, IN_STORE.most))
    async with a_store(folder / "hot", SharedStore(line, sizes=sizes)) as store:
        talk = Conversation(store, folder / "hot", lambda: line.uploaded, turns)
        began = time.perf_counter()
        await talk.is_made_up(layers)
        seconds = time.perf_counter() - began
    figures = talk.figures()
    return {
        "least": least,
        **{name: figures[name] for name in ("token_bytes", "per_token", "ratio", "smaller")},
        "requests_per_turn": line.requests / turns,
        "seconds_per_turn": seconds / turns,
    }


async def brought_back(gib: float, least: int, repeats: int, folder: Path) -> Row:
    """Bring back one state from a store that has it in parts, and from one that has it whole."""
    ways = {"parts": PartSizes(least=least, most=max(least, IN_STORE.most)), "whole": WHOLE}
    seconds: dict[str, list[float]] = {f"{way}{near}": [] for way in ways for near in ("", "_near")}
    requests: dict[str, int] = {}
    async with AsyncExitStack() as stack:
        stores: dict[str, tuple[Store, Line]] = {}
        for way, sizes in ways.items():
            line = Line(folder / way)
            store = await stack.enter_async_context(
                a_store(folder / f"hot-{way}", SharedStore(line, sizes=sizes))
            )
            name = await store.temporary(int(gib * 2**30))
            tokens, size = write_slot_file(folder / f"hot-{way}" / name, *noise(gib))
            kept = await store.keep(name, SavedFile(fingerprint=ENGINE, tokens=tokens, written=size))
            stores[way] = store, line
            await store.demote(kept.id)
        for _ in range(repeats):
            for way, (store, line) in stores.items():
                (kept,) = store.listing()
                for near in ("", "_near"):
                    line.delay, line.rate = (0.0, float("inf")) if near else (DELAY_SECONDS, STREAM_BYTES)
                    before, began = line.requests, time.perf_counter()
                    await store.offer(kept.id, ENGINE)
                    seconds[way + near].append(time.perf_counter() - began)
                    requests[way] = line.requests - before
                    await store.demote(kept.id)
    return {
        "least": least,
        "gib": gib,
        "requests": requests["parts"],
        **{k: min(v) for k, v in seconds.items()},
    }


def tables(up: Sequence[Row], down: Sequence[Row]) -> Sequence[Table]:
    first = Table(title="uploaded to a shared store, for each new token and turn", title_justify="left")
    for name in ("parts from, KiB", "of a token", "uploaded", "÷ own", "÷ files", "requests", "s a turn"):
        first.add_column(name, justify="right")
    for row in up:
        first.add_row(
            f"{row['least'] >> 10:,}",
            *(f"{row[key]:,.0f}" for key in ("token_bytes", "per_token")),
            f"{row['ratio']:.2f}",
            f"1/{row['smaller']:.0f}",
            f"{row['requests_per_turn']:.1f}",
            f"{row['seconds_per_turn']:.2f}",
        )
    second = Table(title="brought back, s", title_justify="left")
    for name in ("parts from, KiB", "GiB", "parts", "one object", "no line: parts", "one object", "requests"):
        second.add_column(name, justify="right")
    for row in down:
        times = [f"{row[key]:.2f}" for key in ("parts", "whole", "parts_near", "whole_near")]
        second.add_row(f"{row['least'] >> 10:,}", f"{row['gib']:g}", *times, str(row["requests"]))
    return first, second


async def measure(chosen: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Return what is uploaded, and what is brought back."""
    up, down = list[Row](), list[Row]()
    for least in (kib << 10 for kib in chosen.least):
        for layers in chosen.layers:
            with tempfile.TemporaryDirectory(prefix="slotkeeper-store-") as folder:
                up.append(await grown(layers, least, chosen.turns, Path(folder)))
        if chosen.gib:
            with tempfile.TemporaryDirectory(prefix="slotkeeper-store-") as folder:
                down.append(await brought_back(chosen.gib, least, chosen.repeats, Path(folder)))
    return up, down


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_bytes", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=[1, 4], help="of 4 KiB a token")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the file that comes back; 0: none")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2, help="fetches of each kind")
    parser.add_argument(
        "--least", type=int, nargs="*", default=[512, 2048, 8192], help="least sizes of a part, in KiB"
    )
    chosen = parser.parse_args(arguments)
    up, down = asyncio.run(measure(chosen))
    for shown in tables(up, down):
        console.print(shown)
    keep("store_bytes", [*up, *down])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
