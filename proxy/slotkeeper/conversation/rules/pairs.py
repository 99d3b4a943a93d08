"""Which message of a request is which of the one before it, and which reply it sends back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from slotkeeper.conversation.record import Conversation
from slotkeeper.conversation.requests.layout import Message, Role
from slotkeeper.conversation.rules.base import Scene

Doc = dict[str, Any]

ITEMS: Final = 64  # of one reply in a Responses body, at most


def paired(scene: Scene) -> Iterator[tuple[Message, Message]]:
    """Messages behind the system text that were sent before: as they come now, and as they went on then."""
    if scene.before is None:
        return
    now, sent = scene.now, scene.before.sent
    yield from zip(
        now.messages[now.lead : now.lead + scene.common],
        sent.messages[sent.lead : sent.lead + scene.common],
        strict=False,
    )


def new(scene: Scene) -> range:
    """The indices of the messages that were not sent before."""
    return range(min(scene.now.lead + scene.common, len(scene.now.messages)), len(scene.now.messages))


def sampled(before: Conversation, messages: Sequence[Message], at: int) -> Doc | None:
    """The reply, as it was told, that message `at` is or is a part of.

    It is known by the ids of its calls, else by what it says. In a Responses body a reply is several
    items: what stands behind this one, up to the next that is no reply, tells which.
    """
    said = ""
    for message in messages[at : at + ITEMS]:
        if message.role is not Role.ASSISTANT:
            return None
        known = next((before.replies[call.id] for call in message.calls if call.id in before.replies), None)
        if known and (not said or _says(known, said)):
            return known
        if message.calls or said:
            return None
        said = message.said.strip()
        found = _saying(before, said) if said else None
        if found:
            return found
    return None


def _saying(before: Conversation, said: str) -> Doc | None:
    """The one reply without calls that says this. None if there are two that are not the same."""
    found = [reply for reply in before.replies.values() if not reply.get("tool_calls") and _says(reply, said)]
    return found[0] if found and all(reply == found[0] for reply in found) else None


def _says(reply: Doc, said: str) -> bool:
    content = reply.get("content")
    return isinstance(content, str) and content.strip() == said
