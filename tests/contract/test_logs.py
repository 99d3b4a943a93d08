"""Log lines. Every event has one level, names its request, and quotes no prompt."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

import slotkeeper
from slotkeeper.bench import lab
from slotkeeper.observe.log import configure

PACKAGE: Final = Path(slotkeeper.__file__).parent
PAGE: Final = PACKAGE.parents[1] / "docs" / "logs.md"
LOGS: Final = ("log", "self._log", "self._seldom")
LEVELS: Final = {name: name for name in ("debug", "info", "warning", "error")} | {"exception": "error"}
# A line about a request has its id, and so has every line of the modules that requests pass.
FOR_A_REQUEST: Final = re.compile(r"\b(Prefill|Save|Restore|Erase|Event|Effect|Record)\b")
PASSED: Final = (
    "exchange/account.py",
    "exchange/exchange.py",
    "exchange/data.py",
)
SECTION: Final = re.compile(r"^## (debug|info|warning|error)\n\n((?:\* .*\n)+)", re.MULTILINE)
LISTED: Final = re.compile(r"^\* `(\w+)`: ", re.MULTILINE)
WORD: Final = "Xylophonkonzert"  # with a number, it is in every message below and in no code
CHAT: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Line:
    """One call of a log."""

    where: str
    event: str
    level: str
    names_its_request: bool
    for_a_request: bool


def lines() -> Iterator[Line]:
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
    found = list(lines())
    assert len(found) > 50, "the search finds nothing"
    assert [one for one in found if not re.fullmatch(r"[a-z]+(_[a-z]+)*", one.event)] == []


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


# -- a session on a real engine ------------------------------------------------------------------------


def said(number: int) -> str:
    return f"{WORD}{number}"


def session() -> Iterator[tuple[str, Any]]:
    """Yield requests: some are answered, the engine refuses some and quotes them, one is not JSON."""
    history = [{"role": "system", "content": f"{said(0)} " * 600}]
    for number in range(1, 4):
        history.append({"role": "user", "content": said(number)})
        yield CHAT, {"messages": history, "max_tokens": 4, "stream": number == 2}
        history.append({"role": "assistant", "content": said(10 + number)})
    yield "/v1/messages", {"system": said(20), "messages": history[1:2], "max_tokens": 4}
    yield "/completion", {"prompt": said(21), "n_predict": 4}
    yield CHAT, {"messages": [history[0], {"role": "user", "content": [{"type": said(22)}]}]}
    yield CHAT, {"messages": [history[0], {"role": "assistant", "tool_calls": [{"function": said(23)}]}]}
    yield CHAT, {"messages": history, "tools": [{"type": said(24)}]}
    yield CHAT, {"messages": history, "response_format": {"type": said(25)}}
    yield CHAT, {"messages": [said(26)]}
    yield CHAT, b'{"messages": [{"role": "user", "content": "' + said(27).encode()


async def test_no_word_of_a_prompt_is_logged_at_any_level(engine_factory, build, capsys):
    engine = engine_factory("tiny-dense", build)
    configure("debug", "json")
    async with lab.in_front_of(engine.base, engine.flags) as sidecar:
        async with aiohttp.ClientSession(lab.url_of(sidecar)) as client:
            told = []
            for path, body in session():
                raw = body if isinstance(body, bytes) else aiohttp.JsonPayload(body)
                async with client.post(path, data=raw, headers={"X-Slotkeeper-Conversation": "c"}) as answer:
                    told.append(WORD in await answer.text())
        await lab.rested(sidecar)
    assert any(told), "the engine must quote a request that it refuses, or the test shows nothing"
    heard = capsys.readouterr().err
    assert '"not_rendered"' in heard
    assert '"unreadable_request"' in heard
    assert '"request_refused"' in heard
    assert heard.count('"event":"request"') > 5
    assert [one for one in heard.splitlines() if WORD in one] == []
