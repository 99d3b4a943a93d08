"""The rule for context that a client puts anew into each request: memories, a lorebook, sources, a note.

No list of words says where it is. What a request has in common with the one before it shows that: the
messages of user and model are the same, and between them or before them a system text is another, or stands
elsewhere. The first form stays where the model has read it, and a note in the newest message tells the lines
that changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from slotkeeper.conversation.layout import Edit, Layout, Message, Role, digest, same
from slotkeeper.conversation.rules.base import (
    Fact,
    Mode,
    RuleName,
    Scene,
    carried,
    has_been_here,
    place,
    tellable,
)
from slotkeeper.conversation.rules.rules import fits, spoken_common, unwrapped

PLACE: Final = "context"  # of the facts: all system texts together
# A moved note is told again when it stands this many messages above the place to which its client moved it.
MOVED_MESSAGES: Final = 16
LONG_LINE: Final = 400  # characters; longer lines are compared by their sentences
QUOTED: Final = (
    24,
    48,
)  # characters by which a line is named that the model has read; the first that is unique
_GONE: Final = "Gone (first words):"
_BACK: Final = "Back (first words):"
_NEW: Final = "New:"
_ORDER: Final = "Now in this order:"
_SENTENCE: Final = re.compile(r"(?<=[.!?]) +")
_MARK: Final = re.compile(r"\s*(?:[-*•]|\d+[.)])\s+")  # of a list's item: numbers change with the order


Placed = tuple[int, Message]  # a message, and its index in its request


@dataclass(frozen=True, slots=True)
class Shared:
    """The beginnings of two requests in which user and model said the same."""

    was: Sequence[Placed]  # the system messages of the request before, as it was sent
    now: Sequence[Placed]  # those of this request
    spoken: Sequence[tuple[Message, Message]]  # other messages that differ: as they came now, and were sent
    end: int  # number of messages in the beginning of the request before

    @property
    def in_place(self) -> bool:
        """Whether system messages stand at the same places in both."""
        return [at for at, _ in self.was] == [at for at, _ in self.now]


def shared(scene: Scene, old: Layout) -> Shared:
    """Compare a request with the one that was sent before it, `old`.

    Only if system messages stand between others, all messages are looked at.
    """
    new = scene.now
    if old.between or new.between:
        return _shared_words(old, new)
    return Shared(
        was=[*enumerate(old.messages[: old.lead])],
        now=[*enumerate(new.messages[: new.lead])],
        spoken=[(message, first) for _, message, first in scene.altered],
        end=old.lead + scene.common,
    )


def _shared_words(old: Layout, new: Layout) -> Shared:
    count = spoken_common(old, new)
    was, now = old.spoken[:count], new.spoken[:count]
    end_old, end_new = (was[-1][0] + 1, now[-1][0] + 1) if count else (old.lead, new.lead)
    spoken = [
        (message, first) for (_, message), (_, first) in zip(now, was, strict=True) if message is not first
    ]
    return Shared(_system(old, end_old), _system(new, end_new), spoken, end_old)


def _system(layout: Layout, end: int) -> list[Placed]:
    return [(at, m) for at, m in enumerate(layout.messages[:end]) if m.role is Role.SYSTEM]


class RefreshedContext:
    """Keeps the first form of a context that a client puts anew into each request."""

    name = RuleName.REFRESHED_CONTEXT
    default = Mode.OBSERVE
    about = (
        "Open WebUI, SillyTavern, mem0 and others put memories, sources, lorebook entries and notes anew "
        "into each request."
    )
    safe = (
        "The first form stays. The newest message tells which lines came and which went; a question keeps "
        "the sources it was asked with; a note that moves is told again after some messages."
    )

    def changes(self, scene: Scene) -> Iterator[Edit | Fact]:
        if scene.before is None or place(scene.now, scene.common) is None:
            return
        sent = scene.before.sent
        both = shared(scene, sent)
        scene = replace(scene, common=both.end - sent.lead)  # as the edits will make it
        edits = [*_restored(both)]
        grown = sum(len(str(edit.after or "")) - len(str(edit.before or "")) for edit in edits)
        told = _told(scene, both)
        if told is not None and (grown <= 0 or fits(scene, grown)):
            yield from edits
            yield from told


# -- the first form, put back ----------------------------------------------------------------------------


def _restored(both: Shared) -> Iterator[Edit]:
    for message, first in both.spoken:
        if not same(message, first):
            yield from unwrapped(message, first)
    if both.in_place:
        for (_, message), (_, first) in zip(both.now, both.was, strict=True):
            if message is not first:
                yield from _texts(message, first)
    else:
        yield from _places(both)


def _texts(now: Message, was: Message) -> Iterator[Edit]:
    if len(now.texts) == len(was.texts):
        for text, first in zip(now.texts, was.texts, strict=True):
            if text.text != first.text:
                yield Edit(text.path, text.text, first.text)
    elif now.content is not None and was.content is not None:
        yield Edit((*now.path, "content"), now.content, was.content)


def _places(both: Shared) -> Iterator[Edit]:
    """Remove the system messages of now, and insert those of then where they stood."""
    outside = [message for _, message in both.now if not _listed(message)]
    was_outside = [message for _, message in both.was if not _listed(message)]
    if len(outside) != len(was_outside):
        return
    for message, first in zip(outside, was_outside, strict=True):
        yield from _texts(message, first)
    now, was = (
        [(at - len(outside), message) for at, message in side if _listed(message)]
        for side in (both.now, both.was)
    )
    equal = 0
    while equal < min(len(now), len(was)) and _as_it_was(now[equal], was[equal]):
        equal += 1
    for at, message in reversed(now[equal:]):
        yield Edit((message.path[0], at), message.doc, None, item=True)
    for at, message in was[equal:]:
        yield Edit((message.path[0], at), None, message.doc, item=True)


def _listed(message: Message) -> bool:
    """Whether the message is one of the body's list, not a system text beside it."""
    return len(message.path) > 1


def _as_it_was(now: Placed, was: Placed) -> bool:
    return now[0] == was[0] and now[1].said == was[1].said


# -- what is told ----------------------------------------------------------------------------------------


def _told(scene: Scene, both: Shared) -> list[Fact] | None:
    """Return the facts to tell; None if a note cannot hold them."""
    if both.in_place and PLACE not in scene.told and all(map(_has_its_texts, both.now, both.was)):
        return []
    first, current = (_context(side) for side in (both.was, both.now))
    known = scene.told.get(PLACE, first)
    facts = [] if both.in_place else [*_moved_far(scene, both)]
    if current != known and not (current == first and has_been_here(scene.now, scene.before, scene.common)):
        text = difference(known, current, _read(scene, first))
        if not tellable(text):
            return None
        facts += [Fact(PLACE, text, current)] if text else []
    return facts


def _has_its_texts(now: Placed, was: Placed) -> bool:
    return now[1] is was[1] or now[1].has_texts_of(was[1])


def _context(messages: Iterable[Placed]) -> str:
    return "\n".join(message.said for _, message in messages)


def _read(scene: Scene, first: str) -> str:
    """Return all that the model reads of the context in this request, apart from new lines."""
    notes = carried(scene.now, scene.before, scene.common).values()
    return "\n".join((first, *(note.text for some in notes for note in some)))


def difference(known: str, current: str, read: str) -> str:
    """Return what changed, line by line, for a note; "" if nothing that has a meaning did.

    Lines of `read`, which the model has before it, are named by their first words. The order of lines counts
    only where they are not all items of a list.
    """
    was, now = _lines(known), _lines(current)
    gone, new = _without(was, now), _without(now, was)
    if not gone and not new:
        same_order = [*map(_bare, was)] == [*map(_bare, now)]
        return (
            "" if same_order or all(map(_MARK.match, _middle(now, was))) else _part(_ORDER, _middle(now, was))
        )
    back = [line for line in new if line in read]
    named = _named({*was, *now})
    parts = (
        _part(_GONE, (named[line] for line in gone)),
        _part(_BACK, (named[line] for line in back)),
        _part(_NEW, [line for line in new if line not in back]),
    )
    return "\n".join(filter(None, parts))


def _named(lines: Iterable[str]) -> dict[str, str]:
    """Return each line with the first words that only this line begins with, or with all of it."""
    named = {line: _bare(line) for line in lines}
    for characters in reversed(QUOTED):
        short = {line: _first_words(_bare(line), characters) for line in named}
        often = Counter(short.values())
        named |= {line: words for line, words in short.items() if often[words] == 1}
    return named


def _lines(text: str) -> list[str]:
    """Return the lines that are not blank; of long lines, the sentences."""
    lines = (line.strip() for line in text.split("\n"))
    pieces = (_SENTENCE.split(line) if len(line) > LONG_LINE else (line,) for line in lines if line)
    return [piece for some in pieces for piece in some]


def _bare(line: str) -> str:
    return _MARK.sub("", line, count=1)


def _without(lines: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the lines that the others do not have, each as often as it is missing there."""
    there = Counter(map(_bare, others))
    missing = []
    for line in lines:
        if there[_bare(line)]:
            there[_bare(line)] -= 1
        else:
            missing.append(line)
    return missing


def _middle(lines: Sequence[str], others: Sequence[str]) -> Sequence[str]:
    """Return the lines between the first and the last that differ."""
    start = end = 0
    while start < min(len(lines), len(others)) and lines[start] == others[start]:
        start += 1
    while end < min(len(lines), len(others)) - start and lines[-1 - end] == others[-1 - end]:
        end += 1
    return lines[start : len(lines) - end]


def _first_words(line: str, characters: int) -> str:
    return line if len(line) <= characters else f"{line[:characters].rsplit(' ', 1)[0]} …"


def _part(heading: str, lines: Iterable[str]) -> str:
    body = "\n".join(lines)
    return f"{heading}\n{body}" if body else ""


def _moved_far(scene: Scene, both: Shared) -> Iterator[Fact]:
    """Tell again each note that its client has moved far below the place where the model has read it."""
    notes = carried(scene.now, scene.before, scene.common)
    for at, message in both.now:
        which = f"{PLACE}/{digest(message).hex()}"
        read = [n for n, was in both.was if was.said == message.said]
        read += [n for n, some in notes.items() for note in some if which in note.told]
        if read and at - max(read) > MOVED_MESSAGES and tellable(message.said):
            yield Fact(which, message.said)
