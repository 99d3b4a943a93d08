"""The tables of measured figures in README.md and in docs, from docs/figures.json.

Ratios are those of `slotkeeper.scheduler.figures`: waited, and total. A cell with two figures has the older
build's first, then the newest build's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import fleet_tables
from benchmarks.engine_profiles import PROFILES, EngineProfile
from benchmarks.figures import BUILDS
from benchmarks.profile_work import ABOUT
from benchmarks.waiting_figures import COLUMNS, grouped
from benchmarks.waiting_work import WORK as WORKLOADS
from benchmarks.waiting_work import append
from slotkeeper.scheduler.figures import Sums

FIGURES: Final = Path(__file__).parents[1] / "docs" / "figures.json"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


Row = dict[str, Any]
MODELS: Final = {
    "tiny-dense": "dense",
    "tiny-swa": "sliding window",
    "tiny-hybrid": "hybrid",
    "tiny-recurrent": "recurrent",
    "tiny-hybrid-mtp": "hybrid with MTP",
}
WORK: Final = {
    "clock-last": "a clock at the end of the system prompt, from the third turn on",
    "edits": "edits, branches, and back",
    "many-turns": "twelve turns, an early edit, and back",
    "tool-loop": "a tool loop whose calls come back rendered in another form",
    "document": "further questions about one document",
    "document-ub2048": "the same with `-ub 2048`",
    "long-document-ub2048": "eleven questions about a document of 14,000 tokens, `-ub 2048`",
    "agents-at-once": "five agents with one prompt of 20,000 tokens, at once",
}
CROWD: Final = (4, 50)  # conversations, and milliseconds between requests, of the cell with a target
REWRITES: Final = {
    "tool_order": "the order of its tools",
    "schema_keys": "the order of keys in their schemas",
    "date": "the date in its system prompt",
    "clock": "a clock there, at each request",
    "git_status": "`git status` there",
    "memory_file": "its AGENTS.md",
}

LEFT_OVER: Final = {
    "memory_kib": "memory, KiB, after the warm-up and at the end",
    "descriptors": "descriptors",
    "sockets": "sockets",
    "tasks": "tasks",
}


def measured(benchmark: str) -> Any:
    return json.loads(FIGURES.read_text("utf-8"))[benchmark]["figures"]


def _by_build(rows: Iterable[Row]) -> dict[tuple[str, str, str], Row]:
    """Return (session, way, build) -> its row."""
    return {(row["session"], row["way"], row["build"]): row for row in rows}


def _sums(row: Row) -> Sums:
    return Sums(client=row["client"], plant=row["planted"], idle=row["idle"], oracle=row["oracle"])


def _waited(row: Row) -> float:
    return _sums(row).waited or 0.0


def _total(row: Row) -> float:
    return _sums(row).total or 0.0


def _pair(ratios: Iterable[float]) -> str:
    """Write older / newer build; one figure if both are the same."""
    texts = list(dict.fromkeys(f"{ratio:.2f}" for ratio in ratios))
    return " / ".join(texts)


def interleaved() -> str:
    mine = (row for row in measured("scenarios") if row["session"] == "interleaved")
    rows = {(row["build"], row["model"]): row for row in mine}

    def cells(model: str) -> Sequence[str]:
        mine = [rows[build, model] for build in BUILDS]
        stock = _pair([_waited(row["direct"]) for row in mine])
        waited, total = (_pair([of(row["slotkeeper"]) for row in mine]) for of in (_waited, _total))
        return MODELS[model], stock, f"**{waited}**", total

    return table(("memory of the model", "stock", "waited", "total"), map(cells, MODELS))


def breaks() -> str:
    rows = _by_build(row for row in measured("boundaries") if row["model"] == "tiny-hybrid")

    def cells(session: str) -> Sequence[str]:
        stock, ours, rested = (
            [rows[session, way, build] for build in BUILDS] for way in ("stock", "up", "up-rested")
        )
        first = (_pair([_waited(row) for row in way]) for way in (stock, ours, rested))
        return WORK[session], *first, _pair([_total(row) for row in rested])

    head = ("work", "stock", "waited", "waited, with pauses", "total, with pauses")
    return table(head, map(cells, WORK))


def rewrites() -> str:
    rows = _by_build(measured("rewriting"))

    def cells(session: str) -> Sequence[str]:
        ways = ("stock", "observe", "fix")
        figures = (_pair([_waited(rows[session, way, build]) for build in BUILDS]) for way in ways)
        return REWRITES[session], *figures

    head = ("what the agent changes at its second task", "stock", "observe", "fix")
    return table(head, map(cells, REWRITES))


def restarts() -> str:
    rows = measured("restart")

    def cells(model: str) -> Sequence[str]:
        mine = [row for row in rows if row["model"] == model]
        worst = {
            way: _pair([max(_waited(r[way]) for r in mine if r["build"] == build) for build in BUILDS])
            for way in ("stock", "sidecar")
        }
        return MODELS[model], worst["stock"], f"**{worst['sidecar']}**"

    return table(("memory of the model", "stock", "waited"), map(cells, MODELS))


def crowds() -> str:
    """Return the worst of all runs, quiet and loaded, with and without a kill -9."""
    cells = [cell for cell in measured("crowd") if (cell["conversations"], cell["gap_ms"]) == CROWD]

    def worst(model: str, ratio: str) -> Iterator[float]:
        for build in BUILDS:
            mine = (cell for cell in cells if (cell["build"], cell["model"]) == (build, model))
            yield max(run[ratio] for cell in mine for run in cell["runs"])

    def row(model: str) -> Sequence[str]:
        waited, total = (_pair(list(worst(model, ratio))) for ratio in ("waited", "total"))
        return MODELS[model], f"**{waited}**", total

    return table(("memory of the model", "waited", "total"), map(row, MODELS))


def crowd_cells() -> str:
    def row(cell: Row) -> Sequence[str]:
        ratios = (max(run[name] for run in cell["runs"]) for name in ("waited", "total"))
        shape = (str(cell[name]) for name in ("conversations", "gap_ms"))
        marks = ("yes" if cell["killed"] else "", "yes" if cell["busy"] else "", str(len(cell["runs"])))
        return cell["build"], MODELS[cell["model"]], *shape, *marks, *(f"{ratio:.3f}" for ratio in ratios)

    head = ("build", "memory", "conversations", "gap, ms", "kill -9", "busy loops", "runs", "waited", "total")
    return table(head, map(row, measured("crowd")))


def sessions(build: str) -> Callable[[], str]:
    """Return stock -> sidecar (oracle), in tokens that a client waited for."""

    def cell(row: Row) -> str:
        direct, ours = row["direct"], row["slotkeeper"]
        idle = f" + {ours['idle']}" if ours["idle"] else ""
        return f"{direct['client']} → {ours['client'] + ours['planted']}{idle} ({ours['oracle']})"

    def write() -> str:
        rows = {(r["session"], r["model"]): r for r in measured("scenarios") if r["build"] == build}
        names = dict.fromkeys(session for session, _ in rows)
        lines = ((name, *(cell(rows[name, model]) for model in MODELS)) for name in names)
        return table(("session", *MODELS), lines)

    return write


def restart_cells() -> str:
    def cell(row: Row) -> str:
        idle = f" + {row['idle']}" if row["idle"] else ""
        return f"{row['client'] + row['planted']}{idle} ({row['oracle']})"

    def row(found: Row) -> Sequence[str]:
        ways = (cell(found[way]) for way in ("stock", "sidecar"))
        return found["build"], MODELS[found["model"]], found["change"], *ways

    return table(("build", "memory", "how it goes on", "stock", "Slotkeeper"), map(row, measured("restart")))


def rewrite_cells() -> str:
    rows = _by_build(measured("rewriting"))

    def cells(session: str) -> Sequence[str]:
        found = (
            _pair([of(rows[session, way, build]) for build in BUILDS])
            for way in ("stock", "observe", "fix")
            for of in ((_waited,) if way == "stock" else (_waited, _total))
        )
        return code(session), f"{rows[session, 'stock', BUILDS[1]]['oracle']:,}", *found

    head = ("rule", "oracle", "stock", "observe: waited", "total", "fix: waited", "total")
    return table(head, map(cells, dict.fromkeys(session for session, _, _ in rows)))


def recorded_cells() -> str:
    """Return older / newest build; the ratio of stock, then both ratios of the sidecar with its defaults."""
    rows = _by_build(measured("recorded"))

    def cells(session: str) -> Sequence[str]:
        stock, ours = ([rows[session, way, build] for build in BUILDS] for way in ("stock", "default"))
        evaluated = (
            " / ".join(f"{row['client'] + row['planted']:,}" for row in way) for way in (stock, ours)
        )
        ratios = (map(_waited, stock), map(_waited, ours), map(_total, ours))
        return session, f"{stock[-1]['oracle']:,}", *evaluated, *map(_pair, ratios)

    head = ("session", "oracle", "stock", "Slotkeeper", "stock", "waited", "total")
    return table(head, map(cells, dict.fromkeys(session for session, _, _ in rows)))


def part_cells() -> str:
    """Return cells of the hybrid model; waited + idle (ratio waited)."""
    rows = {
        (r["build"], r["session"], r["way"]): r for r in measured("boundaries") if r["model"] == "tiny-hybrid"
    }

    def cell(row: Row) -> str:
        idle = f" + {row['idle']}" if row["idle"] else ""
        return f"{row['client'] + row['planted']}{idle} ({_waited(row):.2f})"

    def lines() -> Iterator[Sequence[str]]:
        for build, session in dict.fromkeys((build, session) for build, session, _ in rows):
            ways = [rows[build, session, way] for way in ("stock", "up", "up-rested")]
            yield build, session, str(ways[0]["oracle"]), *map(cell, ways)

    return table(("build", "work", "oracle", "stock", "`up`", "`up`, with pauses"), lines())


def soak() -> str:
    """Return the outcomes of the last soak, and the sidecar's figures after its warm-up and at its end."""
    worlds: Sequence[Row] = measured("soak")
    rows = [["minutes", *(f"{world['seconds'] / 60:g}" for world in worlds)]]
    rows += [["requests", *(f"{world['requests']:,}" for world in worlds)]]
    for group, prefix in (("verdicts", "… "), ("faults", "")):
        rows += [
            [prefix + name, *(f"{world[group][name]:,}" for world in worlds)] for name in worlds[0][group]
        ]
    rows += [["restored from files", *(f"{world['restored']:,}" for world in worlds)]]
    for name, shown in LEFT_OVER.items():
        rows += [[shown, *(f"{world['middle'][name]:,}, {world['end'][name]:,}" for world in worlds)]]
    return table(["", *(world["world"] for world in worlds)], rows)


def comparison() -> str:
    """Return the output of `slotkeeper demo`."""
    (found,) = measured("demo")
    return "```\n" + str(found["printed"]).rstrip() + "\n```"


def swaps() -> str:
    def cells(row: Row) -> Sequence[str]:
        def told(way: str) -> Sequence[str]:
            found = row[way]
            return f"{found['computed'] / row['oracle']:.2f}", f"{found['errors']}"

        (stock, failed), (ours, ours_failed) = told("stock"), told("sidecar")
        return row["agents"], stock, failed, f"**{ours}**", ours_failed

    head = ("agents", "stock", "requests that failed", "Slotkeeper, total / oracle", "requests that failed")
    return table(head, map(cells, measured("swaps")))


def pool() -> str:
    def cells(row: Row) -> Sequence[str]:
        ratio, wait = f"{row['computed'] / row['oracle']:.2f}", f"{row['longest_wait_seconds']:.1f} s"
        ours = row["way"] != "stock"
        failed = f"{row['failed']} of {row['requests']}"
        return str(row["chats"]), row["engine"], row["way"], failed, ratio, wait if ours else "-"

    head = ("chats", "engine", "way", "requests that failed", "total / oracle", "longest wait")
    return table(head, map(cells, measured("pool")))


def cold_bytes() -> str:
    """Return what a turn costs in the cold folder, and how long its states take to come back."""

    def cells(row: Row) -> Sequence[str]:
        name = f"{MODELS[row['model']]}, {row['build']}" if row["build"] else row["model"] or "made up"
        sizes = [f"{row[key]:,.0f}" if row.get(key) else "-" for key in ("token_bytes", "per_token")]
        ratio = f"**{row['ratio']:.2f}**" if row.get("ratio") else "-"
        states = f"{row['states_per_turn'] / 1000:,.0f}" if row.get("states_per_turn") else "-"
        smaller = f"1/{row['smaller']:.0f}" if row.get("smaller") else "-"
        times = [f"{row[key]:.3f}" for key in ("parts_seconds", "whole_seconds")]
        back = [f"{row[key]:.2f}" for key in ("restore_ratio", "cpu_ratio")]
        return name, *sizes, ratio, states, smaller, *times, *back

    head = (
        *("memory", "bytes of a token", "written for each new one", "÷ its own", "states a turn, kB"),
        *("all ÷ whole files", "back, s", "whole file, s", "÷", "processor time ÷"),
    )
    return table(head, map(cells, measured("cold_bytes")))


def store_uploads() -> str:
    """Return what a turn uploads to a shared store, for parts of several sizes."""

    def cells(row: Row) -> Sequence[str]:
        sizes = (f"{row[key]:,.0f}" for key in ("token_bytes", "per_token"))
        least, requests = f"{row['least'] >> 10:,} KiB", f"{row['requests_per_turn']:.1f}"
        return least, *sizes, f"**{row['ratio']:.2f}**", f"1/{row['smaller']:.0f}", requests

    head = (
        "parts from",
        "bytes of a token",
        "uploaded for each new one",
        "÷ its own",
        "÷ whole files",
        "requests a turn",
    )
    return table(head, (cells(row) for row in measured("store_bytes") if "ratio" in row))


def store_fetches() -> str:
    """Return how long a state of a shared store takes to come back."""

    def cells(row: Row) -> Sequence[str]:
        times = [row[way + near] for near in ("", "_near") for way in ("parts", "whole")]
        far, near = times[0] / times[1], times[2] / times[3]
        shown = [f"{seconds:.2f}" for seconds in times]
        return (
            f"{row['least'] >> 10:,} KiB",
            str(row["requests"]),
            *shown[:2],
            f"{far:.2f}",
            *shown[2:],
            f"{near:.2f}",
        )

    head = (
        "parts from",
        "requests",
        "in parts, s",
        "one object, s",
        "÷",
        "without the line, s",
        "one object, s",
        "÷",
    )
    return table(head, (cells(row) for row in measured("store_bytes") if "gib" in row))


def profile_engines() -> str:
    """Return the simulated engines and the reports of their speeds."""

    def cells(profile: EngineProfile) -> Sequence[str]:
        rates = profile.rates
        speeds = f"{rates.prefill:,g}", f"{rates.decode:g}"
        sizes = f"{rates.token_bytes // 1024} KiB", f"{rates.checkpoint_bytes / 2**20:.1f} MiB"
        return code(profile.name), profile.machine, profile.model, *speeds, *sizes, profile.source

    head = ("engine", "machine", "model", "prefill, tokens/s", "decode", "a token", "a checkpoint", "source")
    return table(head, map(cells, PROFILES))


def profile_work() -> str:
    """Return what the simulated workloads are."""
    return table(("work", "clients"), ((name, about) for name, about in ABOUT.items()))


def profile_cells() -> str:
    """Return a row for each engine and workload, in seconds."""

    def cells(row: Row) -> Sequence[str]:
        seconds = (f"{row[name]:,.1f}" for name in ("stock", "ours"))
        ratios = (f"{row[name]:.2f}" for name in ("ratio", "p95_ratio", "stall_ratio"))
        return code(row["profile"]), row["work"], *seconds, *ratios, f"{row['saved_an_hour']:,.0f}"

    head = ("engine", "work", "stock, s", "Slotkeeper, s", "ratio", "p95", "longest gap", "saved an hour, s")
    return table(head, map(cells, measured("profiles")))


def waiting_work() -> str:
    """Return what the workloads on fat models are."""
    about = {"append": append(1, 0.0).about, **{name: work.about for name, work in WORKLOADS.items()}}
    return table(("work", "clients"), about.items())


def waiting_cells() -> str:
    """Return the seconds on fat models, the worst of all rounds."""
    rows = ((row["model"], str(row["busy"] or ""), *cells) for row, cells in grouped(measured("waiting")))
    return table(("model", "busy loops", *COLUMNS), rows)


def report_cells() -> str:
    def cells(row: Row) -> Sequence[str]:
        ratio = f"{row['ours'] / row['stock']:.2f}"
        return row["about"], str(row["stock"]), str(row["ours"]), ratio, f"{row['limit']:.2f}"

    head = "workload", "stock", "slotkeeper", "ratio", "limit"
    return table(head, map(cells, measured("cases")))


MEASURED: Final[Mapping[str, Mapping[str, Callable[[], str]]]] = {
    "README.md": {
        "demo": comparison,
        "interleaved": interleaved,
        "breaks": breaks,
        "restarts": restarts,
        "crowds": crowds,
        "rewrites": rewrites,
    },
    "docs/benchmarks.md": {
        "sessions-older": sessions(BUILDS[0]),
        "sessions-newest": sessions(BUILDS[1]),
        "parts": part_cells,
        "report-cells": report_cells,
        "profile-engines": profile_engines,
        "profile-work": profile_work,
        "profile-cells": profile_cells,
        "waiting-work": waiting_work,
        "waiting-cells": waiting_cells,
        "restart-cells": restart_cells,
        "rewrite-cells": rewrite_cells,
        "recorded-cells": recorded_cells,
        "cold-bytes": cold_bytes,
        "store-uploads": store_uploads,
        "store-fetches": store_fetches,
        "crowd-cells": crowd_cells,
    },
    "docs/models.md": {"swaps": swaps},
    "docs/kv-pool.md": {"pool": pool},
    "docs/reliability.md": {"soak": soak},
    "docs/scaling.md": fleet_tables.of(measured, table),
}
