"""The cost of observability: CPU time of the sidecar's process for a request, with everything off and on.

`python -m benchmarks.watching [--tokens 30000] [--turns 60]`

"On" is everything that a request can write: the journal with text, log lines, a recording, and spans to a
collector. "Off" still has the journal of the last requests, without text. Readers cost the same with and
without requests, so they are measured separately: a scrape by Prometheus, an open dashboard. Each sidecar
has its own engine; they get the same turns alternately. One more sidecar, with everything off, shows the
noise of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from aiohttp import web
from rich.progress import track
from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.own_time import Conversation
from benchmarks.stage import Way, engine_for, processor_seconds
from slotkeeper.bench.lab import Served, served
from slotkeeper.bench.texts import prose

TARGET: Final = 0.05
WARM_UP: Final = 5
REST_SECONDS: Final = 0.2  # the sidecar works after an answer, too: it learns the reply
LOOKS: Final = 10  # scrapes or refreshes of a page, one a second
SCRAPE: Final = ("/metrics",)
OPEN_METRICS: Final = {"Accept": "application/openmetrics-text; version=1.0.0"}
# documents that the page asks for each second
DASHBOARD: Final = ("/api/state", "/api/requests", "/api/tree")
OFF, PART, ON, AGAIN = "off", "on, without spans", "on, with spans", "off again"
NOTHING: Final = "--log-level error"
OF_REQUESTS: Final = "--why-text --log-level info --record {folder}"


@dataclass(slots=True, kw_only=True)
class Lane:
    """One sidecar, and a conversation through it."""

    sidecar: Served
    chat: Conversation

    async def turn(self, question: str) -> None:
        await self.chat.ask(question)
        await asyncio.sleep(REST_SECONDS)

    def cpu(self) -> float:
        return processor_seconds(self.sidecar.pid)


async def measure(tokens: int, turns: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        lanes = await stack.enter_async_context(_lanes())
        for lane in track(lanes.values(), "filling the context", console=console, transient=True):
            await lane.chat.fill(tokens)
        for number in range(WARM_UP):
            await _round(lanes, number)
        began, before = time.monotonic(), {name: lane.cpu() for name, lane in lanes.items()}
        for number in track(range(turns), "turns", console=console, transient=True):
            await _round(lanes, WARM_UP + number)
        seconds = time.monotonic() - began
        spent = {name: lane.cpu() - before[name] for name, lane in lanes.items()}
        idle = await _idle(lanes[OFF])
        looked = {
            "scrape_ms": round(await _looked(lanes[ON], SCRAPE, OPEN_METRICS) - idle, 2),
            "dashboard_ms": round(await _looked(lanes[ON], DASHBOARD) - idle, 2),
        }
        each = {name: (cpu * 1000 - idle * seconds) / turns for name, cpu in spent.items()}
        return _summary(each) | looked | {"prompt_tokens": lanes[ON].chat.tokens}


async def _round(lanes: Mapping[str, Lane], number: int) -> None:
    for lane in random.sample(list(lanes.values()), len(lanes)):
        await lane.turn(f"Short question {number}?")


async def _idle(lane: Lane) -> float:
    """Return the CPU milliseconds of a second without requests, in which the sidecar polls its engines."""
    before = lane.cpu()
    await asyncio.sleep(LOOKS)
    return (lane.cpu() - before) * 1000 / LOOKS


@asynccontextmanager
async def _lanes() -> AsyncIterator[Mapping[str, Lane]]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotkeeper-bench-")))
        collector = await stack.enter_async_context(_collector())
        watched = OF_REQUESTS.format(folder=folder / "recorded")
        lanes = {}
        told = OF_REQUESTS.format(folder=folder / "parts")
        spans = f" --otlp-endpoint {collector}"
        for name, words in {OFF: NOTHING, PART: told, ON: watched + spans, AGAIN: NOTHING}.items():
            engine = await engine_for(stack, folder / name.replace(" ", "-"), 1, 65536, relayed=True)
            sidecar = await stack.enter_async_context(
                served(engine.url, words.split(), asyncio.subprocess.DEVNULL)
            )
            way = Way(name=name, url=sidecar.url, relay=engine.relay)
            head = {"role": "system", "content": prose(4000, 3)}
            lanes[name] = Lane(sidecar=sidecar, chat=Conversation(way=way, messages=[head]))
        yield lanes


@asynccontextmanager
async def _collector() -> AsyncIterator[str]:
    """Run a collector that takes spans and discards them, and yield its URL."""

    async def take(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


async def _looked(lane: Lane, paths: Sequence[str], headers: Mapping[str, str] | None = None) -> float:
    """Return the CPU milliseconds of a second in which these are asked for once, and nothing else happens."""
    before = lane.cpu()
    async with httpx.AsyncClient(base_url=lane.sidecar.admin, headers=headers) as client:
        for _ in range(LOOKS):
            for path in paths:
                (await client.get(path)).raise_for_status()
            await asyncio.sleep(1.0)
    return (lane.cpu() - before) * 1000 / LOOKS


def _summary(each: Mapping[str, float]) -> dict[str, Any]:
    """Return a summary; `each` has milliseconds of requests."""
    without = (each[OFF] + each[AGAIN]) / 2
    return {
        "cpu_ms": {name: round(found, 3) for name, found in each.items()},
        "share": round(each[ON] / without - 1, 4),
        "share_without_spans": round(each[PART] / without - 1, 4),
        "machine": round(abs(each[OFF] - each[AGAIN]) / without, 4),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__)
    parser.add_argument("--tokens", type=int, default=30000)
    parser.add_argument("--turns", type=int, default=60, help="turns of each sidecar")
    chosen = parser.parse_args(arguments)
    figures = asyncio.run(measure(chosen.tokens, chosen.turns))
    table = Table("watched", "CPU of a request", title=f"append turn at {figures['prompt_tokens']:,} tokens")
    for name, milliseconds in figures["cpu_ms"].items():
        table.add_row(name, f"{milliseconds:.2f} ms")
    console.print(table)
    style = "green" if figures["share"] <= TARGET else "red"
    console.print(f"with everything on: {figures['share']:+.1%} (target {TARGET:.0%})", style=style)
    console.print(f"without spans: {figures['share_without_spans']:+.1%}")
    console.print(f"the machine itself: {figures['machine']:.1%}")
    console.print(f"a scrape: {figures['scrape_ms']} ms of CPU, usually every 15 s")
    console.print(f"an open dashboard: {figures['dashboard_ms']} ms of CPU a second")
    keep("watching", figures | {"target": TARGET})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
