"""Every conversation that goes on: found again by name and by content, and what is remembered of it.

A bound on characters and one on their number; the one that was not asked for the longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count, islice
from typing import Any, Final

from slotkeeper.core.conversations.kinds import leads_nowhere
from slotkeeper.core.conversations.likeness import (
    Likeness,
    calls_of,
    keys,
    kin,
    likeness,
    named_key,
    repeated,
    reply_key,
    reply_size,
    size,
    standing,
    tools_key,
)
from slotkeeper.core.conversations.record import Conversation, Match, Who
from slotkeeper.core.requests.layout import Layout

Doc = dict[str, Any]

CHARACTERS: Final = 64 << 20
MOST: Final = 4096
COMPARED: Final = 128  # the latest ones with the same first message or name; each costs microseconds
REPLIES: Final = 256  # of one conversation


class Conversations:
    """The book. One thread."""

    def __init__(self, characters: int = CHARACTERS, most: int = MOST) -> None:
        self._limit, self._most = characters, most
        self._lines: OrderedDict[int, Conversation] = OrderedDict()  # by number, the latest last
        self._keys: dict[int, tuple[bytes, ...]] = {}  # under which each is found
        self._index: dict[bytes, OrderedDict[int, None]] = {}
        self._numbers = count(1)
        self._looked: tuple[Who, Layout, tuple[bytes, ...], tuple[bytes, ...]] | None = None
        self.characters = 0  # that are kept

    def __len__(self) -> int:
        return len(self._lines)

    def __repr__(self) -> str:
        return f"<Conversations {len(self)} | {self.characters} of {self._limit} characters>"

    def find(self, who: Who, layout: Layout) -> Match:
        """The conversation that a request goes on from.

        `before` holds the notes that still stand in what both have in common, and what those told; it is
        for reading, and `saw` knows it again.
        """
        first, related = self._keys_of(who, layout)
        candidates = self._latest((*named_key(who), *first))
        found = [like for line in candidates if (like := likeness(line, who, layout))]
        best = max(found, key=lambda like: like.rank, default=None)
        others = (line for line in self._latest(related, each=2) if not line.aside)
        return Match(
            before=_as_it_stands(best) if best else None,
            common=best.common if best else 0,
            sibling=max(others, key=lambda line: (line.at, line.number), default=None),
            beside=next(self._latest((tools_key(who),), each=1), None),
        )

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
    ) -> Conversation:
        """A request went to the engine. What goes on from a conversation's end takes its place."""
        aside = leads_nowhere(received, match)
        line = self._going_on(match, aside=aside)
        if line is None:
            replies = repeated(match.before.replies, received) if match.before else {}
            line = Conversation(next(self._numbers), who, received, sent, now, replies=replies, aside=aside)
        else:
            self._unlist(line)
            line.who = Who(who.client, who.name or line.who.name)
            line.received, line.sent, line.at, line.tokens = received, sent, now, None
        line.notes, line.told = dict(notes), dict(told)
        self._list(line)
        self._evict()
        return line

    def replied(self, conversation: Conversation, reply: Doc) -> None:
        """The reply to its last request, in chat shape. The oldest replies go when there are many."""
        replies = conversation.replies
        for key in tuple(calls_of(reply)) or (reply_key(reply),):
            replies.pop(key, None)
            replies[key] = reply
        gone = [replies.pop(key) for key in tuple(islice(replies, max(0, len(replies) - REPLIES)))]
        if conversation.number in self._lines:
            self._weigh(conversation, reply_size(reply) - sum(map(reply_size, gone)))
            self._evict()

    def forget(self, conversation: Conversation) -> None:
        """It is no longer found. Nothing happens where it is not known."""
        line = self._lines.get(conversation.number)
        if line is not None:
            self._unlist(line)

    def _going_on(self, match: Match, *, aside: bool) -> Conversation | None:
        """The conversation whose last request this one continues or repeats; None: a line of its own."""
        before = match.before
        line = self._lines.get(before.number) if before else None
        if line is None or match.common < len(line.received.messages) - line.received.lead:
            return None
        return line if line.aside == aside else None

    def _keys_of(self, who: Who, layout: Layout) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Computed once for the two calls that one request makes."""
        looked = self._looked
        if looked is None or looked[0] != who or looked[1] is not layout:
            looked = self._looked = (who, layout, keys(who, layout), kin(who, layout))
        return looked[2], looked[3]

    def _latest(self, wanted: Iterable[bytes], each: int = COMPARED) -> Iterator[Conversation]:
        seen: dict[int, None] = {}
        for key in wanted:
            seen.update(dict.fromkeys(islice(reversed(self._index.get(key, {})), each)))
        return iter([self._lines[number] for number in seen])

    def _list(self, line: Conversation) -> None:
        first, related = self._keys_of(line.who, line.received)
        tools = (tools_key(line.who),) if line.received.tools and not line.aside else ()
        found_by = (*named_key(line.who), *first, *(related if not line.aside else ()), *tools)
        self._lines[line.number] = line
        self._keys[line.number] = found_by
        for key in found_by:
            self._index.setdefault(key, OrderedDict())[line.number] = None
        line.size = 0
        self._weigh(line, size(line) + sum(map(reply_size, line.replies.values())))

    def _unlist(self, line: Conversation) -> None:
        del self._lines[line.number]
        for key in self._keys.pop(line.number):
            listed = self._index[key]
            listed.pop(line.number, None)
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


def _as_it_stands(like: Likeness) -> Conversation:
    line = like.conversation
    if like.common >= len(line.received.messages) - line.received.lead:
        return line
    notes, told = standing(line, like.common)
    return replace(line, notes=notes, told=told)
