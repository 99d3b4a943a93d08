"""What is remembered of one conversation: its last request, as it came and as it went on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slotkeeper.conversation.requests.layout import Layout
from slotkeeper.scheduler.tokens import Tokens

Doc = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Who:
    """Whose request it is. Conversations of two clients are never one."""

    client: str  # a digest of the API key, else of the address, and of the program
    name: str | None = None  # what the client calls the conversation


@dataclass(slots=True, eq=False)
class Conversation:
    """A line of requests, each of which went on from the one before it."""

    number: int
    who: Who
    received: Layout  # the last request, as the client sent it
    sent: Layout  # as it went to the engine, without the notes
    at: float  # seconds, of the last request
    notes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # put behind message n when it was new
    told: Mapping[str, str] = field(default_factory=dict)  # facts that notes have told, by place
    replies: dict[str, Doc] = field(default_factory=dict)  # messages as sampled, by the ids of their calls
    tokens: Tokens | None = None  # the last prompt, where it is known
    size: int = 0  # characters that it keeps
    aside: bool = False  # asked beside a conversation (a title, a suggestion): only its own next one goes on
    line: int = 0  # one agent's; a conversation that gets more tools goes on in another, under its number
    rules: tuple[str, ...] = ()  # names of those that had changed what was sent last


@dataclass(frozen=True, slots=True)
class Keys:
    """Under which a request's conversation is looked up."""

    first: tuple[bytes, ...]  # by its first user message
    kin: tuple[bytes, ...]  # by what conversations of one agent share


@dataclass(frozen=True, slots=True)
class Near:
    """What the book has that a request may go on from."""

    lines: tuple[Conversation, ...]
    kin: tuple[Conversation, ...]
    beside: Conversation | None  # the latest of this client that has tools


@dataclass(frozen=True, slots=True)
class Match:
    """Where a request comes from."""

    before: Conversation | None  # that it goes on from
    common: int = 0  # messages behind the system text that are the same as there
    sibling: Conversation | None = None  # of the same client, with the same system text or tools
    beside: Conversation | None = None  # the latest of this client that has tools
    same_agent: bool = True  # whether `before` is of the same agent: see `likeness.same_agent`
    keys: Keys | None = field(default=None, compare=False)  # of the request

    @property
    def remembered(self) -> Conversation | None:
        """What rules may put back: nothing that another agent sent, whatever session both belong to."""
        return self.before if self.same_agent else None
