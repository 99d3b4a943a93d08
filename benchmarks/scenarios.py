"""Tokens: every scripted session on every tiny model and both builds, directly and through the sidecar.

Through the sidecar, tokens planted while the client waited count as waited.

`python -m benchmarks.scenarios [--builds b10434 ...] [--models tiny-hybrid ...] [--sessions edits ...]`
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table

from benchmarks.figures import BUILDS, console, keep
from benchmarks.sessions import SESSIONS
from slotkeeper.bench import lab
from slotkeeper.bench.measure import Totals, later, totals
from slotkeeper.bench.models import Tiny, build
from slotkeeper.bench.target import Target, play
from slotkeeper.engine.child.launch import find_engine
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.observe.log import configure

Case = tuple[str, Tiny, str]  # build, model, session
Row = dict[str, Any]


async def measure(build_name: str, model: Tiny, session: str, slots: int, *, sidecar: bool) -> Row:
    """Run one session on a fresh engine. Its first request does not count."""
    binary = find_engine(build_name)
    with tempfile.TemporaryDirectory(prefix="slotkeeper-") as name:
        folder = Path(name)
        flags = lab.stock_flags(binary, build(model), folder, slots=slots)
        async with lab.engine(binary, flags, folder / "engine.log") as engine:
            if not sidecar:
                return await _played(engine.base, session)
            async with lab.sidecar(engine.base, EngineFlags.parse(flags)) as url:
                return await _played(url, session)


async def _played(base: str, session: str) -> Row:
    async with Target(base) as target:
        found = totals(later(await play(SESSIONS[session](), target, session=session)))
    return tokens(found) | {"failed": found.failed}


def tokens(found: Totals) -> Row:
    """Return the tokens that README.md shows, by the engine's count."""
    sums = found.sums
    return {"oracle": sums.oracle, "client": sums.client, "planted": sums.plant, "idle": sums.idle}


async def run(cases: Sequence[Case], slots: int) -> list[Row]:
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("sessions", total=2 * len(cases))
        for build_name, model, session in cases:
            row: Row = {
                "build": build_name,
                "model": model.value,
                "session": session,
                "slots": slots,
            }
            for way in ("direct", "slotkeeper"):
                row[way] = await measure(build_name, model, session, slots, sidecar=way == "slotkeeper")
                progress.advance(task)
            rows.append(row)
    return rows


def table(rows: Sequence[Row], build_name: str) -> Table:
    """Return sessions down, models across; cells: computed while clients waited, stock → sidecar (oracle)."""
    mine = [row for row in rows if row["build"] == build_name]
    models = list(dict.fromkeys(row["model"] for row in mine))
    shown = Table(
        "session", *models, title=f"{build_name}: prompt tokens computed, direct → slotkeeper (oracle)"
    )
    for session in dict.fromkeys(row["session"] for row in mine):
        cells = {row["model"]: row for row in mine if row["session"] == session}
        shown.add_row(session, *(_cell(cells[model]) for model in models))
    return shown


def _cell(row: Row) -> str:
    direct, ours = row["direct"], row["slotkeeper"]
    failed = " !" if direct["failed"] or ours["failed"] else ""
    waited = ours["client"] + ours["planted"]
    return f"{direct['client']} → {waited} ({ours['oracle']}){failed}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenarios", description=__doc__)
    parser.add_argument("--builds", nargs="+", default=list(BUILDS))
    parser.add_argument("--models", nargs="+", type=Tiny, default=list(Tiny))
    parser.add_argument("--sessions", nargs="+", choices=list(SESSIONS), default=list(SESSIONS))
    parser.add_argument("--slots", type=int, default=2)
    chosen = parser.parse_args(arguments)
    configure("error", "console")
    cases = list(product(chosen.builds, chosen.models, chosen.sessions))
    rows = asyncio.run(run(cases, chosen.slots))
    for build_name in chosen.builds:
        console.print(table(rows, build_name))
    keep("scenarios", rows)
    return int(any(row[way]["failed"] for row in rows for way in ("direct", "slotkeeper")))


if __name__ == "__main__":
    raise SystemExit(main())
