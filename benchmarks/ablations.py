"""What each mechanism saves: the same work with all mechanisms, and without one of them.

`python -m benchmarks.ablations --simulated [--without touch parking+crowded ...] [--seeds 5]` plays the
engines and workloads of `benchmarks.profiles`, and leaves out every mechanism of the scheduler in turn. Names
joined by `+` are left out together.

`python -m benchmarks.ablations [--without habits ...] [--builds b10434 ...] [--models tiny-hybrid ...]
[--sessions thinking ...] [--traces FILE.jsonl ...]` runs tiny engines. The work: scripted sessions, where all
idle work is done before each turn; four conversations on two slots whose engine is killed in the middle; and
recorded sessions. Each figure is prompt tokens: computed while a client waited, and in all.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.table import Table

from benchmarks import crowd, rewriting
from benchmarks.engine_profiles import PROFILES
from benchmarks.figures import BUILDS, console, keep
from benchmarks.mechanisms import MECHANISMS, known, without
from benchmarks.profile_work import WORK
from benchmarks.profiles import compared
from benchmarks.sessions import SESSIONS
from benchmarks.ways import Way, opened
from slotkeeper.bench.measure import Totals, totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import Script, Target, play
from slotkeeper.observe.log import configure

ALL: Final = "all"
PREDICTED: Final = ("next-turns", "habits")  # the default: what the simulation does not have
SEEDS: Final = 2  # runs of each simulated workload
FORGETFUL: Final = "tool-loop, reasoning dropped"
SPOKEN: Final = ("thinking", "tool-loop", FORGETFUL, "edits", "interleaved", "many-turns")
CUT: Final = (Tiny.HYBRID, Tiny.SWA, Tiny.HYBRID_MTP)  # memory kinds that can be cut at checkpoints only
CONVERSATIONS, GAP_MS = crowd.MAIN
COUNTED: Final = ("waited", "total")
Row = dict[str, Any]
Work = Callable[[str, Tiny], Awaitable[Row]]  # for a build and a model


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
        found = totals(await rewriting.recorded(path)(target, Way.UP))
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
        with without("" if name == ALL else name):
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


# -- simulated -------------------------------------------------------------------------------------------


def simulated(names: str, seeds: int) -> list[Row]:
    """Return the rows of `benchmarks.profiles` without these mechanisms; "": with all."""
    with without(names):
        return [compared(profile, work, range(1, seeds + 1)) for profile in PROFILES for work in WORK]


def worst(names: str, rows: Sequence[Row], whole: Sequence[Row]) -> Row:
    """Return what leaving these mechanisms out costs: of all rows together, and of the one that loses most.

    The row's figures are its published ratios to the stock engine, of seconds or tokens: what loses more.
    """

    def ratios(row: Row) -> Mapping[str, float]:
        return {"seconds": row["ours"] / row["stock"], "tokens": row["computed"] / row["stock_computed"]}

    found = []
    for row, before in zip(rows, whole, strict=True):
        with_it, left_out = ratios(before), ratios(row)
        for unit in with_it:
            facts = {"profile": row["profile"], "work": row["work"], "unit": unit}
            found.append(facts | {"with": round(with_it[unit], 3), "left_out": round(left_out[unit], 3)})
    most = max(found, key=lambda facts: facts["left_out"] - facts["with"])
    sums = {
        unit: round(sum(row[key] for row in rows) / sum(row[key] for row in whole), 4)
        for unit, key in (("seconds", "ours"), ("tokens", "computed"))
    }
    return {"name": names, "sums": sums, "changes": [*rows] != [*whole], "worst": most}


def simulated_table(rows: Sequence[Row]) -> Table:
    shown = Table("without", "seconds", "tokens", "worst row", "÷ stock, with", "without")
    for row in rows:
        sums, most = row["sums"], row["worst"]
        place = f"{most['profile']}, {most['work']}, {most['unit']}" if row["changes"] else "no row changes"
        figures = (f"{most[key]:.3f}" for key in ("with", "left_out"))
        shown.add_row(row["name"], f"{sums['seconds']:.3f}", f"{sums['tokens']:.3f}", place, *figures)
    return shown


def _simulate(names: Sequence[str], seeds: int) -> None:
    whole = simulated("", seeds)
    rows = [worst(name, simulated(name, seeds), whole) for name in names]
    console.print(simulated_table(rows))
    if {*names} >= {*IN_SIMULATION}:
        keep("ablations", rows)


IN_SIMULATION: Final = tuple(name for name, mechanism in MECHANISMS.items() if mechanism.simulated)
TOGETHER: Final = ("parking+crowded",)  # these replace each other


def _name(text: str) -> str:
    try:
        return known(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablations", description=__doc__)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--without", nargs="+", type=_name, metavar="NAME", help=", ".join(MECHANISMS))
    parser.add_argument("--builds", nargs="+", choices=BUILDS, default=list(BUILDS))
    parser.add_argument("--models", nargs="+", type=Tiny, default=list(CUT))
    parser.add_argument("--sessions", nargs="*", choices=list(SCRIPTS), default=list(SPOKEN))
    parser.add_argument("--traces", nargs="+", type=Path, default=[], metavar="FILE")
    args = parser.parse_args(argv)
    if args.simulated:
        _simulate(args.without or (*IN_SIMULATION, *TOGETHER), args.seeds)
        return 0
    configure("error", "console")
    names = [ALL, *(args.without or PREDICTED)]
    works: dict[str, Work] = {session: partial(scripted, session) for session in args.sessions}
    works |= {"crowd": crowded}
    works |= {
        f"{path.parent.name}/{path.name.partition('.')[0]}": partial(recorded, path) for path in args.traces
    }
    rows = asyncio.run(run(works, args.models, args.builds, names))
    console.print(table(rows, names))
    keep("ablations-tiny", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
