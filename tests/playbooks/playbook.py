"""A small language for tests of the scheduler: a script of events and the effects that must follow.

    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0, reason=Reason.COLD)

`<<` applies an event, and `>>` expects the next effect. `assert` fails if an effect is left over.
The words, with the class that each stands for:

    events of a request `announced` (Announced): its head is there · `arrives` (Arrived): a client sends it ·
                        `knows` (Rendered): its tokens are known, or cannot be · `starts` (Started): the
                        engine evaluates it · `ends` (Finished), with the engine's counts · `fails`: the
                        answer is an error · `leaves` (Gone): the client disconnects · `replies`
                        (ReplyKnown): the tokens of its answer · `follows` (NextKnown): the start of the next
                        turn's prompt · `acts` (Acted): a client's own slot action has ended ·
                        `lacks_cells` (Exceeded): it failed for lack of KV cells
    ends of steps       `saved`, `unsaved`, `written` (the file is not checked yet), `filed` (it is checked),
                        `restored`, `erased`, `planted` (by request), `filled` (the last expected prefill)
    events of an engine `sees` (Observed): GET /slots shows these slots as busy · `look_failed` · `engine_up`
                        · `engine_lost` · `request_fails` · `named`: the engines from now on · `drain` ·
                        `lists`: the models of a router · `swap_fails` · `snapshots_changed` · `closing`
    effects on requests `goes` (Forward): it is sent to a slot · `unpinned` (Forward): the engine chooses the
                        slot · `reports` (Report): its figures · `refuses` · `pooled`, `ranked`: what the
                        shared KV buffer, or its priority, did to it
    steps and idle work `saves`, `restores` or `erases` a slot · `plants` a prefill for a request, `fills` one
                        for idle work · `stops` that prefill · `drops` a file · `proves`: whether a restored
                        file saved tokens · `learns` a flag of the engine · `loads` or `unloads` a model
    time                `play.later(seconds)` · `play.wakes()`: wait until the next timer fires

Requests of GET /slots are not written down: `play.looking` has the engines that must be asked. Timers are
not, either: `play.alarms` has the pending one's time. `play.released` has the requests whose clients left
(Released).
Every event advances the time by a hundredth of a second.

A file has 64 KiB for each token, so at the rates of a new engine a token costs 0.131 tokens of prefill to
save and 0.065 to restore.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slotkeeper.scheduler.effects import (
    Drained,
    Drop,
    Effect,
    Erase,
    Forward,
    Learned,
    LoadModel,
    Observe,
    PoolAct,
    Pooled,
    Prefill,
    Prove,
    Purpose,
    Ranked,
    Refuse,
    Released,
    Render,
    Report,
    Restore,
    Save,
    SaveMoment,
    SetTimer,
    Stop,
    UnloadModel,
)
from slotkeeper.scheduler.events import (
    Acted,
    Announced,
    Arrived,
    Closing,
    DrainAsked,
    EngineLost,
    EnginesNamed,
    EngineUp,
    Erased,
    Event,
    Exceeded,
    Finished,
    Gone,
    ModelsListed,
    NextKnown,
    Observed,
    ObserveFailed,
    Planted,
    Rendered,
    ReplyKnown,
    RequestFailed,
    Restored,
    Saved,
    SnapshotsChanged,
    Started,
    SwapFailed,
    TimerFired,
)
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.policies.router import ModelStatus, ModelView
from slotkeeper.scheduler.prompts.tokens import Boundary, Tokens
from slotkeeper.scheduler.requests.pending import Pause, Pending
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Known, Memory, Snapshot, SnapshotId
from slotkeeper.scheduler.slots.table import EngineTable, SlotState
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import (
    ClientId,
    EngineId,
    Loading,
    ModelName,
    PriorityAct,
    Reason,
    RequestId,
    SlotId,
    SlotView,
)

STEP = 0.01
ENGINE = "e0"
TOKEN_BYTES = 65536
FILES: dict[str, Any] = {"slot_files": True, "fingerprint": "f"}
OLD_FILES = {**FILES, "state_version": 2, "files_carry": False}
NEW_FILES = {**FILES, "state_version": 4, "files_carry": True}


class Play:
    def __init__(
        self, *, engines: int = 1, up: bool = True, limits: Limits | None = None, **traits: Any
    ) -> None:
        self.names = [EngineId(f"e{n}") for n in range(engines)]
        memory = Memory(traits.pop("memory", "hybrid"))
        known: dict[str, Any] = {"n_slots": 2, "memory": memory, "ram_cache": False}
        self.traits = EngineTraits(**known | traits)
        self.placement = Placement(*self.names, limits=limits)
        self.clock = 1000.0
        self.effects: deque[Effect] = deque()
        self.looking: set[str] = set()
        self.delays: list[float] = []
        self.alarms: list[float] = []  # time of the pending timer, which replaced the one before
        self.timers_set = 0
        self.released: list[Released] = []  # requests that left, once the engine works for them no more
        self.step: Step | None = None  # the last step that was expected
        for name in self.names if up else ():
            assert self << engine_up(name) << sees(engine=name)

    def __lshift__(self, happening: Event | Sees | Outcome) -> Play:
        asked = self.clock + STEP / 2
        self.clock += STEP
        if isinstance(happening, Sees):
            happening = happening.of(self, asked)
        if isinstance(happening, Outcome):
            assert self.step, "no step was taken"
            happening = happening.of(self.step, self.clock)
        if isinstance(happening, EngineUp):
            happening = replace(happening, traits=self.traits)
        if isinstance(happening, Observed | ObserveFailed):
            self.looking.discard(happening.engine)
        for effect in self.placement.on(replace(happening, at=self.clock)):
            if isinstance(effect, Observe):
                self.looking.add(effect.engine)
                self.delays.append(effect.delay)
            elif isinstance(effect, Released):
                self.released.append(effect)
            elif isinstance(effect, SetTimer):
                self.alarms[:] = [self.clock + effect.delay]
                self.timers_set += 1
            else:
                self.effects.append(effect)
        return self

    def __rshift__(self, expected: Expected) -> Play:
        assert self.effects, f"no effect, but {expected} was expected: {self.placement!r}"
        effect = self.effects.popleft()
        expected.check(effect)
        if isinstance(effect, Prefill | Save | Restore | Erase):
            self.step = effect
        return self

    def __bool__(self) -> bool:
        assert not self.effects, f"unexpected effects: {list(self.effects)}"
        return True

    def later(self, seconds: float) -> Play:
        self.clock += seconds
        return self

    def wakes(self) -> Play:
        """Let time pass until the timer fires."""
        assert self.alarms, "no timer is set"
        self.clock = max(self.clock, min(self.alarms))
        self.alarms.remove(min(self.alarms))
        return self << TimerFired(at=0.0)

    def pending(self, request: str) -> Pending:
        """Return a request that has not ended."""
        pending = self.placement.pending(RequestId(request))
        assert pending is not None
        return pending

    @property
    def table(self) -> EngineTable:
        return self.placement.tables[self.names[0]]

    def paused(self, *seconds: float, after: tuple[bytes, ...] = (), tools: bool | None = None) -> None:
        """Let pauses be known: of the conversation of this hash chain, or of others."""
        pauses = self.placement._state.pauses
        known = tuple(Pause(each, after_tools=tools) for each in seconds)
        if after:
            pauses.begins(arrives("before", hash_chain=after), known, None, self.clock)
        else:
            pauses.of_all.extend(known)

    @property
    def states(self) -> list[str]:
        return [state.value for state in self.table.states]

    def rests(self) -> bool:
        """Whether no effect is left over, no request is pending, and no engine waits for GET /slots."""
        state = self.placement._state
        left = [*state.requests, *state.queue, *state.bypassing, *state.steered, *state.slotless]
        tables = state.tables.values()
        quiet = all(set(t.states) == {SlotState.IDLE} and not t.unsettled and not t.orphans for t in tables)
        return bool(self) and not left and quiet and not self.looking


# -- events ------------------------------------------------------------------------------------------------


def announced() -> Announced:
    return Announced(at=0.0)


def arrives(request: str, client: str = "anna", **more: Any) -> Arrived:
    return Arrived(at=0.0, request=RequestId(request), client=ClientId(client), **more)


def knows(request: str, prompt: Tokens | None, *boundaries: Boundary) -> Rendered:
    return Rendered(at=0.0, request=RequestId(request), prompt=prompt, boundaries=boundaries)


def starts(request: str) -> Started:
    return Started(at=0.0, request=RequestId(request))


def ends(request: str, tokens: int | None = 100, cached: int | None = 0, **more: Any) -> Finished:
    figures: dict[str, Any] = {"generated": 1, **more}
    return Finished(at=0.0, request=RequestId(request), prompt_tokens=tokens, cached=cached, **figures)


def fails(request: str) -> Finished:
    """The engine answered with an error."""
    return ends(request, None, None, generated=None)


def lacks_cells(request: str, *, again: bool = False) -> Exceeded:
    """The request failed for lack of free cells. `again`: the sidecar sends it once more."""
    return Exceeded(at=0.0, request=RequestId(request), again=again)


def acts(request: str, left: int | None = None) -> Acted:
    """A client's own slot action has ended."""
    return Acted(at=0.0, request=RequestId(request), left=left)


def leaves(request: str, **how_far: Any) -> Gone:
    return Gone(at=0.0, request=RequestId(request), **how_far)


def replies(request: str, tokens: Tokens) -> ReplyKnown:
    return ReplyKnown(at=0.0, request=RequestId(request), tokens=tokens)


def follows(request: str, tokens: Tokens | None, *, chance: float = 1.0) -> NextKnown:
    return NextKnown(at=0.0, request=RequestId(request), tokens=tokens, chance=chance)


def planted(request: str, computed: int | None = 1, **more: Any) -> Planted:
    return Planted(at=0.0, request=RequestId(request), computed=computed, **more)


def snapshots_changed(
    *snapshots: Snapshot, gone: tuple[str, ...] = (), more: bool = False
) -> SnapshotsChanged:
    return SnapshotsChanged(at=0.0, snapshots=snapshots, gone=tuple(map(SnapshotId, gone)), more=more)


def counted(**cold_bytes: int) -> SnapshotsChanged:
    counts = tuple((SnapshotId(name), size) for name, size in cold_bytes.items())
    return SnapshotsChanged(at=0.0, counted=counts)


def lists(
    *loaded: str,
    most: int = 1,
    router: str = ENGINE,
    chooses: bool = False,
    foreign: Iterable[str] = (),
    **others: str,
) -> ModelsListed:
    """A router lists its models: "a" and "b" are served by the engines "a" and "b"."""
    status = dict.fromkeys(("a", "b"), "unloaded") | dict.fromkeys(loaded, "loaded") | others
    views = tuple(
        ModelView(
            engine=EngineId(name), name=ModelName(name), status=ModelStatus(value), foreign=name in foreign
        )
        for name, value in status.items()
    )
    return ModelsListed(at=0.0, router=EngineId(router), models=views, most=most, chooses=chooses)


def swap_fails(engine: str, *, broken: bool) -> SwapFailed:
    return SwapFailed(at=0.0, engine=EngineId(engine), broken=broken)


def closing() -> Closing:
    return Closing(at=0.0)


def snapshot(name: str, tokens: Tokens, **more: Any) -> Snapshot:
    size = len(tokens) * TOKEN_BYTES
    return Snapshot(
        **{"id": SnapshotId(name), "fingerprint": "f", "tokens": tokens, "size": size, "used": 1000.0, **more}
    )


Step = Prefill | Save | Restore | Erase


@dataclass(frozen=True)
class Outcome:
    """The end of the last expected step, of any kind."""

    of: Callable[[Step, float], Event]


def saved(
    name: str, tokens: Tokens | None = None, written: tuple[int, ...] | None = None, **more: Any
) -> Outcome:
    """A save has ended, and the file was kept. `written`: the checkpoints in the engine's file."""

    def event(step: Step, now: float) -> Saved:
        assert isinstance(step, Save)
        contents = step.tokens if tokens is None else tokens
        kept = snapshot(name, contents, **{"created": now, "used": now, **more})
        own = kept.checkpoints if written is None else written
        return Saved(at=0.0, request=step.request, snapshot=kept, tokens=contents, checkpoints=own)

    return Outcome(event)


def written() -> Outcome:
    """The engine has written the file; whether it is kept is not known yet."""
    return Outcome(lambda step, _: Saved(at=0.0, request=step.request, snapshot=None, written=True))


def filed(request: str, kept: Snapshot | None) -> Saved:
    """The check of a written file has ended: it is in the catalog now, or could not be kept."""
    tokens = kept.tokens if kept else None
    return Saved(
        at=0.0,
        engine=EngineId(ENGINE),
        request=RequestId(request),
        snapshot=kept,
        tokens=tokens,
        lasting=True,
    )


def unsaved(*, lasting: bool = True) -> Outcome:
    """A save has failed. `lasting`: the next ones fail as well for a while."""
    return Outcome(lambda step, _: Saved(at=0.0, request=step.request, snapshot=None, lasting=lasting))


def restored(outcome: Loading = Loading.DONE, **more: Any) -> Outcome:
    return Outcome(lambda step, _: Restored(at=0.0, request=step.request, outcome=outcome, **more))


def erased(*, ok: bool = True) -> Outcome:
    return Outcome(lambda step, _: Erased(at=0.0, request=step.request, ok=ok))


def filled(computed: int | None = 1, **more: Any) -> Outcome:
    """One of the sidecar's prefills has ended."""
    return Outcome(lambda step, _: Planted(at=0.0, request=step.request, computed=computed, **more))


def engine_up(engine: str = ENGINE, **more: Any) -> EngineUp:
    return EngineUp(at=0.0, engine=EngineId(engine), traits=EngineTraits(), **more)


def engine_lost(engine: str = ENGINE) -> EngineLost:
    return EngineLost(at=0.0, engine=EngineId(engine))


def drain(engine: str = ENGINE, *, on: bool = True) -> DrainAsked:
    """A user drains an engine, or ends the drain."""
    return DrainAsked(at=0.0, engine=EngineId(engine), drain=on)


def named(*engines: str) -> EnginesNamed:
    """These are all engines from now on."""
    return EnginesNamed(at=0.0, engines=tuple(map(EngineId, engines)))


def request_fails(engine: str = ENGINE, *, broken: bool = False) -> RequestFailed:
    return RequestFailed(at=0.0, engine=EngineId(engine), broken=broken)


def look_failed(engine: str = ENGINE) -> ObserveFailed:
    return ObserveFailed(at=0.0, engine=EngineId(engine))


@dataclass(frozen=True)
class Sees:
    """GET /slots: these slots are busy; the others hold what the scheduler thinks, or what is given here."""

    busy: tuple[int, ...] = ()
    contents: Mapping[int, int] = field(default_factory=dict)
    engine: str = ENGINE
    asked: float | None = None

    def of(self, play: Play, asked: float) -> Observed:
        table = play.placement.tables[EngineId(self.engine)]
        views = []
        for n, believed in enumerate(table.shadow.slots):
            contents = self.contents.get(n, believed.total if believed else 0)
            views.append(SlotView(slot=SlotId(n), busy=n in self.busy, task=n, held=contents or None))
        when = asked if self.asked is None else self.asked
        return Observed(at=0.0, asked=when, engine=EngineId(self.engine), slots=tuple(views))


def sees(*busy: int, **more: Any) -> Sees:
    return Sees(busy=busy, **more)


# -- effects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    kind: type
    wanted: Mapping[str, Any]

    def check(self, effect: Effect) -> None:
        assert isinstance(effect, self.kind), f"{effect} instead of {self}"
        found = {name: _get(effect, name) for name in self.wanted}
        assert found == self.wanted, f"{effect} instead of {self}"


def _get(effect: Effect, name: str) -> Any:
    value: Any = effect
    for part in name.split("__"):
        value = getattr(value, part)
    return value


def _expected(kind: type) -> Callable[..., Expected]:
    def expect(request: str, **wanted: Any) -> Expected:
        return Expected(kind, {"request": request, **wanted})

    return expect


goes = _expected(Forward)
reports = _expected(Report)
renders = _expected(Render)


def learns(name: str, value: float | bool, how: Known) -> Expected:
    return Expected(Learned, {"name": name, "value": value, "how": how})


def plants(request: str, slot: int, purpose: Purpose, **wanted: Any) -> Expected:
    return Expected(Prefill, {"request": request, "place__slot": slot, "purpose": purpose, **wanted})


def unpinned(request: str, reason: Reason, **wanted: Any) -> Expected:
    return Expected(Forward, {"request": request, "slot": None, "reason": reason, **wanted})


def saves(slot: int, moment: SaveMoment = SaveMoment.PAUSE, **wanted: Any) -> Expected:
    return Expected(Save, {"place__slot": slot, "moment": moment, **wanted})


def restores(slot: int, name: str, **wanted: Any) -> Expected:
    return Expected(Restore, {"place__slot": slot, "snapshot__id": name, **wanted})


def erases(slot: int) -> Expected:
    return Expected(Erase, {"place__slot": slot})


def fills(slot: int, purpose: Purpose, **wanted: Any) -> Expected:
    """A prefill of a chore, whose request name is not known."""
    return Expected(Prefill, {"place__slot": slot, "purpose": purpose, **wanted})


def stops() -> Expected:
    """A prefill of a chore is stopped."""
    return Expected(Stop, {})


def drops(name: str, *, to_cold: bool = False) -> Expected:
    return Expected(Drop, {"snapshot": name, "to_cold": to_cold})


def loads(engine: str, **wanted: Any) -> Expected:
    return Expected(LoadModel, {"engine": engine, **wanted})


def unloads(engine: str) -> Expected:
    return Expected(UnloadModel, {"engine": engine})


def drained(engine: str = ENGINE) -> Expected:
    return Expected(Drained, {"engine": engine})


refuses = _expected(Refuse)


def pooled(request: str, act: PoolAct, **wanted: Any) -> Expected:
    """The request needed cells of a shared KV buffer."""
    return Expected(Pooled, {"request": request, "act": act, **wanted})


def ranked(request: str, act: PriorityAct, **wanted: Any) -> Expected:
    """The scheduler reports what priorities or deadlines did to the request."""
    return Expected(Ranked, {"request": request, "act": act, **wanted})


def proves(name: str, *, paid: bool) -> Expected:
    return Expected(Prove, {"snapshot": name, "paid": paid})


def one_turn(play: Play, request: str, prompt: Tokens, *, slot: int, cached: int = 0, **more: Any) -> bool:
    """Play a request that goes to a slot without steps and is answered."""
    assert play << arrives(request, **more) << knows(request, prompt) >> goes(request, slot=slot)
    return bool(play << ends(request, len(prompt), cached) >> reports(request))
