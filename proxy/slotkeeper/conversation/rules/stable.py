"""Rules for texts that should stand still: a stamp in the system text, white space, reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from slotkeeper.conversation.requests.layout import Edit, Layout, Message, Role, Section, Text
from slotkeeper.conversation.rules.base import Mode, RuleName, Scene
from slotkeeper.conversation.rules.pairs import new, paired, sampled

Doc = dict[str, Any]

_BILLING: Final = "x-anthropic-billing-header:"
_STAMP: Final = "cch="
_STAMP_LENGTH: Final = 5


class BillingNonce:
    """The stamp that Claude Code puts into each request stays the one that its agent first sent."""

    name = RuleName.BILLING_NONCE
    default = Mode.FIX
    about = (
        "Claude Code begins its system text with a billing header whose `cch=` differs in each request, so "
        "that nothing behind it could be reused."
    )
    safe = (
        "It keeps the stamp of the first request, as llama-server itself does on /v1/messages. The stamp is "
        "a checksum for its vendor's servers and means nothing to the model."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        first = scene.before or scene.kin
        stamp = (
            next(filter(None, (_stamp(text.text) for text in _system(first.sent))), None) if first else None
        )
        if stamp is not None:
            for text in _system(scene.now):
                yield from _as(text, without_stamp(text.text, stamp))


class TrailingWhitespace:
    """White space around a text is as it was first sent, or sampled.

    Comes behind the rules that put facts back: it takes texts only that do not differ in anything else.
    """

    name = RuleName.TRAILING_WHITESPACE
    default = Mode.FIX
    about = (
        "Clients trim replies when they return or store them, and system texts when they build them again: "
        "the same message, except for white space at its ends."
    )
    safe = (
        "Only white space at the ends of texts changes, and it becomes what the engine first received or "
        "sampled. A message without a reply stays as the client wrote it."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        if scene.before is None:
            return
        now, before = scene.now, scene.before
        lead = zip(now.messages[: now.lead], before.sent.messages[: before.sent.lead], strict=False)
        for message, first in (*lead, *paired(scene)):
            if message is not now.messages[-1] or not _authored(message):
                yield from _ends(message, first)
        for at in new(scene):
            if now.messages[at].role is Role.ASSISTANT:
                yield from _as_sampled(now.messages[at], sampled(before, now.messages, at) or {})


class Reasoning:
    """Reasoning that was sent with a reply, or sampled with it, stays with it."""

    name = RuleName.REASONING
    default = Mode.OBSERVE
    about = (
        "Some clients return the reasoning of a reply at first and drop it later, or return that of some "
        "replies only."
    )
    safe = (
        "The model's own reasoning goes back to the reply that it belongs to. A client that returns none is "
        "left alone, and so is a reply that was already returned without it."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        before, messages = scene.before, scene.now.messages
        if before is None or not any(message.reasoning and message.reasoning.text for message in messages):
            return
        for message, first in paired(scene):
            if first.reasoning:
                yield from _thought(message, first.reasoning.text)
        for at in new(scene):
            if messages[at].reasoning and messages[at].role is Role.ASSISTANT:
                reply = sampled(before, messages, at) or {}
                if reply.get("tool_calls"):  # known by its words only, it may have answered something else
                    yield from _thought(messages[at], reply.get("reasoning_content"))


def without_stamp(system: str, written: str = "f" * _STAMP_LENGTH) -> str:
    """A system text with this stamp in its billing header; the engine makes it `fffff` on /v1/messages."""
    found = _stamp(system)
    if not found:
        return system
    start = system.index(_STAMP, len(_BILLING)) + len(_STAMP)
    return system[:start] + written + system[start + len(found) :]


def _stamp(system: str) -> str | None:
    """That of a system text which begins with a billing header."""
    at = system.find(_STAMP, len(_BILLING)) if system.startswith(_BILLING) else -1
    start, end = at + len(_STAMP), at + len(_STAMP) + _STAMP_LENGTH
    return system[start:end] if at >= 0 and system[end : end + 1] == ";" else None


def _system(layout: Layout) -> Iterator[Text]:
    for message in layout.messages:
        yield from (text for text in message.texts if text.section is Section.SYSTEM)


def _authored(message: Message) -> bool:
    return any(text.section is Section.USER for text in message.texts)


def _ends(message: Message, first: Message) -> Iterator[Edit]:
    """White space around each text as in `first`, where nothing else differs."""
    if len(message.texts) == len(first.texts):
        for text, was in zip(message.texts, first.texts, strict=True):
            yield from _end(text, was.text)
    if first.reasoning:
        yield from _end(message.reasoning, first.reasoning.text)


def _as_sampled(message: Message, reply: Doc) -> Iterator[Edit]:
    if len(message.texts) == 1:
        yield from _end(message.texts[0], reply.get("content"))
    yield from _end(message.reasoning, reply.get("reasoning_content"))


def _end(text: Text | None, first: Any) -> Iterator[Edit]:
    if text and isinstance(first, str) and text.text != first and text.text.strip() == first.strip():
        yield from _as(text, first)


def _thought(message: Message, reasoning: Any) -> Iterator[Edit]:
    if message.reasoning and not message.reasoning.text and isinstance(reasoning, str):
        yield from _as(message.reasoning, reasoning)


def _as(text: Text, written: str) -> Iterator[Edit]:
    if written != text.text:
        yield Edit(text.path, text.text or None, written)
