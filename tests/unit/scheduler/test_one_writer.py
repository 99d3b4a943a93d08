"""One module writes what slots and RAM cache hold, one who has the slots, one what becomes of a request."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Final

import benchmarks
import pytest

import slotkeeper
from slotkeeper.scheduler.requests.pending import Pending, Preparing, Queued

# What variables and fields that hold such an object are called.
TABLES: Final = {"table", "_table", "waits_for"}
SHADOWS: Final = {"shadow", "_shadow"}
WRITERS: Final = {"slots/table.py": TABLES, "slots/shadow.py": SHADOWS}
REQUESTS: Final = {"pending", "_pending", "queued", "preparing"}
# In the scheduler, no module assigns a field of such a name to another object.
RECORD: Final = {field.name for of in (Pending, Queued, Preparing) for field in fields(of)}
SCHEDULER: Final = Path(slotkeeper.__path__[0]) / "scheduler"
CHANGE: Final = {
    *("append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "remove", "reverse", "sort"),
    *("add", "discard", "update", "intersection_update", "difference_update", "popitem", "setdefault"),
}
SOURCES: Final = [
    path
    for package in (slotkeeper, benchmarks)
    for path in Path(package.__path__[0]).rglob("*.py")
    if path.parent.name != "cli"  # whose tables are printed
]


def writes(tree: ast.AST, names: set[str]) -> Iterator[int]:
    """Yield the lines that change a field of an object of one of these names, or something in it."""
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
        if any(within(target, names) for target in changed):
            yield node.lineno


def parts(target: ast.expr) -> list[ast.expr]:
    """Return what an assignment of several values changes."""
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def within(target: ast.expr, names: set[str]) -> bool:
    """Whether this is `NAME.FIELD`, `anything.NAME.FIELD`, or something in it."""
    while isinstance(target, ast.Attribute | ast.Subscript):
        target, changed = target.value, target
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        if name in names and isinstance(changed, ast.Attribute):
            return True
    return False


def test_nothing_else_changes_what_slots_hold_and_who_has_them():
    for path in SOURCES:
        names = (TABLES | SHADOWS | REQUESTS) - WRITERS.get("/".join(path.parts[-2:]), set())
        assert not list(writes(ast.parse(path.read_text("utf-8")), names)), path


def writes_record(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that change a field of a request's record, whatever the variable is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            itself = isinstance(node.value, ast.Name) and node.value.id == "self"
            if node.attr in RECORD and not itself:
                yield node.lineno


def test_only_its_own_methods_change_a_request():
    for path in SOURCES:
        if SCHEDULER in path.parents:
            assert not list(writes_record(ast.parse(path.read_text("utf-8")))), path


@pytest.mark.parametrize(
    "line",
    [
        "other.plan = None",
        "state.requests[request].waited += now",
        "pending.stage, pending.slot = Running(now), slot",
        "first = pending.plan = plan",
        "del p.slot",
        "for pending.slot in slots: pass",
    ],
)
def test_a_change_of_a_request_is_seen(line: str):
    assert list(writes_record(ast.parse(line)))


@pytest.mark.parametrize("line", ["plan = pending.plan", "self.slot = slot", "replace(pending, plan=plan)"])
def test_a_look_at_a_request_is_no_change(line: str):
    assert not list(writes_record(ast.parse(line)))


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
        "table.moves += 1",
        "pending.waits_for.work.awaiting += 1",
        "table.rates.rests.append(rest)",
    ],
)
def test_a_change_is_seen(line: str):
    assert list(writes(ast.parse(line), TABLES | SHADOWS))


@pytest.mark.parametrize(
    "line",
    ["plan.table = table", "held = table.shadow.slots[slot]", "shadow.erase(1)", "self.shadow = shadow"],
)
def test_a_look_is_no_change(line: str):
    assert not list(writes(ast.parse(line), TABLES | SHADOWS))
