"""The slot table of one engine: which slots are free, which request owns each, and what GET /slots says.

Rule of this file: a slot is given out only while it is IDLE, and it becomes IDLE only after the engine has
really released it. Two tasks in one slot corrupt a running answer (engine.md T1).

`EngineTable.observed` takes in an answer of GET /slots: where requests run, what was lost, what is free.
Where the answer differs from our own account it is believed, but only if it is newer than what we know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Final

from slotkeeper.scheduler.effects import Released
from slotkeeper.scheduler.events import AdaptersSeen, Observed
from slotkeeper.scheduler.policies.adapters import set_in
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.rates import WORTH_A_FILE, Breaker, EngineWork, Expected, LinearTimes, Rates
from slotkeeper.scheduler.slots.engine_model import (
    EngineTraits,
    Known,
    SlotContents,
    Snapshot,
    SnapshotId,
    keeps_checkpoints,
    succeeds,
    wipes,
)
from slotkeeper.scheduler.slots.evidence import Doubts
from slotkeeper.scheduler.slots.shadow import EngineShadow
from slotkeeper.scheduler.types import NO_ROUTER, EngineId, ModelName, RequestId, SlotId, SlotView

CROWDED_FOR: Final = 60.0  # seconds that an engine counts as crowded after a conversation lost its slot
LULL: Final = 1.0  # seconds without a client's task, after which the engine no longer counts as crowded
SHARED_FOR: Final = 60.0  # seconds for which we expect more tasks of another client, once one was seen
UNSEEN: Final = 64  # finished requests whose slots GET /slots has not shown, while it does not answer
LINGER: Final = 0.1  # seconds in which a task may still begin after its client disconnected (engine.md 7)
STALE: Final = 0.05  # seconds: an older poll of a shared engine does not prove that a slot is free
UNSEEN_FOR: Final = 2.0  # seconds after which another program may have erased an idle slot
ADAPTERS_STALE: Final = 1.0  # seconds: another client of the engine may change its adapters unseen
RAM_STRIKES: Final = 2  # failed loads in a row after which we no longer rely on the engine's RAM cache
QUICK_LOOKS: Final = 6  # polls within 0.2 s, enough for a slot that is being released
SILENCE: Final = 1.3  # seconds: the engine notices a disconnect only after one second without requests (T10)


class SlotState(StrEnum):
    IDLE = "idle"
    LAUNCHED = "launched"  # our request was sent; the engine may not have begun it
    RUNNING = "running"  # the engine runs our request
    DRAINING = "draining"  # our request is over; the engine has not released the slot
    FOREIGN = "foreign"  # a task of another client of the engine
    MAINTENANCE = "tended"  # idle work of ours saves, restores or prefills it


@dataclass(slots=True)
class Orphan:
    """An unpinned request that ended before GET /slots showed its slot."""

    request: RequestId
    total: int | None  # tokens in its slot now; 0: it failed; None: its client disconnected, it may still run
    since: float  # a poll that was sent earlier says nothing about it
    slots: int = 1  # the most slots that it may hold
    sent: float = -inf  # when it was sent: a poll before that cannot show it


@dataclass(frozen=True, slots=True)
class Sent:
    """An unpinned request that GET /slots has not shown yet."""

    at: float
    slots: int  # slots that it takes at once: n > 1, or several prompts
    alone: bool = False  # no task may run before it: it could leave another space's state


@dataclass(frozen=True, slots=True)
class Maintenance(Expected):
    """Idle work that holds a slot."""

    becomes: Tokens | None  # what the slot holds afterwards; None: the same as before
    stalls: bool  # a file is read or written: the engine runs nothing else meanwhile, in any slot


@dataclass(slots=True)
class EngineTable:
    engine: EngineId
    shadow: EngineShadow
    rates: Rates = field(default_factory=Rates)
    model: ModelName = NO_ROUTER  # the model that it serves
    up: bool = True
    changing: bool = False  # its LoRA adapters are about to change: nothing begins there
    adapters_at: float = -inf  # when it was last asked which adapters it uses
    adapters_wanted: bool = False  # idle work waits for the answer
    asking: bool = False  # it is being asked
    # Idle work that was under way when the adapters changed unseen: its slots, and the ids of its saves.
    doubted: set[SlotId] = field(default_factory=set)
    suspect: set[RequestId] = field(default_factory=set)
    leaving: bool = False  # it is drained, or its router is about to unload it: nothing may begin there
    back_by: float = -inf  # after it was lost: until when to wait for it
    states: list[SlotState] = field(init=False)
    idle: list[SlotId] = field(init=False)  # the slots in state IDLE
    owners: list[RequestId | None] = field(init=False)
    changed: list[float] = field(init=False)  # when a slot's state last changed, by the events' clock
    begun: list[float] = field(init=False)  # when a slot's last task was sent or seen
    breaker: Breaker = field(default_factory=Breaker)
    work: EngineWork = field(default_factory=EngineWork)  # what it has begun for clients
    maintenance: dict[SlotId, Maintenance] = field(default_factory=dict)  # of slots in this state
    unsettled: dict[RequestId, Sent] = field(default_factory=dict)  # unpinned, not yet seen
    orphans: list[Orphan] = field(default_factory=list)
    left: dict[SlotId, RequestId] = field(default_factory=dict)  # slots of requests whose clients left
    freed: list[Released] = field(default_factory=list)  # of these, the ones to be reported
    awaited: bool = False  # a request waits for tasks on their way there to begin; later requests wait too
    shared_until: float = 0.0  # until when tasks of other clients are expected
    moves: int = 0  # changes after which waiting requests are placed again
    reset_at: float = -1.0  # when its slots were last lost: it came up, was lost or was restarted
    observed_at: float = -1.0  # when GET /slots was last answered
    observing: bool = False  # a poll is under way
    unseen: bool = False  # it came up, and GET /slots was not read since
    patience: int = 0  # polls in a row that changed nothing
    failures: int = 0  # polls in a row that failed
    proven: bool = False  # whether idle slots were seen to keep their contents (T6)
    look_again: bool = False  # what a slot holds is in doubt: poll again
    files_seen: bool = False  # a file has shown whether this build writes checkpoints to its files
    ram_misses: int = 0  # expected loads from the RAM cache that did not happen, in a row
    settled: dict[SlotId, SlotContents] = field(default_factory=dict)  # states that need no (further) save
    put_off: set[SlotId] = field(default_factory=set)  # slots settled only while the engine is crowded
    loaded: set[SlotId] = field(default_factory=set)  # a file was restored there, and no task ran since
    poisoned: set[SlotId] = field(default_factory=set)  # an answer from there was wrong: to be erased
    warmed: set[SnapshotId] = field(default_factory=set)  # snapshots that warming tried since it came up
    no_save_until: float = -1.0  # a save failed, and further ones would too
    no_wipe_until: float = -1.0  # an erase failed
    no_touch_until: float = -1.0  # a prefill of one token failed
    crowded_until: float = -1.0  # more conversations than slots until then
    doubts: Doubts = field(default_factory=Doubts)
    promised: dict[SlotId, int] = field(default_factory=dict)  # cells of a shared KV buffer, see `kv_pool`
    active_at: float = -1.0  # when a client's task last began or ended
    private: bool = False  # as far as we have seen, it has only computed for us
    unknown: int = 0  # the most tokens of unknown content that one of our tasks has left there

    def __post_init__(self) -> None:
        self.reset(self.traits)

    @property
    def traits(self) -> EngineTraits:
        return self.shadow.traits

    def __repr__(self) -> str:
        slots = " ".join(f"{s}:{state}" for s, state in enumerate(self.states))
        return f"<{self.engine} {'up' if self.up else 'down'} | {slots} | {len(self.unsettled)} unsettled>"

    def reset(self, traits: EngineTraits, now: float = -1.0) -> None:
        """Empty every slot: the engine is new, or was restarted."""
        self.shadow = EngineShadow(traits, self.shadow.sizes)
        self.shadow.sizes.take_header(traits.token_bytes, traits.checkpoint_bytes)
        self.rates.take_header(traits.token_bytes)
        self.states = [SlotState.IDLE] * traits.n_slots
        self.idle = self.in_state(SlotState.IDLE)
        self.owners = [None] * traits.n_slots
        self.changed = [now] * traits.n_slots
        self.begun = [now] * traits.n_slots
        self.unsettled.clear()
        self.forget_left()
        self.orphans.clear()
        self.work.served.clear()
        self.maintenance.clear()
        self.place_again()
        self.reset_at = now
        self.observed_at = -1.0
        self.settled.clear()
        self.put_off.clear()
        self.loaded.clear()
        self.poisoned.clear()
        self.doubted.clear()
        self.suspect.clear()
        self.changing, self.asking, self.adapters_at = False, False, now
        self.warmed.clear()
        self.no_save_until = self.crowded_until = -1.0
        self.promised.clear()
        self.ram_misses = 0
        self.proven = False
        self.doubts = Doubts()

    # -- questions ---------------------------------------------------------------------------------

    @property
    def failing(self) -> bool:
        """Whether requests fail there, so that others go to another engine if possible."""
        return self.breaker.resting or self.breaker.on_trial(busy=bool(self.work.served))

    def in_state(self, *states: SlotState) -> list[SlotId]:
        return [SlotId(slot) for slot, state in enumerate(self.states) if state in states]

    @property
    def own(self) -> int:
        """Number of slots that no foreign client uses."""
        return len(self.states) - len(self.in_state(SlotState.FOREIGN))

    @property
    def load(self) -> float:
        """Share of the slots that are in use."""
        return 1 - len(self.idle) / len(self.states)

    def open_for_pins(self, now: float) -> bool:
        """Whether a slot may be given out: no task is on its way to a slot that is unknown to us."""
        fresh = not self._shared_unseen(now)
        known = not self.unseen and not self.unsettled and not self.orphans
        return self.up and known and fresh and not (self.awaited or self.leaving) and self.adapters_known(now)

    def outdated(self, now: float) -> bool:
        """Whether GET /slots must be read before we count on what idle slots hold.

        Other programs erase idle slots, and an engine may fall asleep. So a poll is needed if the last one is
        some seconds old and more than a batch is at stake. Beside running requests a poll could wait for a
        batch, and an engine that does not answer is not asked again.
        """
        if now - self.observed_at <= UNSEEN_FOR or self.failures or not self.quiet or not self.up:
            return False
        return any(
            contents.total > self.traits.n_batch and now - self.changed[slot] > UNSEEN_FOR
            for slot in self.idle
            if (contents := self.shadow.slots[slot])
        )

    def needs_poll(self, now: float) -> bool:
        """Whether GET /slots must be read before a request that arrives now can be placed."""
        if not self.up or self.observing or self.failures:
            return False
        return self._shared_unseen(now) or self.outdated(now)

    def _shared_unseen(self, now: float) -> bool:
        """Whether another client may have begun a task since the last poll."""
        return now < self.shared_until and now - self.observed_at > STALE

    def open_for_unpinned(self, now: float) -> bool:
        """Whether an unpinned task may be sent. The engine may put it into any slot that it thinks free."""
        return self.open_for_pins(now) and not self.pin_on_its_way(now)

    def open_for(self, now: float, *, pinned: bool) -> bool:
        return self.open_for_pins(now) if pinned else self.open_for_unpinned(now)

    def pin_on_its_way(self, now: float) -> bool:
        """Whether a pinned task may still arrive in a slot that the engine thinks free."""
        rests = len(self.idle) == len(self.states)
        ours = not rests and (SlotState.LAUNCHED in self.states or SlotState.MAINTENANCE in self.states)
        return ours or max(self.changed, default=now) > now

    def adapters_known(self, now: float) -> bool:
        """Whether it is known which adapters count for requests that name none."""
        return not self.traits.adapters or (not self.changing and now - self.adapters_at <= ADAPTERS_STALE)

    def crowded(self, now: float) -> bool:
        return now < self.rests_at

    @property
    def rests_at(self) -> float:
        """When the engine stops being crowded, if no request comes until then."""
        return min(self.crowded_until, self.active_at + LULL)

    def stalled(self, now: float) -> float:
        """Seconds until the engine can begin a task: it is reading or writing a file."""
        return max((one.left(now) for one in self.maintenance.values() if one.stalls), default=0.0)

    def overdue(self, now: float) -> int:
        """A number that changes when requests that wait for a slot in maintenance need a new decision."""
        return sum(one.overdue(now) for one in self.maintenance.values())

    def overdue_at(self, now: float) -> float:
        """When that number will change; infinite if no slot is in maintenance."""
        return min((one.overdue_at(now) for one in self.maintenance.values()), default=inf)

    def may_save(self, now: float) -> bool:
        return self.traits.snapshots and now >= self.no_save_until

    def may_wipe(self, now: float) -> bool:
        return self.traits.slot_files and now >= self.no_wipe_until

    @property
    def quiet(self) -> bool:
        """Whether nothing of ours runs there or is on its way there."""
        at_work = {SlotState.LAUNCHED, SlotState.RUNNING, SlotState.MAINTENANCE}
        return not self.unsettled and not self.orphans and at_work.isdisjoint(self.states)

    @property
    def resting(self) -> bool:
        """Whether no client's task holds a slot; idle work may."""
        return all(state in (SlotState.IDLE, SlotState.MAINTENANCE) for state in self.states)

    @property
    def on_their_way(self) -> bool:
        """Whether a task may yet begin there that was sent before."""
        begins = {SlotState.LAUNCHED, SlotState.MAINTENANCE}
        return bool(self.unsettled) or not begins.isdisjoint(self.states)

    @property
    def at_rest(self) -> bool:
        """Whether no task at all runs there or is on its way there: no client's, and no idle work."""
        idle = all(state is SlotState.IDLE for state in self.states)
        return idle and not (self.unseen or self.unsettled or self.orphans)

    @property
    def serving(self) -> bool:
        """Whether a client of ours waits for an answer from it."""
        return bool(self.unsettled) or SlotState.LAUNCHED in self.states or SlotState.RUNNING in self.states

    def open_for_anything(self, now: float) -> bool:
        """Whether it has room for one more task in a slot that the engine chooses."""
        room = len(self.idle) > sum(sent.slots for sent in self.unsettled.values())
        alone = any(sent.alone for sent in self.unsettled.values())
        return self.up and room and not alone and not self.awaited and self.open_for_bypass(now)

    def open_for_bypass(self, now: float) -> bool:
        """Whether a bypassing task may be sent: not while an orphan may run, as the two could be confused."""
        over = all(orphan.total is not None for orphan in self.orphans)
        return over and not self.leaving and self.adapters_known(now) and not self.pin_on_its_way(now)

    def watch(self, *, waiting: bool, now: float) -> float | None:
        """Seconds until the next poll of GET /slots; None if nothing depends on it."""
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
        if waiting and self.outdated(now):
            return 0.0
        if self.look_again:
            return 0.01
        if SlotState.DRAINING in self.states:
            return 0.01 * 1.5**self.patience if self.patience < QUICK_LOOKS else SILENCE
        if waiting and self._shared_unseen(now):
            return 0.0
        return 0.25 if SlotState.FOREIGN in self.states else None

    def idle_beside(self, slot: SlotId) -> list[SlotId]:
        """The other idle slots."""
        return [other for other in self.idle if other != slot]

    def works_for(self, request: RequestId) -> bool:
        """Whether the engine may still work for a request whose client left."""
        unseen = any(one.request == request and one.total is None for one in self.orphans)
        return unseen or request in self.left.values()

    def held_up_at_most(self, request: RequestId, now: float) -> float:
        """Return the seconds for which this request may wait for a batch with others; infinite: unknown."""
        if self.maintenance:
            return inf
        if self.work.served.keys() <= {request}:
            return 0.0
        ahead = self.work.ahead(now, {request})
        return ahead + self.rates.pass_seconds if self.rates.prefill.measured else inf

    def file_bytes(self, tokens: int, checkpoints: int) -> int:
        """Return the estimated bytes of a file of such a state as the engine writes it."""
        return self.shadow.sizes.of(tokens, 0 if self.traits.files_carry is False else checkpoints)

    def bytes_of(self, contents: SlotContents) -> int:
        """Return the estimated bytes of a file of these contents."""
        return self.file_bytes(contents.total, len(contents.checkpoints))

    def save_seconds(self, contents: SlotContents) -> float:
        """Return the estimated seconds of a save, in which the engine does nothing else."""
        return self.rates.writing.seconds(self.bytes_of(contents))

    # -- changes: the engine ------------------------------------------------------------------------

    def came_up(self, traits: EngineTraits, now: float, *, fresh: bool, leaving: bool) -> None:
        """Record that it answers: no slot is given out before GET /slots has shown them.

        `fresh`: it has computed nothing yet. `leaving`: it is drained.
        """
        self.up, self.leaving = True, leaving
        self.reset(traits, now)
        self.breaker.worked()
        self.unseen = True
        self.private, self.unknown = fresh, 0
        if not fresh:
            self.shadow.mixed_before_us()
            self.shadow.used_before_us()
            self.shared_until = now + SHARED_FOR

    def went_down(self, now: float, *, back_by: float) -> None:
        """Record that it was lost with all that its slots held. `back_by`: until when to wait for it."""
        self.up, self.back_by = False, back_by
        self.reset(self.traits, now)

    def brings_at(self, bytes_per_second: float) -> None:
        """Set the speed at which files come to its folder, until one has shown it."""
        self.rates.bringing = LinearTimes(bytes_per_second)

    def leaves(self, *, leaving: bool) -> None:
        """Record that it is drained or about to be unloaded, or that it stays."""
        self.leaving = leaving
        self.place_again()

    def place_again(self) -> None:
        """Have waiting requests placed again: something has changed that may concern them."""
        self.moves += 1

    def request_failed(self, now: float, *, broken: bool) -> None:
        """Record that a request failed there. `broken`: it got no answer."""
        self.breaker.failed(now, broken=broken)
        self.place_again()

    def computed_for_others(self) -> None:
        """Record that it may have states of which we do not know for whom they were computed."""
        self.private = False

    def left_unknown(self, tokens: int) -> None:
        """Record that one of our tasks left so many tokens there whose ids we do not know."""
        self.unknown = max(self.unknown, tokens)

    def round_begins(self, now: float) -> None:
        """Find again which requests wait for it; let it be tried again if it has rested after failures."""
        self.awaited, self.work.awaiting = False, 0
        if self.breaker.rested(now):
            self.place_again()

    def hold_back(self) -> None:
        """Keep later requests away, until the next round: one waits for tasks on their way there to begin."""
        self.awaited = True

    def waited_for(self) -> None:
        """Record that a request waits for one of its slots although other engines have free ones."""
        self.work.awaiting += 1

    def polls(self) -> None:
        """Record that GET /slots is being read."""
        self.observing = True

    def look(self) -> None:
        """Have GET /slots read again soon: a slot may hold something else than we think."""
        self.look_again = True

    def poll_failed(self) -> None:
        """Record that GET /slots did not answer: slots are given out without it."""
        self.observing = self.unseen = False
        self.failures += 1

    def saves_rest(self, until: float) -> None:
        """Record that a save failed, and that further ones would fail until then."""
        self.no_save_until = until

    def erasures_rest(self, until: float) -> None:
        """Record that no slot can be erased until then."""
        self.no_wipe_until = until

    def touches_rest(self, until: float) -> None:
        """Record that no prefill of one token succeeds until then."""
        self.no_touch_until = until

    def tried_to_warm(self, snapshot: SnapshotId) -> None:
        """Record that warming has considered this file since the engine came up."""
        self.warmed.add(snapshot)

    def forget_warmed(self, *, but: Iterable[SnapshotId]) -> None:
        """Forget the files that warming has considered, except for these, which still exist."""
        self.warmed.intersection_update(but)

    def take_up(self, now: float) -> None:
        """Reconsider the saves that were put off, once the engine is no longer crowded."""
        if not self.crowded(now):
            for slot in self.put_off:
                self.settled.pop(slot, None)
            self.put_off.clear()

    # -- changes: its LoRA adapters ------------------------------------------------------------------

    def wants_adapters(self) -> None:
        """Record that idle work waits to know which adapters it uses."""
        self.adapters_wanted = True

    def asks_adapters(self) -> None:
        """Record that it is being asked for its adapters."""
        self.asking, self.adapters_wanted = True, False

    def adapters_change(self) -> None:
        """Record that a client changes its adapters through us: nothing begins until that is done."""
        self.changing = True

    def adapters_seen(self, seen: AdaptersSeen) -> float | None:
        """Take in which adapters it uses.

        Returns the time since when states may have been computed with others than we thought; None: no state.
        """
        self.place_again()
        if seen.announced:
            self.changing = False
        else:
            self.asking = False
        if seen.asked < max(self.reset_at, self.adapters_at) or self.changing:
            return None
        since, self.adapters_at = self.adapters_at, seen.asked
        if seen.adapters is None or seen.adapters == self.traits.adapters:
            return None
        self.shadow.adapters_changed(replace(self.traits, adapters=seen.adapters))
        return None if seen.exact else since

    def doubt(self, adapters: str, since: float, saves: Iterable[RequestId]) -> None:
        """Discard what slots got since then with these adapters; what idle work does there, when it ends.

        `saves`: the files that are being written or checked.
        """
        for slot, contents in enumerate(self.shadow.slots):
            place = SlotId(slot)
            if self.states[place] is SlotState.MAINTENANCE:
                self.doubted.add(place)
            elif contents and self.changed[place] >= since and set_in(contents.tokens.space) == adapters:
                self.shadow.doubted(place)
        self.suspect = set(saves)

    # -- changes: a slot ---------------------------------------------------------------------------

    def crowd(self, slot: SlotId, hash_chain: Sequence[bytes], now: float) -> None:
        """Record that a slot is given out. If another conversation loses it, the engine counts as crowded."""
        contents = self.shadow.slots[slot]
        if contents and contents.total >= WORTH_A_FILE and not succeeds(hash_chain, contents):
            self.crowded_until = now + CROWDED_FOR

    def tends(self, slot: SlotId, step: Maintenance) -> None:
        """Record that a step of idle work begins in a slot."""
        self.maintenance[slot] = step

    def needs_no_save(self, slot: SlotId, contents: SlotContents) -> None:
        """Record that idle work has nothing more to do for what a slot holds."""
        self.settled[slot] = contents

    def puts_off_save(self, slot: SlotId) -> None:
        """Record that idle work in a slot waits until the engine is no longer crowded."""
        self.put_off.add(slot)

    def restored(self, slot: SlotId, snapshot: Snapshot, now: float) -> None:
        """Record that a file was restored into a slot: GET /slots may show nothing of it."""
        self.shadow.restore(slot, snapshot, now)
        self.loaded.add(slot)

    def restored_unseen(self, slot: SlotId, tokens: int, now: float) -> None:
        """Record that a file of so many unknown tokens was restored into a slot, or may have been."""
        self.shadow.restored_unseen(slot, tokens, now)
        self.loaded.add(slot)

    def purged(self, slot: SlotId) -> None:
        """Record that the engine has emptied an idle slot, since another one needed its cells."""
        self.shadow.erase(slot)
        self.settled.pop(slot, None)
        self.look()

    def poison(self, slot: SlotId) -> None:
        """Forget what a slot holds, and have it erased: an answer from it was wrong."""
        self.shadow.erase(slot)
        self.poisoned.add(slot)
        self.look()

    def take_poisoned(self) -> list[SlotId]:
        """Return the idle slots that must be erased now, unless another task has left its own state there."""
        idle = self.poisoned.intersection(self.idle)
        self.poisoned -= idle
        return [slot for slot in sorted(idle) if self.shadow.slots[slot] is None]

    def client_acted(self, slot: SlotId, left: int | None, now: float) -> None:
        """Record that a client's own action on a slot has ended, which ran no task.

        `left`: the tokens of the file that it restored; 0: it erased the slot; None: the slot is unchanged.
        """
        if left is not None:
            self.shadow.erase(slot)
            self.loaded.discard(slot)
            self.settled.pop(slot, None)
        if left:  # a file of the client's, with unknown contents
            self.computed_for_others()
            self.restored_unseen(slot, left, now)
        self.move(slot, SlotState.IDLE, None, now)

    def promise(self, slot: SlotId, cells: int) -> None:
        """Promise cells of a shared KV buffer to a request, until its slot is free."""
        self.promised[slot] = cells

    def move(self, slot: SlotId, state: SlotState, owner: RequestId | None, now: float) -> None:
        was_idle = self.states[slot] is SlotState.IDLE
        if state is SlotState.LAUNCHED or (was_idle and state not in (SlotState.IDLE, SlotState.MAINTENANCE)):
            self.begun[slot] = now
        if state in (SlotState.RUNNING, SlotState.FOREIGN):
            self.loaded.discard(slot)
        if state is SlotState.FOREIGN:
            self.shadow.ran_with(slot, None)
        if state is SlotState.IDLE:
            self.promised.pop(slot, None)
            if slot in self.doubted:
                self.doubted.discard(slot)
                self.shadow.doubted(slot)
        if SlotState.MAINTENANCE not in (state, self.states[slot]):
            if state is not SlotState.IDLE and self.resting and self.active_at >= 0:
                self.rates.rests.append(now - self.active_at)
            self.active_at = now
        if state is not SlotState.MAINTENANCE:
            self.maintenance.pop(slot, None)
        if state not in (SlotState.DRAINING, SlotState.FOREIGN):
            self.frees(slot, None)
        self.states[slot] = state
        self.idle = self.in_state(SlotState.IDLE)
        self.owners[slot] = owner
        self.place_again()
        self.changed[slot] = now
        self.patience = 0

    def send(self, request: RequestId, copies: int, now: float, *, alone: bool = False) -> None:
        """Record that a request was sent unpinned: GET /slots must show where it runs."""
        self.unsettled[request] = Sent(now, min(copies, len(self.states)), alone)

    def ran_no_task(self, request: RequestId) -> None:
        """Record that an unpinned request has ended that ran no task: a client's action on a slot."""
        self.unsettled.pop(request, None)
        self.look()

    def ran_in(self, slot: SlotId, request: RequestId, now: float) -> None:
        """Record in which slot an unpinned request ran, as its answer says."""
        sent = self.unsettled.pop(request)
        self.move(slot, SlotState.RUNNING, request, now)
        if sent.slots > 1:
            self.disown()

    def ended_early(self, request: RequestId, copies: int, total: int | None, now: float) -> None:
        """Record that a request ended there before the engine was known, and left so many tokens."""
        self.orphans.append(Orphan(request, total, now, min(copies, len(self.states))))

    def ended_unseen(self, request: RequestId, total: int | None, now: float) -> bool:
        """Record that an unpinned request ended before GET /slots showed its slot.

        Returns whether another such request was given up for it.
        """
        sent = self.unsettled.pop(request)
        self.orphans.append(Orphan(request, total, now, sent.slots, sent.at))
        over = [orphan for orphan in self.orphans if orphan.total is not None][:-UNSEEN]
        for orphan in over:  # other tasks have run in its slot since, so the slot cannot be determined
            self.orphans.remove(orphan)
        if over:
            self.disown()
        return bool(over)

    def client_left_unseen(self, request: RequestId, now: float) -> None:
        """Record that the client of an unpinned request disconnected before GET /slots showed its slot."""
        sent = self.unsettled.pop(request)
        self.orphans.append(Orphan(request, None, now + LINGER, sent.slots, sent.at))

    def client_left(self, slot: SlotId, request: RequestId, now: float, *, resumable: bool) -> None:
        """Record that the client of the request in a slot disconnected. A resumable stream goes on."""
        self.leave(slot, now, SlotState.FOREIGN if resumable else SlotState.DRAINING)
        self.left[slot] = request

    def take_freed(self) -> list[Released]:
        """Remove and return what is to be reported of requests whose clients had left."""
        freed, self.freed = self.freed, []
        return freed

    def is_shared(self, now: float) -> None:
        """Record that another client uses this engine."""
        self.shared_until, self.private = now + SHARED_FOR, False

    def frees(self, slot: SlotId, held: int | None) -> None:
        """Report that a slot is free which a request kept after its client had left. `held` is in tokens."""
        if (request := self.left.pop(slot, None)) is not None:
            self.freed.append(Released(request=request, held=held))

    def ended(self, orphan: Orphan) -> None:
        """Drop an orphan whose task has ended, or never began."""
        self.orphans.remove(orphan)
        if orphan.total is None:
            self.freed.append(Released(request=orphan.request, held=None))

    def forget_left(self) -> None:
        """Report that the engine works for no client that has left: it has ended, or is no longer ours."""
        for slot in tuple(self.left):
            self.frees(slot, None)
        for orphan in tuple(self.orphans):
            self.ended(orphan)

    def leave(self, slot: SlotId, now: float, state: SlotState = SlotState.DRAINING) -> None:
        """Give up a slot. A task that was not seen to begin may still be on its way to it."""
        unbegun = self.states[slot] in (SlotState.LAUNCHED, SlotState.MAINTENANCE)
        late = LINGER if unbegun else 0.0
        self.move(slot, state, None, now)
        self.changed[slot] = now + late

    def disown(self) -> None:
        """Record that a task ran in an unknown idle slot: any of them may hold another space's state now."""
        for slot in self.idle:
            self.shadow.ran_with(slot, None)
            contents = self.shadow.slots[slot]
            if contents and self.shadow.isolates(contents.tokens.space):
                self.shadow.doubted(slot)

    # -- changes: what was learned ------------------------------------------------------------------

    def learn_files(self, snapshot: Snapshot) -> None:
        """Learn from the first long file whether this build writes a slot's checkpoints."""
        traits = self.traits
        self.shadow.sizes.saw(len(snapshot.tokens), len(snapshot.checkpoints), snapshot.size)
        if self.files_seen or not keeps_checkpoints(traits) or len(snapshot.tokens) <= traits.n_ubatch:
            return
        self.files_seen = True
        if traits.files_carry is not False:
            self.learn(replace(traits, files_carry=bool(snapshot.checkpoints)))

    def learn(self, traits: EngineTraits) -> None:
        """Take over flags that the engine's behaviour has shown."""
        if traits is not self.traits:
            self.shadow.learn(traits)

    def ram_loaded(self, *, hit: bool) -> None:
        """Record whether the RAM cache held a state, as we expected."""
        self.ram_misses = 0 if hit else self.ram_misses + 1
        if self.ram_misses >= RAM_STRIKES:
            self.shadow.distrust_ram()
        elif not hit:
            self.shadow.forget_ram()

    def observed(self, seen: Observed) -> dict[RequestId, SlotId]:
        """Take in one answer of GET /slots. Returns the unpinned requests whose slot is now known."""
        self.observing = self.look_again = False
        self.failures = 0
        self.unseen = self.unseen and seen.asked < self.reset_at
        self.observed_at = seen.at
        self.patience += 1
        settled: dict[RequestId, SlotId] = {}
        _not_shared(self, seen.slots)
        if _wiped(self, seen):
            return settled
        _whose(self, seen, settled)
        for view in seen.slots:
            if _tells(self, view, seen):
                _merge(self, view, seen.at)
        _adopt(self, seen, settled)
        return settled


# -- an answer of GET /slots ------------------------------------------------------------------------------

DRAFTED: Final = 64  # most tokens of one draft: those accepted beyond a reply's end stay in the slot
COUNT_SLIP: Final = 2  # tokens by which our count of a slot may differ although our ids are right


def _not_shared(table: EngineTable, views: Iterable[SlotView]) -> None:
    """Learn that slots share no buffer if idle ones together hold more tokens than one may hold.

    A busy slot counts tokens for which the engine has yet to find cells.
    """
    traits = table.traits
    if not traits.unified or traits.known("unified") is Known.FLAGS or not traits.n_ctx:
        return
    if sum(view.held or 0 for view in views if not view.busy) > traits.n_ctx:
        table.learn(traits.corrected(Known.HELD, unified=False))


def _merge(table: EngineTable, view: SlotView, now: float) -> None:
    state, slot = table.states[view.slot], view.slot
    if view.busy:
        if state is SlotState.LAUNCHED:
            table.move(slot, SlotState.RUNNING, table.owners[slot], now)
    elif state in (SlotState.DRAINING, SlotState.FOREIGN):
        _correct(table, view, now)
        table.frees(slot, view.held)
        table.move(slot, SlotState.IDLE, None, now)
    elif state is SlotState.IDLE and not table.orphans:
        _correct(table, view, now)


def _whose(table: EngineTable, seen: Observed, settled: dict[RequestId, SlotId]) -> None:
    """Assign busy slots that we thought idle: to our unpinned requests, or to other clients' tasks.

    Nothing is concluded until all of our unpinned requests must be among them. A single request is identified
    by any of its tasks. But if no slot is free, some of its prompts may still wait in the engine's queue
    (engine.md 6).
    """
    busy = [view.slot for view in sorted(_thought_idle(table, seen, busy=True), key=_age)]
    left = [orphan for orphan in table.orphans if orphan.total is None]
    if not _all_among(len(busy), table, seen, left):
        return
    copies = 0  # slots still to come of the same request: its tasks are numbered in sequence
    for slot in busy:
        if copies:
            copies -= 1
            table.shadow.lost(slot)
            table.move(slot, SlotState.FOREIGN, None, seen.at)
        elif table.unsettled:
            request = next(iter(table.unsettled))
            copies = table.unsettled.pop(request).slots - 1
            settled[request] = slot
            table.move(slot, SlotState.RUNNING, request, seen.at)
        elif left:
            orphan = left.pop(0)
            table.orphans.remove(orphan)
            copies = orphan.slots - 1
            table.shadow.lost(slot)
            table.move(slot, SlotState.DRAINING, None, seen.at)
            table.left[slot] = orphan.request
        else:
            table.is_shared(seen.at)
            table.shadow.lost(slot)
            table.move(slot, SlotState.FOREIGN, None, seen.at)
    if copies:  # they have ended already: a slot that we thought idle may hold what one of them left
        table.disown()


def _all_among(busy: int, table: EngineTable, seen: Observed, left: Sequence[Orphan]) -> bool:
    """Whether all of our unpinned requests must be in the busy slots.

    `left`: those whose client disconnected.
    """
    late = [orphan for orphan in table.orphans if _not_shown(orphan, seen)]
    sent_at = [*(sent.at for sent in table.unsettled.values()), *(orphan.sent for orphan in left)]
    unseen = any(at > seen.asked for at in sent_at)
    if unseen or any(orphan.total is not None for orphan in late):
        return False
    ours: list[Sent | Orphan] = [*table.unsettled.values(), *late]
    by_any_task = len(ours) <= 1 and not _full(seen)
    return busy >= (len(ours) if by_any_task else sum(one.slots for one in ours))


def _not_shown(orphan: Orphan, seen: Observed) -> bool:
    """Whether this poll says nothing about an orphan: it is too old, or tasks may be queued in the engine."""
    return orphan.since > seen.asked or (orphan.total is None and _full(seen))


def _thought_idle(table: EngineTable, seen: Observed, *, busy: bool) -> list[SlotView]:
    """Return the slots that we thought idle and that the poll shows as busy, or as not busy."""
    return [
        view
        for view in seen.slots
        if view.busy is busy and _tells(table, view, seen) and table.states[view.slot] is SlotState.IDLE
    ]


def _tells(table: EngineTable, view: SlotView, seen: Observed) -> bool:
    """Whether this poll is newer than what we know of the slot."""
    return view.slot < len(table.states) and table.changed[view.slot] <= seen.asked


def _correct(table: EngineTable, view: SlotView, now: float) -> None:
    """Correct our account of a free slot by the engine's count."""
    contents = table.shadow.slots[view.slot]
    if _unrun(table, view):
        return
    count = view.held or 0
    if count == 0 and wipes(table.traits):
        table.shadow.moved(view.slot)
    elif contents is None or count == 0:
        table.shadow.observed(view.slot, SlotContents(opaque=count, used=now) if count else None)
    else:
        table.shadow.observed(view.slot, _as_counted(table, contents, count, now))


def _as_counted(table: EngineTable, contents: SlotContents, count: int, now: float) -> SlotContents:
    """Return the contents of a slot that has `count` tokens by the engine's count."""
    ours, unknown = contents.total, SlotContents(opaque=count, used=now)
    if count == ours and not contents.rough:
        return contents
    if table.shadow.isolates(contents.tokens.space) and not contents.rough and count < ours - COUNT_SLIP:
        return unknown  # perhaps of another space
    if contents.rough or count <= ours + COUNT_SLIP:
        return contents.shrunk(count)
    if table.traits.speculative and count <= ours + DRAFTED:  # the reply ended within an accepted draft
        return replace(contents, opaque=contents.opaque + count - ours)
    table.is_shared(now)  # longer than we left it: another client used the slot
    return unknown


def _adopt(table: EngineTable, seen: Observed, settled: dict[RequestId, SlotId]) -> None:
    """Find the slots of requests that ended before they were seen, by the number of tokens left there."""
    due = [orphan for orphan in table.orphans if not _not_shown(orphan, seen)]
    if not due:
        return
    free = _thought_idle(table, seen, busy=False)
    for orphan in due:
        table.ended(orphan)
        newest = max(_fitting(table, free, orphan.total), key=_age, default=None)
        if newest:
            settled[orphan.request] = newest.slot
            free.remove(newest)
        if newest is None or orphan.slots > 1:
            table.disown()
    if not table.orphans:
        for view in free:
            _correct(table, view, seen.at)


def _fitting(table: EngineTable, free: Iterable[SlotView], total: int | None) -> Iterator[SlotView]:
    """Yield the slots that hold as many tokens as a request left behind, or those of a draft more."""
    more = DRAFTED if table.traits.speculative else COUNT_SLIP
    return (view for view in free if total and -COUNT_SLIP <= (view.held or 0) - total <= more)


def _full(seen: Observed) -> bool:
    """Whether no slot is free, so that tasks may wait in the engine's queue, even of disconnected clients."""
    return all(view.busy for view in seen.slots)


def _wiped(table: EngineTable, seen: Observed) -> bool:
    """Whether slots lost what we left there: all of them (a restart), or all but the last to run (T6)."""
    views = {v.slot: v for v in seen.slots}
    believed = _believed(table, seen, views)
    empty, kept = _parted(believed, views)
    if any(_outlived_a_task(table, slot, views) for slot in kept):
        table.proven = True
    if not empty or (kept and kept != [max(believed, key=lambda slot: table.changed[slot])]):
        return False
    if any(v.held or v.busy for v in seen.slots):
        if not (table.proven or table.traits.unified):
            table.shadow.assume_unified(empty)  # each task moves idle slots to the RAM cache, and clears them
        return False
    return _restarted(table, seen)


def _restarted(table: EngineTable, seen: Observed) -> bool:
    """Whether all slots are empty because the engine was restarted: no task of ours was running.

    If so, the table is reset.
    """
    if any(state is not SlotState.IDLE for state in table.states):
        return False
    sent = dict(table.unsettled)  # these may have been sent to the new process
    table.reset(table.traits, seen.asked)
    table.unsettled.update(sent)
    return True


def _parted(slots: Iterable[SlotId], views: Mapping[SlotId, SlotView]) -> tuple[list[SlotId], list[SlotId]]:
    """Divide slots into those that are empty now, and those that are not."""
    parted: tuple[list[SlotId], list[SlotId]] = [], []
    for slot in slots:
        parted[bool(views[slot].busy or views[slot].held)].append(slot)
    return parted


def _believed(table: EngineTable, seen: Observed, views: Mapping[SlotId, SlotView]) -> list[SlotId]:
    """Return the idle slots whose contents this poll should show."""
    return [
        slot
        for slot in table.idle
        if table.shadow.slots[slot] and table.changed[slot] <= seen.asked and slot in views
        if not _unrun(table, views[slot])
    ]


def _outlived_a_task(table: EngineTable, kept: SlotId, views: Mapping[SlotId, SlotView]) -> bool:
    """Whether another slot began a task after this one got its contents."""
    return any(
        table.begun[slot] > table.changed[kept]
        and (table.states[slot] is not SlotState.LAUNCHED or views[slot].busy)
        for slot in views
        if slot != kept and slot < len(table.states)
    )


def _unrun(table: EngineTable, view: SlotView) -> bool:
    """Whether a slot got a file and has not run a task since: GET /slots shows nothing (engine.md 1.7)."""
    return view.held is None and view.slot in table.loaded


def _age(view: SlotView) -> int:
    """Return the number of a slot's last task: tasks are numbered in the order in which they arrive."""
    return -1 if view.task is None else view.task
