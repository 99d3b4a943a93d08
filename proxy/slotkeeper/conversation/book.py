"""Every conversation that goes on: found again by name and by content, and what is remembered of it.

A bound on characters and one on their number; the one that was not asked for the longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count, islice
from typing import Any, Final

from slotkeeper.conversation.layout import Conversation, Keys, Layout, Match, Near, Who
from slotkeeper.conversation.likeness import (
    Likeness,
    calls_of,
    keys_of,
    leads_nowhere,
    likeness,
    more_tools,
    named_key,
    repeated,
    reply_key,
    reply_size,
    same_agent,
    size,
    standing,
    tools_key,
)
from slotkeeper.scheduler.types import Tokens

Doc = dict[str, Any]

CHARACTERS: Final = 128 << 20  # of text, with 4 for each token
MOST: Final = 4096
COMPARED: Final = 128  # the latest ones with the same first message or name; each costs microseconds
REPLIES: Final = 256  # of one conversation


class Conversations:
    """The book. One thread."""

    def __init__(self, characters: int = CHARACTERS, most: int = MOST) -> None:
        self._limit, self._most = characters, most
        self._lines: OrderedDict[int, Conversation] = OrderedDict()  # by their keys, the latest last
        self._keys: dict[int, tuple[bytes, ...]] = {}  # under which each is found
        self._index: dict[bytes, OrderedDict[int, None]] = {}
        self._numbers = count(1)
        self.characters = 0  # that are kept

    def __len__(self) -> int:
        return len(self._lines)

    def __repr__(self) -> str:
        return f"<Conversations {len(self)} | {self.characters} of {self._limit} characters>"

    def find(self, who: Who, layout: Layout) -> Match:
        """The conversation that a request goes on from."""
        found_by = keys_of(who, layout)
        return goes_on(who, layout, found_by, self.near(who, found_by))

    def near(self, who: Who, found_by: Keys, *, still: bool = False) -> Near:
        """All that `goes_on` chooses among. `still`: as it is now, for a thread that reads it meanwhile."""
        lines = self._latest((*named_key(who), *found_by.first))
        kin = [line for line in self._latest(found_by.kin, each=2) if not line.aside]
        beside = self._latest((tools_key(who),), each=1)
        if still:
            lines, kin, beside = ([_copied(line) for line in some] for some in (lines, kin, beside))
        return Near(tuple(lines), tuple(kin), beside[0] if beside else None)

    def saw(
        self,
        match: Match,
        who: Who,
        *,
        received: Layout,
        sent: Layout,
        notes: Mapping[int, tuple[str, ...]],
        told: Mapping[str, str],
        now: float,
        rules: Iterable[str] = (),
    ) -> Conversation:
        """A request went to the engine. What goes on from a conversation's end takes its place.

        `rules` are those that had changed it.
        """
        aside = leads_nowhere(received, match)
        line = self._going_on(match, aside=aside)
        if line is None:
            replies = repeated(match.before.replies, received) if match.before else {}
            key = next(self._numbers)
            number = _number_of(match, received) or key
            line = Conversation(number, who, received, sent, now, replies=replies, aside=aside, line=key)
        else:
            self._unlist(line)
            line.who = Who(who.client, who.name or line.who.name)
            line.received, line.sent, line.at, line.tokens = received, sent, now, None
        line.notes, line.told, line.rules = dict(notes), dict(told), tuple(rules)
        self._list(line, match.keys or keys_of(who, received))
        self._evict()
        return line

    def resent(
        self,
        line: Conversation,
        received: Layout,
        *,
        sent: Layout,
        notes: Mapping[int, tuple[str, ...]],
        told: Mapping[str, str],
        rules: Iterable[str],
    ) -> None:
        """It went to the engine in another form than `saw` was told, unless something else has come since."""
        if line.received is received:
            line.sent, line.notes, line.told, line.rules = sent, dict(notes), dict(told), tuple(rules)

    def replied(self, conversation: Conversation, reply: Doc) -> None:
        """The reply to its last request, in chat shape. The oldest replies go when there are many."""
        replies = conversation.replies
        for key in tuple(calls_of(reply)) or (reply_key(reply),):
            replies.pop(key, None)
            replies[key] = reply
        gone = [replies.pop(key) for key in tuple(islice(replies, max(0, len(replies) - REPLIES)))]
        if conversation.line in self._lines:
            self._weigh(conversation, reply_size(reply) - sum(map(reply_size, gone)))
            self._evict()

    def rendered(self, conversation: Conversation, prompt: Tokens) -> None:
        """The tokens of its last request are known."""
        before, conversation.tokens = conversation.tokens, prompt
        if conversation.line in self._lines:
            self._weigh(conversation, len(prompt.packed) - (len(before.packed) if before else 0))
            self._evict()

    def forget(self, conversation: Conversation) -> None:
        """It is no longer found. Nothing happens where it is not known."""
        line = self._lines.get(conversation.line)
        if line is not None:
            self._unlist(line)

    def _going_on(self, match: Match, *, aside: bool) -> Conversation | None:
        """The conversation whose last request this one continues or repeats; None: a line of its own."""
        before = match.before
        line = self._lines.get(before.line) if before and match.same_agent else None
        if line is None or match.common < len(line.received.messages) - line.received.lead:
            return None
        return line if line.aside == aside else None

    def _latest(self, wanted: Iterable[bytes], each: int = COMPARED) -> list[Conversation]:
        seen: dict[int, None] = {}
        for key in wanted:
            seen.update(dict.fromkeys(islice(reversed(self._index.get(key, {})), each)))
        return [self._lines[number] for number in seen]

    def _list(self, line: Conversation, keys: Keys) -> None:
        tools = (tools_key(line.who),) if line.received.tools and not line.aside else ()
        kin = keys.kin if not line.aside else ()
        found_by = (*named_key(line.who), *keys.first, *kin, *tools)
        self._lines[line.line] = line
        self._keys[line.line] = found_by
        for key in found_by:
            self._index.setdefault(key, OrderedDict())[line.line] = None
        line.size = 0
        self._weigh(line, size(line) + sum(map(reply_size, line.replies.values())))

    def _unlist(self, line: Conversation) -> None:
        del self._lines[line.line]
        for key in self._keys.pop(line.line):
            listed = self._index[key]
            listed.pop(line.line, None)
            if not listed:
                del self._index[key]
        self.characters -= line.size

    def _weigh(self, line: Conversation, characters: int) -> None:
        line.size += characters
        self.characters += characters

    def _evict(self) -> None:
        """The latest always stays, however long it is."""
        while len(self._lines) > 1 and (self.characters > self._limit or len(self._lines) > self._most):
            self._unlist(next(iter(self._lines.values())))


def goes_on(who: Who, layout: Layout, found_by: Keys, near: Near) -> Match:
    """The conversation that a request goes on from: one of the same agent, if there is any.

    `before` holds the notes that still stand in what both have in common, and what those told; it is
    for reading, and `Conversations.saw` knows it again.
    """
    found = [like for line in near.lines if (like := likeness(line, who, layout))]
    own = [like for like in found if same_agent(like.conversation.received, layout)]
    best = max(own or found, key=lambda like: like.rank, default=None)
    return Match(
        before=_as_it_stands(best) if best else None,
        common=best.common if best else 0,
        sibling=max(near.kin, key=lambda line: _kinship(line, layout), default=None),
        beside=near.beside,
        same_agent=bool(own) or best is None,
        keys=found_by,
    )


def _copied(line: Conversation) -> Conversation:
    """All else in it is replaced, never changed."""
    return replace(line, replies=dict(line.replies))


def _kinship(line: Conversation, layout: Layout) -> tuple[bool, float, int]:
    """The highest is the latest of the same agent."""
    return same_agent(line.received, layout), line.at, line.line


def _number_of(match: Match, layout: Layout) -> int | None:
    """Of the conversation that goes on with more tools than before; None where another one begins."""
    before = match.before
    if before is None or before.aside or match.same_agent or not more_tools(before.received, layout):
        return None
    return before.number if match.common >= len(before.received.messages) - before.received.lead else None


def _as_it_stands(like: Likeness) -> Conversation:
    line = like.conversation
    if like.common >= len(line.received.messages) - line.received.lead:
        return line
    notes, told = standing(line, like.common)
    return replace(line, notes=notes, told=told)
