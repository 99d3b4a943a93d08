"""Agents that rewrite their own prompts: what stock computes, and the sidecar with rules that observe or fix.

`python -m benchmarks.rewriting [--builds b10434 ...] [--traces FILE.jsonl ...]`. One short session for
each rule, on the hybrid model; with `--traces` recorded sessions instead. Tokens are those that
clients waited for; beside them both ratios, waited and total. The oracle is that of the requests as the
clients sent them.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.scenarios import BUILDS
from benchmarks.ways import Way, opened
from slotkeeper.bench.measure import Sample, totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.play import play
from slotkeeper.bench.replay import generates, shot
from slotkeeper.bench.rewriters import REWRITERS, Rewriter
from slotkeeper.bench.target import Target
from slotkeeper.bench.trace import merged, read
from slotkeeper.observe.log import configure

WAYS: Final[Mapping[str, tuple[Way, dict[str, Any]]]] = {
    "stock": (Way.STOCK, {}),
    "observe": (Way.UP, {"rules": ("all=observe",)}),
    "fix": (Way.UP, {"rules": ("all=fix",)}),
}
REPLY: Final = 16  # tokens, of recorded sessions
Played = Callable[[Target], Awaitable[list[Sample]]]
Row = dict[str, Any]


def scripted(rewriter: Rewriter) -> Played:
    return lambda target: play(rewriter(), target, session=rewriter.rule.value)


def recorded(path: Path) -> Played:
    async def played(target: Target) -> list[Sample]:
        entries = [entry for entry in merged([read(path)]) if generates(entry)]
        return [(await target.fire(shot(entry, REPLY))).sample for entry in entries]

    return played


async def measured(name: str, played: Played, build: str) -> list[Row]:
    """One row for each way."""
    rows = []
    for way, (kind, settings) in WAYS.items():
        async with opened(kind, build, Tiny.HYBRID, **settings) as scene, Target(scene.base) as target:
            found = totals(await played(target))
            if found.failed or found.uncounted:
                raise RuntimeError(f"{name}, {way}: {found.failed} requests failed")
        sums = found.sums
        rows.append(
            {"session": name, "build": build, "way": way, "oracle": sums.oracle, "client": sums.client}
            | {"planted": sums.plant, "idle": sums.idle, "waited": sums.waited, "total": found.total}
        )
    return rows


def table(rows: Sequence[Row]) -> Table:
    shown = Table("session", "build", "oracle", *WAYS, "of which planted")
    for at in range(0, len(rows), len(WAYS)):
        ways = rows[at : at + len(WAYS)]
        cells = [
            f"{row['client'] + row['planted']} = {row['waited']:.2f}, {row['total']:.2f}" for row in ways
        ]
        first = ways[0]
        shown.add_row(
            first["session"], first["build"], str(first["oracle"]), *cells, str(ways[-1]["planted"])
        )
    return shown


async def run(sessions: Mapping[str, Played], builds: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    for name, played in sessions.items():
        for build in builds:
            rows += await measured(name, played, build)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewriting", description=__doc__)
    parser.add_argument("--builds", nargs="+", default=BUILDS, choices=BUILDS)
    parser.add_argument("--traces", nargs="+", type=Path, default=[], metavar="FILE")
    args = parser.parse_args(argv)
    configure("error", "console")
    sessions = {f"{path.parent.name}/{path.name.partition('.')[0]}": recorded(path) for path in args.traces}
    sessions = sessions or {rule.value: scripted(rewriter) for rule, rewriter in REWRITERS.items()}
    rows = asyncio.run(run(sessions, args.builds))
    console.print(table(rows))
    keep("rewriting", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
