"""The layout of a generation request, for every API: the pieces that reach its prompt, and facts in them.

A path leads from the body's outermost object to a value in it: keys and indices, as in JSON. A text that is
absent but may be added has a path as well, and is empty.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any, Final, NamedTuple

import orjson

from slotkeeper.conversation.phrases import FORMS, PROGRAMS, FactKind, PhraseForm
from slotkeeper.scheduler.prompts.tokens import Tokens

Path = tuple[str | int, ...]
Doc = dict[str, Any]

NOWHERE: Final[Path] = ()


class Role(StrEnum):
    SYSTEM = "system"  # also developer, instructions, Anthropic's `system`
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Section(StrEnum):
    """The part of a request to which a text belongs."""

    OPTIONS = "options"  # other fields that change how the template renders: thinking, tool_choice
    TOOLS = "tools"
    SYSTEM = "system"
    USER = "user"
    REPLY = "reply"
    REASONING = "reasoning"
    CALL = "call"
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class Text:
    """One string of the body that reaches the prompt."""

    path: Path
    text: str
    section: Section


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a reply."""

    name: str
    id: str
    id_path: Path
    arguments: Any  # JSON text, or the object where the API has objects (Anthropic)
    arguments_path: Path


@dataclass(frozen=True, slots=True)
class Message:
    """One message, or one item of a Responses body."""

    role: Role
    path: Path  # of the whole message
    texts: tuple[Text, ...] = ()  # in their order, the results of tools included
    calls: tuple[Call, ...] = ()
    answers: tuple[Text, ...] = ()  # the ids of the calls whose results the message carries
    reasoning: Text | None = None  # None: this API has no field for it here
    media: tuple[bytes, ...] = ()  # digests of images and audio, which are in no text
    content: Any = None  # the body's `content`, so that a rule can restore it whole; None with media
    # Of a system message, so that a rule can put it back: the message in the body's list, or the one field
    # beside the list.
    doc: Doc | None = None
    # Digest of the message without the facts that change by themselves; `digest` computes it once.
    loose_digest: bytes | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def said(self) -> str:
        """All texts of the message, joined by line ends."""
        return "\n".join(text.text for text in self.texts)

    @property
    def reasoning_text(self) -> str:
        return self.reasoning.text if self.reasoning else ""

    @property
    def answered_ids(self) -> list[str]:
        """The ids of the calls whose results the message carries."""
        return [answer.text for answer in self.answers]

    def has_texts_of(self, other: Message) -> bool:
        """Whether both messages have the same texts, one by one."""
        return [text.text for text in self.texts] == [text.text for text in other.texts]

    def pieces(self) -> Iterator[Text]:
        """Yield all texts of the message, reasoning first, as templates write them."""
        if self.reasoning and self.reasoning.text:
            yield self.reasoning
        yield from self.texts


@dataclass(frozen=True, slots=True)
class Layout:
    """A request. `messages` begins with the system text that some APIs keep outside their list."""

    messages: tuple[Message, ...]
    tools: tuple[Doc, ...] = ()  # as in the body
    tools_path: Path = ("tools",)
    options: Doc = field(default_factory=dict)  # other keys that change the prompt
    no_calls: str | None = "none"  # the `tool_choice` that forbids calls; None: this API has none
    between: bool = field(init=False, default=False, compare=False)  # system messages stand between others

    def __post_init__(self) -> None:
        between = any(message.role is Role.SYSTEM for message in islice(self.messages, self.lead, None))
        object.__setattr__(self, "between", between)

    @property
    def lead(self) -> int:
        """The number of system messages at the beginning."""
        return next((n for n, m in enumerate(self.messages) if m.role is not Role.SYSTEM), len(self.messages))

    @property
    def spoken(self) -> list[tuple[int, Message]]:
        """The messages of user, model and tools, each with its index."""
        return [(at, message) for at, message in enumerate(self.messages) if message.role is not Role.SYSTEM]

    @property
    def has_reply(self) -> bool:
        return any(message.role is Role.ASSISTANT for message in self.messages)

    @property
    def newest_user(self) -> int | None:
        """The index of the last message with a text from the user."""
        for at in range(len(self.messages) - 1, -1, -1):
            if any(text.section is Section.USER for text in self.messages[at].texts):
                return at
        return None


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one value in the body, or of a list's length."""

    path: Path
    before: Any  # None: the value was absent
    after: Any
    moved: int = 0  # bytes that were sent before and are now in another place than the client put them
    item: bool = False  # an item of a list is inserted at the path (`before` is None) or removed from there


def edited(body: Doc, edits: Iterable[Edit]) -> Doc:
    """Return a body with the edits applied; it shares all values on no edit's path with the old body.

    Raises KeyError, IndexError or TypeError for a path that does not exist in the body.
    """
    for edit in edits:
        body = _put(body, edit.path, edit)
    return body


def _put(value: Any, path: Path, edit: Edit) -> Any:
    if not path:
        return edit.after
    key, *rest = path
    if isinstance(value, list):
        if not isinstance(key, int):
            raise TypeError(f"{key!r} in a list")
        if edit.item and not rest:
            inserted = () if edit.after is None else (edit.after,)
            return [*value[:key], *inserted, *value[key + (edit.before is not None) :]]
        return [*value[:key], _put(value[key], tuple(rest), edit), *value[key + 1 :]]
    if not isinstance(value, dict) or (rest and key not in value):
        raise KeyError(key)
    return {**value, key: _put(value[key], tuple(rest), edit) if rest else edit.after}


# -- a conversation --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Who:
    """The client of a request. Requests of two clients never belong to one conversation."""

    client: str  # digests of the API key (else of the address) and of the User-Agent
    name: str | None = None  # the client's name for the conversation


@dataclass(frozen=True, slots=True)
class Note:
    """A text that we put behind a message, and what it tells."""

    text: str
    told: Mapping[str, str]  # what is current from then on, by place


Notes = Mapping[int, tuple[Note, ...]]  # by the index of the message that they follow


@dataclass(slots=True, eq=False)
class Conversation:
    """A line of requests, each of which continued the one before it."""

    number: int
    who: Who
    received: Layout  # the last request, as the client sent it
    sent: Layout  # the last request as the engine got it, without the notes
    at: float  # time of the last request, in seconds
    notes: Notes = field(default_factory=dict)  # put behind a message when it was new
    replies: dict[str, Doc] = field(default_factory=dict)  # messages as sampled, by the ids of their calls
    tokens: Tokens | None = None  # the last prompt; None: not known
    size: int = 0  # characters kept
    aside: bool = False  # a side request (a title, a suggestion): only its own next request continues it
    line: int = 0  # id of one agent's line; a conversation with more tools gets a new line, but no new number
    rules: tuple[str, ...] = ()  # names of the rules that changed the last request
    keyed: bool = False  # one of its requests held a key


@dataclass(frozen=True, slots=True)
class Keys:
    """The index keys by which a request's conversation is found."""

    first: tuple[bytes, ...]  # from the first user message
    kin: tuple[bytes, ...]  # from the text and tools that conversations of one agent share
    replies: tuple[bytes, ...] = ()  # from the newest reply


@dataclass(frozen=True, slots=True)
class Near:
    """The stored conversations that a request may continue, and their relatives."""

    lines: tuple[Conversation, ...]
    kin: tuple[Conversation, ...]
    beside: Conversation | None  # the latest of this client that has tools


@dataclass(frozen=True, slots=True)
class Match:
    """The conversation that a request continues, and other conversations to compare it with."""

    before: Conversation | None  # the one that the request continues
    common: int = 0  # messages after the system text that both have in common
    sibling: Conversation | None = None  # another of the same client, with the same system text or tools
    beside: Conversation | None = None  # the latest of this client that has tools
    same_agent: bool = True  # whether `before` is of the same agent: see `likeness.same_agent`
    moved: bool = False  # all of `before` is there, but system messages between came, went or moved
    keys: Keys | None = field(default=None, compare=False)  # the request's index keys

    @property
    def whole(self) -> bool:
        """Whether all messages of the request before are in this one."""
        if self.before is None:
            return False
        return self.moved or self.common >= len(self.before.received.messages) - self.before.received.lead

    @property
    def nearest(self) -> Conversation | None:
        """The conversation to compare with: the continued one, else the latest of the agent or client."""
        return self.before or self.sibling or self.beside

    @property
    def remembered(self) -> Conversation | None:
        """The conversation whose text rules may restore; None if another agent's, even in one session."""
        return self.before if self.same_agent else None


def says(message: Message, phrases: tuple[str, ...]) -> bool:
    """Whether a text of the message, other than a tool's result, begins with one of these phrases."""
    return any(
        text.section is not Section.RESULT and text.text[:200].lstrip().startswith(phrases)
        for text in message.texts
    )


def user_says(message: Message, phrases: tuple[str, ...]) -> bool:
    return message.role is Role.USER and says(message, phrases)


# -- facts: what changes in a text by itself ------------------------------------------------------------

# Finds facts that agents' programs put into prompts and change: dates, clocks, folders, git status.
#
# Each fact is found by the words that a real client's program puts around it (`phrases`). Texts that a
# person wrote are searched only for whole blocks in tags: people do not type those, and a date in a
# sentence is not a fact. The module also compares messages without their facts.


__all__ = ["FactKind", "FoundFact", "bare", "facts", "facts_of", "only_facts_differ"]

REMEMBERED: Final = 16  # texts: several rules ask for the facts of the same few texts in turn

SEARCHED: Final = 2**20  # characters of a text; no program's preamble is longer
MOST: Final = 256  # facts of one form in a text; a text with more is data
FENCE: Final = "```"
_BLANKS: Final = " \t\r"


@dataclass(frozen=True, slots=True)
class FoundFact:
    """A fact found in a text, at `text[start:end]`."""

    kind: FactKind
    start: int
    end: int
    value: str  # the part that changes
    label: str = ""  # tells facts of one kind apart: a file's name or a line's key


def facts(text: str, *, authored: bool = False) -> tuple[FoundFact, ...]:
    """Find the facts of a text, in order and without overlap. Nothing inside a reminder counts as a fact.

    `authored`: a person may have written the text, so that only blocks that programs write are facts.
    """
    return found_in(text[:SEARCHED], authored)  # the cache keeps at most this much of a text


@lru_cache(maxsize=REMEMBERED)
def found_in(text: str, authored: bool) -> tuple[FoundFact, ...]:
    found = [fact for form in (PROGRAMS if authored else FORMS) for fact in islice(_found(form, text), MOST)]
    found.sort(key=lambda fact: (fact.start, -fact.end))
    kept: list[FoundFact] = []
    for fact in found:
        if not kept or fact.start >= kept[-1].end:
            kept.append(fact)
    return tuple(kept)


def facts_of(text: Text) -> tuple[FoundFact, ...]:
    """Find the facts of one text of a request: all in system text, only blocks in user texts and results."""
    if text.section is Section.SYSTEM:
        return facts(text.text)
    if text.section in {Section.USER, Section.RESULT}:
        return facts(text.text, authored=True)
    return ()


def bare(text: Text) -> str:
    """Return the text without its facts and blank lines; a fact may have been on a blank line."""
    lines = (line.rstrip(_BLANKS) for part in _rest(text) for line in part.split("\n"))
    return "\n".join(filter(None, lines)).strip()


def only_facts_differ(one: Text, other: Text) -> bool:
    """Whether two texts are the same apart from their facts and blank lines."""
    return _rest(one) == _rest(other) or bare(one) == bare(other)


def _rest(text: Text) -> list[str]:
    parts: list[str] = []
    at = 0
    for fact in facts_of(text):
        parts.append(text.text[at : fact.start])
        at = fact.end
    return [*parts, text.text[at:]]


def _found(form: PhraseForm, text: str) -> Iterator[FoundFact]:
    return _blocks(form, text) if form.close else _Phrases(form, text).found()


def _blocks(form: PhraseForm, text: str) -> Iterator[FoundFact]:
    """Yield each block, from the innermost opening tag to its closing tag."""
    at = 0
    while (close := text.find(form.close, at)) >= 0:
        before, start = at, text.rfind(form.anchor, at, close)
        at = close + len(form.close)
        line = text.rfind("\n", before, start) + 1 if start >= 0 else 0
        first = line or not before  # else another block is before it in this line
        if start >= 0 and first and not text[line:start].strip():
            value = text[start + len(form.anchor) : close].strip()
            yield FoundFact(form.kind, start, _end(form.kind, text, start, at), value)


class _Phrases:
    """Finds the facts of one form in one text. No part of the text is searched twice for the same thing."""

    def __init__(self, form: PhraseForm, text: str) -> None:
        self._form = form
        self._text = text
        self._next: dict[str, int] = {}  # index of a word's next occurrence; -1: none is left
        self._lines: dict[str, list[int]] | None = None

    def found(self) -> Iterator[FoundFact]:
        text, anchor = self._text, self._form.anchor
        at, match = text.find(anchor), None
        line_end = -1  # of the line that was matched last
        while at >= 0:
            if at > line_end:  # matching the same line again would give the same result
                line = text.rfind("\n", max(0, line_end), at) + 1
                line_end = text.find("\n", at)
                line_end = len(text) if line_end < 0 else line_end
                match = self._form.pattern.match(text, line)
            past = at + len(anchor)
            if match and match.end() > at:
                if fact := self._fact(match):
                    past = max(past, fact.end)
                    yield fact
                else:
                    match = None
            at = text.find(anchor, past)

    def _fact(self, match: re.Match[str]) -> FoundFact | None:
        form, text, groups = self._form, self._text, match.groupdict()
        start, end = match.span("fact" if "fact" in groups else 0)
        value = groups.get("value") or ""
        if form.ends or form.last_line:
            closed = self._closed(match.end(), groups)
            if closed is None:
                return None
            value, end = text[match.end() : closed[0]], closed[1]
        elif form.until:
            inner, end = end, self._until(end)
            value = text[inner:end]
        kind = FactKind.CLOCK if groups.get("time") else form.kind
        return FoundFact(kind, start, _end(kind, text, start, end), value.strip(), groups.get("label") or "")

    def _until(self, start: int) -> int:
        """Return where the first of the form's closing words begins; without one, the text's length."""
        ends = (self._find(word, start - 1) for word in self._form.until)
        return min((at for at in ends if at >= 0), default=len(self._text))

    def _closed(self, start: int, groups: dict[str, Any]) -> tuple[int, int] | None:
        """Return start and end of the words that close a fact that opened before `start`; None if missing."""
        ends = self._form.ends
        if ends:
            at = self._find(ends, start)
        else:
            ends = "\n" + self._form.last_line.format(**groups)
            places = self._last_lines().get(ends, ())
            after = bisect_left(places, start)
            at = places[after] if after < len(places) else -1
        return None if at < 0 else (at, at + len(ends))

    def _find(self, word: str, start: int) -> int:
        """Like str.find, for ascending starts only, so that no part of the text is searched twice."""
        at = self._next.get(word, -2)
        if at == -2 or 0 <= at < start:
            at = self._next[word] = self._text.find(word, start)
        return at

    def _last_lines(self) -> dict[str, list[int]]:
        """Return the places of all lines that may be last lines, by line with the line end before it."""
        if self._lines is None:
            self._lines = defaultdict(list)
            text, begin = self._text, "\n" + (self._form.last_line.partition("{")[0] or FENCE)
            at = text.find(begin)
            while at >= 0:
                end = text.find("\n", at + 1)
                end = len(text) if end < 0 else end
                self._lines[text[at:end]].append(at)
                at = text.find(begin, end)
        return self._lines


def _end(kind: FactKind, text: str, start: int, end: int) -> int:
    """Return the end of a fact without white space; a reminder includes the empty lines after it."""
    if kind is not FactKind.REMINDER:
        return start + len(text[start:end].rstrip())
    while text.startswith("\n", end):
        end += 1
    return end


# -- messages compared without facts ----------------------------------------------------------------------

DIGEST_BYTES: Final = 16
_EXACT: Final = 2**53  # from here on, not every integer is exact as a float


class _Form(NamedTuple):
    """The parts of a message that count when two are compared loosely."""

    role: Role
    said: str
    calls: tuple[tuple[str, bytes], ...]
    media: tuple[bytes, ...]


def same(one: Message, other: Message) -> bool:
    """Whether two messages are the same apart from facts, reminders, reasoning, ids and white space at ends.

    It does not matter how the text is divided into parts, nor do blank lines: a fact may have been between
    them.
    """
    return one is other or _alike(one, other) or _form(one) == _form(other)


def digest(message: Message) -> bytes:
    """Return a digest that is equal for messages that `same` calls the same. The message caches it."""
    known = message.loose_digest
    if known is None:
        known = _digest(message)
        object.__setattr__(message, "loose_digest", known)
    return known


def _digest(message: Message) -> bytes:
    form = _form(message)
    hashed = blake2b(digest_size=DIGEST_BYTES)
    pieces = [form.role.encode(), _bytes(form.said), *form.media]
    for name, arguments in form.calls:
        pieces += [_bytes(name), arguments]
    for piece in pieces:
        hashed.update(b"%d:" % len(piece))
        hashed.update(piece)
    return hashed.digest()


def _alike(one: Message, other: Message) -> bool:
    """Whether two messages are equal, facts included: a cheap test that `same` makes first."""
    return (
        one.role is other.role
        and one.media == other.media
        and one.has_texts_of(other)
        and _as_sent(one.calls) == _as_sent(other.calls)
    )


def _as_sent(calls: Iterable[Call]) -> list[tuple[str, str | bytes]]:
    """Return the calls in a form that compares correctly: in Python, 1 == True."""
    return [(c.name, c.arguments if isinstance(c.arguments, str) else _value(c.arguments)) for c in calls]


def _form(message: Message) -> _Form:
    said = (bare(text) for text in message.texts if text.section is not Section.REASONING)
    return _Form(
        role=message.role,
        said="\n".join(text for text in said if text),
        calls=tuple((call.name, _value(call.arguments)) for call in message.calls),
        media=message.media,
    )


def _value(arguments: Any) -> bytes:
    """Return bytes that are equal for equal JSON values, however these are written."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = orjson.loads(arguments) if arguments.strip() else {}
        except orjson.JSONDecodeError:  # truncated, or not JSON
            return _bytes(arguments.strip())
    try:
        return orjson.dumps(_whole(value), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONEncodeError, RecursionError):  # nested too deep: equal only to itself
        return _bytes(arguments) if isinstance(arguments, str) else b"%d" % id(arguments)


def _whole(value: Any) -> Any:
    """Return the value with 1 in place of 1.0.

    Agents that parse arguments and write them again often change that.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return value


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
