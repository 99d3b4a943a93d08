"""Random traffic to the models of a router: every request is served, and swaps lose nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.scheduler.effects import (
    Effect,
    Erase,
    Forward,
    LoadModel,
    Observe,
    Prefill,
    Restore,
    Save,
    SetTimer,
    UnloadModel,
)
from slotkeeper.scheduler.events import (
    Arrived,
    EngineLost,
    EngineUp,
    Erased,
    Event,
    Finished,
    ModelsListed,
    Observed,
    Planted,
    Rendered,
    Restored,
    Saved,
    Started,
    TimerFired,
)
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.policies.router import ModelStatus, ModelView
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory, Snapshot, SnapshotId
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import ClientId, EngineId, Loading, ModelName, RequestId, SlotId, SlotView

ROUTER = EngineId("r")
MODELS = ("a", "b", "c")
STEPS = 60
PATIENCE = 2000  # steps in which all remaining requests must be served


@dataclass
class World:
    """A router and its models, whose calls and answers end in any order."""

    random: Random
    most: int  # 0: the router itself chooses which models leave for another
    stay: frozenset[tuple[str, str]] = frozenset()  # pairs that it then keeps loaded together
    placement: Placement = field(init=False)
    now: float = 100.0
    status: dict[str, ModelStatus] = field(
        default_factory=lambda: dict.fromkeys(MODELS, ModelStatus.UNLOADED)
    )
    running: dict[RequestId, EngineId] = field(default_factory=dict)
    arrived: dict[RequestId, str] = field(default_factory=dict)
    served: set[RequestId] = field(default_factory=set)
    saved: dict[SnapshotId, str] = field(default_factory=dict)
    due: list[Effect] = field(default_factory=list)  # effects that are answered later
    alarm: float | None = None

    def __post_init__(self) -> None:
        self.status = dict.fromkeys(MODELS, ModelStatus.UNLOADED)
        self.placement = Placement(ROUTER, limits=Limits(swap_wait=1.0))
        self.tell(self.listing())

    def listing(self) -> ModelsListed:
        views = tuple(
            ModelView(engine=EngineId(name), name=ModelName(name), status=status)
            for name, status in self.status.items()
        )
        chooses = not self.most
        return ModelsListed(at=self.now, router=ROUTER, models=views, most=self.most, chooses=chooses)

    def tell(self, event: Event) -> None:
        for effect in self.placement.on(event):
            self.take(effect)

    def take(self, effect: Effect) -> None:
        match effect:
            case Forward():
                assert self.status[effect.engine] is ModelStatus.LOADED
                assert self.arrived[effect.request] == effect.engine
                assert effect.request not in self.running
                self.running[effect.request] = effect.engine
                self.served.add(effect.request)
            case UnloadModel():
                assert effect.engine not in self.running.values(), "an answer would be broken off"
                self.due.append(effect)
            case LoadModel():
                loaded = sum(status is not ModelStatus.UNLOADED for status in self.status.values())
                assert not self.most or loaded < self.most
                assert not set(effect.aside) & set(self.running.values()), "an answer would be broken off"
                self.status[effect.engine] = ModelStatus.LOADING
                self.due.append(effect)
            case Save() | Restore() | Prefill() | Erase() | Observe():
                self.due.append(effect)
            case SetTimer():
                self.alarm = self.now + effect.delay

    # -- events ------------------------------------------------------------------------------------

    def asks(self, model: str) -> None:
        request = RequestId(f"{len(self.arrived)}")
        self.arrived[request] = model
        client = ClientId(self.random.choice("xyz"))
        self.tell(Arrived(at=self.now, request=request, client=client, model=ModelName(model)))
        head = self.random.randrange(3) * 10_000
        prompt = Tokens(range(head, head + self.random.randint(10, 900)))
        self.tell(Rendered(at=self.now, request=request, prompt=prompt))

    def answers(self) -> None:
        request = self.random.choice(sorted(self.running))
        del self.running[request]
        self.tell(Started(at=self.now, request=request))
        self.tell(
            Finished(
                at=self.now, request=request, prompt_tokens=500, cached=0, generated=1, prefill_seconds=0.1
            )
        )

    def answer_call(self) -> None:
        """Answer one call."""
        effect = self.due.pop(self.random.randrange(len(self.due)))
        for event in self.outcome(effect):
            self.tell(event)

    def outcome(self, effect: Effect) -> Iterable[Event]:
        match effect:
            case UnloadModel(engine=engine):
                self.status[engine] = ModelStatus.UNLOADED
                yield EngineLost(at=self.now, engine=engine)
                yield self.listing()
            case LoadModel(engine=engine):
                yield from (EngineLost(at=self.now, engine=other) for other in effect.aside)
                yield from self.unloaded_for(engine)
                self.status[engine] = ModelStatus.LOADED
                yield self.listing()
                yield self.up(engine)
                stayed = [other for other in effect.aside if self.status[other] is ModelStatus.LOADED]
                yield from map(self.up, stayed)
            case Save():
                name = SnapshotId(f"s{len(self.saved)}")
                self.saved[name] = effect.place.engine
                size = len(effect.tokens) * 1000
                kept = Snapshot(
                    id=name, fingerprint=effect.place.engine, tokens=effect.tokens, size=size, used=self.now
                )
                yield Saved(at=self.now, request=effect.request, snapshot=kept, tokens=effect.tokens)
            case Restore():
                assert self.saved[effect.snapshot.id] == effect.place.engine, "a file of another model"
                yield Restored(at=self.now, request=effect.request, outcome=Loading.DONE)
            case Prefill():
                yield Planted(at=self.now, request=effect.request, computed=1)
            case Erase():
                yield Erased(at=self.now, request=effect.request, ok=True)
            case Observe(engine=engine):
                yield Observed(at=self.now, asked=self.now, engine=engine, slots=self.views(engine))

    def unloaded_for(self, engine: EngineId) -> Iterable[Event]:
        """Unload what such a router does; it lets running answers end first."""
        for other in () if self.most else map(EngineId, MODELS):
            leaves = other != engine and (engine, other) not in self.stay
            if leaves and self.status[other] is ModelStatus.LOADED:
                assert other not in self.running.values()
                self.status[other] = ModelStatus.UNLOADED
                yield EngineLost(at=self.now, engine=other)

    def up(self, engine: EngineId) -> EngineUp:
        return EngineUp(at=self.now, engine=engine, traits=traits(engine), model=ModelName(engine))

    def views(self, engine: EngineId) -> tuple[SlotView, ...]:
        table = self.placement.tables[engine]
        return tuple(
            SlotView(slot=SlotId(n), busy=owner in self.running, task=n, held=held.total if held else None)
            for n, (owner, held) in enumerate(zip(table.owners, table.shadow.slots, strict=True))
        )

    def step(self) -> None:
        self.now += self.random.choice((0.001, 0.1, 0.5))
        if self.alarm is not None and self.now >= self.alarm:
            self.alarm = None
            self.tell(TimerFired(at=self.now))
        happenings = [self.answer_call] * bool(self.due) + [self.answers] * bool(self.running)
        if happenings:
            self.random.choice(happenings)()

    def run(self) -> None:
        """Let requests arrive, and then all of them be served."""
        for _ in range(STEPS):
            if self.random.random() < 0.4:
                self.asks(self.random.choice(MODELS))
            self.step()
        for _ in range(PATIENCE):
            if self.served == self.arrived.keys() and not self.running:
                return
            self.step()
        never = sorted(self.arrived.keys() - self.served)
        raise AssertionError(f"{never} were never served: {self.placement!r}")


def traits(engine: str) -> EngineTraits:
    return EngineTraits(
        n_slots=2,
        n_ctx=4096,
        memory=Memory.DENSE,
        ram_cache=False,
        slot_files=True,
        fingerprint=engine,
        state_version=4,
        files_carry=True,
    )


PAIRS = tuple(itertools.permutations(MODELS, 2))


@given(seed=st.integers(0, 2**32), most=st.integers(0, 2), stay=st.frozensets(st.sampled_from(PAIRS)))
def test_every_request_is_served_by_its_model_and_no_answer_is_cut_off(seed, most, stay):
    World(Random(seed), most, stay).run()
