"""The slot table of one engine: which slot is free, whose it is, and what GET /slots says of it.

Rule of this file: a slot is given out only when it is IDLE, and it is IDLE only when the engine has
really released it. Two tasks in one slot corrupt a running answer (engine.md T1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from slotkeeper.core.events import Observed
from slotkeeper.core.held import Held
from slotkeeper.core.observed import SlotView
from slotkeeper.core.shadow import EngineShadow
from slotkeeper.core.traits import EngineTraits
from slotkeeper.core.types import EngineId, RequestId, SlotId

SHARED_FOR: Final = 60.0  # seconds for which we expect more of another client's tasks, once seen
LINGER: Final = 0.1  # seconds in which a task may still begin after its client left (engine.md 7)
STALE: Final = 0.05  # seconds: an older look at a shared engine is no proof that a slot is free
RAM_STRIKES: Final = 2  # misses in a row until we stop counting on the engine's RAM cache
QUICK_LOOKS: Final = 6  # within a fifth of a second, enough for a slot that is being released
SILENCE: Final = 1.3  # seconds: the engine sees a disconnect only after one in which nobody asked (T10)
COUNT_SLIP: Final = 2  # tokens by which our count of a slot may differ without our ids being wrong


class SlotState(StrEnum):
    IDLE = "idle"
    LAUNCHED = "launched"  # our request is on its way; the engine may not have begun it
    RUNNING = "running"  # ours, and the engine is at work on it
    DRAINING = "draining"  # ours no more, not yet released
    FOREIGN = "foreign"  # somebody else's task


@dataclass(slots=True)
class Orphan:
    """An unpinned request that ended before we saw where it ran."""

    request: RequestId
    total: int | None  # tokens its slot holds now; None: its client left, it may be running
    since: float  # a look that was asked for earlier says nothing about it


@dataclass(slots=True)
class EngineTable:
    engine: EngineId
    shadow: EngineShadow
    up: bool = True
    states: list[SlotState] = field(init=False)
    owners: list[RequestId | None] = field(init=False)
    changed: list[float] = field(init=False)  # when a slot's state last changed, by our clock
    begun: list[float] = field(init=False)  # when a slot's last task was sent or seen
    unsettled: dict[RequestId, float] = field(default_factory=dict)  # unpinned, not yet seen; when sent
    orphans: list[Orphan] = field(default_factory=list)
    shared_until: float = 0.0
    moves: int = 0  # how often any slot changed its state
    reset_at: float = -1.0
    observed_at: float = -1.0
    observing: bool = False
    unseen: bool = False  # it came up, and nobody has looked at its slots since
    patience: int = 0  # looks in a row that changed nothing
    failures: int = 0  # looks in a row that failed
    proven: bool = False  # whether idle slots were seen to keep their content (T6)
    look_again: bool = False  # something was not as predicted
    ram_misses: int = 0  # loads in a row from the RAM cache that were not there

    def __post_init__(self) -> None:
        self.reset(self.traits)

    @property
    def traits(self) -> EngineTraits:
        return self.shadow.traits

    def __repr__(self) -> str:
        slots = " ".join(f"{s}:{state}" for s, state in enumerate(self.states))
        return f"<{self.engine} {'up' if self.up else 'down'} | {slots} | {len(self.unsettled)} unsettled>"

    def reset(self, traits: EngineTraits, now: float = -1.0) -> None:
        """The engine is new, or was restarted: every slot is empty."""
        self.shadow = EngineShadow(traits)
        self.states = [SlotState.IDLE] * traits.n_slots
        self.owners = [None] * traits.n_slots
        self.changed = [now] * traits.n_slots
        self.begun = [now] * traits.n_slots
        self.unsettled.clear()
        self.orphans.clear()
        self.moves += 1
        self.reset_at = now
        self.observed_at = -1.0
        self.ram_misses = 0
        self.proven = False

    # -- questions ---------------------------------------------------------------------------------

    def in_state(self, *states: SlotState) -> list[SlotId]:
        return [SlotId(slot) for slot, state in enumerate(self.states) if state in states]

    @property
    def idle(self) -> list[SlotId]:
        return self.in_state(SlotState.IDLE)

    @property
    def load(self) -> float:
        """Share of the slots that are taken."""
        return 1 - len(self.idle) / len(self.states)

    def open_for_pins(self, now: float) -> bool:
        """Whether a slot may be given out: nothing is on its way to a slot that we do not know."""
        fresh = now >= self.shared_until or now - self.observed_at <= STALE
        return self.up and not self.unseen and not self.unsettled and not self.orphans and fresh

    def open_for_unpinned(self, now: float) -> bool:
        """The engine may choose any free slot only while none is promised to a task on its way."""
        return self.open_for_pins(now) and not self.pin_on_its_way(now)

    def pin_on_its_way(self, now: float) -> bool:
        """Whether a pinned task may yet arrive in a slot that the engine thinks free."""
        return SlotState.LAUNCHED in self.states or any(changed > now for changed in self.changed)

    def open_for_anything(self, now: float) -> bool:
        """Room for one more task of which nobody needs to know the slot beforehand."""
        room = len(self.idle) > len(self.unsettled)
        return self.up and room and not self.pin_on_its_way(now)

    def watch(self, *, waiting: bool, now: float) -> float | None:
        """Seconds until the next look at GET /slots; None when nothing depends on it."""
        delay = None if not self.up or self.observing else self._next_look(waiting, now)
        if delay is None or not self.failures:
            return delay
        return max(delay, 0.05 * 2.0 ** min(self.failures, 5))

    def _next_look(self, waiting: bool, now: float) -> float | None:
        if self.unseen:
            return 0.0
        if self.unsettled or self.orphans or (waiting and SlotState.LAUNCHED in self.states):
            slowest = SILENCE if SlotState.DRAINING in self.states else 0.5
            return min(slowest, 0.004 * 1.5 ** min(self.patience, 20))
        if self.look_again:
            return 0.01
        if SlotState.DRAINING in self.states:
            return 0.01 * 1.5**self.patience if self.patience < QUICK_LOOKS else SILENCE
        if waiting and now < self.shared_until and now - self.observed_at > STALE:
            return 0.0
        return 0.25 if SlotState.FOREIGN in self.states else None

    # -- changes -----------------------------------------------------------------------------------

    def move(self, slot: SlotId, state: SlotState, owner: RequestId | None, now: float) -> None:
        was_idle = self.states[slot] is SlotState.IDLE
        if state is SlotState.LAUNCHED or (was_idle and state is not SlotState.IDLE):
            self.begun[slot] = now
        self.states[slot] = state
        self.owners[slot] = owner
        self.moves += 1
        self.changed[slot] = now
        self.patience = 0

    def leave(self, slot: SlotId, now: float, state: SlotState = SlotState.DRAINING) -> None:
        """Its request is over for us. If that was still on its way, a free slot may yet be taken by it."""
        late = LINGER if self.states[slot] is SlotState.LAUNCHED else 0.0
        self.move(slot, state, None, now)
        self.changed[slot] = now + late

    def ram_loaded(self, *, hit: bool) -> None:
        """Whether the RAM cache held what we expected of it."""
        self.ram_misses = 0 if hit else self.ram_misses + 1
        if self.ram_misses >= RAM_STRIKES:
            self.shadow.distrust_ram()
        elif not hit:
            self.shadow.forget_ram()

    def observe(self, seen: Observed) -> dict[RequestId, SlotId]:
        """Take in GET /slots. Returns the unsettled requests whose slot is now known."""
        self.observing = self.look_again = False
        self.failures = 0
        self.unseen = self.unseen and seen.asked < self.reset_at
        self.observed_at = seen.at
        self.patience += 1
        settled: dict[RequestId, SlotId] = {}
        if self._wiped(seen):
            return settled
        self._whose(seen, settled)
        for view in seen.slots:
            if self._tells(view, seen):
                self._merge(view, seen.at)
        self._adopt(seen, settled)
        return settled

    def _merge(self, view: SlotView, now: float) -> None:
        state, slot = self.states[view.slot], view.slot
        if view.busy:
            if state is SlotState.LAUNCHED:
                self.move(slot, SlotState.RUNNING, self.owners[slot], now)
        elif state in (SlotState.DRAINING, SlotState.FOREIGN):
            self._correct(view, now)
            self.move(slot, SlotState.IDLE, None, now)
        elif state is SlotState.IDLE and not self.orphans:
            self._correct(view, now)

    def _whose(self, seen: Observed, settled: dict[RequestId, SlotId]) -> None:
        """Slots that we thought idle are busy: with ours that went unpinned, or with another's tasks.

        Nothing is concluded until all of ours must be among them.
        """
        busy = [
            view.slot
            for view in sorted(seen.slots, key=_age)
            if view.busy and self._tells(view, seen) and self.states[view.slot] is SlotState.IDLE
        ]
        left = [orphan for orphan in self.orphans if orphan.total is None]
        late = [orphan for orphan in self.orphans if orphan.since > seen.asked]
        unseen = any(sent > seen.asked for sent in self.unsettled.values())
        ended = any(orphan.total is not None for orphan in late)
        if unseen or ended or len(busy) < len(self.unsettled) + len(late):
            return
        for slot in busy:
            if self.unsettled:
                request = next(iter(self.unsettled))
                del self.unsettled[request]
                settled[request] = slot
                self.move(slot, SlotState.RUNNING, request, seen.at)
            elif left:
                self.orphans.remove(left.pop(0))
                self.shadow.slots[slot] = None
                self.move(slot, SlotState.DRAINING, None, seen.at)
            else:
                self.shared_until = seen.at + SHARED_FOR
                self.shadow.slots[slot] = None
                self.move(slot, SlotState.FOREIGN, None, seen.at)

    def _tells(self, view: SlotView, seen: Observed) -> bool:
        """Whether this look is newer than what we know of the slot."""
        return view.slot < len(self.states) and self.changed[view.slot] <= seen.asked

    def _correct(self, view: SlotView, now: float) -> None:
        """Believe the engine's count of a free slot more than ours."""
        held = self.shadow.slots[view.slot]
        count, ours = view.held or 0, held.total if held else 0
        if held is None:
            self.shadow.slots[view.slot] = Held(opaque=count, used=now) if count else None
        elif count == 0:
            self.shadow.slots[view.slot] = None
        elif held.rough or count <= ours + COUNT_SLIP:
            self.shadow.slots[view.slot] = held.shrunk(count)
        else:  # longer than we left it: somebody else wrote there
            self.shadow.slots[view.slot] = Held(opaque=count, used=now)
            self.shared_until = now + SHARED_FOR

    def _adopt(self, seen: Observed, settled: dict[RequestId, SlotId]) -> None:
        """Find the slots of requests that ended before they were seen: by what they left there."""
        due = [orphan for orphan in self.orphans if orphan.since <= seen.asked]
        if not due:
            return
        free = [
            view
            for view in seen.slots
            if not view.busy and self._tells(view, seen) and self.states[view.slot] is SlotState.IDLE
        ]
        for orphan in due:
            self.orphans.remove(orphan)
            total = orphan.total
            fitting = [v for v in free if total and abs((v.held or 0) - total) <= COUNT_SLIP]
            if fitting:
                newest = max(fitting, key=_age)
                settled[orphan.request] = newest.slot
                free.remove(newest)
        if not self.orphans:
            for view in free:
                self._correct(view, seen.at)

    def _wiped(self, seen: Observed) -> bool:
        """Whether slots lost what we left there: all of them (restart), or all but the last to run (T6)."""
        views = {v.slot: v for v in seen.slots}
        believed = [
            slot
            for slot in self.idle
            if self.shadow.slots[slot] and self.changed[slot] <= seen.asked and slot in views
        ]
        empty = [slot for slot in believed if not views[slot].busy and not views[slot].held]
        kept = [slot for slot in believed if slot not in empty]
        if any(self._outlived_a_task(slot, views) for slot in kept):
            self.proven = True
        if not empty or (kept and kept != [max(believed, key=lambda slot: self.changed[slot])]):
            return False
        if any(v.held or v.busy for v in seen.slots):
            self._learn_unified(empty)
            return False
        if all(state is SlotState.IDLE for state in self.states):
            sent = dict(self.unsettled)  # perhaps to the new engine already
            self.reset(self.traits, seen.asked)
            self.unsettled.update(sent)
            return True
        return False

    def _outlived_a_task(self, kept: SlotId, views: Mapping[SlotId, SlotView]) -> bool:
        """Whether another slot began a task after this one got its content."""
        return any(
            self.begun[slot] > self.changed[kept]
            and (self.states[slot] is not SlotState.LAUNCHED or views[slot].busy)
            for slot in views
            if slot != kept and slot < len(self.states)
        )

    def _learn_unified(self, wiped: list[SlotId]) -> None:
        """Idle slots are saved to the RAM cache and cleared at each task: what was there is there now."""
        if self.proven or self.traits.unified:
            return
        self.shadow.assume_unified(wiped)


def _age(view: SlotView) -> int:
    """Tasks are numbered as they come in: the order in which slots were last taken."""
    return -1 if view.task is None else view.task
