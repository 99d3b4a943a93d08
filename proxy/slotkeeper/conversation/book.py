"""The running conversations, found again by name and by content, with the last request and replies of each.

The number of conversations and their characters are bounded; the least recently used one is dropped first.
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
from slotkeeper.scheduler.tokens import Tokens

Doc = dict[str, Any]

CHARACTERS: Final = 128 << 20  # of text, plus 4 for each token
MOST: Final = 4096  # conversations
COMPARED: Final = 128  # the latest conversations with the same first message or name; each costs microseconds
REPLIES: Final = 256  # kept of one conversation


class Conversations:
    """The running conversations. Not thread-safe."""

    def __init__(self, characters: int = CHARACTERS, most: int = MOST) -> None:
        self._limit, self._most = characters, most
        self._lines: OrderedDict[int, Conversation] = OrderedDict()  # by `Conversation.line`, the latest last
        self._keys: dict[int, tuple[bytes, ...]] = {}  # the index keys of each line
        self._index: dict[bytes, OrderedDict[int, None]] = {}
        self._numbers = count(1)
        self.characters = 0  # kept in all

    def __len__(self) -> int:
        return len(self._lines)

    def __repr__(self) -> str:
        return f"<Conversations {len(self)} | {self.characters} of {self._limit} characters>"

    def find(self, who: Who, layout: Layout) -> Match:
        """Return the conversation that a request continues, and its other relatives."""
        found_by = keys_of(who, layout)
        return goes_on(who, layout, found_by, self.near(who, found_by))

    def near(self, who: Who, found_by: Keys, *, still: bool = False) -> Near:
        """Return all that `goes_on` chooses from; with `still`, copies that another thread may read."""
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
        noted: Mapping[str, str],
        now: float,
        rules: Iterable[str] = (),
    ) -> Conversation:
        """Record a request that went to the engine.

        A request that continues a conversation's end replaces that conversation's record. `rules` are the
        rules that changed the request.
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
        line.notes, line.noted, line.rules = dict(notes), dict(noted), tuple(rules)
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
        noted: Mapping[str, str],
        rules: Iterable[str],
    ) -> None:
        """Record that the request went to the engine in another form than `saw` recorded.

        Nothing changes if the conversation's next request has come since.
        """
        if line.received is received:
            line.sent, line.notes, line.noted, line.rules = sent, dict(notes), dict(noted), tuple(rules)

    def replied(self, conversation: Conversation, reply: Doc) -> None:
        """Record the reply to the last request, in chat shape. Beyond REPLIES, the oldest are dropped."""
        replies = conversation.replies
        keys = dict.fromkeys(tuple(calls_of(reply)) or (reply_key(reply),))
        gone = [replies.pop(key) for key in keys if key in replies]
        replies.update(dict.fromkeys(keys, reply))
        gone += [replies.pop(key) for key in tuple(islice(replies, max(0, len(replies) - REPLIES)))]
        if conversation.line in self._lines:
            self._weigh(conversation, len(keys) * reply_size(reply) - sum(map(reply_size, gone)))
            self._evict()

    def rendered(self, conversation: Conversation, prompt: Tokens) -> None:
        """Record the prompt tokens of the conversation's last request."""
        before, conversation.tokens = conversation.tokens, prompt
        if conversation.line in self._lines:
            self._weigh(conversation, len(prompt.packed) - (len(before.packed) if before else 0))
            self._evict()

    def forget(self, conversation: Conversation) -> None:
        """Drop the conversation, if it is known."""
        line = self._lines.get(conversation.line)
        if line is not None:
            self._unlist(line)

    def _going_on(self, match: Match, *, aside: bool) -> Conversation | None:
        """Return the conversation whose last request this one continues or repeats; None if there is none."""
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
        """Drop the oldest conversations beyond the bounds. The latest always stays, whatever its length."""
        while len(self._lines) > 1 and (self.characters > self._limit or len(self._lines) > self._most):
            self._unlist(next(iter(self._lines.values())))


def goes_on(who: Who, layout: Layout, found_by: Keys, near: Near) -> Match:
    """Return the conversation that a request continues: one of the same agent, if there is any.

    The match's `before` has only the notes in the messages that both have in common, and the facts in those
    notes. Callers only read it; `Conversations.saw` finds the stored conversation by it.
    """
    alike = [like for line in near.lines if (like := likeness(line, who, layout))]
    own = [like for like in alike if same_agent(like.conversation.received, layout)]
    best = max(own or alike, key=lambda like: like.rank, default=None)
    return Match(
        before=_as_it_stands(best) if best else None,
        common=best.common if best else 0,
        sibling=max(near.kin, key=lambda line: _kinship(line, layout), default=None),
        beside=near.beside,
        same_agent=bool(own) or best is None,
        keys=found_by,
    )


def _copied(line: Conversation) -> Conversation:
    """Copy a conversation. Only `replies` is ever changed in place; all other fields are replaced."""
    return replace(line, replies=dict(line.replies))


def _kinship(line: Conversation, layout: Layout) -> tuple[bool, float, int]:
    """Return a sort key whose maximum is the latest conversation of the same agent."""
    return same_agent(line.received, layout), line.at, line.line


def _number_of(match: Match, layout: Layout) -> int | None:
    """Return the number of the conversation that continues with more tools; None if a new one begins."""
    before = match.before
    if before is None or before.aside or match.same_agent or not more_tools(before.received, layout):
        return None
    return before.number if match.common >= len(before.received.messages) - before.received.lead else None


def _as_it_stands(like: Likeness) -> Conversation:
    line = like.conversation
    if like.common >= len(line.received.messages) - line.received.lead:
        return line
    notes, noted = standing(line, like.common)
    return replace(line, notes=notes, noted=noted)
