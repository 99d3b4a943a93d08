"""How the sidecar's own time grows: with the prompt, with the known conversations, with the slots.

`python -m benchmarks.growth [--turns 10]`. Three kinds of turn: the next one of the newest conversation,
the next one of the oldest (which may have left its slot), and the first of a new one. The fastest turn of a
kind shows the time of the work itself; the median includes other load on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import uuid
from collections.abc import Sequence
from typing import Any, Final

from rich.progress import Progress
from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.own_time import PAUSE_SECONDS, Conversation, conversations
from benchmarks.stage import OURS, Way, stage
from slotkeeper.api.answers.answer import percentile
from slotkeeper.bench.texts import prose

LENGTHS: Final = (1000, 4000, 16000, 30000, 60000)
KNOWN: Final = (1, 4, 16, 64)
SLOTS: Final = (1, 2, 4, 8)
SMALL: Final = 2000  # tokens of a conversation where its length is not varied
Row = dict[str, Any]


def figures_of(times: Sequence[float]) -> Row:
    return {
        "fastest_ms": round(min(times), 3),
        "median_ms": round(statistics.median(times), 3),
        "p95_ms": round(percentile(times, 95) or 0.0, 3),
    }


async def by_length(turns: int, progress: Progress) -> list[Row]:
    """Measure one conversation that grows."""
    task = progress.add_task("prompt length", total=len(LENGTHS))
    rows = []
    async with stage(slots=2, context_tokens=2 * LENGTHS[-1], relays=True, yardstick=False) as found:
        way = found.ways[OURS]
        chat = Conversation(way=way, messages=[{"role": "system", "content": prose(2000, 3)}])
        for length in LENGTHS:
            await chat.fill(length)
            newest = await chat.append(turns)
            rows.append({"tokens": chat.tokens, "next turn": figures_of(newest)})
            progress.advance(task)
    return rows


async def by_known(turns: int, progress: Progress) -> list[Row]:
    """Measure more and more conversations with one system prompt, on four slots."""
    task = progress.add_task("known conversations", total=len(KNOWN))
    rows = []
    async with stage(slots=4, context_tokens=8 * SMALL, relays=True, yardstick=False) as found:
        way = found.ways[OURS]
        chats: list[Conversation] = []
        for known in KNOWN:
            chats += await conversations(way, known - len(chats), SMALL)
            rows.append({"conversations": known, **await _kinds(way, chats, turns)})
            progress.advance(task)
    return rows


async def by_slots(turns: int, progress: Progress) -> list[Row]:
    """Measure a fresh engine for each number of slots, with a conversation in each."""
    task = progress.add_task("slots", total=len(SLOTS))
    rows = []
    for slots in SLOTS:
        async with stage(slots=slots, context_tokens=4 * SMALL, relays=True, yardstick=False) as found:
            way = found.ways[OURS]
            chats = list(await conversations(way, slots, SMALL))
            rows.append({"slots": slots, **await _kinds(way, chats, turns)})
        progress.advance(task)
    return rows


async def _kinds(way: Way, chats: list[Conversation], turns: int) -> Row:
    """Measure all three kinds of turn. The oldest conversation of each round is then the newest."""
    newest = await chats[-1].append(turns)
    oldest, new = [], []
    for _ in range(turns):
        chats.append(chats.pop(0))
        oldest += await chats[-1].append(1)
        new.append(await Conversation(way=way).ask(f"{uuid.uuid4().hex}: is it raining?"))
        await asyncio.sleep(PAUSE_SECONDS)
    return {
        "next turn": figures_of(newest),
        "turn of the oldest": figures_of(oldest),
        "first turn": figures_of(new),
    }


def table(title: str, rows: Sequence[Row]) -> Table:
    kinds = [name for name, value in rows[0].items() if isinstance(value, dict)]
    grown = next(iter(rows[0]))
    shown = Table(grown, *(f"{kind}\nfastest / median / p95, ms" for kind in kinds), title=title)
    for row in rows:
        cells = (" / ".join(f"{value:.1f}" for value in row[kind].values()) for kind in kinds)
        shown.add_row(f"{row[grown]:,}", *cells)
    return shown


async def measure(turns: int) -> dict[str, list[Row]]:
    with Progress(console=console, transient=True) as progress:
        return {
            "prompt length": await by_length(turns, progress),
            "known conversations": await by_known(turns, progress),
            "slots": await by_slots(turns, progress),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--turns", type=int, default=10, help="turns at each point")
    chosen = parser.parse_args(arguments)
    figures = asyncio.run(measure(chosen.turns))
    for name, rows in figures.items():
        console.print(table(f"own time until the request left, by {name}", rows))
    keep("growth", figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
