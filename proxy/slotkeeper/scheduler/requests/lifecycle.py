"""A request once its place is chosen: steps in its slot, the request itself, and all that ends them.

`planting` decides what to plant; this module makes it part of a plan. The ends of idle work's steps arrive
here too, and what any step has changed in a slot, in the catalog and in what we know of the engine. Requests
without a plan are sent here as well: they asked for a bypass, or no engine of their model is up. So are taken
in answers, disconnects, slot actions of others, and polls of the slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, assert_never

from slotkeeper.scheduler import idle_work
from slotkeeper.scheduler.candidates import STEER_TAIL, steer
from slotkeeper.scheduler.effects import (
    Effect,
    Forward,
    Poison,
    Poisoned,
    Prefill,
    Purpose,
    Restore,
    Save,
    Step,
)
from slotkeeper.scheduler.events import (
    Acted,
    Erased,
    Finished,
    Gone,
    NextKnown,
    Observed,
    ObserveFailed,
    Planted,
    ReplyKnown,
    RequestFailed,
    Restored,
    Saved,
    Started,
)
from slotkeeper.scheduler.policies import kv_pool, priority, spaces
from slotkeeper.scheduler.policies.adapters import UNSURE, set_in
from slotkeeper.scheduler.prices import share_guesses
from slotkeeper.scheduler.prompts import planting
from slotkeeper.scheduler.prompts.prompt_tree import PromptTree
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.pending import (
    SURPRISE,
    Ended,
    Pending,
    Plan,
    Preparing,
    Running,
    StepEnded,
)
from slotkeeper.scheduler.requests.steps import WITHOUT_CONTENTS, Chore, begun
from slotkeeper.scheduler.slots.engine_model import (
    TAIL,
    SlotContents,
    cells_of,
    edits_later,
    parks,
    user_starts,
)
from slotkeeper.scheduler.slots.evidence import by_batches
from slotkeeper.scheduler.slots.shadow import ReusePlan, Source
from slotkeeper.scheduler.slots.table import EngineTable, SlotState
from slotkeeper.scheduler.snapshots import retention
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import Loading, Place, PriorityAct, Reason, RequestId, SlotId

SAME: Final = {Purpose.HOME, Purpose.DRAFT, Purpose.BACK}  # afterwards the slot is still its conversation's
SAVES_REST: Final = 60.0  # seconds without saves after a failed one
HOPELESS: Final = 3600.0  # the same if the files cannot be used

# -- the beginning: the first step, or the request itself ------------------------------------------------


def begin(state: State, pending: Pending, plan: Plan, now: float) -> Effect:
    """Take a request out of the queue. Returns the effect of its first step, or the one that sends it.

    If no other space's state may look as good to the engine (`Plan.clearing`), and PASSES requests have
    overtaken it, no later request gets a slot of that engine for now.
    """
    request = pending.arrived
    plan = _plants_added(state, pending, plan, now)
    if pending.divisible:
        plan = priority.in_pieces(pending, plan)
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
    preparing = pending.preparing
    first = next_step(state, pending, preparing, now) if preparing else forward(pending, now)
    if plan.clearing and state.overtaken(pending):
        table.hold_back()
    return first


def next_step(state: State, pending: Pending, preparing: Preparing, now: float) -> Effect:
    table, slot, owner = preparing.plan.table, preparing.slot, pending.arrived.request
    table.move(slot, SlotState.LAUNCHED, owner, now)
    return begun(preparing.step, owner, table, slot, tree=state.tree(table.model))


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


def _plants_added(state: State, pending: Pending, plan: Plan, now: float) -> Plan:
    """Return the plan with the plants that are worth it."""
    prompt, reuse_plan = pending.prompt, plan.reuse_plan
    if prompt is None or reuse_plan is None or pending.plain:
        return plan
    table = plan.table
    if table.shadow.isolates(prompt.space) and plan.pinned and not plan.isolated:
        return plan  # it is sent uncached: a plant would be lost
    base, structure = reuse_plan.base, pending.structure
    if base and edits_later(pending.arrived.hash_chain, base, now):  # so nobody else will begin with it
        structure = replace(structure, shared_until=structure.head)
    plants = planting.steps(
        prompt,
        structure,
        reuse_plan=reuse_plan,
        table=table,
        catalog=state.catalog,
        writes=state.writes,
        user_starts=user_starts(prompt, table.traits),
        waiting=len(list(state.waiting_requests())),
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


# -- the ends of steps -----------------------------------------------------------------------------------


def step_ended(state: State, event: StepEnded) -> Iterator[Effect]:
    """Take in the end of a step, of a chore or of a request that is being prepared."""
    if chore := state.chores.get(event.request):
        yield from _of_chore(state, chore, event)
        return
    if isinstance(event, Saved) and event.engine is not None:
        yield from _checked(state, state.tables.get(event.engine), event)
        return
    if isinstance(event, Saved) and event.request not in state.requests and event.snapshot:
        yield from retention.kept(state, event.snapshot, event.at)  # its client has disconnected meanwhile
    pending = state.requests.get(event.request)
    if pending is not None and isinstance(event, Planted):
        pending.counts(event)
    if pending is not None and pending.preparing:
        yield from _request_step_ended(state, pending, pending.preparing, event)


def _request_step_ended(
    state: State, pending: Pending, preparing: Preparing, event: StepEnded
) -> Iterator[Effect]:
    if pending.owned is None:  # the engine was restarted
        requeue(state, pending)
        return
    ok, effects = _take_in(state, preparing.plan.table, preparing.slot, preparing.step, event)
    yield from effects
    if pending.step_ended(preparing, event, ok=ok):
        yield from _go_on(state, pending, preparing, event.at)
    else:
        _without(state, pending, preparing, event.at)


def _of_chore(state: State, chore: Chore, event: StepEnded) -> Iterator[Effect]:
    if chore.owns and isinstance(event, Saved) and event.written:
        chore.written = True
    elif chore.owns:
        _note_ahead(state, chore, event)
        ok, effects = _take_in(state, chore.table, chore.slot, chore.step, event)
        chore.recognise()
        yield from effects
        yield from idle_work.step_ended(state, chore, ok=ok, now=event.at)
    else:  # the engine was restarted; its file is still good
        del state.chores[event.request]
        if isinstance(event, Saved) and event.snapshot:
            yield from retention.kept(state, event.snapshot, event.at)


def _note_ahead(state: State, chore: Chore, event: StepEnded) -> None:
    """Record which tokens were prefetched, before the slot is changed.

    A prefill that was stopped began where the slot's own state ended.
    """
    step = chore.step
    if isinstance(event, Planted) and isinstance(step, Prefill) and step.purpose is Purpose.NEXT:
        if event.computed is not None:
            state.ahead.computed(step.tokens, len(step.tokens) - event.computed)
        elif event.stopped:
            state.ahead.computed(step.tokens, chore.table.shadow.plan_reuse(chore.slot, step.tokens).reuse)


def _without(state: State, pending: Pending, preparing: Preparing, now: float) -> None:
    """Place the request again: a step has failed, or its slot has become uncertain."""
    table, slot = preparing.plan.table, preparing.slot
    if table.owners[slot] == pending.arrived.request:
        table.move(slot, SlotState.IDLE, None, now)
    requeue(state, pending)


def _go_on(state: State, pending: Pending, preparing: Preparing, now: float) -> Iterator[Effect]:
    """Return the next step of a request, or the request itself."""
    plan, table, slot = preparing.plan, preparing.plan.table, preparing.slot
    if (saved_later := _saved_later(state, pending, preparing)) is not None:
        state.writes.give_back(table.bytes_of(saved_later))
    pauses, paused = pending.goes_on(preparing, now, past_save=saved_later is not None), False
    if pauses and (weighed := priority.after_piece(state, pending, slot, now)):
        yield weighed
        paused = weighed.act is PriorityAct.GAVE_WAY
    # The slot was prepared for other adapters, or its engine is being drained meanwhile.
    outdated = spaces.outdated(table, pending) or table.engine in state.drained
    if paused or outdated or table.unsettled or table.orphans:  # the last two: a task may have got it (T1)
        _without(state, pending, preparing, now)
    elif preparing.left:
        yield next_step(state, pending, preparing, now)
    elif plan.clears:
        _without(state, pending, preparing, now)
    elif plan.pinned:
        yield forward(pending, now)
    else:
        table.move(slot, SlotState.RUNNING, pending.arrived.request, now)
        state.steered.append(pending.arrived.request)


def _saved_later(state: State, pending: Pending, preparing: Preparing) -> SlotContents | None:
    """Return the new head that the next step would save, if its file is not worth the wait of all now."""
    table, slot, steps, left = preparing.plan.table, preparing.slot, preparing.plan.steps, preparing.left - 1
    contents = table.shadow.slots[slot]
    if not left or not contents or not planting.kept(steps[: len(steps) - left + 1], 1):
        return None
    end = contents.total
    waiting = list(state.waiting_requests())
    others = (state.requests[request].prompt for request in waiting)
    now = planting.saved_at_once(
        contents.tokens,
        pending.structure,
        slot,
        checkpoints=len(contents.checkpoints),
        waiting=len(waiting),
        awaited=sum(1 for prompt in others if prompt and prompt.lcp(contents.tokens) >= end - TAIL),
        table=table,
        catalog=state.catalog,
    )
    return None if now else contents


def requeue(state: State, pending: Pending) -> None:
    """Put a request back into the queue: it lost its slot, gave way, or must be placed again after a step."""
    pending.requeued(state.at)
    state.decides_again()
    state.queue.put_back(pending.arrived.request, pending.arrived.client)


# -- what a step has changed -----------------------------------------------------------------------------


def _take_in(
    state: State, table: EngineTable, slot: SlotId, step: Step, event: StepEnded
) -> tuple[bool, list[Effect]]:
    """Update the shadow after a step. Returns whether the step's owner can continue, and effects."""
    match event:
        case Planted():
            return _planted(table, slot, step, event), []
        case Saved():
            return event.snapshot is not None, _saved(state, table, slot, event)
        case Restored():
            return event.outcome is Loading.DONE, _restored(state, table, slot, step, event)
        case Erased():
            table.shadow.erase(slot)
            if not event.ok:
                table.erasures_rest(event.at + SAVES_REST)
            return event.ok, []
        case _:
            assert_never(event)


def _planted(table: EngineTable, slot: SlotId, step: Step, event: Planted) -> bool:
    if not isinstance(step, Prefill):
        raise AssertionError("a plant answers a prefill")  # noqa: TRY004
    tokens, shadow = step.tokens, table.shadow
    if event.unsent:  # the next attempt would fail as well
        shadow.next_unknown(slot)
        return False
    shadow.ran_with(slot, None if event.computed is None else set_in(tokens.space))
    if event.computed is None:  # the engine may still be running it
        if event.stopped:
            shadow.stopped(slot, tokens)
        else:
            shadow.lost(slot)
        if step.purpose is Purpose.EMPTY:
            table.touches_rest(event.at + SAVES_REST)
        table.leave(slot, event.at)
        return False
    end, cached = len(tokens), len(tokens) - event.computed
    reuse_plan, copied_bytes = shadow.prefill_ended(slot, tokens)
    table.rates.prefilled(event.computed, event.seconds)
    if event.copied_seconds is not None and len(table.idle_beside(slot)) == len(table.states) - 1:
        table.rates.copied(copied_bytes, event.copied_seconds)
    cuts = None if tokens.chunks else event.cuts  # the engine also ends a batch at each image
    table.learn(by_batches(table.traits, cached=cached, end=end, cuts=cuts))
    if step.purpose in WITHOUT_CONTENTS:
        shadow.touch(slot, table.idle_beside(slot))
    else:
        _prefilled(table, slot, step, event, reuse_plan)
    return True


def _prefilled(
    table: EngineTable, slot: SlotId, step: Prefill, event: Planted, reuse_plan: ReusePlan
) -> None:
    """Update the slot's contents after a prefill that was to reuse what `reuse_plan` says."""
    tokens, shadow = step.tokens, table.shadow
    before, cached = shadow.slots[slot], len(tokens) - (event.computed or 0)
    if reuse_plan.source is Source.RAM and cached < reuse_plan.reuse - SURPRISE:
        shadow.forget_ram()  # the engine loaded another entry
    shadow.finish(
        slot,
        prompt=tokens,
        prompt_tokens=len(tokens),
        cached=cached,
        generated=0,
        user_starts=(),  # a raw prompt has no messages (engine.md 1.6)
        hash_chain=before.hash_chain if before and step.purpose in SAME else (),
        request=event.request,
        calls_tools=before.calls_tools if before and step.purpose in SAME else None,
        now=before.used if before and step.purpose.idle else event.at,
    )


def _checked(state: State, table: EngineTable | None, event: Saved) -> Iterator[Effect]:
    """Take in the check of a file that had been written: it is in the catalog now, or failed."""
    contents = state.coming.pop(event.request, None)
    state.decides_again()
    if table is None:
        yield from retention.kept(state, event.snapshot, event.at) if event.snapshot else ()
        return
    if contents and contents.opaque and event.tokens is not None:
        table.shadow.seen_in_file(contents, event.tokens)
    yield from _account(state, table, event, contents)


def _saved(state: State, table: EngineTable, slot: SlotId, event: Saved) -> list[Effect]:
    """Take in a saved file: it shows what the slot really held, and which checkpoints it carries."""
    contents = table.shadow.slots[slot]
    if event.written:
        if contents:
            state.coming[event.request] = contents
        return []
    if contents and event.tokens is not None:
        carried = event.checkpoints if event.snapshot and table.traits.files_carry else None
        if carried and not contents.tokens.chunks:
            table.learn(table.doubts.by_file(table.traits, contents, carried))
        table.shadow.observed(slot, contents.seen_as(event.tokens, carried))
    return _account(state, table, event, contents)


def _account(state: State, table: EngineTable, event: Saved, contents: SlotContents | None) -> list[Effect]:
    """Learn from a save about the engine and its folder, and make room for a new file."""
    snapshot = event.snapshot
    if snapshot is None:
        if event.lasting:
            table.saves_rest(event.at + SAVES_REST)
        return []
    if event.request in table.suspect:
        return retention.drop(state, snapshot)
    table.learn_files(snapshot)
    kept, written = len(snapshot.checkpoints), max(len(snapshot.checkpoints), len(event.checkpoints))
    left_out = table.file_bytes(0, written) - table.file_bytes(0, kept)  # after the engine had written them
    table.rates.saved(snapshot.size + left_out, event.seconds)
    if contents and not snapshot.shared:
        snapshot = replace(snapshot, turns=contents.turns)
    effects = retention.kept(state, snapshot, event.at)
    fits = snapshot.id in state.catalog  # otherwise there was no room for it
    if fits and not state.catalog.covered(snapshot.tokens, table.traits):  # it cannot be extended (T4)
        table.saves_rest(event.at + HOPELESS)
        effects += retention.drop(state, snapshot)
    return effects


def _restored(state: State, table: EngineTable, slot: SlotId, step: Step, event: Restored) -> list[Effect]:
    if not isinstance(step, Restore):
        raise AssertionError("a restore answers a load")  # noqa: TRY004
    snapshot = step.snapshot
    table.rates.brought(snapshot.size, event.brought)
    match event.outcome:
        case Loading.DONE:
            whole = snapshot if event.checkpoints else replace(snapshot, checkpoints=())
            table.restored(slot, whole, event.at)
            table.rates.restored(snapshot.size, event.seconds)
            return []
        case Loading.UNFIT:
            state.catalog.take(snapshot.id)
            return []
        case Loading.REFUSED:
            table.shadow.erase(slot)
            if not cells_of(table.traits):  # a pool may lack adjacent cells for it
                # Its file is kept: perhaps the engine is not as we think.
                state.catalog.take(snapshot.id)
            return []
        case Loading.LOST:
            table.shadow.lost(slot)
            table.leave(slot, event.at)
            return []
        case _:
            assert_never(event.outcome)


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


# -- slots that hold something else than we believe -----------------------------------------------------

# A slot may hold other tokens than the engine and we believe, through a fault of the engine, of its memory or
# of a file. A request there continues from a state that is not its own. Its answer is then about something
# else, maybe about another client's prompt. The engine's own count of reused tokens reveals this if it is
# impossibly high.


SLIP: Final = 64  # tokens by which our count may differ although nothing is wrong
Claim = tuple[Poison, int]  # the fault, and the most tokens that can have been reused


def impossible(pending: Pending, tree: PromptTree, *, prompt_tokens: int, cached: int) -> Claim | None:
    """Return the fault that an answer's count of reused tokens reveals; None if the count is possible.

    None also if it cannot be judged, because others use the engine or the prompt is unknown. Call this
    before the shadow and the tree take in the request.
    """
    prompt, plan, base = pending.prompt, pending.plan, pending.base
    if plan is None or prompt is None or len(prompt) != prompt_tokens or not plan.table.private:
        return None
    table = plan.table
    own = max(_most(prompt, (base,)), pending.reached)
    if cached <= own + SLIP:
        return None
    anywhere = max(own, tree.longest(prompt), _most(prompt, (*table.shadow.slots, *table.shadow.ram)))
    if cached > anywhere + table.unknown + SLIP:
        return Poison.UNHEARD, anywhere
    return (Poison.FOREIGN, own) if _only_in_its_slot(pending, plan, prompt) else None


def _only_in_its_slot(pending: Pending, plan: Plan, prompt: Tokens) -> bool:
    """Whether only the known contents of the slot can have been reused, and no entry of the RAM cache."""
    base = pending.base
    common = base.tokens.lcp(prompt) if base else 0
    may_load = pending.loads or parks(base, plan.table.traits, common, len(prompt))
    return plan.pinned and not may_load and not (base is not None and base.rough)


def _most(prompt: Tokens, states: Iterable[SlotContents | None]) -> int:
    """Return the most tokens that the prompt can share with these states; unknown ones may be equal."""
    most = 0
    for contents in states:
        common = contents.tokens.lcp(prompt) if contents else 0
        opaque = contents.opaque if contents and common == len(contents.tokens) else 0
        most = max(most, common + opaque)
    return most


# -- what happened to requests ---------------------------------------------------------------------------


def started(state: State, event: Started) -> None:
    pending = state.requests.get(event.request)
    owned = pending.owned if pending else None
    if owned and owned[0].states[owned[1]] is SlotState.LAUNCHED:
        owned[0].move(owned[1], SlotState.RUNNING, event.request, event.at)
    if pending and event.before_prefill:
        pending.computes(event.at)


def finished(state: State, event: Finished) -> Iterator[Effect]:
    pending = state.requests.get(event.request)
    if pending is None:
        return
    pending.ended(event)
    table, forgotten = pending.table, False
    claim = _claim(state, pending, event)
    if owned := pending.owned:
        pinned = pending.plan is not None and pending.plan.pinned
        _release(pending, *owned, event, event.at, certain=pinned or event.slot == owned[1])
    elif table and event.request in table.unsettled:
        forgotten = _end_unseen(pending, table, event)
    if event.generated is not None and pending.arrived.generates:
        state.outputs.add(pending.arrived.kind, event.generated)
    if event.prompt_tokens is not None:
        if table and cells_of(table.traits):
            yield from kv_pool.purged(state, table, pending, event.left)
        if table and not event.failed:
            table.breaker.worked()
        pending.remember(state.tree(pending.arrived.model), event.at)
        state.pauses.begins(pending.arrived, pending.pauses, event.calls_tools, event.at)
        yield from _poisoned(state, pending, event, *claim) if claim else _learn(state, pending, event)
    yield from close(state, pending)
    if forgotten:
        yield from close_ended(state)


def request_failed(state: State, event: RequestFailed) -> None:
    if (table := state.tables.get(event.engine)) and table.up:
        table.request_failed(event.at, broken=event.broken)


def acted(state: State, event: Acted) -> None:
    """Take in a client's own slot action. The slot is free at once, since no task ran there."""
    pending = state.requests.pop(event.request, None)
    table = pending.table if pending else None
    if pending is None or table is None:
        return
    table.work.ends(event.request)
    if owned := pending.owned:
        table.client_acted(owned[1], event.left, event.at)
    else:  # it was sent without a slot
        table.ran_no_task(event.request)


def close(state: State, pending: Pending) -> Iterator[Effect]:
    """Report and forget a request whose answer has ended, whose tokens are known and whose slot was seen."""
    request, table = pending.arrived.request, pending.table
    if not isinstance(pending.stage, Ended) or not pending.rendered:
        return
    if table and any(orphan.request == request for orphan in table.orphans):
        return
    if report := pending.report():
        yield report
    del state.requests[request]
    if table is None:
        state.ended_early(pending)


def close_ended(state: State) -> Iterator[Effect]:
    for pending in [p for p in state.requests.values() if isinstance(p.stage, Ended)]:
        yield from close(state, pending)


def _release(
    pending: Pending, table: EngineTable, slot: SlotId, event: Finished, now: float, *, certain: bool
) -> None:
    """Free the slot of a finished request. If the slot is not `certain`, GET /slots must confirm it first."""
    if event.prompt_tokens is None:  # an error answer: the slot is unchanged, but it may not be free yet
        table.shadow.ran_with(slot, None)
        table.leave(slot, now)
        return
    cached = event.cached if event.cached is not None else pending.predicted or 0
    prompt = pending.prompt
    if prompt is not None and prompt.chunks and len(prompt) != event.prompt_tokens:
        prompt = None  # an image is longer than we believed, or shorter: nothing behind it is where we think
    contents = table.shadow.finish(
        slot,
        prompt=prompt,
        prompt_tokens=event.prompt_tokens,
        cached=cached,
        generated=event.generated,
        user_starts=user_starts(prompt, table.traits),
        hash_chain=pending.arrived.hash_chain,
        request=event.request,
        now=now,
        space=pending.arrived.space,
        calls_tools=event.calls_tools,
    )
    table.shadow.ran_with(slot, pending.arrived.adapters)
    if pending.arrived.adapters == UNSURE:
        table.shadow.doubted(slot)
    table.move(slot, SlotState.IDLE if certain and not contents.rough else SlotState.DRAINING, None, now)
    holds_more = table.traits.speculative  # perhaps more than the answer's tokens (engine.md 3)
    # Nor is it certain that its task emptied no idle slot until one was seen to survive a task (T6).
    wiped = not table.proven and any(table.shadow.slots[other] for other in table.idle_beside(slot))
    if holds_more or wiped:
        table.look()


def _end_unseen(pending: Pending, table: EngineTable, event: Finished) -> bool:
    """Take in an unpinned request that ended before GET /slots showed its slot.

    Returns whether another such request was given up for it.
    """
    if pending.slot is None:
        return table.ended_unseen(event.request, event.left, event.at)
    table.ran_in(pending.slot, event.request, event.at)
    _release(pending, table, pending.slot, event, event.at, certain=True)
    return False


def _claim(state: State, pending: Pending, event: Finished) -> Claim | None:
    """Return a fault that the answer reveals, and record how many unknown tokens the answer leaves behind."""
    table = pending.table
    if table is None or event.prompt_tokens is None:
        return None
    tree, cached = state.tree(table.model), event.cached or 0
    claim = impossible(pending, tree, prompt_tokens=event.prompt_tokens, cached=cached)
    left = (event.generated or 0) + (event.prompt_tokens if pending.prompt is None else 0)
    table.left_unknown(left)
    return claim


def _poisoned(
    state: State, pending: Pending, event: Finished, why: Poison, possible: int
) -> Iterator[Effect]:
    """Discard a wrong state everywhere: in the slot, and in the file that it came from."""
    if pending.plan is None:
        return
    table, slot, request = pending.plan.table, pending.slot, pending.arrived.request
    place = None if slot is None else Place(table.engine, slot)
    yield Poisoned(request=request, place=place, why=why, cached=event.cached or 0, possible=possible)
    for step in pending.plan.steps:
        if isinstance(step, Restore):
            yield from retention.drop(state, step.snapshot)
    if slot is None or table.owners[slot] is not None:
        return
    table.poison(slot)


def _learn(state: State, pending: Pending, event: Finished) -> Iterator[Effect]:
    """Learn from an answer: the engine's speed, what a restore was worth, and wrong predictions."""
    plan, cached = pending.plan, event.cached
    if cached is None or plan is None:
        return
    rates = plan.table.rates
    rates.prefilled((event.prompt_tokens or 0) - cached, event.prefill_seconds)
    if event.prefill_seconds is not None:
        sent_at = pending.pieces_until or pending.begun_at + pending.step_seconds
        began = sent_at if pending.computing_since is None else pending.computing_since
        rates.replied(event.generated or 0, event.at - began - event.prefill_seconds)
    if len(alike := state.up_for(plan.table.model)) > 1:
        share_guesses(alike)
    if plan.source is Source.SNAPSHOT:
        yield from retention.proved(state, plan, cached=cached, now=event.at)
    if pending.predicted is not None:
        _compare(plan, pending.base, predicted=pending.predicted, cached=cached)


def _compare(plan: Plan, base: SlotContents | None, *, predicted: int, cached: int) -> None:
    """Compare the engine's count with our prediction. A large difference means that the shadow is wrong."""
    table = plan.table
    # With images, our account of checkpoints is not exact enough to infer flags.
    if plan.pinned and base and plan.source is Source.SLOT and not base.tokens.chunks:
        table.learn(table.doubts.by_reuse(table.traits, base, predicted=predicted, cached=cached))
    if plan.source is Source.RAM and not cells_of(table.traits):  # a pool may lack adjacent cells
        table.ram_loaded(hit=cached * 2 >= predicted)
        if cached < predicted - SURPRISE:  # the engine loaded another entry
            table.shadow.forget_ram()
    if abs(predicted - cached) > SURPRISE:
        table.look()


def gone(state: State, event: Gone) -> Iterator[Effect]:
    pending = state.requests.get(event.request)
    if pending is None:
        return
    table = pending.table
    state.forget(event.request)
    if pending.preparing:
        state.decides_again()
    if table:
        table.work.ends(event.request)
    if report := pending.broken_off(event):
        yield report
        if pending.prompt is not None and report.usage:  # this part was computed
            state.tree(pending.arrived.model).add(pending.prompt.cut(0, report.usage.prompt), event.at)
    if owned := pending.owned:
        _leave(pending, *owned, event.at)
    elif table and event.request in table.unsettled:
        table.client_left_unseen(event.request, event.at)


def _leave(pending: Pending, table: EngineTable, slot: SlotId, now: float) -> None:
    """Give up the slot of a request whose client disconnected. It holds what was computed so far."""
    table.shadow.ran_with(slot, None)  # its task may not have begun
    if isinstance(pending.stage, Running):
        table.left_unknown(0 if pending.prompt is not None else table.traits.n_ctx)
        table.shadow.observed(slot, pending.left_behind(table))
    elif (preparing := pending.preparing) and preparing.left and not isinstance(preparing.step, Save):
        _leave_step(table, slot, preparing.step, now)  # a save changes nothing
    # A resumable stream continues without its client (engine.md 7): we do not wait for its end.
    table.client_left(slot, pending.arrived.request, now, resumable=pending.arrived.resumable)


def _leave_step(table: EngineTable, slot: SlotId, step: Step, now: float) -> None:
    """Record what a slot will hold that is given up in the middle of a step."""
    if isinstance(step, Restore):
        table.restored_unseen(slot, len(step.snapshot.tokens), now)
    elif isinstance(step, Prefill) and step.parks:
        table.shadow.stopped(slot, step.tokens)
    else:
        table.shadow.lost(slot)  # GET /slots will tell what it holds


def _left_by(request: RequestId, table: EngineTable) -> list[SlotId]:
    """Return the slots that hold what this request left."""
    slots = enumerate(table.shadow.slots)
    return [SlotId(slot) for slot, contents in slots if contents and contents.request == request]


def reply_known(state: State, event: ReplyKnown) -> None:
    _fill_in(state, event.request, event.tokens, event.at)


def _fill_in(state: State, request: RequestId, tokens: Tokens, now: float) -> None:
    """Fill in the tokens of a request wherever its state is: in a slot, in the RAM cache, in a coming file.

    Idle work may have the slot meanwhile. A state whose end stayed unknown would seem to be missing from all
    files, and to be kept in the RAM cache beside a longer state that had replaced it.
    """
    for table in state.tables.values():
        for slot in _left_by(request, table):
            owner = table.owners[slot]
            if owner is None or owner in state.chores:
                state.tree(table.model).add(table.shadow.reply_known(slot, tokens), now)
        table.shadow.reply_known_in_ram(request, tokens)
    for save, contents in state.coming.items():
        if contents.request == request:
            state.coming[save] = contents.known_as(tokens)


def next_known(state: State, event: NextKnown) -> None:
    for table in state.tables.values():
        for slot in _left_by(event.request, table):
            table.shadow.next_known(slot, event.tokens, event.chance)
    for chore in state.chores.values():
        if chore.home and chore.home.request == event.request:
            chore.home = chore.home.followed_by(event.tokens, event.chance)


def observed(state: State, event: Observed) -> Iterator[Effect]:
    table = state.tables.get(event.engine)
    if table is None:
        return
    for request, slot in table.observed(event).items():
        pending = state.requests.get(request)
        if pending is None:
            continue
        pending.seen_in(slot)
        if pending.finished:
            _release(pending, table, slot, pending.finished, event.at, certain=True)
    yield from close_ended(state)


def observe_failed(state: State, event: ObserveFailed) -> None:
    if table := state.tables.get(event.engine):
        table.poll_failed()


def rendered_late(state: State, pending: Pending, now: float) -> Iterator[Effect]:
    """Add the tokens of a request whose answer has already ended to its slot's contents."""
    if not isinstance(pending.stage, Ended):
        return
    pending.remember(state.tree(pending.arrived.model), now)
    if pending.prompt is not None:
        _fill_in(state, pending.arrived.request, pending.prompt, now)
    yield from close(state, pending)
