"""`slotkeeper bench`: runs the measurement, shows the table, and writes or compares reports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from slotkeeper.bench import bench_report
from slotkeeper.bench.bench import (
    CONTEXT_TOKENS,
    SLOTS,
    BenchError,
    Engine,
    FoundEngine,
    OwnEngine,
    Way,
    bench,
    code_of,
    troubles,
)
from slotkeeper.bench.measure import wide_console
from slotkeeper.bench.rivals import Rival, rival_of
from slotkeeper.cli.up import header_of, launch_plan
from slotkeeper.engine.child.launch import NoEngineError, find_engine
from slotkeeper.engine.child.process import EngineDiedError
from slotkeeper.settings import Settings
from slotkeeper.values import UsageError


def measure(
    *,
    model: Path | None,
    upstream: str | None,
    engine: str | None,
    slot_dir: Path | None,
    more: Sequence[str],
    rivals: Sequence[str],
    minutes: float,
    report: Path,
    run_loop: Callable[[Awaitable[Any]], Any],
) -> int:
    """Measure, print the table and write the report. Returns the exit code. Raises UsageError."""
    measured = _engine(model=model, upstream=upstream, engine=engine, slot_dir=slot_dir, more=more)
    others = _rivals(rivals, measured)
    if not report.absolute().parent.is_dir():
        raise UsageError(f"--report: there is no folder {report.absolute().parent}")
    console = wide_console()
    console.print(
        f"The same work by {len(measured.ways) + len(others)} ways, "
        f"round after round for {minutes:g} minutes. "
        "Ctrl-C ends it, and keeps the whole rounds; of the first, all ways that have ended.",
        highlight=False,
    )
    try:
        found = run_loop(bench(measured, minutes=minutes, console=console, rivals=others))
    except (BenchError, NoEngineError, EngineDiedError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    shown = found.report()
    console.print(table(shown))
    for trouble in troubles(found):
        console.print(trouble, highlight=False)
    files = bench_report.written(shown, report)
    console.print(f"Written: {', '.join(map(str, files))}", highlight=False)
    return code_of(found)


def compare(one: Path, other: Path) -> int:
    """Print what two reports say of the same ways. Raises UsageError."""
    reports = [bench_report.read(path) for path in (one, other)]
    console = wide_console()
    for path, report in zip((one, other), reports, strict=True):
        console.print(f"{path.name}: {bench_report.headline(report)}", highlight=False)
    shown = Table("way", "figure", one.name, other.name, f"{other.name} ÷ {one.name}")
    before = None
    for way, *cells in bench_report.compared(*reports):
        if before not in {None, way}:
            shown.add_section()
        shown.add_row(way if way != before else "", *cells)
        before = way
    console.print(shown)
    return 0


def table(report: bench_report.Report) -> Table:
    """Return the figures of a report for a terminal."""
    shown = Table("", *report["ways"], title=bench_report.headline(report), caption=bench_report.NOTE)
    for column in shown.columns[1:]:
        column.justify = "right"
    for row, cells in bench_report.rows(report):
        shown.add_row(row.about, *cells)
    return shown


def _engine(
    *,
    model: Path | None,
    upstream: str | None,
    engine: str | None,
    slot_dir: Path | None,
    more: Sequence[str],
) -> Engine:
    """Return the engine to measure. Raises UsageError for options that do not belong together."""
    if model is None:
        if engine or more:
            raise UsageError("--engine and arguments after -- are for --model, which starts an engine")
        return FoundEngine(base=upstream or "", folder=slot_dir)
    if slot_dir:
        raise UsageError(
            "--slot-dir is for --upstream; an engine that is started here has a folder of its own"
        )
    header_of(model)

    def advised(slots: Path, needed: Sequence[str]) -> tuple[Sequence[str], str]:
        settings = Settings(upstream=("http://127.0.0.1:1",), slot_dir=slots)
        words = [*more, *needed]
        plan = launch_plan(settings, model, engine, slots=SLOTS, context_tokens=CONTEXT_TOKENS, extra=words)
        return plan.args, plan.flags.base

    try:
        return OwnEngine(binary=find_engine(engine), words=("--model", str(model), *more), advised=advised)
    except NoEngineError as error:
        raise UsageError(f"--engine: {error}") from None


def _rivals(texts: Sequence[str], engine: Engine) -> list[Rival]:
    """Return the rivals to measure. Raises UsageError."""
    found = list(map(rival_of, texts))
    names = [*(way.value for way in Way), *(rival.value for rival in found)]
    for rival in found:
        if not rival.value or names.count(rival.value) > 1:
            raise UsageError(f"--rival: each needs a name of its own, not {rival.value!r}")
        if isinstance(engine, FoundEngine) and engine.folder is None and "slot_dir" in rival.places:
            raise UsageError(f"--rival {rival.value}: it needs --slot-dir")
    return found
