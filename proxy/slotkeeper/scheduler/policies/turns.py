"""Turns: which waiting request gets a slot next, and when a slot is kept for the conversation that left it.

Agents send a request as soon as a tool has returned. If several of them share a slot, the order of arrival
gives it to another one at each turn, and each time the engine loads or computes a state again. So:

1. The request that keeps an engine busy for the shortest time goes first. One that continues the state of a
   free slot has only its new tokens to compute.
2. A slot whose conversation waits for its tools is kept for it, as long as the expected return costs less
   time than bringing the conversation back into a slot later would. See `kept_seconds`.
3. For both of these, no request waits longer than `Limits.delay_factor` times as long as it would wait for
   its first token in the order of arrival. That is estimated once, when a slot could first be given to it:
   the prefills before it, and an answer for each round of the slots. A request whose time has come goes
   first. What begins before it must be expected to end in time.

All this is between the requests of one client, such as the agents of a user: the queue, which is fair between
clients, tells whose turn it is, and no slot is kept while another client waits. Between requests of unequal
priority, `priority` decides, and no slot is kept while any request has one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate, groupby, islice
from typing import Final

from slotkeeper.scheduler.candidates import continuing, least_seconds
from slotkeeper.scheduler.effects import Ranked, Restore
from slotkeeper.scheduler.prices import restore_price
from slotkeeper.scheduler.requests.pending import Pending, Plan, Queued
from slotkeeper.scheduler.slots.engine_model import SlotContents, continues
from slotkeeper.scheduler.slots.table import EngineTable
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import ClientId, PriorityAct, RequestId

COMPARED: Final = 8  # requests at the head of the queue whose order may change; the others keep their places
BOUNDED: Final = 64  # requests at the head of the queue whose bounds are respected; no others have one
TOOL_SECONDS: Final = 1.0  # until a conversation returns whose answer asked for tools, while none has
JITTER: Final = 1.5  # a pause may be this many times as long as one that was seen

# -- 1, 3: the order -------------------------------------------------------------------------------------


def in_order(state: State, queue: Sequence[RequestId], now: float) -> Sequence[RequestId]:
    """Return the queued requests in the order in which they are served."""
    if len(queue) < 2 or state.limits.delay_factor <= 1:
        return queue
    head = [state.requests[request] for request in queue[:COMPARED]]
    fixed = list(accumulate(not _movable(pending) for pending in head))  # nothing passes these

    def equals(place: int) -> tuple[object, ...]:
        pending = head[place]
        return pending.arrived.model, pending.aged, pending.rank, fixed[place], _movable(pending)

    ordered: list[RequestId] = []
    for _, places in groupby(range(len(head)), key=equals):
        ordered += _of_clients(state, [head[place] for place in places], now)
    return *ordered, *queue[COMPARED:]


def _of_clients(state: State, arrived: Sequence[Pending], now: float) -> Iterator[RequestId]:
    """Yield requests in the order of arrival, but those of each client in the order of their costs."""
    of_one: dict[ClientId, list[Pending]] = {}
    for pending in arrived:
        of_one.setdefault(pending.arrived.client, []).append(pending)
    turns = {client: iter(_ordered(state, those, now)) for client, those in of_one.items()}
    for pending in arrived:
        yield next(turns[pending.arrived.client])


def _movable(pending: Pending) -> bool:
    """Whether it takes one slot, which we choose. Others wait until tasks on their way have begun, or end."""
    request = pending.arrived
    return request.pinnable and request.id_slot is None and request.copies == 1


def _ordered(state: State, arrived: Sequence[Pending], now: float) -> list[RequestId]:
    """Return requests of one client and model and of equal priority, given in their order of arrival."""
    if len(arrived) < 2:
        return [pending.arrived.request for pending in arrived]
    tables = state.open_for(arrived[0].arrived.model)
    seconds = _seconds(state, arrived, now)
    answer, slots = answer_seconds(tables), sum(len(table.states) for table in tables) or 1
    ahead = 0.0
    for number, (pending, own) in enumerate(zip(arrived, seconds, strict=True)):
        begins = now + ahead + answer * (number // slots)
        pending.bounded(begins, own, state.limits.delay_factor)
        ahead += own
    left, at, ordered = list(zip(arrived, seconds, strict=True)), now, list[RequestId]()
    while left:
        chosen = left.pop(_next(left, at, answer))
        ordered.append(chosen[0].arrived.request)
        at += chosen[1] + answer / slots
    return ordered


def _next(left: Sequence[tuple[Pending, float]], at: float, answer: float) -> int:
    """Return the index of the request to be served next."""
    for index, (pending, _) in enumerate(left):
        if pending.start_by <= at:
            return index
    for index in sorted(range(len(left)), key=lambda index: left[index][1]):
        if all(at + left[index][1] + answer <= passed.start_by for passed, _ in left[:index]):
            return index
    return 0


def _seconds(state: State, arrived: Sequence[Pending], now: float) -> list[float]:
    """Return how long each prompt would keep an engine busy. An unknown one counts as the longest."""
    known = [_own_seconds(state, pending, now) for pending in arrived]
    most = max((seconds for seconds in known if seconds is not None), default=0.0)
    return [most if seconds is None else seconds for seconds in known]


def _own_seconds(state: State, pending: Pending, now: float) -> float | None:
    request, tables = pending.arrived, state.fitting(pending.arrived)
    if request.brief or (request.pinnable and continuing(tables, request.hash_chain, now)):
        return 0.0
    if pending.prompt is None:
        return None
    return least_seconds(tables, pending.prompt, now=now, catalog=state.catalog)


def answer_seconds(tables: Iterable[EngineTable]) -> float:
    """Return the seconds that an answer takes after its prompt was computed."""
    return max((table.rates.reply.mean / table.rates.decode.mean for table in tables), default=0.0)


# -- 2, 3: slots that are kept ---------------------------------------------------------------------------


def kept_until(state: State, pending: Pending, plan: Plan | None, now: float) -> float | None:
    """Return until when the slot of this plan is kept for the conversation that left it; None: it is not."""
    if plan is None or plan.wait or plan.slot is None or not _keeps(state):
        return None
    request, left = pending.arrived, plan.table.shadow.slots[plan.slot]
    if left is None or not left.calls_tools or continues(request.hash_chain, left) or not _movable(pending):
        return None
    waiting = [state.requests[each] for each in islice(state.queue, BOUNDED)]
    client = state.pauses.client(left.hash_chain)
    if any(each.arrived.client != client for each in waiting):
        return None
    seen = (*state.pauses.expected(left.hash_chain), *state.pauses.of_all)
    pauses = [pause.seconds for pause in seen if pause.after_tools] or [TOOL_SECONDS]
    seconds = kept_seconds(pauses, now - left.used, _back_seconds(plan, pending, left))
    if not seconds:
        return None
    own = _computed(plan, pending) / plan.table.rates.marginal_prefill
    pending.bounded(now, own, state.limits.delay_factor)
    latest = min(each.start_by for each in waiting)
    until = min(left.used + seconds, latest - answer_seconds([plan.table]))
    return until if until > now else None


def _keeps(state: State) -> bool:
    """Whether slots may be kept, and requests be passed, at all."""
    return state.limits.delay_factor > 1 and not state.hinted


def _computed(plan: Plan, pending: Pending) -> int:
    found = plan.reuse_plan
    return len(pending.prompt) - found.reuse if pending.prompt and found else 0


def _back_seconds(plan: Plan, pending: Pending, left: SlotContents) -> float:
    """Return about how long it takes to bring a conversation back into a slot after this plan.

    That is what the plan costs beside the request's own tokens and file: what is lost or saved, and copied
    to the engine's RAM cache, from where it is copied back.
    """
    table, found = plan.table, plan.reuse_plan
    files = sum(restore_price(table, step.snapshot) for step in plan.steps if isinstance(step, Restore))
    copied = table.rates.copy_price(table.bytes_of(left)) if found and found.parked else 0.0
    price = plan.price - _computed(plan, pending) - files + copied
    return max(0.0, price) / table.rates.marginal_prefill


def kept_seconds(pauses: Sequence[float], elapsed: float, back: float) -> float:
    """Return how many seconds after its answer a conversation's slot is kept for it at most; 0: not now.

    The time is chosen among those after which pauses have ended so far, each as likely as that this one is
    longer than all of them. The slot idles until the conversation returns or the time is over; if it
    returns, `back` is saved.

    Args:
        pauses: seconds between an answer that asked for tools and the next turn, as they were seen.
        elapsed: seconds since the answer.
        back: seconds to bring the conversation back into a slot later.
    """
    still = sorted(JITTER * pause for pause in pauses if JITTER * pause > elapsed)
    best, most = 0.0, 0.0
    for until in still:
        returns = sum(1 for pause in still if pause <= until)
        idle = sum(min(pause / JITTER, until) - elapsed for pause in still if pause / JITTER > elapsed)
        gain = returns * back - idle - (until - elapsed)
        if gain > most:
            best, most = until, gain
    return best


def keeps(state: State, pending: Pending, plan: Plan, until: float) -> Iterator[Ranked]:
    """Let a request wait until then for the slot that is kept; report it once."""
    state.kept_slots_until = min(state.kept_slots_until, until)
    left = plan.table.shadow.slots[plan.slot] if plan.slot is not None else None
    if pending.queued.waits_for_kept(until):
        yield _ranked(pending, PriorityAct.SLOT_KEPT, left.request if left else None, at=state.at)


def passed(
    state: State, pending: Pending, queue: Sequence[RequestId], tried: Container[RequestId]
) -> Iterator[Ranked]:
    """Report that a request begins before one that was before it in the queue, and could have begun."""
    for request in () if state.hinted else queue[:COMPARED]:
        if request == pending.arrived.request:
            return
        other = state.requests[request]
        if request not in tried and other.rendered and other.arrived.client == pending.arrived.client:
            yield _ranked(pending, PriorityAct.CHEAPER, request, at=state.at)
            return


def _ranked(pending: Pending, act: PriorityAct, other: RequestId | None, *, at: float) -> Ranked:
    since = pending.stage.since if isinstance(pending.stage, Queued) else at
    return Ranked(
        request=pending.arrived.request,
        act=act,
        priority=pending.arrived.hints.priority,
        other=other,
        waited=pending.waited + at - since,
    )
