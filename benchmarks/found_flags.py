"""Tokens: scripted sessions behind `up`, and behind `serve` in front of an engine with the same flags.

`serve` does not know the flags: it probes the engine (found), or starts while the engine is in use and learns
them from answers alone (met). The engine's counter of prompt tokens is compared, over the whole session and
without the probes. Requests follow each other without pauses: idle work ends when the session does.

`python -m benchmarks.found_flags [--builds b10434 ...] [--models tiny-hybrid ...] [--sessions edits ...]`
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress
from rich.table import Table

from benchmarks.figures import BUILDS, console, keep
from benchmarks.sessions import SESSIONS
from slotkeeper.bench import lab
from slotkeeper.bench.measure import Sample
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import Target, play
from slotkeeper.observe.log import configure

MODELS: Final = tuple(tiny for tiny in Tiny if tiny is not Tiny.DENSE)  # dense memory needs no checkpoints
ALIKE: Final = 0.02
CONTEXT: Final = 65536

Row = dict[str, Any]


class Way(StrEnum):
    """How the sidecar knows the engine's flags."""

    UP = "up"  # by its settings
    FOUND = "found"  # by its own probes
    MET = "met"  # by clients' answers alone


async def measure(build: str, model: Tiny, session: str, way: Way, **settings: Any) -> Row:
    """Run one session on a fresh engine with the flags of `up`. `settings` are the sidecar's."""
    with tempfile.TemporaryDirectory(prefix="slotkeeper-") as name:
        async with lab.tiny_engine(
            model, build, Path(name), recipe=lab.up_flags, context_tokens=CONTEXT
        ) as engine:
            flags = engine.flags if way is Way.UP else None
            ours = {"slot_dir": engine.flags.slot_save_path, "probe": way is not Way.MET}
            async with lab.in_front_of(engine.base, flags, **(ours | settings)) as started:
                before = await lab.evaluated(engine.base)
                async with Target(lab.url_of(started)) as target:
                    samples = await play(SESSIONS[session](), target, session=session)
                computed = await lab.evaluated(engine.base) - before
                (table,) = started.driver.placement.tables.values()
                learned = {name: getattr(table.traits, name) for name in table.traits.knowledge}
    return {
        "tried_out": before,
        "computed": computed,
        "waited": waited(samples),
        "failed": sum(sample.failure is not None for sample in samples),
        "learned": {} if way is Way.UP else learned,
    }


def waited(samples: Sequence[Sample]) -> int:
    """Return the tokens that clients waited for, with those that were planted for their requests."""
    return sum(sample.computed or 0 for sample in samples)


async def run(cases: Sequence[tuple[str, Tiny, str]], ways: Sequence[Way]) -> list[Row]:
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("sessions", total=len(cases) * len(ways))
        for build, model, session in cases:
            row: Row = {"build": build, "model": model.value, "session": session}
            for way in ways:
                row[way.value] = await measure(build, model, session, way)
                progress.advance(task)
            rows.append(row)
    return rows


def ratio(row: Row, way: Way) -> float:
    return float(row[way.value]["computed"] / row[Way.UP.value]["computed"])


def table(rows: Sequence[Row], ways: Sequence[Way]) -> Table:
    others = [way for way in ways if way is not Way.UP]
    shown = Table("build", "model", "session", "up", *others, "learned", title="Prompt tokens, all purposes")
    for row in rows:
        cells = [f"{row[way.value]['computed']} ({ratio(row, way):.3f})" for way in others]
        learned = " ".join(f"{name}={value}" for name, value in row[others[-1].value]["learned"].items())
        shown.add_row(row["build"], row["model"], row["session"], str(row["up"]["computed"]), *cells, learned)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a session failed, or if probed flags cost over 2 % more tokens than those of `up`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.found_flags", description=__doc__)
    parser.add_argument("--builds", nargs="+", default=list(BUILDS))
    parser.add_argument("--models", nargs="+", type=Tiny, default=list(MODELS))
    parser.add_argument("--sessions", nargs="+", choices=list(SESSIONS), default=list(SESSIONS))
    parser.add_argument("--ways", nargs="+", type=Way, default=[Way.FOUND, Way.MET])
    chosen = parser.parse_args(arguments)
    configure("error", "console")
    ways = [Way.UP, *chosen.ways]
    rows = asyncio.run(run(list(product(chosen.builds, chosen.models, chosen.sessions)), ways))
    console.print(table(rows, ways))
    keep("found_flags", rows)
    failed = any(row[way.value]["failed"] for row in rows for way in ways)
    dearer = Way.FOUND in ways and any(ratio(row, Way.FOUND) > 1 + ALIKE for row in rows)
    return int(failed or dearer)


if __name__ == "__main__":
    raise SystemExit(main())
