"""Explains a request: its kind, where and why it diverges from the one before it, and the rule for that."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from slotkeeper.conversation.divergence import (
    CAUSES,
    OF_FACT,
    Cause,
    Divergence,
    Piece,
    Rests,
    common_start,
    json_text,
    parted,
    rests,
    same_text,
)
from slotkeeper.conversation.layout import (
    NOWHERE,
    Conversation,
    FoundFact,
    Layout,
    Match,
    Message,
    Role,
    Section,
    digest,
    facts,
    says,
)
from slotkeeper.conversation.likeness import (
    RequestKind,
    another_agent,
    asked_aside,
    asks_for_summary,
    kind_at,
    tool_name,
)
from slotkeeper.conversation.phrases import FILES
from slotkeeper.conversation.rules.base import RuleName
from slotkeeper.conversation.rules.rules import pruned

__all__ = ["Cause", "Explained", "by_our_rule", "explain", "of_template"]

AGAIN: Final = 16  # characters after a value; where they are equal, only the value changed
LONGEST: Final = 512  # characters of a value on each side of the divergence
_OF_PROGRAMS: Final = frozenset({Section.SYSTEM, Section.TOOLS})  # written by programs, never by a person
_EDGE: Final = " \t\r\n\"'`<>()[]{},;|"
_FORMS: Final = (  # of values without a known phrase around them, the most specific form first
    (Cause.CLOCK, re.compile(r"(?:\d{4}-\d\d-\d\dT)?\d{1,2}:\d\d(?::\d\d)?\S*")),
    (Cause.DATE, re.compile(r"\d{4}[-/]\d\d[-/]\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4}")),
    (Cause.DATE, re.compile(r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*")),
    (Cause.CWD, re.compile(r"(?:~|[A-Za-z]:)?[/\\][^\s]*")),
    (Cause.NONCE, re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")),
    (Cause.NONCE, re.compile(r"(?=\w*\d)(?=\w*[A-Za-z])\w{12,}")),
    (Cause.COUNTDOWN, re.compile(r"\d[\d.,]*%?")),
)


def value_cause(before: str, after: str, offset: int, section: Section) -> Cause | None:
    """Return the cause where a known fact, a value of a known form or white space changed; else None.

    Only system text and tools are searched for values without a known phrase around them.
    """
    if fact := covering(before, after, offset, section):
        return OF_FACT[fact.kind]
    if section in _OF_PROGRAMS and (found := _by_form(before, after, offset)):
        return found
    return Cause.WHITESPACE if before.split() == after.split() else None


def covering(before: str, after: str, offset: int, section: Section) -> FoundFact | None:
    """Return the known fact in which the two texts diverge, if any. Rules can restore such facts."""
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
    """Return the word around a place. A word longer than any value is cut, and then matches no form."""
    start, least = offset, max(0, offset - LONGEST)
    while start > least and text[start - 1] not in _EDGE:
        start -= 1
    return text[start : offset + _rest(text, offset)].rstrip(".:")


def _rest(text: str, offset: int) -> int:
    """Return the number of characters up to the end of the word, at most LONGEST."""
    end, most = offset, min(len(text), offset + LONGEST)
    while end < most and text[end] not in _EDGE:
        end += 1
    return end - offset


# -- why it diverges ------------------------------------------------------------------------------------

NEAR: Final = 8  # messages; a message may have moved by fewer than this
_VALUES: Final = frozenset(OF_FACT.values()) - {Cause.REMINDER_MOVED}
_OTHER_TOOLS: Final = frozenset({Cause.TOOL_ADDED, Cause.TOOL_REMOVED, Cause.TOOL_EDITED})


@dataclass(frozen=True, slots=True)
class Explained:
    """What kind a request is, where it diverges from the one before it, and why."""

    kind: RequestKind
    divergence: Divergence | None = None  # None: there is none, or no earlier request
    cause: Cause | None = None
    rule: RuleName | None = None  # that undoes the change; None between two conversations


def explain(match: Match, layout: Layout) -> Explained:
    """Compare a request with the one before it, or a new session with the agent's or client's latest one."""
    before = match.nearest
    if before is None:
        return Explained(kind_at(layout, match, None))
    old = before.received
    divergence = parted(old, layout)
    kind = kind_at(layout, match, divergence)
    if divergence is None:
        return Explained(kind)
    if not match.same_agent and asked_aside(layout, match) is not None:
        return Explained(kind, divergence, Cause.SIDE_QUESTION, RuleName.SIDE_QUESTION)
    if match.before is None or (not match.same_agent and another_agent(old, layout)):
        return Explained(kind, divergence, _between_sessions(old, layout, divergence, kind))
    cause = _cause(old, layout, divergence, kind)
    return Explained(kind, divergence, cause, _rule(cause, divergence, rests(old, layout)))


def by_our_rule(match: Match, received: Layout, sent: Layout, fixed: Sequence[str]) -> Explained | None:
    """Explain a divergence that our own rules made, if there is one.

    That is so if the request that we send diverges from the one that we sent before, while the client's own
    request does not, or does so only later. `fixed` are the rules that changed this request.
    """
    before, rules = match.remembered, (*fixed, *(match.before.rules if match.before else ()))
    if before is None or not rules:
        return None
    place, theirs = parted(before.sent, sent), parted(before.received, received)
    if place is None or (theirs is not None and _order(theirs) <= _order(place)):
        return None
    kind = kind_at(received, match, theirs)
    likely = CAUSES[_cause(before.sent, sent, place, kind)].rule
    return Explained(kind, place, Cause.OUR_RULE, likely if likely in rules else RuleName(rules[0]))


def _order(place: Divergence) -> tuple[int, int, int]:
    """Return a sort key: the earlier a divergence is in the prompt, the smaller the key."""
    if place.message is not None:
        return place.message, 0, place.offset
    tool = place.path[-1] if place.path and place.section is Section.TOOLS else 0
    return -1, tool if isinstance(tool, int) else 0, place.offset


def _rule(cause: Cause, divergence: Divergence, found: Rests | None) -> RuleName | None:
    """Return the rule that can undo the change, if any.

    The rule of a value finds it only in messages, by the words around it, and that of white space only at the
    end of a text. One rule needs no words, but holds only system texts.
    """
    was, now = (_head(side) for side in found or ((), ()))
    if was is None or now is None or was.section is not now.section:
        return CAUSES[cause].rule
    anything = RuleName.REFRESHED_CONTEXT if was.section is Section.SYSTEM else None
    if cause is Cause.WHITESPACE and was.text.rstrip() != now.text.rstrip():
        return anything
    if cause in _VALUES:
        in_message = was.section is not Section.TOOLS
        if not in_message or covering(was.text, now.text, divergence.offset, was.section) is None:
            return anything
    return CAUSES[cause].rule


def of_template(before: Layout) -> Cause:
    """Return the cause where only the prompts diverge, not the texts. `before` is the earlier request."""
    reasons = any(message.reasoning_text for message in before.messages)
    return Cause.TEMPLATE_STRIPS_REASONING if reasons else Cause.TEMPLATE_RERENDERS


def _between_sessions(old: Layout, new: Layout, divergence: Divergence, kind: RequestKind) -> Cause:
    """Return the cause of a divergence between two sessions: a changed value, another task or another agent.

    Where the first half of the old piece is equal, the agent is the same and the piece was edited.
    """
    cause, found = _cause(old, new, divergence, kind), rests(old, new)
    if found is None or cause is Cause.HISTORY_REPLACED:
        return cause
    was = _head(found[0])
    mostly_same = divergence.offset * 2 > len(was.text if was else "")
    if divergence.section is Section.TOOLS:
        return Cause.OTHER_CONVERSATION if cause in _OTHER_TOOLS else cause
    if divergence.section is Section.SYSTEM:
        return Cause.OTHER_CONVERSATION if cause is Cause.SYSTEM_EDITED and not mostly_same else cause
    return cause if new.has_reply and mostly_same else Cause.ANOTHER_TASK


def _cause(old: Layout, new: Layout, divergence: Divergence, kind: RequestKind) -> Cause:
    at = divergence.message
    if divergence.section is Section.OPTIONS:
        return Cause.OPTIONS
    found = rests(old, new)
    if found is None:
        return Cause.CALL_IDS
    if divergence.section is Section.TOOLS or at is None:
        return _of_tools(old, new, found)
    if at < max(old.lead, new.lead):
        return _of_value(found) or Cause.SYSTEM_EDITED
    if kind is RequestKind.COMPACTION and not asks_for_summary(new):
        return Cause.HISTORY_REPLACED
    return _of_messages(old.messages, new.messages, at, found)


# -- tools ---------------------------------------------------------------------------------------------


def _of_tools(old: Layout, new: Layout, found: Rests) -> Cause:
    was, now = ([tool_name(tool) for tool in layout.tools] for layout in (old, new))
    if sorted(was) != sorted(now):
        return _of_other_tools(set(was), set(now))
    if was != now:
        return Cause.TOOL_ORDER
    one, other = next(
        (a, b) for a, b in zip(old.tools, new.tools, strict=True) if json_text(a) != json_text(b)
    )
    if _unordered(one) == _unordered(other):
        return Cause.KEY_ORDER
    return _of_value(found) or Cause.TOOL_EDITED


def _of_other_tools(was: set[str], now: set[str]) -> Cause:
    removed, added = was - now, now - was
    if removed and added:
        return Cause.TOOL_EDITED
    return Cause.TOOL_REMOVED if removed else Cause.TOOL_ADDED


def _unordered(value: Any) -> Any:
    """Return a form that is equal for schemas that differ only in the order of keys and of `required`."""
    if isinstance(value, dict):
        return {
            key: sorted(map(json_text, inner))
            if key == "required" and isinstance(inner, list)
            else _unordered(inner)
            for key, inner in value.items()
        }
    return [_unordered(inner) for inner in value] if isinstance(value, list) else value


# -- messages ------------------------------------------------------------------------------------------


def _of_messages(old: tuple[Message, ...], new: tuple[Message, ...], at: int, found: Rests) -> Cause:
    was, now = old[at], new[at]
    if says(was, FILES) or says(now, FILES):
        return Cause.FILE_REFRESHED
    if pruned(now, was):
        return Cause.RESULT_PRUNED
    if moved := _inserted_or_removed(old[at : at + NEAR], new[at : at + NEAR]):
        return moved
    if was.role is not now.role:
        return Cause.MESSAGE_EDITED
    if reasoned := _of_reasoning(was, now):
        return reasoned
    if was.media != now.media:
        return Cause.MESSAGE_EDITED
    if was.has_texts_of(now):
        return _of_calls(was, now)
    return _of_value(found) or _otherwise(was, now)


def _inserted_or_removed(old: tuple[Message, ...], new: tuple[Message, ...]) -> Cause | None:
    """Return a cause if the first message of one list is found a few messages further on in the other."""
    was, now = digest(old[0]), digest(new[0])  # one digest each, because texts may be long
    if was == now:
        return None
    put_in = next((n for n, message in enumerate(new) if digest(message) == was), None)
    taken_out = next((n for n, message in enumerate(old) if digest(message) == now), None)
    if put_in and (not taken_out or put_in <= taken_out):
        return _named(new[:put_in], Cause.MESSAGE_INSERTED, Cause.REASONING_ADDED)
    if taken_out:
        return _named(old[:taken_out], Cause.MESSAGE_REMOVED, Cause.REASONING_DROPPED)
    return None


def _named(messages: tuple[Message, ...], whole: Cause, reasoned: Cause) -> Cause:
    """Return the cause for these messages: some only hold reminders, some only reasoning."""
    if all(_only_reasons(message) for message in messages):
        return reasoned
    if all(_silent(message) for message in messages):
        return Cause.REMINDER_MOVED
    return whole


def _silent(message: Message) -> bool:
    return digest(message) == digest(Message(message.role, NOWHERE))


def _only_reasons(message: Message) -> bool:
    silent = not message.said.strip() and not message.calls
    return message.role is Role.ASSISTANT and bool(message.reasoning_text) and silent


def _of_reasoning(was: Message, now: Message) -> Cause | None:
    before, after = was.reasoning_text, now.reasoning_text
    if before == after:
        return None
    if before.strip() == after.strip():
        return Cause.WHITESPACE
    if not (before and after):
        return Cause.REASONING_DROPPED if before else Cause.REASONING_ADDED
    return Cause.REASONING_EDITED


def _of_calls(was: Message, now: Message) -> Cause:
    if same_text(was, now):
        return Cause.CALL_IDS
    names = [call.name for call in was.calls] == [call.name for call in now.calls]
    values = [_value(call.arguments) for call in was.calls] == [_value(call.arguments) for call in now.calls]
    return Cause.CALL_RERENDERED if names and values else Cause.MESSAGE_EDITED


def _value(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments.strip()


def _of_value(found: Rests) -> Cause | None:
    was, now = (_head(side) for side in found)
    if was is None or now is None:
        only = was or now
        return None if only is None else value_cause(only.text, "", 0, only.section)
    return value_cause(was.text, now.text, common_start(was.text, now.text), was.section)


def _head(pieces: Sequence[Piece]) -> Piece | None:
    return pieces[0] if pieces else None


def _otherwise(was: Message, now: Message) -> Cause:
    """Return the cause if no value was found: with equal loose digests, only a reminder differs."""
    return Cause.REMINDER_MOVED if digest(was) == digest(now) else Cause.MESSAGE_EDITED


# -- replies that come back changed ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Echo:
    """Where a request has the newest reply, and the cause to report if the slot holds another form of it."""

    message: int  # index in the layout
    section: Section
    cause: Cause


def echo(before: Conversation, layout: Layout) -> Echo | None:
    """Return the echo in a request that continues `before`; None if no reply follows there."""
    at = len(before.received.messages)
    if at >= len(layout.messages) or layout.messages[at].role is not Role.ASSISTANT:
        return None
    asked = any(message.role is Role.USER for message in layout.messages[at + 1 :])
    section, cause = _why(before, layout.messages[at], asked=asked)
    return Echo(at, section, cause)


def _why(before: Conversation, message: Message, *, asked: bool) -> tuple[Section, Cause]:
    """Return where and why the reply changed. Templates keep reasoning until a user speaks (`asked`)."""
    if message.calls and not asked:
        return Section.CALL, Cause.CALL_RERENDERED
    if message.reasoning_text:
        return Section.REASONING, Cause.TEMPLATE_STRIPS_REASONING
    said = next(reversed(before.replies.values()), None)
    if said and said.get("reasoning_content"):
        return Section.REASONING, Cause.REASONING_DROPPED
    return Section.REPLY, Cause.TEMPLATE_RERENDERS
