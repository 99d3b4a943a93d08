"""Priorities: the order in which requests are served, their deadlines, and long prefills that give way.

If no request has a priority or a deadline, none of this runs.

Order and deadlines:

1. More urgent requests first; requests of equal priority in the queue's order, which is fair between clients.
2. No priority starves: if no request of a priority has begun for `AGES_AFTER` seconds, its next request is
   served first and does not give way.
3. A request that cannot begin in time (`X-Slotkeeper-Max-Wait`) is refused, unless it had a slot before.

Giving way: while an engine computes one prompt, prompts in other slots wait, because it fills each batch
from the lowest slot on. A task that was sent stops a batch late at best, and the engine may not notice a
disconnect at all (engine.md T10). So a request that its client marks as low is computed in pieces of one
batch. Each piece is one of our own prefills and continues the piece before. No token is computed twice, and
after each piece no task runs. Other requests are sent whole, as without priorities.

4. After a piece the request returns to the queue if a more urgent request waits for a slot or runs on that
   engine, and the gain exceeds the loss. Both are in seconds:
   * gain: the rest of the prefill, and the answer too if the other request needs the slot;
   * loss: a round trip if the request keeps its slot. If the other request needs the slot, the price of the
     state: loading it from the engine's RAM cache, saving and restoring a file, or computing it again.
5. The tokens that a request computes again are limited to `MOST_GIVEN_BACK` of its prompt.
6. A request begins or continues only while no more urgent request runs there, unless it has aged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Final

from slotkeeper.scheduler.candidates import TOUCH_PRICE
from slotkeeper.scheduler.effects import Effect, Erase, Prefill, Purpose, Ranked, Step
from slotkeeper.scheduler.prompts.planting import MIN_COMPUTED_TOKENS
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.pending import Pending, Plan, Preparing, Queued, Running
from slotkeeper.scheduler.slots.engine_model import TAIL, user_starts
from slotkeeper.scheduler.slots.table import EngineTable
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import ModelName, Priority, PriorityAct, Reason, RequestId, SlotId

# SDKs of OpenAI and Anthropic time out after 600 seconds. A low request waits at most twice this time for its
# turn and then runs to its end, so eight minutes are left for computing it.
AGES_AFTER: Final = 60.0  # seconds
COUNTING: Final = 0.25  # seconds to count a request's tokens, which must precede its placement
SOONEST, LATEST = 1, 600  # bounds of `Retry-After`, in seconds
UNKNOWN: Final = 5.0  # seconds, if no running request predicts when a slot will be free


def in_turn(state: State, now: float) -> Sequence[RequestId]:
    """Return the queued requests in the order in which they are served."""
    queue = tuple(state.queue)
    for request in state.hinted.keys() - state.requests.keys():
        del state.hinted[request]
    if not state.hinted:
        return queue
    aged = {found for priority in Priority if (found := _aged(state, queue, priority, now))}
    for request in queue:
        state.requests[request].ages(aged=request in aged)
    return sorted(queue, key=lambda request: (request not in aged, -state.requests[request].rank))


def _aged(state: State, queue: Sequence[RequestId], priority: Priority, now: float) -> RequestId | None:
    """Return the next request of a priority if it has waited too long behind more urgent ones, else None."""
    waiting = _of(state, queue, priority)
    return waiting[0].arrived.request if waiting and now >= _ages_at(state, waiting, priority) else None


def _of(state: State, queue: Sequence[RequestId], priority: Priority) -> Sequence[Pending]:
    """Return the queued requests of a priority; none if no more urgent request keeps them waiting."""
    queued = [state.requests[request] for request in queue]
    found = [pending for pending in queued if pending.arrived.hints.priority is priority]
    behind = any(pending.arrived.hints.priority.rank > priority.rank for pending in queued)
    return found if behind or any(pending.queued.stood_back for pending in found) else []


def _ages_at(state: State, waiting: Sequence[Pending], priority: Priority) -> float:
    """Return the time from which the next of the waiting requests is served first."""
    since = max(min(pending.queued.since for pending in waiting), state.served_at.get(priority, -inf))
    return since + AGES_AFTER


def due_at(state: State, now: float) -> float:
    """Return the time of the next change of order or expiry; infinite if there will be none."""
    queue = tuple(state.queue)
    waiting = ((priority, _of(state, queue, priority)) for priority in Priority)
    ages = [_ages_at(state, found, priority) for priority, found in waiting if found]
    expires = [_expires_at(pending) for pending in _unbegun(state)]
    return min((at for at in (*ages, *expires) if at > now), default=inf)


# -- reports ---------------------------------------------------------------------------------------------


def noted(state: State, pending: Pending, now: float) -> Iterator[Effect]:
    """Report a request that is about to be served out of the queue's order because of priorities."""
    other = _passed(state, pending)
    act = PriorityAct.AGED if pending.aged else PriorityAct.WENT_FIRST if other else None
    if act is not None:
        yield Ranked(
            request=pending.arrived.request,
            act=act,
            priority=pending.arrived.hints.priority,
            other=other,
            waited=waited(pending, now),
        )


def _passed(state: State, pending: Pending) -> RequestId | None:
    """Return the first less urgent request in the queue that this request overtakes."""
    for request in state.queue:
        if request == pending.arrived.request:
            return None
        if state.requests[request].rank < pending.rank:
            return request
    return None


def waited(pending: Pending, now: float) -> float:
    """Return the seconds that the request has spent in the queue so far."""
    return pending.waited + (now - pending.stage.since if isinstance(pending.stage, Queued) else 0.0)


# -- deadlines -------------------------------------------------------------------------------------------


def expire(state: State, now: float) -> Iterator[Effect]:
    """Refuse requests whose deadline has passed; nothing of them was sent to an engine."""
    for pending in tuple(_unbegun(state)):
        if now >= _expires_at(pending):
            state.forget(pending.arrived.request)
            yield Ranked(
                request=pending.arrived.request,
                act=PriorityAct.EXPIRED,
                priority=pending.arrived.hints.priority,
                waited=waited(pending, now),
                retry_after=_free_in(state, pending.arrived.model, now),
            )


def _unbegun(state: State) -> Iterator[Pending]:
    """Yield the queued requests that never had a slot."""
    for request in state.hinted:
        pending = state.requests.get(request)
        if pending and isinstance(pending.stage, Queued) and not pending.begun:
            yield pending


def _expires_at(pending: Pending) -> float:
    until = pending.arrived.hints.start_by
    return until if pending.rendered else max(until, pending.arrived.at + COUNTING)


def _free_in(state: State, model: ModelName, now: float) -> int:
    """Return the seconds until a slot will probably be free."""
    left = (one.left(now) for table in state.up_for(model) for one in table.work.served.values())
    return min(LATEST, max(SOONEST, ceil(min(left, default=UNKNOWN))))


# -- giving way ------------------------------------------------------------------------------------------

MOST_GIVEN_BACK: Final = 0.05  # share of a prompt that may be computed again because its request gave way
OURS: Final = {Purpose.PLANT, Purpose.STEER}  # prefills of a request's own prompt


def in_pieces(pending: Pending, plan: Plan) -> Plan:
    """Return the plan with its prefill divided into batches, between which a divisible request gives way."""
    prompt, found, traits = pending.prompt, plan.reuse_plan, plan.table.traits
    if prompt is None or found is None or not _helped(prompt, plan):
        return plan
    starts = () if traits.cuttable else user_starts(prompt, traits)[-1:]
    batch = max(traits.n_batch, traits.n_ubatch + TAIL)  # the engine makes its checkpoints in the last batch
    steps: list[Step] = []
    at = 0 if any(isinstance(step, Erase) for step in plan.steps) else found.reuse
    for step in plan.steps:
        if isinstance(step, Prefill) and step.purpose in OURS and (end := prompt.lcp(step.tokens)) > at:
            left = len(prompt) - end  # sent with the request itself if less than a batch
            last = max(MIN_COMPUTED_TOKENS, batch - left) if left < batch else batch
            steps += _pieces(prompt, range(at, end), starts, batch, last=last)
            at = end
        steps.append(step)
    if plan.pinned:
        steps += _pieces(prompt, range(at, len(prompt)), starts, batch, last=batch)
    return replace(plan, steps=tuple(steps))


def _helped(prompt: Tokens, plan: Plan) -> bool:
    """Whether prefills of parts help: we choose the slot, no image is cut, the engine uses its cache."""
    chosen = plan.pinned or plan.reason is Reason.STEERED
    uncached = plan.pinned and not plan.isolated and plan.table.shadow.isolates(prompt.space)
    return chosen and not uncached and not prompt.chunks


def _pieces(prompt: Tokens, todo: range, starts: Sequence[int], batch: int, *, last: int) -> Iterator[Step]:
    """Yield prefills of at most one batch each, and leave `last` tokens for the next step.

    The first prefill may be shorter. A prefill that ends `TAIL` tokens behind the start of the last user
    message makes the checkpoint at that start.
    """
    ends = {*range(todo.stop - last, todo.start, -batch)}
    if ends:
        ends |= {start + TAIL for start in starts if todo.start < start < max(ends) - TAIL}
    at = todo.start
    for end in sorted(ends):
        if end - at >= MIN_COMPUTED_TOKENS or end - TAIL in starts:
            yield Prefill(prompt.cut(0, end), Purpose.PIECE)
            at = end


# -- 4, 5: after a piece ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MoreUrgent:
    """A request for which another one may give way."""

    pending: Pending
    waits: bool  # True: it waits for a slot; False: it runs on the same engine


def after_piece(state: State, pending: Pending, slot: SlotId, now: float) -> Ranked | None:
    """Return whether the request gives way now, with gain and loss; None if no request is more urgent."""
    plan, prompt = pending.plan, pending.prompt
    if plan is None or prompt is None:
        return None
    table, other = plan.table, _more_urgent(state, pending, plan.table)
    if other is None:
        return None
    left, rates = (len(prompt) - pending.reached) / table.rates.prefill.mean, table.rates
    needs_slot = other.waits and not table.idle_beside(slot)
    gain = left + (rates.reply.mean / rates.decode.mean if needs_slot else 0.0)
    lost, again = _lost(table, slot, now) if needs_slot else (TOUCH_PRICE, 0)
    affordable = pending.given_back + again <= MOST_GIVEN_BACK * len(prompt)
    loss = lost / rates.prefill.mean
    return Ranked(
        request=pending.arrived.request,
        act=PriorityAct.GAVE_WAY if affordable and loss < gain else PriorityAct.KEPT_ON,
        priority=pending.arrived.hints.priority,
        other=other.pending.arrived.request,
        engine=table.engine,
        waited=waited(pending, now),
        gain=gain,
        loss=loss,
    )


def _more_urgent(state: State, pending: Pending, table: EngineTable) -> MoreUrgent | None:
    """Return a more urgent request that waits for a slot, else one that runs on this engine, else None."""
    at_work = None
    for other in state.requests.values():
        if other.rank <= pending.rank or other.arrived.model != pending.arrived.model:
            continue
        if isinstance(other.stage, Queued) and other.arrived.request in state.queue:
            return MoreUrgent(other, waits=True)
        if at_work is None and _works(other, table):
            at_work = MoreUrgent(other, waits=False)
    return at_work


def _works(other: Pending, table: EngineTable) -> bool:
    return isinstance(other.stage, Preparing | Running) and other.table is table


def _lost(table: EngineTable, slot: SlotId, now: float) -> tuple[float, int]:
    """Return the price of recovering a slot's state, in tokens, and the tokens certainly computed again."""
    contents = table.shadow.slots[slot]
    held = contents.total if contents else 0
    if table.traits.ram_cache:  # the request returns before many other prompts can evict the copy
        return TOUCH_PRICE, 0
    if table.may_save(now):
        rates = table.rates
        size = table.bytes_of(contents) if contents else 0
        file = rates.save_price(size) + rates.restore_price(size)
        return (TOUCH_PRICE + file, 0) if file < held else (held, held)
    return held, held


# -- 6: before a request begins or continues -------------------------------------------------------------


def stands_behind(state: State, pending: Pending, plan: Plan) -> Pending | None:
    """Return the more urgent request because of which a divisible one must wait; None if it may begin."""
    prompt = pending.prompt
    if plan.wait or pending.aged or prompt is None:
        return None
    found = plan.reuse_plan
    short = found is not None and len(prompt) - found.reuse <= plan.table.traits.n_batch
    if short and not pending.begun:  # one that gave way must wait, even if one batch of it is left
        return None
    for other in state.requests.values():
        if other.rank <= pending.rank or other.arrived.model != pending.arrived.model:
            continue
        counted = isinstance(other.stage, Queued) and other.arrived.request in state.queue
        if (counted and not other.rendered) or _works(other, plan.table):
            return other
    return None


def stood_back(pending: Pending, plan: Plan, now: float) -> Ranked:
    """Report that the request does not begin."""
    return Ranked(
        request=pending.arrived.request,
        act=PriorityAct.STOOD_BACK,
        priority=pending.arrived.hints.priority,
        other=pending.queued.stands_behind,
        engine=plan.table.engine,
        waited=waited(pending, now),
    )
