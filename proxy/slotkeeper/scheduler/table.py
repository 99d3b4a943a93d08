"""The slot table of one engine: which slot is free, whose it is, and what GET /slots says of it.

Rule of this file: a slot is given out only when it is IDLE, and it is IDLE only when the engine has
really released it. Two tasks in one slot corrupt a running answer (engine.md T1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Final

from slotkeeper.scheduler.breaker import Breaker
from slotkeeper.scheduler.costs import WORTH_A_FILE, Rates
from slotkeeper.scheduler.engine_model import EngineTraits
from slotkeeper.scheduler.evidence import Doubts
from slotkeeper.scheduler.shadow import EngineShadow
from slotkeeper.scheduler.slot_contents import SlotContents, Snapshot, SnapshotId, succeeds
from slotkeeper.scheduler.types import NO_ROUTER, EngineId, ModelName, RequestId, SlotId, Tokens
from slotkeeper.scheduler.work import EngineWork, Expected

CROWDED_FOR: Final = 60.0  # seconds after a conversation lost its slot to another
LULL: Final = 1.0  # seconds without a task, after which a crowd is at rest as well
SHARED_FOR: Final = 60.0  # seconds for which we expect more of another client's tasks, once seen
LINGER: Final = 0.1  # seconds in which a task may still begin after its client left (engine.md 7)
STALE: Final = 0.05  # seconds: an older look at a shared engine is no proof that a slot is free
RAM_STRIKES: Final = 2  # misses in a row until we stop counting on the engine's RAM cache
QUICK_LOOKS: Final = 6  # within a fifth of a second, enough for a slot that is being released
SILENCE: Final = 1.3  # seconds: the engine sees a disconnect only after one without requests (T10)


class SlotState(StrEnum):
    IDLE = "idle"
    LAUNCHED = "launched"  # our request is on its way; the engine may not have begun it
    RUNNING = "running"  # ours, and the engine is at work on it
    DRAINING = "draining"  # ours no more, not yet released
    FOREIGN = "foreign"  # a task of another client of the engine
    MAINTENANCE = "tended"  # saved or restored by us in idle time


@dataclass(slots=True)
class Orphan:
    """An unpinned request that ended before we saw where it ran."""

    request: RequestId
    total: int | None  # tokens its slot holds now; 0: it failed; None: its client left, it may be running
    since: float  # a look that was asked for earlier says nothing about it
    slots: int = 1  # that it may hold
    sent: float = -inf  # when it was: a look that was asked for before cannot show it


@dataclass(frozen=True, slots=True)
class Sent:
    """An unpinned request that was not seen yet."""

    at: float
    slots: int  # as many as it takes at once: n > 1, or several prompts
    alone: bool = False  # what ran and ended before it got there could leave another namespace's state


@dataclass(frozen=True, slots=True)
class Maintenance(Expected):
    """What a slot is held for by idle work."""

    becomes: Tokens | None  # what the slot holds then; None: what it held
    stalls: bool  # files: nothing else runs on that engine meanwhile, in whatever slot


@dataclass(slots=True)
class EngineTable:
    engine: EngineId
    shadow: EngineShadow
    rates: Rates = field(default_factory=Rates)
    model: ModelName = NO_ROUTER  # that it serves
    up: bool = True
    leaving: bool = False  # its router is about to unload it for another model: nothing begins there
    back_by: float = -inf  # until when it is waited for, once it is lost
    states: list[SlotState] = field(init=False)
    owners: list[RequestId | None] = field(init=False)
    changed: list[float] = field(init=False)  # when a slot's state last changed, by our clock
    begun: list[float] = field(init=False)  # when a slot's last task was sent or seen
    breaker: Breaker = field(default_factory=Breaker)
    work: EngineWork = field(default_factory=EngineWork)  # what it has begun for clients
    # Of slots that are in maintenance; of others it says nothing.
    maintenance: dict[SlotId, Maintenance] = field(default_factory=dict)
    unsettled: dict[RequestId, Sent] = field(default_factory=dict)  # unpinned, not yet seen
    orphans: list[Orphan] = field(default_factory=list)
    awaited: bool = False  # a request waits until what is on its way there has begun: those behind it as well
    shared_until: float = 0.0
    moves: int = 0  # how often any slot changed its state
    reset_at: float = -1.0
    observed_at: float = -1.0
    observing: bool = False
    unseen: bool = False  # it came up, and its slots were not checked since
    patience: int = 0  # looks in a row that changed nothing
    failures: int = 0  # looks in a row that failed
    proven: bool = False  # whether idle slots were seen to keep their content (T6)
    look_again: bool = False  # something was not as predicted
    ram_misses: int = 0  # loads in a row from the RAM cache that were not there
    settled: dict[SlotId, SlotContents] = field(default_factory=dict)  # states that need not be saved (again)
    put_off: set[SlotId] = field(default_factory=set)  # settled only as long as there is a crowd
    loaded: set[SlotId] = field(default_factory=set)  # a file was restored there, and no task ran since
    warmed: set[SnapshotId] = field(default_factory=set)  # since it came up
    no_save_until: float = -1.0  # a save failed, and so would the next ones
    no_wipe_until: float = -1.0  # an erasure failed
    no_touch_until: float = -1.0  # a prefill of one token failed
    crowded_until: float = -1.0  # there are more conversations than slots
    doubts: Doubts = field(default_factory=Doubts)
    promised: dict[SlotId, int] = field(default_factory=dict)  # cells of a shared KV buffer, see `kv_pool`
    active_at: float = -1.0  # when a client's task last began or ended
    private: bool = False  # all that it ever computed was for us, as far as we have seen
    unknown: int = 0  # the most tokens that one task of ours has left there without our knowing them

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
        self.rates.told(traits.token_bytes)
        self.states = [SlotState.IDLE] * traits.n_slots
        self.owners = [None] * traits.n_slots
        self.changed = [now] * traits.n_slots
        self.begun = [now] * traits.n_slots
        self.unsettled.clear()
        self.orphans.clear()
        self.work.served.clear()
        self.moves += 1
        self.reset_at = now
        self.observed_at = -1.0
        self.settled.clear()
        self.put_off.clear()
        self.loaded.clear()
        self.warmed.clear()
        self.no_save_until = self.crowded_until = -1.0
        self.ram_misses = 0
        self.proven = False
        self.doubts = Doubts()

    # -- questions ---------------------------------------------------------------------------------

    @property
    def failing(self) -> bool:
        """Whether requests fail there, so that others go elsewhere if they can."""
        return self.breaker.resting or self.breaker.on_trial(busy=bool(self.work.served))

    def in_state(self, *states: SlotState) -> list[SlotId]:
        return [SlotId(slot) for slot, state in enumerate(self.states) if state in states]

    @property
    def idle(self) -> list[SlotId]:
        return self.in_state(SlotState.IDLE)

    @property
    def own(self) -> int:
        """How many slots no other client of the engine has."""
        return len(self.states) - len(self.in_state(SlotState.FOREIGN))

    @property
    def load(self) -> float:
        """Share of the slots that are taken."""
        return 1 - len(self.idle) / len(self.states)

    def open_for_pins(self, now: float) -> bool:
        """Whether a slot may be given out: nothing is on its way to a slot that we do not know."""
        fresh = now >= self.shared_until or now - self.observed_at <= STALE
        known = not self.unseen and not self.unsettled and not self.orphans
        return self.up and known and fresh and not self.awaited and not self.leaving

    def open_for_unpinned(self, now: float) -> bool:
        """The engine may choose any free slot only while none is promised to a task on its way."""
        return self.open_for_pins(now) and not self.pin_on_its_way(now)

    def open_for(self, now: float, *, pinned: bool) -> bool:
        return self.open_for_pins(now) if pinned else self.open_for_unpinned(now)

    def pin_on_its_way(self, now: float) -> bool:
        """Whether a pinned task may yet arrive in a slot that the engine thinks free."""
        ours = SlotState.LAUNCHED in self.states or SlotState.MAINTENANCE in self.states
        return ours or any(changed > now for changed in self.changed)

    def crowd(self, slot: SlotId, hash_chain: Sequence[bytes], now: float) -> None:
        """A slot is given out: if that takes it from another conversation, the next ones will lose theirs."""
        contents = self.shadow.slots[slot]
        if contents and contents.total >= WORTH_A_FILE and not succeeds(hash_chain, contents):
            self.crowded_until = now + CROWDED_FOR

    def crowded(self, now: float) -> bool:
        return now < self.rests_at

    @property
    def rests_at(self) -> float:
        """When the crowd is over, if no request comes until then."""
        return min(self.crowded_until, self.active_at + LULL)

    @property
    def put_off_until(self) -> float:
        """When to look again at what was put off; infinite where nothing was."""
        return self.rests_at if self.put_off else inf

    def take_up(self, now: float) -> None:
        """What was put off because of a crowd is looked at again once that is over."""
        if self.put_off and not self.crowded(now):
            for slot in self.put_off:
                self.settled.pop(slot, None)
            self.put_off.clear()

    def stalled(self, now: float) -> float:
        """Seconds until it begins anything: it is at a file."""
        maintenance = (self.maintenance[slot] for slot in self.in_state(SlotState.MAINTENANCE))
        return max((one.left(now) for one in maintenance if one.stalls), default=0.0)

    def overdue(self, now: float) -> int:
        """Changes when requests that wait for a slot in maintenance are to be decided again."""
        return sum(self.maintenance[slot].overdue(now) for slot in self.in_state(SlotState.MAINTENANCE))

    def overdue_at(self, now: float) -> float:
        """When that will change; infinite where nothing is in maintenance."""
        return min(
            (self.maintenance[s].overdue_at(now) for s in self.in_state(SlotState.MAINTENANCE)), default=inf
        )

    def may_save(self, now: float) -> bool:
        return self.traits.snapshots and now >= self.no_save_until

    def may_wipe(self, now: float) -> bool:
        return self.traits.slot_files and now >= self.no_wipe_until

    @property
    def quiet(self) -> bool:
        """Whether nothing of ours is at work there or on its way."""
        at_work = {SlotState.LAUNCHED, SlotState.RUNNING, SlotState.MAINTENANCE}
        return not self.unsettled and not self.orphans and at_work.isdisjoint(self.states)

    @property
    def at_rest(self) -> bool:
        """Whether no task is at work there, nor on its way: neither a client's nor idle work."""
        idle = all(state is SlotState.IDLE for state in self.states)
        return idle and not (self.unseen or self.unsettled or self.orphans)

    @property
    def serving(self) -> bool:
        """Whether a client waits for it."""
        return bool(self.unsettled) or SlotState.LAUNCHED in self.states or SlotState.RUNNING in self.states

    def open_for_anything(self, now: float) -> bool:
        """Room for one more task without a known slot."""
        room = len(self.idle) > sum(sent.slots for sent in self.unsettled.values())
        alone = any(sent.alone for sent in self.unsettled.values())
        return self.up and room and not alone and not self.awaited and self.open_for_bypass(now)

    def open_for_bypass(self, now: float) -> bool:
        """Not while one that left unseen may be at work: it would be taken for the next one sent."""
        over = all(orphan.total is not None for orphan in self.orphans)
        return over and not self.leaving and not self.pin_on_its_way(now)

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

    def idle_beside(self, slot: SlotId) -> list[SlotId]:
        """The other free slots."""
        return [other for other in self.idle if other != slot]

    def may_have_wiped_beside(self, slot: SlotId) -> bool:
        """Whether a task there may have emptied other free slots: none was seen to keep its content (T6)."""
        return not self.proven and any(self.shadow.slots[other] for other in self.idle_beside(slot))

    # -- changes -----------------------------------------------------------------------------------

    def move(self, slot: SlotId, state: SlotState, owner: RequestId | None, now: float) -> None:
        was_idle = self.states[slot] is SlotState.IDLE
        if state is SlotState.LAUNCHED or (was_idle and state not in (SlotState.IDLE, SlotState.MAINTENANCE)):
            self.begun[slot] = now
        if state in (SlotState.RUNNING, SlotState.FOREIGN):
            self.loaded.discard(slot)
        if SlotState.MAINTENANCE not in (state, self.states[slot]):
            self.active_at = now
        self.states[slot] = state
        self.owners[slot] = owner
        self.moves += 1
        self.changed[slot] = now
        self.patience = 0

    def send(self, request: RequestId, copies: int, now: float, *, alone: bool = False) -> None:
        """It goes, or went, unpinned: GET /slots must show where it runs."""
        self.unsettled[request] = Sent(now, min(copies, len(self.states)), alone)

    def is_shared(self, now: float) -> None:
        """Others were seen to use this engine."""
        self.shared_until, self.private = now + SHARED_FOR, False

    def leave(self, slot: SlotId, now: float, state: SlotState = SlotState.DRAINING) -> None:
        """Its task is over for us. Unless it was seen to begin, it may be on its way to the free slot yet."""
        unbegun = self.states[slot] in (SlotState.LAUNCHED, SlotState.MAINTENANCE)
        late = LINGER if unbegun else 0.0
        self.move(slot, state, None, now)
        self.changed[slot] = now + late

    def disown(self) -> None:
        """A task ran unseen: in namespaces no free slot is sure to hold what it held."""
        for slot in self.idle:
            contents = self.shadow.slots[slot]
            if contents and contents.tokens.space:
                self.shadow.slots[slot] = SlotContents(opaque=contents.total, used=contents.used)

    def learn_files(self, snapshot: Snapshot) -> None:
        """The first file of a slot that must have had checkpoints shows whether this build writes them."""
        traits = self.traits
        if traits.files_carry is None and not traits.cuttable and len(snapshot.tokens) > traits.n_ubatch:
            self.shadow.traits = replace(traits, files_carry=bool(snapshot.checkpoints))

    def learn(self, traits: EngineTraits) -> None:
        """What its flags are, by what it did."""
        if traits is not self.traits:
            self.shadow.learn(traits)

    def ram_loaded(self, *, hit: bool) -> None:
        """Whether the RAM cache held what we expected of it."""
        self.ram_misses = 0 if hit else self.ram_misses + 1
        if self.ram_misses >= RAM_STRIKES:
            self.shadow.distrust_ram()
        elif not hit:
            self.shadow.forget_ram()
