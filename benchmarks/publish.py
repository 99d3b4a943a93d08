"""Take the figures of the documents from the last runs: `python -m benchmarks.publish`.

Reads artifacts/benchmarks/*.json, writes docs/figures.json, and fills from it the marked blocks of the
documents in `benchmarks.tables.MEASURED`. So no figure there is written by hand. A benchmark that was not run
here keeps its earlier figures, as do builds of the engine that it did not measure.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import orjson

from benchmarks.figures import FOLDER, console

FIGURES: Final = Path("docs") / "figures.json"
GENERATE: Final = Path("docs") / "generate.py"
TOKENS: Final = ("session", "build", "way", "oracle", "client", "planted", "idle")
KEPT: Final = ("version", "at", "cores")  # facts of a run that are kept beside its figures

Row = dict[str, Any]
Pick = Callable[[Any], Any]


def _fields(*names: str) -> Pick:
    return lambda rows: [{name: row[name] for name in names if name in row} for row in rows]


PICKED: Final[Mapping[str, Pick]] = MappingProxyType(
    {
        "demo": lambda figures: figures,
        "bench": lambda figures: figures,
        "rivals": lambda figures: figures,  # of `bench --rival ... --report artifacts/benchmarks/rivals`
        "scenarios": lambda figures: figures,
        "boundaries": _fields(*TOKENS, "model", "each"),
        "clients": lambda figures: figures,
        "cases": _fields("case", "about", "stock", "ours", "limit"),
        "rewriting": _fields(*TOKENS),
        "recorded": _fields(*TOKENS),
        "restart": lambda figures: figures["computed"],
        "crowd": lambda figures: figures["rows"],
        "swaps": lambda figures: figures,
        "profiles": lambda figures: figures,
        "ablations": lambda figures: figures,
        "waiting": lambda figures: figures,
        "pool": lambda figures: figures,
        "soak": lambda figures: figures["worlds"],
        "scaling": lambda figures: figures,
        "cold_bytes": lambda figures: figures,
        "store_bytes": lambda figures: figures,
        "performance": lambda figures: figures,
        "fleet-smg-shared": lambda figures: figures,
        "fleet-haproxy-local": lambda figures: figures,
        "fleet-haproxy-shared": lambda figures: figures,
    }
)


def collect(folder: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return benchmark -> figures of its last run, as far as the documents show them."""
    found = dict(before)
    for name, pick in PICKED.items():
        path = folder / f"{name}.json"
        if path.exists():
            document = _run(orjson.loads(path.read_bytes()))
            rows = _with_other_builds(pick(document["figures"]), before.get(name, {}).get("figures", ()))
            found[name] = {key: document[key] for key in KEPT} | {"figures": rows}
    return found


def _run(document: Row) -> Row:
    """Return a run; a report of `slotkeeper bench --report artifacts/benchmarks/bench` is one too."""
    if "ways" not in document:
        return document
    facts = {"version": document["slotkeeper"], "at": document["date"], "cores": document["machine"]["cores"]}
    return {**facts, "figures": [document]}


def _with_other_builds(rows: list[Row], before: Sequence[Row]) -> list[Row]:
    """Return the rows of a run, and before them those of builds of the engine that it did not measure.

    b10434's program does not run on every machine.
    """
    builds = {row.get("build") for row in rows}
    others = () if None in builds else (row for row in before if row.get("build") not in builds)
    return [*others, *rows]


def in_lines(runs: Mapping[str, Any]) -> str:
    """Return JSON with one row per line, so that a diff shows what a new run changed."""
    blocks = []
    for name, run in runs.items():
        head = "".join(f"  {_json(key)}: {_json(run[key])},\n" for key in KEPT)
        rows = ",\n".join(f"    {_json(row)}" for row in run["figures"])
        blocks.append(f'{_json(name)}: {{\n{head}  "figures": [\n{rows}\n  ]\n}}')
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=__doc__)
    parser.parse_args(arguments)
    before = orjson.loads(FIGURES.read_bytes()) if FIGURES.exists() else {}
    found = collect(FOLDER, before)
    FIGURES.write_text(in_lines(found), "utf-8")
    code: int = runpy.run_path(str(GENERATE))["main"]([])
    for name, run in found.items():
        console.print(f"{name}: release {run['version']}, {run['at']}", highlight=False)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
