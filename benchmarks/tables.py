"""The tables of measured figures in README.md and in docs, from docs/figures.json.

Ratios are those of `slotkeeper.scheduler.requests.figures`: waited, and total. A cell with two figures has
the older build's first, then the newest build's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import fleet_tables, misses
from benchmarks.engine_profiles import PROFILES, EngineProfile
from benchmarks.figures import BUILDS
from benchmarks.mechanisms import JOINED, MECHANISMS, WORSE
from benchmarks.profile_work import ABOUT
from benchmarks.waiting_figures import COLUMNS, grouped
from slotkeeper.bench import bench_report
from slotkeeper.bench.models import Fat
from slotkeeper.bench.rivals import RECIPES
from slotkeeper.scheduler.requests.figures import Sums

FIGURES: Final = Path(__file__).parents[1] / "docs" / "figures.json"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = (
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (head, *rows)
    )
    return "\n".join((first, "|---" * len(head) + "|", *others))


def code(text: str) -> str:
    return f"`{text}`" if text else ""


MUCH_WORSE: Final = 0.1  # of a ratio to stock: mechanisms that lose less without have no row
LEAST_SAVED_SECONDS: Final = 60  # of clients, an hour: workloads with less have no row
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
AT_LEAST: Final = frozenset({"served_over_bare"})  # of the figures below; others may be at most their aims
PERFORMANCE: Final = (  # figure of `benchmarks.performance`, what it is, its aim, digits
    ("first_over_bare_ms", "small chat: first byte, ms over bare", 0.7, 2),
    ("small_over_bare", "its processor time ÷ bare", 1.7, 2),
    ("shared_ms", "small chat on a shared engine: first byte, ms more", 0.5, 2),
    ("crowd_over_nginx_ms", "twenty at once: first byte, ms over nginx", 8.0, 1),
    ("served_over_bare", "32 clients without pauses: requests a second ÷ bare", 0.65, 2),
    ("turn_ms", "turn of 30,000 tokens: ms until the engine has it, over directly", 4.0, 2),
    ("turn_processor_ms", "its processor time, ms", 8.0, 1),
    ("engine_ms", "the engine's own time for our calls, ms", 40.0, 1),
    ("event_over_bare", "an event of a stream: processor time ÷ bare", 0.6, 2),
    ("decision_fleet_ms", "a decision among 8 engines of 8 slots, p99, ms", 2.0, 2),
    ("decision_slots_ms", "among 64 slots of one", 2.0, 2),
)
CROWD: Final = (4, 50)  # conversations, and milliseconds between requests, of the cell with a target

TABLED: Final = (Fat.DENSE, Fat.HYBRID)  # fat models with a table of their own
WAITED: Final = (
    "work",
    "stock, s",
    "ours ÷ stock",
    "ours ÷ least",
    "whole answers",
    "p95, s",
    "longest stall, ms",
    "engine, GiB",
    "sidecar, MiB",
)

LEFT_OVER: Final = {
    "memory_kib": "memory, KiB, after the warm-up/at the end",
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
    """Write the older build's figure/the newer's; one figure if both are the same."""
    texts = list(dict.fromkeys(f"{ratio:.2f}" for ratio in ratios))
    return "/".join(texts)


def bench() -> str:
    """The report of `slotkeeper bench`, as users get it."""
    (report,) = measured("bench")
    return bench_report.markdown(report).rstrip("\n")


RIVAL_ROWS: Final = ("slots", "failed", "waited_ratio", "total_ratio", "sidecar_bytes", "written_bytes")


def rivals() -> str:
    """The same work by rivals, and how each is installed and started."""
    (report,) = measured("rivals")
    found = [(row.about, *cells) for row, cells in bench_report.rows(report) if row.name in RIVAL_ROWS]
    recipes = (
        f"* `{name}`: `{recipe.install}`; {recipe.note}, and the command is `{recipe.command}`"
        for name, recipe in RECIPES.items()
    )
    shown = [bench_report.headline(report), "", table(("", *report["ways"]), found)]
    return "\n".join([*recipes, "", *shown])


def clients() -> str:
    """What `make test-clients` measured; a client with a row for each build has one line."""
    lines: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(measured("clients"), key=lambda row: (row["client"].rpartition("/")[2], row["build"])):
        lines.setdefault((row["client"], row["version"], row["case"]), []).append(row)
    head = ("client", "work", "errors, ours/stock", "tokens ÷ stock", "without idle work")
    return table(head, (_client(*key, rows) for key, rows in lines.items()))


def _client(name: str, version: str, case: str, rows: Sequence[Row]) -> Sequence[str]:
    errors = (f"{row['errors_ours']}/{row['errors_stock']}" for row in rows)
    known = [row for row in rows if row["tokens_stock"]]
    ratios = _pair(row["tokens_ours"] / row["tokens_stock"] for row in known)
    waited = _pair((row["tokens_ours"] - row["idle_tokens"]) / row["tokens_stock"] for row in known)
    builds = "" if len(rows) > 1 else f", {rows[0]['build']}"
    return f"{name} {version}", case + builds, ", ".join(dict.fromkeys(errors)), ratios or "-", waited or "-"


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
    """Return what clients wait for, by the rule that undoes the change; the oracle is the client's."""
    rows = _by_build(measured("rewriting"))

    ways = ("stock", "observe", "fix")
    same: dict[tuple[str, ...], list[str]] = {}  # figures -> the rules that have them
    for session in dict.fromkeys(row[0] for row in rows):
        figures = tuple(_pair(_waited(rows[session, way, build]) for build in BUILDS) for way in ways)
        same.setdefault(figures, []).append(code(session))
    return table(("rule", *ways), ((", ".join(rules), *figures) for figures, rules in same.items()))


def recorded() -> str:
    """Return a row for each agent: the ratios of the sums of all its sessions."""
    found = measured("recorded")

    def ratio(agent: str, way: str, build: str) -> float:
        mine = [row for row in found if (_agent(row), row["way"], row["build"]) == (agent, way, build)]
        waited: int = sum(row["client"] + row["planted"] for row in mine)
        oracle: int = sum(row["oracle"] for row in mine)
        return waited / oracle

    def cells(agent: str) -> Sequence[str]:
        pairs = (_pair([ratio(agent, way, build) for build in BUILDS]) for way in ("stock", "default"))
        return agent, *pairs

    return table(("agent", "stock", "Slotkeeper"), map(cells, dict.fromkeys(map(_agent, found))))


def _agent(row: Row) -> str:
    return str(row["session"]).partition("/")[0]


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
        rows += [[shown, *(f"{world['middle'][name]:,}/{world['end'][name]:,}" for world in worlds)]]
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
    """Return a row for each engine and number of chats; figures of the three ways stand beside each other."""
    found = {(row["chats"], row["engine"], row["way"]): row for row in measured("pool")}

    def cells(chats: int, engine: str) -> Sequence[str]:
        stock, *ours = (found[chats, engine, way] for way in ("stock", "sidecar", "sidecar with a folder"))
        failed = "/".join(f"{sum(row['failed'] for row in rows)}" for rows in ([stock], ours))
        ratios = (f"{row['computed'] / row['oracle']:.2f}" for row in (stock, *ours))
        waits = "/".join(f"{row['longest_wait_seconds']:.1f}" for row in ours)
        return str(chats), engine, failed, *ratios, waits

    head = (
        "chats",
        "engine",
        "failed, stock/ours",
        "total, stock",
        "total, ours",
        "with a folder",
        "longest wait, s",
    )
    return table(head, (cells(*key) for key in dict.fromkeys(key[:2] for key in found)))


def cold_bytes() -> str:
    """Return what a turn costs in the cold folder, and how long its states take to come back."""

    def cells(row: Row) -> Sequence[str]:
        name = f"{MODELS[row['model']]}, {row['build']}" if row["build"] else row["model"] or "made up"
        ratio = f"{row['ratio']:.2f}" if row.get("ratio") else "-"
        smaller = f"1/{row['smaller']:.0f}" if row.get("smaller") else "-"
        seconds = f"{row['parts_seconds']:.2f}/{row['whole_seconds']:.2f}"
        return name, ratio, smaller, seconds, f"{row['restore_ratio']:.2f}"

    head = ("memory", "written ÷ bytes of its tokens", "÷ whole files", "back / whole file, s", "ratio")
    shown = (row for row in measured("cold_bytes") if row["build"] in {BUILDS[1], ""})
    return table(head, map(cells, shown))


def store_uploads() -> str:
    """Return what a turn uploads to a shared store, for parts of several sizes and tokens of two sizes."""
    sizes: dict[int, list[str]] = {}
    for row in measured("store_bytes"):
        if "ratio" in row:
            figures = (f"{row['ratio']:.2f}", f"{row['requests_per_turn']:.1f}")
            sizes.setdefault(row["least"], []).extend(figures)
    head = ("parts from", "4 KiB a token", "requests", "16 KiB a token", "requests")
    return table(head, ((f"{least >> 10:,} KiB", *figures) for least, figures in sizes.items()))


def profile_engines() -> str:
    """Return the simulated engines, with the reports of their speeds."""

    def cells(profile: EngineProfile) -> Sequence[str]:
        speeds = (f"{profile.rates.prefill:,g}", f"{profile.rates.decode:g}")
        return code(profile.name), profile.machine, profile.model, *speeds, _linked(profile.source)

    head = ("engine", "machine", "model", "prefill, tokens/s", "decode, tokens/s", "source")
    return table(head, map(cells, PROFILES))


def _linked(source: str) -> str:
    """Return a source as a link; as it is, if it is no issue, pull request or file of a repository."""
    if issue := re.fullmatch(r"([\w-]+/([\w.-]+))#(\d+)", source):
        return f"[{issue[2]}#{issue[3]}](https://github.com/{issue[1]}/issues/{issue[3]})"
    if file := re.fullmatch(r"([\w-]+/([\w.-]+)), (\S+)", source):
        return f"[{file[2]}](https://github.com/{file[1]}/blob/HEAD/{file[3]})"
    return source


def profile_cells() -> str:
    """Return the ratio of the sums of all times to first token, a row for each workload."""
    return _by_profile("ratio", ABOUT, ".2f")


def profile_saved() -> str:
    """Return the seconds that clients save an hour; in one line those of workloads that save little."""
    found: dict[str, list[float]] = {}
    for row in measured("profiles"):
        found.setdefault(row["work"], []).append(row["saved_an_hour"])
    large = [work for work in ABOUT if max(map(abs, found[work])) >= LEAST_SAVED_SECONDS]
    small = [work for work in ABOUT if work not in large]
    others = sorted(seconds for work in small for seconds in found[work])
    shown = _by_profile("saved_an_hour", large, ",.0f")
    return f"{shown}\n\n{', '.join(small)}: {others[0]:.0f} to {others[-1]:.0f}"


def _by_profile(figure: str, works: Iterable[str], form: str) -> str:
    found = {(row["work"], row["profile"]): row[figure] for row in measured("profiles")}
    engines = [profile.name for profile in PROFILES]
    rows = ((work, *(f"{found[work, engine]:{form}}" for engine in engines)) for work in works)
    return table(("work", *map(code, engines)), rows)


def profile_work() -> str:
    """Return what the simulated workloads are."""
    return "\n".join(f"* {name}: {about}" for name, about in ABOUT.items())


def ablation_cells() -> str:
    """Return what each mechanism saves, in a table; then those that save little, and how many tests keep."""
    rows = [row for row in measured("ablations") if JOINED not in row["name"]]
    shown = [row for row in rows if lost(row) >= MUCH_WORSE]
    slight = [code(row["name"]) for row in rows if WORSE <= lost(row) < MUCH_WORSE]
    head = ("mechanism", "what it does", "row that loses most, ÷ stock", "all rows, seconds/tokens")
    others = f"{len(rows) - len(shown) - len(slight)} others are kept for a test."
    lines = f"{WORSE:g} to {MUCH_WORSE:g}: {', '.join(slight)}. {others}"
    return f"{table(head, map(_saving, shown))}\n\n{lines}"


def lost(row: Row) -> float:
    """Return by how much the published ratio of its worst row rises without a mechanism."""
    return float(row["worst"]["left_out"] - row["worst"]["with"])


def _saving(row: Row) -> Sequence[str]:
    most = row["worst"]
    changed = f"{most['work']}, {code(most['profile'])}: {most['with']:.2f} → {most['left_out']:.2f}"
    sums = "/".join(f"{row['sums'][unit]:.3f}" for unit in ("seconds", "tokens"))
    return code(row["name"]), MECHANISMS[row["name"]].about, f"{changed} {most['unit']}", sums


def waiting_cells() -> str:
    """Return the seconds on fat models: two tables, and lines for busy loops and for the other models.

    Rounds with any pause are one row.
    """
    shown = [COLUMNS.index(name) for name in WAITED]
    quiet: dict[str, list[Sequence[str]]] = {}
    busy: dict[str, list[str]] = {}
    for row, cells in grouped({**row, "pause": None} for row in measured("waiting")):
        work, _, ratios, *_ = found = [cells[at] for at in shown]
        if row["busy"]:
            busy.setdefault(row["model"], []).append(f"{work}: {ratios}")
        else:
            quiet.setdefault(row["model"], []).append(found)
    parts = list[str]()
    for tabled in TABLED:
        parts += (f"**{tabled}**", table(WAITED, quiet.pop(tabled)))
        parts.append(f"Beside busy loops: {'; '.join(busy[tabled])}")
    for model, mine in quiet.items():
        parts.append(f"**{model}**: {'; '.join(f'{work}: {ratios}' for work, _, ratios, *_ in mine)}")
    return "\n\n".join(parts)


def report_cells() -> str:
    def cells(row: Row) -> Sequence[str]:
        return row["about"], f"{row['ours'] / row['stock']:.2f}"

    head = "workload", "Slotkeeper ÷ stock"
    return table(head, map(cells, measured("cases")))


def performance() -> str:
    (row,) = measured("performance")

    def cells(name: str, about: str, aim: float, digits: int) -> Sequence[str]:
        met = row[name] >= aim if name in AT_LEAST else row[name] <= aim
        shown = f"{row[name]:.{digits}f}"
        return about, f"**{shown}**" if met else shown, f"{aim:g}"

    return table(("", "measured", "aim"), (cells(*each) for each in PERFORMANCE if each[0] in row))


MEASURED: Final[Mapping[str, Mapping[str, Callable[[], str]]]] = {
    "README.md": {"demo": comparison, "bench": bench},
    "docs/benchmarks.md": {
        "rivals": rivals,
        "interleaved": interleaved,
        "breaks": breaks,
        "restarts": restarts,
        "crowds": crowds,
        "report-cells": report_cells,
        "profile-engines": profile_engines,
        "profile-work": profile_work,
        "profile-cells": profile_cells,
        "profile-saved": profile_saved,
        "profile-misses": lambda: misses.of_profiles(measured("profiles")),
        "ablation-cells": ablation_cells,
        "waiting-cells": waiting_cells,
        "waiting-misses": lambda: misses.of_waiting(measured("waiting")),
        "rewrites": rewrites,
        "recorded": recorded,
        "clients": clients,
        "cold-bytes": cold_bytes,
        "cold-misses": lambda: misses.of_cold_bytes(measured("cold_bytes"), MODELS),
        "store-uploads": store_uploads,
    },
    "docs/performance.md": {"performance": performance},
    "docs/models.md": {"swaps": swaps},
    "docs/kv-pool.md": {"pool": pool},
    "docs/reliability.md": {"soak": soak},
    "docs/scaling.md": fleet_tables.of(measured, table),
}
