"""What each mechanism saves: the same work with all mechanisms, and without one of them.

`python -m benchmarks.ablations [--without habits ...] [--builds b10434 ...] [--models tiny-hybrid ...]
[--sessions thinking ...] [--traces FILE.jsonl ...]`. The work: scripted sessions, where all idle work is done
before each turn; four conversations on two slots whose engine is killed in the middle; and recorded sessions.
Each figure is prompt tokens: computed while a client waited, and in all.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from unittest.mock import patch

from rich.table import Table

from benchmarks import crowd, rewriting
from benchmarks.figures import BUILDS, console, keep
from benchmarks.sessions import SESSIONS
from benchmarks.ways import Way, opened
from slotkeeper.api.echo import Habit
from slotkeeper.bench.measure import Totals, totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import Script, Target, play
from slotkeeper.observe.log import configure

ALL: Final = "all"
FORGETFUL: Final = "tool-loop, reasoning dropped"
SPOKEN: Final = ("thinking", "tool-loop", FORGETFUL, "edits", "interleaved", "many-turns")
CUT: Final = (Tiny.HYBRID, Tiny.SWA, Tiny.HYBRID_MTP)  # memory kinds that can be cut at checkpoints only
CONVERSATIONS, GAP_MS = crowd.MAIN
COUNTED: Final = ("waited", "total")
Row = dict[str, Any]
Work = Callable[[str, Tiny], Awaitable[Row]]  # for a build and a model


async def _unknown(*_: Any, **__: Any) -> None:
    """Return a prediction that the next turn is unknown."""


def _usual(habit: Habit, *_: Any, **__: Any) -> Habit:
    return habit


# The replacement of each mechanism that is left out.
WITHOUT: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        ALL: {},
        # The return of a reply is not predicted: no slot is prepared for the next turn.
        "next-turns": {"slotkeeper.runtime.render.NextTurns.prefix": _unknown},
        # The prediction uses only the request itself and the habits of its API.
        "habits": {"slotkeeper.runtime.render.learnt": _usual},
    }
)


def forgetful(script: Script) -> Script:
    """Return a conversation whose client sends replies back without their reasoning."""
    turn = next(script)
    while True:
        reply = yield turn
        try:
            turn = script.send({key: value for key, value in reply.items() if key != "reasoning_content"})
        except StopIteration:
            return


SCRIPTS: Final[Mapping[str, Callable[[], Script]]] = MappingProxyType(
    {**SESSIONS, FORGETFUL: lambda: forgetful(SESSIONS["tool-loop"]())}
)


@contextmanager
def without(name: str) -> Iterator[None]:
    patches = [patch(target, replacement) for target, replacement in WITHOUT[name].items()]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


async def scripted(session: str, build: str, model: Tiny) -> Row:
    async with opened(Way.RESTED, build, model) as scene, Target(scene.base) as target:
        found = totals(await play(SCRIPTS[session](), target, session=session, before=scene.before))
    return figures(found)


async def crowded(build: str, model: Tiny) -> Row:
    cell = crowd.Cell(
        build=build, model=model, conversations=CONVERSATIONS, gap_ms=GAP_MS, killed=True, busy=0
    )
    found = await crowd.measure(cell)
    return {"oracle": found.oracle, "waited": found.client + found.plant, "total": found.counted}


async def recorded(path: Path, build: str, model: Tiny) -> Row:
    opening = opened(Way.UP, build, model, context_tokens=rewriting.CONTEXT)
    async with opening as scene, Target(scene.base) as target:
        found = totals(await rewriting.recorded(path)(target))
    return figures(found)


def figures(found: Totals) -> Row:
    if found.failed or found.uncounted:
        raise RuntimeError(f"{found.failed} requests failed, {found.uncounted} were not counted")
    sums = found.sums
    waited = sums.client + sums.plant
    return {"oracle": sums.oracle, "waited": waited, "total": waited + sums.idle}


async def run(
    works: Mapping[str, Work], models: Sequence[Tiny], builds: Sequence[str], names: Sequence[str]
) -> list[Row]:
    rows: list[Row] = []
    for build, name, (label, work), model in product(builds, names, works.items(), models):
        with without(name):
            found = await work(build, model)
        rows.append({"work": label, "build": build, "model": model.value, "without": name} | found)
        console.print(f"[dim]{label} {build} {model.value} {name}: {found}[/dim]")
    return rows


def table(rows: Sequence[Row], names: Sequence[str]) -> Table:
    """Return a table with one line for each work, build and model; other columns are ratios to `all`."""
    shown = Table("work", "build", "model", "oracle", ALL, *names[1:])
    cases: dict[tuple[str, str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        cases[row["work"], row["build"], row["model"]][row["without"]] = row
    for case, found in cases.items():
        whole = found[ALL]
        cells = [", ".join(f"{found[name][key] / whole[key]:.3f}" for key in COUNTED) for name in names[1:]]
        shown.add_row(*case, str(whole["oracle"]), f"{whole['waited']}, {whole['total']}", *cells)
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablations", description=__doc__)
    left_out = [name for name in WITHOUT if name != ALL]
    parser.add_argument("--without", nargs="+", choices=left_out, default=left_out)
    parser.add_argument("--builds", nargs="+", choices=BUILDS, default=list(BUILDS))
    parser.add_argument("--models", nargs="+", type=Tiny, default=list(CUT))
    parser.add_argument("--sessions", nargs="*", choices=list(SCRIPTS), default=list(SPOKEN))
    parser.add_argument("--traces", nargs="+", type=Path, default=[], metavar="FILE")
    args = parser.parse_args(argv)
    configure("error", "console")
    names = [ALL, *args.without]
    works: dict[str, Work] = {session: partial(scripted, session) for session in args.sessions}
    works |= {"crowd": crowded}
    works |= {
        f"{path.parent.name}/{path.name.partition('.')[0]}": partial(recorded, path) for path in args.traces
    }
    rows = asyncio.run(run(works, args.models, args.builds, names))
    console.print(table(rows, names))
    keep("ablations", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
