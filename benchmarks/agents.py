"""A recording of several agents: tokens that the engine computes for all, stock and with our defaults.

`python -m benchmarks.agents FILE.jsonl ... [--runs 3] [--build b11549] [--context 131072]`. The files are of
`slotkeeper serve --record`. Their requests are sent in the order in which they came, so the agents take turns
on two slots. Ways alternate, each run on a fresh engine with stock flags. Tokens by agent are those that it
waited for; those of a whole run are the engine's own counter from its start to the end of all idle work,
probes included. The oracle counts the requests as they were sent.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final

from rich.table import Table

from benchmarks.figures import BUILDS, console, keep
from benchmarks.ways import Way, opened
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.replay import Entry, generates, merged, read, shot
from slotkeeper.bench.target import Target
from slotkeeper.cli.lint import laid_out, program
from slotkeeper.conversation.naming import Agents
from slotkeeper.observe.log import configure

WAYS: Final = (Way.STOCK, Way.FOLDER)
ALL: Final = "all, and idle work"
REPLY: Final = 16  # tokens of a reply: the recorded history is sent, not the new answers
CONTEXT: Final = 131072  # tokens of a slot
Costs = dict[str, tuple[int, int]]  # agent -> tokens computed, and those of the oracle


async def played(way: Way, entries: Sequence[tuple[str, Entry]], build: str, context: int) -> Costs:
    """Send all requests to a fresh engine. Raises RuntimeError if one fails or has no figures."""
    costs: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    async with opened(way, build, Tiny.HYBRID, context_tokens=context) as scene, Target(scene.base) as target:
        for agent, entry in entries:
            sample = (await target.fire(shot(entry, REPLY))).sample
            if sample.computed is None or sample.oracle is None:
                raise RuntimeError(f"{way}, {agent}: {sample.failure or 'no figures'}")
            computed, least = costs[agent]
            costs[agent] = (computed + sample.computed, least + sample.oracle)
        if scene.sidecar:
            await lab.rested(scene.sidecar)
        everything = await lab.evaluated(scene.engine.base)
    return {**costs, ALL: (everything, sum(least for _, least in costs.values()))}


def rows(runs: Mapping[Way, Sequence[Costs]]) -> Iterator[dict[str, Any]]:
    for agent in runs[Way.STOCK][0]:
        mine = {way: [costs[agent][0] for costs in runs[way]] for way in WAYS}
        stock, ours = (mean(mine[way]) for way in WAYS)
        oracle = runs[Way.STOCK][0][agent][1]
        yield {"agent": agent, "oracle": oracle, "stock": mine[Way.STOCK], "ours": mine[Way.FOLDER]} | {
            "to_stock": ours / stock,
            "to_oracle": ours / oracle,
        }


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table("agent", "oracle", "stock", "Slotkeeper", "÷ stock", "÷ oracle")
    for row in found:
        cells = (", ".join(f"{count:,}" for count in row[way]) for way in ("stock", "ours"))
        ratios = (f"{row['to_stock']:.4f}", f"{row['to_oracle']:.3f}")
        shown.add_row(row["agent"], f"{row['oracle']:,}", *cells, *ratios)
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--build", default=BUILDS[-1], choices=BUILDS)
    parser.add_argument("--context", type=int, default=CONTEXT, metavar="TOKENS", help="context of a slot")
    args = parser.parse_args(argv)
    configure("error", "console")
    sent = [entry for entry in merged([read(path) for path in args.traces]) if generates(entry)]
    agents = Agents()
    entries = [(program(agents, entry, laid_out(entry)), entry) for entry in sent]
    runs: dict[Way, list[Costs]] = {way: [] for way in WAYS}
    for _ in range(args.runs):
        for way in WAYS:
            runs[way].append(asyncio.run(played(way, entries, args.build, args.context)))
            console.print(f"[dim]{way} {runs[way][-1]}[/dim]")
    found = list(rows(runs))
    console.print(table(found))
    keep("agents", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
