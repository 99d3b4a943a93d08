"""One module writes what an engine's slots and RAM cache hold: `scheduler/shadow.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import benchmarks
import pytest

import slotkeeper

WRITER: Final = "scheduler/shadow.py"
CHANGE: Final = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}
SOURCES: Final = [
    path
    for package in (slotkeeper, benchmarks)
    for path in Path(package.__path__[0]).rglob("*.py")
    if not path.as_posix().endswith(WRITER)
]


def writes(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that change a field of a shadow, or a list in it."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                changed = [part for target in targets for part in parts(target)]
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.NamedExpr(target=target):
                changed = [target]
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in CHANGE:
                changed = [value]
            case _:
                continue
        if any(map(of_a_shadow, changed)):
            yield node.lineno


def parts(target: ast.expr) -> list[ast.expr]:
    """Return what an assignment of several values changes."""
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def of_a_shadow(target: ast.expr) -> bool:
    """Whether this is `shadow.FIELD`, `anything.shadow.FIELD`, or an item of it."""
    while isinstance(target, ast.Subscript):
        target = target.value
    if not isinstance(target, ast.Attribute):
        return False
    owner = target.value
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return name in {"shadow", "_shadow"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_nothing_else_changes_what_slots_hold(path: Path):
    assert not list(writes(ast.parse(path.read_text("utf-8"))))


@pytest.mark.parametrize(
    "line",
    [
        "table.shadow.slots[slot] = None",
        "shadow.slots[1:] = []",
        "self.shadow.mixed |= True",
        "known = table.shadow.slots[slot] = contents",
        "self.shadow.ram, self.other = [], 1",
        "del plan.table.shadow.slots[slot]",
        "table.shadow.ram.remove(entry)",
    ],
)
def test_a_change_is_seen(line: str):
    assert list(writes(ast.parse(line)))


@pytest.mark.parametrize(
    "line", ["table.shadow = shadow", "held = table.shadow.slots[slot]", "shadow.erase(1)"]
)
def test_a_look_is_no_change(line: str):
    assert not list(writes(ast.parse(line)))
