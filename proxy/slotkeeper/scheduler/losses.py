"""Why tokens were computed although an engine had computed them before.

The oracle counts what any prompt before it had in common with this one. What was computed beyond it, the
cache had lost; here is how.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import Reason

UNPLACED: Final = frozenset(
    {
        Reason.UNRENDERED,
        Reason.UNPINNABLE,
        Reason.BRIEF,
        Reason.CLIENT_CHOSE,
        Reason.ENGINE_CHOSE,
        Reason.FAIL_OPEN,
    }
)


class Loss(StrEnum):
    """In reports, logs, metrics and tests alike."""

    CHECKPOINT = "checkpoint"  # the slot held them, but no checkpoint stood where it had to be cut
    OVERWRITTEN = "overwritten"  # no free slot and no file had them any more
    RESTARTED = "restarted"  # the engine was restarted since, and no file held them
    MISPREDICTED = "mispredicted"  # the engine used less of the slot than it should have
    UNPLACED = "unplaced"  # another party chose its slot, or its tokens were unknown
    BYPASSED = "bypassed"  # the client asked for no help, or for no cache


@dataclass(frozen=True, slots=True)
class Lost:
    """How many tokens, and most of them why."""

    why: Loss
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What is known of a request by its end. `cached` and `predicted` are tokens, by the engine and by us."""

    reason: Reason
    prompt: Tokens
    cached: int
    predicted: int | None
    base: SlotContents | None  # what its slot held when it began
    known: int  # tokens of it that were ever computed before
    restarted: bool  # whether the engine was restarted since then
    uncached: bool = False  # the client wanted all of it computed


def lost(answered: Answered, tokens: int) -> Lost | None:
    """How these tokens, computed beyond the oracle, were lost; None where there are none."""
    return Lost(_why(answered), tokens) if tokens > 0 else None


def _why(answered: Answered) -> Loss:
    if answered.reason is Reason.BYPASS or answered.uncached:
        return Loss.BYPASSED
    cached, shared = answered.cached, _shared(answered)
    if answered.predicted is not None and answered.predicted - cached > answered.known - answered.predicted:
        return Loss.MISPREDICTED
    if shared - cached > answered.known - shared:  # most of it was in the slot
        return Loss.CHECKPOINT
    if answered.reason in UNPLACED:
        return Loss.UNPLACED
    return Loss.RESTARTED if answered.restarted else Loss.OVERWRITTEN


def _shared(answered: Answered) -> int:
    """Tokens that the slot had in common with the prompt."""
    return answered.base.tokens.lcp(answered.prompt) if answered.base else 0
