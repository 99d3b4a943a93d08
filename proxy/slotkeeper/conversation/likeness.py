"""Whether a request continues a conversation, how sure that is, and what kind of request it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Final

import orjson

from slotkeeper.conversation.divergence import Divergence, common_start, first_difference, json_text, parted
from slotkeeper.conversation.facts import digest, same
from slotkeeper.conversation.layout import (
    NOWHERE,
    Conversation,
    Keys,
    Layout,
    Match,
    Message,
    Role,
    Section,
    Text,
    Who,
    says,
    user_says,
)
from slotkeeper.conversation.phrases import ASIDE, ASIDE_SYSTEM, SUMMARIZED, SUMMARIZER, SUMMARY_ASKED
from slotkeeper.conversation.rules.pruning import common

DIGEST_BYTES: Final = 16
SAID: Final = "said:"  # prefix of the keys of replies without calls
PART: Final = 300  # characters counted for each message, text and call, about its overhead in bytes
FIRST_WORDS: Final = 512  # characters of a system text that identify the agent
_SILENT: Final = digest(Message(Role.USER, NOWHERE))  # of a message that holds only facts

Doc = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Likeness:
    """How a request compares with the last one of a conversation. The highest `rank` wins."""

    conversation: Conversation
    common: int  # messages after the system text that both have
    appended: bool  # the request is the old one, unchanged, with something added at its end

    @property
    def rank(self) -> tuple[bool, int, float, int]:
        """Sort key; exact continuations first.

        Two runs of one task are equal up to their tools' results.
        """
        return self.appended, self.common, self.conversation.at, self.conversation.line


def opening(layout: Layout) -> int:
    """Count the messages from the system text to the first words of the user, inclusive; 0 if none.

    Before that message, a client may put its own context (a date, a folder) into a message.
    """
    for at in range(layout.lead, len(layout.messages)):
        message = layout.messages[at]
        if message.role is Role.USER and digest(message) != _SILENT:
            return at - layout.lead + 1
    return 0


def keys_of(who: Who, layout: Layout) -> Keys:
    """Return all keys by which a request's conversation is looked up, apart from its name."""
    return Keys(_first(who, layout), _kin(who, layout))


def _first(who: Who, layout: Layout) -> tuple[bytes, ...]:
    at = layout.lead + opening(layout) - 1
    return (_key("first", who.client, digest(layout.messages[at])),) if at >= layout.lead else ()


def _kin(who: Who, layout: Layout) -> tuple[bytes, ...]:
    """Return the keys that conversations of one agent share.

    They are made of the system text without facts, the names of the tools, and the system text's first words.
    """
    found = []
    if layout.lead:
        found.append(_key("system", who.client, *(digest(m) for m in layout.messages[: layout.lead])))
        words = Text(NOWHERE, layout.messages[0].said[:FIRST_WORDS], Section.SYSTEM)
        found.append(_key("words", who.client, digest(Message(Role.SYSTEM, NOWHERE, (words,)))))
    if layout.tools:
        found.append(_key("tools", who.client, "\0".join(sorted(map(tool_name, layout.tools)))))
    return tuple(found)


def same_agent(old: Layout, new: Layout) -> bool:
    """Whether two requests come from one agent: the same tools in any order, and one family of system texts.

    A session id or a cache key does not show that: sub-agents, titles and memory requests share them.
    """
    return _tool_names(old) == _tool_names(new) and same_family(old, new)


def same_family(old: Layout, new: Layout) -> bool:
    """Whether both requests have no system text, or texts of one agent.

    Such texts are equal apart from facts, or their common beginning and end are at least half of the longer.
    """
    if not (old.lead and new.lead):
        return old.lead == new.lead
    if _same_system(old, new):
        return True
    one, other = ("\n".join(m.said for m in layout.messages[: layout.lead]) for layout in (old, new))
    start = common_start(one, other)
    end = common_start(one[start:][::-1], other[start:][::-1])
    return 2 * (start + end) >= max(len(one), len(other))


def more_tools(old: Layout, new: Layout) -> bool:
    """Whether tools were only added."""
    return _tool_names(old) < _tool_names(new) and same_family(old, new)


def another_agent(old: Layout, new: Layout) -> bool:
    """Whether this is another agent, not one whose tools were edited.

    That is so if half of the tools are gone or the rest are in another order.
    """
    if not same_family(old, new):
        return True
    was, now = _tool_names(old), _tool_names(new)
    left, still = ([name for name in names if name in others] for names, others in ((was, now), (now, was)))
    return bool(now) and (left != still or 2 * len(left) < max(len(was), len(now)))


def _tool_names(layout: Layout) -> Counter[str]:
    return Counter(map(tool_name, layout.tools))


def tool_name(tool: Doc) -> str:
    """Return a tool's name, or its type if it has no name."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return str(name or tool.get("type") or "")


def named_key(who: Who) -> tuple[bytes, ...]:
    return (_key("name", who.client, who.name),) if who.name else ()


def tools_key(who: Who) -> bytes:
    """Return the key of a client's conversations that have tools."""
    return _key("any tools", who.client)


def likeness(conversation: Conversation, who: Who, layout: Layout) -> Likeness | None:
    """Compare a request with a conversation; None if the request does not continue it."""
    if not who.may_continue(conversation.who):
        return None
    old = conversation.received
    count = common(old, layout)
    whole = count == len(old.messages) - old.lead
    if conversation.aside and not whole:
        return None  # only its own next request continues a title or a suggestion
    found = Likeness(conversation, count, whole and _extends(old, layout))
    if who.name and who.name == conversation.who.name:
        goes_on = count >= max(1, opening(layout)) or _replaced(old, layout)
    else:
        goes_on = _by_content(found, layout, whole=whole)
    return found if goes_on else None


def _extends(old: Layout, new: Layout) -> bool:
    """Whether the new request begins with all of the old one, unchanged."""
    return first_difference(old, new) is None and json_text(old.tools) == json_text(new.tools)


def _by_content(found: Likeness, layout: Layout, *, whole: bool) -> bool:
    """Whether the contents show that a request continues a conversation.

    They share the first user message and one reply; or this is the very next request; or the same request
    again.
    """
    old = found.conversation.received
    if found.common < max(1, opening(layout)):
        return False
    if any(message.role is Role.ASSISTANT for message in layout.messages[layout.lead :][: found.common]):
        return True
    if not whole:
        return False
    if len(layout.messages) - layout.lead == found.common:  # the same messages again
        return found.appended and parted(old, layout) is None
    return _same_system(old, layout)


def _replaced(old: Layout, new: Layout) -> bool:
    """Whether the history of a named conversation was replaced, for example by a summary."""
    if any(user_says(message, SUMMARIZED) for message in new.messages[new.lead :]):
        return True
    return new.has_reply and _same_system(old, new) and bool(old.lead or old.tools)


def _same_system(old: Layout, new: Layout) -> bool:
    return old.lead == new.lead and all(map(same, old.messages[: old.lead], new.messages[: new.lead]))


def standing(conversation: Conversation, count: int) -> tuple[dict[int, tuple[str, ...]], dict[str, str]]:
    """Return the notes after the first `count` messages, and the facts that those notes tell.

    A fact whose note is no longer in the history must be told again.
    """
    end = conversation.sent.lead + count
    notes = {at: texts for at, texts in conversation.notes.items() if at < end}
    words = "\n".join(text for texts in notes.values() for text in texts)
    return notes, {place: text for place, text in conversation.noted.items() if text in words}


def repeated(replies: Mapping[str, Doc], layout: Layout) -> dict[str, Doc]:
    """Return the replies that a request sends back."""
    calls = {call.id for message in layout.messages for call in message.calls}
    said = {m.said.strip() for m in layout.messages if m.role is Role.ASSISTANT}
    return {
        key: reply
        for key, reply in replies.items()
        if key in calls or (key.startswith(SAID) and str(reply.get("content")).strip() in said)
    }


def size(conversation: Conversation) -> int:
    """Return the number of characters that a conversation keeps."""
    layouts = {id(layout): layout for layout in (conversation.received, conversation.sent)}.values()
    return sum(_size(layout) for layout in layouts) + sum(map(len, _kept(conversation)))


def reply_key(reply: Doc) -> str:
    """Return the key under which a reply without calls is kept; it is equal for equal texts."""
    return SAID + _key(json_text(reply.get("content"))).hex()


def reply_size(reply: Doc) -> int:
    return len(orjson.dumps(reply, default=repr))


def _size(layout: Layout) -> int:
    said = sum(len(text.text) for message in layout.messages for text in message.pieces())
    calls = sum(
        len(call.arguments) if isinstance(call.arguments, str) else len(json_text(call.arguments))
        for message in layout.messages
        for call in message.calls
    )
    parts = sum(1 + len(message.texts) + len(message.calls) for message in layout.messages)
    return said + calls + len(json_text(layout.tools)) + len(json_text(layout.options)) + PART * parts


def _kept(conversation: Conversation) -> Iterator[str]:
    for texts in conversation.notes.values():
        yield from texts
    yield from conversation.noted.values()


def calls_of(reply: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ids of a reply's tool calls."""
    calls = reply.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(call.get("id"), str):
            yield call["id"]


def _key(*parts: str | bytes | None) -> bytes:
    hashed = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        data = part if isinstance(part, bytes) else (part or "").encode(errors="surrogatepass")
        hashed.update(b"%d:" % len(data) + data)
    return hashed.digest()


# -- the kind of a request --------------------------------------------------------------------------


class RequestKind(StrEnum):
    """What a request is in its conversation. Reports, logs, metrics and tests use these values."""

    COLD = "cold"  # a conversation begins; a sub-agent's as well
    TOOL_ROUND_TRIP = "tool_round_trip"  # the last request, the reply, and the results of its tools
    MAIN_TURN = "main_turn"  # the last request, the reply, and a new message of the user
    REWRITE = "rewrite"  # something changed before messages that are still there
    COMPACTION = "compaction"  # asks for a summary, or is the first request after it
    SIDE = "side"  # a title, a suggestion, a commit message
    RETRY = "retry"  # the very same request again
    BRANCH = "branch"  # goes back to an earlier message and continues from there


def kind_at(layout: Layout, match: Match, divergence: Divergence | None) -> RequestKind:
    """Return the kind of a request. Words by which clients mark a kind of request decide first.

    `divergence` is where it diverges from the request before it.
    """
    if by_words := _by_words(layout, match):
        return by_words
    before = match.before
    if before is None:
        return RequestKind.SIDE if _beside(layout, match) else RequestKind.COLD
    if before.aside and divergence is None:
        return RequestKind.SIDE
    old = before.received
    if divergence is None or divergence.section is Section.OPTIONS:
        return _going_on(old, layout)
    if match.common >= len(old.messages) - old.lead:
        return RequestKind.REWRITE  # all of its messages are still there
    return RequestKind.REWRITE if _still_there(old, layout, old.lead + match.common) else RequestKind.BRANCH


def leads_nowhere(layout: Layout, match: Match) -> bool:
    """Whether no turn continues this request: the next turn leaves out a title or a summary."""
    by_words = _by_words(layout, match)
    if by_words is not None:
        return by_words is RequestKind.SIDE or asks_for_summary(layout)
    if match.before is None:
        return _beside(layout, match)
    return match.before.aside and parted(match.before.received, layout) is None


def asks_for_summary(layout: Layout) -> bool:
    lead, newest = layout.messages[: layout.lead], layout.messages[layout.lead :][-1:]
    return any(says(m, SUMMARIZER) for m in lead) or any(user_says(m, SUMMARY_ASKED) for m in newest)


def asks_aside(layout: Layout) -> bool:
    """Whether the request asks for a title, a suggestion or a summary, by its own words."""
    lead, newest = layout.messages[: layout.lead], layout.messages[layout.lead :][-1:]
    aside = any(says(m, ASIDE_SYSTEM) for m in lead) or any(user_says(m, ASIDE) for m in newest)
    return aside or asks_for_summary(layout)


def _by_words(layout: Layout, match: Match) -> RequestKind | None:
    if asks_for_summary(layout):
        return RequestKind.COMPACTION
    lead = layout.messages[: layout.lead]
    new = layout.messages[layout.lead + (match.common if match.before else 0) :]
    if any(says(m, ASIDE_SYSTEM) for m in lead) or any(user_says(m, ASIDE) for m in new[-1:]):
        return RequestKind.SIDE
    # While all messages of the conversation are there, these words prove nothing: a user may also ask
    # what was done so far.
    old = match.before.received if match.before else None
    cut_short = old is None or match.common < len(old.messages) - old.lead
    if cut_short and any(user_says(m, SUMMARIZED) for m in (*new, *layout.messages[-1:])):
        return RequestKind.COMPACTION
    return None


def _beside(layout: Layout, match: Match) -> bool:
    """Whether the request has none of this client's usual tools, and at most one tool (for its answer)."""
    if match.beside is None or not match.beside.received.tools:
        return False
    theirs = {tool_name(tool) for tool in match.beside.received.tools}
    return len(layout.tools) <= 1 and theirs.isdisjoint(map(tool_name, layout.tools))


def _going_on(old: Layout, new: Layout) -> RequestKind:
    if len(new.messages) == len(old.messages):
        return RequestKind.RETRY
    if len(new.messages) < len(old.messages):
        return RequestKind.BRANCH
    return RequestKind.TOOL_ROUND_TRIP if _answers(new.messages[-1]) else RequestKind.MAIN_TURN


def _answers(message: Message) -> bool:
    """Whether the message brings results of tools and no words of the user, except a program's reminder."""
    return message.role is Role.TOOL or bool(message.answers)


def _still_there(old: Layout, new: Layout, at: int) -> bool:
    """Whether messages after the first that differs are found again in the new request."""
    kept = {(m.role, m.said) for m in old.messages[at + 1 :] if m.said.strip()}
    return any((m.role, m.said) in kept for m in new.messages[at:])
