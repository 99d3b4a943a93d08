"""The layout of a generation request, for every API: the pieces that reach its prompt; and a conversation.

A path leads from the body's outermost object to a value in it: keys and indices, as in JSON. A text that is
absent but may be added has a path as well, and is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from slotkeeper.scheduler.prompts.tokens import Tokens

Path = tuple[str | int, ...]
Doc = dict[str, Any]

NOWHERE: Final[Path] = ()


class Role(StrEnum):
    SYSTEM = "system"  # also developer, instructions, Anthropic's `system`
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Section(StrEnum):
    """The part of a request to which a text belongs."""

    OPTIONS = "options"  # other fields that change how the template renders: thinking, tool_choice
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
    texts: tuple[Text, ...] = ()  # in their order, the results of tools included
    calls: tuple[Call, ...] = ()
    answers: tuple[Text, ...] = ()  # the ids of the calls whose results the message carries
    reasoning: Text | None = None  # None: this API has no field for it here
    media: tuple[bytes, ...] = ()  # digests of images and audio, which are in no text
    content: Any = None  # the body's `content`, so that a rule can restore it whole; None with media
    # Digest of the message without the facts that change by themselves; `facts.digest` computes it once.
    loose_digest: bytes | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def said(self) -> str:
        """All texts of the message, joined by line ends."""
        return "\n".join(text.text for text in self.texts)

    @property
    def reasoning_text(self) -> str:
        return self.reasoning.text if self.reasoning else ""

    @property
    def answered_ids(self) -> list[str]:
        """The ids of the calls whose results the message carries."""
        return [answer.text for answer in self.answers]

    def has_texts_of(self, other: Message) -> bool:
        """Whether both messages have the same texts, one by one."""
        return [text.text for text in self.texts] == [text.text for text in other.texts]

    def pieces(self) -> Iterator[Text]:
        """Yield all texts of the message, reasoning first, as templates write them."""
        if self.reasoning and self.reasoning.text:
            yield self.reasoning
        yield from self.texts


@dataclass(frozen=True, slots=True)
class Layout:
    """A request. `messages` begins with the system text that some APIs keep outside their list."""

    messages: tuple[Message, ...]
    tools: tuple[Doc, ...] = ()  # as in the body
    tools_path: Path = ("tools",)
    options: Doc = field(default_factory=dict)  # other keys that change the prompt

    @property
    def lead(self) -> int:
        """The number of system messages at the beginning."""
        return next((n for n, m in enumerate(self.messages) if m.role is not Role.SYSTEM), len(self.messages))

    @property
    def has_reply(self) -> bool:
        return any(message.role is Role.ASSISTANT for message in self.messages)

    @property
    def newest_user(self) -> int | None:
        """The index of the last message with a text from the user."""
        for at in range(len(self.messages) - 1, -1, -1):
            if any(text.section is Section.USER for text in self.messages[at].texts):
                return at
        return None


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one value in the body."""

    path: Path
    before: Any  # None: the value was absent
    after: Any
    moved: int = 0  # bytes that were sent before and are now in another place than the client put them


def edited(body: Doc, edits: Iterable[Edit]) -> Doc:
    """Return a body with the edits applied; it shares all values on no edit's path with the old body.

    Raises KeyError, IndexError or TypeError for a path that does not exist in the body.
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
    """The client of a request. Requests of two clients never belong to one conversation."""

    client: str  # digests of the API key (else of the address) and of the User-Agent
    name: str | None = None  # the client's name for the conversation


@dataclass(slots=True, eq=False)
class Conversation:
    """A line of requests, each of which continued the one before it."""

    number: int
    who: Who
    received: Layout  # the last request, as the client sent it
    sent: Layout  # the last request as the engine got it, without the notes
    at: float  # time of the last request, in seconds
    notes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # put after message n when it was new
    noted: Mapping[str, str] = field(default_factory=dict)  # facts that notes contain, by place
    replies: dict[str, Doc] = field(default_factory=dict)  # messages as sampled, by the ids of their calls
    tokens: Tokens | None = None  # the last prompt; None: not known
    size: int = 0  # characters kept
    aside: bool = False  # a side request (a title, a suggestion): only its own next request continues it
    line: int = 0  # id of one agent's line; a conversation with more tools gets a new line, but no new number
    rules: tuple[str, ...] = ()  # names of the rules that changed the last request
    keyed: bool = False  # one of its requests held a key


@dataclass(frozen=True, slots=True)
class Keys:
    """The index keys by which a request's conversation is found."""

    first: tuple[bytes, ...]  # from the first user message
    kin: tuple[bytes, ...]  # from the text and tools that conversations of one agent share


@dataclass(frozen=True, slots=True)
class Near:
    """The stored conversations that a request may continue, and their relatives."""

    lines: tuple[Conversation, ...]
    kin: tuple[Conversation, ...]
    beside: Conversation | None  # the latest of this client that has tools


@dataclass(frozen=True, slots=True)
class Match:
    """The conversation that a request continues, and other conversations to compare it with."""

    before: Conversation | None  # the one that the request continues
    common: int = 0  # messages after the system text that both have in common
    sibling: Conversation | None = None  # another of the same client, with the same system text or tools
    beside: Conversation | None = None  # the latest of this client that has tools
    same_agent: bool = True  # whether `before` is of the same agent: see `likeness.same_agent`
    keys: Keys | None = field(default=None, compare=False)  # the request's index keys

    @property
    def nearest(self) -> Conversation | None:
        """The conversation to compare with: the continued one, else the latest of the agent or client."""
        return self.before or self.sibling or self.beside

    @property
    def remembered(self) -> Conversation | None:
        """The conversation whose text rules may restore; None if another agent's, even in one session."""
        return self.before if self.same_agent else None


def says(message: Message, phrases: tuple[str, ...]) -> bool:
    """Whether a text of the message, other than a tool's result, begins with one of these phrases."""
    return any(
        text.section is not Section.RESULT and text.text[:200].lstrip().startswith(phrases)
        for text in message.texts
    )


def user_says(message: Message, phrases: tuple[str, ...]) -> bool:
    return message.role is Role.USER and says(message, phrases)
