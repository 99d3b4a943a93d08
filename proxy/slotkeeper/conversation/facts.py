"""What agents put into prompts that changes by itself (dates, clocks, folders, git), and messages without it.

Each is found by the words that a real client's program puts around it (`phrases`). Texts
that a person wrote are searched for whole blocks in tags only: people do not type those, and a date in
a sentence is no fact.
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

REMEMBERED: Final = 16  # texts: several rules ask for the facts in the same few ones, one after the other

SEARCHED: Final = 2**20  # characters of a text: what stands behind them is no program's preamble
MOST: Final = 256  # facts of one form in a text; what has more is data
FENCE: Final = "```"
_BLANKS: Final = " \t\r"


@dataclass(frozen=True, slots=True)
class FoundFact:
    """One stretch of a text: `text[start:end]`."""

    kind: FactKind
    start: int
    end: int
    value: str  # what changes in it
    label: str = ""  # which of its kind: the name of a file, the key of a line


def facts(text: str, *, authored: bool = False) -> tuple[FoundFact, ...]:
    """In their order; they do not overlap. A reminder hides what stands in it.

    Authored: a person may have written it, so that only blocks that programs write are facts.
    """
    return found_in(text[:SEARCHED], authored)  # so much of a text is kept, and no more


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
    """Those in one text of a request: all in system text, blocks in what users and tools say, else none."""
    if text.section is Section.SYSTEM:
        return facts(text.text)
    if text.section in {Section.USER, Section.RESULT}:
        return facts(text.text, authored=True)
    return ()


def bare(text: Text) -> str:
    """What is left of it without its facts; blank lines are nothing, as a fact may have stood there."""
    lines = (line.rstrip(_BLANKS) for part in _rest(text) for line in part.split("\n"))
    return "\n".join(filter(None, lines)).strip()


def only_facts_differ(one: Text, other: Text) -> bool:
    """Whether they say the same but for their facts, and for blank lines."""
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
    """From the innermost opening tag to the one that closes it."""
    at = 0
    while (close := text.find(form.close, at)) >= 0:
        before, start = at, text.rfind(form.anchor, at, close)
        at = close + len(form.close)
        line = text.rfind("\n", before, start) + 1 if start >= 0 else 0
        first = line or not before  # else another block stands before it in its line
        if start >= 0 and first and not text[line:start].strip():
            value = text[start + len(form.anchor) : close].strip()
            yield FoundFact(form.kind, start, _end(form.kind, text, start, at), value)


class _Phrases:
    """The facts of one form in one text. No stretch of it is looked at twice for the same thing."""

    def __init__(self, form: PhraseForm, text: str) -> None:
        self._form = form
        self._text = text
        self._next: dict[str, int] = {}  # where a word stands next; -1: nowhere any more
        self._lines: dict[str, list[int]] | None = None

    def found(self) -> Iterator[FoundFact]:
        text, anchor = self._text, self._form.anchor
        at, match = text.find(anchor), None
        line_end = -1  # of the line that was looked at last
        while at >= 0:
            if at > line_end:  # in the same line the same would come of it
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
        """Where the first of the words stands that end it; else the text's end."""
        ends = (self._find(word, start - 1) for word in self._form.until)
        return min((at for at in ends if at >= 0), default=len(self._text))

    def _closed(self, start: int, groups: dict[str, Any]) -> tuple[int, int] | None:
        """Where the end of a fact that began before `start` begins and ends; None where it has none."""
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
        """Like str.find, for starts that never go back: what lies ahead is looked for once."""
        at = self._next.get(word, -2)
        if at == -2 or 0 <= at < start:
            at = self._next[word] = self._text.find(word, start)
        return at

    def _last_lines(self) -> dict[str, list[int]]:
        """All lines that may be last ones, with the line ends before them."""
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
    """Without white space at its end; but the empty lines behind a reminder go with it."""
    if kind is not FactKind.REMINDER:
        return start + len(text[start:end].rstrip())
    while text.startswith("\n", end):
        end += 1
    return end


# -- messages compared without them ----------------------------------------------------------------------

DIGEST_BYTES: Final = 16
_EXACT: Final = 2**53  # from here on not every whole number is a float


class _Form(NamedTuple):
    """What is left of a message when everything is gone that may differ."""

    role: Role
    said: str
    calls: tuple[tuple[str, bytes], ...]
    media: tuple[bytes, ...]


def same(one: Message, other: Message) -> bool:
    """Whether it is the same message, but for facts, reminders, reasoning, ids, and white space at ends.

    How its text is parted is nothing, and so are blank lines: a fact may have stood between them.
    """
    return one is other or _alike(one, other) or _form(one) == _form(other)


def digest(message: Message) -> bytes:
    """Equal for messages that are the same. Kept in the message, as the very same one comes again."""
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
    """Whether nothing in it has to be looked into."""
    return (
        one.role is other.role
        and one.media == other.media
        and one.has_texts_of(other)
        and _as_sent(one.calls) == _as_sent(other.calls)
    )


def _as_sent(calls: Iterable[Call]) -> list[tuple[str, str | bytes]]:
    """Not the objects themselves: to Python, 1 and true are one."""
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
    """Equal for equal JSON values, however they are written."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = orjson.loads(arguments) if arguments.strip() else {}
        except orjson.JSONDecodeError:  # cut short, or no JSON at all
            return _bytes(arguments.strip())
    try:
        return orjson.dumps(_whole(value), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONEncodeError, RecursionError):  # nested too deep: then it is like nothing but itself
        return _bytes(arguments) if isinstance(arguments, str) else b"%d" % id(arguments)


def _whole(value: Any) -> Any:
    """With 1 for 1.0: agents that read arguments and write them again often change that."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return value


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
