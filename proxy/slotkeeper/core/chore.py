"""One slot that is being tended: saved, cut back to save a boundary and brought home, or warmed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slotkeeper.core.held import Held
from slotkeeper.core.steps import Step
from slotkeeper.core.table import EngineTable, SlotState
from slotkeeper.core.tokens import Tokens
from slotkeeper.core.types import RequestId, SlotId


@dataclass(slots=True)
class Chore:
    id: RequestId
    table: EngineTable
    slot: SlotId
    step: Step  # under way
    home: Held | None  # what the slot held when it began; None where it is warmed
    goal: Tokens | None = None  # what it shall hold in the end, where it is warmed

    @property
    def owns(self) -> bool:
        """Whether the slot is still its own: it is not once the engine was restarted."""
        return self.table.owners[self.slot : self.slot + 1] == [self.id]

    @property
    def held(self) -> Held | None:
        return self.table.shadow.slots[self.slot]

    def recognise(self) -> None:
        """Neither a file nor a prefill says whose conversation it is; where the slot is home, we know."""
        held, home = self.held, self.home
        if held and home and held.request in {None, self.id} and held.tokens == home.tokens:
            same = replace(held, outline=home.outline, turns=home.turns, used=home.used, request=home.request)
            self.table.shadow.slots[self.slot] = same

    def leave(self, now: float) -> None:
        if self.table.states[self.slot] is SlotState.TENDED:
            self.table.move(self.slot, SlotState.IDLE, None, now)
