"""What agents put into their prompts that changes by itself: dates, clocks, folders, git, reminders.

Each is found by the words that a real client's program puts around it (core/requests/phrases.py). Texts
that a person wrote are searched for whole blocks in tags only: nobody types those, and a date in
somebody's sentence is no fact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from slotkeeper.core.requests.layout import Section, Text
from slotkeeper.core.requests.phrases import FORMS, PROGRAMS, FactKind, Form

__all__ = ["Fact", "FactKind", "bare", "facts", "of", "only_facts_differ"]

REMEMBERED: Final = 16  # texts: several rules ask for the facts in the same few ones, one after the other

_BLANK_LINES: Final = re.compile(r"[ \t\r]*\n(?:[ \t\r]*\n)*")


@dataclass(frozen=True, slots=True)
class Fact:
    """One stretch of a text: `text[start:end]`."""

    kind: FactKind
    start: int
    end: int
    value: str  # what changes in it
    label: str = ""  # which of its kind: the name of a file, the key of a line


@lru_cache(maxsize=REMEMBERED)
def facts(text: str, *, authored: bool = False) -> tuple[Fact, ...]:
    """In their order; they do not overlap. A reminder hides what stands in it.

    Authored: a person may have written it, so that only blocks that programs write are facts.
    """
    found = [fact for form in (PROGRAMS if authored else FORMS) for fact in _found(form, text)]
    found.sort(key=lambda fact: (fact.start, -fact.end))
    kept: list[Fact] = []
    for fact in found:
        if not kept or fact.start >= kept[-1].end:
            kept.append(fact)
    return tuple(kept)


def of(text: Text) -> tuple[Fact, ...]:
    """Those in one text of a request: all in system text, blocks in what users and tools say, else none."""
    if text.section is Section.SYSTEM:
        return facts(text.text)
    if text.section in {Section.USER, Section.RESULT}:
        return facts(text.text, authored=True)
    return ()


def bare(text: Text) -> str:
    """What is left of it without its facts; blank lines are nothing, as a fact may have stood there."""
    return _BLANK_LINES.sub("\n", "\n".join(_rest(text))).strip()


def only_facts_differ(one: Text, other: Text) -> bool:
    """Whether they say the same but for their facts, and for blank lines."""
    return _rest(one) == _rest(other) or bare(one) == bare(other)


def _rest(text: Text) -> list[str]:
    parts: list[str] = []
    at = 0
    for fact in of(text):
        parts.append(text.text[at : fact.start])
        at = fact.end
    return [*parts, text.text[at:]]


def _found(form: Form, text: str) -> Iterator[Fact]:
    return _blocks(form, text) if form.close else _phrases(form, text)


def _blocks(form: Form, text: str) -> Iterator[Fact]:
    """From the innermost opening tag to the one that closes it."""
    at = 0
    while (close := text.find(form.close, at)) >= 0:
        start = text.rfind(form.anchor, at, close)
        at = close + len(form.close)
        if start >= 0 and not text[text.rfind("\n", 0, start) + 1 : start].strip():
            value = text[start + len(form.anchor) : close].strip()
            yield Fact(form.kind, start, _end(form.kind, text, start, at), value)


def _phrases(form: Form, text: str) -> Iterator[Fact]:
    at = text.find(form.anchor)
    while at >= 0:
        match = form.pattern.match(text, text.rfind("\n", 0, at) + 1)
        past = at + len(form.anchor)
        if match and match.end() > at:
            fact = _phrase(form, match)
            past = max(past, fact.end)
            yield fact
        at = text.find(form.anchor, past)


def _phrase(form: Form, match: re.Match[str]) -> Fact:
    text, groups = match.string, match.groupdict()
    start, end = match.span("fact" if "fact" in groups else 0)
    value = groups.get("value") or ""
    if form.until:
        inner = end
        ends = (text.find(word, inner - 1) for word in form.until)
        end = min((at for at in ends if at >= 0), default=len(text))
        value = text[inner:end]
    kind = FactKind.CLOCK if groups.get("time") else form.kind
    return Fact(kind, start, _end(kind, text, start, end), value.strip(), groups.get("label") or "")


def _end(kind: FactKind, text: str, start: int, end: int) -> int:
    """Without white space at its end; but the empty lines behind a reminder go with it."""
    if kind is not FactKind.REMINDER:
        return start + len(text[start:end].rstrip())
    while text.startswith("\n", end):
        end += 1
    return end
