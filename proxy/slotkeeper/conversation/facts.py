"""Finds facts that agents' programs put into prompts and change: dates, clocks, folders, git status.

Each fact is found by the words that a real client's program puts around it (`phrases`). Texts that a person
wrote are searched only for whole blocks in tags: people do not type those, and a date in a sentence is not a
fact. The module also compares messages without their facts.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any, Final, NamedTuple

import orjson

from slotkeeper.conversation.layout import Call, Message, Role, Section, Text
from slotkeeper.conversation.phrases import FORMS, PROGRAMS, FactKind, PhraseForm

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
