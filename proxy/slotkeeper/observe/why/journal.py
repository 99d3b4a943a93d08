"""The journal of the last requests, written from what passes the driver. It decides nothing.

Every method is a few assignments: what must be compared or put into words is done for whoever asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from slotkeeper.core.choice import Plan
from slotkeeper.core.effects import Effect, Erase, Forward, Plant, Report, Restore, Save
from slotkeeper.core.events import (
    Arrived,
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
from slotkeeper.core.pending import Pending
from slotkeeper.core.steps import Keep, Load, Prefill, Step, Wipe
from slotkeeper.core.types import RequestId
from slotkeeper.observe.why.record import Decision, Option, Record, Stage

FOLLOWED: Final = 4096  # requests under way, at most; whatever would be more was lost by a bug

NOBODY: Final = RequestId("")

Pendings = Callable[[RequestId], Pending | None]
_Effort = Plant | Save | Restore | Erase
STAGES: Final[dict[type, Stage]] = {
    Plant: Stage.PLANT,
    Save: Stage.SAVE,
    Restore: Stage.RESTORE,
    Erase: Stage.ERASE,
}


class _Live:
    """A request under way: its record, and since when it does what it does."""

    __slots__ = ("head", "plan", "record", "rendering", "since", "step")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.since = record.at  # it waits for a place, or was sent
        self.rendering = record.at
        self.head: float | None = None  # when the engine's answer began
        self.step: tuple[_Effort, float] | None = None
        self.plan: Plan | None = None


class Journal:
    """Holds the last `size` requests; with 0 it keeps none."""

    def __init__(self, size: int) -> None:
        self._records: deque[Record] = deque(maxlen=size)
        self._live: dict[RequestId, _Live] = {}
        self.sinks: list[Callable[[Record], None]] = []  # who wants each record once it has ended

    def __repr__(self) -> str:
        return f"<Journal {len(self._records)} requests, {len(self._live)} under way>"

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """The newest first."""
        return reversed(self._records)

    def find(self, request_id: str) -> Record | None:
        """The newest with that id, or with one that ends so."""
        exact = next((record for record in self if record.request_id == request_id), None)
        return exact or next((record for record in self if record.request_id.endswith(request_id)), None)

    def came(self, record: Record) -> None:
        self._records.append(record)

    def ended(self, record: Record) -> None:
        """Its answer is over. What the core still has to say of it may follow."""
        for sink in self.sinks:
            sink(record)

    def follow(self, key: RequestId, record: Record) -> None:
        """The driver will know it by `key`."""
        if self._records.maxlen:
            self._live[key] = _Live(record)
            if len(self._live) > FOLLOWED:
                del self._live[next(iter(self._live))]

    def saw(
        self, event: Event, effects: Iterable[Effect], begun: float, now: float, pending: Pendings
    ) -> None:
        """What the driver took in at `begun`, and what was made of it by `now`, on its clock."""
        concerned = self._live.get(getattr(event, "request", NOBODY))
        if concerned is not None:
            _event(concerned, event)
            if isinstance(event, Gone):
                del self._live[event.request]
        for effect in effects:
            live = self._live.get(getattr(effect, "request", NOBODY))
            if live is not None:
                _effect(live, effect, begun, now, pending)
                if isinstance(effect, Report):
                    del self._live[effect.request]


def _event(live: _Live, event: Event) -> None:
    record = live.record
    match event:
        case Arrived():
            live.since = live.rendering = event.at
        case Rendered():
            tokens = len(event.prompt) if event.prompt is not None else None
            record.add(Stage.RENDER, live.rendering, event.at, tokens=tokens)
        case Started():
            live.head = event.at
        case Planted() | Saved() | Restored() | Erased() if live.step is not None:
            effort, begun = live.step
            computed = event.computed if isinstance(event, Planted) else _tokens(effort)
            record.add(STAGES[type(effort)], begun, event.at, tokens=computed, note=_note(effort))
            live.step, live.since = None, event.at
        case Finished():
            _answered(live, event)
        case Gone() if live.head is not None:
            record.add(Stage.FORWARD, live.since, live.head)
            record.add(Stage.GENERATE, live.head, event.at)
        case _:
            pass


def _answered(live: _Live, event: Finished) -> None:
    """Where all came at once nobody saw the first token, but the engine says how long its prefill took."""
    record, end, prefill = live.record, event.at, event.prefill_seconds or 0.0
    head = live.head if live.head is not None else end
    first = end if record.first_token is None else record.at + record.first_token
    if end - head < prefill:
        head, first = live.since, live.since + prefill
    first = min(max(first, head), end)
    record.add(Stage.FORWARD, live.since, head)
    record.add(Stage.PREFILL, head, first)
    record.add(Stage.GENERATE, first, end, tokens=event.generated)


def _effect(live: _Live, effect: Effect, begun: float, now: float, pending: Pendings) -> None:
    record = live.record
    match effect:
        case Plant() | Save() | Restore() | Erase():
            _decided(live, pending(effect.request), begun, now)
            live.step = (effect, now)
        case Forward():
            _decided(live, pending(effect.request), begun, now)
            record.engine, record.slot = effect.engine, effect.slot
            if record.decision is None:
                chosen = Option(
                    reason=effect.reason, engine=effect.engine, slot=effect.slot, reuse=None, price=0.0
                )
                record.decision = Decision(chosen=chosen)
            live.since = now
        case Report():
            record.slot = effect.slot if effect.slot is not None else record.slot
            record.predicted, record.oracle = effect.predicted, effect.oracle
            record.planted, record.lost = effect.planted, effect.lost
            record.saved_seconds = effect.saved_seconds
        case _:
            pass


def _tokens(effort: _Effort) -> int | None:
    match effort:
        case Plant() | Save():
            return len(effort.tokens)
        case Restore():
            return len(effort.snapshot.tokens)
        case Erase():
            return None


def _note(effort: _Effort) -> str:
    match effort:
        case Plant():
            return effort.purpose.value
        case Save():
            return effort.moment.value
        case Restore():
            return effort.snapshot.id
        case Erase():
            return ""


# -- the decision ------------------------------------------------------------------------------------


def _decided(live: _Live, pending: Pending | None, begun: float, now: float) -> None:
    """Once for each place that was found: after a step that failed there is another."""
    if pending is None or pending.plan is None or pending.plan is live.plan:
        return
    live.plan = plan = pending.plan
    live.record.add(Stage.QUEUE, live.since, begun)
    live.record.add(Stage.DECIDE, begun, now)
    held = plan.look.base if plan.look else pending.base
    live.record.decision = Decision(
        chosen=_option(plan),
        beaten=tuple(map(_option, plan.beaten)),
        rate=plan.table.rates.prefill,
        held=held.total if held else 0,
        common=held.tokens.lcp(pending.prompt) if held and pending.prompt is not None else None,
    )


def _option(plan: Plan) -> Option:
    return Option(
        reason=plan.reason,
        engine=plan.table.engine,
        slot=plan.slot,
        reuse=plan.look.reuse if plan.look else None,
        price=plan.price,
        steps=tuple(map(_word, plan.steps)),
    )


def _word(step: Step) -> str:
    match step:
        case Prefill():
            return step.purpose.value
        case Keep():
            return step.moment.value
        case Load():
            return Stage.RESTORE.value
        case Wipe():
            return Stage.ERASE.value
