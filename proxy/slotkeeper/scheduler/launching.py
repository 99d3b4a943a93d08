"""Start a request once its place is chosen: first its steps in the slot, then the request itself."""

from __future__ import annotations

from slotkeeper.scheduler import kv_pool
from slotkeeper.scheduler.choice import Plan
from slotkeeper.scheduler.effects import Effect, Forward
from slotkeeper.scheduler.pending import Pending, Stage
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.steps import effect
from slotkeeper.scheduler.table import SlotState
from slotkeeper.scheduler.types import Reason, SlotId


def requeue(state: State, pending: Pending) -> None:
    """Put a request back into the queue. Its slot was lost with the engine, or by a step that failed."""
    pending.stage = Stage.QUEUED
    pending.queued_at, pending.aged, pending.stood_back = state.at, False, False
    if pending.plan:
        pending.plan.table.work.ends(pending.arrived.request)
    pending.plan = pending.slot = None
    pending.steps_left = 0
    state.queue.put_back(pending.arrived.request, pending.arrived.client)


def begin(state: State, pending: Pending, plan: Plan, now: float) -> Effect:
    state.begun += 1
    state.served_at[pending.arrived.hints.priority] = now
    pending.waited += now - pending.queued_at
    pending.plan, pending.begun_at = plan, now
    plan.table.shadow.mixed |= plan.table.shadow.own_set(pending.arrived.space)
    pending.work_begins(now)
    kv_pool.reserve(state, pending, plan)
    pending.steps_left = len(plan.steps)
    base = plan.found
    pending.ahead_from = state.ahead.begins(base.tokens) if base else None
    if plan.slot is not None and not pending.arrived.action:
        plan.table.crowd(plan.slot, pending.arrived.hash_chain, now)
    if not plan.steps:
        return forward(pending, now)
    if plan.slot is None:
        raise AssertionError("a step needs a slot")
    pending.stage = Stage.PREPARING
    pending.slot = plan.slot
    return next_step(state, pending, now)


def next_step(state: State, pending: Pending, now: float) -> Effect:
    plan, owner = pending.plan, pending.arrived.request
    if plan is None or plan.slot is None:
        raise AssertionError("only a planned request takes steps")
    plan.table.move(plan.slot, SlotState.LAUNCHED, owner, now)
    pending.step_began = now
    return effect(pending.step, owner, plan.table, plan.slot, tree=state.tree(plan.table.model))


def forward(pending: Pending, now: float) -> Forward:
    """Return the effect that sends the request, and update the shadow as the engine will change its slots."""
    plan, request = pending.plan, pending.arrived.request
    if plan is None:
        raise AssertionError("only a planned request is forwarded")
    table, slot = plan.table, plan.slot
    if slot is not None and not pending.arrived.action:  # an action starts no task
        _launch(pending, plan, slot)
    pending.stage = Stage.RUNNING
    if plan.pinned and slot is not None:
        pending.slot = slot
        table.move(slot, SlotState.LAUNCHED, request, now)
    else:
        pending.slot = None
        if slot is not None and table.owners[slot] == request:
            table.move(slot, SlotState.IDLE, None, now)
        table.send(request, pending.arrived.copies, now, alone=plan.cleared)
    pending.predict()
    return Forward(
        request=request,
        engine=table.engine,
        slot=slot if plan.pinned else None,
        reason=plan.reason,
        changed=pending.goes_changed,
        apart=plan.apart,
        strict=table.shadow.apart(pending.arrived.space),
        priority=pending.arrived.hints.priority,
        waited=pending.waited,
    )


def _launch(pending: Pending, plan: Plan, slot: SlotId) -> None:
    """Update the shadow for a task that begins in this slot, as far as we know."""
    reuse_plan = pending.reuse_now(plan, slot)
    plan.table.shadow.launch(reuse_plan, plan.table.idle_beside(slot))
    pending.base = reuse_plan.base
    if plan.reason is Reason.BRIEF:
        pending.predicted = reuse_plan.reuse  # its tokens arrive too late for a better prediction
