"""Where a request diverges from the one before it, and how much text behind that place is still the same.

Pieces are compared in the order in which templates write them: tools, system text, messages, and in each
message its reasoning, its texts and its calls. A request that only adds to the end does not diverge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

import orjson

from slotkeeper.conversation.layout import NOWHERE, Layout, Message, Path, Section
from slotkeeper.conversation.phrases import FactKind
from slotkeeper.conversation.rules.base import RuleName

TELLING: Final = 12  # characters of a line; shorter lines (braces) occur anywhere and prove nothing
LOOKED_AT: Final = 2**22  # characters of each side whose lines are compared


def found_again(old: Sequence[str], new: Sequence[str]) -> int:
    """Count the characters of old texts that are among the new; of the other texts, those of equal lines."""
    available = Counter(new)
    same, others = 0, []
    for text in old:
        if available[text]:
            available[text] -= 1
            same += len(text)
        else:
            others.append(text)
    return same + _lines_again(others, available.elements())


def _lines_again(old: Iterable[str], new: Iterable[str]) -> int:
    available = Counter(line for line in _lines(new) if len(line) >= TELLING)
    same = 0
    for line in _lines(old):
        if available[line]:
            available[line] -= 1
            same += len(line) + 1
    return same


def _lines(texts: Iterable[str]) -> Iterator[str]:
    left = LOOKED_AT
    for text in texts:
        yield from text[:left].split("\n")
        left -= len(text)
        if left <= 0:
            return


# -- the first piece that differs ------------------------------------------------------------------------

EXCERPT: Final = 80  # characters shown of each side
LEAD_IN: Final = 24  # of these characters, before the place
TOOL_CHOICE: Final = "tool_choice"
_ORDER: Final = tuple(Section)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the prompt: one tool, one text or one call."""

    section: Section
    message: int | None  # its index in the layout; None for tools and options
    path: Path
    text: str


Rests = tuple[list[Piece], list[Piece]]  # the pieces from the divergence on, of the old and the new request


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two requests diverge. Lengths are characters of the request's text, not of its prompt."""

    section: Section
    message: int | None  # index in the layout; None for tools and options
    path: Path  # in the new body
    offset: int  # in that piece
    before: str  # excerpts around the place
    after: str
    lost: int  # characters behind the place that both requests have: computed again unchanged


def parted(old: Layout, new: Layout) -> Divergence | None:
    """Return the first place where `new` differs from `old`; None if one is a beginning of the other."""
    if old is new:
        return None
    both = rests(old, new)
    if both is None:
        return _ids(old, new) or _options(old, new)
    was, now = both
    place, offset = _earlier(was, now), _common_offset(was, now)
    return Divergence(
        section=place.section,
        message=None if place.message is None else first_difference(old, new),
        path=now[0].path if now else NOWHERE,
        offset=offset,
        before=_excerpt(was, place.section, offset),
        after=_excerpt(now, place.section, offset),
        lost=found_again(_texts_of(was, offset), _texts_of(now, offset)),
    )


def rests(old: Layout, new: Layout) -> Rests | None:
    """Return the pieces of each request from the divergence on; None if no text differs."""
    return _tools(old, new) or _messages(old, new)


def message_pieces(message: Message, at: int) -> Iterator[Piece]:
    """Yield the pieces of a message, in the order in which templates write them."""
    for text in message.pieces():
        if text.text:
            yield Piece(text.section, at, text.path, text.text)
    section = message.texts[0].section if message.texts else Section.USER
    for digest in message.media:
        yield Piece(section, at, message.path, f"<image or audio {digest.hex()}>")
    for call in message.calls:
        yield Piece(Section.CALL, at, call.arguments_path, called(call.name, call.arguments))


def called(name: str, arguments: Any) -> str:
    """Return a call as one text."""
    return f"{name} {arguments if isinstance(arguments, str) else json_text(arguments)}"


def json_text(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # nested too deep for orjson
        return repr(value)


def same_text(old: Message, new: Message) -> bool:
    """Whether two messages agree in all that every template shows; how texts are split is ignored."""
    return old is new or (
        old.role is new.role
        and (old.has_texts_of(new) or old.said == new.said)
        and old.reasoning_text == new.reasoning_text
        and _calls(old) == _calls(new)
        and old.media == new.media
    )


def common_start(one: str, other: str) -> int:
    """Return the length of the longest common prefix, in characters."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # one[:low] == other[:low], and one[:high] != other[:high]
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def length(layout: Layout) -> int:
    """Return about how many characters of tools and messages a request has."""
    return sum(len(piece.text) for piece in (*tool_pieces(layout), *_said_from(layout, 0)))


def first_difference(old: Layout, new: Layout) -> int | None:
    """Return the index of the first message that differs, or `new`'s length if shorter; None if none does."""
    for at, (was, now) in enumerate(zip(old.messages, new.messages, strict=False)):
        if not same_text(was, now):
            return at
    return None if len(old.messages) <= len(new.messages) else len(new.messages)


def _tools(old: Layout, new: Layout) -> Rests | None:
    if old.tools is new.tools or json_text(old.tools) == json_text(new.tools):
        return None
    was, now = list(tool_pieces(old)), list(tool_pieces(new))
    at = _first_other(was, now)
    return [*was[at:], *_said_from(old, 0)], [*now[at:], *_said_from(new, 0)]


def _messages(old: Layout, new: Layout) -> Rests | None:
    at = first_difference(old, new)
    if at is None or at == len(new.messages):  # a shorter request does not diverge
        return None
    was, now = list(message_pieces(old.messages[at], at)), list(message_pieces(new.messages[at], at))
    same_role = old.messages[at].role is new.messages[at].role
    same = _first_other(was, now) if same_role else 0
    rests = [*was[same:], *_said_from(old, at + 1)], [*now[same:], *_said_from(new, at + 1)]
    return rests if any(rests) else None  # the last messages differ in their role or in empty parts


def _first_other(was: list[Piece], now: list[Piece]) -> int:
    for at, (one, other) in enumerate(zip(was, now, strict=False)):
        if one.section is not other.section or one.text != other.text:
            return at
    return min(len(was), len(now))


def _ids(old: Layout, new: Layout) -> Divergence | None:
    """Compare the ids of calls, after all texts: only some templates show ids."""
    for at, (was, now) in enumerate(zip(old.messages, new.messages, strict=False)):
        if _all_ids(was) == _all_ids(now):
            continue
        before, after = _named(was), _named(now)
        for n, (one, other) in enumerate(zip(before, after, strict=False)):
            if one.text != other.text:
                rest = (
                    [*before[n + 1 :], *_said_from(old, at + 1)],
                    [*after[n + 1 :], *_said_from(new, at + 1)],
                )
                offset = common_start(one.text, other.text)
                lost = found_again(*map(_texts_of, rest))
                return Divergence(Section.CALL, at, other.path, offset, one.text, other.text, lost)
    return None


def _all_ids(message: Message) -> list[str]:
    return [call.id for call in message.calls] + message.answered_ids


def _named(message: Message) -> list[Piece]:
    calls = [Piece(Section.CALL, None, call.id_path, call.id) for call in message.calls]
    return calls + [Piece(Section.CALL, None, answer.path, answer.text) for answer in message.answers]


def _options(old: Layout, new: Layout) -> Divergence | None:
    """Compare the options that change how the template renders.

    Where an option shows depends on the template. Only `tool_choice` has a known effect: it can remove the
    tools, so the prompts differ from the start on.
    """
    names = [n for n in {**old.options, **new.options} if old.options.get(n) != new.options.get(n)]
    if not names:
        return None
    before, after = ({n: side.options[n] for n in names if n in side.options} for side in (old, new))
    return Divergence(
        section=Section.OPTIONS,
        message=None,
        path=(names[0],),
        offset=0,
        before=json_text(before)[:EXCERPT],
        after=json_text(after)[:EXCERPT],
        lost=min(length(old), length(new)) if TOOL_CHOICE in names and old.tools else 0,
    )


def tool_pieces(layout: Layout) -> Iterator[Piece]:
    for at, tool in enumerate(layout.tools):
        yield Piece(Section.TOOLS, None, (*layout.tools_path, at), json_text(tool))


def _said_from(layout: Layout, first: int) -> Iterator[Piece]:
    for at in range(first, len(layout.messages)):
        yield from message_pieces(layout.messages[at], at)


def _earlier(was: list[Piece], now: list[Piece]) -> Piece:
    """Return which of the two first pieces names the divergence: the one whose section comes first."""
    if not was or not now:
        return (was or now)[0]
    return was[0] if _ORDER.index(was[0].section) < _ORDER.index(now[0].section) else now[0]


def _common_offset(was: list[Piece], now: list[Piece]) -> int:
    """Return how many characters the two first pieces have in common; 0 if their sections differ."""
    if not was or not now or was[0].section is not now[0].section:
        return 0
    return common_start(was[0].text, now[0].text)


def _texts_of(pieces: list[Piece], offset: int = 0) -> list[str]:
    texts = [piece.text for piece in pieces]
    return [texts[0][offset:], *texts[1:]] if texts else []


def _excerpt(pieces: list[Piece], section: Section, offset: int) -> str:
    """Return the text around the offset in the first piece; "" if it is of another section."""
    if not pieces or pieces[0].section is not section:
        return ""
    start = max(0, offset - LEAD_IN)
    return pieces[0].text[start : start + EXCERPT]


def _calls(message: Message) -> list[str]:
    """Return the calls as texts, because Python ignores the order of keys when it compares objects."""
    return [called(call.name, call.arguments) for call in message.calls]


# -- causes: the enum, a description of each value, and the rule that undoes it ---------------------------
# There is no "unknown": if no value is recognised, the cause says which part differs.


class Cause(StrEnum):
    """Why a request diverged. Reports, logs, metrics and tests use these values."""

    # A value that changes by itself
    DATE = "date"
    CLOCK = "clock"
    CWD = "cwd"
    GIT_STATUS = "git_status"
    ENVIRONMENT = "environment"
    MEMORY_FILE = "memory_file"
    COUNTDOWN = "countdown"
    NONCE = "nonce"
    REMINDER_MOVED = "reminder_moved"  # it was added, removed or changed
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
    OUR_RULE = "our_rule"  # the client's request continues the last one, our version of it does not
    TEMPLATE_STRIPS_REASONING = "template_strips_reasoning"
    TEMPLATE_RERENDERS = "template_rerenders"
    ANOTHER_TASK = "another_task"  # a new session of the same agent
    OTHER_CONVERSATION = "other_conversation"  # another agent: other tools, or another system text
    SIDE_QUESTION = "side_question"  # the agent's history behind another head


@dataclass(frozen=True, slots=True)
class Seen:
    """A cause as people read it, and the rule that undoes it."""

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
        Cause.SYSTEM_EDITED: Seen("the system text was edited", RuleName.REFRESHED_CONTEXT),
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
        Cause.SIDE_QUESTION: Seen("a question with its history behind another head", RuleName.SIDE_QUESTION),
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
