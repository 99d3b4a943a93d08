"""Freeze the decisions of the scheduler: `PYTHONPATH=proxy:tests:. python -m frozen [--only NAME ...]`.

It records scripted runs (see `runs`) and writes a digest of each to digests.json, with the number of events
and of each kind of effect. With `--check` nothing is written, and the exit code is 1 if a run decides
otherwise.

To see where a run begins to decide otherwise than at another commit, write its recording there and compare
here:

    git worktree add build/before COMMIT
    (cd build/before && PYTHONPATH=proxy:tests:. python -m frozen --only RUN --write DIR)
    PYTHONPATH=proxy:tests:. python -m frozen --only RUN --compare DIR
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import unified_diff
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import orjson

from frozen.recorder import Recording, digest
from frozen.runs import OFTEN, RUNS, PlaybookError, playbooks

DIGESTS: Final = Path(__file__).parent / "digests.json"
PLAYBOOKS: Final = "playbook/"
ENDED: Final = b"[{},[]]"  # instead of an event, where one recording is longer
PART: Final = b"# "  # begins the line before each part of a recording
WHAT_TO_DO: Final = """
If these decisions are meant to change, run `make frozen`, commit digests.json with the change, and say in
the commit what changed and why. Otherwise find the first decision that differs, as `make frozen ARGS=--help`
says.
"""

Row = dict[str, Any]
Parts = Mapping[str, Recording]


def row(parts: Parts) -> Row:
    """Return what is kept of a run. Names of parts do not count, nor does their order."""
    effects = sum((part.effects for part in parts.values()), Counter[str]())
    return {
        "digest": digest("".join(sorted(part.digest for part in parts.values())).encode()),
        "events": sum(len(part.lines) for part in parts.values()),
        "effects": dict(sorted(effects.items())),
    }


def chosen(only: Sequence[str], *, often: bool) -> Iterator[tuple[str, Parts]]:
    """Record the runs whose names begin with one of `only`, one after the other. Raises PlaybookError."""
    for name in OFTEN if often else RUNS:
        if _begins(name, only):
            yield name, dict(RUNS[name]())
    if not only or any(PLAYBOOKS.startswith(each) or each.startswith(PLAYBOOKS) for each in only):
        yield from ((name, parts) for name, parts in playbooks().items() if _begins(name, only))


def _begins(name: str, only: Sequence[str]) -> bool:
    return not only or name.startswith(tuple(only))


# -- digests ---------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Row]:
    return dict(orjson.loads(path.read_bytes())) if path.is_file() else {}


def written(rows: Mapping[str, Row]) -> str:
    """Return the file's content: one line for each run, so that a change shows its runs."""
    lines = [f"{_json(name)}: {_json(rows[name])}" for name in sorted(rows)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def changes(before: Row | None, now: Row | None) -> str:
    """Return in words what changed in a run."""
    if before is None or now is None:
        return "is new" if now else "is gone"
    old, new = ({"events": found["events"], **found["effects"]} for found in (before, now))
    counts = ((name, old.get(name, 0), new.get(name, 0)) for name in {**old, **new})
    changed = (f"{name} {then} -> {now}" for name, then, now in counts if then != now)
    return ", ".join(changed) or "as many effects of each kind, but others"


# -- recordings ------------------------------------------------------------------------------------------


def write(folder: Path, name: str, parts: Parts) -> None:
    path = _path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb", compresslevel=1) as file:
        for part, recording in parts.items():
            file.writelines(line + b"\n" for line in (PART + part.encode(), *recording.lines))


def difference(folder: Path, name: str, parts: Parts) -> str | None:
    """Return the first event of a run whose effects differ from those in a recording; None: none does."""
    path = _path(folder, name)
    if not path.is_file():
        return f"{name}: is new"
    before: dict[str, list[bytes]] = {}
    with gzip.open(path, "rb") as file:
        for line in file.read().splitlines():
            if line.startswith(PART):
                part = before.setdefault(line.removeprefix(PART).decode(), [])
            else:
                part.append(line)
    for title in {**before, **parts}:
        now = parts[title].lines if title in parts else []
        for number, (old, new) in enumerate(zip_longest(before.get(title, []), now, fillvalue=ENDED)):
            if old != new:
                shown = unified_diff(_shown(old), _shown(new), "before", "now", lineterm="", n=99)
                return "\n".join((f"{name}, {title}, event {number}:", *shown))
    return None


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.jsonl.gz"


def _shown(line: bytes) -> list[str]:
    """Return the event and each effect as lines."""
    *placement, event, effects = orjson.loads(line)
    return [
        *(f"scheduler {number}" for number in placement),
        _json(event),
        *(f"  {_json(e)}" for e in effects),
    ]


# -- the command -----------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, path: Path = DIGESTS) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m frozen", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="runs whose names begin so")
    parser.add_argument("--often", action="store_true", help="only the runs that the tests include")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a digest changed")
    what.add_argument("--write", type=Path, metavar="DIR", help="write recordings instead of digests")
    what.add_argument("--compare", type=Path, metavar="DIR", help="show the first difference from recordings")
    args = parser.parse_args(argv)
    runs = chosen(args.only, often=args.often)
    if args.write:
        for name, parts in runs:
            write(args.write, name, parts)
        return 0
    if args.compare:
        found = [text for name, parts in runs if (text := difference(args.compare, name, parts))]
        sys.stdout.write("\n\n".join(found) + "\n" if found else "no difference\n")
        return int(bool(found))
    return _digests({name: row(parts) for name, parts in runs}, path, args)


def _digests(now: Mapping[str, Row], path: Path, args: argparse.Namespace) -> int:
    before = read(path)
    expected = {
        name: found for name, found in before.items() if _begins(name, args.only) and _seen(name, args)
    }
    changed = [name for name in sorted({**expected, **now}) if expected.get(name) != now.get(name)]
    for name in changed:
        sys.stdout.write(f"{name}: {changes(expected.get(name), now.get(name))}\n")
    if not args.check:
        kept = {name: found for name, found in before.items() if name not in expected}
        path.write_text(written({**kept, **now}), "utf-8")
        return 0
    if changed:
        sys.stdout.write(f"{len(changed)} of {len(now)} runs decide otherwise.\n{WHAT_TO_DO}")
    return int(bool(changed))


def _seen(name: str, args: argparse.Namespace) -> bool:
    """Whether this call records the run, if there still is one of that name."""
    return not args.often or name in OFTEN or name.startswith(PLAYBOOKS)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except PlaybookError as error:
        raise SystemExit(f"{error}\nRepair the playbooks first; --only names other runs.") from None
