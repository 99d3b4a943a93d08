"""The rules: dates and reminders that move, results that were pruned, tools and calls that are written anew.

A fact (a date, git status) keeps its first value, and a note tells the new one. Its text is changed only if
nothing but facts in it changed: if a client rewrites its prompt otherwise, the engine computes the prompt
again anyway, and the new values may as well stay in their places.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any, Final

from slotkeeper.conversation.divergence import common_start, length
from slotkeeper.conversation.layout import (
    Call,
    Conversation,
    Doc,
    Edit,
    Layout,
    Message,
    Path,
    Role,
    Section,
    Text,
    bare,
    facts_of,
    only_facts_differ,
    same,
)
from slotkeeper.conversation.phrases import HIDDEN, LEFT_OUT, PRUNED, FactKind
from slotkeeper.conversation.rules.base import (
    Fact,
    Mode,
    RuleName,
    Scene,
    alike,
    carried,
    has_been_here,
    new,
    ours,
    paired,
    parsed,
    place,
    same_writing,
    sampled,
    size,
    tellable,
)

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
    noted = {which.partition(".")[0] for which in scene.told}
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
    if scene.told.get(which, stands) == text:
        return
    if text == stands and has_been_here(scene.now, scene.before, scene.common):
        return  # the fact did not change back to its first value: our edit did that
    yield Fact(which, text)


def read_anywhere(scene: Scene, text: str) -> bool:
    """Whether the model reads this text elsewhere in the conversation."""
    if scene.before is None:
        return False
    along = (first for _, _, first in pairs(scene))
    fresh = (scene.now.messages[at] for at in new(scene))
    return any(text in piece.text for message in (*along, *fresh) for piece in message.texts) or any(
        text in note.text
        for notes in carried(scene.now, scene.before, scene.common).values()
        for note in notes
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
    outdated = scene.told.get(which, stands) != span.inner
    if outdated and (which in scene.told or not read_anywhere(scene, span.inner)):
        yield from telling(scene, which, span.inner, stands)


def _spans(message: Message) -> dict[str, TextSpan]:
    """Return the facts of a message by their places in it."""
    found = ((f".{n}", keyed(text)) for n, text in enumerate(message.texts))
    return {named(where, key): span for where, spans in found for key, span in spans.items()}


# -- tool results that the client pruned ----------------------------------------------------------------

# The rule that restores tool results which a client has shortened since they were first sent.
#
# Agents prune old results to make room: a placeholder, a line about the result or a part of it replaces the
# text. A prune is known by the words of the agents' programs (`phrases.PRUNED`) or by what is left of the
# text. A text that a program hides on purpose (a secret, say) is not pruned, nor is a text that says
# something else.


# Characters. OpenClaw's note after the part that it keeps has 90, opencode's 70; two such lines fit.
MARKER: Final = 240
# Characters. Hermes summarizes results longer than this, and to restore shorter texts gains nothing.
LEAST: Final = 200
# `[NAME of the tool] what it did`: Hermes keeps commands up to 80 characters, and paths.
_SUMMARY: Final = re.compile(r"\[[A-Za-z_][\w.-]{0,63}\] \S[^\n]*")
_OPENING: Final = ("[", "(", "<", "{", ".", "…", "-", "*")
_CLOSING: Final = ("]", ")", ">", "}", ".", "…", "-", "*")

Result = tuple[Text, ...]  # the texts of one call's result


def common(old: Layout, new: Layout) -> int:
    """Count the first messages after the system text that are the same, or that the client has shortened.

    This is cheap where texts are equal: only messages that differ are examined.
    """
    return _common(old.messages[old.lead :], new.messages[new.lead :])


def spoken_common(old: Layout, new: Layout) -> int:
    """Count the first messages that are the same if system messages are left out on both sides."""
    return _common(*([message for _, message in side.spoken] for side in (old, new)))


def _common(was: Sequence[Message], now: Sequence[Message]) -> int:
    count = 0
    while count < min(len(was), len(now)) and _continues(now, was, count):
        count += 1
    return count


def _continues(now: Sequence[Message], was: Sequence[Message], at: int) -> bool:
    """Whether message `at` is the one that was sent before: the same, or shortened since by the client.

    What a user had written himself must not come back. So a shortened message of a user counts only if the
    same reply follows it.
    """
    if same(now[at], was[at]) or pruned(now[at], was[at]):
        return True
    behind = at + 1
    if behind >= min(len(was), len(now)) or was[behind].role is not Role.ASSISTANT:
        return False
    return bool(unwrapped(now[at], was[at])) and same(now[behind], was[behind])


def unwrapped(now: Message, first: Message) -> tuple[Edit, ...]:
    """Return the edits that put back what a client had put around the user's words at first.

    There are none if the messages differ otherwise.
    """
    if now.role is not Role.USER or first.role is not Role.USER or len(now.texts) != len(first.texts):
        return ()
    if now.media != first.media or now.answers or first.answers:
        return ()
    edits: list[Edit] = []
    for text, was in zip(now.texts, first.texts, strict=True):
        words = text.text.strip()
        if text.text == was.text:
            continue
        if not words or words not in was.text or len(was.text) - len(words) < LEAST:
            return ()
        edits.append(Edit(text.path, text.text, was.text))
    return tuple(edits)


def pruned(now: Message, first: Message) -> tuple[Edit, ...]:
    """Return the edits that restore a message's results as they were in `first`.

    There are none if the messages differ in more than pruned results.
    """
    if now is first or now.role is not first.role or now.media != first.media:
        return ()
    results, were = _results(now), _results(first)
    if len(results) != len(were):
        return ()
    edits: list[Edit] = []
    back: dict[Path, Result] = {}
    for (where, result), was in zip(results.items(), were.values(), strict=True):
        if _is_pruned(result, was):
            put_back = [*_put_back(result, was, now, first)]
            if not put_back:
                return ()
            edits += put_back
            back[where] = was
    texts = tuple(_with(now.texts, back)) if back else ()
    return tuple(edits) if back and same(replace(now, texts=texts), first) else ()


def left_of(now: str, first: str) -> bool:
    """Whether `now` is what a program keeps of the text `first` to save room."""
    words, stood = now.strip(), first.strip()
    if len(now) >= len(first) or not stood or stood.startswith(PRUNED):
        return False
    if not words or words.startswith(PRUNED):
        return True
    summary = len(words) <= MARKER and len(stood) > LEAST and _SUMMARY.fullmatch(words)
    return bool(summary and not _hides(words)) or _cut(now, first)


def _results(message: Message) -> dict[Path, Result]:
    """Return a message's texts of results, by the path of the call's result."""
    found: dict[Path, list[Text]] = {place: [] for place in _places(message)}
    depth = len(next(iter(found), ()))
    for text in message.texts if found else ():
        place = text.path[:depth]
        if text.section is Section.RESULT and place in found:
            found[place].append(text)
    return {place: tuple(texts) for place, texts in found.items() if texts}


def _places(message: Message) -> list[Path]:
    """Return the paths of a message's results of calls, all of one depth."""
    if not message.answers and message.role is Role.TOOL:
        return [message.path]
    return [answer.path[:-1] for answer in message.answers]


def _with(texts: Iterable[Text], back: Mapping[Path, Result]) -> Iterator[Text]:
    """Yield the texts, with some results restored."""
    depth, done = len(next(iter(back))), set[Path]()
    for text in texts:
        place = text.path[:depth]
        if place not in back:
            yield text
        elif place not in done:
            done.add(place)
            yield from back[place]


def _said(result: Result) -> str:
    return "\n".join(text.text for text in result)


def _is_pruned(result: Result, was: Result) -> bool:
    if not left_of(_said(result), _said(was)):
        return False
    return len(result) != len(was) or not all(map(only_facts_differ, result, was))


def _put_back(result: Result, was: Result, now: Message, first: Message) -> Iterator[Edit]:
    """Yield edits text by text if both have equally many, else one for the whole content, if that is kept."""
    if len(result) == len(was):
        for text, then in zip(result, was, strict=True):
            if text.text != then.text:
                yield Edit(text.path, text.text, then.text)
        return
    content = _content(was, first)
    if content is not None:
        yield Edit(_place(result), _content(result, now), content)


def _place(result: Result) -> Path:
    """Return the path of the result's content: of its text, or of its list of parts."""
    path = result[0].path
    return path[:-2] if isinstance(path[-2], int) and path[-1] == "text" else path


def _content(result: Result, message: Message) -> Any:
    """Return the content at that path of the body; None if it was not kept."""
    value = message.content
    keys = _place(result)[len(message.path) + 1 :] if value is not None else ()
    for key in keys:
        value = value[key]
    return value


# -- what is left of a text ------------------------------------------------------------------------------


def _cut(now: str, first: str) -> bool:
    """Whether the text is the beginning and the end of the first one, with or without a mark of the cut."""
    return _parts_of(now, "", first) or any(_parts_of(kept, note, first) for kept, note in _noted(now))


def _noted(now: str) -> Iterator[tuple[str, str]]:
    """Yield the text without a note in brackets on its last line, and that note."""
    at = now.rfind("\n[")
    note = now[at:].strip()
    if at >= 0 and len(note) <= MARKER and note.endswith("]") and "\n" not in note:
        yield now[:at].rstrip("\n"), note


def _parts_of(kept: str, note: str, first: str) -> bool:
    start = common_start(kept, first)
    end = common_start(kept[start:][::-1], first[start:][::-1])
    mark, around = kept[start : len(kept) - end], kept[max(0, start - 1) : len(kept) - end + 1]
    if len(mark) > MARKER or len(first) - start - end < LEAST:
        return False
    told = f"{mark} {note}".casefold()
    if _hides(told) or not (not mark.strip() or _framed(mark) or _framed(around)):
        return False
    return not told.strip() or any(word in told for word in LEFT_OUT)


def _framed(mark: str) -> bool:
    """Whether a mark is in brackets, dots or the like, as programs write marks."""
    return mark.strip().startswith(_OPENING) and mark.strip().endswith(_CLOSING)


def _hides(words: str) -> bool:
    return any(word in words.casefold() for word in HIDDEN)


# -- the rule: pruned results stay as they were sent while there is room --------------------------------

# Used while no prompt of the conversation has been counted. Code and English have about 3.6; the exact count
# follows before the request is sent (`scheduler.requests.pending`).
CHARACTERS_A_TOKEN: Final = 3


class PrunedResults:
    """Restores pruned results as they were sent. When there is no room, all prunes go through at once.

    What each program does, by its public source code of 2026:

    * opencode, and Kilo Code, which is built on it (`session/compaction.ts`, `prune`): after a turn, results
      that are older than the last two user messages and than the latest 40,000 tokens of results become
      `[Old tool result content cleared]`, if that frees 20,000 tokens. The next turns prune more.
    * Claude Code (microcompact) and Qwen Code (`microcompact.ts`): the same words, for all but the latest
      results (five in Qwen Code) after the conversation has paused. Claude Code also writes
      `<persisted-output>` with a preview. The context editing of Anthropic's API is done by its server: a
      client sends everything, and nothing has to be restored.
    * Hermes (`context_compressor.py`): `[Old tool output cleared to save context space]`,
      `[Duplicate tool output ...]`, or one line that begins with the tool's name in brackets.
    * OpenClaw (`context-pruning`): the first and the last 1,500 characters, dots between them and a note in
      brackets after them; later opencode's words.
    * Gemini CLI (`toolOutputMaskingService.ts`): `<tool_output_masked>` with a preview.
    * Cline (`responses.ts`): an earlier read of a file becomes `[[NOTE] This file read has been removed ...`.
    * SWE-agent (`history_processors.py`): `Old environment output: (N lines omitted)`; OpenHands (observation
      masking): `<MASKED>`. Both for all but the latest results, so that each request masks one more.
    * LangChain (context editing): `[cleared]`; oh-my-pi (`pruning.ts`): `[Output truncated - N tokens]`.
    * Plain cuts: a beginning and perhaps an end, with or without a mark such as `[... truncated ...]`.

    The rule does not restore pairs of call and result that are dropped entirely, nor images in results, nor
    the arguments of calls, which Hermes cuts as well.
    """

    name = RuleName.PRUNED_RESULTS
    default = Mode.OBSERVE
    about = "Many agents replace old results of tools, some one at a time."
    safe = (
        "The model reads a result as this client sent it before. Without room, all that was pruned "
        "goes through at once, when a user speaks."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        edits: list[Edit] = []
        grown = 0  # characters
        for _, message, first in scene.altered:
            if found := pruned(message, first):
                edits += found
                grown += len(first.said) - len(message.said)
        if edits and fits(scene, grown):
            yield from edits


def fits(scene: Scene, grown: int) -> bool:
    """Whether the prompt has room for `grown` more characters, as estimated from characters per token."""
    room, before = scene.room, scene.before
    if room is None or before is None:
        return False
    characters = length(scene.now) + grown
    if before.tokens is None:
        tokens = characters / CHARACTERS_A_TOKEN
    else:
        tokens = characters * len(before.tokens) / max(1, length(before.sent))
    return tokens + (room.headroom if begins_turn(scene.now) else 0) <= room.limit


def begins_turn(layout: Layout) -> bool:
    """Whether the user speaks in the newest message: it is not a program's reminder and brings no results."""
    newest = layout.messages[-1]
    return newest.role is Role.USER and not newest.answers and any(map(bare, newest.texts))


# -- what the client wrote otherwise, restored as it was sent before ------------------------------------

# What should not change between two turns: the billing stamp, white space, reasoning, tools and calls.


_BILLING: Final = "x-anthropic-billing-header:"
_STAMP: Final = "cch="
_STAMP_LENGTH: Final = 5


class BillingNonce:
    """Replaces the stamp that Claude Code puts into each request with the one that the agent first sent."""

    name = RuleName.BILLING_NONCE
    default = Mode.FIX
    about = "Claude Code begins its system text with a billing header whose `cch=` differs in each request."
    safe = (
        "It keeps the first stamp, as llama-server does on /v1/messages; it is a checksum for the "
        "vendor's servers."
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
    """Restores the white space around a text as it was first sent, or sampled.

    Runs after the rules that restore facts, because it changes only texts that differ in nothing else.
    """

    name = RuleName.TRAILING_WHITESPACE
    default = Mode.FIX
    about = "Clients trim replies and system texts."
    safe = (
        "White space at the ends becomes what the engine first received or sampled. A message without "
        "a reply stays."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        if scene.before is None:
            return
        now, before = scene.now, scene.before
        lead = zip(now.messages[: now.lead], before.sent.messages[: before.sent.lead], strict=False)
        for message, first in (*lead, *((message, first) for _, message, first in scene.altered)):
            if message is not now.messages[-1] or not _authored(message):
                yield from _ends(message, first)
        for at in new(scene)[:-1]:  # the last message, if it is a reply, is to be continued
            if now.messages[at].role is Role.ASSISTANT:
                yield from _as_sampled(now.messages[at], sampled(before, now.messages, at) or {})


class Reasoning:
    """Restores the reasoning that was sent or sampled with a reply."""

    name = RuleName.REASONING
    default = Mode.OBSERVE
    about = "Some clients return the reasoning of a reply at first and drop it later."
    safe = (
        "The model's own reasoning goes back to its reply, unless the client returned that, or all, "
        "without it."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        before, messages = scene.before, scene.now.messages
        if before is None or not any(message.reasoning_text for message in messages):
            return
        for _, message, first in scene.altered:
            if first.reasoning:
                yield from _thought(message, first.reasoning.text)
        for at in new(scene):
            if messages[at].reasoning and messages[at].role is Role.ASSISTANT:
                yield from _thought(messages[at], _sampled_reasoning(before, messages, at))


def without_stamp(system: str, written: str = "f" * _STAMP_LENGTH) -> str:
    """Replace the stamp in a system text's billing header; on /v1/messages the engine writes `fffff`."""
    stamp = _stamp(system)
    if not stamp:
        return system
    start = system.index(_STAMP, len(_BILLING)) + len(_STAMP)
    return system[:start] + written + system[start + len(stamp) :]


def _stamp(system: str) -> str | None:
    """Return the stamp of a system text that begins with a billing header; None for other texts."""
    at = system.find(_STAMP, len(_BILLING)) if system.startswith(_BILLING) else -1
    start, end = at + len(_STAMP), at + len(_STAMP) + _STAMP_LENGTH
    return system[start:end] if at >= 0 and system[end : end + 1] == ";" else None


def _system(layout: Layout) -> Iterator[Text]:
    for message in layout.messages:
        yield from (text for text in message.texts if text.section is Section.SYSTEM)


def _authored(message: Message) -> bool:
    """Whether the message has words of the user, or is a reply; the engine continues one that is the last."""
    return message.role is Role.ASSISTANT or any(text.section is Section.USER for text in message.texts)


def _ends(message: Message, first: Message) -> Iterator[Edit]:
    """Restore the white space around each text as in `first`, if nothing else differs."""
    if len(message.texts) == len(first.texts):
        for text, was in zip(message.texts, first.texts, strict=True):
            yield from _end(text, was.text)
    if first.reasoning:
        yield from _end(message.reasoning, first.reasoning.text)


def _as_sampled(message: Message, reply: Doc) -> Iterator[Edit]:
    if len(message.texts) == 1:
        yield from _end(message.texts[0], reply.get("content"))
    yield from _end(message.reasoning, reply.get("reasoning_content"))


def _sampled_reasoning(before: Conversation, messages: Sequence[Message], at: int) -> Any:
    """Return the sampled reasoning; None for a reply without calls.

    Such a reply is recognised by its text only, and it may be the answer to another request.
    """
    reply = sampled(before, messages, at) or {}
    return reply.get("reasoning_content") if reply.get("tool_calls") else None


def _end(text: Text | None, first: Any) -> Iterator[Edit]:
    if text and isinstance(first, str) and text.text != first and text.text.strip() == first.strip():
        yield from _as(text, first)


def _thought(message: Message, reasoning: Any) -> Iterator[Edit]:
    if message.reasoning and not message.reasoning.text and isinstance(reasoning, str):
        yield from _as(message.reasoning, reasoning)


def _as(text: Text, written: str) -> Iterator[Edit]:
    if written != text.text:
        yield Edit(text.path, text.text or None, written)


# -- the list of tools -----------------------------------------------------------------------------------

ToolKey = tuple[str, int]  # the name of a tool, and how many tools of that name come before it


class ToolOrder:
    """Restores the order in which this conversation first sent its tools; new tools follow at the end."""

    name = RuleName.TOOL_ORDER
    default = Mode.FIX
    about = "Clients list tools of several servers in the order in which those answered."
    safe = "The same tools with the same texts. A removed tool stays removed."

    def changes(self, scene: Scene) -> Iterator[Edit]:
        if scene.before is None:
            return
        now, first = tools_by_name(scene.now.tools), tools_by_name(scene.before.sent.tools)
        rank = {key: at for at, key in enumerate(first)}
        order = sorted(now, key=lambda key: rank.get(key, len(rank)))
        if order != [*now]:
            path, tools = scene.now.tools_path, [*scene.now.tools]
            behind = dropwhile(lambda pair: pair[0] == pair[1], zip(now, order, strict=True))
            moved = sum(size(now[key]) for key, _ in behind if key in first)
            yield Edit(path, tools, [now[key] for key in order], moved)


class SchemaKeys:
    """Restores the text of a tool as it was first sent, if the meaning is the same."""

    name = RuleName.SCHEMA_KEYS
    default = Mode.FIX
    about = "Clients that build schemas again (mistral-vibe) may write keys in another order."
    safe = "The order of keys, and of the names under `required`, means nothing. Any other difference stays."

    def changes(self, scene: Scene) -> Iterator[Edit]:
        if scene.before is None or scene.now.tools is scene.before.sent.tools:
            return
        first = tools_by_name(scene.before.sent.tools)
        for at, (key, tool) in enumerate(tools_by_name(scene.now.tools).items()):
            was = first.get(key)
            if was is not None and not same_writing(tool, was) and alike(tool, was, schema=True):
                yield Edit((*scene.now.tools_path, at), tool, was)


def tools_by_name(tools: Sequence[Doc]) -> dict[ToolKey, Doc]:
    """Return the tools by name, in their order; a counter tells tools of the same name apart."""
    seen: Counter[str] = Counter()
    by_key: dict[ToolKey, Doc] = {}
    for tool in tools:
        name = _name(tool)
        by_key[name, seen[name]] = tool
        seen[name] += 1
    return by_key


def _name(tool: Doc) -> str:
    """Return the name that a model calls; tools that the server runs have only a type or a label."""
    function = tool.get("function")
    names = (function if isinstance(function, dict) else tool).get("name"), tool.get("server_label")
    return next((name for name in names if isinstance(name, str)), str(tool.get("type")))


# -- calls that come back: their ids, the text of their arguments ----------------------------------------


class CallIds:
    """Restores the id that a call had when it was first sent, in the call and in its result."""

    name = RuleName.CALL_IDS
    default = Mode.FIX
    about = "Clients that store calls without ids make new ones; some templates write them into the prompt."
    safe = (
        "A call and its result get the same first id, if name, arguments and place are equal. No two "
        "calls share one."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        ids = _first_ids(scene)
        if not ids or _collide(scene, ids):
            return
        current: dict[str, str] = {}  # the client's id -> the id that we gave the latest call with it
        for message in scene.now.messages:
            for answer in message.answers:
                given = current.get(answer.text, answer.text)
                if given != answer.text:
                    yield Edit(answer.path, answer.text, given)
            for call in message.calls:
                current[call.id] = ids.get(call.id_path, call.id)
                if current[call.id] != call.id:
                    yield Edit(call.id_path, call.id, current[call.id])


class ToolCalls:
    """Restores the text of a call's arguments as it was first sent, or as it was sampled."""

    name = RuleName.TOOL_CALLS
    default = Mode.FIX
    about = (
        "Most clients serialise the arguments of a call again: white space, escapes, order of keys, 1 "
        "for 1.0."
    )
    safe = "The same JSON value, in the text that the model wrote."

    def changes(self, scene: Scene) -> Iterator[Edit]:
        if scene.before is None:
            return
        for _, message, first in scene.altered:
            for call, was in zip(message.calls, first.calls, strict=False):
                if call.name == was.name:
                    yield from _written(call, was.arguments)
        for at in new(scene):
            for call in scene.now.messages[at].calls:
                yield from _written(call, _sampled(scene.before, call))


def _first_ids(scene: Scene) -> Mapping[Path, str]:
    """Return the first ids of calls whose ids have changed, by the paths of the ids."""
    ids = {}
    for _, message, first in scene.altered:
        for call, was in zip(message.calls, first.calls, strict=False):
            if call.id and was.id and call.id != was.id and _same_call(call, was):
                ids[call.id_path] = was.id
    return ids


def _same_call(call: Call, was: Call) -> bool:
    if call.name != was.name:
        return False
    return same_writing(call.arguments, was.arguments) or _say_the_same(call.arguments, was.arguments)


def _collide(scene: Scene, ids: Mapping[Path, str]) -> bool:
    """Whether two calls with different ids would get the same id."""
    named = defaultdict(set)
    for message in scene.now.messages:
        for call in message.calls:
            named[ids.get(call.id_path, call.id)].add(call.id)
    return any(len(before) > 1 for before in named.values())


def _sampled(before: Conversation, call: Call) -> Any:
    """Return the arguments of this call as the model wrote them; None if they are not known."""
    reply = before.replies.get(call.id, {})
    for sampled_call in reply.get("tool_calls") or ():
        function = sampled_call.get("function") or {}
        if sampled_call.get("id") == call.id and function.get("name") == call.name:
            return function.get("arguments")
    return None


def _written(call: Call, first: Any) -> Iterator[Edit]:
    """Restore the arguments' first text. An object stays an object; its keys get their first order."""
    if first is None or same_writing(call.arguments, first) or not _say_the_same(call.arguments, first):
        return
    after = first if isinstance(call.arguments, str) else parsed(first)
    if isinstance(after, type(call.arguments)) and not same_writing(call.arguments, after):
        yield Edit(call.arguments_path, call.arguments, after)


def _say_the_same(one: Any, other: Any) -> bool:
    value = parsed(one)
    return value is not None and alike(value, parsed(other))
