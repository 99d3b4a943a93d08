"""The sidecar's own time beside nginx and a bare proxy on aiohttp, in one run.

`python -m benchmarks.performance [--requests 200] [--rounds 20] [--turns 30]`. Each way has an engine of its
own. Processor time is that of a way's processes, less what they take without requests. It runs for about
ten minutes; run it alone on the machine, since anything else there slows all ways.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.progress import track
from rich.table import Table

from benchmarks import first_byte, placement, streaming
from benchmarks.figures import console, keep
from benchmarks.first_byte import PATH, small_request
from benchmarks.own_time import PAUSE_SECONDS, Conversation
from benchmarks.raw import Took, post
from benchmarks.stage import BARE, DIRECT, OURS, Stage, processor_seconds, stage
from slotkeeper.addresses import MAX_ENGINES
from slotkeeper.bench.texts import prose

CLIENTS: Final = 32
CLIENT_SECONDS: Final = 4.0  # that they send requests, each way, each round
CLIENT_ROUNDS: Final = 3
BATCH: Final = 5  # small requests of one way, one after the other
SETTLES_SECONDS: Final = 0.3  # until the work after an answer is done
TURN_TOKENS: Final = 30_000
SLOTS: Final = 8  # of each engine, for decisions
CONVERSATIONS: Final = 4000
DECISIONS: Final = 100


async def small(requests: int) -> dict[str, float]:
    """Measure small requests: their processor time, and many clients at once."""
    async with stage(slots=CLIENTS, context_tokens=CLIENTS * 1024, relays=False) as found:
        pids = streaming.processes(found)
        ways = {name: found.ways[name] for name in pids}
        for way in ways.values():
            for _ in range(first_byte.WARM_UP):
                await post(way.url, PATH, small_request())
        idle = await streaming.idle_share(pids)
        spent = dict.fromkeys(pids, 0.0)
        for _ in track(range(requests // BATCH), "processor time", console=console, transient=True):
            for name in random.sample(list(ways), len(ways)):
                began, before = time.monotonic(), streaming.busy(pids[name])
                for _ in range(BATCH):
                    await post(ways[name].url, PATH, small_request())
                    await asyncio.sleep(first_byte.PAUSE_SECONDS)
                await asyncio.sleep(SETTLES_SECONDS)
                spent[name] += streaming.busy(pids[name]) - before - idle[name] * (time.monotonic() - began)
        served = await _crowds(found, list(ways))
    each = 1000 / (requests // BATCH * BATCH)
    return {
        "small_ms": spent[OURS] * each,
        "small_over_bare": spent[OURS] / spent[BARE],
        "served_over_bare": served[OURS] / served[BARE],
    }


async def _crowds(found: Stage, names: Sequence[str]) -> dict[str, float]:
    """Return the requests that each way answers in a second to clients that never pause."""
    answered: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(CLIENT_ROUNDS):
        for name in random.sample(names, len(names)):
            began, took = time.monotonic(), list[Took]()

            async def client(url: str, ends: float, took: list[Took]) -> None:
                while time.monotonic() < ends:
                    took.append(await post(url, PATH, small_request()))

            url, ends = found.ways[name].url, began + CLIENT_SECONDS
            await asyncio.gather(*(client(url, ends, took) for _ in range(CLIENTS)))
            answered[name].append(sum(one.ok for one in took) / (time.monotonic() - began))
            await asyncio.sleep(1)
    return {name: statistics.median(rates) for name, rates in answered.items()}


async def turns(count: int) -> dict[str, float]:
    """Measure turns of a long conversation: until the engine has each, and our processor time to its end."""
    async with stage(slots=4, context_tokens=2 * TURN_TOKENS, relays=True) as found:
        chats = {}
        for name in (DIRECT, OURS):
            chats[name] = Conversation(
                way=found.ways[name], messages=[{"role": "system", "content": prose(4000, 3)}]
            )
            await chats[name].fill(TURN_TOKENS)
        times: dict[str, list[float]] = {name: [] for name in chats}
        worked: dict[str, list[float]] = {name: [] for name in chats}  # milliseconds of each way's engine
        spent = []
        for number in track(range(count), "long turns", console=console, transient=True):
            for name, chat in chats.items():
                engine = found.engines[name].pid
                before, asked = processor_seconds(found.sidecar_pid), processor_seconds(engine)
                times[name].append(await chat.ask(f"Short question {number}?"))
                if name == OURS:
                    spent.append(1000 * (processor_seconds(found.sidecar_pid) - before))
                await asyncio.sleep(PAUSE_SECONDS)
                worked[name].append(1000 * (processor_seconds(engine) - asked))
    return {
        "engine_ms": statistics.median(worked[OURS]) - statistics.median(worked[DIRECT]),
        "turn_ms": statistics.median(times[OURS]) - statistics.median(times[DIRECT]),
        "turn_processor_ms": statistics.median(spent),
    }


async def shared(requests: int) -> dict[str, float]:
    """Measure what a small request waits longer if others use its engine past the sidecar."""
    over_bare = []
    async with stage(slots=4, context_tokens=4096, relays=False) as found:
        ways, beside = [found.ways[name] for name in (BARE, OURS)], found.engines[OURS].base
        for others in (False, True):
            times: dict[str, list[float]] = {way.name: [] for way in ways}
            for number in track(range(-first_byte.WARM_UP, requests), "shared engine", console=console):
                for way in random.sample(ways, len(ways)):
                    if others:
                        await post(beside, PATH, small_request())
                        await asyncio.sleep(first_byte.PAUSE_SECONDS)
                    took = await post(way.url, PATH, small_request())
                    await asyncio.sleep(first_byte.PAUSE_SECONDS)
                    if number >= 0:
                        times[way.name].append(1000 * (took.first - took.sent))
            over_bare.append(statistics.median(times[OURS]) - statistics.median(times[BARE]))
    return {"shared_ms": over_bare[1] - over_bare[0]}


def decisions() -> dict[str, float]:
    """Measure decisions: the slowest of a hundred, of the slowest kind of request."""
    found = {}
    for name, engines, slots in (("fleet", MAX_ENGINES, SLOTS), ("slots", 1, MAX_ENGINES * SLOTS)):
        rows = placement.measured(
            engines=engines, slots=slots, conversations=CONVERSATIONS, decisions=DECISIONS
        )
        found[f"decision_{name}_ms"] = max(row["p99"] for row in rows)
    return found


def table(row: Mapping[str, Any]) -> Table:
    shown = Table("figure", "measured")
    for name, value in row.items():
        shown.add_row(name, f"{value:.2f}")
    return shown


async def measure(requests: int, rounds: int, turn_count: int) -> dict[str, float]:
    waits = await first_byte.measure(requests, rounds)
    alone, crowd = waits["one by one"], waits["twenty at once"]
    events = await streaming.measure(rounds=5, at_once=4, events=500)
    us = {name: figures["us_per_event"] for name, figures in events.items()}
    found = {
        "first_over_bare_ms": alone[OURS]["median_ms"] - alone[BARE]["median_ms"],
        **{
            name: figures[OURS]["over_nginx_ms"]
            for name, figures in (("first_over_nginx_ms", alone), ("crowd_over_nginx_ms", crowd))
            if "over_nginx_ms" in figures[OURS]  # nginx is installed
        },
        **await small(requests),
        **await shared(requests),
        **await turns(turn_count),
        "event_us": us[OURS],
        "event_over_bare": us[OURS] / us[BARE],
        **decisions(),
    }
    return {name: round(value, 3) for name, value in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance", description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="small requests of each way")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of twenty requests at once")
    parser.add_argument("--turns", type=int, default=30, help="turns of the long conversation")
    chosen = parser.parse_args(arguments)
    row = asyncio.run(measure(chosen.requests, chosen.rounds, chosen.turns))
    console.print(table(row))
    keep("performance", [row])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
