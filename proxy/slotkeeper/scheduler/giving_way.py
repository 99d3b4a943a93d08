"""A long prefill of low priority gives way to more urgent requests at the end of a batch.

While an engine computes one prompt, prompts in other slots wait: it fills each batch from the lowest slot on.
A task that was sent stops a batch late at best, and the engine may not notice a disconnect at all (engine.md
T10). So a request that its client marks as low is computed in pieces of one batch. Each piece is one of our
own prefills and continues the piece before. No token is computed twice, and after each piece no task runs.

1. After a piece the request returns to the queue if a more urgent request waits for a slot or runs on that
   engine, and the gain exceeds the loss. Both are in seconds:
   * gain: the rest of the prefill, and the answer too if the other request needs the slot;
   * loss: a round trip if the request keeps its slot. If the other request needs the slot, the price of the
     state: loading it from the engine's RAM cache, saving and restoring a file, or computing it again.
2. The tokens that a request computes again are limited to `MOST_GIVEN_BACK` of its prompt.
3. A request begins or continues only while no more urgent request runs there, unless it has aged (`turns`).

Requests that their client does not mark as low are sent whole, as without priorities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from slotkeeper.scheduler.choice import TOUCH_PRICE, Plan
from slotkeeper.scheduler.effects import Effect, Keep, Prefill, Purpose, Ranked, Step, Wipe
from slotkeeper.scheduler.engine_model import TAIL
from slotkeeper.scheduler.pending import Pending, Stage
from slotkeeper.scheduler.planting import LEAST
from slotkeeper.scheduler.prices import RAM_DOUBT
from slotkeeper.scheduler.state import State, user_starts
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.turns import waited
from slotkeeper.scheduler.types import Priority, PriorityAct, Reason, RequestId, SaidBy, SlotId

MOST_GIVEN_BACK: Final = 0.05  # share of a prompt that may be computed again because its request gave way
OURS: Final = {Purpose.PLANT, Purpose.STEER}  # prefills of a request's own prompt
BORDERS: Final = {Purpose.PIECE, Purpose.PLANT}  # purposes of prefills after which a request may pause


def divisible(pending: Pending) -> bool:
    """Whether a request may be computed in pieces."""
    request, hints = pending.arrived, pending.arrived.hints
    low = hints.priority is Priority.LOW and hints.said_by is not SaidBy.SIDE_REQUEST
    whole = request.copies > 1 or request.id_slot is not None or request.bypass or request.action
    return low and request.generates and not (whole or request.lora is not None or pending.plain)


def in_pieces(pending: Pending, plan: Plan) -> Plan:
    """Return the plan with its prefill divided into batches, if the request can give way between them."""
    prompt, found, traits = pending.prompt, plan.reuse_plan, plan.table.traits
    if prompt is None or found is None or not (divisible(pending) and _helped(prompt, plan)):
        return plan
    starts = () if traits.cuttable else user_starts(prompt, traits)[-1:]
    batch = max(traits.n_batch, traits.n_ubatch + TAIL)  # the engine makes its checkpoints in the last batch
    steps: list[Step] = []
    at = 0 if any(isinstance(step, Wipe) for step in plan.steps) else found.reuse
    for step in plan.steps:
        if isinstance(step, Prefill) and step.purpose in OURS and (end := prompt.lcp(step.tokens)) > at:
            left = len(prompt) - end  # sent with the request itself if less than a batch
            last = max(LEAST, batch - left) if left < batch else batch
            steps += _pieces(prompt, range(at, end), starts, batch, last=last)
            at = end
        steps.append(step)
    if plan.pinned:
        steps += _pieces(prompt, range(at, len(prompt)), starts, batch, last=batch)
    return replace(plan, steps=tuple(steps))


def _helped(prompt: Tokens, plan: Plan) -> bool:
    """Whether prefills of parts help: we choose the slot, no image is cut, the engine uses its cache."""
    chosen = plan.pinned or plan.reason is Reason.STEERED
    uncached = plan.pinned and not plan.apart and plan.table.shadow.apart(prompt.space)
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
        if end - at >= LEAST or end - TAIL in starts:
            yield Prefill(prompt.cut(0, end), Purpose.PIECE)
            at = end


def resumes(pending: Pending, plan: Plan) -> None:
    """Record how many tokens a request that gave way before must compute again, when it begins."""
    found = plan.reuse_plan
    if pending.begun and found is not None and pending.pieces_until is not None:
        pending.given_back += max(0, pending.reached - found.reuse)


# -- 1, 2: after a piece ---------------------------------------------------------------------------------


def at_border(pending: Pending, plan: Plan) -> bool:
    """Whether the last step computed a part of the prompt, and the next step does not save its state."""
    left = pending.steps_left
    done, saved = plan.steps[-left - 1], left > 0 and isinstance(plan.steps[-left], Keep)
    return divisible(pending) and isinstance(done, Prefill) and done.purpose in BORDERS and not saved


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
    left, rates = (len(prompt) - pending.reached) / table.rates.prefill, table.rates
    needs_slot = other.waits and not table.idle_beside(slot)
    gain = left + (rates.reply / rates.decode if needs_slot else 0.0)
    lost, again = _lost(table, slot, now) if needs_slot else (TOUCH_PRICE, 0)
    affordable = pending.given_back + again <= MOST_GIVEN_BACK * len(prompt)
    loss = lost / rates.prefill
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
        if other.stage is Stage.QUEUED and other.arrived.request in state.queue:
            return MoreUrgent(other, waits=True)
        if at_work is None and _works(other, table):
            at_work = MoreUrgent(other, waits=False)
    return at_work


def _works(other: Pending, table: EngineTable) -> bool:
    begun = other.stage in {Stage.PREPARING, Stage.RUNNING}
    return begun and other.plan is not None and other.plan.table is table


def _lost(table: EngineTable, slot: SlotId, now: float) -> tuple[float, int]:
    """Return the price of recovering a slot's state, in tokens, and the tokens certainly computed again."""
    contents = table.shadow.slots[slot]
    held = contents.total if contents else 0
    if table.traits.ram_cache:  # the request returns before many other prompts can evict the copy
        return TOUCH_PRICE + RAM_DOUBT * held, 0
    if table.may_save(now):
        rates = table.rates
        file = rates.save_price(held) + rates.restore_price(rates.size_of(held))
        return (TOUCH_PRICE + file, 0) if file < held else (held, held)
    return held, held


# -- 3: before a request begins or continues -------------------------------------------------------------


def stands_behind(state: State, pending: Pending, plan: Plan) -> RequestId | None:
    """Return the more urgent request because of which this one must wait; None if it may begin."""
    prompt, found = pending.prompt, plan.reuse_plan
    if pending.aged or prompt is None or not divisible(pending):
        return None
    short = found is not None and len(prompt) - found.reuse <= plan.table.traits.n_batch
    if short and not pending.begun:  # one that gave way must wait, even if one batch of it is left
        return None
    for other in state.requests.values():
        if other.rank <= pending.rank or other.arrived.model != pending.arrived.model:
            continue
        counted = other.stage is Stage.QUEUED and not other.rendered and other.arrived.request in state.queue
        if counted or _works(other, plan.table):
            return other.arrived.request
    return None


def stood_back(state: State, pending: Pending, plan: Plan, now: float) -> Iterator[Effect]:
    """Report that the request does not begin; once each time that it enters the queue."""
    other = state.requests.get(pending.stands_behind) if pending.stands_behind else None
    if other and other.stage is Stage.QUEUED:  # no event of the engine reports a change of this
        pending.waits_in = None
    if not pending.stood_back:
        pending.stood_back = True
        yield Ranked(
            request=pending.arrived.request,
            act=PriorityAct.STOOD_BACK,
            priority=pending.arrived.hints.priority,
            other=pending.stands_behind,
            engine=plan.table.engine,
            waited=waited(pending, now),
        )
