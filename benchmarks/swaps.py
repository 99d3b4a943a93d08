"""Two models that alternate behind a router, two agents on each: the cost of each swap.

`python -m benchmarks.swaps [--turns 5] [--llama-swap]`. The router is llama-server, or llama-swap, if that is
on PATH. One model is loaded at a time and each turn is a swap: on stock, and through the sidecar. The oracle
is what the same conversations cost where all models stay loaded, each conversation in its own slot. Tokens
are the engine's figures for requests and for the sidecar's own prefills. In the second row all agents run at
once, and none waits for another.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.routers import (
    BUILD,
    CONTROL_SECONDS,
    LIBRARY_BUILD,
    NoAnswerError,
    Talk,
    fresh_client,
    llama_swap,
    resident,
    resident_in_llama_swap,
    router,
    talks,
)
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.observe.log import configure


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of one way."""

    computed: int  # prompt tokens
    answers: int
    errors: int
    seconds: float

    def shown(self) -> dict[str, Any]:
        return {
            "computed": self.computed,
            "answers": self.answers,
            "errors": self.errors,
            "seconds": round(self.seconds, 1),
        }


async def in_turn(client: httpx.AsyncClient, found: Sequence[Talk], turns: int) -> int:
    """Play the turns so that each is a swap. Return how many failed."""
    errors = 0
    for _ in range(turns):
        for talk in found:
            errors += not await _asked(talk, client)
    return errors


async def at_once(client: httpx.AsyncClient, found: Sequence[Talk], turns: int) -> int:
    """Play all agents at once; none waits for another. Return how many turns failed."""

    async def alone(talk: Talk) -> int:
        return sum([not await _asked(talk, client) for _ in range(turns)])

    return sum(await asyncio.gather(*map(alone, found)))


async def _asked(talk: Talk, client: httpx.AsyncClient) -> bool:
    """Whether the request was answered. What stock does not answer in a minute, it never answers."""
    try:
        await talk.turn(client)
    except (NoAnswerError, httpx.HTTPError):
        talk.messages.pop()
        return False
    return True


Played = Callable[[httpx.AsyncClient, Sequence[Talk], int], Awaitable[int]]


async def stock(folder: Path, played: Played, turns: int) -> Result:
    async with router(folder) as started:
        return await _measured(started.base, played, turns)


async def ours(folder: Path, played: Played, turns: int) -> Result:
    async with router(folder) as started, lab.keeping(started) as sidecar:
        return await _measured(lab.url_of(sidecar), played, turns, sidecar)


async def stock_llama_swap(folder: Path, played: Played, turns: int) -> Result:
    async with llama_swap(folder) as started:
        return await _measured(started.base, played, turns)


async def ours_and_llama_swap(folder: Path, played: Played, turns: int) -> Result:
    async with (
        llama_swap(folder) as started,
        lab.in_front_of(started.base, slot_dir=started.slots, save_pause=lab.PAUSE_SECONDS) as sidecar,
    ):
        return await _measured(lab.url_of(sidecar), played, turns, sidecar)


async def _measured(base: str, played: Played, turns: int, sidecar: Sidecar | None = None) -> Result:
    found, began = talks(), time.monotonic()
    async with fresh_client(base, seconds=CONTROL_SECONDS) as client:
        errors = await played(client, found, turns)
    spent = lab.spent(sidecar)
    return Result(
        computed=sum(talk.computed for talk in found) + spent.plant + spent.idle,
        answers=sum(len(talk.answers) for talk in found),
        errors=errors,
        seconds=time.monotonic() - began,
    )


async def compared(turns: int, *, swapper: bool = False) -> list[dict[str, Any]]:
    rows = []
    with TemporaryDirectory() as home:

        def folder(name: str) -> Path:
            (made := Path(home) / name).mkdir()
            return made

        stays = resident_in_llama_swap if swapper else resident
        oracle = sum(talk.computed for talk in await stays(folder("resident"), turns))
        for name, played in (("in turn", in_turn), ("at once", at_once)):
            ways = {
                way: await run(folder(f"{played.__name__}-{way}"), played, turns)
                for way, run in (OF_LLAMA_SWAP if swapper else WAYS).items()
            }
            shown = {way: found.shown() for way, found in ways.items()}
            rows.append({"agents": name, "oracle": oracle, **shown})
    return rows


WAYS = {"stock": stock, "sidecar": ours}
OF_LLAMA_SWAP = {"stock": stock_llama_swap, "sidecar": ours_and_llama_swap}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swaps", description=__doc__)
    parser.add_argument(
        "--turns", type=int, default=5, help="turns of each conversation (default: %(default)s)"
    )
    parser.add_argument("--llama-swap", action="store_true", help="with llama-swap instead of a router")
    args = parser.parse_args(arguments)
    turns, build = args.turns, f"llama-swap, {LIBRARY_BUILD}" if args.llama_swap else BUILD
    configure("error", "console")
    rows = asyncio.run(compared(turns, swapper=args.llama_swap))
    shown = Table(title=f"two models, one loaded at a time, {build}, {turns} turns of four agents")
    for name in ("agents", "oracle", "way", "computed", "of the oracle", "answers", "errors", "seconds"):
        shown.add_column(name, justify="right")
    for row in rows:
        for way in WAYS:
            found, oracle = row[way], row["oracle"]
            ratio = f"{found['computed'] / oracle:.2f}"
            last = (str(found[name]) for name in ("answers", "errors", "seconds"))
            shown.add_row(row["agents"], str(oracle), way, str(found["computed"]), ratio, *last)
    console.print(shown)
    if not args.llama_swap:
        keep("swaps", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
