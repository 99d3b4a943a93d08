"""How the source is built: files, imports, names, complexity, and how much of it one turn of a chat runs.

`python -m benchmarks.structure [--names]`. The turn is the second one of a streamed chat through a running
sidecar, from its arrival until prompt and reply are rendered, without idle work.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import aiohttp
from rich.table import Table

import slotkeeper
from benchmarks.figures import console, keep
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.texts import prose
from slotkeeper.engine.child.launch import EngineKind
from slotkeeper.observe.log import configure

SOURCE: Final = Path(slotkeeper.__file__).parent
LONGEST: Final = 400  # lines of a file
COMPLEX: Final = 10  # complexity of a function: its branches and 1
NEVER: Final = 3600.0  # seconds: the pause is too long for a save
OURS: Final = ("__init__", "__main__")  # names that may occur several times
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES: Final = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While),
    *(ast.ExceptHandler, ast.IfExp, ast.match_case),
)


@dataclass
class Source:
    """All modules of the package."""

    lines: list[int] = field(default_factory=list)
    complexity: dict[str, int] = field(default_factory=dict)  # by function
    classes: Counter[str] = field(default_factory=Counter)
    imports: dict[str, set[str]] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)  # folders, whose own module has only a docstring
    stems: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, root: Path) -> Source:
        source = cls()
        for path in sorted(root.rglob("*.py")):
            text = path.read_text("utf-8")
            module = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
            source.lines.append(text.count("\n"))
            source.stems[path.stem] += path.stem not in OURS
            source.imports[module] = set()
            source.packages |= {module} if path.stem == "__init__" else set()
            for node in ast.walk(ast.parse(text)):
                source._take(node, module, root.name)
        known = source.imports.keys()
        source.imports = {module: (names & known) - {module} for module, names in source.imports.items()}
        return source

    def _take(self, node: ast.AST, module: str, package: str) -> None:
        if isinstance(node, ast.ClassDef):
            self.classes[node.name] += 1
        elif isinstance(node, FUNCTIONS):
            self.complexity[f"{module}.{node.name}:{node.lineno}"] = _complexity(node)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(package):
            self.imports[module] |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            self.imports[module] |= {name.name for name in node.names}

    @property
    def importers(self) -> Counter[str]:
        return Counter(target for targets in self.imports.values() for target in targets)

    @property
    def with_one_importer(self) -> list[str]:
        return [name for name, count in self.importers.items() if count == 1 and name not in self.packages]

    @property
    def chain(self) -> int:
        """Return the number of modules in the longest chain of imports."""
        depths: dict[str, int] = {}

        def depth(module: str, above: frozenset[str] = frozenset()) -> int:
            if module in above:
                return 0
            if module not in depths:
                below = (depth(target, above | {module}) for target in self.imports[module])
                depths[module] = 1 + max(below, default=0)
            return depths[module]

        return max(map(depth, self.imports))

    def rows(self) -> dict[str, float]:
        complex_ones = [found for found in self.complexity.values() if found > COMPLEX]
        return {
            "files": len(self.lines),
            "lines": sum(self.lines),
            "lines of a file, median": statistics.median(self.lines),
            "lines of a file, most": max(self.lines),
            f"files over {LONGEST} lines": sum(lines > LONGEST for lines in self.lines),
            "longest chain of imports": self.chain,
            "modules with one importer": len(self.with_one_importer),
            "class names defined twice": len(_twice(self.classes)),
            "module names that recur": len(_twice(self.stems)),
            f"functions over complexity {COMPLEX}, %": round(
                100 * len(complex_ones) / len(self.complexity), 1
            ),
            "highest complexity": max(self.complexity.values()),
        }

    def counted(self) -> dict[str, Sequence[str]]:
        """Return what the rows count, by name."""
        order = sorted(self.complexity.items(), key=lambda found: -found[1])
        return {
            "class names defined twice": _twice(self.classes),
            "module names that recur": _twice(self.stems),
            "most complex": [f"{name} {found}" for name, found in order if found > COMPLEX],
            "modules with one importer": self.with_one_importer,
        }


def _twice(names: Mapping[str, int]) -> list[str]:
    return sorted(name for name, count in names.items() if count > 1)


def _complexity(function: ast.AST) -> int:
    """Return the branches of a function and 1, without those of functions in it."""
    return 1 + sum(map(_branches, _inside(function)))


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            yield child
            yield from _inside(child)


def _branches(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return len(node.ifs) + 1
    return isinstance(node, BRANCHES)


# -- a turn --------------------------------------------------------------------------------------------


async def turn(engine: str) -> dict[str, float]:
    """Return the files and functions of the package that the second turn of a chat runs."""
    with tempfile.TemporaryDirectory(prefix="slotkeeper-structure-") as folder:
        async with (
            lab.tiny_engine(Tiny.DENSE, engine, Path(folder)) as running,
            lab.in_front_of(running.base, idle_tokens=0, save_pause=NEVER) as sidecar,
            aiohttp.ClientSession(lab.url_of(sidecar)) as client,
        ):
            first = {"role": "user", "content": prose(2000, 1)}
            said = await _asked(client, [first])
            await lab.rested(sidecar)
            second = {"role": "user", "content": "And what follows?"}
            seen: set[CodeType] = set()
            with _profiled(lambda frame: seen.add(frame.f_code)):
                await _asked(client, [first, {"role": "assistant", "content": said}, second])
                await lab.rested(sidecar)  # its prompt is rendered after it was sent, its reply after its end
    here = SOURCE / "bench"  # waits until the sidecar rests
    files = {code: Path(code.co_filename) for code in seen}
    ours = {code for code, file in files.items() if file.is_relative_to(SOURCE) and here not in file.parents}
    named = {(code.co_filename, code.co_qualname) for code in ours if "<" not in code.co_name}
    return {"files of a turn": len({file for file, _ in named}), "functions of a turn": len(named)}


async def _asked(client: aiohttp.ClientSession, messages: Sequence[Mapping[str, str]]) -> str:
    """Read a streamed answer to its end. Its text does not matter."""
    body = {"messages": messages, "stream": True, "max_tokens": 8, "temperature": 0}
    async with client.post("/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        await answer.read()
    return "I see."


@contextmanager
def _profiled(seen: Callable[[FrameType], Any]) -> Iterator[None]:
    """Record every call of every thread."""

    def hook(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen(frame)

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structure", description=__doc__)
    parser.add_argument("--names", action="store_true", help="also list what the rows count, by name")
    parser.add_argument("--engine", default=EngineKind.XLLAMACPP.value)
    chosen = parser.parse_args(arguments)
    configure("error", "console")
    source = Source.read(SOURCE)
    rows = source.rows() | asyncio.run(turn(chosen.engine))
    shown = Table("", "now")
    for name, value in rows.items():
        shown.add_row(name, f"{value:g}")
    console.print(shown)
    if chosen.names:
        for name, found in source.counted().items():
            console.print(f"\n[bold]{name}[/]", *found, sep="\n")
    keep("structure", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
