"""Requests that are sent without a plan: they asked for a bypass, or no engine is up."""

from __future__ import annotations

from collections.abc import Iterator

from slotkeeper.scheduler.choice import Plan
from slotkeeper.scheduler.effects import Effect, Forward
from slotkeeper.scheduler.pending import Pending, Stage
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.types import Reason


def bypass(state: State, now: float) -> Iterator[Effect]:
    """Decision 0: send bypassing requests unpinned.

    They wait while a pinned task is on its way, because the engine could give them its slot.
    """
    for request in tuple(state.bypassing):
        model = state.requests[request].arrived.model
        tables = state.up_for(model)
        ready = [table for table in tables if table.open_for_bypass(now)]
        ready = [table for table in ready if not table.failing] or ready
        if (tables or state.back_by(now, model) is not None) and not ready:
            continue
        state.bypassing.remove(request)
        yield from _sent(state, state.requests[request], ready, Reason.BYPASS, now)


def next_of_all(state: State) -> bool:
    """Whether a bypassing request waits only for pinned tasks to begin, so that no more may be sent.

    One whose engines are all down, drained or being unloaded keeps nothing away from other engines.
    """
    return any(state.open_for(state.requests[request].arrived.model) for request in state.bypassing)


def fail_open(state: State, now: float) -> Iterator[Effect]:
    """Send requests although no engine of their model is up or expected, so that clients get the error."""
    if all(table.up for table in state.tables.values()) and state.tables and not state.routers:
        return
    for request in tuple(state.queue):
        model = state.requests[request].arrived.model
        if state.up_for(model) or state.back_by(now, model) is not None:
            continue
        state.queue.served(request)
        yield from _sent(state, state.requests[request], [], Reason.FAIL_OPEN, now)


def _sent(
    state: State, pending: Pending, ready: list[EngineTable], reason: Reason, now: float
) -> Iterator[Effect]:
    request = pending.arrived.request
    pending.stage = Stage.RUNNING
    table = min(ready, key=lambda t: t.load, default=None)
    if table:
        pending.plan = Plan(table=table, reason=reason, pinned=False)
        table.send(request, pending.arrived.copies, now)
        table.shadow.mixed |= table.shadow.own_set(pending.arrived.space)
    engine = table.engine if table else state.fallback(pending.arrived.model)
    space = pending.arrived.space
    strict = table is not None and table.shadow.apart(space)
    changed = pending.goes_changed
    yield Forward(request=request, engine=engine, slot=None, reason=reason, changed=changed, strict=strict)
