"""What changed at one place of a text: a value that a client's program put there, or only white space."""

from __future__ import annotations

import re
from typing import Final

from slotkeeper.conversation.reasons import OF_FACT, Cause
from slotkeeper.conversation.requests.facts import FoundFact, facts
from slotkeeper.conversation.requests.layout import Section

AGAIN: Final = 16  # characters behind a value that are the same again: it was the value only
LONGEST: Final = 512  # characters of a value, to either side of where it changed
_OF_PROGRAMS: Final = frozenset({Section.SYSTEM, Section.TOOLS})  # no person's text
_EDGE: Final = " \t\r\n\"'`<>()[]{},;|"
_FORMS: Final = (  # of words that no known phrase stands around, the most telling first
    (Cause.CLOCK, re.compile(r"(?:\d{4}-\d\d-\d\dT)?\d{1,2}:\d\d(?::\d\d)?\S*")),
    (Cause.DATE, re.compile(r"\d{4}[-/]\d\d[-/]\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4}")),
    (Cause.DATE, re.compile(r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*")),
    (Cause.CWD, re.compile(r"(?:~|[A-Za-z]:)?[/\\][^\s]*")),
    (Cause.NONCE, re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")),
    (Cause.NONCE, re.compile(r"(?=\w*\d)(?=\w*[A-Za-z])\w{12,}")),
    (Cause.COUNTDOWN, re.compile(r"\d[\d.,]*%?")),
)


def value_cause(before: str, after: str, offset: int, section: Section) -> Cause | None:
    """None where it is neither. Only system text and tools are searched for values without a phrase."""
    if fact := covering(before, after, offset, section):
        return OF_FACT[fact.kind]
    if section in _OF_PROGRAMS and (found := _by_form(before, after, offset)):
        return found
    return Cause.WHITESPACE if before.split() == after.split() else None


def covering(before: str, after: str, offset: int, section: Section) -> FoundFact | None:
    """The known fact in which either text goes its own way: what rules can put right."""
    if section is Section.REPLY:
        return None
    authored = section not in _OF_PROGRAMS
    return _at(facts(before, authored=authored), offset) or _at(facts(after, authored=authored), offset)


def _at(found: tuple[FoundFact, ...], offset: int) -> FoundFact | None:
    return next((fact for fact in found if fact.start <= offset < fact.end), None)


def _by_form(before: str, after: str, offset: int) -> Cause | None:
    was, now = _word(before, offset), _word(after, offset)
    was_end, now_end = offset + _rest(before, offset), offset + _rest(after, offset)
    if before[was_end : was_end + AGAIN] != after[now_end : now_end + AGAIN]:
        return None
    return next((cause for cause, form in _FORMS if form.fullmatch(was) and form.fullmatch(now)), None)


def _word(text: str, offset: int) -> str:
    """The word around a place; what is longer than any value is cut, and so is like none."""
    start, least = offset, max(0, offset - LONGEST)
    while start > least and text[start - 1] not in _EDGE:
        start -= 1
    return text[start : offset + _rest(text, offset)].rstrip(".:")


def _rest(text: str, offset: int) -> int:
    """How many characters there are up to the end of the word, as far as that is looked for."""
    end, most = offset, min(len(text), offset + LONGEST)
    while end < most and text[end] not in _EDGE:
        end += 1
    return end - offset
