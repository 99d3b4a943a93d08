"""A generation request laid out: the pieces that reach its prompt, the same for every API.

A path leads from the body's outermost object to a value in it: keys and indices, as JSON has them. What
is absent but could be put there has a path as well, and an empty text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

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

    @property
    def said(self) -> str:
        """All of its texts, joined by line ends."""
        return "\n".join(text.text for text in self.texts)

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
