"""Whether a second engine makes the first token of a long prompt come sooner: it does not.

`python -m benchmarks.carried_prefill [--models fat-dense ...] [--tokens 1600] [--rounds 3]`. One engine
computes a prompt. Then another one computes its first half and saves it, and the first engine restores that
and computes the rest. A state needs those of all tokens before it, so the halves run one after the other,
and stock llama-server computes no layers for another one. Both engines use one folder: nothing is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.waiting import THREADS, USUAL_MODELS, file_of
from slotkeeper.bench import lab
from slotkeeper.bench.models import Fat
from slotkeeper.engine.child.launch import find_engine
from slotkeeper.engine.client import EngineClient
from slotkeeper.scheduler.types import SlotId

SLOT: Final = SlotId(0)
FIRST_TOKEN: Final = 1000  # ids of a prompt of a round: any the vocabulary has


async def measured(model: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the median seconds of both ways, and of their parts."""
    found: dict[str, list[float]] = {"alone": [], "first half": [], "save": [], "restore": [], "rest": []}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="slotkeeper-carried-")))
        binary, file = find_engine(), file_of(model)
        clients = []
        for name in ("one", "other"):
            flags = lab.stock_flags(binary, file, folder, slots=1, context_tokens=tokens + 512)
            flags[flags.index("-t") + 1] = THREADS
            engine = await stack.enter_async_context(lab.restartable(binary, flags, folder / f"{name}.log"))
            clients.append(await stack.enter_async_context(EngineClient(engine.base)))
        one, other = clients
        for number in range(rounds):
            prompt = [FIRST_TOKEN + 7 * (number + 1) * place % 997 for place in range(tokens)]
            found["alone"].append(await _took(one.prefill(prompt, SLOT)))
            await one.erase(SLOT)
            found["first half"].append(await _took(other.prefill(prompt[: tokens // 2], SLOT)))
            found["save"].append(await _took(other.save(SLOT, "half")))
            found["restore"].append(await _took(one.restore(SLOT, "half")))
            found["rest"].append(await _took(one.prefill(prompt, SLOT)))
            await one.erase(SLOT)
            await other.erase(SLOT)
    row: dict[str, Any] = {name: round(median(seconds), 4) for name, seconds in found.items()}
    carried = sum(seconds for name, seconds in row.items() if name != "alone")
    return {"model": model, "tokens": tokens, **row, "ratio": round(carried / row["alone"], 3)}


async def _took(call: Any) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.carried_prefill", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(map(str, Fat)), default=USUAL_MODELS)
    parser.add_argument("--tokens", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    rows = [asyncio.run(measured(model, chosen.tokens, chosen.rounds)) for model in chosen.models]
    table = Table(title=f"seconds for {chosen.tokens} tokens: on one engine, and half of it on another")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    keep("carried_prefill", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
