"""Two versions of the source compared: the cost of a request in each.

`python -m benchmarks.two_trees ELSEWHERE [--requests 300] [--turns 40] [--tokens 30000]`, where ELSEWHERE is
another checkout (`git worktree add --detach ELSEWHERE COMMIT`) with the same dependencies.

Requests alternate in random order, so that other load on the machine meets both alike. Each tree has its own
engine with the same flags. Measured are the time until the engine has a request, and the sidecar's processor
time for a request and its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from rich.progress import track
from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.first_byte import small_request
from benchmarks.own_time import PATH, PAUSE_SECONDS, Conversation
from benchmarks.raw import post
from benchmarks.stage import QUIET, Way, engine_for, processor_seconds
from slotkeeper.bench.lab import served
from slotkeeper.bench.texts import prose

HERE: Final = Path(__file__).parents[1]
WARM_UP: Final = 10
CONTEXT: Final = 131072
NAMES: Final = ("here", "elsewhere")
Ask = Callable[[], Awaitable[float]]  # sends one request; returns the milliseconds until the engine had it


def small(way: Way) -> Ask:
    """Send requests of new conversations."""
    relay = way.relay
    if relay is None:
        raise ValueError(f"{way} has no relay to read the clock")

    async def ask() -> float:
        before = len(relay.arrivals)
        took = await post(way.url, PATH, small_request())
        (left,) = (at for path, at in relay.arrivals[before:] if path == PATH)
        return 1000 * (left - took.sent)

    return ask


async def append(way: Way, tokens: int) -> Ask:
    """Send turns of one conversation of this length."""
    chat = Conversation(way=way, messages=[{"role": "system", "content": prose(4000, 3)}])
    await chat.fill(tokens)
    return lambda: chat.ask("Short question?")


async def compared(asks: Sequence[Ask], pids: Sequence[int], times: int) -> dict[str, Any]:
    """Return medians of the time, and of the differences between two requests sent one after the other."""
    waited: list[list[float]] = [[], []]
    before = [processor_seconds(pid) for pid in pids]
    for _ in track(range(times), "taking turns", console=console, transient=True):
        for which in random.sample(range(2), 2):
            waited[which].append(await asks[which]())
            await asyncio.sleep(PAUSE_SECONDS / 3)
    busy = [1000 * (processor_seconds(pid) - then) / times for pid, then in zip(pids, before, strict=True)]
    pairs = [one - other for one, other in zip(*waited, strict=True)]
    return {
        "until the engine has it": _told(map(statistics.median, waited), statistics.median(pairs)),
        "processor time": _told(busy, busy[0] - busy[1]),
    }


def _told(found: Iterable[float], difference: float) -> dict[str, float]:
    named = zip((*NAMES, "difference"), (*found, difference), strict=True)
    return {f"{name}_ms": round(value, 3) for name, value in named}


async def measure(elsewhere: Path, requests: int, turns: int, tokens: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotkeeper-bench-")))
        ways, pids = [], []
        for name, tree in zip(NAMES, (HERE, elsewhere), strict=True):
            engine = await engine_for(stack, folder / name, 4, CONTEXT, relayed=True)
            sidecar = await stack.enter_async_context(served(engine.url, QUIET, tree=tree))
            ways.append(Way(name=name, url=sidecar.url, relay=engine.relay))
            pids.append(sidecar.pid)
        found = {}
        asks = [small(way) for way in ways]
        await compared(asks, pids, WARM_UP)
        found["a small request"] = await compared(asks, pids, requests)
        asks = [await append(way, tokens) for way in ways]
        await compared(asks, pids, WARM_UP)
        found[f"a turn at {tokens:,} tokens"] = await compared(asks, pids, turns)
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_trees", description=__doc__)
    parser.add_argument("elsewhere", type=Path)
    parser.add_argument("--requests", type=int, default=300, help="small requests of each tree")
    parser.add_argument("--turns", type=int, default=40, help="turns of each tree")
    parser.add_argument("--tokens", type=int, default=30000)
    chosen = parser.parse_args(arguments)
    figures = asyncio.run(measure(chosen.elsewhere.resolve(), chosen.requests, chosen.turns, chosen.tokens))
    shown = Table("request", "", *(f"{name}, ms" for name in (*NAMES, "difference")))
    for request, kinds in figures.items():
        for kind, row in kinds.items():
            shown.add_row(request, kind, *(f"{value:.2f}" for value in row.values()))
    console.print(shown)
    keep("two_trees", figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
