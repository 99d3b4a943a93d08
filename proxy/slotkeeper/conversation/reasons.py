"""Why a request diverges from the one before it, as an enum, and the rule that undoes it.

There is no "unknown": if no value is recognised, the cause says which part differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from slotkeeper.conversation.facts import FactKind
from slotkeeper.conversation.rules.base import RuleName


class Cause(StrEnum):
    """The same in reports, logs, metrics and tests."""

    # A value that changes by itself
    DATE = "date"
    CLOCK = "clock"
    CWD = "cwd"
    GIT_STATUS = "git_status"
    ENVIRONMENT = "environment"
    MEMORY_FILE = "memory_file"
    COUNTDOWN = "countdown"
    NONCE = "nonce"
    REMINDER_MOVED = "reminder_moved"  # came, went, or says something else
    FILE_REFRESHED = "file_refreshed"  # contents of files, or a map of them, read from disk again
    # Another spelling of the same value
    TOOL_ORDER = "tool_order"
    KEY_ORDER = "key_order"
    CALL_RERENDERED = "call_rerendered"
    CALL_IDS = "call_ids"
    WHITESPACE = "whitespace"
    # Other content
    TOOL_ADDED = "tool_added"
    TOOL_REMOVED = "tool_removed"
    TOOL_EDITED = "tool_edited"
    SYSTEM_EDITED = "system_edited"
    REASONING_DROPPED = "reasoning_dropped"
    REASONING_ADDED = "reasoning_added"
    REASONING_EDITED = "reasoning_edited"
    RESULT_PRUNED = "result_pruned"  # less of it stands there than before
    MESSAGE_EDITED = "message_edited"
    MESSAGE_INSERTED = "message_inserted"
    MESSAGE_REMOVED = "message_removed"
    HISTORY_REPLACED = "history_replaced"  # by a summary
    OPTIONS = "options"
    # Not caused by the client, or not a rewrite
    OUR_RULE = "our_rule"  # what the client sent continues, our version of it does not
    TEMPLATE_STRIPS_REASONING = "template_strips_reasoning"
    TEMPLATE_RERENDERS = "template_rerenders"
    ANOTHER_TASK = "another_task"  # a new session of the same agent
    OTHER_CONVERSATION = "other_conversation"  # another agent: other tools, or another system text


@dataclass(frozen=True, slots=True)
class Seen:
    """A cause, in words for people."""

    what: str
    rule: RuleName | None = None


CAUSES: Final[Mapping[Cause, Seen]] = MappingProxyType(
    {
        Cause.DATE: Seen("a date changed", RuleName.DATE),
        Cause.CLOCK: Seen("a clock advanced", RuleName.CLOCK),
        Cause.CWD: Seen("another working directory", RuleName.CWD),
        Cause.GIT_STATUS: Seen("the git status changed", RuleName.GIT_STATUS),
        Cause.ENVIRONMENT: Seen("the description of the environment changed", RuleName.ENVIRONMENT),
        Cause.MEMORY_FILE: Seen("a memory file (AGENTS.md, CLAUDE.md) changed", RuleName.MEMORY_FILE),
        Cause.COUNTDOWN: Seen("a counter changed", RuleName.COUNTDOWN),
        Cause.NONCE: Seen("a value that is new in each request", RuleName.BILLING_NONCE),
        Cause.REMINDER_MOVED: Seen("a reminder came, went or changed", RuleName.REMINDERS),
        Cause.FILE_REFRESHED: Seen("contents of files were refreshed inside the history"),
        Cause.TOOL_ORDER: Seen("the same tools in another order", RuleName.TOOL_ORDER),
        Cause.KEY_ORDER: Seen("a tool's schema with its keys in another order", RuleName.SCHEMA_KEYS),
        Cause.CALL_RERENDERED: Seen("the arguments of a call serialised in another way", RuleName.TOOL_CALLS),
        Cause.CALL_IDS: Seen("new ids for old calls", RuleName.CALL_IDS),
        Cause.WHITESPACE: Seen("white space", RuleName.TRAILING_WHITESPACE),
        Cause.TOOL_ADDED: Seen("a tool was added"),
        Cause.TOOL_REMOVED: Seen("a tool was removed"),
        Cause.TOOL_EDITED: Seen("the description of a tool changed"),
        Cause.SYSTEM_EDITED: Seen("the system text was edited"),
        Cause.REASONING_DROPPED: Seen("reasoning was dropped", RuleName.REASONING),
        Cause.REASONING_ADDED: Seen("reasoning was added"),
        Cause.REASONING_EDITED: Seen("reasoning was edited", RuleName.REASONING),
        Cause.RESULT_PRUNED: Seen("the result of a tool was pruned", RuleName.PRUNED_RESULTS),
        Cause.MESSAGE_EDITED: Seen("a message was edited"),
        Cause.MESSAGE_INSERTED: Seen("a message was inserted"),
        Cause.MESSAGE_REMOVED: Seen("a message was removed"),
        Cause.HISTORY_REPLACED: Seen("a summary replaced the history"),
        Cause.OPTIONS: Seen("an option of the template changed"),
        Cause.OUR_RULE: Seen("one of our rules changed it"),
        Cause.TEMPLATE_STRIPS_REASONING: Seen("the template leaves out reasoning of earlier turns"),
        Cause.TEMPLATE_RERENDERS: Seen("the template renders the same messages in another way"),
        Cause.ANOTHER_TASK: Seen("a new session of the same agent"),
        Cause.OTHER_CONVERSATION: Seen("another agent"),
    }
)

OF_FACT: Final[Mapping[FactKind, Cause]] = MappingProxyType(
    {
        FactKind.DATE: Cause.DATE,
        FactKind.CLOCK: Cause.CLOCK,
        FactKind.CWD: Cause.CWD,
        FactKind.GIT: Cause.GIT_STATUS,
        FactKind.ENVIRONMENT: Cause.ENVIRONMENT,
        FactKind.MEMORY_FILE: Cause.MEMORY_FILE,
        FactKind.COUNTDOWN: Cause.COUNTDOWN,
        FactKind.NONCE: Cause.NONCE,
        FactKind.REMINDER: Cause.REMINDER_MOVED,
    }
)
NEW_SESSION: Final = frozenset({Cause.ANOTHER_TASK, Cause.OTHER_CONVERSATION})  # nothing was rewritten
