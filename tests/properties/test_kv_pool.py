"""Random traffic on slots that share one KV buffer: what is admitted fits, and every request is served.

The slots' real contents come from the simulated engine. They are compared when all of them can be known:
every prompt is known, and no slot runs a task whose client has left.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from properties.test_placement_machine import SETTINGS, PlacementMachine, longest_answer
from slotkeeper.scheduler.effects import Effect, Forward
from slotkeeper.scheduler.requests.pending import Queued
from slotkeeper.scheduler.slots.engine_model import Known
from slotkeeper.scheduler.slots.table import SlotState
from slotkeeper.scheduler.types import EngineId

CELLS = 1700  # two of the longest prompts fit, or several short ones
UNSURE = {SlotState.DRAINING, SlotState.FOREIGN}


class SharedBufferMachine(PlacementMachine):
    """As `PlacementMachine`, but slots share their cells."""

    offered = ("chat", "resumable", "own slot", "messages")

    def more_traits(self) -> dict[str, Any]:
        knowledge = MappingProxyType({"unified": Known.FLAGS})
        return {"n_ctx": CELLS, "unified": True, "idle_copy": False, "knowledge": knowledge}

    def perform(self, effect: Effect) -> None:
        super().perform(effect)
        if isinstance(effect, Forward) and effect.slot is not None and self.sure(effect.engine):
            assert self.held(effect.engine) <= CELLS, f"admitted, but does not fit: {self.placement!r}"

    def sure(self, name: EngineId) -> bool:
        table = self.placement.tables[name]
        pendings = self.placement._state.requests.values()
        known = all(p.prompt is not None for p in pendings if not isinstance(p.stage, Queued))
        settled = UNSURE.isdisjoint(table.states) and not table.unsettled and not table.orphans
        return self.up[name] and known and settled and len(table.states) > 1 and not self.actions

    def held(self, name: EngineId) -> int:
        """Return the cells that will be taken when all running and sent requests have ended."""
        engine = self.engines[name]
        ends = {n: len(slot.tokens) for n, slot in enumerate(engine.slots)}
        sent = [task for _, where, task in self.transit if where == name]
        for task in [*(task for _, task in engine.running()), *sent]:
            slot = task.slot if task.slot is not None else task.wanted
            if slot is not None:
                more = 0 if task.plant else longest_answer(task.prompt) - 1
                ends[slot % engine.n] = len(task.prompt) + more
        return sum(ends.values())


TestSharedBuffer = SharedBufferMachine.TestCase
TestSharedBuffer.settings = SETTINGS
