"""Begin, advance and end idle work in free slots. What is done, and after which pause, is in `idle_work`.

A chore saves a slot, prefetches its next turn, or warms an empty one. It owns its slot (MAINTENANCE) and
takes one step at a time. While a request waits, no step follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from operator import is_not
from typing import Final

from slotkeeper.scheduler import kv_pool
from slotkeeper.scheduler.effects import (
    Drop,
    Effect,
    Keep,
    Load,
    PoolAct,
    Pooled,
    Prefill,
    Purpose,
    SetTimer,
    Step,
    Stop,
    Wipe,
)
from slotkeeper.scheduler.engine_model import TAIL
from slotkeeper.scheduler.idle_work import (
    coldest,
    crowd_cut,
    emptying_step,
    first_step,
    kept_elsewhere,
    next_step,
    parking_step,
    patience,
    pause_beside_answers,
    prefetch_plan,
    rest_until,
    restore_step,
    save_due,
    unsaved,
    warming_step,
)
from slotkeeper.scheduler.pending import Pending
from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.steps import Chore, effect
from slotkeeper.scheduler.table import EngineTable, SlotState
from slotkeeper.scheduler.types import RequestId, SlotId

LOOKS: Final = 1.0  # seconds between polls of an engine that other clients use as well
EARLIEST: Final = 0.02  # seconds: no timer is shorter
NEXT_ROUND: Final = 0.1  # seconds, at most, until queued requests are decided that a round left out


def settle(state: State, now: float, *, or_at: float = inf) -> Iterator[Effect]:
    """Give way to clients, begin idle work that is due, and set a timer for the next, or for `or_at`."""
    yield from _make_way(state)
    due_at, working = inf, {chore.table.engine for chore in state.chores.values()}
    for table in state.up:
        if table.engine in working:
            continue
        table.take_up(now)
        chore, due = _first_due(state, table, now)
        if chore:
            yield _begin(state, chore, now)
        else:
            yield from _warm(state, table, now)
        due_at = min(due, table.put_off_until, due_at)
    due_at = min(due_at, or_at, _decides_again(state, now), _gives_up(state, now))
    if due_at < (inf if state.wakes_at is None else state.wakes_at):
        state.wakes_at = due_at
        yield SetTimer(delay=max(EARLIEST, due_at - now))


def _first_due(state: State, table: EngineTable, now: float) -> tuple[Chore | None, float]:
    """Return the first chore that can begin now, and when work in the slots before it is due."""
    due_at = inf
    for slot, contents in _unsettled(state, table):
        begins = _ahead_at(state, table, contents, now)
        foreseen = begins < inf
        ahead = foreseen and _at_rest(state, table)
        due = begins if ahead else _due(state, table, contents, now)
        if due > now:
            due_at = min(due, due_at)
        elif (chore := _chore(state, table, slot, contents, ahead=ahead, now=now)) is None:
            if ahead or not foreseen:
                table.needs_no_save(slot, contents)
        elif _may_begin(state, table, now):
            return chore, due_at
        elif not table.adapters_known(now):
            table.wants_adapters()
        elif table.shared_until > now:  # other clients use the engine: it must be polled just before
            due_at = min(_look_before(table, now), due_at)
    return None, due_at


def _at_rest(state: State, table: EngineTable) -> bool:
    """Whether nothing of ours runs there and no request waits."""
    return table.quiet and not state.wanted(table)


def _may_begin(state: State, table: EngineTable, now: float) -> bool:
    """Whether idle work may take a free slot: no request wants it, or requests are no longer served."""
    if table.leaving:  # a file is kept only if it holds what we expect
        return table.quiet and not table.unseen and not state.open_accounts(table)
    return state.closing or (table.open_for_pins(now) and not state.waiting)


def _ahead_at(state: State, table: EngineTable, contents: SlotContents, now: float) -> float:
    """Return when the next turn's prompt may be prefetched; infinite if it is unknown or not worth it."""
    if state.ends(table):
        return inf
    return contents.used + patience(state, table, contents, now)


def _decides_again(state: State, now: float) -> float:
    """Return when queued requests are decided (again) if nothing happens; infinite if none waits."""
    if not state.waiting:
        return inf
    tried = (table.breaker.until for table in state.up if table.breaker.resting)
    over = (min(table.overdue_at(now), table.work.overdue_at(now)) for table in state.up)
    return min((now + NEXT_ROUND if state.cut_short else inf, *tried, *over))


def _gives_up(state: State, now: float) -> float:
    """Return when requests stop waiting for an engine to return; infinite if none waits."""
    waits = state.waiting or state.slotless
    if not waits or all(table.up for table in state.tables.values()):
        return inf
    models = {state.requests[request].arrived.model for request in state.waiting_requests()}
    back = (state.back_by(now, model) for model in models)
    return min((until for until in back if until is not None), default=inf)


def release(state: State, now: float) -> None:
    """Free slots that the engine has saved, if a request waits. Their files are checked meanwhile."""
    for chore in tuple(state.chores.values()) if state.waiting else ():
        if chore.written and chore.owns and chore.contents and state.wanted(chore.table):
            if chore.leaves:
                chore.left_back()
            state.coming[chore.id] = chore.contents
            del state.chores[chore.id]
            chore.leave(now)


def _make_way(state: State) -> Iterator[Effect]:
    """Stop each prefetch that would make a client wait for more than one of its batches."""
    for chore in state.chores.values():
        needed = state.waiting or chore.table.serving or chore.table.leaving
        long = chore.computes_ahead and chore.computes > chore.table.traits.n_batch
        if needed and long and not chore.stopped:
            chore.stopped = True
            yield Stop(request=chore.id)


def _chore(
    state: State, table: EngineTable, slot: SlotId, contents: SlotContents, *, ahead: bool, now: float
) -> Chore | None:
    """Return the chore that is due in a slot: a prefetch if the budget allows it, otherwise a save."""
    if ahead and (chore := _chore_ahead(state, table, slot, contents, now)):
        return chore
    if table.bytes_of(contents) > state.budgets.hot:  # such a file would exceed the hot tier
        return None
    if not state.ends(table) and (back := crowd_cut(contents, table, state.catalog, now)):
        return Chore(_name(state, now), table, slot, back, contents, leaves=True)
    saving = first_step(contents, table, state.catalog, rested=True)
    return Chore(_name(state, now), table, slot, saving, contents) if saving else None


def _chore_ahead(
    state: State, table: EngineTable, slot: SlotId, contents: SlotContents, now: float
) -> Chore | None:
    if not (plan := prefetch_plan(contents, table, state.catalog)):
        return None
    file, goal, computes = plan
    if not kv_pool.has_room(state, table, slot, len(goal.tokens)):
        return None
    given_up = contents.total - contents.tokens.lcp(goal.tokens)
    if table.crowded(now) and computes + given_up > table.traits.n_ubatch:
        # Others need the engine, and the next user of the slot is uncertain: only a small correction pays.
        table.puts_off_save(slot)
        return None
    if state.idle.wait(computes, now) > 0:
        return None
    return Chore(_name(state, now), table, slot, file or goal, contents, goal, computes)


def step_ended(state: State, chore: Chore, *, ok: bool, now: float) -> Iterator[Effect]:
    """Continue a chore after one of its steps has ended."""
    if ok and chore.computes_ahead:
        chore.arrived()
    if _decided_again(chore, ok=ok):
        _end(state, chore, now)
        return
    if ok:
        yield from _step_done(state, chore)
    rested = _rested(state, chore, now)
    step = _next(state, chore, ok=ok, rested=rested, now=now)
    if step is None:
        _note_settled(state, chore, ok=ok, rested=rested, now=now)
    if step is None or state.wanted(chore.table):
        _end(state, chore, now)
        return
    chore.step = step
    yield _bound(state, chore, now)


def _decided_again(chore: Chore, *, ok: bool) -> bool:
    """Whether the chore ends with this step; the slot's next work is then decided from the start."""
    ended_ahead = chore.computes_ahead or (chore.ahead and not ok)
    return ended_ahead or isinstance(chore.step, Wipe) or chore.empties


def _rested(state: State, chore: Chore, now: float) -> bool:
    """Whether the conversation has paused long enough for all of the work."""
    return state.ends(chore.table) or chore.home is None or now >= rest_until(state, chore.table, chore.home)


def _step_done(state: State, chore: Chore) -> Iterator[Effect]:
    if isinstance(chore.step, Keep):
        yield from _outdone(state, chore)
    if chore.leaves:
        chore.left_back()


def _note_settled(state: State, chore: Chore, *, ok: bool, rested: bool, now: float) -> None:
    """Mark the slot as done until its contents change, unless cuts or a prefetch may follow."""
    contents, table = chore.contents, chore.table
    cuts_follow = ok and not rested and table.traits.files_only_extend
    if not cuts_follow and contents and _ahead_at(state, table, contents, now) == inf:
        table.needs_no_save(chore.slot, contents)


def _end(state: State, chore: Chore, now: float) -> None:
    del state.chores[chore.id]
    chore.leave(now)


def _next(state: State, chore: Chore, *, ok: bool, rested: bool, now: float) -> Step | None:
    if chore.goal is not None:
        return chore.goal if ok and isinstance(chore.step, Load) else None
    step = next_step(chore, state.catalog, rested=rested) if ok else None
    failed = not ok and isinstance(chore.step, Keep)
    dear = isinstance(step, Keep) and not state.wanted(chore.table) and not _pay(state, chore, now)
    return restore_step(chore, state.catalog) if failed or dear else step


def _outdone(state: State, chore: Chore) -> Iterator[Effect]:
    """Drop the earlier file of the same tokens, once a later file also restores the draft state."""
    contents, traits = chore.contents, chore.table.traits
    if contents is None or not traits.files_carry_drafts:
        return
    cuts = {c.at for c in contents.checkpoints if contents.total - TAIL <= c.at < contents.total}
    for snapshot in [s for s in state.catalog if len(s.tokens) in cuts]:
        same_kind = snapshot.fingerprint in traits.fingerprints
        if same_kind and contents.tokens.begins_with(snapshot.tokens):
            state.catalog.take(snapshot.id)
            yield Drop(snapshot=snapshot.id, to_cold=False)


def left(state: State, now: float) -> bool:
    """Whether anything remains to be prefetched, or to be saved before the sidecar stops."""
    return bool(state.chores or state.coming) or any(_left_in(state, table, now) for table in state.up)


def left_at(state: State, table: EngineTable, now: float) -> bool:
    """Whether anything remains on one engine, so that it must stay up until that is saved."""
    at_work = bool(state.coming) or any(chore.table is table for chore in state.chores.values())
    return at_work or _left_in(state, table, now)


def _left_in(state: State, table: EngineTable, now: float) -> bool:
    return any(
        (not state.ends(table) and prefetch_plan(contents, table, state.catalog))
        or (table.may_save(now) and first_step(contents, table, state.catalog, rested=True))
        for _, contents in _unsettled(state, table)
    )


def _unsettled(state: State, table: EngineTable) -> Iterator[tuple[SlotId, SlotContents]]:
    """Yield idle slots that may need work, without those whose contents are being written to a file."""
    slots, settled = table.shadow.slots, table.settled.get
    if not any(map(is_not, map(settled, table.idle), map(slots.__getitem__, table.idle))):
        return  # the usual case, after most events on most engines
    coming = {written.tokens for written in state.coming.values()}
    for slot in table.idle:
        contents = slots[slot]
        if contents and table.settled.get(slot) is not contents and contents.tokens not in coming:
            yield slot, contents


def _due(state: State, table: EngineTable, contents: SlotContents, now: float) -> float:
    """Return when the slot may be saved; `now` or earlier means at once."""
    if state.ends(table) or not table.traits.snapshots:
        return table.no_save_until
    back = crowd_cut(contents, table, state.catalog, now)
    if back or unsaved(contents, table.traits, state.catalog):
        paused = save_due(state, table, contents, now)
    else:
        paused = rest_until(state, table, contents)
    if not _at_rest(state, table):
        paused = contents.used + pause_beside_answers(table, contents, state.catalog)
    paid = now + state.writes.wait(table.bytes_of(contents), now)
    return max(paused, paid, table.no_save_until)


def _look_before(table: EngineTable, now: float) -> float:
    """Request a poll if the last one is too old, and return when to ask again."""
    if now - table.observed_at >= LOOKS:
        table.look()
        return now + LOOKS
    return table.observed_at + LOOKS


def _pay(state: State, chore: Chore, now: float) -> bool:
    """Whether the slot's contents may be written now; takes their size from the budget."""
    size = chore.table.bytes_of(chore.contents) if chore.contents else 0
    return state.ends(chore.table) or state.writes.spend(size, now)


def _warm(state: State, table: EngineTable, now: float) -> Iterator[Effect]:
    """Begin to warm an empty slot, if that is useful."""
    empty = [slot for slot in table.idle if table.shadow.slots[slot] is None]
    if not empty or not _may_warm(state, table, now):
        return
    if (end := coldest(table, state.catalog, now)) is None:
        return
    if not kv_pool.has_room(state, table, empty[0], len(end.tokens)):
        return
    table.tried_to_warm(end.id)
    if step := warming_step(end, state.catalog, table):
        goal = Prefill(end.tokens, Purpose.DRAFT)
        yield _begin(state, Chore(_name(state, now), table, empty[0], step, None, goal), now)


def _may_warm(state: State, table: EngineTable, now: float) -> bool:
    """Whether an empty slot may be warmed. While crowded, another conversation would take it at once."""
    if not table.traits.speculative or table.traits.files_carry is not False:  # restored files have drafts
        return False
    unwanted = state.ends(table) or state.waiting or table.crowded(now)
    return not unwanted and table.may_save(now) and table.open_for_pins(now)


def _name(state: State, now: float) -> RequestId:
    """Return a new id for a chore.

    It includes the time: after a restart of the scheduler, an answer to an old chore must not match a new
    one.
    """
    state.chores_begun += 1
    return RequestId(f"chore:{state.chores_begun}@{now:.3f}")


def wipe(state: State, table: EngineTable, slot: SlotId, now: float) -> Effect:
    """Begin to erase an idle slot before it is given out again."""
    return _begin(state, Chore(_name(state, now), table, slot, Wipe(), None), now)


def empty(state: State, table: EngineTable, slot: SlotId, pending: Pending, now: float) -> Iterator[Effect]:
    """Take one step to empty an idle slot for a request that needs its cells; save it first if that pays.

    Without erasure, one token is prefilled there, so that the engine drops the rest. The same is done if each
    task makes the engine move all idle slots to its RAM cache.
    """
    contents = table.shadow.slots[slot]
    if contents is None:
        return
    coming = contents.tokens in {written.tokens for written in state.coming.values()}
    saving = None
    if not coming and table.settled.get(slot) is not contents:
        saving = parking_step(contents, table, state.catalog, now, most_bytes=state.budgets.hot)
    if saving:
        leaves = isinstance(saving, Prefill)
        yield _begin(state, Chore(_name(state, now), table, slot, saving, contents, leaves=leaves), now)
        return
    step = emptying_step(table, pending.prompt or contents.tokens, now)
    kept = coming or kept_elsewhere(contents, table, state.catalog, step)
    act, request = PoolAct.PARKED if kept else PoolAct.ERASED, pending.arrived.request
    yield Pooled(request=request, engine=table.engine, act=act, slot=slot, cells=contents.total)
    yield _begin(state, Chore(_name(state, now), table, slot, step, None), now)


def _begin(state: State, chore: Chore, now: float) -> Effect:
    if isinstance(chore.step, Keep):
        _pay(state, chore, now)
    elif chore.ahead:
        state.idle.spend(chore.computes, now)
    state.chores[chore.id] = chore
    chore.table.move(chore.slot, SlotState.MAINTENANCE, chore.id, now)
    return _bound(state, chore, now)


def _bound(state: State, chore: Chore, now: float) -> Effect:
    chore.began(now)
    return effect(chore.step, chore.id, chore.table, chore.slot, tree=state.tree(chore.table.model))
