"""What the next turn's prompt will begin with: the reply as its client will send it back, and what follows.

It is rendered by the engine's own template with two different texts behind it; what the prompts share is
what the client has not yet to say. How a client sends replies back is learnt from its own requests
(api/echo.py) and remembered here, within bounds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from slotkeeper.api.document import Doc, rows, text
from slotkeeper.api.echo import Arguments, Habit, guesses, next_turns, returnable, thoughts, words
from slotkeeper.api.habits import gleaned, learnt, trail, usual
from slotkeeper.api.request import Ask
from slotkeeper.api.routes import Api
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.tokens import Tokens

CLIENTS: Final = 256
REPLIES: Final = 256
LARGEST: Final = 64 << 10  # characters: a longer reply is not waited for

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A reply that may come back."""

    reply: Doc
    thoughts: int  # messages with reasoning in the request that it answered
    habit: Habit  # of this conversation


async def at_once() -> bool:
    """There is nothing to wait for."""
    return True


class Recent(Generic[_Key, _Value]):
    """The newest entries."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[_Key, _Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: _Key) -> _Value | None:
        return self._entries.get(key)

    def put(self, key: _Key, value: _Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)


class NextTurns:
    """The habits of clients and of their conversations, and the replies that are expected back."""

    def __init__(self, clients: int = CLIENTS, replies: int = REPLIES) -> None:
        self._habits: Recent[tuple[str, Api], Habit] = Recent(clients)  # of a client on one API
        self._replies: Recent[tuple[str, bytes], Said] = Recent(replies)

    def __repr__(self) -> str:
        return f"<NextTurns {len(self._habits)} clients, {len(self._replies)} replies>"

    async def prefix(
        self,
        link: EngineLink,
        ask: Ask,
        reply: Doc,
        *,
        client: str,
        auth: Mapping[str, str],
        moment: Callable[[], Awaitable[bool]] = at_once,
    ) -> Tokens | None:
        """The ids that the next prompt will begin with; None where that is not certain.

        Learns from the request, and expects the reply back; then it waits for a `moment` to render, and
        says nothing if that does not come. Raises what rendering raises (`render.FAILURES`), and NotOurs
        for messages nested too deep.
        """
        if ask.chat is None or not ask.chat["messages"] or ask.claim.copies > 1:
            return None
        messages = ask.chat["messages"]
        habit = self.follow(client, ask.api, messages, reply)
        # Where the assistant's own message stands last, the reply goes on with it (a prefilled answer).
        if messages[-1].get("role") == "assistant" or not returnable(reply):
            return None
        possible = guesses(habit, reply, messages)
        if not possible or not await moment():
            return None
        certain = {await _shared(link, ask.chat, reply, guess, auth) for guess in possible}
        return certain.pop() if len(certain) == 1 else None

    def follow(self, client: str, api: Api, messages: Sequence[Doc], reply: Doc) -> Habit:
        """What this client does, now that these messages of it are known; `reply` is expected back."""
        digests = trail(messages)
        habit = self._habits.get((client, api)) or usual(api)
        for at in range(len(messages) - 1, 0, -1):
            said = self._replies.get((client, digests[at - 1]))
            if said is not None and messages[at].get("role") == "assistant":
                habit = learnt(said.habit, said.reply, messages, at, before=said.thoughts)
                break
        habit = gleaned(habit, messages)
        self._habits.put((client, api), habit)
        if _size(reply) <= LARGEST:
            self._replies.put(
                (client, digests[-1]), Said(reply=reply, thoughts=thoughts(messages), habit=habit)
            )
        return habit


async def _shared(link: EngineLink, chat: Doc, reply: Doc, habit: Habit, auth: Mapping[str, str]) -> Tokens:
    """What all prompts that this habit may lead to have in common."""
    first, *others = [
        await link.render_chat({**chat, "messages": messages}, auth)
        for messages in next_turns(habit, chat["messages"], reply)
    ]
    return first.cut(0, min(first.lcp(other) for other in others))


def _size(reply: Doc) -> int:
    """Characters of text in it."""
    calls = sum(len(Arguments.SAMPLED.of(call)) for call in rows(reply.get("tool_calls")))
    return len(words(reply)) + len(text(reply, "reasoning_content")) + calls
