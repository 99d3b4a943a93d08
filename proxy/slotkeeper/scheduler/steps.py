"""Steps bound to their owner and their slot: of a request's plan as effects, of idle work in a chore."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, assert_never

from slotkeeper.scheduler.effects import Erase, Keep, Load, Plant, Prefill, Purpose, Restore, Save, Step, Wipe
from slotkeeper.scheduler.prompt_tree import PromptTree
from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.table import EngineTable, Maintenance, SlotState
from slotkeeper.scheduler.types import Place, RequestId, SlotId, Tokens


def effect(
    step: Step, owner: RequestId, table: EngineTable, slot: SlotId, *, tree: PromptTree
) -> Plant | Save | Restore | Erase:
    place = Place(table.engine, slot)
    match step:
        case Prefill(tokens, purpose):
            return Plant(request=owner, place=place, tokens=tokens, purpose=purpose)
        case Keep(moment):
            contents = table.shadow.slots[slot] or SlotContents()
            return Save(
                request=owner,
                place=place,
                moment=moment,
                tokens=contents.tokens,
                size=table.rates.size_of(contents.total),
                cuts=tuple(branch.at for branch in tree.branches(contents.tokens)),
                stale=tuple(checkpoint.at for checkpoint in contents.checkpoints if checkpoint.stale),
            )
        case Load(snapshot):
            within = table.rates.bring_within(len(snapshot.tokens))
            return Restore(request=owner, place=place, snapshot=snapshot, within=within)
        case Wipe():
            return Erase(request=owner, place=place)
        case _:
            assert_never(step)


# -- idle work in one slot -------------------------------------------------------------------------------

SHORTEST: Final = 0.01  # seconds that a step takes at least: a round trip


@dataclass(slots=True)
class Chore:
    """Idle work in one slot: it is saved, cut back to save a boundary and restored to its end, or warmed."""

    id: RequestId
    table: EngineTable
    slot: SlotId
    step: Step  # under way
    home: SlotContents | None  # what the slot held when it began; None where it is warmed
    goal: Prefill | None = None  # what it shall hold in the end, where it is warmed or goes ahead
    computes: int = 0  # tokens, for the goal
    stopped: bool = False  # a request needed the engine
    written: bool = False  # the engine has saved the slot: that the file is checked needs neither of them
    leaves: bool = False  # the slot is not restored to its end: another conversation will have it soon

    @property
    def ahead(self) -> bool:
        """Whether it is on its way to what the next turn will begin with."""
        return self.goal is not None and self.goal.purpose is Purpose.NEXT

    @property
    def computes_ahead(self) -> bool:
        """Whether that is what it computes now."""
        return self.ahead and self.step == self.goal

    @property
    def empties(self) -> bool:
        """Whether it only makes a slot give up its cells, where none can be erased."""
        return isinstance(self.step, Prefill) and self.step.purpose is Purpose.EMPTY

    @property
    def owns(self) -> bool:
        """Whether the slot is still its own: it is not once the engine was restarted."""
        return self.table.owners[self.slot : self.slot + 1] == [self.id]

    @property
    def contents(self) -> SlotContents | None:
        return self.table.shadow.slots[self.slot]

    def recognise(self) -> None:
        """Neither a file nor a prefill says whose conversation it is; at the slot's own end we know."""
        contents, home = self.contents, self.home
        if contents and home and contents.request in {None, self.id} and contents.tokens == home.tokens:
            self._claim(contents, home, following=home.following, sure=home.sure)

    def left_back(self) -> None:
        """The slot was cut back to where its conversation will go on: it is still that one's."""
        if (contents := self.contents) and (home := self.home):
            self._claim(contents, home, following=home.following)

    def arrived(self) -> None:
        """The slot holds what the next turn will begin with: it is still the same conversation's."""
        contents, home = self.contents, self.home
        if contents and home:
            self._claim(contents, home, sure=True, given_up=home.total - home.tokens.lcp(contents.tokens))

    def _claim(self, contents: SlotContents, home: SlotContents, **known: Any) -> None:
        """What the slot holds is the conversation's whose slot it was."""
        self.table.shadow.slots[self.slot] = replace(
            contents,
            hash_chain=home.hash_chain,
            turns=home.turns,
            used=home.used,
            request=home.request,
            **known,
        )

    def began(self, now: float) -> None:
        """Its step has begun: say how long that will hold the slot, and what the slot holds then."""
        self.written, stalls = False, not isinstance(self.step, Prefill)
        becomes: Tokens | None = None
        match self.step:
            case Prefill(tokens):
                becomes = tokens
            case Load(snapshot):
                becomes = snapshot.tokens
        self.table.maintenance[self.slot] = Maintenance(now, max(SHORTEST, self._seconds()), becomes, stalls)

    def _seconds(self) -> float:
        """How long its step will hold the slot, for a request that waits."""
        rates, traits = self.table.rates, self.table.traits
        match self.step:
            case Prefill(tokens):
                computes = len(tokens) - self.table.shadow.plan_reuse(self.slot, tokens).reuse
                most = traits.n_batch if self.ahead else computes  # then it is stopped
                return min(computes, most) / rates.prefill
            case Load(snapshot):
                return rates.reading.seconds(snapshot.size)
            case _:
                return rates.save_seconds(self.contents.total if self.contents else 0)

    def leave(self, now: float) -> None:
        if self.table.states[self.slot] is SlotState.MAINTENANCE:
            self.table.move(self.slot, SlotState.IDLE, None, now)
