"""Added time to first byte: small requests, one by one with and without pauses, and twenty at once.

`python -m benchmarks.first_byte [--requests 200] [--rounds 20]`
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from rich.progress import track
from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.raw import Line, Took, post
from benchmarks.stage import DIRECT, OURS, Stage, stage
from slotkeeper.api.answers.answer import percentile

CROWD: Final = 20
WARM_UP: Final = 5
# time for a server to finish, so that its work after an answer does not slow the next way
PAUSE_SECONDS: Final = 0.02
PERSON_SECONDS: Final = 0.3  # between requests of a person who types: the processor's caches are cold
BURST: Final = 10
PATH: Final = "/v1/chat/completions"
Found = dict[str, list[Took]]  # by way


def small_request() -> bytes:
    """Return a small request.

    It is never the same twice, so each one takes the path of a new conversation.
    """
    content = f"{uuid.uuid4().hex}: is it raining?"
    return orjson.dumps(
        {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "chat_template_kwargs": {"plain": True},
        }
    )


async def one_by_one(found: Stage, requests: int, *, pause: float = PAUSE_SECONDS, burst: int = 1) -> Found:
    """Send requests by the ways in random order, so that other load on the machine meets all ways alike.

    `burst` requests of a way go out back to back, then there is a pause, in seconds.
    """
    answers: Found = {name: [] for name in found.ways}
    for number in track(range(-WARM_UP, requests // burst), "one by one", console=console, transient=True):
        for name, way in random.sample(list(found.ways.items()), len(found.ways)):
            took = [await post(way.url, PATH, small_request()) for _ in range(burst)]
            await asyncio.sleep(pause)
            if number >= 0:
                answers[name] += took
    return answers


async def kept(found: Stage, requests: int) -> Found:
    """As `one_by_one`, on connections that are kept open."""
    lines = {name: Line(way.url) for name, way in found.ways.items()}
    answers: Found = {name: [] for name in lines}
    for number in track(range(-WARM_UP, requests), "kept connections", console=console, transient=True):
        for name, line in random.sample(list(lines.items()), len(lines)):
            took = await line.post(PATH, small_request())
            await asyncio.sleep(PAUSE_SECONDS)
            if number >= 0:
                answers[name].append(took)
    for line in lines.values():
        line.close()
    return answers


async def crowds(found: Stage, rounds: int) -> Found:
    answers: Found = {name: [] for name in found.ways}
    for number in track(range(-1, rounds), "twenty at once", console=console, transient=True):
        for name, way in random.sample(list(found.ways.items()), len(found.ways)):
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(post(way.url, PATH, small_request())) for _ in range(CROWD)]
            await asyncio.sleep(10 * PAUSE_SECONDS)
            if number >= 0:
                answers[name] += [task.result() for task in asked]
    return answers


def summary(answers: Found) -> dict[str, dict[str, float]]:
    """Return milliseconds: median, 95th percentile, and the median less the direct way's and nginx's."""
    times = {name: [1000 * (t.first - t.sent) for t in found if t.ok] for name, found in answers.items()}
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        name: {
            "fastest_ms": round(min(found), 3),
            "median_ms": round(medians[name], 3),
            "p95_ms": round(percentile(found, 95) or 0.0, 3),
            "over_direct_ms": round(medians[name] - medians[DIRECT], 3),
            **({"over_nginx_ms": round(medians[name] - medians["nginx"], 3)} if "nginx" in medians else {}),
            # llama-server may close kept connections at any time; nginx with keepalive then answers 502.
            "failed": len(answers[name]) - len(found),
        }
        for name, found in times.items()
    }


def table(title: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    names = list(next(iter(rows.values())))
    shown = Table("way", *(name.replace("_ms", ", ms").replace("_", " ") for name in names), title=title)
    for way, figures in rows.items():
        style = "bold" if way == OURS else None
        shown.add_row(
            way,
            *(f"{figures[name]:g}" if name == "failed" else f"{figures[name]:.2f}" for name in names),
            style=style,
        )
    return shown


async def measure(requests: int, rounds: int) -> dict[str, Any]:
    async with stage(slots=CROWD, context_tokens=1024, relays=False) as found:
        return {
            "one by one": summary(await one_by_one(found, requests)),
            "back to back": summary(await one_by_one(found, requests, burst=BURST)),
            "0.3 s apart": summary(await one_by_one(found, requests // 2, pause=PERSON_SECONDS)),
            "one by one, connections kept": summary(await kept(found, requests)),
            "twenty at once": summary(await crowds(found, rounds)),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_byte", description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="requests of each way, one by one")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each way, twenty requests at once")
    chosen = parser.parse_args(arguments)
    figures = asyncio.run(measure(chosen.requests, chosen.rounds))
    for name, rows in figures.items():
        console.print(table(f"time to first byte, small request, {name}", rows))
    keep("first_byte", figures)
    return int(any(rows[name]["failed"] for rows in figures.values() for name in (DIRECT, OURS)))


if __name__ == "__main__":
    raise SystemExit(main())
