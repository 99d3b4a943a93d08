"""Placement against a simulated engine, in every order of events that the network allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from properties.simulated import SimulatedEngine, Task
from slotkeeper.observe.journal import Journal
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.request_record import Record
from slotkeeper.scheduler.effects import (
    Drop,
    Effect,
    Erase,
    Forward,
    Observe,
    Prefill,
    Purpose,
    Render,
    Report,
    Restore,
    Save,
    SetTimer,
    Stop,
)
from slotkeeper.scheduler.events import (
    Arrived,
    DrainAsked,
    EngineLost,
    EngineUp,
    Erased,
    Event,
    Finished,
    Gone,
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
    TimerFired,
)
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.prompts.tokens import EMPTY, Boundary, BoundaryKind, Tokens
from slotkeeper.scheduler.requests.figures import Usage
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory, Snapshot, SnapshotId
from slotkeeper.scheduler.slots.table import LINGER, SlotState
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import ClientId, EngineId, Loading, Reason, RequestId

SETTINGS = settings(max_examples=150, stateful_step_count=40)
STEPS_TO_REST = 40  # for each request and task: a long run leaves a long queue
ROOM = 4000  # tokens that fit into the hot tier, so that files must be evicted now and then
TOKEN_BYTES = 65536
BOUNDARIES = (
    Boundary(10, BoundaryKind.HEAD),
    Boundary(60, BoundaryKind.USER),
    Boundary(130, BoundaryKind.USER),
)
COUNTERS = [f"slotkeeper_{name}_tokens_total" for name in ("prompt", "prefill", "oracle")]
KINDS = ("chat", "messages", "bypass", "own slot", "two copies", "two prompts", "embeddings", "resumable")


WHICH = st.integers(0, 999)  # chooses one of what there is then
Name = TypeVar("Name", bound=str)


def one_of(names: Iterable[Name], which: int) -> Name:
    found = sorted(names)
    return found[which % len(found)]


def longest_answer(prompt: Tokens) -> int:
    """Return the number of tokens that are generated after this prompt."""
    return 1 + len(prompt) % 5


class PlacementMachine(RuleBasedStateMachine):
    """All events of one sidecar: no other program uses the engines."""

    foreign_tasks: ClassVar[bool] = False
    namespaces: ClassVar[bool] = False  # one namespace per client
    offered: ClassVar[tuple[str, ...]] = KINDS  # kinds of requests that arrive

    # -- the world -----------------------------------------------------------------------------------

    @initialize(
        slots=st.lists(st.integers(1, 3), min_size=1, max_size=2),
        ram=st.booleans(),
        files=st.sampled_from([0, 2, 4]),
        memory=st.sampled_from([Memory.DENSE, Memory.HYBRID]),
    )
    def build(self, slots: list[int], ram: bool, files: int, memory: Memory) -> None:
        names = [EngineId(f"e{n}") for n in range(len(slots))]
        self.engines = {name: SimulatedEngine(n) for name, n in zip(names, slots, strict=True)}
        self.traits = {
            name: EngineTraits(
                n_slots=n,
                memory=memory,
                n_batch=128,
                eager_thinning=files == 2,
                ram_cache=ram,
                slot_files=files > 0,
                state_version=files,
                fingerprint="f",
                **self.more_traits(),
            )
            for name, n in zip(names, slots, strict=True)
        }
        self.up = dict.fromkeys(names, True)
        self.drained: set[EngineId] = set()
        limits = Limits(hot_bytes=ROOM * TOKEN_BYTES, cold_bytes=ROOM * TOKEN_BYTES)
        self.placement = Placement(*names, limits=limits)
        self.clock = 100.0
        self.transit: list[tuple[float, EngineId, Task]] = []  # on the way to an engine
        self.inbox: list[Event] = []  # on the way to the scheduler
        self.looks: list[Observe] = []
        self.answers: list[Event] = []
        self.actions: list[Save | Restore | Erase] = []  # on slots, on the way to an engine
        self.files: dict[SnapshotId, Tokens] = {}
        self.wakes: list[float] = []
        self.filing: dict[RequestId, Saved] = {}  # written, but not kept yet
        self.saves = 0
        self.prompts: dict[RequestId, Tokens] = {}
        self.unrendered: list[RequestId] = []
        self.alive: set[RequestId] = set()  # arrived, neither finished nor lost
        self.forwards: Counter[RequestId] = Counter()
        self.reports: Counter[RequestId] = Counter()
        self.kinds: dict[RequestId, str] = {}
        self.spaces: dict[RequestId, str] = {}
        self.reasons: dict[RequestId, Reason] = {}
        self.told: dict[RequestId, Report] = {}
        self.started: set[RequestId] = set()
        self.metrics, self.journal = Metrics(), Journal(1000)
        self.records: dict[RequestId, Record] = {}
        self.usages: list[Usage] = []
        self.work = dict.fromkeys(("client", "plant", "idle"), 0)  # as the engines evaluated it
        self.purposes: dict[RequestId, Purpose] = {}
        for name in names:
            self.post(EngineUp(at=self.clock, engine=name, traits=self.traits[name]))

    def more_traits(self) -> dict[str, Any]:
        return {}

    def post(self, event: Event) -> None:
        self.clock += 1e-6
        effects = self.placement.on(event)
        self.journal.saw(event, effects, self.clock, self.clock, self.placement.pending)
        for effect in effects:
            self.perform(effect)

    def perform(self, effect: Effect) -> None:
        match effect:
            case Forward():
                self.forwarded(effect)
            case Prefill():
                self.plant(effect)
            case Save() | Restore() | Erase():
                self.actions.append(effect)
            case Stop():
                self.stop(effect.request)
            case Drop(to_cold=False):
                self.files.pop(effect.snapshot, None)
            case SetTimer():
                self.wakes.append(self.clock + effect.delay)
            case Observe():
                self.looks.append(effect)
            case Report():
                self.account(effect)
            case Render():
                self.unrendered.append(effect.request)

    def plant(self, effect: Prefill) -> None:
        ours = effect.request in self.placement._state.chores
        assert ours or effect.request in self.alive, "planted, but its client is gone"
        self.purposes[effect.request] = effect.purpose
        task = Task(effect.request, effect.tokens.within(""), effect.place.slot, plant=True)
        task.space = effect.tokens.space
        self.transit.append((self.clock, effect.place.engine, task))

    def forwarded(self, effect: Forward) -> None:
        assert effect.request in self.alive, "forwarded, but its client is gone"
        self.forwards[effect.request] += 1
        assert self.forwards[effect.request] == 1, "forwarded twice"
        drained = effect.engine in self.drained and self.placement._state.tables[effect.engine].up
        assert not drained, "begun on an engine that is drained"  # one that is down only gives the error
        prompt = self.prompts[effect.request]
        task = Task(effect.request, prompt, effect.slot, longest_answer(prompt))
        task.copies = 2 if self.kinds[effect.request] == "two copies" else 1
        task.prompts = 2 if self.kinds[effect.request] == "two prompts" else 1
        task.space, kind = self.spaces[effect.request], self.kinds[effect.request]
        task.uncached = bool(task.space) and not effect.isolated
        self.reasons[effect.request] = effect.reason
        if task.uncached and kind == "messages":
            self.broken(task)  # it cannot be sent uncached, so it is refused
        else:
            self.transit.append((self.clock, effect.engine, task))

    def stop(self, owner: RequestId) -> None:
        """Stop a chore's prefill: unless it has ended, the engine continues for a while."""
        tasks = [item[2] for item in self.transit]
        for engine in self.engines.values():
            tasks += [*engine.deferred, *(task for _, task in engine.running())]
        for task in tasks:
            if task.owner == owner and not task.left:
                task.left = True
                self.inbox.append(Planted(at=0.0, request=owner, computed=None, stopped=True))

    def account(self, report: Report) -> None:
        self.reports[report.request] += 1
        self.told[report.request] = report
        self.metrics.report(report)
        prompt = self.prompts[report.request]
        if report.predicted is not None:
            assert report.predicted <= len(prompt) - 1
        if (usage := report.usage) is not None:
            self.usages.append(usage)
            assert usage.reused + usage.computed == usage.prompt
            assert 0 <= usage.prepared <= usage.reused
            if report.oracle is not None:
                assert min(1, usage.computed) <= report.oracle <= usage.computed + usage.prepared

    def later(self, seconds: float) -> None:
        """Let time pass. Everything that was sent reaches the engine in less than LINGER."""
        self.clock += seconds
        for item in list(self.transit):
            if self.clock - item[0] >= LINGER:
                self.reach(item)

    def arrive_at_engine(self, item: tuple[float, EngineId, Task]) -> None:
        _, name, task = item
        if not self.up[name]:
            self.broken(task)
            return
        if task.copies > self.engines[name].n:
            self.refused(task)
            return
        self.engines[name].submit(task)

    def refused(self, task: Task) -> None:
        """More copies than slots: an error answer, without figures."""
        if task.owner and not task.left:
            none = dict.fromkeys(("prompt_tokens", "cached", "generated"))
            self.inbox.append(Finished(at=0.0, request=RequestId(task.owner), **none))

    def act(self, action: Save | Restore | Erase, *, trouble: int = 0) -> None:
        """An action on a slot reaches the engine, or fails: by `trouble`, or because the engine is gone."""
        self.actions.remove(action)
        name, request = action.place.engine, action.request
        slot = self.engines[name].slots[action.place.slot]
        lost = not self.up[name] or trouble == 1
        if not lost and not self.foreign_tasks and request in self.placement._state.chores:
            assert slot.task is None, f"a chore in a slot that is at work: {action}"
        match action:
            case Save():
                self.save(action, slot.tokens, lost=lost, full=trouble == 2)
            case Restore():
                assert self.traits[name].fingerprint == action.snapshot.fingerprint
                outcome = Loading.LOST if lost else Loading.DONE
                if not lost and action.snapshot.id not in self.files:
                    outcome = Loading.UNFIT
                elif not lost and trouble == 2:
                    outcome, slot.tokens = Loading.REFUSED, EMPTY
                elif not lost:
                    slot.tokens, slot.last = self.files[action.snapshot.id], None
                    slot.space = action.snapshot.tokens.space
                self.inbox.append(Restored(at=0.0, request=request, outcome=outcome))
            case Erase():
                if not lost:
                    slot.tokens = EMPTY
                self.inbox.append(Erased(at=0.0, request=request, ok=not lost))

    def save(self, action: Save, tokens: Tokens, *, lost: bool, full: bool) -> None:
        """The engine writes; whether the file is kept is known at once, or after the request continued."""
        self.saves += 1
        new, kept = SnapshotId(f"s{self.saves}"), None
        if not lost and not full:
            self.files[new] = tokens
            size = len(tokens) * TOKEN_BYTES
            known = tokens.within(action.tokens.space)
            kept = Snapshot(
                id=new, fingerprint="f", tokens=known, size=size, created=self.clock, used=self.clock
            )
        told, request, name = tokens if kept else None, action.request, action.place.engine
        if not lost:
            self.inbox.append(Saved(at=0.0, request=request, snapshot=None, written=True))
            self.filing[request] = Saved(
                at=0.0, engine=name, request=request, snapshot=kept, tokens=told, lasting=full
            )
        else:
            self.inbox.append(Saved(at=0.0, request=request, snapshot=kept, tokens=told, lasting=full))

    def broken(self, task: Task) -> None:
        """The connection of a task broke."""
        task = task.whole
        if task.owner is None or task.left:
            return
        request = RequestId(task.owner)
        task.left = True
        if task.plant:
            self.inbox.append(Planted(at=0.0, request=request, computed=None))
        else:
            self.inbox.append(Gone(at=0.0, request=request))

    def over(self, task: Task) -> None:
        task = task.whole
        if task.owner is None or task.left or task.at_work:
            return
        request = RequestId(task.owner)
        computed = len(task.prompt) - task.cached
        if task.plant:
            self.inbox.append(Planted(at=0.0, request=request, computed=computed))
            return
        named = task.slot if len(task.prompt) % 2 else None
        self.inbox.append(
            Finished(
                at=0.0,
                request=request,
                prompt_tokens=len(task.prompt),
                cached=task.cached,
                generated=task.generate,
                slot=named,
                prefill_seconds=computed / (500 + 300 * (len(task.prompt) % 7)),
            )
        )

    # -- possible events -------------------------------------------------------------------------------

    @rule(
        choices=st.lists(st.integers(0, 999), max_size=3),
        who=st.tuples(st.sampled_from("abc"), st.integers(1, 4)),
        kind=st.sampled_from(KINDS),
        turn=st.integers(1, 4),
        renders=st.booleans(),
    )
    def arrive(self, choices: list[int], who: tuple[str, int], kind: str, turn: int, renders: bool) -> None:
        client, talk = who
        request, kind = (
            RequestId(f"r{len(self.prompts)}"),
            self.offered[KINDS.index(kind) % len(self.offered)],
        )
        self.prompts[request] = self.prompt_of(client, talk, turn)
        self.kinds[request] = kind
        self.spaces[request] = client if self.namespaces else ""
        self.alive.add(request)
        self.records[request] = record = Record(request_id=request, route="chat", received=0.0, at=self.clock)
        self.journal.arrived(record)
        self.journal.follow(request, record)
        rendered = renders or kind == "chat"
        if rendered:
            self.unrendered.append(request)
        self.post(
            Arrived(
                at=self.clock,
                request=request,
                client=ClientId(client),
                namespace=self.spaces[request],
                generates=kind != "embeddings",
                pinnable=kind not in ("messages", "embeddings", "two copies", "two prompts"),
                rendered=rendered and kind != "embeddings",
                id_slot=turn * 3 - 7 if kind == "own slot" else None,
                copies=2 if kind in ("two copies", "two prompts") else 1,
                hash_chain=tuple(b"%d/%d" % (talk, n) for n in range(turn + 1)) if kind == "chat" else (),
                resumable=kind == "resumable",
                answer_limit=None if kind == "messages" else longest_answer(self.prompts[request]),
                size=4 * len(self.prompts[request]),
                bypass=kind == "bypass" or (kind == "two prompts" and turn > 2),
            )
        )
        self.anything_happens(choices)

    def prompt_of(self, client: str, talk: int, turn: int) -> Tokens:
        return Tokens([7] * 10 + [talk] * 200 * turn + [1000 + len(self.prompts)] * 6)

    @rule(choices=st.lists(st.integers(0, 999), min_size=1, max_size=12))
    def anything_happens(self, choices: list[int]) -> None:
        """Let anything that is possible happen next, in any order."""
        for choice in choices:
            moves = self.moves()
            if moves:
                move, *what = moves[choice % len(moves)]
                move(*what)

    def moves(self) -> list[tuple[Any, ...]]:
        tasks = [(name, n) for name, engine in self.engines.items() for n, _ in engine.running()]
        return [
            *((self.render, request) for request in self.unrendered),
            *((self.reach, item) for item in self.transit),
            *((self.end_task, *task) for task in tasks),
            *((self.act, action) for action in self.actions),
            *((self.take, event) for event in self.inbox),
            *((self.ask, look) for look in self.looks),
            *((self.answer, event) for event in self.answers),
            *((self.first_bytes,) for _ in tasks[:1]),
        ]

    def render(self, request: RequestId, *, known: bool = True) -> None:
        self.unrendered.remove(request)
        prompt = self.prompts[request] if known else None
        self.post(Rendered(at=self.clock, request=request, prompt=prompt, boundaries=BOUNDARIES))

    def reach(self, item: tuple[float, EngineId, Task]) -> None:
        self.transit.remove(item)
        self.arrive_at_engine(item)

    def end_task(self, name: EngineId, slot: int) -> None:
        task = self.engines[name].slots[slot].task
        assert task is not None
        if task.left:
            self.engines[name].cancel(task, evaluated=(len(task.prompt) * 2) // 3)
        else:  # also a copy whose client left: the engine may not have seen that yet
            self.over(self.engines[name].end(slot))

    def first_bytes(self) -> None:
        for engine in self.engines.values():
            for _, task in engine.running():
                if task.owner and not task.whole.left and not task.plant and task.owner not in self.started:
                    self.started.add(RequestId(task.owner))
                    self.inbox.append(Started(at=0.0, request=RequestId(task.owner)))
                    return

    def take(self, event: Event) -> None:
        self.inbox.remove(event)
        if isinstance(event, Finished | Gone):
            self.alive.discard(event.request)
        self.count(event)
        self.post(with_time(event, self.clock))  # perhaps too late, which the scheduler must tolerate
        if isinstance(event, Saved) and event.written:
            self.inbox.append(self.filing.pop(event.request))
        if isinstance(event, Finished):
            request = event.request
            reply = self.prompts[request] + Tokens([9_999_999] * 4)
            self.post(ReplyKnown(at=self.clock, request=request, tokens=reply))
            following = self.prompts[request].cut(0, 150) + Tokens([8_888_888] * 150)  # thoughts stripped
            self.post(NextKnown(at=self.clock, request=request, tokens=following, chance=1.0))

    def count(self, event: Event) -> None:
        """Count the tokens that engines evaluated and reported; the runtime counts the sidecar's prefills."""
        match event:
            case Finished(request=request, prompt_tokens=int(prompt), cached=int(cached)) if self.heard(
                request
            ):
                self.work["client"] += prompt - cached
            case Planted(request=request, computed=int(computed)) if self.heard(request):
                purpose = self.purposes[request]
                self.work["idle" if purpose.idle else "plant"] += computed
                self.metrics.planted(purpose, computed, request)
            case _:
                pass

    def heard(self, request: RequestId) -> bool:
        return request in self.placement._state.chores or self.placement.pending(request) is not None

    def ask(self, look: Observe) -> None:
        self.looks.remove(look)
        self.later(look.delay)
        if not self.up[look.engine]:
            self.answers.append(ObserveFailed(at=0.0, engine=look.engine))
        else:
            views = self.engines[look.engine].views()
            self.answers.append(Observed(at=0.0, asked=self.clock, engine=look.engine, slots=views))
            self.clock += 1e-6  # later events are newer than this observation

    def answer(self, event: Event) -> None:
        self.answers.remove(event)
        self.post(with_time(event, self.clock))

    @precondition(lambda self: self.alive)
    @rule(which=WHICH)
    def client_leaves(self, which: int) -> None:
        request = one_of(self.alive, which)
        self.alive.discard(request)
        reached, cached = self.reached(request)
        tasks = [item[2] for item in self.transit]
        for engine in self.engines.values():
            tasks += [*engine.deferred, *(task for _, task in engine.running())]
        for task in tasks:
            task.whole.left = task.whole.left or task.owner == request
        self.work["client"] += (reached or 0) - cached
        self.post(Gone(at=self.clock, request=request, reached=reached, cached=cached))

    def reached(self, request: RequestId) -> tuple[int | None, int]:
        """Return the prompt tokens that an engine has reached for a request, and how many were cached."""
        for engine in self.engines.values():
            for _, task in engine.running():
                if task.owner == request and not task.plant and task.parent is None:
                    return max(task.cached, len(task.prompt) * 2 // 3), task.cached
        return None, 0

    @precondition(lambda self: self.unrendered)
    @rule()
    def cannot_render(self) -> None:
        self.render(self.unrendered[0], known=False)

    @precondition(lambda self: self.looks)
    @rule()
    def look_fails(self) -> None:
        self.answers.append(ObserveFailed(at=0.0, engine=self.looks.pop(0).engine))

    @rule(seconds=st.sampled_from([0.001, 0.06, 0.5, 70.0]))
    def wait(self, seconds: float) -> None:
        self.later(seconds)
        self.wake()

    def wake(self) -> None:
        due = [at for at in self.wakes if at <= self.clock]
        self.wakes = [at for at in self.wakes if at > self.clock]
        for _ in due:
            self.post(TimerFired(at=self.clock))

    @precondition(lambda self: self.actions)
    @rule(trouble=st.sampled_from([1, 2]))
    def an_action_fails(self, trouble: int) -> None:
        self.act(self.actions[0], trouble=trouble)

    @precondition(lambda self: self.files)
    @rule(which=WHICH, seen=st.booleans())
    def a_file_is_lost(self, which: int, seen: bool) -> None:
        gone = one_of(self.files, which)
        del self.files[gone]
        if seen:  # else it is found only when it is wanted
            self.post(SnapshotsChanged(at=self.clock, gone=(gone,)))

    @rule(which=st.integers(0, 7), returns=st.booleans())
    def engine_dies(self, which: int, returns: bool) -> None:
        name = dict(enumerate(self.engines)).get(which)  # seldom
        if name and self.up[name]:
            engine = self.engines[name]
            for task in [*engine.deferred, *(task for _, task in engine.running())]:
                self.broken(task)
            for item in [item for item in self.transit if item[1] == name]:
                self.transit.remove(item)
                self.broken(item[2])
            engine.restart()
            self.up[name] = False
            for action in [action for action in self.actions if action.place.engine == name]:
                self.act(action)
            self.post(EngineLost(at=self.clock, engine=name, returns=returns))

    @precondition(lambda self: not all(self.up.values()))
    @rule()
    def engine_returns(self) -> None:
        for name, up in self.up.items():
            if not up:
                # What was sent while it was down has reached it, or was refused, before it is up.
                self.up[name] = True
                for item in [item for item in self.transit if item[1] == name and item[2].left]:
                    self.reach(item)
                self.post(EngineUp(at=self.clock, engine=name, traits=self.traits[name]))

    @precondition(lambda self: len(self.engines) > 1)
    @rule(which=WHICH)
    def drain_or_undrain(self, which: int) -> None:
        self.set_drained(one_of(self.engines, which))

    def set_drained(self, name: EngineId) -> None:
        self.drained ^= {name}
        self.post(DrainAsked(at=self.clock, engine=name, drain=name in self.drained))

    @precondition(lambda self: len(self.engines) > 1)
    @rule(which=WHICH, broken=st.booleans())
    def a_request_fails(self, which: int, broken: bool) -> None:
        self.post(RequestFailed(at=self.clock, engine=one_of(self.engines, which), broken=broken))

    # -- what must always hold ---------------------------------------------------------------------------

    @invariant()
    def no_pinned_task_meets_a_busy_slot(self) -> None:
        for engine in self.engines.values():
            assert not [(new, old) for new, old in engine.collisions if not self.foreign_tasks]

    @invariant()
    def a_request_is_reported_once_at_most(self) -> None:
        assert all(count == 1 for count in self.reports.values())

    @invariant()
    def idle_work_is_known_for_the_slots_that_it_holds(self) -> None:
        for table in self.placement.tables.values() if self.engines else ():
            assert table.maintenance.keys() == {*table.in_state(SlotState.MAINTENANCE)}

    @invariant()
    def no_namespace_meets_the_state_of_another(self) -> None:
        for engine in self.engines.values():
            assert not (self.namespaces and engine.mixed)

    def teardown(self) -> None:
        """Let everything come to its end; then nothing may be left over."""
        if not hasattr(self, "engines"):
            return
        self.engine_returns()
        for name in sorted(self.drained):
            self.set_drained(name)
        tasks = len(self.prompts) + sum(engine.tasks for engine in self.engines.values())
        for _ in range(STEPS_TO_REST * (1 + tasks)):
            if not self.one_step_to_rest():
                break
        else:
            raise AssertionError(f"never comes to rest: {self.placement!r} {self.looks} {self.alive}")
        state = self.placement._state
        assert not self.alive, f"never served: {self.alive} {self.placement!r}"
        assert not state.requests, f"leaked: {state.requests}"
        assert not state.queue
        assert not state.bypassing
        assert not state.steered
        for table in state.tables.values():
            assert set(table.states) == {SlotState.IDLE}, repr(table)
            assert not table.unsettled
            assert not table.orphans
            assert not table.work.served
        assert not state.chores
        assert not self.placement.unsaved(self.clock)
        self.every_view_shows_the_same()

    def every_view_shows_the_same(self) -> None:
        """Compare the requests, the sums of the admin port, Prometheus' counters, and the list of `why`."""
        sums = self.metrics.history.totals
        assert {name: getattr(sums, name) for name in self.work} == self.work
        listed = [record.usage for record in self.journal if record.usage is not None]
        assert Counter(listed) == Counter(self.usages)
        assert sums.requests == len(self.usages)
        for name in ("reused", "computed", "prepared"):
            assert getattr(sums, name) == sum(getattr(usage, name) for usage in self.usages), name
        assert sums.prompt_tokens == sum(usage.prompt for usage in self.usages)
        assert sums.client == sum(usage.evaluated for usage in self.usages)
        assert sums.plant == sum(usage.planted for usage in self.usages)
        families = self.metrics.registry.restricted_registry(COUNTERS).collect()
        read = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
        for source, name in (("cached", "reused"), ("computed", "computed")):
            assert read["slotkeeper_prompt_tokens_total", source] == getattr(sums, name)
        for purpose in ("client", "plant", "idle"):
            assert read["slotkeeper_prefill_tokens_total", purpose] == getattr(sums, purpose)
        assert read[("slotkeeper_oracle_tokens_total",)] == sums.oracle
        if sums.waited is not None:
            assert sums.client + sums.plant >= sums.oracle - sums.prepared

    def one_step_to_rest(self) -> bool:
        self.first_bytes()
        if self.unrendered:
            request = self.unrendered.pop()
            self.post(Rendered(at=self.clock, request=request, prompt=self.prompts[request]))
        elif self.transit:
            self.arrive_at_engine(self.transit.pop(0))
        elif self.inbox:
            self.take(self.inbox[0])
        elif self.actions:
            self.act(self.actions[0])
        elif self.answers:
            self.post(with_time(self.answers.pop(0), self.clock))
        elif self.looks or any(engine.running() for engine in self.engines.values()):
            self.end_every_task()
            self.look_everywhere()
        elif self.wakes:
            self.later(max(0.0, min(self.wakes) - self.clock))
            self.wake()
        else:
            return False
        return True

    def end_every_task(self) -> None:
        for engine in self.engines.values():
            for slot, _ in engine.running():
                self.over(engine.end(slot))

    def look_everywhere(self) -> None:
        looks, self.looks = self.looks, []
        for look in looks:
            self.later(max(look.delay, 0.001))
            views = self.engines[look.engine].views()
            self.answers.append(Observed(at=0.0, asked=self.clock, engine=look.engine, slots=views))


class SharedEnginesMachine(PlacementMachine):
    """The same, with tasks of other programs on the engines."""

    foreign_tasks = True

    @rule(which=WHICH, wanted=st.sampled_from([None, 0, 1]), length=st.integers(1, 90))
    def foreign_task(self, which: int, wanted: int | None, length: int) -> None:
        name = one_of(self.engines, which)
        if self.up[name]:
            self.engines[name].submit(Task(None, Tokens([5] * length), wanted))


class NamespacesMachine(PlacementMachine):
    """The same, with a namespace for each client. The prompts of all clients have common prefixes."""

    namespaces = True


def with_time(event: Event, now: float) -> Event:
    return replace(event, at=now)


TestPlacement = PlacementMachine.TestCase
TestPlacement.settings = SETTINGS
TestSharedEngines = SharedEnginesMachine.TestCase
TestSharedEngines.settings = SETTINGS
TestNamespaces = NamespacesMachine.TestCase
TestNamespaces.settings = SETTINGS


class OtherTokensMachine(NamespacesMachine):
    """One client's tokens differ from those of all others; among themselves they are alike as before."""

    def prompt_of(self, client: str, talk: int, turn: int) -> Tokens:
        said = super().prompt_of(client, talk, turn)
        return Tokens([token + 500_000 for token in said]) if client == "b" else said


# Where a task takes several slots, or none can be chosen, the engine chooses by likeness: what it overwrites
# depends on all slots. See docs/security.md.
CHOOSABLE = ("chat", "messages", "bypass", "own slot", "resumable")
ARRIVALS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 999), max_size=8),
        st.tuples(st.sampled_from("ab"), st.integers(1, 2)),
        st.sampled_from(CHOOSABLE),
        st.integers(1, 4),
        st.booleans(),
        st.sampled_from([0.001, 0.06, 0.5, 70.0]),
    ),
    min_size=2,
    max_size=20,
)


def seen_by_a(world: PlacementMachine, build: dict[str, Any], arrivals: list[Any]) -> list[Any]:
    """Return the decisions and figures of all requests of one client."""
    world.build(**build)
    for choices, who, kind, turn, renders, seconds in arrivals:
        world.arrive(choices=choices, who=who, kind=kind, turn=turn, renders=renders)
        world.wait(seconds=seconds)
    world.teardown()
    return [
        (request, world.reasons.get(request), world.told.get(request))
        for request, space in world.spaces.items()
        if space == "a"
    ]


@given(
    arrivals=ARRIVALS,
    slots=st.integers(1, 3),
    ram=st.booleans(),
    files=st.sampled_from([0, 2, 4]),
    memory=st.sampled_from([Memory.DENSE, Memory.HYBRID]),
)
@settings(max_examples=60)
def test_prompts_of_another_namespace_change_no_decision_and_no_figure(arrivals, slots, ram, files, memory):
    """Only the number and the size of its requests may: they cost slots, space and time."""
    build = {"slots": [slots], "ram": ram, "files": files, "memory": memory}
    assert seen_by_a(NamespacesMachine(), build, arrivals) == seen_by_a(OtherTokensMachine(), build, arrivals)
