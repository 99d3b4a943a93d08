"""Begin a step of a plan (prefill, save, restore, erase), for a request or for idle work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from slotkeeper.scheduler.effects import Prefill, Purpose, Restore, Save, Step
from slotkeeper.scheduler.policies.adapters import Scales, scales_of, set_in
from slotkeeper.scheduler.prompts.prompt_tree import PromptTree
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import EngineTraits, SlotContents
from slotkeeper.scheduler.slots.table import EngineTable, Maintenance, SlotState
from slotkeeper.scheduler.types import Place, RequestId, SlotId

WITHOUT_CONTENTS: Final = {Purpose.TOUCH, Purpose.EMPTY}  # prefills that leave nothing to reuse


def begun(step: Step, owner: RequestId, table: EngineTable, slot: SlotId, *, tree: PromptTree) -> Step:
    """Begin a step in a slot, and return it as it begins; its outcome is reported to `owner`.

    Raises ValueError for a prefill under adapters that the engine does not have.
    """
    step = replace(step, request=owner, place=Place(table.engine, slot))
    match step:
        case Prefill():
            step = replace(step, lora=_scales(table.traits, step.tokens, step.purpose))
            touch = step.purpose in WITHOUT_CONTENTS
            table.shadow.prefill_begins(slot, step.tokens, table.idle_beside(slot), touch=touch)
        case Save():
            contents = table.shadow.slots[slot] or SlotContents()
            return replace(
                step,
                tokens=contents.tokens,
                size=table.bytes_of(contents),
                cuts=tuple(branch.at for branch in tree.branches(contents.tokens)),
                stale=tuple(checkpoint.at for checkpoint in contents.checkpoints if checkpoint.stale),
            )
        case Restore():
            return replace(step, within=table.rates.bring_within(len(step.snapshot.tokens)))
    return step


def _scales(traits: EngineTraits, tokens: Tokens, purpose: Purpose) -> Scales | None:
    """Return the scales of the adapters of a prefill's tokens; None if the prefill need not name them.

    A touch always names them: from then on the slot has these adapters (engine.md T12).
    """
    name = set_in(tokens.space)
    if not traits.adapters or (name == traits.adapter_set and purpose is not Purpose.TOUCH):
        return None
    return scales_of(traits.adapters, name)


# -- idle work in one slot -------------------------------------------------------------------------------

SHORTEST: Final = 0.01  # seconds that a step takes, at least: one round trip


@dataclass(slots=True)
class Chore:
    """Idle work in one slot: it saves the slot, cuts it back to save boundaries, prefetches, or warms it."""

    id: RequestId
    table: EngineTable
    slot: SlotId
    step: Step  # the step that runs now
    home: SlotContents | None  # what the slot held at the beginning; None if the chore warms an empty slot
    goal: Prefill | None = None  # what the slot is to hold at the end, if the chore warms or prefetches
    computes: int = 0  # tokens that are computed for the goal
    stopped: bool = False  # a request needed the engine
    written: bool = False  # the engine wrote the file; checking it needs neither slot nor engine
    leaves: bool = False  # the slot is not restored to its end: another conversation will soon take it

    @property
    def ahead(self) -> bool:
        """Whether the chore prefetches the beginning of the next turn."""
        return self.goal is not None and self.goal.purpose is Purpose.NEXT

    @property
    def computes_ahead(self) -> bool:
        """Whether its current step computes that beginning."""
        return self.ahead and self.step == self.goal

    @property
    def empties(self) -> bool:
        """Whether the chore only makes a slot free its cells, on an engine that cannot erase a slot."""
        return isinstance(self.step, Prefill) and self.step.purpose is Purpose.EMPTY

    @property
    def owns(self) -> bool:
        """Whether the chore still owns the slot; it does not after a restart of the engine."""
        return self.table.owners[self.slot : self.slot + 1] == [self.id]

    @property
    def contents(self) -> SlotContents | None:
        return self.table.shadow.slots[self.slot]

    def recognise(self) -> None:
        """Assign the slot to its conversation again once the tokens are back at the slot's own end.

        A file or a prefill does not say which conversation its tokens belong to.
        """
        contents, home = self.contents, self.home
        if contents and home and contents.request in {None, self.id} and contents.tokens == home.tokens:
            self.table.shadow.claimed(
                self.slot, home, following=home.following, likely=home.likely, sure=home.sure
            )

    def left_back(self) -> None:
        """Assign the slot to its conversation again after a cut back to where the next turn continues."""
        if home := self.home:
            self.table.shadow.claimed(self.slot, home, following=home.following, likely=home.likely)

    def arrived(self) -> None:
        """Assign the slot to its conversation again, now that it holds the beginning of the next turn."""
        contents, home = self.contents, self.home
        if contents and home:
            given_up = home.total - home.tokens.lcp(contents.tokens)
            self.table.shadow.claimed(self.slot, home, sure=True, given_up=given_up)

    def began(self, now: float) -> None:
        """Record that a step has begun, how long it will hold the slot, and what the slot holds then."""
        self.written, stalls = False, not isinstance(self.step, Prefill)
        becomes: Tokens | None = None
        match self.step:
            case Prefill(tokens):
                becomes = tokens
            case Restore(snapshot):
                becomes = snapshot.tokens
        self.table.tends(self.slot, Maintenance(now, max(SHORTEST, self._seconds()), becomes, stalls))

    def _seconds(self) -> float:
        """Seconds for which the step will hold the slot, as far as a waiting request is concerned."""
        rates, traits = self.table.rates, self.table.traits
        match self.step:
            case Prefill(tokens):
                computes = len(tokens) - self.table.shadow.plan_reuse(self.slot, tokens).reuse
                most = traits.n_batch if self.ahead else computes  # a prefetch is stopped after one batch
                return min(computes, most) / rates.prefill.mean
            case Restore(snapshot):
                return rates.reading.seconds(snapshot.size)
            case _:
                return self.table.save_seconds(self.contents or SlotContents())

    def leave(self, now: float) -> None:
        if self.table.states[self.slot] is SlotState.MAINTENANCE:
            self.table.move(self.slot, SlotState.IDLE, None, now)
