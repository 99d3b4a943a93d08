"""Notes: what was taken out of its place is told at the end, and told again where it was told before.

A note stands behind the newest message that came with it, and from then on in every request behind the
same message: the client does not know of it, and the engine's prompt must not lose it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from slotkeeper.conversation.record import Conversation
from slotkeeper.conversation.requests.layout import Edit, Layout, Message, Section, Text
from slotkeeper.conversation.rules.base import Fact

OPENING: Final = "<system-reminder>"
CLOSING: Final = "</system-reminder>"
HEADING: Final = (
    "Parts of what stands further up have changed since. What follows is current, and replaces it there:"
)
_BETWEEN: Final = "\n\n"

Notes = dict[int, tuple[str, ...]]


def note_edits(
    layout: Layout, before: Conversation | None, common: int, facts: Sequence[Fact]
) -> tuple[list[Edit], Notes]:
    """The edits that put all notes where they belong, and the notes by message, for the record.

    A message that has its notes already keeps them as they are.
    """
    notes = carried(layout, before, common)
    at = place(layout, common)
    if facts and at is not None:
        notes[at] = (*notes.get(at, ()), note(facts))
    return [*_behind(layout, notes)], notes


def note(facts: Sequence[Fact]) -> str:
    """One block that tells them all. Of two that are told under one place, the later one counts."""
    texts = {fact.place: fact.text for fact in facts}.values()
    return f"{OPENING}\n{_BETWEEN.join((HEADING, *texts))}\n{CLOSING}"


def place(layout: Layout, common: int) -> int | None:
    """Behind which message something is told. None: there is no user in this conversation.

    The newest in which a user speaks, if it is new; else, between calls of tools, the newest result; else
    (the same request again) the newest user message all the same.
    """
    new, user = layout.lead + common, layout.newest_user
    if user is not None and user >= new:
        return user
    for at in range(len(layout.messages) - 1, new - 1, -1):
        if _end(layout.messages[at]):
            return at
    return user


def carried(layout: Layout, before: Conversation | None, common: int) -> Notes:
    """The notes of messages that this request has as well, by their index in it."""
    if before is None:
        return {}
    lead = before.sent.lead
    return {
        at - lead + layout.lead: notes for at, notes in before.notes.items() if lead <= at < lead + common
    }


def tellable(text: str) -> bool:
    """Whether it can stand in a note without ending it."""
    return CLOSING not in text and OPENING not in text


def ours(text: str) -> bool:
    """Whether a reminder says what a note says: it is none of the client's."""
    return text.startswith(HEADING)


def has_been_here(layout: Layout, before: Conversation | None, common: int) -> bool:
    """Whether this request has its notes already, as no client's own request does."""
    ends = (_end(layout.messages[at]) for at in carried(layout, before, common))
    return any(end is not None and HEADING in end.text for end in ends)


def _behind(layout: Layout, notes: Notes) -> Iterator[Edit]:
    for at, texts in notes.items():
        end = _end(layout.messages[at])
        if end is None:
            continue
        missing = [text for text in texts if text not in end.text]
        if missing:
            yield Edit(end.path, end.text, _BETWEEN.join(filter(None, (end.text, *missing))))


def _end(message: Message) -> Text | None:
    """The text that a note is put behind: the last that a user says, else that a tool says."""
    for section in (Section.USER, Section.RESULT):
        for text in reversed(message.texts):
            if text.section is section:
                return text
    return None
