"""Take in what happened to requests: answers, disconnects, slot actions, and polls of the slots.

A slot may hold other tokens than the engine and we believe, through a fault of the engine, of its memory or
of a file. A request there continues from a state that is not its own. Its answer is then about something
else, maybe about another client's prompt. The engine's own count of reused tokens reveals this if it is
impossibly high.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from slotkeeper.scheduler.effects import Effect, Poison, Poisoned, Prefill, Restore, Save, Step
from slotkeeper.scheduler.events import (
    Acted,
    Finished,
    Gone,
    NextKnown,
    Observed,
    ObserveFailed,
    ReplyKnown,
    RequestFailed,
    Started,
)
from slotkeeper.scheduler.policies import kv_pool
from slotkeeper.scheduler.policies.adapters import UNSURE
from slotkeeper.scheduler.prices import share_guesses
from slotkeeper.scheduler.prompts.prompt_tree import PromptTree
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.pending import SURPRISE, Ended, Pending, Plan, Running
from slotkeeper.scheduler.slots.engine_model import cells_of, user_starts
from slotkeeper.scheduler.slots.shadow import Source
from slotkeeper.scheduler.slots.slot_contents import SlotContents, parks
from slotkeeper.scheduler.slots.table import EngineTable, SlotState
from slotkeeper.scheduler.snapshots import retention
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import Place, RequestId, SlotId

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
        arrived_at=pending.arrived.at,
        space=pending.arrived.space,
        calls_tools=event.calls_tools,
    )
    if contents.turns > 1:
        table.rates.paused(contents.pauses[-1:])
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
