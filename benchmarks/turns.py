"""Agents that share slots: how long they wait, and how often a slot changes its conversation.

`python -m benchmarks.turns [--profile NAME or FILE ...] [--agents 5] [--slots 1] [--factor 4 ...]
[--fat MODEL ... --rounds 1]`. The legs are the stock engine, the sidecar in the order of arrival, and the
sidecar with each bound on the wait (`--max-delay-factor`). They are simulated as in `benchmarks.profiles`,
with tools that take 0.1 to 1.5 s; or real, with `--fat`, as in `benchmarks.waiting`: tools take 0.3 s.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from rich.table import Table

from benchmarks.engine_profiles import PROFILES, EngineProfile
from benchmarks.figures import console, keep
from benchmarks.profile_work import Phase, Step, chat, tool_loop
from benchmarks.profiles import LIMITS, SEEDS, StockEngine, Waits, named_profile, play, sidecar
from benchmarks.simulator.virtual_clock import VirtualClock
from benchmarks.waiting import one_side, played
from benchmarks.waiting_work import JOB, Work
from benchmarks.waiting_work import agents as real_agents
from slotkeeper.bench.models import Fat
from slotkeeper.scheduler.snapshots.budgets import Limits

TASKS: Final = 1
RESULTS: Final = 5  # of tools in each task
IN_ORDER: Final = 1.0  # the bound on a request's delay with which nothing passes it


def agents(count: int, seed: int) -> Iterator[Phase]:
    def steps(number: int) -> Iterator[Step]:
        agent = chat(f"agent {number}", seed)
        for _ in range(TASKS):
            yield from tool_loop(agent, RESULTS)

    yield {f"agent {number}": steps(number) for number in range(count)}


def stock(profile: EngineProfile, count: int, slots: int, seed: int) -> Waits:
    clock = VirtualClock()
    alone = StockEngine(profile, clock, slots)
    play(alone, alone.engine, agents(count, seed), clock)
    return alone.waits


def ours(profile: EngineProfile, count: int, slots: int, seed: int, factor: float) -> Waits:
    clock = VirtualClock()
    served, waits = sidecar(profile, clock, slots, replace(LIMITS, delay_factor=factor), user="user")
    (engine,) = served.engines.values()
    play(served, engine, agents(count, seed), clock)
    return waits


def changes(waits: Waits) -> int:
    """Return how often the next request is of another conversation, in the order of their first tokens."""
    order = [asked.turn.hash_chain[1] for asked in sorted(waits.requests, key=lambda asked: asked.first)]
    return sum(now != before for before, now in pairwise(order))


def by_turn(waits: Waits) -> Mapping[tuple[bytes, ...], float]:
    return {asked.turn.hash_chain: asked.first - asked.asked_at for asked in waits.requests}


def compared(profile: EngineProfile, count: int, slots: int, factors: Sequence[float]) -> dict[str, Any]:
    row: dict[str, Any] = {"profile": profile.name, "agents": count, "slots": slots}
    legs: dict[str, list[Waits]] = {"stock": [stock(profile, count, slots, seed) for seed in SEEDS]}
    for factor in (IN_ORDER, *factors):
        legs[f"{factor:g}"] = [ours(profile, count, slots, seed, factor) for seed in SEEDS]
    for name, leg in legs.items():
        row[name] = {
            "seconds": round(sum(sum(waits.first) for waits in leg), 1),
            "changes": sum(map(changes, leg)) / len(leg),
            "longest": round(max(max(waits.first) for waits in leg), 1),
        }
    return row


# -- on real engines -------------------------------------------------------------------------------------

JOB_OF_SIX: Final = replace(JOB, calls=RESULTS, calling=True)


async def played_for_real(model: str, count: int, slots: int, words: Sequence[str] | None) -> dict[str, Any]:
    """Let the agents work, without a sidecar if `words` is None."""
    work = Work(about=f"{count} agents", phases=real_agents(count, JOB_OF_SIX))
    async with one_side(model, through=words is not None, slots=slots, words=words or ()) as side:
        await side.rests()
        leg = await played(work, side)
    told = sorted(leg.told, key=lambda one: one.sent + (one.sample.first_token_seconds or 0.0))
    order = [one.client.name for one in told]
    return {
        "seconds": round(leg.totals.waits.waited_seconds, 2),
        "answered": round(leg.answered_seconds, 2),
        "changes": sum(now != before for before, now in pairwise(order)),
        "longest": round(max(one.sample.first_token_seconds or 0.0 for one in told), 2),
        "computed": leg.computed,
    }


def compared_for_real(model: str, count: int, slots: int, factors: Sequence[float]) -> dict[str, Any]:
    row: dict[str, Any] = {"profile": model, "agents": count, "slots": slots}
    row["stock"] = asyncio.run(played_for_real(model, count, slots, None))
    for factor in (IN_ORDER, *factors):
        words = ["--max-delay-factor", f"{factor:g}"]
        row[f"{factor:g}"] = asyncio.run(played_for_real(model, count, slots, words))
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("--fat", nargs="+", choices=list(map(str, Fat)), metavar="MODEL", help="real engines")
    parser.add_argument("--rounds", type=int, default=1, help="with --fat")
    parser.add_argument("--profile", action="append", type=named_profile, metavar="NAME")
    parser.add_argument("--agents", type=int, default=5)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--factor", action="append", type=float)
    chosen = parser.parse_args(arguments)
    factors = chosen.factor or [Limits().delay_factor]
    how_many = chosen.agents, chosen.slots
    if chosen.fat:
        models = [model for model in chosen.fat for _ in range(chosen.rounds)]
        rows = [compared_for_real(model, *how_many, factors) for model in models]
    else:
        rows = [compared(profile, *how_many, factors) for profile in chosen.profile or PROFILES]
    table = Table(title=f"{chosen.agents} agents, {chosen.slots} slots: waited s, changes, longest wait s")
    names = ("stock", f"{IN_ORDER:g}", *(f"{factor:g}" for factor in factors))
    for column in ("profile", *names):
        table.add_column(column)
    for row in rows:
        cells = (f"{row[n]['seconds']:.0f}, {row[n]['changes']:.1f}, {row[n]['longest']:.0f}" for n in names)
        table.add_row(row["profile"], *cells)
    console.print(table)
    keep("turns_fat" if chosen.fat else "turns", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
