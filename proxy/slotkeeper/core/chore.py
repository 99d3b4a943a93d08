"""One slot that is being tended: saved, cut back to save a boundary and brought home, or warmed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from slotkeeper.core.effects import Purpose
from slotkeeper.core.held import Held
from slotkeeper.core.steps import Prefill, Step
from slotkeeper.core.table import EngineTable, SlotState
from slotkeeper.core.types import RequestId, SlotId


@dataclass(slots=True)
class Chore:
    id: RequestId
    table: EngineTable
    slot: SlotId
    step: Step  # under way
    home: Held | None  # what the slot held when it began; None where it is warmed
    goal: Prefill | None = None  # what it shall hold in the end, where it is warmed or goes ahead
    computes: int = 0  # tokens, for the goal
    stopped: bool = False  # somebody needed the engine
    leaves: bool = False  # the slot is not brought home: another conversation will have it soon

    @property
    def ahead(self) -> bool:
        """Whether it is on its way to what the next turn will begin with."""
        return self.goal is not None and self.goal.purpose is Purpose.NEXT

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
            self._claim(held, home, following=home.following, sure=home.sure)

    def left_back(self) -> None:
        """The slot was cut back to where its conversation will go on: it is still that one's."""
        if (held := self.held) and (home := self.home):
            self._claim(held, home, following=home.following)

    def arrived(self) -> None:
        """The slot holds what the next turn will begin with: it is still the same conversation's."""
        held, home = self.held, self.home
        if held and home:
            self._claim(held, home, sure=True, given_up=home.total - home.tokens.lcp(held.tokens))

    def _claim(self, held: Held, home: Held, **known: Any) -> None:
        """What the slot holds is the conversation's whose slot it was."""
        self.table.shadow.slots[self.slot] = replace(
            held, outline=home.outline, turns=home.turns, used=home.used, request=home.request, **known
        )

    def leave(self, now: float) -> None:
        if self.table.states[self.slot] is SlotState.TENDED:
            self.table.move(self.slot, SlotState.IDLE, None, now)
