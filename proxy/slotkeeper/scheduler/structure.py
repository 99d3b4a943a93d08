"""The structure of a prompt: its boundaries, where it is likely that another prompt will part from it.

They are found by the marks that the engine's template puts in front of messages. What marks cannot tell
(where system text ends inside a user message, or anything in a template of no known family) is found by
rendering the chat otherwise, and handed in.

The lines are found in the message's text. Where one begins in a prompt is told by the ids of all that
follows it in the message: where they stand there, a token ends before them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from slotkeeper.scheduler.types import Tokens


class BoundaryKind(StrEnum):
    """What begins at a boundary."""

    HEAD = "head"  # the first message after tools and system text, which other conversations share
    USER = "user"  # a user message
    TOOL = "tool"  # the result of a tool
    QUESTION = "question"  # the last paragraph or line of a long user message at the end
    LINE = "line"  # a line further back in it
    TURN = "turn"  # the reply: all that was asked stands before it


@dataclass(frozen=True, slots=True, order=True)
class Boundary:
    """A place of a prompt where another one will probably part from it."""

    at: int  # tokens before it
    kind: BoundaryKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """What opens a message in an engine's template, as that engine tokenizes it. Empty: not known."""

    user: tuple[Tokens, ...] = ()
    tool: tuple[Tokens, ...] = ()  # may begin as a user message does: then it is the tool's (ChatML)
    reply: tuple[Tokens, ...] = ()  # none beside `user`: the template has no generation prompt (Mistral)
    lead_inside: bool = False  # tools or system text stand inside a user message (Gemma, older Mistral)


UNKNOWN = Markers()


def boundaries(prompt: Tokens, markers: Markers, rendered: Iterable[Boundary] = ()) -> tuple[Boundary, ...]:
    """The boundaries of a prompt in ascending order, one at a place.

    Where two fall together HEAD counts before TOOL, and TOOL before USER.

    * HEAD is the one that was handed in, and then nothing is said of what stands before it. Else it is the
      first message of all, of whatever kind, unless something of the lead may stand behind its opener.
    * TURN is the last opener of a reply, if nothing was asked behind it. Without one it is the prompt's end,
      if messages are known to begin in it. So it may be at `len(prompt)`; all others are below that.

    Args:
        prompt: the ids that the engine evaluates.
        markers: of the engine's template. Text of a message that spells a marker is taken for one.
        rendered: what was found by rendering the chat otherwise.
    """
    kinds = dict.fromkeys(_starts(prompt, markers.user), BoundaryKind.USER)
    kinds |= dict.fromkeys(_starts(prompt, markers.tool), BoundaryKind.TOOL)
    for boundary in sorted(rendered, reverse=True):  # so that of two at one place HEAD comes last
        if boundary.at < len(prompt):
            kinds[boundary.at] = boundary.kind
    replies = _starts(prompt, markers.reply)
    turn = _turn(prompt, markers, replies, last=max(kinds, default=-1))
    head = _head(kinds, markers, (at for at in (*kinds, *replies) if at != turn))
    if head is not None:
        kinds = {at: kind for at, kind in kinds.items() if at > head} | {head: BoundaryKind.HEAD}
    if turn is not None:
        kinds[turn] = BoundaryKind.TURN
    return tuple(Boundary(at, kinds[at]) for at in sorted(kinds))


def in_replies(
    places: Iterable[int], prompt: Tokens, found: Iterable[Boundary], markers: Markers
) -> set[int]:
    """Those of some places that lie in something that the model said, as far as the markers tell."""
    asked = [boundary.at for boundary in found if boundary.kind is not BoundaryKind.TURN]  # ascending
    replies = _starts(prompt, markers.reply)
    return {at for at in places if _last(replies, at) > _last(asked, at)}


def _last(starts: Sequence[int], at: int) -> int:
    """The last of them that is not behind `at`, -1 if none is."""
    index = bisect_right(starts, at)
    return starts[index - 1] if index else -1


def _head(kinds: Mapping[int, BoundaryKind], markers: Markers, openers: Iterable[int]) -> int | None:
    """Where the first message begins: as it was handed in, else at the first of all openers."""
    for at, kind in kinds.items():
        if kind is BoundaryKind.HEAD:
            return at
    return min(openers, default=None) if markers.user and not markers.lead_inside else None


def _turn(prompt: Tokens, markers: Markers, replies: Sequence[int], last: int) -> int | None:
    """Where the reply begins; `last` is where the last message was asked, -1 for none."""
    if replies and replies[-1] > last:
        return replies[-1]
    return len(prompt) if markers.user and last >= 0 else None


def _starts(prompt: Tokens, openers: Iterable[Tokens]) -> list[int]:
    return sorted({at for opener in openers for at in prompt.find_all(opener)})


# -- how a long message ends: often in a question about the rest -----------------------------------------

LONG: Final = 1024  # tokens of a message: in a shorter one the engine's own checkpoints are near enough
REACH: Final = 8192  # characters before its end
FURTHER: Final = 1024  # characters before the end: the first cut that is neither
SPREAD: Final = 4  # each of them so many times as far from the end as the one behind it
CLOSING: Final = 64  # tokens of a template behind a message, at most


def last_message(found: Sequence[Boundary], length: int) -> range | None:
    """The tokens of the user message that ends a prompt, if it is a long one."""
    asked = [boundary for boundary in found if boundary.kind is not BoundaryKind.TURN]
    if not asked or asked[-1].kind is BoundaryKind.TOOL:
        return None
    end = found[-1].at if found[-1].kind is BoundaryKind.TURN else length
    message = range(asked[-1].at, end)
    return message if len(message) >= LONG else None


def endings(text: str) -> list[tuple[str, BoundaryKind]]:
    """The ends of a message that begin with a line: the last paragraph and line, and a few further back."""
    tail = text.rstrip()[-REACH:]
    starts = list(_line_starts(tail))
    if not starts:
        return []
    paragraph = next((at for at, first in reversed(starts) if first), None)
    kinds = dict.fromkeys(_spread([len(tail) - at for at, _ in starts]), BoundaryKind.LINE)
    kinds |= {len(tail) - at: BoundaryKind.QUESTION for at in (starts[-1][0], paragraph) if at is not None}
    return [(tail[-length:], kinds[length]) for length in sorted(kinds)]


def _line_starts(text: str) -> Iterator[tuple[int, bool]]:
    """Where lines begin that are not blank, but for the first; and whether a paragraph begins there."""
    at, blank = 0, False
    for line in text.split("\n"):
        if at and line.strip():
            yield at, blank
        blank = at > 0 and not line.strip()  # the first line may be cut short
        at += len(line) + 1


def _spread(lengths: Sequence[int]) -> Iterator[int]:
    """Of lengths of endings some, each several times the one before."""
    least = FURTHER
    for length in reversed(lengths):
        if length >= least:
            yield length
            least = SPREAD * length


def begins(prompt: Tokens, message: range, ending: Tokens) -> int | None:
    """Tokens before an ending of a message, None where no token begins there.

    Its last token may be another one in the prompt, where it merges with what the template puts behind it.
    """
    start = max(message.start + 1, message.stop - len(ending) - CLOSING)
    there = prompt.cut(start, message.stop)
    for known in (ending, ending.cut(0, len(ending) - 1)):
        if places := there.find_all(known):
            return start + places[-1]
    return None
