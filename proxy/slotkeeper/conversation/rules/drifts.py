"""Texts that are the same as when they were first sent but for their facts, and what in them is another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from slotkeeper.conversation.requests import facts
from slotkeeper.conversation.requests.facts import FactKind
from slotkeeper.conversation.requests.layout import Message, Role, Text
from slotkeeper.conversation.rules import notes
from slotkeeper.conversation.rules.base import Fact, Scene
from slotkeeper.conversation.rules.pairs import new, paired

LEAD: Final = "system"

Key = tuple[FactKind, str, int]  # which fact of a text: its kind, its label, and the how manieth of those


@dataclass(frozen=True, slots=True)
class Drift:
    """One text of a request, and what it was when it was first sent."""

    where: str  # the same in every request of a conversation
    now: Text
    first: Text

    @property
    def only_facts(self) -> bool:
        """Whether nothing else in it changed."""
        return self.now.text == self.first.text or facts.only_facts_differ(self.now, self.first)


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A fact as it stands in a text."""

    start: int
    end: int
    phrase: str  # with the words around it
    inner: str  # without the tags of a reminder


def drifts(scene: Scene) -> Iterator[Drift]:
    """Texts in which nothing but facts changed, as far as their messages were not parted otherwise.

    Those that were are put back whole (canonical.reminders).
    """
    for where, message, first in changed(scene):
        found = [*together(where, message, first)]
        if message.role is Role.SYSTEM or all(drift.only_facts for drift in found):
            yield from (drift for drift in found if drift.only_facts)


def changed(scene: Scene) -> Iterator[tuple[str, Message, Message]]:
    """Messages that are not as they were sent, and those about which something else was told since."""
    told = {which.partition(".")[0] for which in scene.before.told} if scene.before else set[str]()
    for where, message, first in pairs(scene):
        if where in told or not (message is first or _as_sent(message.texts, first.texts)):
            yield where, message, first


def together(where: str, message: Message, first: Message) -> Iterator[Drift]:
    """The texts of a message and those of then, if there were as many."""
    if len(message.texts) == len(first.texts):
        for n, (text, was) in enumerate(zip(message.texts, first.texts, strict=True)):
            yield Drift(f"{where}.{n}", text, was)


def pairs(scene: Scene) -> Iterator[tuple[str, Message, Message]]:
    """Messages that were sent before, system text among them, each with its name in this conversation."""
    if scene.before is None:
        return
    now, sent = scene.now, scene.before.sent
    if now.lead == sent.lead:
        for at in range(now.lead):
            yield f"{LEAD}{at}", now.messages[at], sent.messages[at]
    for at, (message, first) in enumerate(paired(scene)):
        if message.role is not Role.ASSISTANT:
            yield str(at), message, first


def _as_sent(texts: Sequence[Text], first: Sequence[Text]) -> bool:
    return len(texts) == len(first) and all(map(_same, texts, first))


def _same(one: Text, other: Text) -> bool:
    return one.text == other.text


def keyed(text: Text) -> dict[Key, TextSpan]:
    """The client's facts in a text, in their order."""
    count: Counter[tuple[FactKind, str]] = Counter()
    found: dict[Key, TextSpan] = {}
    for fact in facts.of(text):
        phrase = text.text[fact.start : fact.end].rstrip()  # without the empty lines behind a reminder
        inner = fact.value if fact.kind is FactKind.REMINDER else phrase
        if fact.kind is FactKind.REMINDER and notes.ours(inner):
            continue
        found[fact.kind, fact.label, count[fact.kind, fact.label]] = TextSpan(
            fact.start, fact.start + len(phrase), phrase, inner
        )
        count[fact.kind, fact.label] += 1
    return found


def replaced(text: str, changes: list[tuple[TextSpan, str]]) -> str:
    """A text with some facts written otherwise."""
    for span, phrase in sorted(changes, key=lambda change: -change[0].start):
        text = text[: span.start] + phrase + text[span.end :]
    return text


def named(where: str, key: Key) -> str:
    """The place under which a fact is told."""
    kind, label, ordinal = key
    return f"{where}/{kind}/{label}/{ordinal}"


def telling(scene: Scene, which: str, text: str, stands: str | None) -> Iterator[Fact]:
    """The fact, unless the model was told exactly this last; `stands`: what it reads in its old place."""
    if last_told(scene, which, stands) == text:
        return
    if text == stands and notes.has_been_here(scene.now, scene.before, scene.common):
        return  # it does not go back to what it was first: we put it back
    yield Fact(which, text)


def last_told(scene: Scene, which: str, stands: str | None) -> str | None:
    """What the model knows about it. None: that cannot be said, as some notes did not come along."""
    before = scene.before
    if before is None or which not in before.told:
        return stands
    came = len(notes.carried(scene.now, before, scene.common))
    if came == len(before.notes):
        return before.told[which]
    return None if came else stands


def read_anywhere(scene: Scene, text: str) -> bool:
    """Whether the model reads this somewhere in the conversation all the same."""
    if scene.before is None:
        return False
    along = (first for _, _, first in pairs(scene))
    fresh = (scene.now.messages[at] for at in new(scene))
    return any(text in piece.text for message in (*along, *fresh) for piece in message.texts) or any(
        text in note
        for told in notes.carried(scene.now, scene.before, scene.common).values()
        for note in told
    )
