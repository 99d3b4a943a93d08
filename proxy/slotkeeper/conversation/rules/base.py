"""The words of canonical rules: names, modes, and what a rule is.

A rule is a small object without state. It sees the request (after the rules before it) and the
conversation that it goes on from, and yields edits and facts. Edits put first values back; facts are what
was thereby taken out and must be told in the newest user message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from slotkeeper.conversation.record import Conversation
from slotkeeper.conversation.requests.layout import Edit, Layout


class Mode(StrEnum):
    OFF = "off"
    OBSERVE = "observe"  # say what it would have saved
    FIX = "fix"


class RuleName(StrEnum):
    """In settings, logs, metrics, `why` and tests alike."""

    BILLING_NONCE = "billing_nonce"
    TOOL_ORDER = "tool_order"
    SCHEMA_KEYS = "schema_keys"
    CALL_IDS = "call_ids"
    TOOL_CALLS = "tool_calls"
    REASONING = "reasoning"
    TRAILING_WHITESPACE = "trailing_whitespace"
    DATE = "date"
    CLOCK = "clock"
    CWD = "cwd"
    GIT_STATUS = "git_status"
    ENVIRONMENT = "environment"
    MEMORY_FILE = "memory_file"
    COUNTDOWN = "countdown"
    REMINDERS = "reminders"


@dataclass(frozen=True, slots=True)
class Scene:
    """What a rule sees."""

    now: Layout
    before: Conversation | None
    common: int  # messages behind the system text that are the same in both
    kin: Conversation | None = None  # the latest of other conversations of the same agent


@dataclass(frozen=True, slots=True)
class Fact:
    """Taken out of its place, and to be told in the newest user message."""

    place: str  # which fact it is: one told before under the same place is outdated by it
    text: str


class Rule(Protocol):
    """One cause of needless prefills, put right."""

    name: RuleName
    default: Mode
    about: str  # what clients do
    safe: str  # why putting it right changes nothing for the model

    def changes(self, scene: Scene) -> Iterator[Edit | Fact]:
        """Nothing where the request is canonical already."""
        ...
