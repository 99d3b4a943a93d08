"""Take an answer of GET /slots into the slot table: where requests run, what was lost, what is free.

Where the answer differs from our own account it is believed, but only if it is newer than what we know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from slotkeeper.scheduler.engine_model import wipes
from slotkeeper.scheduler.events import Observed
from slotkeeper.scheduler.kv_pool import not_shared
from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.table import EngineTable, Orphan, Sent, SlotState
from slotkeeper.scheduler.types import RequestId, SlotId, SlotView

DRAFTED: Final = 64  # most tokens of one draft: those accepted beyond a reply's end stay in the slot
COUNT_SLIP: Final = 2  # tokens by which our count of a slot may differ although our ids are right


def observe(table: EngineTable, seen: Observed) -> dict[RequestId, SlotId]:
    """Take in one answer of GET /slots. Returns the unpinned requests whose slot is now known."""
    table.observing = table.look_again = False
    table.failures = 0
    table.unseen = table.unseen and seen.asked < table.reset_at
    table.observed_at = seen.at
    table.patience += 1
    settled: dict[RequestId, SlotId] = {}
    not_shared(table, seen.slots)
    if _wiped(table, seen):
        return settled
    _whose(table, seen, settled)
    for view in seen.slots:
        if _tells(table, view, seen):
            _merge(table, view, seen.at)
    _adopt(table, seen, settled)
    return settled


def _merge(table: EngineTable, view: SlotView, now: float) -> None:
    state, slot = table.states[view.slot], view.slot
    if view.busy:
        if state is SlotState.LAUNCHED:
            table.move(slot, SlotState.RUNNING, table.owners[slot], now)
    elif state in (SlotState.DRAINING, SlotState.FOREIGN):
        _correct(table, view, now)
        table.frees(slot, view.held)
        table.move(slot, SlotState.IDLE, None, now)
    elif state is SlotState.IDLE and not table.orphans:
        _correct(table, view, now)


def _whose(table: EngineTable, seen: Observed, settled: dict[RequestId, SlotId]) -> None:
    """Assign busy slots that we thought idle: to our unpinned requests, or to other clients' tasks.

    Nothing is concluded until all of our unpinned requests must be among them. A single request is identified
    by any of its tasks. But if no slot is free, some of its prompts may still wait in the engine's queue
    (engine.md 6).
    """
    busy = [view.slot for view in sorted(_thought_idle(table, seen, busy=True), key=_age)]
    left = [orphan for orphan in table.orphans if orphan.total is None]
    if not _all_among(len(busy), table, seen, left):
        return
    copies = 0  # slots still to come of the same request: its tasks are numbered in sequence
    for slot in busy:
        if copies:
            copies -= 1
            table.shadow.lost(slot)
            table.move(slot, SlotState.FOREIGN, None, seen.at)
        elif table.unsettled:
            request = next(iter(table.unsettled))
            copies = table.unsettled.pop(request).slots - 1
            settled[request] = slot
            table.move(slot, SlotState.RUNNING, request, seen.at)
        elif left:
            orphan = left.pop(0)
            table.orphans.remove(orphan)
            copies = orphan.slots - 1
            table.shadow.lost(slot)
            table.move(slot, SlotState.DRAINING, None, seen.at)
            table.left[slot] = orphan.request
        else:
            table.is_shared(seen.at)
            table.shadow.lost(slot)
            table.move(slot, SlotState.FOREIGN, None, seen.at)
    if copies:  # they have ended already: a slot that we thought idle may hold what one of them left
        table.disown()


def _all_among(busy: int, table: EngineTable, seen: Observed, left: Sequence[Orphan]) -> bool:
    """Whether all of our unpinned requests must be in the busy slots.

    `left`: those whose client disconnected.
    """
    late = [orphan for orphan in table.orphans if _not_shown(orphan, seen)]
    unseen = any(sent > seen.asked for sent in _sent_at(table, left))
    if unseen or any(orphan.total is not None for orphan in late):
        return False
    ours: list[Sent | Orphan] = [*table.unsettled.values(), *late]
    by_any_task = len(ours) <= 1 and not _full(seen)
    return busy >= (len(ours) if by_any_task else sum(one.slots for one in ours))


def _not_shown(orphan: Orphan, seen: Observed) -> bool:
    """Whether this poll says nothing about an orphan: it is too old, or tasks may be queued in the engine."""
    return orphan.since > seen.asked or (orphan.total is None and _full(seen))


def _thought_idle(table: EngineTable, seen: Observed, *, busy: bool) -> list[SlotView]:
    """Return the slots that we thought idle and that the poll shows as busy, or as not busy."""
    return [
        view
        for view in seen.slots
        if view.busy is busy and _tells(table, view, seen) and table.states[view.slot] is SlotState.IDLE
    ]


def _sent_at(table: EngineTable, left: Iterable[Orphan]) -> Iterator[float]:
    """Yield the times at which requests were sent that may still run and were not seen yet."""
    yield from (sent.at for sent in table.unsettled.values())
    yield from (orphan.sent for orphan in left)


def _tells(table: EngineTable, view: SlotView, seen: Observed) -> bool:
    """Whether this poll is newer than what we know of the slot."""
    return view.slot < len(table.states) and table.changed[view.slot] <= seen.asked


def _correct(table: EngineTable, view: SlotView, now: float) -> None:
    """Correct our account of a free slot by the engine's count."""
    contents = table.shadow.slots[view.slot]
    if _unrun(table, view):
        return
    count = view.held or 0
    if count == 0 and wipes(table.traits):
        table.shadow.moved(view.slot)
    elif contents is None or count == 0:
        table.shadow.observed(view.slot, SlotContents(opaque=count, used=now) if count else None)
    else:
        table.shadow.observed(view.slot, _as_counted(table, contents, count, now))


def _as_counted(table: EngineTable, contents: SlotContents, count: int, now: float) -> SlotContents:
    """Return the contents of a slot that has `count` tokens by the engine's count."""
    ours, unknown = contents.total, SlotContents(opaque=count, used=now)
    if count == ours and not contents.rough:
        return contents
    if table.shadow.isolates(contents.tokens.space) and not contents.rough and count < ours - COUNT_SLIP:
        return unknown  # perhaps of another space
    if contents.rough or count <= ours + COUNT_SLIP:
        return contents.shrunk(count)
    if table.traits.speculative and count <= ours + DRAFTED:  # the reply ended within an accepted draft
        return replace(contents, opaque=contents.opaque + count - ours)
    table.is_shared(now)  # longer than we left it: another client used the slot
    return unknown


def _adopt(table: EngineTable, seen: Observed, settled: dict[RequestId, SlotId]) -> None:
    """Find the slots of requests that ended before they were seen, by the number of tokens left there."""
    due = [orphan for orphan in table.orphans if not _not_shown(orphan, seen)]
    if not due:
        return
    free = _thought_idle(table, seen, busy=False)
    for orphan in due:
        table.ended(orphan)
        newest = max(_fitting(table, free, orphan.total), key=_age, default=None)
        if newest:
            settled[orphan.request] = newest.slot
            free.remove(newest)
        if newest is None or orphan.slots > 1:
            table.disown()
    if not table.orphans:
        for view in free:
            _correct(table, view, seen.at)


def _fitting(table: EngineTable, free: Iterable[SlotView], total: int | None) -> Iterator[SlotView]:
    """Yield the slots that hold as many tokens as a request left behind, or those of a draft more."""
    more = DRAFTED if table.traits.speculative else COUNT_SLIP
    return (view for view in free if total and -COUNT_SLIP <= (view.held or 0) - total <= more)


def _full(seen: Observed) -> bool:
    """Whether no slot is free, so that tasks may wait in the engine's queue, even of disconnected clients."""
    return all(view.busy for view in seen.slots)


def _wiped(table: EngineTable, seen: Observed) -> bool:
    """Whether slots lost what we left there: all of them (a restart), or all but the last to run (T6)."""
    views = {v.slot: v for v in seen.slots}
    believed = _believed(table, seen, views)
    empty, kept = _parted(believed, views)
    if any(_outlived_a_task(table, slot, views) for slot in kept):
        table.proven = True
    if not empty or (kept and kept != [max(believed, key=lambda slot: table.changed[slot])]):
        return False
    if any(v.held or v.busy for v in seen.slots):
        _learn_unified(table, empty)
        return False
    return _restarted(table, seen)


def _restarted(table: EngineTable, seen: Observed) -> bool:
    """Whether all slots are empty because the engine was restarted: no task of ours was running.

    If so, the table is reset.
    """
    if any(state is not SlotState.IDLE for state in table.states):
        return False
    sent = dict(table.unsettled)  # these may have been sent to the new process
    table.reset(table.traits, seen.asked)
    table.unsettled.update(sent)
    return True


def _parted(slots: Iterable[SlotId], views: Mapping[SlotId, SlotView]) -> tuple[list[SlotId], list[SlotId]]:
    """Divide slots into those that are empty now, and those that are not."""
    parted: tuple[list[SlotId], list[SlotId]] = [], []
    for slot in slots:
        parted[bool(views[slot].busy or views[slot].held)].append(slot)
    return parted


def _believed(table: EngineTable, seen: Observed, views: Mapping[SlotId, SlotView]) -> list[SlotId]:
    """Return the idle slots whose contents this poll should show."""
    return [
        slot
        for slot in table.idle
        if table.shadow.slots[slot] and table.changed[slot] <= seen.asked and slot in views
        if not _unrun(table, views[slot])
    ]


def _outlived_a_task(table: EngineTable, kept: SlotId, views: Mapping[SlotId, SlotView]) -> bool:
    """Whether another slot began a task after this one got its contents."""
    return any(
        table.begun[slot] > table.changed[kept]
        and (table.states[slot] is not SlotState.LAUNCHED or views[slot].busy)
        for slot in views
        if slot != kept and slot < len(table.states)
    )


def _learn_unified(table: EngineTable, wiped: list[SlotId]) -> None:
    """Learn that each task moves idle slots to the RAM cache and clears them."""
    if table.proven or table.traits.unified:
        return
    table.shadow.assume_unified(wiped)


def _unrun(table: EngineTable, view: SlotView) -> bool:
    """Whether a slot got a file and has not run a task since: GET /slots shows nothing (engine.md 1.7)."""
    return view.held is None and view.slot in table.loaded


def _age(view: SlotView) -> int:
    """Return the number of a slot's last task: tasks are numbered in the order in which they arrive."""
    return -1 if view.task is None else view.task
