"""The processor time that an event of a stream costs, beside nginx and bare aiohttp, in one run.

`python -m benchmarks.streaming [--rounds 5] [--at-once 4] [--events 500]`. Each way passes the same streams
of one token an event on, in random order. Its time is that of its processes, the start of its requests
included, less what it takes without requests.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
import psutil
from rich.progress import track
from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.own_time import PATH
from benchmarks.raw import post
from benchmarks.stage import BARE, OURS, Stage, Way, processor_seconds, stage

NGINX: Final = "nginx"
IDLE_SECONDS: Final = 3.0
CONTEXT: Final = 8192


async def measure(rounds: int, at_once: int, events: int) -> dict[str, Any]:
    async with stage(slots=at_once, context_tokens=CONTEXT, relays=False) as found:
        pids = processes(found)
        asked = {name: found.ways[name] for name in pids}
        for way in asked.values():
            await streams(way, at_once, events)
        idle = await idle_share(pids)
        spent, seen = dict.fromkeys(pids, 0.0), dict.fromkeys(pids, 0)
        for _ in track(range(rounds), "streams", console=console, transient=True):
            for name, way in random.sample(list(asked.items()), len(asked)):
                began, before = time.monotonic(), busy(pids[name])
                seen[name] += await streams(way, at_once, events)
                spent[name] += busy(pids[name]) - before - idle[name] * (time.monotonic() - began)
        each = {name: 1e6 * spent[name] / seen[name] for name in pids}
        return {name: {"us_per_event": round(us, 2), "events": seen[name]} for name, us in each.items()}


def processes(found: Stage) -> dict[str, list[psutil.Process]]:
    """Return the processes of each way that has some: nginx has a master and a worker."""
    below = psutil.Process().children(recursive=True)
    named = {
        NGINX: [one for one in below if one.name() == NGINX],
        BARE: [one for one in below if "benchmarks.bare_proxy" in one.cmdline()],
        OURS: [psutil.Process(found.sidecar_pid)],
    }
    return {name: those for name, those in named.items() if those}


async def streams(way: Way, at_once: int, events: int) -> int:
    """Read streams that begin together to their ends. Returns their events."""
    bodies = (
        orjson.dumps(
            {
                "messages": [{"role": "user", "content": f"{uuid.uuid4()} Tell me a long story."}],
                "max_tokens": events,
                "ignore_eos": True,
                "stream": True,
            }
        )
        for _ in range(at_once)
    )
    answers = await asyncio.gather(*(post(way.url, PATH, body) for body in bodies))
    if not all(answer.ok for answer in answers):
        raise RuntimeError(f"{way.name} answered {[answer.answer[:100] for answer in answers]}")
    return sum(answer.body.count(b"data: ") for answer in answers)


async def idle_share(pids: Mapping[str, Sequence[psutil.Process]]) -> dict[str, float]:
    """Return the processor seconds that each takes in a second without requests."""
    before = {name: busy(those) for name, those in pids.items()}
    await asyncio.sleep(IDLE_SECONDS)
    return {name: (busy(those) - before[name]) / IDLE_SECONDS for name, those in pids.items()}


def busy(those: Sequence[psutil.Process]) -> float:
    return sum(processor_seconds(one.pid) for one in those)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each way")
    parser.add_argument("--at-once", type=int, default=4, help="streams that begin together")
    parser.add_argument("--events", type=int, default=500, help="tokens of a stream")
    chosen = parser.parse_args(arguments)
    figures = asyncio.run(measure(chosen.rounds, chosen.at_once, chosen.events))
    shown = Table("way", "events", "microseconds of an event", "times nginx")
    nginx = figures.get(NGINX, {}).get("us_per_event")
    for name, row in figures.items():
        times = f"{row['us_per_event'] / nginx:.2f}" if nginx else "-"
        shown.add_row(name, f"{row['events']:,}", f"{row['us_per_event']:.2f}", times)
    console.print(shown)
    keep("streaming", figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
