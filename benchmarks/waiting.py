"""How long one client waits for its first tokens beside stock, on engines with the proportions of real ones.

`python -m benchmarks.waiting [--models fat-dense fat-hybrid] [--pauses 0.05 0.3 1 2 5] [--rounds 3]
[--turns 12] [--busy 0]`. The client only appends, so stock reuses everything too: whatever the sidecar's own
passes, saves and calls take is lost time. Each conversation is sent to a stock engine and through the sidecar
to another with the same flags, one after the other, so that neither works beside the other. `--busy` starts
that many busy loops beside them.

The table has the ratio of the sums of all times to a first token (ours / stock), of the best and of the worst
round, and the same of the longest stalls.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from rich.table import Table

from benchmarks.busy import busy_loops
from benchmarks.figures import console, keep
from benchmarks.stage import QUIET, served
from slotkeeper.api.document import Doc
from slotkeeper.bench import lab
from slotkeeper.bench.demo import prose
from slotkeeper.bench.measure import Sample, Totals, totals
from slotkeeper.bench.models import Fat, build
from slotkeeper.bench.target import CHAT, PLAIN, Shot, Target
from slotkeeper.engine.launch import find_engine

PAUSES_SECONDS: Final = (0.05, 0.3, 1.0, 2.0, 5.0)  # a tool that returns at once, to a person who reads
CONTEXT_TOKENS: Final = 8192
ANSWER_TOKENS: Final = 16
HEAD_CHARACTERS: Final = 2000
TURN_CHARACTERS: Final = 240
THREADS: Final = "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One conversation, sent both ways."""

    model: Fat
    pause_seconds: float
    stock: Totals
    ours: Totals

    @property
    def waited(self) -> float:
        return self.ours.waits.waited_seconds / self.stock.waits.waited_seconds

    @property
    def late(self) -> float:
        return (self.ours.waits.first_token_p95 or 0.0) / (self.stock.waits.first_token_p95 or 1.0)

    @property
    def stall(self) -> float:
        return (self.ours.waits.stall_seconds or 0.0) / (self.stock.waits.stall_seconds or 1.0)


async def conversation(target: Target, turns: int, pause_seconds: float, seed: int) -> list[Sample]:
    """Send `turns` questions, each appended to the history, and wait before each of them."""
    history: list[Doc] = [{"role": "system", "content": prose(HEAD_CHARACTERS, seed)}]
    samples = []
    for turn in range(turns):
        await asyncio.sleep(pause_seconds)
        history.append({"role": "user", "content": prose(TURN_CHARACTERS, 100 * seed + turn)})
        body = {
            "messages": list(history),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            **PLAIN,
        }
        shot = Shot(session=f"chat {seed}", label=f"turn {turn}", path=CHAT, body=body, headers={})
        hit = await target.fire(shot)
        if hit.reply is None:
            raise RuntimeError(f"{target.base}: {hit.sample.failure}")
        samples.append(hit.sample)
        history.append(hit.reply)
    return samples


async def measured(model: Fat, pauses: Sequence[float], rounds: int, turns: int) -> list[Round]:
    """Play `rounds` conversations for each pause, on two engines that stay the same."""
    binary, path = find_engine(), build(model)
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory(prefix="slotkeeper-waiting-")))
        engines = []
        for name in ("stock", "ours"):
            folder = root / name
            folder.mkdir()
            flags = lab.stock_flags(binary, path, folder, context_tokens=CONTEXT_TOKENS)
            flags[flags.index("-t") + 1] = THREADS
            engines.append(await stack.enter_async_context(lab.engine(binary, flags, root / f"{name}.log")))
        words = f"{QUIET} --slot-dir {root / 'ours'} --hot-bytes 8GiB"
        sidecar = await stack.enter_async_context(served(engines[1].base, words))
        stock = await stack.enter_async_context(Target(engines[0].base, renders=False))
        ours = await stack.enter_async_context(Target(sidecar.url, [engines[1].base], renders=False))
        found, seed = [], 0
        for pause in pauses:
            for _ in range(rounds):
                seed += 1
                direct = await conversation(stock, turns, pause, seed)
                through = await conversation(ours, turns, pause, seed)
                await asyncio.sleep(1.0)  # our idle work must not run beside the next conversation of stock
                found.append(
                    Round(model=model, pause_seconds=pause, stock=totals(direct), ours=totals(through))
                )
                _tell(found[-1])
    return found


def _tell(done: Round) -> None:
    console.print(
        f"[dim]{done.model}, pause {done.pause_seconds} s: stock {done.stock.waits.waited_seconds:.2f} s, "
        f"ours {done.ours.waits.waited_seconds:.2f} s[/dim]"
    )


def table(rounds: Sequence[Round], busy: int) -> Table:
    """Return the ratios of each model and pause."""
    shown = Table(
        "model",
        "pause",
        "stock waits",
        "ours / stock",
        "worst",
        "p95, worst",
        "stall, worst",
        "idle tokens",
        title=f"sum of times to first token, {busy} busy loops",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for model, pause in dict.fromkeys((one.model, one.pause_seconds) for one in rounds):
        same = [one for one in rounds if (one.model, one.pause_seconds) == (model, pause)]
        shown.add_row(
            model,
            f"{pause} s",
            f"{sum(one.stock.waits.waited_seconds for one in same) / len(same):.2f} s",
            f"{min(one.waited for one in same):.2f}",
            f"{max(one.waited for one in same):.2f}",
            f"{max(one.late for one in same):.2f}",
            f"{max(one.stall for one in same):.2f}",
            f"{sum(one.ours.sums.idle for one in same)}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting", description=__doc__)
    parser.add_argument("--models", nargs="+", type=Fat, default=[Fat.DENSE, Fat.HYBRID], metavar="NAME")
    parser.add_argument("--pauses", nargs="+", type=float, default=PAUSES_SECONDS, metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--busy", type=int, default=0, metavar="LOOPS")
    chosen = parser.parse_args(arguments)
    rounds: list[Round] = []
    with busy_loops(chosen.busy):
        for model in chosen.models:
            rounds += asyncio.run(measured(model, chosen.pauses, chosen.rounds, chosen.turns))
    console.print(table(rounds, chosen.busy))
    figures = [
        {
            "model": one.model,
            "pause_seconds": one.pause_seconds,
            "stock_seconds": one.stock.waits.waited_seconds,
            "ours_seconds": one.ours.waits.waited_seconds,
            "stock_stall_seconds": one.stock.waits.stall_seconds,
            "ours_stall_seconds": one.ours.waits.stall_seconds,
            "idle_tokens": one.ours.sums.idle,
        }
        for one in rounds
    ]
    keep("waiting", {"busy": chosen.busy, "rounds": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
