"""How long the sidecar's event loop stops under load, as a client of its admin port sees it.

`python -m benchmarks.loop_stops [--minutes 2] [--clients 4] [--tokens 30000]`. Clients talk without pauses;
each chat grows to about `tokens` and then begins anew. Meanwhile a process of its own asks `/livez` every few
milliseconds over one connection: the answer takes as long as the loop needs to get to it. What that process
itself waits for a processor counts as well, so its longest sleep beyond its time is shown, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import urlsplit

import orjson
from rich.progress import track
from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.own_time import CHARS_PER_TOKEN, PATH, TURN_TOKENS
from benchmarks.raw import post
from benchmarks.stage import QUIET, engine_for
from slotkeeper.bench.lab import served
from slotkeeper.bench.texts import prose

PROBE_SECONDS: Final = 0.004  # between two looks
LONG_SECONDS: Final = 0.02  # a stop that a user's stream would show
SHARES: Final = (50, 99, 99.9)


def probe(url: str, seconds: float) -> dict[str, float]:
    """Ask `url` again and again; return the longest answer and the longest sleep, in milliseconds."""
    target = urlsplit(url)
    connection = HTTPConnection(target.hostname or "", target.port)
    answers, sleeps = list[float](), list[float]()
    ends = time.monotonic() + seconds
    while (began := time.monotonic()) < ends:
        connection.request("GET", target.path)
        connection.getresponse().read()
        answered = time.monotonic()
        time.sleep(PROBE_SECONDS)
        answers.append(answered - began)
        sleeps.append(time.monotonic() - answered - PROBE_SECONDS)
    answers.sort()
    return {
        "looks": len(answers),
        **{f"p{share}_ms": 1000 * answers[int(len(answers) * share / 100)] for share in SHARES},
        "longest_ms": 1000 * answers[-1],
        "over_20_ms": sum(one > LONG_SECONDS for one in answers),
        "longest_sleep_ms": 1000 * max(sleeps),
    }


async def chat(url: str, tokens: int, ends: float) -> int:
    """Talk until the time is over; return the number of turns."""
    turns = 0
    while time.monotonic() < ends:
        messages = [{"role": "system", "content": prose(int(tokens / 8 * CHARS_PER_TOKEN), 3)}]
        length = 0
        while length < tokens and time.monotonic() < ends:
            size = random.choice((50, 300, TURN_TOKENS))
            text = f"{uuid.uuid4().hex} " + prose(int(size * CHARS_PER_TOKEN), turns)
            messages.append({"role": "user", "content": text})
            body = {"messages": messages, "max_tokens": 4, "temperature": 0, "stream": False}
            took = await post(url, PATH, orjson.dumps(body))
            if not took.ok:
                raise RuntimeError(f"{took.answer[:300]!r}")
            answer = orjson.loads(took.body)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            length = answer["usage"]["prompt_tokens"]
            turns += 1
    return turns


async def measure(minutes: float, clients: int, tokens: int, tree: Path | None = None) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="slotkeeper-bench-"))) / "engine"
        engine = await engine_for(stack, folder, clients, clients * (tokens + 2 * TURN_TOKENS), False)
        sidecar = await stack.enter_async_context(served(engine.url, QUIET, tree=tree))
        seconds = minutes * 60
        line = f"-m benchmarks.loop_stops --probe {sidecar.admin}/livez --seconds {seconds}"
        prober = await asyncio.create_subprocess_exec(
            sys.executable, *line.split(), stdout=asyncio.subprocess.PIPE
        )
        ends = time.monotonic() + seconds
        talk = asyncio.gather(*(chat(sidecar.url, tokens, ends) for _ in range(clients)))
        for _ in track(range(int(seconds)), "load", console=console, transient=True):
            await asyncio.sleep(1)
        turns = sum(await talk)
        output, _ = await prober.communicate()
    found: dict[str, float] = json.loads(output)
    return {"turns": turns} | found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop_stops", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="of load")
    parser.add_argument("--clients", type=int, default=4, help="that talk at once")
    parser.add_argument("--tokens", type=int, default=30_000, help="at which a chat begins anew")
    parser.add_argument("--tree", type=Path, help="another checkout, whose sidecar is measured")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=1.0, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.probe:
        sys.stdout.write(json.dumps(probe(chosen.probe, chosen.seconds)))
        return 0
    row = asyncio.run(measure(chosen.minutes, chosen.clients, chosen.tokens, chosen.tree))
    shown = Table("figure", "measured")
    for name, value in row.items():
        shown.add_row(name, f"{value:.2f}")
    console.print(shown)
    keep("loop_stops", [row])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
