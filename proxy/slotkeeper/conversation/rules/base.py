"""What canonical rules share: names and modes, how a request is compared with the one before it, notes.

A rule is a small object without state. It sees the request (after the rules before it) and the
conversation that it goes on from, and yields edits and facts. Edits put first values back; facts are what
was thereby taken out and must be told in the newest user message, in a note.

A note stands behind the newest message that came with it, and from then on in every request behind the same
message: the client does not know of it, and the engine's prompt must not lose it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

from slotkeeper.conversation.layout import Conversation, Edit, Layout, Message, Role, Section, Text


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
    PRUNED_RESULTS = "pruned_results"


# Of the context, at most this part is kept for an answer: Claude Code and opencode ask for 32,000 tokens
# whatever the model is, Qwen Code for all that its prompt leaves, and others name no limit.
ANSWER: Final = 4
# A user's turn adds results of tools, which must find room as well: of 64 recorded turns of ten agents half
# add more than 2,100 tokens, and the longest 12,300. Of 65,536 tokens this part is 8,192.
TURN: Final = 8


@dataclass(frozen=True, slots=True)
class Room:
    """What one slot of an engine holds, in tokens."""

    context: int  # of the slot
    asked: int | None = None  # for the answer, as the client says; None: it names no limit

    @property
    def limit(self) -> int:
        """Of a prompt: what is left is for the answer."""
        kept = self.context // ANSWER
        return self.context - (kept if self.asked is None else max(1, min(kept, self.asked)))

    @property
    def headroom(self) -> int:
        """That a prompt leaves free as well when a user speaks: a turn begins."""
        return self.context // TURN


@dataclass(frozen=True, slots=True)
class Scene:
    """What a rule sees."""

    now: Layout
    before: Conversation | None
    common: int  # messages behind the system text that are the same in both
    kin: Conversation | None = None  # the latest of other conversations of the same agent
    room: Room | None = None  # None: what an engine holds is not known


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


# -- which rule is in which mode, for which client: `--rules NAME=MODE[@CLIENT]` -------------------------

ALL: Final = "all"
ANYBODY: Final = "*"

Modes = Mapping[RuleName, Mode]


@dataclass(frozen=True, slots=True)
class Setting:
    """One of the user's choices."""

    names: tuple[RuleName, ...]
    mode: Mode
    client: str = ANYBODY  # a shell pattern for its User-Agent, in lower case

    @classmethod
    def parse(cls, text: str) -> Self:
        """`NAME=MODE` or `NAME=MODE@CLIENT`; NAME may be `all`. Raises ValueError that says what is meant."""
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
    """What the user chose, over what every rule is by itself. Of several that fit, the last one counts."""

    settings: tuple[Setting, ...]
    defaults: Modes

    @classmethod
    def of(cls, texts: Iterable[str], defaults: Modes) -> Self:
        """Raises ValueError."""
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

_SETS: Final = frozenset({"required"})  # lists of a JSON schema whose order says nothing
_DATA: Final = frozenset({"default", "enum", "const", "examples"})  # what stands below them is no schema
_EXACT: Final = 1 << 53  # integers up to here are the same as doubles


def alike(one: Any, other: Any, *, schema: bool = False) -> bool:
    """Whether both are the same JSON value: `1` is `1.0`, the order of keys says nothing.

    In a schema the order of `required` says nothing either.
    """
    try:
        return _alike(one, other, schema)
    except RecursionError:
        return False


def same_writing(one: Any, other: Any) -> bool:
    """Whether both become the same JSON text: the order of keys counts, and `1` is not `1.0`."""
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    try:
        return repr(one) == repr(other)
    except RecursionError:  # too deep to be compared: no rule changes it
        return True


def size(value: Any) -> int:
    """Of its writing, in characters; 0 for what is too deep to be compared."""
    try:
        return len(repr(value))
    except RecursionError:
        return 0


def parsed(arguments: Any) -> Any:
    """The arguments of a call: their JSON text read, or the object itself. None for what is not JSON."""
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

Doc = dict[str, Any]

ITEMS: Final = 64  # of one reply in a Responses body, at most


def paired(scene: Scene) -> Iterator[tuple[Message, Message]]:
    """Messages behind the system text that were sent before: as they come now, and as they went on then."""
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
    """The reply, as it was told, that message `at` is or is a part of.

    It is known by the ids of its calls, else by what it says. In a Responses body a reply is several
    items: what stands behind this one, up to the next that is no reply, tells which.
    """
    said = ""
    for message in messages[at : at + ITEMS]:
        if message.role is not Role.ASSISTANT:
            return None
        known = _calling(before, message)
        if known and (not said or _says(known, said)):
            return known
        if message.calls or said:
            return None
        said = message.said.strip()
        found = _saying(before, said) if said else None
        if found:
            return found
    return None


def _calling(before: Conversation, message: Message) -> Doc | None:
    """The reply that made one of its calls."""
    return next((before.replies[call.id] for call in message.calls if call.id in before.replies), None)


def _saying(before: Conversation, said: str) -> Doc | None:
    """The one reply without calls that says this. None if there are two that are not the same."""
    found = [reply for reply in before.replies.values() if not reply.get("tool_calls") and _says(reply, said)]
    return found[0] if found and all(reply == found[0] for reply in found) else None


def _says(reply: Doc, said: str) -> bool:
    content = reply.get("content")
    return isinstance(content, str) and content.strip() == said


# -- notes -----------------------------------------------------------------------------------------------

OPENING: Final = "<system-reminder>"
CLOSING: Final = "</system-reminder>"
HEADING: Final = (
    "Parts of what stands further up have changed since. What follows is current, and replaces it there:"
)
_BETWEEN: Final = "\n\n"

Notes = dict[int, tuple[str, ...]]


def note_edits(
    layout: Layout, before: Conversation | None, common: int, facts: Sequence[Fact]
) -> tuple[list[Edit], Notes]:
    """The edits that put all notes where they belong, and the notes by message, for the record.

    A message that has its notes already keeps them as they are.
    """
    notes = carried(layout, before, common)
    at = place(layout, common)
    if facts and at is not None:
        notes[at] = (*notes.get(at, ()), note(facts))
    return [*_behind(layout, notes)], notes


def note(facts: Sequence[Fact]) -> str:
    """One block that tells them all. Of two that are told under one place, the later one counts."""
    texts = {fact.place: fact.text for fact in facts}.values()
    return f"{OPENING}\n{_BETWEEN.join((HEADING, *texts))}\n{CLOSING}"


def place(layout: Layout, common: int) -> int | None:
    """Behind which message something is told. None: there is no user in this conversation.

    The newest in which a user speaks, if it is new; else, between calls of tools, the newest result; else
    (the same request again) the newest user message all the same.
    """
    new, user = layout.lead + common, layout.newest_user
    if user is not None and user >= new:
        return user
    for at in range(len(layout.messages) - 1, new - 1, -1):
        if _end(layout.messages[at]):
            return at
    return user


def carried(layout: Layout, before: Conversation | None, common: int) -> Notes:
    """The notes of messages that this request has as well, by their index in it."""
    if before is None:
        return {}
    lead = before.sent.lead
    return {
        at - lead + layout.lead: notes for at, notes in before.notes.items() if lead <= at < lead + common
    }


def tellable(text: str) -> bool:
    """Whether it can stand in a note without ending it."""
    return CLOSING not in text and OPENING not in text


def ours(text: str) -> bool:
    """Whether a reminder says what a note says: it is none of the client's."""
    return text.startswith(HEADING)


def has_been_here(layout: Layout, before: Conversation | None, common: int) -> bool:
    """Whether this request has its notes already, as no client's own request does."""
    ends = (_end(layout.messages[at]) for at in carried(layout, before, common))
    return any(end is not None and HEADING in end.text for end in ends)


def _behind(layout: Layout, notes: Notes) -> Iterator[Edit]:
    for at, texts in notes.items():
        end = _end(layout.messages[at])
        if end is None:
            continue
        missing = [text for text in texts if text not in end.text]
        if missing:
            yield Edit(end.path, end.text, _BETWEEN.join(filter(None, (end.text, *missing))))


def _end(message: Message) -> Text | None:
    """The text that a note is put behind: the last that a user says, else that a tool says."""
    for section in (Section.USER, Section.RESULT):
        for text in reversed(message.texts):
            if text.section is section:
                return text
    return None
