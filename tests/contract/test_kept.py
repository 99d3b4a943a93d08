"""kept.md names the bound of every collection in the code, and the test that fills it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import slotkeeper
from unit.test_bounds import FILLED

PACKAGE: Final = Path(slotkeeper.__file__).parent
ROOT: Final = PACKAGE.parents[1]
PAGE: Final = ROOT / "docs" / "reliability.md"
KEPT: Final = Path(__file__).with_name("kept.md")
PARTS: Final = (
    "scheduler",
    "conversation",
    "api",
    "vocab",
    "engine",
    "store",
    "observe",
    "runtime",
    "exchange",
    "admin",
)
MAKERS: Final = frozenset(
    {
        *("dict", "list", "set", "deque", "OrderedDict", "defaultdict", "Counter", "bytearray"),
        *("WeakValueDictionary", "SimpleQueue", "Queue", "Recent", "RecentRequests"),
    }
)
DISPLAYS: Final = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)

NAMED: Final = r"`([\w/]+\.py)::(\w+)`"


def makes(value: ast.expr | None) -> bool:
    """Whether an expression makes a collection that can grow."""
    match value:
        case ast.Call(func=ast.Name("field"), keywords=keywords):
            made = [word.value for word in keywords if word.arg == "default_factory"]
            return any(
                one.id in MAKERS
                if isinstance(one, ast.Name)
                else isinstance(one, ast.Lambda) and makes(one.body)
                for one in made
            )
        case ast.Call(func=func):
            func = func.value if isinstance(func, ast.Subscript) else func
            return ast.unparse(func).rpartition(".")[2] in MAKERS
        case ast.BinOp(left=left, right=right):
            return makes(left) or makes(right)
        case _:
            return isinstance(value, DISPLAYS)


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)


def collections() -> Iterator[str]:
    """Yield every collection of a module, a class or an object, as FILE.NAME or FILE.CLASS.NAME."""
    for part in PARTS:
        for path in sorted((PACKAGE / part).rglob("*.py")):
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            for node in ast.parse(path.read_text("utf-8")).body:
                yield from (f"{module}.{name}" for name in of_a(node))


def of_a(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if any("cache" in ast.unparse(decorator) for decorator in node.decorator_list):
            yield node.name
    elif isinstance(node, ast.ClassDef):
        for inner in ast.walk(node):
            for target, value in assigned(inner):
                own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                if makes(value) and (own or (isinstance(target, ast.Name) and inner in node.body)):
                    name = target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)
                    yield f"{node.name}.{name}"
    else:
        for target, value in assigned(node):
            filled = getattr(value, "elts", None) or getattr(value, "keys", None)
            if makes(value) and not filled and isinstance(value, ast.Call | ast.Dict | ast.List):
                yield ast.unparse(target)


def test_the_list_has_exactly_the_collections_of_the_code():
    """A new collection needs its bound there."""
    named = set(re.findall(rf"`((?:{'|'.join(PARTS)})\.[\w.]+)`", KEPT.read_text("utf-8")))
    found = set(collections())
    assert len(found) > 80, "the search finds nothing"
    assert found - named == set(), "add it with its bound to tests/contract/kept.md"
    assert named - found == set(), "remove it from tests/contract/kept.md"


def test_the_list_and_the_reliability_page_name_only_existing_tests():
    text = PAGE.read_text("utf-8") + KEPT.read_text("utf-8")
    named = re.findall(NAMED, text)
    assert len(named) > 10
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {test}(" in path.read_text("utf-8"), f"{file}::{test}"
    assert set(re.findall(r"`(\w+)\(\)`", text)) == {fill.__name__ for fill in FILLED}


def test_every_fault_has_a_test():
    """The test is in the fault's own row, or in the one above it."""
    _, _, section = PAGE.read_text("utf-8").partition("## What each fault costs")
    rows = [line for line in section.partition("\n##")[0].splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    assert [row for row in rows if not re.search(NAMED, row) and "| the same test |" not in row] == []
    assert re.search(NAMED, rows[0])
