"""Where a request is at this moment: its place in the line, or how far its prompt is computed.

Only for observers: nothing is decided by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from slotkeeper.observe.why.record import Record, Work

MOST: Final = 99  # per cent, as long as no token has come


class Doing(StrEnum):
    QUEUED = "queued"  # in our line
    PREPARING = "preparing"  # a file is saved or restored for it
    PREFILL = "prefill"  # its prompt is being computed
    GENERATING = "generating"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    doing: Doing
    place: int | None = None  # in the line; 1 is the next
    computed: int | None = None  # tokens so far, of those that the engine has to compute
    to_compute: int | None = None
    seconds_left: float | None = None
    estimated: bool = False  # by the learned rate: the engine tells nothing on this route

    @property
    def percent(self) -> int | None:
        if not self.to_compute or self.computed is None:
            return None
        return max(0, min(MOST, int(100 * self.computed / self.to_compute)))

    def shown(self) -> dict[str, Any]:
        left = self.seconds_left
        return {
            "doing": self.doing.value,
            "place": self.place,
            "percent": self.percent,
            "computed_tokens": self.computed,
            "to_compute_tokens": self.to_compute,
            "seconds_left": None if left is None else round(left, 1),
            "estimated": self.estimated,
        }


def prefilling(record: Record, work: Work, prompt: int | None, now: float) -> Moment:
    """`prompt` tokens, where they are known; `now` on the driver's clock."""
    if work.told is not None:
        return _told(work, now)
    decision = record.decision
    reuse = decision.chosen.reuse if decision else None
    if decision is None or prompt is None or reuse is None:
        return Moment(doing=Doing.PREFILL)
    to_compute, rate = max(1, prompt - reuse), decision.rate
    seen = work.planted + work.planting
    computed = seen if work.planting else max(seen, int((now - work.begun) * rate))
    computed = min(computed, to_compute)
    left = (to_compute - computed) / rate if rate else None
    return Moment(
        doing=Doing.PREFILL,
        computed=computed,
        to_compute=to_compute,
        seconds_left=left,
        estimated=not work.planting,
    )


def _told(work: Work, now: float) -> Moment:
    """By the engine's own progress. What was planted for it counts as computed, not as reused."""
    told = work.told
    if told is None:
        raise AssertionError("only what was told is shown")
    computed = told.processed - told.reused
    rate = computed / told.seconds if told.seconds > 0 else 0.0
    left = (told.total - told.processed) / rate if rate > 0 else None
    if left is not None:
        left = max(0.0, left - (now - work.told_at))
    return Moment(
        doing=Doing.PREFILL,
        computed=min(work.planted, told.reused) + computed,
        to_compute=min(work.planted, told.reused) + told.total - told.reused,
        seconds_left=left,
    )
