"""The rule for reminders: blocks that a client puts into messages, and later moves, changes, or drops."""

from __future__ import annotations

from collections.abc import Iterator

from slotkeeper.conversation.requests.facts import FactKind
from slotkeeper.conversation.requests.layout import Edit, Message, Role
from slotkeeper.conversation.rules import notes
from slotkeeper.conversation.rules.base import Fact, Mode, RuleName, Scene
from slotkeeper.conversation.rules.drifts import (
    Drift,
    TextSpan,
    changed,
    keyed,
    last_told,
    named,
    read_anywhere,
    replaced,
    telling,
    together,
)

_COMES_AND_GOES = frozenset({FactKind.REMINDER, FactKind.COUNTDOWN})


class Reminders:
    """Messages keep the reminders with which they were first sent; a new one is told at the end."""

    name = RuleName.REMINDERS
    default = Mode.OBSERVE
    about = (
        "Claude Code, qwen-code, and others put <system-reminder> blocks into messages and drop, change, or "
        "move them in later requests. Each time everything behind that message is computed again."
    )
    safe = (
        "An earlier message keeps the reminders with which the model has read it. A new reminder that is "
        "nowhere else in the conversation goes into the newest message."
    )

    def changes(self, scene: Scene) -> Iterator[Edit | Fact]:
        if scene.before is None or notes.place(scene.now, scene.common) is None:
            return
        for where, message, first in changed(scene):
            yield from _as_first_sent(scene, where, message, first)


def _as_first_sent(scene: Scene, where: str, message: Message, first: Message) -> Iterator[Edit | Fact]:
    found = [*together(where, message, first)]
    if found and all(drift.only_facts for drift in found):
        for drift in found:
            yield from _back(scene, drift)
    elif message.role is not Role.SYSTEM:
        yield from _whole(scene, where, message, first)


def _back(scene: Scene, drift: Drift) -> Iterator[Edit | Fact]:
    """One text with its reminders of then. Other facts in it are other rules' (canonical.moving)."""
    now, first = keyed(drift.now), keyed(drift.first)
    theirs = [key for key in now if key in first and key[0] is not FactKind.REMINDER]
    mine = [key for key in now if key not in theirs]
    went = [key for key in first if key not in now]
    if any(key[0] not in _COMES_AND_GOES for key in (*mine, *went)):
        return
    if not all(notes.tellable(now[key].inner) for key in mine):
        return
    for key in mine:
        stands = first[key].inner if key in first else None
        yield from _told(scene, named(drift.where, key), now[key], stands)
    if list(now) == list(first):
        text = replaced(drift.now.text, [(now[key], first[key].phrase) for key in mine])
    else:
        text = replaced(drift.first.text, [(first[key], now[key].phrase) for key in theirs])
    if text != drift.now.text:
        yield Edit(drift.now.path, drift.now.text, text)


def _whole(scene: Scene, where: str, message: Message, first: Message) -> Iterator[Edit | Fact]:
    """A message whose reminders are parts of it, with all of its parts of then."""
    now, then = _spans(message), _spans(first)
    if message.content is None or first.content is None or not (now or then):
        return
    if message.calls or [text.text for text in message.answers] != [text.text for text in first.answers]:
        return
    if not all(notes.tellable(span.inner) for span in now.values()):
        return
    yield Edit((*message.path, "content"), message.content, first.content)
    for which, span in now.items():
        yield from _told(scene, f"{where}{which}", span, None)


def _told(scene: Scene, which: str, span: TextSpan, stands: str | None) -> Iterator[Fact]:
    outdated = last_told(scene, which, stands) != span.inner
    told = scene.before is not None and which in scene.before.told
    if outdated and (told or not read_anywhere(scene, span.inner)):
        yield from telling(scene, which, span.inner, stands)


def _spans(message: Message) -> dict[str, TextSpan]:
    """The facts of a message by their places in it."""
    found = ((f".{n}", keyed(text)) for n, text in enumerate(message.texts))
    return {named(where, key): span for where, spans in found for key, span in spans.items()}
