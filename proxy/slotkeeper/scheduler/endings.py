"""How a long message ends: where its last lines begin, of which one is often a question about the rest.

The lines are found in the message's text. Where one begins in a prompt is told by the ids of all that
follows it in the message: where they stand there, a token ends before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from slotkeeper.scheduler.structure import Boundary, BoundaryKind
from slotkeeper.scheduler.tokens import Tokens

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
    starts = list(_starts(tail))
    if not starts:
        return []
    paragraph = next((at for at, first in reversed(starts) if first), None)
    kinds = dict.fromkeys(_spread([len(tail) - at for at, _ in starts]), BoundaryKind.LINE)
    kinds |= {len(tail) - at: BoundaryKind.QUESTION for at in (starts[-1][0], paragraph) if at is not None}
    return [(tail[-length:], kinds[length]) for length in sorted(kinds)]


def _starts(text: str) -> Iterator[tuple[int, bool]]:
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
