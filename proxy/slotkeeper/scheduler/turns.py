"""The order in which queued requests are served, and their deadlines: priorities, aging, expiry.

1. More urgent requests first; requests of equal priority in the queue's order, which is fair between clients.
2. No priority starves: if no request of a priority has begun for `AGES_AFTER` seconds, its next request is
   served first and does not give way.
3. A request that cannot begin in time (`X-Slotkeeper-Max-Wait`) is refused, unless it had a slot before.

If no request has a priority or a deadline, none of this runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, inf
from typing import Final

from slotkeeper.scheduler.effects import Effect, Ranked
from slotkeeper.scheduler.pending import Pending, Stage
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import ModelName, Priority, PriorityAct, RequestId

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
        pending = state.requests[request]
        if pending.aged != (request in aged):
            pending.aged, pending.waits_in = not pending.aged, None
    return sorted(queue, key=lambda request: (request not in aged, -state.requests[request].rank))


def _aged(state: State, queue: Sequence[RequestId], priority: Priority, now: float) -> RequestId | None:
    """Return the next request of a priority if it has waited too long behind more urgent ones, else None."""
    waiting = _of(state, queue, priority)
    return waiting[0].arrived.request if waiting and now >= _ages_at(state, waiting, priority) else None


def _of(state: State, queue: Sequence[RequestId], priority: Priority) -> Sequence[Pending]:
    """Return the queued requests of a priority; none if no more urgent one is ahead of them."""
    queued = [state.requests[request] for request in queue]
    found = [pending for pending in queued if pending.arrived.hints.priority is priority]
    behind = any(pending.arrived.hints.priority.rank > priority.rank for pending in queued)
    return found if behind or any(pending.stood_back for pending in found) else []


def _ages_at(state: State, waiting: Sequence[Pending], priority: Priority) -> float:
    """Return the time from which the next of the waiting requests is served first."""
    since = max(min(pending.queued_at for pending in waiting), state.served_at.get(priority, -inf))
    return since + AGES_AFTER


def due_at(state: State, now: float) -> float:
    """Return the time of the next change of order or expiry; infinite if there will be none."""
    if not state.hinted:
        return inf
    queue = tuple(state.queue)
    waiting = ((priority, _of(state, queue, priority)) for priority in Priority)
    ages = [_ages_at(state, found, priority) for priority, found in waiting if found]
    expires = [_expires_at(pending) for pending in _unbegun(state)]
    return min((at for at in (*ages, *expires) if at > now), default=inf)


# -- reports ---------------------------------------------------------------------------------------------


def noted(state: State, pending: Pending, now: float) -> Iterator[Effect]:
    """Report a request that is about to be served out of the queue's order because of priorities."""
    if not state.hinted:
        return
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
    return pending.waited + (now - pending.queued_at if pending.stage is Stage.QUEUED else 0.0)


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
        if pending and pending.stage is Stage.QUEUED and not pending.begun:
            yield pending


def _expires_at(pending: Pending) -> float:
    until = pending.arrived.hints.start_by
    return until if pending.rendered else max(until, pending.arrived.at + COUNTING)


def _free_in(state: State, model: ModelName, now: float) -> int:
    """Return the seconds until a slot will probably be free."""
    left = (one.left(now) for table in state.up_for(model) for one in table.work.served.values())
    return min(LATEST, max(SOONEST, ceil(min(left, default=UNKNOWN))))
