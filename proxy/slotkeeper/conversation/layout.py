"""A generation request laid out: the pieces that reach its prompt, for every API; and a conversation.

A path leads from the body's outermost object to a value in it: keys and indices, as JSON has them. What
is absent but could be put there has a path as well, and an empty text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from slotkeeper.scheduler.types import Tokens

Path = tuple[str | int, ...]
Doc = dict[str, Any]

NOWHERE: Final[Path] = ()


class Role(StrEnum):
    SYSTEM = "system"  # also developer, instructions, Anthropic's `system`
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Section(StrEnum):
    """In which part of a request something stands."""

    OPTIONS = "options"  # what else decides how the template renders: thinking, tool_choice
    TOOLS = "tools"
    SYSTEM = "system"
    USER = "user"
    REPLY = "reply"
    REASONING = "reasoning"
    CALL = "call"
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class Text:
    """One string of the body that reaches the prompt."""

    path: Path
    text: str
    section: Section


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a reply."""

    name: str
    id: str
    id_path: Path
    arguments: Any  # JSON text, or the object where the API has objects (Anthropic)
    arguments_path: Path


@dataclass(frozen=True, slots=True)
class Message:
    """One message, or one item of a Responses body."""

    role: Role
    path: Path  # of the whole message
    texts: tuple[Text, ...] = ()  # in their order; results of tools among them
    calls: tuple[Call, ...] = ()
    answers: tuple[Text, ...] = ()  # the ids of the calls whose results it carries
    reasoning: Text | None = None  # None: this API has no place for it here
    media: tuple[bytes, ...] = ()  # digests of its images and audio, which stand in no text
    content: Any = None  # as it stands in the body under `content`, to be put back whole; not with media
    # What is left of it without what changes by itself: `facts.digest` computes it once.
    loose_digest: bytes | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def said(self) -> str:
        """All of its texts, joined by line ends."""
        return "\n".join(text.text for text in self.texts)

    @property
    def reasoning_text(self) -> str:
        return self.reasoning.text if self.reasoning else ""

    @property
    def answered_ids(self) -> list[str]:
        """The ids of the calls whose results it carries."""
        return [answer.text for answer in self.answers]

    def has_texts_of(self, other: Message) -> bool:
        """Whether its texts are the same, one by one."""
        return [text.text for text in self.texts] == [text.text for text in other.texts]

    def pieces(self) -> Iterator[Text]:
        """Everything in it that is a string, reasoning first, as templates put it."""
        if self.reasoning and self.reasoning.text:
            yield self.reasoning
        yield from self.texts


@dataclass(frozen=True, slots=True)
class Layout:
    """A request. The messages begin with what stands before the client's own list of them."""

    messages: tuple[Message, ...]
    tools: tuple[Doc, ...] = ()  # as they stand in the body
    tools_path: Path = ("tools",)
    options: Doc = field(default_factory=dict)  # other keys that change the prompt

    @property
    def lead(self) -> int:
        """How many of the first messages are system text."""
        return next((n for n, m in enumerate(self.messages) if m.role is not Role.SYSTEM), len(self.messages))

    @property
    def has_reply(self) -> bool:
        return any(message.role is Role.ASSISTANT for message in self.messages)

    @property
    def newest_user(self) -> int | None:
        """The index of the last message in which a user says something."""
        for at in range(len(self.messages) - 1, -1, -1):
            if any(text.section is Section.USER for text in self.messages[at].texts):
                return at
        return None


@dataclass(frozen=True, slots=True)
class Edit:
    """A value of the body that becomes another."""

    path: Path
    before: Any  # None: it was absent
    after: Any
    moved: int = 0  # bytes that were sent before and stand elsewhere than this client wrote them


def edited(body: Doc, edits: Iterable[Edit]) -> Doc:
    """A body with some values replaced; what lies on no path is shared with the old one.

    Raises KeyError, IndexError or TypeError for a path that leads nowhere.
    """
    for edit in edits:
        body = _put(body, edit.path, edit.after)
    return body


def _put(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    key, *rest = path
    if isinstance(value, list):
        if not isinstance(key, int):
            raise TypeError(f"{key!r} in a list")
        return [*value[:key], _put(value[key], tuple(rest), new), *value[key + 1 :]]
    if not isinstance(value, dict) or (rest and key not in value):
        raise KeyError(key)
    return {**value, key: _put(value[key], tuple(rest), new) if rest else new}


# -- a conversation --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Who:
    """Whose request it is. Conversations of two clients are never one."""

    client: str  # a digest of the API key, else of the address, and of the program
    name: str | None = None  # what the client calls the conversation

    def may_continue(self, other: Who) -> bool:
        """Whether its requests may go on from those of the other: the same client, and not two names."""
        one_name = not (self.name and other.name) or self.name == other.name
        return self.client == other.client and one_name


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
    def nearest(self) -> Conversation | None:
        """The one that it is compared with: where none goes on, the latest of the same agent, or client."""
        return self.before or self.sibling or self.beside

    @property
    def remembered(self) -> Conversation | None:
        """What rules may put back: nothing that another agent sent, whatever session both belong to."""
        return self.before if self.same_agent else None


def says(message: Message, phrases: tuple[str, ...]) -> bool:
    """Whether one of its texts, other than a tool's result, begins so."""
    return any(
        text.section is not Section.RESULT and text.text[:200].lstrip().startswith(phrases)
        for text in message.texts
    )


def user_says(message: Message, phrases: tuple[str, ...]) -> bool:
    return message.role is Role.USER and says(message, phrases)
