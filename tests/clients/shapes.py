"""What requests each client sends, without their texts: `PYTHONPATH=proxy:tests:. python -m clients.shapes`.

It writes shapes.json anew, for the clients that are named, else for all. A client takes two turns, or a
library makes all its calls, through a sidecar that records (docs/recording.md). Kept are paths, the names of
headers that a recording has, keys and types of bodies, the order of roles, and what changed between two
requests of a conversation: no value, and of the schemas of tools nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from builds import NEWER
from clients.agents import AGENTS_BY_NAME, acting, takes_turn
from clients.conftest import LIBRARIES, Leg, line, our_leg, ran, version
from slotkeeper.bench.replay import Entry, merged, read

SHAPES: Final = Path(__file__).with_name("shapes.json")
TASKS: Final = ("Say hello.", "Say it in other words.")
SCHEMAS: Final = frozenset({"parameters", "input_schema", "schema"})  # written by people, of any form
HISTORIES: Final = ("messages", "input")
TYPES: Final = {str: "text", bool: "boolean", int: "number", float: "number", type(None): "null"}

Shape = dict[str, Any]


def of(entries: Sequence[Entry]) -> Shape:
    """Return the shape of a client's requests, independent of their order and number."""
    found: dict[str, tuple[Shape, set[str]]] = {}
    for entry in entries:
        shape = {"path": entry.path, "headers": " ".join(sorted(entry.headers)), "body": _types(entry.body)}
        found.setdefault(json.dumps(shape), (shape, set()))[1].add(_roles(entry))
    requests = [{**shape, "roles": sorted(roles)} for _, (shape, roles) in sorted(found.items())]
    pairs = combinations(entries, 2)
    changed = {what for one, other in pairs if _continues(one, other) for what in _changes(one, other)}
    return {"requests": requests, "changes": sorted(changed)}


def _types(body: Any) -> dict[str, str]:
    kinds: dict[str, set[str]] = {}
    for path, kind in _fields(body or {}, ""):
        kinds.setdefault(path, set()).add(kind)
    return {path: " or ".join(sorted(each)) for path, each in sorted(kinds.items())}


def _fields(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the type of each value in a body; all items of a list have one path."""
    if isinstance(value, dict) and path.rpartition(".")[2] not in SCHEMAS:
        for key, each in value.items():
            yield from _fields(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for each in value:
            yield from _fields(each, f"{path}[]")
    else:
        yield path, TYPES.get(type(value), "object")


def _history(entry: Entry) -> list[Any]:
    body = entry.body or {}
    value: Any = next((body[name] for name in HISTORIES if name in body), [])
    return value if isinstance(value, list) else [value]


def _roles(entry: Entry) -> str:
    """Return who speaks, in order; of an item without a role its type."""
    items = (item if isinstance(item, dict) else {} for item in _history(entry))
    return " ".join(str(item.get("role") or item.get("type") or "text") for item in items)


def _continues(one: Entry, other: Entry) -> bool:
    same = (
        one.path == other.path
        and one.session == other.session
        and set(one.body or ()) == set(other.body or ())
    )
    return same and bool(_roles(one)) and _roles(other).startswith(_roles(one) + " ")


def _changes(one: Entry, other: Entry) -> Iterator[str]:
    """Yield what a continued conversation has otherwise than before, but for the added messages."""
    yield from (f"header {name}" for name in one.headers if one.headers[name] != other.headers.get(name))
    before, after = one.body or {}, other.body or {}
    yield from (name for name in before if name not in HISTORIES and before[name] != after[name])
    for at, (was, now) in enumerate(zip(_history(one), _history(other), strict=False)):
        if was != now:
            yield f"message {at + 1}"


async def recorded(name: str, folder: Path) -> Shape:
    """Let a client send its requests, and return their shape. Raises AssertionError if it fails."""
    home, trace = folder / "home", folder / "recorded"
    home.mkdir()
    async with our_leg(NEWER, folder / "ours", record=trace) as leg:
        await _uses(name, leg, home)
    return of(merged([read(path) for path in sorted(trace.iterdir())]))


async def _uses(name: str, leg: Leg, home: Path) -> None:
    if name in LIBRARIES:
        ended = await ran(line(name, leg), home)
        assert ended.code == 0, ended
        return
    agent = AGENTS_BY_NAME[name]
    async with acting(agent, leg, home):
        for turn, task in enumerate(TASKS):
            ended = await takes_turn(agent, home, turn, task)
            assert ended.code == 0, ended


def package(name: str) -> str:
    return name if name in LIBRARIES else AGENTS_BY_NAME[name].row[0]


def kept() -> dict[str, Shape]:
    return json.loads(SHAPES.read_bytes()) if SHAPES.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m clients.shapes", description=__doc__)
    names = (*LIBRARIES, *AGENTS_BY_NAME)
    parser.add_argument("names", nargs="*", choices=names, help="clients; all without one")
    for name in parser.parse_args().names or names:
        with tempfile.TemporaryDirectory() as folder:
            shape = asyncio.run(recorded(name, Path(folder)))
        shapes = {**kept(), name: {"version": version(package(name)), **shape}}
        SHAPES.write_text(json.dumps(dict(sorted(shapes.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
