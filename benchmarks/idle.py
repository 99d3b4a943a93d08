"""Idle connections and slow readers: how much later is another client's first byte?

`python -m benchmarks.idle [--idle 2000] [--readers 500] [--rounds 4] [--requests 40]`

In each round small requests are sent with all of these connections open, and as many without any, in random
order. An idle connection has had an answer and sends nothing more. A slow reader reads one kilobyte per
second of an answer of about a hundred.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from rich.progress import track

from benchmarks.figures import console, keep
from benchmarks.first_byte import PATH, PAUSE_SECONDS, WARM_UP, small_request
from benchmarks.raw import post
from benchmarks.stage import QUIET, engine_for
from slotkeeper.bench.lab import served
from slotkeeper.bench.texts import prose
from slotkeeper.exchange.connections import DESCRIPTORS
from slotkeeper.system import raise_descriptors

TARGET: Final = 1.10
SLOTS: Final = 4
PIECE: Final = 1024  # bytes that a slow reader takes per second
FLAGS: Final = "--max-connections 16000"  # half of them may come from one address
AT_ONCE: Final = 50  # connections to open at a time
HEALTH: Final = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def crowd(base: str, idle: int, readers: int) -> AsyncIterator[None]:
    """Hold all of these connections open while the block runs."""
    text = orjson.dumps({"content": prose(60_000, 1)})
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
    room = asyncio.Semaphore(AT_ONCE)

    async def opened(request: bytes) -> Streams:
        async with room:
            line = socket.create_connection((urlsplit(base).hostname, urlsplit(base).port))
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
            reader, writer = await asyncio.open_connection(sock=line, limit=PIECE)
            writer.write(request)
            await reader.readuntil(b"\r\n\r\n")
            return reader, writer

    quiet = await asyncio.gather(*(opened(HEALTH) for _ in range(idle)))
    slow = await asyncio.gather(*(opened(head.encode() + text) for _ in range(readers)))
    try:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(_slowly([reader for reader, _ in slow]))
            yield
            reading.cancel()
    finally:
        for _, writer in (*quiet, *slow):
            writer.transport.abort()


async def _slowly(readers: Sequence[asyncio.StreamReader]) -> None:
    """Read from one connection after the other, so that not all are read at one moment."""
    while readers:
        for reader in readers:
            await reader.read(PIECE)  # never waits, since all of the answer was sent
            await asyncio.sleep(1 / len(readers))


async def first_bytes(base: str, requests: int) -> list[float]:
    """Return milliseconds."""
    times = []
    for number in range(-WARM_UP, requests):
        took = await post(base, PATH, small_request())
        if not took.ok:
            raise RuntimeError(f"{took.answer[:300]!r}")
        if number >= 0:
            times.append(1000 * (took.first - took.sent))
        await asyncio.sleep(PAUSE_SECONDS)
    return times


async def measure(idle: int, readers: int, rounds: int, requests: int) -> dict[str, Any]:
    raise_descriptors(DESCRIPTORS)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotkeeper-bench-")))
        engine = await engine_for(stack, folder / "engine", SLOTS, 1024 * SLOTS, relayed=False)
        sidecar = await stack.enter_async_context(served(engine.url, [*QUIET, *FLAGS.split()]))
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in track(range(rounds), "rounds", console=console, transient=True):
            for crowded in random.sample((True, False), 2):
                async with AsyncExitStack() as open_:
                    if crowded:
                        await open_.enter_async_context(crowd(sidecar.url, idle, readers))
                    times[crowded] += await first_bytes(sidecar.url, requests)
        with_, without = (statistics.median(times[crowded]) for crowded in (True, False))
        return {
            "with_ms": round(with_, 3),
            "without_ms": round(without, 3),
            "ratio": round(with_ / without, 3),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__)
    parser.add_argument("--idle", type=int, default=2000, help="idle connections")
    parser.add_argument("--readers", type=int, default=500, help="slow readers")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40, help="requests in each round, with and without")
    chosen = parser.parse_args(arguments)
    figures = asyncio.run(measure(chosen.idle, chosen.readers, chosen.rounds, chosen.requests))
    style = "green" if figures["ratio"] <= TARGET else "red"
    console.print(
        f"{chosen.idle:,} idle connections and {chosen.readers:,} slow readers: first byte of a small "
        f"request {figures['with_ms']:.2f} ms, without them {figures['without_ms']:.2f} ms: "
        f"{figures['ratio']:.2f} times (target: {TARGET})",
        style=style,
    )
    keep("idle", figures | {"target": TARGET})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
