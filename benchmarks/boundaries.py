"""Where prompts diverge: what stock and the sidecar compute when a beginning, a middle or a document returns.

`python -m benchmarks.boundaries [--builds b10434 ...] [--models tiny-hybrid ...] [--sessions document ...]
[--ways stock up ...] [--write-traces DIR]`. Each case is a few seconds on a fresh engine. The ways are in
`benchmarks.ways`. `--write-traces` also writes the requests of each session to a trace; to replay it, use
`slotkeeper replay FILE --base URL --against URL --max-tokens 400` (with fewer tokens, replies end too early).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import orjson
from rich.table import Table

from benchmarks.figures import BUILDS, console, keep
from benchmarks.sessions import AGENTS, SESSIONS, agent
from benchmarks.ways import Scene, Way, opened
from slotkeeper.bench import lab
from slotkeeper.bench.measure import Oracle, Sample
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import Shot, Target, play
from slotkeeper.engine.client import EngineClient
from slotkeeper.observe.log import configure
from slotkeeper.scheduler.prompts.tokens import Tokens

AT_ONCE: Final = "agents-at-once"  # the one case that is not a script
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A session, and its requests that count."""

    session: str
    # requests at its beginning that do not count: nothing returns there, or the return cannot be known
    skipped: int = 1
    label: str = ""  # suffix of the labels of the requests that count
    args: tuple[str, ...] = ()  # flags of the engine


CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        "clock-last": Case(session="clock-last", skipped=2),
        "edits": Case(session="edits"),
        "many-turns": Case(session="many-turns"),
        "tool-loop": Case(session="tool-loop"),
        "document": Case(session="document", skipped=2),
        "document-ub2048": Case(session="document", skipped=2, args=("-ub", "2048", "-b", "2048")),
        "long-document": Case(session="long-document", skipped=0),
        "long-document-ub2048": Case(session="long-document", skipped=0, args=("-ub", "2048", "-b", "2048")),
        "agents": Case(session="agents", label="call"),  # the first question of each new agent
        AT_ONCE: Case(session=AT_ONCE, skipped=0, label="call"),
    }
)


@dataclass(slots=True, kw_only=True)
class Record:
    """The requests of one session: when each was sent, its cost, and the sidecar's own prefills by then."""

    scene: Scene
    began: float = field(default_factory=time.perf_counter)
    shots: list[tuple[float, Shot]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    spent: list[lab.Spent] = field(default_factory=list)

    def sent(self, shot: Shot) -> None:
        self.shots.append((time.perf_counter() - self.began, shot))

    def seen(self, sample: Sample) -> None:
        self.samples.append(sample)
        self.spent.append(self.scene.spent())


async def measure(build: str, model: Tiny, name: str, way: Way, traces: Path | None) -> Row:
    """Run one session in one way on a fresh engine."""
    case = CASES[name]
    async with opened(way, build, model, *case.args) as scene, Target(scene.base) as target:
        record = Record(scene=scene)
        began = await lab.evaluated(scene.engine.base)
        if name == AT_ONCE:
            await _at_once(record, target)
        else:
            await play(
                SESSIONS[case.session](),
                target,
                session=case.session,
                seen=record.seen,
                sent=record.sent,
                before=scene.before,
            )
        await scene.pause()
        figures = _figures(case, record, scene.spent())
        figures["engine"] = await lab.evaluated(scene.engine.base) - began
    if traces and name != AT_ONCE:  # a replay sends one request at a time
        await asyncio.to_thread(write_trace, traces / f"{build}-{model}-{name}.jsonl", record.shots)
    return {"build": build, "model": model.value, "session": name, "way": way.value, **figures}


async def _at_once(record: Record, target: Target) -> None:
    """Run all agents from the same moment; each continues as soon as it has an answer."""
    async with asyncio.TaskGroup() as group:
        for number in range(AGENTS):
            script = agent(number)
            asked = play(script, target, session=AT_ONCE, seen=record.seen, sent=record.sent)
            group.create_task(asked)
    # Nothing had been computed when they were sent, so the sidecar reports all of each prompt as needed. The
    # real least is smaller: one of them computes the shared prefix.
    first = [shot for _, shot in record.shots if shot.label.endswith("call")]
    least = dict(zip((shot.label for shot in first), await _least(record.scene.base, first), strict=True))
    record.samples[:] = [replace(s, oracle=least.get(s.label, s.oracle)) for s in record.samples]


async def _least(base: str, shots: Sequence[Shot]) -> list[int]:
    """Return the tokens that each request must compute if they come one after the other."""
    oracle, found = Oracle(), []
    async with EngineClient(base) as engine:
        for shot in shots:
            text = await engine.apply_template(shot.body)
            prompt = Tokens(await engine.tokenize(text, add_special=True, parse_special=True))
            found.append(oracle.least(prompt))
            oracle.saw(prompt)
    return found


def _figures(case: Case, record: Record, end: lab.Spent) -> Row:
    """Return the tokens of the requests that count.

    Idle work counts from the answer before the first of them.
    """
    mine = [at for at, sample in enumerate(record.samples) if sample.session == case.session]
    places = [at for at in mine if record.samples[at].label.endswith(case.label)][case.skipped :]
    samples = [record.samples[at] for at in places]
    before = [lab.Spent(), *record.spent]
    client = sum(sample.usage.evaluated for sample in samples if sample.usage)
    planted = sum(before[at + 1].plant - before[at].plant for at in places)
    oracle = sum(sample.oracle or 0 for sample in samples)
    parts = len(samples)
    waits = [1000 * s.first_token_seconds for s in samples if s.first_token_seconds is not None]
    return {
        "oracle": oracle,
        "client": client,
        "planted": planted,
        "idle": end.idle - before[places[0]].idle,
        "ratio": round((client + planted) / oracle, 4),
        "each": round((client + planted) / parts, 1),
        "over_each": round((client + planted - oracle) / parts, 1),
        "first_token_ms": round(statistics.median(waits), 1) if waits else None,
        "load": round(os.getloadavg()[0], 1),  # other work on the machine makes times worthless
        "failed": sum(not sample.counted or sample.oracle is None for sample in record.samples),
    }


def write_trace(path: Path, shots: Sequence[tuple[float, Shot]]) -> None:
    """Write a file for `slotkeeper replay`: one request a line, with the seconds since the session began."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        {
            "t": round(at, 3),
            "client": "boundaries",
            "session": shot.session,
            "path": shot.path,
            "headers": dict(shot.headers),
            "body": shot.body,
            "kind": shot.label,
        }
        for at, shot in shots
    )
    path.write_bytes(b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines))


async def run(chosen: argparse.Namespace, rows: list[Row]) -> None:
    """Add a row for each way of each case; the requests of the first way of a case are kept."""
    for build, model, name in product(chosen.builds, chosen.models, chosen.sessions):
        stock: Row | None = None
        for way in chosen.ways:
            traces = chosen.write_traces if way is chosen.ways[0] else None
            row = await measure(build, model, name, way, traces)
            stock = row if way is Way.STOCK else stock
            row["first_token_ratio"] = _ratio(row, stock)
            rows.append(row)
            console.print(f"[dim]{' '.join(map(str, row.values()))}[/dim]", highlight=False)


def _ratio(row: Row, stock: Row | None) -> float | None:
    """Return the ratio of the medians of the time to first token."""
    if not stock or not stock["first_token_ms"] or row["first_token_ms"] is None:
        return None
    return float(round(row["first_token_ms"] / stock["first_token_ms"], 2))


def table(rows: Sequence[Row], build: str) -> Table:
    columns = {
        "oracle": "oracle",
        "client": "client",
        "planted": "plant",
        "idle": "idle",
        "engine": "engine",
        "ratio": "ratio",
        "each": "each",
        "over_each": "over\noracle",
        "first_token_ratio": "first token\n/ stock",
    }
    shown = Table(
        title=f"{build}: prompt tokens computed, and by whom",
        caption="ratio: (client + plant) / oracle; each: client + plant for each request, question or agent; "
        "engine: all that it evaluated in the session, by its own counter",
    )
    for name in ("model", "session", "way"):
        shown.add_column(name, no_wrap=True)
    for title in columns.values():
        shown.add_column(title, justify="right")
    for row in rows:
        if row["build"] == build:
            failed = " !" if row["failed"] else ""
            cells = ("" if row[name] is None else str(row[name]) for name in columns)
            last = row["way"] == Way.FOLDER
            shown.add_row(row["model"], row["session"] + failed, row["way"], *cells, end_section=last)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.boundaries", description=__doc__)
    parser.add_argument("--builds", nargs="+", default=list(BUILDS))
    parser.add_argument("--models", nargs="+", type=Tiny, default=list(Tiny))
    parser.add_argument("--sessions", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ways", nargs="+", type=Way, default=list(Way), help=", ".join(Way))
    parser.add_argument("--write-traces", type=Path, metavar="DIR", help="keep each session's requests there")
    parser.add_argument(
        "--name", default="boundaries", help="name of the file of figures, for a part of the table"
    )
    chosen = parser.parse_args(arguments)
    configure("error", "console")
    rows: list[Row] = []
    try:
        asyncio.run(run(chosen, rows))
    finally:  # what was measured until then is not lost
        for build in chosen.builds:
            console.print(table(rows, build))
        keep(chosen.name, rows)
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
