"""Log lines: every event has one level, and names its request."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import slotkeeper

PACKAGE: Final = Path(slotkeeper.__file__).parent
PAGE: Final = PACKAGE.parents[1] / "docs" / "logs.md"
LOGS: Final = ("log", "self._log", "self._seldom")
LEVELS: Final = {name: name for name in ("debug", "info", "warning", "error")} | {"exception": "error"}
# A line about a request has its id, and so has every line of the modules that requests pass.
FOR_A_REQUEST: Final = re.compile(r"\b(Prefill|Save|Restore|Erase|Event|Effect|Record)\b")
PASSED: Final = (
    "exchange/exchange.py",
    "exchange/data.py",
)
SECTION: Final = re.compile(r"^## (debug|info|warning|error)\n\n((?:\* .*\n)+)", re.MULTILINE)
LISTED: Final = re.compile(r"^\* `(\w+)`: ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Line:
    """One call of a log."""

    where: str
    event: str
    level: str
    names_its_request: bool
    for_a_request: bool


@cache
def lines() -> tuple[Line, ...]:
    return tuple(_lines())


def _lines() -> Iterator[Line]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name, tree = path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text("utf-8"))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                concerned = name in PASSED or any(
                    arg.annotation and FOR_A_REQUEST.search(ast.unparse(arg.annotation))
                    for arg in function.args.args
                )
                for call in calls(function):
                    yield line(call, f"{name}:{call.lineno}", concerned=concerned)


def calls(function: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that a function makes itself, without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Call) and logs(node.func) and isinstance(node.args[0], ast.Constant):
            yield node
        yield from calls(node)


def logs(called: ast.expr) -> bool:
    return isinstance(called, ast.Attribute) and called.attr in LEVELS and ast.unparse(called.value) in LOGS


def line(call: ast.Call, where: str, *, concerned: bool) -> Line:
    named = any(word.arg in {"request_id", None} for word in call.keywords)  # None: `**_about(step)`
    event, level = call.args[0], call.func
    assert isinstance(event, ast.Constant)
    assert isinstance(level, ast.Attribute)
    return Line(where, str(event.value), LEVELS[level.attr], named, concerned)


def test_every_event_is_in_snake_case():
    assert len(lines()) > 50, "the search finds nothing"
    assert [one for one in lines() if not re.fullmatch(r"[a-z]+(_[a-z]+)*", one.event)] == []


def test_every_event_has_one_level():
    levels: dict[str, set[str]] = {}
    for one in lines():
        levels.setdefault(one.event, set()).add(one.level)
    assert {event: found for event, found in levels.items() if len(found) > 1} == {}


def test_every_log_line_about_a_request_has_its_id():
    assert [one.where for one in lines() if one.for_a_request and not one.names_its_request] == []


def test_the_logs_page_lists_every_event_with_its_level_and_no_other():
    sections = SECTION.findall(PAGE.read_text("utf-8"))
    told = [(event, level) for level, section in sections for event in LISTED.findall(section)]
    assert sorted(told) == sorted({(one.event, one.level) for one in lines()})
