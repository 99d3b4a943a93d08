"""Agents that rewrite their own prompts: tokens computed by stock, and with rules that observe or fix.

`python -m benchmarks.rewriting [--builds b10434 ...] [--ways stock observe fix]`. One short session for each
rule, on the hybrid model. `--refreshed` plays chats whose context is put anew into each request instead
(`refreshers`), `--side` agents that ask beside their conversation (`askers`); there `ideal` is the same chat
as a prefix cache would have it, and its oracle counts only changed lines, or the question, as new. `asked` in
the file of figures has the tokens of these questions alone. `--traces FILE.jsonl ...` plays recorded
sessions: on stock, and through a sidecar with its defaults in front of the same flags. With `--prune WAY` old
results in recorded chats are pruned first, as an agent does it (`pruners`). `--context` is the context of a
slot, in tokens. Tokens are those that clients waited for; beside them are both ratios, waited and total. The
oracle counts the requests as clients sent them.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from benchmarks.askers import ASKED, ASKERS
from benchmarks.figures import BUILDS, console, keep
from benchmarks.pruners import PRUNERS, pruned
from benchmarks.refreshers import REFRESHERS
from benchmarks.rewriters import REWRITERS, Rewriter
from benchmarks.ways import Way, opened
from slotkeeper.bench.measure import Sample, totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.replay import generates, merged, read, shot
from slotkeeper.bench.target import Target, play
from slotkeeper.observe.log import configure

IDEAL: Final = "ideal"
WAYS: Final[Mapping[str, tuple[Way, dict[str, Any]]]] = {
    "stock": (Way.STOCK, {}),
    IDEAL: (Way.STOCK, {}),
    "observe": (Way.UP, {"rules": ("all=observe",)}),
    "fix": (Way.UP, {"rules": ("all=fix",)}),
    "default": (Way.FOLDER, {}),  # stock flags and default rules
}
SCRIPTED: Final = ("stock", "observe", "fix")
REFRESHED: Final = (IDEAL, *SCRIPTED)
RECORDED: Final = ("stock", "default")
REPLY: Final = 16  # tokens of a reply, for recorded sessions
CONTEXT: Final = 65536  # tokens of a slot: the longest recorded prompt has 41,000
Played = Callable[[Target, str], Awaitable[list[Sample]]]  # takes the name of the way too
Row = dict[str, Any]


def scripted(rewriter: Rewriter) -> Played:
    return lambda target, _: play(rewriter(), target, session=rewriter.rule.value)


def refreshed(name: str) -> Played:
    script = REFRESHERS[name]
    return lambda target, way: play(script(ideal=way == IDEAL), target, session=name)


def asking(name: str) -> Played:
    script = ASKERS[name]
    return lambda target, way: play(script(ideal=way == IDEAL), target, session=name)


def recorded(path: Path, prune: str | None = None) -> Played:
    async def played(target: Target, _: str) -> list[Sample]:
        entries = [entry for entry in merged([read(path)]) if generates(entry)]
        sent = pruned(entries, prune) if prune else entries
        return [(await target.fire(shot(entry, REPLY))).sample for entry in sent]

    return played


async def measured(
    name: str, played: Played, build: str, ways: Sequence[str], context: int = CONTEXT
) -> list[Row]:
    """Return one row for each way."""
    rows = []
    for way in ways:
        kind, settings = WAYS[way]
        opening = opened(kind, build, Tiny.HYBRID, context_tokens=context, **settings)
        async with opening as scene, Target(scene.base) as target:
            samples = await played(target, way)
            found = totals(samples)
            if found.failed or found.uncounted:
                raise RuntimeError(f"{name}, {way}: {found.failed} requests failed")
        sums, asked = found.sums, totals(one for one in samples if one.label == ASKED)
        rows.append(
            {"session": name, "build": build, "way": way, "oracle": sums.oracle, "client": sums.client}
            | {"planted": sums.plant, "idle": sums.idle, "waited": sums.waited, "total": found.total}
            | {"asked": asked.computed, "asked_oracle": asked.oracle}
            | {"longest": max(sample.prompt or 0 for sample in samples)}
        )
    return rows


def table(rows: Sequence[Row], ways: Sequence[str]) -> Table:
    shown = Table("session", "build", "oracle", *ways, "of which planted")
    for at in range(0, len(rows), len(ways)):
        mine = rows[at : at + len(ways)]
        cells = [
            f"{row['client'] + row['planted']} = {row['waited']:.2f}, {row['total']:.2f}" for row in mine
        ]
        first = mine[0]
        shown.add_row(
            first["session"], first["build"], str(first["oracle"]), *cells, str(mine[-1]["planted"])
        )
    return shown


async def run(
    sessions: Mapping[str, Played], builds: Sequence[str], ways: Sequence[str], context: int
) -> list[Row]:
    rows: list[Row] = []
    for name, played in sessions.items():
        for build in builds:
            rows += await measured(name, played, build, ways, context)
            console.print(
                f"[dim]{name} {build} {[row['client'] + row['planted'] for row in rows[-len(ways) :]]}[/dim]"
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewriting", description=__doc__)
    parser.add_argument("--builds", nargs="+", default=BUILDS, choices=BUILDS)
    parser.add_argument("--refreshed", action="store_true", help="chats whose context is put anew each time")
    parser.add_argument("--side", action="store_true", help="agents that ask beside their conversation")
    parser.add_argument("--traces", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument(
        "--prune", choices=PRUNERS, metavar="WAY", help="how to prune recorded chats: %(choices)s"
    )
    parser.add_argument("--context", type=int, default=CONTEXT, metavar="TOKENS", help="context of a slot")
    args = parser.parse_args(argv)
    plays_ideal, as_recorded = args.refreshed or args.side, args.traces and not args.prune
    usual = REFRESHED if plays_ideal else RECORDED if as_recorded else SCRIPTED
    ways = args.ways or usual
    configure("error", "console")
    names = {path: f"{path.parent.name}/{path.name.partition('.')[0]}" for path in args.traces}
    sessions = {name: recorded(path, args.prune) for path, name in names.items()}
    if args.refreshed:
        sessions = {name: refreshed(name) for name in REFRESHERS}
    if args.side:
        sessions = {name: asking(name) for name in ASKERS}
    sessions = sessions or {rule.value: scripted(rewriter) for rule, rewriter in REWRITERS.items()}
    rows = asyncio.run(run(sessions, args.builds, ways, args.context))
    console.print(table(rows, ways))
    which = "pruned" if args.prune else "recorded" if args.traces else "rewriting"
    keep("refreshed" if args.refreshed else "side" if args.side else which, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
