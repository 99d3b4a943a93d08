"""An append turn on a conversation of 30,000 tokens: the time until the engine has the request, by way.

`python -m benchmarks.append_turn [--tokens 30000] [--turns 30]`
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Any, Final

from rich.progress import track

from benchmarks.figures import console, keep
from benchmarks.first_byte import table
from benchmarks.own_time import PAUSE_SECONDS, Conversation
from benchmarks.stage import DIRECT, OURS, stage
from slotkeeper.api.answers.answer import percentile
from slotkeeper.bench.texts import prose

TARGET_MS: Final = 5.0
WARM_UP: Final = 3


async def measure(tokens: int, turns: int) -> dict[str, Any]:
    async with stage(slots=4, context_tokens=2 * tokens, relays=True) as found:
        chats = {}
        for name, way in track(found.ways.items(), "filling the context", console=console, transient=True):
            chats[name] = Conversation(way=way, messages=[{"role": "system", "content": prose(4000, 3)}])
            await chats[name].fill(tokens)
        times: dict[str, list[float]] = {name: [] for name in chats}
        for number in track(range(-WARM_UP, turns), "append turns", console=console, transient=True):
            for name, chat in random.sample(list(chats.items()), len(chats)):
                took = await chat.ask(f"Short question {number}?")
                await asyncio.sleep(PAUSE_SECONDS)
                if number >= 0:
                    times[name].append(took)
        return summary(times) | {"prompt_tokens": chats[OURS].tokens, "cached_tokens": chats[OURS].cached}


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    direct = statistics.median(times[DIRECT])
    return {
        "ways": {
            name: {
                "fastest_ms": round(min(found), 3),
                "median_ms": round(statistics.median(found), 3),
                "p95_ms": round(percentile(found, 95) or 0.0, 3),
                "own_time_ms": round(statistics.median(found) - direct, 3),
            }
            for name, found in times.items()
        }
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.append_turn", description=__doc__)
    parser.add_argument("--tokens", type=int, default=30000)
    parser.add_argument("--turns", type=int, default=30, help="turns of each way")
    chosen = parser.parse_args(arguments)
    figures = asyncio.run(measure(chosen.tokens, chosen.turns))
    size = f"{figures['prompt_tokens']:,} tokens ({figures['cached_tokens']:,} cached)"
    title = f"append turn at {size}:\nuntil it left for the engine"
    console.print(table(title, figures["ways"]))
    own = figures["ways"][OURS]["own_time_ms"]
    style = "green" if own <= TARGET_MS else "red"
    console.print(f"target: {TARGET_MS} ms of our own; measured {own:.2f} ms", style=style)
    keep("append_turn", figures | {"target_ms": TARGET_MS})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
