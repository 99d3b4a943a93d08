"""What was changed in a request, as a person reads it: where, and the words around it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from slotkeeper.conversation.divergence import common_start
from slotkeeper.conversation.requests.layout import Edit
from slotkeeper.conversation.rules.apply import Done
from slotkeeper.conversation.rules.base import Mode, RuleName

AROUND: Final = 40  # characters on either side of what changed
LONGEST: Final = 400  # characters of one side


@dataclass(frozen=True, slots=True)
class ShownChange:
    """One value of a body that a rule changed, or would have."""

    rule: RuleName | None  # None: a note that tells again what was told before
    mode: Mode
    path: str
    before: str  # "" where no text may be kept
    after: str
    declined: bool = False  # it would have cost more than it saved: the request went as it came


def changes(done: tuple[Done, ...], *, text: bool, declined: bool = False) -> tuple[ShownChange, ...]:
    """Those of all rules, shortened, or without their `text`."""
    found = (shown(edit, one.rule, one.mode, text=text) for one in done for edit in one.edits)
    return tuple(
        replace(change, declined=True) if declined and change.mode is Mode.FIX else change for change in found
    )


def shown(edit: Edit, rule: RuleName | None, mode: Mode, *, text: bool = True) -> ShownChange:
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in edit.path).lstrip(".")
    if not text:
        return ShownChange(rule, mode, path, "", "")
    before, after = _words(edit.before), _words(edit.after)
    start = common_start(before, after)
    end = common_start(before[start:][::-1], after[start:][::-1])
    return ShownChange(rule, mode, path, _cut(before, start, end), _cut(after, start, end))


def _words(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else orjson.dumps(value).decode()


def _cut(text: str, start: int, end: int) -> str:
    first, last = max(0, start - AROUND), min(len(text), len(text) - end + AROUND)
    cut = text[first:last]
    return cut if len(cut) <= LONGEST else f"{cut[:LONGEST]}…"
