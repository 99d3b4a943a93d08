"""The rule that restores tool results which a client has shortened since they were first sent.

Agents prune old results to make room: a placeholder, a line about the result or a part of it replaces the
text. A prune is known by the words of the agents' programs (`phrases.PRUNED`) or by what is left of the text.
A text that a program hides on purpose (a secret, say) is not pruned, nor is a text that says something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from slotkeeper.conversation.divergence import common_start, length
from slotkeeper.conversation.facts import bare, only_facts_differ, same
from slotkeeper.conversation.layout import Edit, Layout, Message, Path, Role, Section, Text
from slotkeeper.conversation.phrases import HIDDEN, LEFT_OUT, PRUNED
from slotkeeper.conversation.rules.base import Mode, RuleName, Scene

# Characters. OpenClaw's note after the part that it keeps has 90, opencode's 70; two such lines fit.
MARKER: Final = 240
# Characters. Hermes summarizes results longer than this, and to restore shorter ones gains nothing.
LEAST: Final = 200
# `[NAME of the tool] what it did`: Hermes keeps commands up to 80 characters, and paths.
_SUMMARY: Final = re.compile(r"\[[A-Za-z_][\w.-]{0,63}\] \S[^\n]*")
_OPENING: Final = ("[", "(", "<", "{", ".", "…", "-", "*")
_CLOSING: Final = ("]", ")", ">", "}", ".", "…", "-", "*")

Result = tuple[Text, ...]  # the texts of one call's result


def common(old: Layout, new: Layout) -> int:
    """Count the first messages after the system text that are the same, or the same apart from prunes.

    This is cheap where texts are equal: only messages that differ are examined.
    """
    pairs = zip(old.messages[old.lead :], new.messages[new.lead :], strict=False)
    count = 0
    for one, other in pairs:
        if not same(one, other) and not pruned(other, one):
            break
        count += 1
    return count


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
    for (place, result), was in zip(results.items(), were.values(), strict=True):
        if _is_pruned(result, was):
            put_back = [*_put_back(result, was, now, first)]
            if not put_back:
                return ()
            edits += put_back
            back[place] = was
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
        if edits and _fits(scene, grown):
            yield from edits


def _fits(scene: Scene, grown: int) -> bool:
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
