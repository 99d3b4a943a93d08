"""The prompt tree: time of a look-up and of an insertion, and memory, by conversations and their length.

`python -m benchmarks.prompt_tree`. The conversations grow by turns, one turn of each after the other. Every
second one begins with the same system prompt, and its own text opens in one of a hundred ways. Each point
runs in its own process. Times are processor time, so other work on the machine has little effect.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any, Final

import psutil
from rich.progress import track
from rich.table import Table

from benchmarks.figures import console, keep
from slotkeeper.scheduler.prompts.prompt_tree import PromptTree
from slotkeeper.scheduler.prompts.tokens import WIDTH, Tokens

SIZE: Final = (10_000, 50_000)  # conversations, and tokens of each: the size that the targets are for
POINTS: Final = ((1000, 5000), (1000, 50_000), (1000, 200_000), (100, 50_000), SIZE)
TARGET_MS: Final = 1.0  # the slowest look-up of a hundred
TARGET_MB: Final = 300
TURNS: Final = 5
SHARED: Final = 5  # the system prompt is one fifth of a conversation
OPENINGS: Final = 100
OPENING_TOKENS: Final = 20
NEW_TOKENS: Final = 100  # of a measured turn
SAMPLES: Final = 1000
RECENT: Final = 50  # the most recently used conversations, each measured in this many rounds:
ROUNDS: Final = SAMPLES // RECENT
VOCABULARY: Final = 150_000
STRIDE: Final = 97  # tokens of noise between the beginnings of two conversations, so that all differ
KINDS: Final = ("next turn", "turn of the oldest", "first turn")
Row = dict[str, Any]


class Conversations:
    """Conversations made on demand: slices of the same noise, so that only the tree takes memory."""

    def __init__(self, number: int, tokens: int) -> None:
        self.number = number
        self.tokens = tokens
        rng = random.Random(1)
        length = STRIDE * (number + SAMPLES + 1) + tokens + NEW_TOKENS * ROUNDS
        self._noise = array("i", (rng.randrange(VOCABULARY) for _ in range(length))).tobytes()
        self._system = self._noise[: tokens // SHARED * WIDTH]

    def prompt(self, conversation: int, more: int = 0) -> Tokens:
        """Return a conversation after its last turn, and more tokens. Those from `number` on are new."""
        return self._cut(conversation, self.tokens + more)

    def turns(self) -> Iterator[tuple[float, Tokens]]:
        """Yield the turns of all conversations and their times; first turns have about half of the tokens."""
        for turn in range(1, TURNS + 1):
            for conversation in range(self.number):
                yield float(turn), self._cut(conversation, self.tokens * (TURNS + turn) // (2 * TURNS))

    def _cut(self, conversation: int, tokens: int) -> Tokens:
        opening = conversation % OPENINGS * STRIDE * WIDTH
        shared = self._system if conversation % 2 else b""
        shared += self._noise[opening : opening + OPENING_TOKENS * WIDTH]
        begin = (conversation + 1) * STRIDE * WIDTH
        return Tokens.of(shared + self._noise[begin : begin + tokens * WIDTH - len(shared)])


def probe(tree: PromptTree, prompts: Iterable[tuple[int, Tokens]]) -> Row:
    """Return the milliseconds of look-ups and insertions: median and 99th percentile.

    Raises RuntimeError if the tree knows less than the given length of a prompt.
    """
    looks, adds = [], []
    for known, prompt in prompts:
        began = time.process_time()
        longest = tree.longest(prompt)
        tree.branches(prompt)
        looked = time.process_time()
        tree.add(prompt, float(TURNS + 1))
        adds.append(1000 * (time.process_time() - looked))
        looks.append(1000 * (looked - began))
        if longest < known:
            raise RuntimeError(f"{longest} tokens known of {prompt}, not {known}: {tree}")
    return {"look-up": figures_of(looks), "add": figures_of(adds)}


def figures_of(times: Sequence[float]) -> Row:
    percentiles = statistics.quantiles(times, n=100, method="inclusive")
    return {"median_ms": round(percentiles[49], 4), "p99_ms": round(percentiles[98], 4)}


def measure(point: tuple[int, int]) -> Row:
    """Measure one point. Resident memory is the process's growth."""
    number, tokens = point
    chats, tree = Conversations(number, tokens), PromptTree()
    gc.collect()
    before = psutil.Process().memory_info().rss
    for at, prompt in chats.turns():
        tree.add(prompt, at)
    resident = psutil.Process().memory_info().rss - before
    recent = product(range(1, ROUNDS + 1), range(number - RECENT, number))
    next_turns = ((tokens, chats.prompt(chat, NEW_TOKENS * turn)) for turn, chat in recent)
    oldest = ((tokens, chats.prompt(chat, NEW_TOKENS)) for chat in range(min(number - RECENT, SAMPLES)))
    first_turns = ((0, chats.prompt(number + chat)) for chat in range(SAMPLES))
    return {
        "conversations": number,
        "tokens": tokens,
        "tree_tokens": tree.tokens,
        "counted_mb": round(tree.size / 1e6, 1),
        "resident_mb": round(resident / 1e6, 1),
        **{
            kind: probe(tree, turns)
            for kind, turns in zip(KINDS, (next_turns, oldest, first_turns), strict=True)
        },
    }


def table(rows: Sequence[Row]) -> Table:
    heads = (f"{kind}\nlook-up / add, p99 ms" for kind in KINDS)
    title = f"target at {SIZE[0]:,} of {SIZE[1]:,}: look-up p99 < {TARGET_MS} ms, memory < {TARGET_MB} MB"
    shown = Table("conversations", "tokens of each", "resident MB", *heads, title=title)
    for row in rows:
        cells = (" / ".join(f"{step['p99_ms']:.3f}" for step in row[kind].values()) for kind in KINDS)
        shown.add_row(f"{row['conversations']:,}", f"{row['tokens']:,}", f"{row['resident_mb']:.0f}", *cells)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prompt_tree", description=__doc__)
    parser.parse_args(arguments)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as children:
        measured = children.map(measure, POINTS)
        rows = [*track(measured, "points", len(POINTS), console=console, transient=True)]
    console.print(table(rows))
    keep("prompt_tree", {"target": {"look_up_p99_ms": TARGET_MS, "resident_mb": TARGET_MB}, "points": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
