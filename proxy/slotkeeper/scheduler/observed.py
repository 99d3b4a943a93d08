"""What an engine says about itself when asked, as values that the core can compare with its shadow."""

from __future__ import annotations

from dataclasses import dataclass

from slotkeeper.scheduler.types import SlotId


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot in the engine's own listing (engine.md 1.7)."""

    slot: SlotId
    busy: bool
    task: int | None = None  # the last or the running task; None if the slot never ran one
    speculative: bool = False  # a draft model or MTP works here
    held: int | None = None  # tokens in the slot now; None if it never ran a task, also after a restore
