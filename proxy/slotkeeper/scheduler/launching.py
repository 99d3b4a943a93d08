"""Start a request once its place is chosen: plants, steps in the slot, then the request itself.

`planting` decides what to plant; this module makes it part of a plan. It also sends requests without a plan:
they asked for a bypass, or no engine of their model is up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slotkeeper.scheduler import kv_pool, planting, priority
from slotkeeper.scheduler.candidates import STEER_TAIL, steer
from slotkeeper.scheduler.effects import Effect, Forward, Step
from slotkeeper.scheduler.engine_model import TAIL, cells_of, user_starts
from slotkeeper.scheduler.pending import Pending, Plan, Stage
from slotkeeper.scheduler.rates import WORTH_A_FILE
from slotkeeper.scheduler.shadow import Source
from slotkeeper.scheduler.slot_contents import as_file, edits, reuse
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.steps import effect
from slotkeeper.scheduler.table import EngineTable, SlotState
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import Reason

# -- plants ----------------------------------------------------------------------------------------------


def behind(state: State, pending: Pending, plan: Plan | None) -> Plan | None:
    """Return the plan; it waits if a file that will soon be there gives back enough more of the prompt."""
    prompt, reuse_plan = pending.prompt, plan.reuse_plan if plan else None
    if plan is None or prompt is None or reuse_plan is None or pending.plain:
        return plan
    if any(gain - reuse_plan.reuse > least for gain, least in _coming(state, pending, prompt, plan.table)):
        return replace(plan, wait=True)
    return plan


def _coming(state: State, but: Pending, prompt: Tokens, table: EngineTable) -> Iterator[tuple[int, float]]:
    """Yield how much of a prompt each coming file gives back, and how much justifies waiting for it; tokens.

    A file that is written needs only its check, which takes about as long as a restore.
    """
    rates = table.rates
    for contents in state.coming.values():
        price = 2 * rates.restore_price(table.bytes_of(contents))
        yield reuse(as_file(contents, table.traits), prompt, table.traits), price
    for other in state.requests.values():
        if other.stage is Stage.PREPARING and other.plan and other is not but:
            shared = planting.kept(other.plan.steps, other.steps_left)
            if shared and (common := prompt.lcp(shared)) >= len(shared) - TAIL:
                yield common, WORTH_A_FILE


def planted(state: State, pending: Pending, plan: Plan, now: float) -> Plan:
    """Return the plan with the plants that are worth it."""
    prompt, reuse_plan = pending.prompt, plan.reuse_plan
    if prompt is None or reuse_plan is None or pending.plain:
        return plan
    table = plan.table
    if table.shadow.isolates(prompt.space) and plan.pinned and not plan.isolated:
        return plan  # it is sent uncached: a plant would be lost
    base, structure = reuse_plan.base, pending.structure
    if base and edits(pending.arrived.hash_chain, base, now):  # so nobody else will begin with that message
        structure = replace(structure, shared_until=structure.head)
    plants = planting.steps(
        prompt,
        structure,
        reuse_plan=reuse_plan,
        table=table,
        catalog=state.catalog,
        writes=state.writes,
        user_starts=user_starts(prompt, table.traits),
        now=now,
    )
    return _with_plants(plan, plants, prompt, pinnable=pending.arrived.pinnable) if plants else plan


def _with_plants(plan: Plan, plants: tuple[Step, ...], prompt: Tokens, *, pinnable: bool) -> Plan:
    """Return the plan with these steps, pinned or steered so that the request reuses what they compute."""
    if plan.pinned:
        return replace(plan, steps=(*plan.steps, *plants))
    if plan.steps and plan.reason is Reason.STEERED:
        return replace(plan, steps=(*plan.steps[:-1], *plants, plan.steps[-1]))
    reuse_plan = plan.reuse_plan
    if reuse_plan is None or reuse_plan.source is Source.RAM:
        return plan
    if pinnable:
        reason = Reason.PREFIX if reuse_plan.reuse else Reason.COLD
        return replace(plan, pinned=True, reason=reason, steps=plants)
    if len(prompt) > STEER_TAIL:
        return replace(plan, reason=Reason.STEERED, steps=(*plants, steer(prompt)))
    return plan


# -- steps, and the request ------------------------------------------------------------------------------


def requeue(state: State, pending: Pending) -> None:
    """Put a request back into the queue: it lost its slot, gave way, or must be placed again after a step."""
    pending.requeued(state.at)
    state.decides_again()
    state.queue.put_back(pending.arrived.request, pending.arrived.client)


def begin(state: State, pending: Pending, plan: Plan, now: float) -> Effect:
    """Take a request out of the queue. Returns the effect of its first step, or the one that sends it.

    If no other space's state may look as good to the engine (`Plan.clearing`), and PASSES requests have
    overtaken it, no later request gets a slot of that engine for now.
    """
    request = pending.arrived
    plan = priority.in_pieces(pending, planted(state, pending, plan, now))
    table, found = plan.table, plan.found
    state.queue.served(request.request)
    state.begun += 1
    state.served_at[request.hints.priority] = now
    table.shadow.sends(request.space)
    pending.placed(plan, now, ahead_from=state.ahead.begins(found.tokens) if found else None)
    if plan.slot is not None and not request.action:
        if cells_of(table.traits):  # they are promised until the slot is free, also without the client
            table.promise(plan.slot, kv_pool.need(state, pending, table))
        table.crowd(plan.slot, request.hash_chain, now)
    first = next_step(state, pending, now) if plan.steps else forward(pending, now)
    if plan.clearing and state.overtaken(pending):
        table.hold_back()
    return first


def next_step(state: State, pending: Pending, now: float) -> Effect:
    plan, owner = pending.plan, pending.arrived.request
    if plan is None or plan.slot is None:
        raise AssertionError("only a planned request takes steps")
    plan.table.move(plan.slot, SlotState.LAUNCHED, owner, now)
    return effect(pending.step, owner, plan.table, plan.slot, tree=state.tree(plan.table.model))


def forward(pending: Pending, now: float) -> Forward:
    """Return the effect that sends the request to its place."""
    plan, request = pending.sent(now), pending.arrived
    return Forward(
        request=request.request,
        engine=plan.table.engine,
        slot=plan.slot if plan.pinned else None,
        reason=plan.reason,
        changed=pending.goes_changed,
        isolated=plan.isolated,
        strict=plan.table.shadow.isolates(request.space),
        priority=request.hints.priority,
        waited=pending.waited,
    )


# -- without a plan --------------------------------------------------------------------------------------


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
        yield from _sent(state, state.requests[request], ready, now)


def fail_open(state: State, now: float) -> Iterator[Effect]:
    """Send requests although no engine of their model is up or expected, so that clients get the error."""
    if all(table.up for table in state.tables.values()) and state.tables and not state.routers:
        return
    for request in tuple(state.queue):
        model = state.requests[request].arrived.model
        if state.up_for(model) or state.back_by(now, model) is not None:
            continue
        state.queue.served(request)
        yield from _sent(state, state.requests[request], [], now)


def _sent(state: State, pending: Pending, ready: list[EngineTable], now: float) -> Iterator[Effect]:
    request = pending.arrived
    table = min(ready, key=lambda t: t.load, default=None)
    pending.sent_without_place(table, now)
    yield Forward(
        request=request.request,
        engine=table.engine if table else state.fallback(request.model),
        slot=None,
        reason=request.without_plan,
        changed=pending.goes_changed,
        strict=table is not None and table.shadow.isolates(request.space),
    )
