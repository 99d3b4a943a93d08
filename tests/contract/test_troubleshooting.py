"""docs/troubleshooting.md quotes texts that the program really writes.

The program's texts are read from its sources: events of the log, values of its enums, texts of its messages.
Any other quote must be a flag, a setting, a metric or a command of ours, or be in the list of other programs'
texts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from slotkeeper.conversation.divergence import Cause
from slotkeeper.engine.flags import OPTIONS
from slotkeeper.environment import PREFIX, SECRETS
from slotkeeper.observe.metrics import Metrics
from slotkeeper.scheduler.requests.figures import Loss
from slotkeeper.scheduler.types import Reason
from slotkeeper.settings import Settings
from slotkeeper.store.trouble import Trouble

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
SOURCES: Final = sorted((ROOT / "proxy" / "slotkeeper").rglob("*.py"))
LEVELS: Final = frozenset({"debug", "info", "warning", "error", "exception"})

# Quoted, but not ours: words of the engine, nginx, systemd, or of the page itself.
FOREIGN: Final = frozenset(
    {
        "this",
        "...",
        "Retry-After: 2",
        "GET /slots",
        "/health",
        "/v1/messages",
        "text/event-stream",
        "client_max_body_size",
        "proxy_read_timeout",
        "TimeoutStopSec",
        "ReadWritePaths=",
        "StateDirectory=",
        "--swa-full",
        "--no-slots",
        "--api-key",
        "--jinja",
        "-c",
    }
)

CODE: Final = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCED: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
WORD: Final = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
FLAG: Final = re.compile(r"--?[a-z][a-z-]*")


def quoted(page: str) -> list[str]:
    """Return the texts in backticks, without the blocks of code."""
    return CODE.findall(FENCED.sub("", page))


@cache
def trees() -> tuple[ast.Module, ...]:
    return tuple(ast.parse(path.read_text("utf-8")) for path in SOURCES)


def nodes() -> Iterator[ast.AST]:
    for tree in trees():
        yield from ast.walk(tree)


@cache
def said_by(names: frozenset[str]) -> frozenset[str]:
    """Yield the constant texts among the arguments of every call `x.NAME("...")`."""
    return frozenset(
        word.value
        for call in nodes()
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in names
        for word in call.args
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    )


def events() -> set[str]:
    """Return the events of `log.warning("engine_lost", ...)`."""
    return {word for word in said_by(LEVELS) if WORD.fullmatch(word)}


@cache
def values() -> frozenset[str]:
    """Return the values of every enum."""
    return frozenset(
        line.value.value
        for kind in nodes()
        if isinstance(kind, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "StrEnum" for base in kind.bases)
        for line in kind.body
        if isinstance(line, ast.Assign)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )


@cache
def texts() -> str:
    """Return all texts of the sources, one after the other; placeholders are `...`."""
    found = []
    for node in nodes():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values))
    return "\n".join(found)


def commands() -> frozenset[str]:
    return said_by(frozenset({"add_parser"}))


@cache
def flags() -> frozenset[str]:
    """Return our flags, and those of llama-server that the sidecar reads."""
    settings = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    ours = {word for word in said_by(frozenset({"add_argument"})) if word.startswith("-")}
    engines = {name for option in OPTIONS.values() for name in (*option.names, *option.off)}
    return frozenset(settings | ours | engines)


@cache
def metrics() -> frozenset[str]:
    families = Metrics().registry.collect()
    return frozenset(sample for family in families for sample in (family.name, f"{family.name}_total"))


def variables() -> set[str]:
    names = {PREFIX + name.upper() for name in Settings.model_fields}
    return names | {f"{PREFIX}{name.upper()}_FILE" for name in SECRETS}


def is_ours(said: str) -> bool:
    """Whether the program writes this text, or has a command, flag or variable of this name."""
    first, *rest = said.split()
    if first == "slotkeeper" and rest and rest[0] in commands():
        return knows_flags(rest[1:])
    if first in commands() or first.startswith("-"):
        return knows_flags([first, *rest])
    if WORD.fullmatch(said) or said.startswith(PREFIX):
        return said in events() | values() | metrics() | variables()
    return said.removesuffix(": 1") in texts()


def knows_flags(words: list[str]) -> bool:
    return all(word in flags() for word in words if FLAG.fullmatch(word))


def unknown(page: str) -> list[str]:
    return sorted({said for said in quoted(page) if said not in FOREIGN and not is_ours(said)})


def test_the_page_quotes_only_texts_of_the_program():
    assert unknown(PAGE) == []


def test_every_listed_text_of_other_programs_is_quoted():
    """Otherwise the list would grow and accept texts that should be checked."""
    unused = FOREIGN - set(quoted(PAGE))
    assert unused == set()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("`engine_lost`", "`engine_gone_away`"),
        ("`overwritten`", "`overwriten`"),
        ("`cannot listen: ...`", "`can not listen: ...`"),
        ("`--hourly-bytes`", "`--hourly-byte`"),
        ("`slotkeeper_inexact_prompts_total`", "`slotkeeper_inexact_total`"),
        ("`SLOTKEEPER_ADMIN_TOKEN`", "`SLOTKEEPER_ADMIN_KEY`"),
        ("`slotkeeper snapshots ls`", "`slotkeeper files ls`"),
        ("`lint --json`", "`lint --jsonl`"),
    ],
)
def test_a_misquoted_text_is_detected(right, wrong):
    assert right in PAGE
    assert set(unknown(PAGE.replace(right, wrong))) - set(unknown(PAGE)) == {wrong.strip("`")}


def test_events_and_enum_values_are_found_in_the_sources():
    assert {"engine_lost", "exchange_failed", "prefix_changed"} <= events()
    assert {*Reason, *Loss, *Cause, *Trouble} <= values()


@pytest.mark.parametrize("kind", [Loss, Trouble])
def test_the_page_explains_every_loss_and_every_trouble(kind):
    assert sorted(set(kind) - set(quoted(PAGE))) == []
