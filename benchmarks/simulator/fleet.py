"""The simulator's sidecars: the real `Placement` on a virtual clock, with simulated engines.

This module does for the scheduler what a sidecar's runtime does, without waiting: events are posted in the
order of simulated time, effects become work of an engine, and their outcomes become events. Nothing is
rendered, and no answer is lost. An engine ends only when it has nothing to do.

Before a sidecar places a prompt, the shared store offers it the snapshot that saves most of the prompt, as
hints would. Snapshots take time on the network of the machine that sends or fetches them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from benchmarks.simulator.load import SimulatedTurn
from benchmarks.simulator.timed_engine import FINGERPRINT, EngineRates, Task, TimedEngine
from benchmarks.simulator.virtual_clock import VirtualClock
from slotkeeper.scheduler.effects import (
    Effect,
    Erase,
    Forward,
    Observe,
    Poisoned,
    Prefill,
    Report,
    Restore,
    Save,
    SaveMoment,
    SetTimer,
    Stop,
)
from slotkeeper.scheduler.events import (
    Arrived,
    EngineLost,
    EngineUp,
    Erased,
    Event,
    Finished,
    NextKnown,
    Observed,
    Planted,
    Rendered,
    ReplyKnown,
    Restored,
    Saved,
    SnapshotsChanged,
    Started,
    TimerFired,
)
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Snapshot, SnapshotId
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.snapshots.catalog import NEVER, Catalog
from slotkeeper.scheduler.types import ClientId, EngineId, Loading, Place, RequestId, SlotId, Tier

LOOK: Final = 0.001  # seconds that a GET /slots takes
NO_REPLY: Final = Tokens()


@dataclass(slots=True)
class SimulatedStore:
    """The snapshots of all machines. Over the budget, the least recently requested ones are dropped.

    If states can be cut anywhere, a longer snapshot of a conversation replaces the shorter one, unless other
    conversations begin with that as well.
    """

    budget: int  # bytes
    rates: EngineRates
    catalog: Catalog = field(default_factory=Catalog)
    size: int = 0
    _ages: dict[SnapshotId, int] = field(default_factory=dict)  # bytes; least recently requested first

    def put(self, snapshot: Snapshot, traits: EngineTraits) -> bool:
        """Add a snapshot; return whether it was new."""
        before = self.catalog.best(snapshot.tokens + NEVER, traits, lambda _: 0.0)
        if before is not None and before[1] >= len(snapshot.tokens):
            return False
        if before is not None and traits.cuttable and self._replaces(snapshot, before[0]):
            self._forget(before[0].id)
        cold = replace(snapshot, tier=Tier.COLD)
        self.catalog.put(cold)
        self._ages[cold.id] = cold.size
        self.size += cold.size
        while self.size > self.budget and len(self._ages) > 1:
            self._forget(next(iter(self._ages)))
        return True

    def offer(self, prompt: Tokens, traits: EngineTraits) -> Snapshot | None:
        """Return the snapshot that saves most of a prompt."""
        found = self.catalog.best(prompt, traits, self._price)
        if found is None:
            return None
        self._ages[found[0].id] = self._ages.pop(found[0].id)
        return found[0]

    def _price(self, snapshot: Snapshot) -> float:
        """Return the price of fetching and restoring a snapshot, in tokens of prefill."""
        rates = self.rates
        return snapshot.size * (1 / rates.network + 1 / rates.restore) * rates.prefill

    @staticmethod
    def _replaces(longer: Snapshot, shorter: Snapshot) -> bool:
        return not shorter.shared and longer.tokens.begins_with(shorter.tokens)

    def _forget(self, snapshot: SnapshotId) -> None:
        if taken := self.catalog.take(snapshot):
            self.size -= self._ages.pop(taken.id)


@dataclass(slots=True)
class Moved:
    """Bytes that were moved, and tokens that were computed in idle time."""

    saved: int = 0
    restored: int = 0
    sent: int = 0  # to the shared store
    fetched: int = 0  # from the shared store
    idle: int = 0  # prompt tokens computed in idle time


@dataclass(slots=True)
class Asked:
    """An unfinished request."""

    turn: SimulatedTurn
    asked_at: float
    ended: Callable[[], None]
    first: float = 0.0  # time of its first token
    stall: float = 0.0  # the longest time between two tokens of its answer


class SimulatedSidecar:
    """One sidecar and its engines, by name.

    `store`: the store that it shares with others, if any. `own_seconds`: what the sidecar itself takes to
    read and render a request. `user`: the client of all conversations; "": each has its own.
    """

    def __init__(
        self,
        engines: Mapping[str, EngineRates],
        traits: EngineTraits,
        limits: Limits,
        clock: VirtualClock,
        *,
        store: SimulatedStore | None,
        reports: Callable[[Report, Asked], None],
        own_seconds: float = 0.0,
        user: str = "",
    ) -> None:
        self.engines = {EngineId(name): TimedEngine(traits, rates, clock) for name, rates in engines.items()}
        self.placement = Placement(*self.engines, limits=limits)
        self.moved = Moved()
        self.in_flight = 0
        self._clock, self._store, self._reports = clock, store, reports
        self._traits, self._own_seconds, self._user = traits, own_seconds, user
        self._plants: dict[RequestId, Task] = {}
        self._asked: dict[RequestId, Asked] = {}
        self._files = self._counted = 0
        self._inbox: list[Event] = []
        self._name = next(iter(engines))
        for name in self.engines:
            self._post(EngineUp(at=clock.now, engine=name, traits=traits))
        for name, table in self.placement.tables.items() if store else ():
            # known in the simulation, so not estimated
            table.brings_at(self.engines[name].rates.network)

    def __repr__(self) -> str:
        return f"<SimulatedSidecar {self._name}, {self.in_flight} in flight>"

    # -- what a gateway sees -------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        return sum(engine.pending for engine in self.engines.values())

    def held(self, prompt: Tokens) -> int:
        return max(engine.best(prompt) for engine in self.engines.values())

    def ask(self, conversation: str, turn: SimulatedTurn, ended: Callable[[], None]) -> None:
        """Serve one request; `ended` is called when its answer has ended."""
        self._counted += 1
        request, now = RequestId(f"{conversation}/{self._counted}"), self._clock.now
        self._asked[request] = Asked(turn, now, ended)
        self.in_flight += 1
        client = ClientId(self._user or conversation)
        arrived = Arrived(at=now, request=request, client=client, hash_chain=turn.hash_chain)
        found = self._store.offer(turn.prompt, self._traits) if self._store else None
        if found is not None and found.id not in self.placement.catalog:
            self._post(SnapshotsChanged(at=now, snapshots=(found,)))
        self._post(arrived)
        prompt, boundaries = turn.prompt, turn.boundaries
        self._after(
            self._own_seconds,
            lambda at: Rendered(at=at, request=request, prompt=prompt, boundaries=boundaries),
        )

    def restart(self, seconds: float) -> None:
        """Kill the engines, which must be quiet; they are up again after these seconds."""
        for name, engine in self.engines.items():
            engine.kill()
            self._post(EngineLost(at=self._clock.now, engine=name, returns=True))
            self._later(self._clock.now + seconds, partial(self._up, name))

    def _up(self, engine: EngineId, at: float) -> Event:
        return EngineUp(at=at, engine=engine, traits=self._traits)

    # -- effects -----------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        """Post an event. Events that its effects cause at once are handled after it."""
        self._inbox.append(event)
        if len(self._inbox) > 1:
            return
        while self._inbox:
            for effect in self.placement.on(self._inbox[0]):
                self._perform(effect)
            self._inbox.pop(0)

    def _after(self, seconds: float, event: Callable[[float], Event]) -> None:
        if seconds:
            self._later(self._clock.now + seconds, event)
        else:
            self._post(event(self._clock.now))

    def _later(self, time: float, event: Callable[[float], Event]) -> None:
        self._clock.at(time, lambda: self._post(event(self._clock.now)))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Forward():
                self._forward(effect)
            case Prefill():
                self._plant(effect)
            case Stop(request=request):
                self._stop(request)
            case Save():
                self._save(effect)
            case Restore():
                self._restore(effect)
            case Erase():
                self._erase(effect)
            case _:
                self._attend(effect)

    def _attend(self, effect: Effect) -> None:
        """Perform an effect that is no work of an engine."""
        match effect:
            case Observe():
                self._clock.at(self._clock.now + effect.delay, lambda: self._look(effect.engine))
            case SetTimer(delay=delay):
                self._later(self._clock.now + delay, lambda at: TimerFired(at=at))
            case Report():
                self._reports(effect, self._asked.pop(effect.request))
            case Poisoned():
                raise AssertionError(f"the model of an engine contradicts itself: {effect}")
            case _:  # what a restore has proved changes nothing
                pass

    def _engine(self, place: Place) -> TimedEngine:
        return self.engines[place.engine]

    def _forward(self, effect: Forward) -> None:
        engine, asked, request = self.engines[effect.engine], self._asked[effect.request], effect.request

        def prefills() -> None:  # the engine tells its progress
            self._post(Started(at=self._clock.now, request=request, before_prefill=True))

        def began() -> None:
            asked.first = self._clock.now

        task = engine.run(
            asked.turn.prompt,
            asked.turn.reply,
            None if effect.slot is None else SlotId(effect.slot),
            prefills=prefills,
            began=began,
            ended=lambda: self._finished(request, task),
            hash_chain=asked.turn.hash_chain,
        )

    def _finished(self, request: RequestId, task: Task) -> None:
        asked, now, turn = self._asked[request], self._clock.now, self._asked[request].turn
        asked.stall = task.stall
        self.in_flight -= 1
        self._post(
            Finished(
                at=now,
                request=request,
                prompt_tokens=len(turn.prompt),
                cached=task.cached,
                generated=len(turn.reply),
                slot=task.slot,
                prefill_seconds=task.seconds,
                calls_tools=turn.calls_tools,
            )
        )
        known = (turn.prompt + turn.reply).cut(0, len(turn.prompt) + len(turn.reply) - 1)
        self._post(ReplyKnown(at=now, request=request, tokens=known))
        following = turn.following or known
        self._post(NextKnown(at=now, request=request, tokens=following, chance=turn.chance))
        asked.ended()

    def _plant(self, effect: Prefill) -> None:
        engine, request = self._engine(effect.place), effect.request
        plant = engine.run(
            effect.tokens, NO_REPLY, effect.place.slot, ended=lambda: self._planted(request, plant)
        )
        self._plants[request] = plant

    def _planted(self, request: RequestId, plant: Task) -> None:
        computed, now = plant.reached - plant.cached, self._clock.now
        if request not in self._asked:
            self.moved.idle += computed
        if self._plants.pop(request, None):  # otherwise it was stopped, and its answer was posted then
            self._post(Planted(at=now, request=request, computed=computed, seconds=plant.seconds))

    def _stop(self, request: RequestId) -> None:
        """Stop a plant; that is its answer, although the engine notices later."""
        if plant := self._plants.pop(request, None):
            plant.stopped = True
            self._post(Planted(at=self._clock.now, request=request, computed=None, stopped=True))

    def _save(self, effect: Save) -> None:
        request, place = effect.request, effect.place
        engine = self._engine(place)

        def written(size: int) -> None:
            now = self._clock.now
            self.moved.saved += size
            self._post(Saved(at=now, request=request, snapshot=None, written=True))
            kept = self._filed(effect, size, now)
            self._post(
                Saved(
                    at=now,
                    engine=place.engine,
                    request=request,
                    snapshot=kept,
                    tokens=kept.tokens if kept else None,
                    checkpoints=kept.checkpoints if kept else (),
                    seconds=engine.rates.file_seconds + size / engine.rates.save,
                )
            )

        engine.save(place.slot, written)

    def _erase(self, effect: Erase) -> None:
        def erased() -> None:
            self._post(Erased(at=self._clock.now, request=effect.request, ok=True))

        self._engine(effect.place).erase(effect.place.slot, erased)

    def _filed(self, effect: Save, size: int, now: float) -> Snapshot | None:
        """Return the snapshot of a slot; the shared store gets it after the time of the transfer."""
        place = effect.place
        engine = self._engine(place)
        contents = engine.shadow.slots[place.slot]
        if contents is None:
            return None
        self._files += 1
        kept = Snapshot(
            id=SnapshotId(f"{place.engine}/{self._files}"),
            fingerprint=FINGERPRINT,
            tokens=contents.tokens,
            size=size,
            checkpoints=tuple(checkpoint.at for checkpoint in contents.checkpoints),
            repaired=True,
            shared=effect.moment is SaveMoment.BOUNDARY,
            created=now,
            used=now,
        )
        if self._store is not None:
            self._clock.at(now + size / engine.rates.network, lambda: self._sent(kept))
        return kept

    def _sent(self, kept: Snapshot) -> None:
        if self._store is not None and self._store.put(kept, self._traits):
            self.moved.sent += kept.size

    def _restore(self, effect: Restore) -> None:
        """Load a snapshot. One in the shared store is fetched first, and is in the slot folder afterwards."""
        snapshot, now = effect.snapshot, self._clock.now
        if snapshot.tier is not Tier.COLD:
            self._load(effect)
            return
        self.moved.fetched += snapshot.size

        def fetched() -> None:
            hot = replace(snapshot, tier=Tier.HOT, used=self._clock.now)
            self._post(SnapshotsChanged(at=self._clock.now, snapshots=(hot,)))
            self._load(effect)

        network = self._engine(effect.place).rates.network
        self._clock.at(now + snapshot.size / network, fetched)

    def _load(self, effect: Restore) -> None:
        place, snapshot, engine = effect.place, effect.snapshot, self._engine(effect.place)
        self.moved.restored += snapshot.size
        seconds = engine.rates.file_seconds + snapshot.size / engine.rates.restore

        def loaded() -> None:
            at, done = self._clock.now, Loading.DONE
            self._post(Restored(at=at, request=effect.request, outcome=done, seconds=seconds))

        engine.restore(place.slot, snapshot, loaded)

    def _look(self, engine: EngineId) -> None:
        asked, views = self._clock.now, self.engines[engine].views()
        self._later(asked + LOOK, lambda at: Observed(at=at, asked=asked, engine=engine, slots=views))
