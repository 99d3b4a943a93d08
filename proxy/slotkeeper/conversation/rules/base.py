"""What canonical rules share: names, modes, comparison of a request with the one before it, notes.

A rule is a small object without state. It sees the request (after the rules before it) and the conversation
that the request continues, and yields edits and facts. Edits restore first values; facts are values that an
edit took out and that a note in the newest user message must tell.

A note follows the newest message of the request for which it was made, and follows that same message in every
later request: the client does not know of it, and the engine's prompt must not lose it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

import orjson

from slotkeeper.conversation.layout import (
    Conversation,
    Doc,
    Edit,
    Layout,
    Message,
    Note,
    Notes,
    Role,
    Section,
    Text,
)


class Mode(StrEnum):
    OFF = "off"
    OBSERVE = "observe"  # report what the rule would have saved
    FIX = "fix"


class RuleName(StrEnum):
    """The rules by name, as in settings, logs, metrics, `why` and tests."""

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
    PRUNED_RESULTS = "pruned_results"
    REFRESHED_CONTEXT = "refreshed_context"
    SIDE_QUESTION = "side_question"


# At most 1/ANSWER of the context is reserved for an answer: Claude Code and opencode ask for 32,000 tokens
# for any model, Qwen Code for all that its prompt leaves, and others name no limit.
ANSWER: Final = 4
# 1/TURN of the context is reserved for a turn's tool results: of 64 recorded turns of ten agents, half add
# more than 2,100 tokens, and the longest adds 12,300. Of 65,536 tokens this part is 8,192.
TURN: Final = 8
# At most 1/ASIDE of it is reserved for the answer to a side question: Codex asks for a summary when nine
# tenths of the context are full.
ASIDE: Final = 16


@dataclass(frozen=True, slots=True)
class Room:
    """The capacity of one slot of an engine, in tokens."""

    context: int  # of the slot
    asked: int | None = None  # the client's limit of the answer; None: it names none

    @property
    def limit(self) -> int:
        """The longest prompt; the rest of the context is for the answer."""
        return self._beside_answer(self.context // ANSWER)

    @property
    def limit_aside(self) -> int:
        """The longest prompt of a side question that is sent with its agent's tools."""
        return self._beside_answer(self.context // ASIDE)

    def _beside_answer(self, kept: int) -> int:
        """Return the context without room for the answer: `kept` tokens, or fewer if fewer are asked for."""
        return self.context - (kept if self.asked is None else max(1, min(kept, self.asked)))

    @property
    def headroom(self) -> int:
        """The room that a prompt leaves free in addition when the user begins a turn."""
        return self.context // TURN


@dataclass(frozen=True)
class Scene:
    """The input of a rule."""

    now: Layout
    before: Conversation | None
    common: int  # messages after the system text that are the same in both
    kin: Conversation | None = None  # the latest of other conversations of the same agent
    room: Room | None = None  # None: the slot's capacity is not known
    asked: Conversation | None = None  # of an agent of which this is a side question: `likeness.asked_aside`

    @cached_property
    def altered(self) -> tuple[tuple[int, Message, Message], ...]:
        """The messages of `paired` in which a rule may find a difference, each with its index there.

        A layout takes over the equal messages of the request before: nearly all of a long conversation.
        """
        pairs = enumerate(paired(self))
        return tuple((at, message, first) for at, (message, first) in pairs if message is not first)

    @cached_property
    def told(self) -> Mapping[str, str]:
        """What the notes in this request tell, by place; of several about one place, the last counts."""
        notes = carried(self.now, self.before, self.common)
        return {
            place: text for at in sorted(notes) for note in notes[at] for place, text in note.told.items()
        }


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact that an edit took out of its place, to be told in the newest user message."""

    place: str  # identifies the fact: it replaces one told earlier under the same place
    text: str  # as the note tells it
    current: str | None = None  # what counts there from now on, if that is not the note's text
    plain: bool = False  # told in the user's message itself, not in a reminder


class Rule(Protocol):
    """A rule: it undoes one cause of needless prefills."""

    name: RuleName
    default: Mode
    about: str  # what clients do
    safe: str  # why the model loses nothing by the change

    def changes(self, scene: Scene) -> Iterator[Edit | Fact]:
        """Yield the changes; none if the request is canonical already."""
        ...


# -- modes of rules by client: `--rules NAME=MODE[@CLIENT]` ----------------------------------------------

ALL: Final = "all"
ANYBODY: Final = "*"

Modes = Mapping[RuleName, Mode]


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of `--rules`."""

    names: tuple[RuleName, ...]
    mode: Mode
    client: str = ANYBODY  # a shell pattern for its User-Agent, in lower case

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `NAME=MODE` or `NAME=MODE@CLIENT`; NAME may be `all`.

        Raises ValueError that says what is meant.
        """
        name, equals, rest = text.strip().partition("=")
        mode, _, client = rest.partition("@")
        if not equals or mode not in tuple(Mode):
            raise ValueError(f"{text!r} is not NAME=MODE or NAME=MODE@CLIENT, with MODE one of {_list(Mode)}")
        if name != ALL and name not in tuple(RuleName):
            raise ValueError(f"there is no rule {name!r}; rules are {_list(RuleName)}, or all of them: {ALL}")
        names = tuple(RuleName) if name == ALL else (RuleName(name),)
        return cls(names, Mode(mode), client.lower() or ANYBODY)


@dataclass(frozen=True, slots=True)
class Choice:
    """The modes that the user chose, over the rules' defaults.

    Of several settings that match, the last one wins.
    """

    settings: tuple[Setting, ...]
    defaults: Modes

    @classmethod
    def of(cls, texts: Iterable[str], defaults: Modes) -> Self:
        """Parse the settings. Raises ValueError."""
        return cls(tuple(Setting.parse(text) for text in texts), MappingProxyType(dict(defaults)))

    def for_client(self, user_agent: str) -> Modes:
        modes = dict(self.defaults)
        for setting in self.settings:
            if fnmatchcase(user_agent.lower(), setting.client):
                modes |= dict.fromkeys(setting.names, setting.mode)
        return modes


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


# -- comparing a request with the one before it ----------------------------------------------------------

_SETS: Final = frozenset({"required"})  # lists of a JSON schema whose order has no meaning
_DATA: Final = frozenset({"default", "enum", "const", "examples"})  # their values are not schemas
_EXACT: Final = 1 << 53  # integers below this are exact as doubles


def alike(one: Any, other: Any, *, schema: bool = False) -> bool:
    """Whether both are the same JSON value: `1` equals `1.0`, and the order of keys does not count.

    In a schema, the order of `required` does not count either.
    """
    try:
        return _alike(one, other, schema)
    except RecursionError:
        return False


def same_writing(one: Any, other: Any) -> bool:
    """Whether both are written as the same JSON text: the order of keys counts, and `1` is not `1.0`."""
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    with suppress(orjson.JSONEncodeError):  # integers of more than 64 bits, or nested too deep
        return orjson.dumps(one) == orjson.dumps(other)
    try:
        return repr(one) == repr(other)
    except RecursionError:  # nested too deep to be compared: no rule changes it
        return True


def size(value: Any) -> int:
    """Return the length of the value's text, in characters; 0 if it is nested too deep."""
    try:
        return len(repr(value))
    except RecursionError:
        return 0


def parsed(arguments: Any) -> Any:
    """Return the arguments of a call, parsed if they are JSON text; None if they are not JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _alike(one: Any, other: Any, schema: bool) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_member(key, one, other, schema) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_alike(a, b, schema) for a, b in zip(one, other, strict=True))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return _same_number(one, other)
    return type(one) is type(other) and bool(one == other)


def _member(key: str, one: dict[str, Any], other: dict[str, Any], schema: bool) -> bool:
    a, b = one[key], other[key]
    if schema and key in _SETS and _names(a) and _names(b):
        return sorted(a) == sorted(b)
    return _alike(a, b, schema and key not in _DATA)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _same_number(one: float, other: float) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other and (type(one) is type(other) or abs(one) < _EXACT)


# -- messages in pairs -----------------------------------------------------------------------------------

ITEMS: Final = 64  # most items of one reply in a Responses body


def paired(scene: Scene) -> Iterator[tuple[Message, Message]]:
    """Yield the messages after the system text that were sent before: as received now, and as sent then."""
    if scene.before is None:
        return
    now, sent = scene.now, scene.before.sent
    yield from zip(
        now.messages[now.lead : now.lead + scene.common],
        sent.messages[sent.lead : sent.lead + scene.common],
        strict=False,
    )


def new(scene: Scene) -> range:
    """The indices of the messages that were not sent before."""
    return range(min(scene.now.lead + scene.common, len(scene.now.messages)), len(scene.now.messages))


def sampled(before: Conversation, messages: Sequence[Message], at: int) -> Doc | None:
    """Return the reply that message `at` is or belongs to, as the engine gave it.

    The reply is identified by the ids of its calls, else by its text. In a Responses body one reply is
    several items, so the items of the reply after `at` are examined too.
    """
    said = ""
    for message in messages[at : at + ITEMS]:
        if message.role is not Role.ASSISTANT:
            return None
        known = next((before.replies[call.id] for call in message.calls if call.id in before.replies), None)
        if known and (not said or _says(known, said)):
            return known
        if message.calls or said:
            return None
        said = message.said.strip()
        found = _saying(before, said) if said else None
        if found:
            return found
    return None


def _saying(before: Conversation, said: str) -> Doc | None:
    """Return the one reply without calls that has this text. None if two different ones have it."""
    found = [reply for reply in before.replies.values() if not reply.get("tool_calls") and _says(reply, said)]
    return found[0] if found and all(reply == found[0] for reply in found) else None


def _says(reply: Doc, said: str) -> bool:
    content = reply.get("content")
    return isinstance(content, str) and content.strip() == said


# -- notes -----------------------------------------------------------------------------------------------

OPENING: Final = "<system-reminder>"
CLOSING: Final = "</system-reminder>"
HEADING: Final = "Changed since. This replaces what stands further up:"
_BETWEEN: Final = "\n\n"


def note_edits(
    layout: Layout, before: Conversation | None, common: int, facts: Sequence[Fact]
) -> tuple[list[Edit], Notes]:
    """Return the edits that put all notes in place, and the notes by message, for the conversation's record.

    A message that has its notes already stays unchanged.
    """
    notes = dict(carried(layout, before, common))
    at = place(layout, common)
    if facts and at is not None:
        notes[at] = (*notes.get(at, ()), *_notes(facts))
    return [*_behind(layout, notes)], notes


def note(facts: Sequence[Fact]) -> Note:
    """Return one block with all facts. Of two facts with the same place, the later one counts."""
    latest = {fact.place: fact for fact in facts}
    text = f"{OPENING}\n{_BETWEEN.join((HEADING, *(fact.text for fact in latest.values())))}\n{CLOSING}"
    return Note(text, _told(latest.values()))


def _notes(facts: Sequence[Fact]) -> Iterator[Note]:
    """Yield a note with the facts for a reminder, and one with those that are told plainly."""
    if reminded := [fact for fact in facts if not fact.plain]:
        yield note(reminded)
    if plain := [fact for fact in facts if fact.plain]:
        yield Note(_BETWEEN.join(fact.text for fact in plain), _told(plain))


def _told(facts: Iterable[Fact]) -> dict[str, str]:
    return {fact.place: fact.text if fact.current is None else fact.current for fact in facts}


def place(layout: Layout, common: int) -> int | None:
    """Return the index of the message after which facts are told. None: the conversation has no user message.

    It is the newest user message, if that is new; else, between calls of tools, the newest result; else (the
    same request again) the newest user message anyway.
    """
    new, user = layout.lead + common, layout.newest_user
    if user is not None and user >= new:
        return user
    for at in range(len(layout.messages) - 1, new - 1, -1):
        if _end(layout.messages[at]):
            return at
    return user


def carried(layout: Layout, before: Conversation | None, common: int) -> Notes:
    """Return the notes of messages that this request also has, by their index in it."""
    if before is None:
        return {}
    lead = before.sent.lead
    return {
        at - lead + layout.lead: notes for at, notes in before.notes.items() if lead <= at < lead + common
    }


def tellable(text: str) -> bool:
    """Whether a text can be part of a note without ending it."""
    return CLOSING not in text and OPENING not in text


def ours(text: str) -> bool:
    """Whether a reminder is one of our notes, not the client's."""
    return text.startswith(HEADING)


def has_been_here(layout: Layout, before: Conversation | None, common: int) -> bool:
    """Whether this request has its notes already. A client's own request never has."""
    ends = (_end(layout.messages[at]) for at in carried(layout, before, common))
    return any(end is not None and HEADING in end.text for end in ends)


def _behind(layout: Layout, notes: Notes) -> Iterator[Edit]:
    for at, told in notes.items():
        end = _end(layout.messages[at])
        if end is None:
            continue
        missing = [note.text for note in told if note.text not in end.text]
        if missing:
            yield Edit(end.path, end.text, _BETWEEN.join(filter(None, (end.text, *missing))))


def _end(message: Message) -> Text | None:
    """Return the text that a note is appended to: the last text of the user, else the last of a tool."""
    for section in (Section.USER, Section.RESULT):
        for text in reversed(message.texts):
            if text.section is section:
                return text
    return None
