"""The journal of the last requests, written from the driver's events and effects. It decides nothing.

Its methods run at every event, so they do little: texts are made only when a record is asked for.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import dropwhile, islice
from typing import Final

from slotkeeper.api.answers.answer import EngineSpeed, Prefilled, least_seconds
from slotkeeper.conversation.naming import Name
from slotkeeper.engine.client import EngineAddress
from slotkeeper.observe.request_record import (
    BRIEFEST_WAIT,
    NO_REQUEST,
    RUNNING,
    Clients,
    Decision,
    Option,
    QueueWait,
    Record,
    RequestStage,
    Work,
)
from slotkeeper.scheduler.effects import (
    Effect,
    Erase,
    Forward,
    Pooled,
    Prefill,
    Ranked,
    Report,
    Restore,
    Save,
    SaveMoment,
    Step,
)
from slotkeeper.scheduler.events import (
    Arrived,
    EngineLost,
    EnginesNamed,
    EngineUp,
    Erased,
    Event,
    Finished,
    Gone,
    Planted,
    Rendered,
    Restored,
    Saved,
    Started,
)
from slotkeeper.scheduler.requests.pending import Pending, Plan, Wait, Waiting
from slotkeeper.scheduler.slots.engine_model import SlotContents, SnapshotId
from slotkeeper.scheduler.types import NO_ROUTER, EngineId, ModelName, RequestId, id_of

MOST: Final = 4096  # snapshots whose owners are remembered
UNDER_WAY: Final = 256  # unfinished saves whose owners are remembered


class Owners:
    """Remembers in memory, since the sidecar started, which conversation each snapshot belongs to."""

    def __init__(self) -> None:
        self._names: OrderedDict[SnapshotId, Name] = OrderedDict()
        self._saving: OrderedDict[RequestId, Name] = OrderedDict()

    def of(self, snapshot: SnapshotId) -> Name | None:
        return self._names.get(snapshot)

    def saving(self, asker: RequestId, record: Record | None) -> None:
        """Note that the file being saved for `asker` holds the record's conversation; None: it is unknown."""
        if record is None:
            self._saving.pop(asker, None)
            return
        self._saving[asker] = record.name
        if len(self._saving) > UNDER_WAY:
            self._saving.popitem(last=False)

    def saved(self, asker: RequestId, snapshot: SnapshotId) -> None:
        if name := self._saving.get(asker):
            self._put(snapshot, name)

    def restored(self, snapshot: SnapshotId, record: Record) -> None:
        """Give a snapshot of unknown origin to the first conversation that continues it."""
        if snapshot not in self._names:
            self._put(snapshot, record.name)

    def _put(self, snapshot: SnapshotId, name: Name) -> None:
        self._names[snapshot] = name
        if len(self._names) > MOST:
            self._names.popitem(last=False)


# -- steps as records name them --------------------------------------------------------------------------


def shown_as(effort: Step) -> tuple[RequestStage, int | None, str]:
    """Return a step's stage, its number of tokens, and a note."""
    match effort:
        case Prefill():
            return RequestStage.PLANT, len(effort.tokens), effort.purpose.value
        case Save():
            return RequestStage.SAVE, len(effort.tokens), effort.moment.value
        case Restore():
            return RequestStage.RESTORE, len(effort.snapshot.tokens), effort.snapshot.id
        case Erase():
            return RequestStage.ERASE, None, ""


def option(plan: Plan) -> Option:
    return Option(
        reason=plan.reason,
        engine=plan.table.engine,
        slot=plan.slot,
        reuse=plan.reuse_plan.reuse if plan.reuse_plan else None,
        price=plan.price,
        steps=tuple(map(_word, plan.steps)),
        seconds=plan.seconds,
    )


def _word(step: Step) -> str:
    match step:
        case Prefill():
            return step.purpose.value
        case Save():
            return step.moment.value
        case _:
            return shown_as(step)[0].value


# -- the journal -----------------------------------------------------------------------------------------

FOLLOWED: Final = 4096  # most unfinished requests; more can only be requests that a bug lost
SHORTEST: Final = 4  # least characters of an id's end that identify it

LOOK_SECONDS: Final = 1.0  # between two looks at what all queued requests wait for

Pendings = Callable[[RequestId], Pending | None]
Waits = Callable[[RequestId], Waiting | None]
Compares = Callable[[float, float], None]  # seconds of a request to its first token, and the least


@dataclass(slots=True, eq=False)
class _Live:
    """An unfinished request: its record, its current step, and what it waits for in the queue."""

    record: Record
    model: ModelName = NO_ROUTER  # the model of a router that it needs
    head: float | None = None  # when the engine's answer began
    step: Step | None = None
    plan: Plan | None = None
    base: SlotContents | None = None  # what its slot holds when it is sent there
    sent: bool = False
    answered: bool = False
    beside: bool = False  # whether its engine had another request during its prefill
    wait: Wait | None = None  # what it waits for in the queue
    seen: float = 0.0  # when that was looked at last, on the driver's clock


class Journal:
    """Holds the last `size` requests. With size 0 it keeps none, but follows each until it ends."""

    def __init__(self, size: int) -> None:
        self._records: deque[Record] = deque(maxlen=size)
        self._live: dict[RequestId, _Live] = {}
        self._up: dict[EngineId, ModelName] = {}  # the engines that are up, and their models
        self._speeds: dict[EngineId, EngineSpeed] = {}
        self._looked = 0.0  # when all queued requests were looked at, on the driver's clock
        self.compares: Compares = lambda *_: None
        self.owners = Owners()
        self.clients = Clients()

    def __repr__(self) -> str:
        return f"<Journal {len(self._records)} requests, {len(self._live)} under way>"

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """Yield the records, the newest first."""
        return reversed(self._records)

    def find(self, request_id: str) -> Record | None:
        """Return the newest record with that id, else the newest whose id ends so."""
        for record in self:
            if record.request_id == request_id:
                return record
        if len(request_id) < SHORTEST:
            return None
        return next((record for record in self if record.request_id.endswith(request_id)), None)

    def took_slot(self, record: Record) -> Record | None:
        """Return the first request that took the slot of the conversation's previous request."""
        between: list[Record] = []
        older = dropwhile(lambda other: other is not record, self)
        for other in islice(older, 1, None):
            if other.conversation is not None and other.conversation == record.conversation:
                place = (other.engine, other.slot)
                return next((one for one in reversed(between) if (one.engine, one.slot) == place), None)
            between.append(other)
        return None

    def arrived(self, record: Record) -> None:
        self._records.append(record)

    def follow(self, key: RequestId, record: Record) -> None:
        """Begin to follow a request that the driver knows by `key`."""
        record.key = key
        self._live[key] = _Live(record)
        if len(self._live) > FOLLOWED:
            del self._live[next(iter(self._live))]

    def saw(
        self, event: Event, effects: Iterable[Effect], begun: float, now: float, pending: Pendings
    ) -> None:
        """Note an event, and the effects decided on between `begun` and `now` (the driver's clock)."""
        key = getattr(event, "request", NO_REQUEST)
        concerned = self._live.get(key)
        if concerned is not None:
            _event(concerned, event, self._waits_for)
            if isinstance(event, Finished):
                self._measure(concerned, event)
        self._engines(event)
        self._own(event, effects)
        for effect in effects:
            live = self._live.get(getattr(effect, "request", NO_REQUEST))
            if live is not None:
                _effect(live, effect, begun, now, pending)
                if isinstance(effect, Forward):
                    self._joins(live)
                if isinstance(effect, Report):
                    self._compare(live.record)
                    self.clients.add(live.record)
                    del self._live[effect.request]
        # If no slot was chosen, or the scheduler was replaced, there is no report.
        over = concerned is not None and concerned.answered and pending(key) is None
        if over or isinstance(event, Gone):
            self._live.pop(key, None)

    def look(self, event: Event, effects: Iterable[Effect], at: float, waits: Waits) -> None:
        """Note what requests wait for in the queue: those concerned, and now and then all of them."""
        if at - self._looked >= LOOK_SECONDS or isinstance(event, EngineUp | EngineLost):
            self._looked, concerned = at, set(self._live)
        else:
            concerned = {getattr(each, "request", NO_REQUEST) for each in (event, *effects)}
        for key in concerned & self._live.keys():
            live = self._live[key]
            _waits(live, at, waits(key) if live.record.doing in WAITING else None)

    def running(self) -> Iterator[Record]:
        """Yield the unfinished requests, newest first, even those that the journal no longer holds."""
        records = {id(live.record): live.record for live in reversed(self._live.values())}
        return (record for record in records.values() if record.outcome == RUNNING)

    def planting(self, key: RequestId, computed: int) -> None:
        """Note how many tokens the running plant of a request has computed so far."""
        live = self._live.get(key)
        if live is not None and live.record.work:
            live.record.work.planting = computed

    def _engines(self, event: Event) -> None:
        """Note which engines are up, and for what each unplaced request waits from now on."""
        match event:
            case EngineUp():
                self._up[event.engine] = event.model
            case EngineLost():
                self._up.pop(event.engine, None)
            case EnginesNamed():
                self._up = {e: m for e, m in self._up.items() if EngineAddress.of(e).base in event.engines}
                self._speeds = {e: speed for e, speed in self._speeds.items() if e in self._up}
            case _:
                return
        for live in self._live.values():
            waits = self._waits_for(live.model)
            if live.record.doing in WAITING and live.record.doing is not waits:
                live.record.passes(event.at, waits)

    def _waits_for(self, model: ModelName) -> RequestStage:
        """Return for what an unplaced request for a router's model waits; NO_ROUTER: for any engine."""
        if model in self._up.values():
            return RequestStage.QUEUE
        return RequestStage.SWAP if model else RequestStage.ENGINE

    def _joins(self, live: _Live) -> None:
        """Note whose prefill another request slows down: it does not tell the engine's own speed."""
        for other in self._live.values():
            there = other.sent and not other.answered and other.record.engine == live.record.engine
            if there and other is not live:
                live.beside = True
                other.beside |= other.record.first_token is None

    def _measure(self, live: _Live, event: Finished) -> None:
        """Take in the time of a prefill, by the engine's own figures, if it had the engine to itself."""
        engine, prompt, cached = live.record.engine, event.prompt_tokens, event.cached
        if engine is None or prompt is None or cached is None or not event.prefill_seconds or live.beside:
            return
        speed = self._speeds.setdefault(EngineId(engine), EngineSpeed())
        speed.took(Prefilled(tokens=prompt - cached, context=cached, seconds=event.prefill_seconds))

    def _compare(self, record: Record) -> None:
        """Note the least that an answered request can have waited, by the speed of its engine so far."""
        speed = self._speeds.get(EngineId(record.engine or ""))
        if speed is None or record.usage is None:
            return
        record.least_seconds = least_seconds(speed.times, record.oracle, record.usage.prompt)
        if record.first_token is not None and record.least_seconds is not None:
            self.compares(record.first_token, record.least_seconds)

    def _own(self, event: Event, effects: Iterable[Effect]) -> None:
        """Note whose state a file holds: a prefix for others is the request's, all else the slot's."""
        if isinstance(event, Saved) and event.snapshot:
            self.owners.saved(event.request, event.snapshot.id)
        for effect in effects:
            live = self._live.get(getattr(effect, "request", NO_REQUEST))
            if isinstance(effect, Restore) and live:
                self.owners.restored(effect.snapshot.id, live.record)
            elif isinstance(effect, Save):
                if live and effect.moment is SaveMoment.BOUNDARY:
                    owner: Record | None = live.record
                else:
                    place = effect.place.engine, effect.place.slot
                    owner = next((one for one in self if (one.engine, one.slot) == place), None)
                self.owners.saving(effect.request, owner)


def _waits(live: _Live, at: float, waiting: Waiting | None) -> None:
    """Note what the request has waited for until `at`, and what it waits for from now on; None: nothing."""
    queued = live.record.queued
    if live.wait is not None:
        queued[live.wait].seconds += max(0.0, at - live.seen)
    live.wait, live.seen = waiting.wait if waiting else None, at
    if waiting is not None:
        queued.setdefault(waiting.wait, QueueWait()).sees(map(id_of, waiting.behind))


WAITING: Final = frozenset({RequestStage.ENGINE, RequestStage.SWAP, RequestStage.QUEUE})


def _event(live: _Live, event: Event, waits_for: Callable[[ModelName], RequestStage]) -> None:
    record = live.record
    match event:
        case Arrived():
            live.model, record.priority = event.model, event.hints.priority
            _gap(record, event.at, waits_for(event.model))
        case Rendered(prompt=prompt) if record.decision and live.base and prompt is not None:
            record.decision = replace(record.decision, common=live.base.tokens.lcp(prompt))
        case Started():
            live.head = event.at
        case Saved(engine=engine) if engine is not None:
            pass  # only its file was checked: the step has ended before
        case Planted() | Saved() | Restored() | Erased():
            _step_ended(live, event)
        case Finished():
            _answered(live, event)
        case Gone():
            _left(live, event.at)
        case _:
            pass


def _gap(record: Record, at: float, then: RequestStage) -> None:
    """Begin a stage. If the time since the last one ended is only that of our own work, it counts with it.

    Reading a request is no gap, however brief.
    """
    took, read = at - record.since, record.doing is RequestStage.PARSE
    if took <= 0 or (took < BRIEFEST_WAIT and not read):
        record.doing = then
    else:
        record.passes(at, then)


def _step_ended(live: _Live, event: Planted | Saved | Restored | Erased) -> None:
    if live.step is None:
        return
    stage, tokens, note = shown_as(live.step)
    computed = event.computed if isinstance(event, Planted) else tokens
    live.record.passes(event.at, RequestStage.QUEUE, stage=stage, tokens=computed, note=note)
    live.step = None
    if isinstance(event, Planted) and live.record.work:
        live.record.work.planted += event.computed or 0
        live.record.work.planting = 0


def _left(live: _Live, at: float) -> None:
    """Add the time of a request that has broken off. It may be sent again, when an engine is back."""
    _waits(live, at, None)
    if live.head is not None:
        _ran(live, live.head, _first_token(live.record, at), at)
    elif live.sent:
        live.record.passes(at, None, stage=RequestStage.FORWARD)
    else:
        _waited(live, at)
    live.record.doing = RequestStage.ENGINE


def _waited(live: _Live, until: float) -> None:
    """Add the time spent in the queue, or in a step whose end was not seen."""
    if live.step is None:
        live.record.passes(until, RequestStage.QUEUE)
    else:
        stage, _, note = shown_as(live.step)
        live.record.passes(until, RequestStage.QUEUE, stage=stage, note=note)
        live.step = None


def _answered(live: _Live, event: Finished) -> None:
    """Add the time of the answer.

    If it came all at once, the engine says how long the prefill took, unless the first token was seen. What
    follows until the request is closed is its answer, too.
    """
    end, prefill = event.at, event.prefill_seconds or 0.0
    head, first = end if live.head is None else live.head, _first_token(live.record, end)
    if end - head < prefill:
        head = live.record.since
        first = first if live.record.first_token is not None else head + prefill
    _ran(live, head, first, end, tokens=event.generated)
    live.record.doing = RequestStage.GENERATE
    live.answered = True


def _first_token(record: Record, end: float) -> float:
    """Return when the first token came; the end if it was not seen."""
    return end if record.first_token is None else record.at + record.first_token


def _ran(live: _Live, head: float, first: float, end: float, *, tokens: int | None = None) -> None:
    first = min(max(first, head), end)
    live.record.passes(head, None, stage=RequestStage.FORWARD)
    live.record.passes(first, None, stage=RequestStage.PREFILL)
    live.record.passes(end, None, stage=RequestStage.GENERATE, tokens=tokens)


def _effect(live: _Live, effect: Effect, begun: float, now: float, pending: Pendings) -> None:
    record = live.record
    match effect:
        case Prefill() | Save() | Restore() | Erase():
            _decided(live, pending(effect.request), begun, now)
            _gap(record, now, shown_as(effect)[0])
            live.step = effect
            if isinstance(effect, Prefill) and record.work is None:
                record.work = Work(begun=now)
        case Forward():
            _forwarded(live, effect, begun, now, pending(effect.request))
        case Report():
            _reported(record, effect)
        case Pooled():
            record.pooled.append(effect)
        case Ranked():
            record.ranked.append(effect)


def _forwarded(live: _Live, forward: Forward, begun: float, now: float, pending: Pending | None) -> None:
    if pending is None or pending.plan is None:
        _unplanned(live, forward, begun)
    else:
        _decided(live, pending, begun, now)
    record = live.record
    record.engine, record.slot = forward.engine, forward.slot
    _gap(record, now, RequestStage.FORWARD)
    live.sent = True
    record.work = record.work or Work(begun=now)


def _reported(record: Record, report: Report) -> None:
    record.slot = report.slot if report.slot is not None else record.slot
    record.usage, record.lost = report.usage, report.lost
    if record.prompt_tokens is None and report.usage:  # broken off: what the engine processed
        record.prompt_tokens = report.usage.prompt
    record.predicted, record.oracle, record.unknown = report.predicted, report.oracle, report.unknown
    record.reused_seconds, record.step_seconds = report.reused_seconds, report.step_seconds


# -- the decision ------------------------------------------------------------------------------------


def _decided(live: _Live, pending: Pending | None, begun: float, now: float) -> None:
    """Note the decision, once for each slot that was chosen: after a failed step, another is chosen."""
    if pending is None or pending.plan is None or pending.plan is live.plan:
        return
    live.plan = plan = pending.plan
    live.record.passes(begun, RequestStage.DECIDE)
    live.record.passes(now, RequestStage.QUEUE)
    live.base = held = plan.reuse_plan.base if plan.reuse_plan else pending.base
    live.record.decision = Decision(
        chosen=option(plan),
        beaten=tuple(map(option, plan.beaten)),
        rate=plan.table.rates.prefill.mean,
        measured=plan.table.rates.prefill.measured,
        held=held.total if held else 0,
        common=held.tokens.lcp(pending.prompt) if held and pending.prompt is not None else None,
    )


def _unplanned(live: _Live, effect: Forward, begun: float) -> None:
    """Note that the request is sent without a plan of ours, whatever was decided before."""
    _waits(live, begun, None)
    _waited(live, begun)
    chosen = Option(reason=effect.reason, engine=effect.engine, slot=effect.slot, reuse=None, price=0.0)
    live.record.decision = Decision(chosen=chosen)
