"""Tokens that stock llama-server computes, and the same through the sidecar, for one client and for two.

`python -m benchmarks.when_needed`: the figures of docs/when-you-need-it.md. Tokens are those of the
engine's counter, which includes the sidecar's own work and idle work.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.table import Table

from benchmarks.figures import console
from benchmarks.sessions import append, user
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import Script, Target, Turn, play
from slotkeeper.bench.texts import prose, system
from slotkeeper.engine.child.launch import EngineKind
from slotkeeper.observe.log import configure

TURNS: Final = 5  # of each client
BUILDS: Final = (EngineKind.XLLAMACPP, EngineKind.SKULK)
MODELS: Final = (Tiny.DENSE, Tiny.HYBRID)
PAUSE_SECONDS: Final = 0.5  # between two requests, as agents pause


def turns_about() -> Script:
    """Play two agents, each with its own system prompt, that ask in turn."""
    histories = {name: [system(prose(8000, seed))] for name, seed in (("A", 1), ("B", 2))}
    for number in range(TURNS):
        for name, history in histories.items():
            history.append(user(number if name == "A" else 20 + number))
            turn = Turn(label=f"{name}{number + 1}", messages=tuple(history), session=name)
            history.append((yield turn))


CLIENTS: Final[Mapping[str, tuple[Callable[[], Script], tuple[str, ...]]]] = {
    "one client that only appends": (append, ("-np", "1")),
    "two clients on one slot": (turns_about, ("-np", "1", "-sps", "0.95")),
    "two clients on one slot, no RAM cache": (
        turns_about,
        ("-np", "1", "-sps", "0.95", "--cache-ram", "0"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    clients: str
    model: Tiny
    build: EngineKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    oracle: int
    waited: int  # computed while a client waited, with what was planted for it
    counted: int  # all tokens, by the engine's counter


async def measure(cell: Cell, *, sidecar: bool) -> Found:
    script, flags = CLIENTS[cell.clients]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = await stack.enter_async_context(
            lab.tiny_engine(cell.model, cell.build, folder, *flags, context_tokens=32768)
        )
        started = await stack.enter_async_context(lab.keeping(engine)) if sidecar else None
        before = await lab.evaluated(engine.base)
        target = await stack.enter_async_context(Target(lab.url_of(started) if started else engine.base))

        async def pause(_: Turn) -> None:
            await asyncio.sleep(PAUSE_SECONDS)

        samples = await play(script(), target, session="when", before=pause)
        if started:
            await lab.rested(started)
        if failed := [sample.failure for sample in samples if sample.failure]:
            raise RuntimeError(failed[0])
        return Found(
            oracle=sum(sample.oracle or 0 for sample in samples),
            waited=sum(sample.computed or 0 for sample in samples),
            counted=await lab.evaluated(engine.base) - before,
        )


def cells() -> Iterator[Cell]:
    for clients in CLIENTS:
        for model in MODELS:
            for build in BUILDS:
                yield Cell(clients=clients, model=model, build=build)


async def run() -> Table:
    table = Table(
        "", "model", "build", "oracle", "stock", "Slotkeeper: waited", "Slotkeeper: total", box=None
    )
    for cell in cells():
        stock, ours = await measure(cell, sidecar=False), await measure(cell, sidecar=True)
        table.add_row(
            cell.clients,
            cell.model.value,
            cell.build.value,
            f"{stock.oracle:,}",
            f"{stock.counted / stock.oracle:.2f}",
            f"{ours.waited / ours.oracle:.2f}",
            f"{ours.counted / ours.oracle:.2f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m benchmarks.when_needed", description=__doc__).parse_args(
        arguments
    )
    configure("error", "console")
    console.print(asyncio.run(run()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
