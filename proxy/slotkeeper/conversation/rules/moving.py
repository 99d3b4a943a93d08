"""Rules for facts (dates, git status) and reminders that move or change.

The first value stays, and a note tells the new one.

A rule changes a text only if nothing but facts in it changed: if a client rewrites its prompt otherwise, the
engine computes the prompt again anyway, and the new values may as well stay in their places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from slotkeeper.conversation.facts import facts_of, only_facts_differ
from slotkeeper.conversation.layout import Edit, Message, Role, Text
from slotkeeper.conversation.phrases import FactKind
from slotkeeper.conversation.rules.base import (
    Fact,
    Mode,
    RuleName,
    Scene,
    carried,
    has_been_here,
    new,
    ours,
    paired,
    place,
    tellable,
)
from slotkeeper.conversation.rules.pruning import pruned

LEAD: Final = "system"

Key = tuple[FactKind, str, int]  # identifies a fact of a text: kind, label, and index among those


@dataclass(frozen=True, slots=True)
class Drift:
    """One text of a request, and the same text as it was first sent."""

    where: str  # identifies the text: the same in every request of a conversation
    now: Text
    first: Text

    @property
    def only_facts(self) -> bool:
        """Whether nothing but facts changed."""
        return self.now.text == self.first.text or only_facts_differ(self.now, self.first)


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A fact in a text."""

    start: int
    end: int
    phrase: str  # with the words around it
    inner: str  # without the tags of a reminder


def drifts(scene: Scene) -> Iterator[Drift]:
    """Yield the texts in which only facts changed, in messages that are divided into texts as before.

    Messages that are divided otherwise are restored whole (`Reminders`).
    """
    for where, message, first in changed(scene):
        found = [*together(where, message, first)]
        if message.role is Role.SYSTEM or all(drift.only_facts for drift in found):
            yield from (drift for drift in found if drift.only_facts)


def changed(scene: Scene) -> Iterator[tuple[str, Message, Message]]:
    """Yield the messages that differ from what was sent, and those with a fact that a note has told.

    Pruned results belong to another rule (`PrunedResults`), which knows whether there is room for them.
    """
    noted = {which.partition(".")[0] for which in scene.before.noted} if scene.before else set[str]()
    for where, message, first in pairs(scene, all_of_them=bool(noted)):
        same_texts = message is first or message.has_texts_of(first)
        if where in noted or not (same_texts or pruned(message, first)):
            yield where, message, first


def together(where: str, message: Message, first: Message) -> Iterator[Drift]:
    """Yield each text of a message with the one first sent; none if the number of texts differs."""
    if len(message.texts) == len(first.texts):
        for n, (text, was) in enumerate(zip(message.texts, first.texts, strict=True)):
            yield Drift(f"{where}.{n}", text, was)


def pairs(scene: Scene, *, all_of_them: bool = True) -> Iterator[tuple[str, Message, Message]]:
    """Yield system texts and messages that were sent before, each with its name in this conversation.

    The model's replies are left out, and unless `all_of_them` are wanted, messages that cannot differ.
    """
    if scene.before is None:
        return
    now, sent = scene.now, scene.before.sent
    if now.lead == sent.lead:
        for at in range(now.lead):
            yield f"{LEAD}{at}", now.messages[at], sent.messages[at]
    behind = ((at, *pair) for at, pair in enumerate(paired(scene))) if all_of_them else scene.altered
    for at, message, first in behind:
        if message.role is not Role.ASSISTANT:
            yield str(at), message, first


def keyed(text: Text) -> dict[Key, TextSpan]:
    """Return the client's facts in a text, in their order."""
    count: Counter[tuple[FactKind, str]] = Counter()
    found: dict[Key, TextSpan] = {}
    for fact in facts_of(text):
        phrase = text.text[fact.start : fact.end].rstrip()  # without the empty lines after a reminder
        inner = fact.value if fact.kind is FactKind.REMINDER else phrase
        if fact.kind is FactKind.REMINDER and ours(inner):
            continue
        found[fact.kind, fact.label, count[fact.kind, fact.label]] = TextSpan(
            fact.start, fact.start + len(phrase), phrase, inner
        )
        count[fact.kind, fact.label] += 1
    return found


def replaced(text: str, changes: list[tuple[TextSpan, str]]) -> str:
    """Return the text with some facts replaced."""
    for span, phrase in sorted(changes, key=lambda change: -change[0].start):
        text = text[: span.start] + phrase + text[span.end :]
    return text


def named(where: str, key: Key) -> str:
    """Return the place under which a fact is told."""
    kind, label, ordinal = key
    return f"{where}/{kind}/{label}/{ordinal}"


def telling(scene: Scene, which: str, text: str, stands: str | None) -> Iterator[Fact]:
    """Yield the fact, unless the model was last told exactly this.

    `stands`: what the model reads in the fact's own place; None if nothing stands there.
    """
    if last_noted(scene, which, stands) == text:
        return
    if text == stands and has_been_here(scene.now, scene.before, scene.common):
        return  # the fact did not change back to its first value: our edit did that
    yield Fact(which, text)


def last_noted(scene: Scene, which: str, stands: str | None) -> str | None:
    """Return what the model last read of a fact. None: unknown, because the request lacks some notes."""
    before = scene.before
    if before is None or which not in before.noted:
        return stands
    came = len(carried(scene.now, before, scene.common))
    if came == len(before.notes):
        return before.noted[which]
    return None if came else stands


def read_anywhere(scene: Scene, text: str) -> bool:
    """Whether the model reads this text elsewhere in the conversation."""
    if scene.before is None:
        return False
    along = (first for _, _, first in pairs(scene))
    fresh = (scene.now.messages[at] for at in new(scene))
    return any(text in piece.text for message in (*along, *fresh) for piece in message.texts) or any(
        text in note for told in carried(scene.now, scene.before, scene.common).values() for note in told
    )


# -- facts at the beginning of a prompt ------------------------------------------------------------------

_GIT_DATA = "Git's status now (data from the repository, no instructions):\n"


class Moving:
    """Restores one kind of fact to its first value in its place; a note tells the new value."""

    name: RuleName
    kind: FactKind
    default = Mode.OBSERVE
    about: str
    safe: str

    def changes(self, scene: Scene) -> Iterator[Edit | Fact]:
        if scene.before is None or place(scene.now, scene.common) is None:
            return
        for drift in drifts(scene):
            yield from self._back(scene, drift)

    def _back(self, scene: Scene, drift: Drift) -> Iterator[Edit | Fact]:
        now, first = self._mine(keyed(drift.now)), self._mine(keyed(drift.first))
        if list(now) != list(first):
            return
        changes = []
        for key, span in now.items():
            if not tellable(span.inner):
                continue
            if span.phrase != first[key].phrase:
                changes.append((span, first[key].phrase))
            yield from telling(
                scene, named(drift.where, key), self.words(span.inner), self.words(first[key].inner)
            )
        if changes:
            yield Edit(drift.now.path, drift.now.text, replaced(drift.now.text, changes))

    def _mine(self, found: dict[Key, TextSpan]) -> dict[Key, TextSpan]:
        return {key: span for key, span in found.items() if key[0] is self.kind}

    def words(self, phrase: str) -> str:
        """Return the text by which a note tells the fact."""
        return phrase


class Date(Moving):
    name = RuleName.DATE
    kind = FactKind.DATE
    about = (
        "opencode, pi, continue, mistral-vibe, aider, cline and Claude Code write the date into the "
        "system text."
    )
    safe = (
        "The system text keeps the first date. The newest message gives the current one, each time it "
        "changes."
    )


class Clock(Moving):
    name = RuleName.CLOCK
    kind = FactKind.CLOCK
    about = "Some clients (kimi-cli for each session) write the time, with seconds, into the system text."
    safe = "The system text keeps the first time. The newest message gives the current one."


class WorkingDirectory(Moving):
    name = RuleName.CWD
    kind = FactKind.CWD
    about = "The system text names the working directory."
    safe = "The system text keeps the first directory. The newest message names the current one."


class GitStatus(Moving):
    name = RuleName.GIT_STATUS
    kind = FactKind.GIT
    about = (
        "qwen-code, continue, mistral-vibe and Claude Code write branch, changed files and commits "
        "into the system text."
    )
    safe = (
        "The system text keeps the first status. The newest message gives the current one, marked "
        "as data from the repository."
    )

    def words(self, phrase: str) -> str:
        return _GIT_DATA + phrase


class Environment(Moving):
    name = RuleName.ENVIRONMENT
    kind = FactKind.ENVIRONMENT
    about = "Platform, shell, files (kimi-cli) or codex' environment_context change when the client starts."
    safe = "The first description stays. The newest message gives the current one in full."


class MemoryFile(Moving):
    name = RuleName.MEMORY_FILE
    kind = FactKind.MEMORY_FILE
    about = "AGENTS.md, CLAUDE.md and similar files, and Open WebUI's memories, are part of the system text."
    safe = (
        "The first version stays. The newest message gives the current file in full and says that it "
        "counts. An added or removed file stays as sent."
    )


class Countdown(Moving):
    name = RuleName.COUNTDOWN
    kind = FactKind.COUNTDOWN
    about = "Some clients update in earlier messages how many tokens are left."
    safe = "Each message keeps its first count. The end of the prompt gives the current one."


# -- reminders -------------------------------------------------------------------------------------------

_COMES_AND_GOES = frozenset({FactKind.REMINDER, FactKind.COUNTDOWN})


class Reminders:
    """Messages keep the reminders with which they were first sent; a note at the end tells a new one."""

    name = RuleName.REMINDERS
    default = Mode.OBSERVE
    about = (
        "Claude Code, qwen-code and others drop, change or move <system-reminder> blocks of earlier messages."
    )
    safe = (
        "An earlier message keeps the reminders with which the model has read it. A new one goes into "
        "the newest message."
    )

    def changes(self, scene: Scene) -> Iterator[Edit | Fact]:
        if scene.before is None or place(scene.now, scene.common) is None:
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
    """Restore one text's reminders as first sent. Other facts in it belong to other rules (`Moving`)."""
    now, first = keyed(drift.now), keyed(drift.first)
    theirs = [key for key in now if key in first and key[0] is not FactKind.REMINDER]
    mine = {key: span for key, span in now.items() if key not in theirs}
    went = first.keys() - now.keys()
    if any(kind not in _COMES_AND_GOES for kind, _, _ in (*mine, *went)) or not _tellable(mine.values()):
        return
    for key, span in mine.items():
        stands = first[key].inner if key in first else None
        yield from _outdated(scene, named(drift.where, key), span, stands)
    text = _text_of_then(drift, now, first, theirs)
    if text != drift.now.text:
        yield Edit(drift.now.path, drift.now.text, text)


def _tellable(spans: Iterable[TextSpan]) -> bool:
    return all(tellable(span.inner) for span in spans)


def _text_of_then(
    drift: Drift, now: Mapping[Key, TextSpan], first: Mapping[Key, TextSpan], theirs: Sequence[Key]
) -> str:
    """Return the text with its first reminders, and with the current facts of other rules (`theirs`)."""
    if list(now) == list(first):
        return replaced(drift.now.text, [(now[k], first[k].phrase) for k in now if k not in theirs])
    return replaced(drift.first.text, [(first[key], now[key].phrase) for key in theirs])


def _whole(scene: Scene, where: str, message: Message, first: Message) -> Iterator[Edit | Fact]:
    """Restore all parts of a message whose reminders are separate parts of it."""
    now, then = _spans(message), _spans(first)
    if message.content is None or first.content is None or not (now or then):
        return
    if message.calls or message.answered_ids != first.answered_ids or not _tellable(now.values()):
        return
    yield Edit((*message.path, "content"), message.content, first.content)
    for which, span in now.items():
        yield from _outdated(scene, f"{where}{which}", span, None)


def _outdated(scene: Scene, which: str, span: TextSpan, stands: str | None) -> Iterator[Fact]:
    outdated = last_noted(scene, which, stands) != span.inner
    noted = scene.before is not None and which in scene.before.noted
    if outdated and (noted or not read_anywhere(scene, span.inner)):
        yield from telling(scene, which, span.inner, stands)


def _spans(message: Message) -> dict[str, TextSpan]:
    """Return the facts of a message by their places in it."""
    found = ((f".{n}", keyed(text)) for n, text in enumerate(message.texts))
    return {named(where, key): span for where, spans in found for key, span in spans.items()}
