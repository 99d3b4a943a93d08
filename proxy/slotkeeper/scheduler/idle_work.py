"""Idle work: when slots are saved, next turns prefetched and empty slots warmed, while nobody waits.

A chore owns its slot (MAINTENANCE) and takes one step at a time; the next step is decided again after each.
While a request waits, no step follows.

Newer builds write checkpoints into slot files, so one file at the end can be cut wherever the slot could be.
Older builds do not (engine.md 2.6). There the end, the last prompt's end and every user message get a file
each. The slot is cut back from one place to the next, which costs a few tokens, and is then restored to its
end. This must not be interrupted, so it is done after a longer pause. One cut is made at once: before the
first user message, if no file has the tokens before it, because other conversations will begin with them too.

A cut discards the checkpoints after it, and a file of these builds brings none back. Checkpoints in a part
that files cover can be spared. But a question about a long document diverges at the document's end, where no
file is. So the restore step is computed where that costs less than the checkpoints are worth, and a cut that
would lose more than it saves is not made. Nor is one that loses the live checkpoints of a client who probably
goes back to them (`_spares`).

With a draft model, a restored file has no draft state at its own end, but has it at a checkpoint. So four
foreign tokens are first put after the end. They make the engine keep a checkpoint there, and the next prompt
diverges from them and goes back to it (engine.md 2.6).

Older builds keep no draft state in files. A restored slot continues at once, but its drafts are bad until
some thousand tokens have been computed there (engine.md 2.6). So each of the latest conversations is restored
from an earlier file, and its tail is computed before any request comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf, log, log1p
from operator import is_not
from typing import Final

from slotkeeper.scheduler.effects import (
    Drop,
    Effect,
    Erase,
    PoolAct,
    Pooled,
    Prefill,
    Purpose,
    Restore,
    Save,
    SaveMoment,
    SetTimer,
    Step,
    Stop,
)
from slotkeeper.scheduler.policies import kv_pool
from slotkeeper.scheduler.policies.adapters import set_in
from slotkeeper.scheduler.prices import blind_price, parked_price, restore_price
from slotkeeper.scheduler.prompts.planting import PLANT_PRICE_TOKENS
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.rates import SHORTEST, WORTH_A_FILE
from slotkeeper.scheduler.requests.pending import Pending
from slotkeeper.scheduler.requests.steps import Chore, begun
from slotkeeper.scheduler.slots.engine_model import (
    TAIL,
    EngineTraits,
    SlotContents,
    Snapshot,
    checkpoints_last,
    foreign_token,
    goes_on_from,
    is_marked,
    keeps_checkpoints,
    marked,
    reuse,
    thins_at_each_task,
    user_starts,
    wipes,
)
from slotkeeper.scheduler.slots.table import EngineTable, SlotState
from slotkeeper.scheduler.snapshots.catalog import NEVER, Catalog
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import RequestId, SlotId, Tier

LOOKS: Final = 1.0  # seconds between polls of an engine that other clients use as well
EARLIEST: Final = 0.02  # seconds: no timer is shorter
NEXT_ROUND: Final = 0.1  # seconds, at most, until queued requests are decided that a round left out


def settle(state: State, now: float, *, or_at: float = inf) -> Iterator[Effect]:
    """Give way to clients, begin idle work that is due, and set a timer for the next, or for `or_at`."""
    due_at, working = inf, {chore.table.engine for chore in state.chores.values()}
    if working:
        yield from _make_way(state)
    for table in state.up:
        if table.engine in working:
            continue
        if table.put_off:
            table.take_up(now)
        chore, due = _first_due(state, table, now)
        if chore:
            yield _begin(state, chore, now)
        else:
            yield from _warm(state, table, now)
        due_at = min(due, due_at, table.rests_at if table.put_off else inf)
    due_at = min(due_at, or_at, _decides_again(state, now), _gives_up(state, now))
    if due_at < (inf if state.wakes_at is None else state.wakes_at):
        state.wakes_at = due_at
        yield SetTimer(delay=max(EARLIEST, due_at - now))


def _first_due(state: State, table: EngineTable, now: float) -> tuple[Chore | None, float]:
    """Return the first chore that can begin now, and when work in the slots before it is due."""
    due_at = inf
    for slot, contents in _unsettled(state, table):
        begins = _ahead_at(state, table, slot, contents, now)
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


def _ahead_at(state: State, table: EngineTable, slot: SlotId, contents: SlotContents, now: float) -> float:
    """Return when the next turn's prompt may be prefetched; infinite if it is unknown or not worth it."""
    if state.ends(table):
        return inf
    return contents.used + patience(state, table, slot, contents, now)


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
    if ok and isinstance(chore.step, Save):
        yield from _outdone(state, chore)
    if ok and chore.leaves:
        chore.left_back()
    # Whether the conversation has paused long enough for all of the work.
    rested = state.ends(chore.table) or not chore.home or now >= rest_until(state, chore.table, chore.home)
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
    return ended_ahead or isinstance(chore.step, Erase) or chore.empties


def _note_settled(state: State, chore: Chore, *, ok: bool, rested: bool, now: float) -> None:
    """Mark the slot as done until its contents change, unless cuts or a prefetch may follow."""
    contents, table = chore.contents, chore.table
    cuts_follow = ok and not rested and table.traits.files_only_extend
    if not cuts_follow and contents and _ahead_at(state, table, chore.slot, contents, now) == inf:
        table.needs_no_save(chore.slot, contents)


def _end(state: State, chore: Chore, now: float) -> None:
    del state.chores[chore.id]
    chore.leave(now)


def _next(state: State, chore: Chore, *, ok: bool, rested: bool, now: float) -> Step | None:
    if chore.goal is not None:
        return chore.goal if ok and isinstance(chore.step, Restore) else None
    step = next_step(chore, state.catalog, rested=rested) if ok else None
    failed = not ok and isinstance(chore.step, Save)
    dear = isinstance(step, Save) and not state.wanted(chore.table) and not _pay(state, chore, now)
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


def not_saved_again(state: State) -> None:
    """Mark the slots in which all is done, since some of their files will be gone."""
    for table in state.up:
        for slot in table.idle:
            contents = table.shadow.slots[slot]
            if contents is None or prefetch_plan(contents, table, state.catalog):
                continue
            if not first_step(contents, table, state.catalog, rested=True):
                table.needs_no_save(slot, contents)


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
    if not _at_rest(state, table):
        paused = contents.used + pause_beside_answers(table, contents, state.catalog)
    elif crowd_cut(contents, table, state.catalog, now) or unsaved(contents, table.traits, state.catalog):
        paused = save_due(state, table, contents, now)
    else:
        paused = rest_until(state, table, contents)
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


def erase_poisoned(state: State, table: EngineTable, now: float) -> Iterator[Effect]:
    """Begin to erase the idle slots that gave wrong answers, unless the engine may put a task there first."""
    if table.open_for_pins(now) and table.may_wipe(now):
        for slot in table.take_poisoned():
            yield _begin(state, Chore(_name(state, now), table, slot, Erase(), None), now)


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
    if isinstance(chore.step, Save):
        _pay(state, chore, now)
    elif chore.ahead:
        state.idle.spend(chore.computes, now)
    state.chores[chore.id] = chore
    chore.table.move(chore.slot, SlotState.MAINTENANCE, chore.id, now)
    return _bound(state, chore, now)


def _bound(state: State, chore: Chore, now: float) -> Effect:
    chore.began(now)
    return begun(chore.step, chore.id, chore.table, chore.slot, tree=state.tree(chore.table.model))


# -- the steps of a chore --------------------------------------------------------------------------------

MIN_UNSAVED_TOKENS: Final = 32  # tokens that are in no file, below which a slot is not saved again
MAX_BOUNDARY_FILES: Final = 8  # boundaries of one slot that get a file, at most
# Computed for one of them, and in the restore step with a draft model, at most.
MAX_STEP_TOKENS: Final = 2048
CHANCE_AT_LAST_MESSAGE: Final = 0.1  # that a prompt diverges at, inside or after the last user message
CHANCE_BEFORE_LAST_MESSAGE: Final = 0.02  # chance that it diverges before that
EVEN_CHANCE: Final = 0.5
# A token that no request uses counts so many times a token that a client need not wait for: the engine
# computes no more than it would without us.
PRICE_OF_A_WASTED_TOKEN: Final = 3.0


def unsaved(contents: SlotContents, traits: EngineTraits, catalog: Catalog) -> bool:
    """Whether enough tokens at the end of the slot are in no file."""
    return contents.total - catalog.covers(contents, traits) >= MIN_UNSAVED_TOKENS


def prefetch_plan(
    contents: SlotContents, table: EngineTable, catalog: Catalog
) -> tuple[Restore | None, Prefill, int] | None:
    """Return the steps to what the next turn begins with, and the tokens to compute.

    None if that beginning or the length of the slot is not known, if the slot holds just that beginning, or
    if the next turn is not likely enough to begin so.
    The first step is a restore, if that leaves fewer tokens to compute than the slot does.
    """
    following = contents.following
    if following is None or contents.rough or following == contents.tokens:
        return None
    here = reuse(contents, following, table.traits)
    best = catalog.best(following, table.traits, lambda s: here + restore_price(table, s))
    goal = Prefill(following, Purpose.NEXT)
    first, computes = (Restore(best[0]), len(following) - best[1]) if best else (None, len(following) - here)
    return (first, goal, computes) if _pays_ahead(contents, computes, table.traits) else None


def _pays_ahead(contents: SlotContents, computes: int, traits: EngineTraits) -> bool:
    """Whether the next turn probably uses a prefetch, and saves by it more than a task costs.

    A file that can only be extended is of use only if it ends where the next turn goes on, so an even chance
    is enough, unless the task takes checkpoints (T7) that a turn which begins otherwise goes back to. Any
    other file is better there too, so a few tokens are worth their task.
    """
    if traits.snapshots and traits.files_only_extend and not thins_at_each_task(traits):
        return contents.likely >= EVEN_CHANCE
    gains = (contents.likely - PRICE_OF_A_WASTED_TOKEN * (1.0 - contents.likely)) * computes
    return gains > (0.0 if traits.snapshots and computes <= PLANT_PRICE_TOKENS else PLANT_PRICE_TOKENS)


def cut_back(contents: SlotContents, table: EngineTable, catalog: Catalog) -> Prefill | None:
    """Return the cut back to where the next turn continues; None if that is the end, or if a file has it.

    None also while the beginning of the next turn may still become known.
    """
    end = goes_on_from(contents, table.traits)
    unfit = contents.rough or not contents.foreseen
    if unfit or not table.traits.snapshots or not WORTH_A_FILE <= end < contents.total:
        return None
    back = contents.tokens.cut(0, end)
    missing = end - catalog.covered(back, table.traits)
    return Prefill(back, Purpose.CUT) if missing >= MIN_UNSAVED_TOKENS else None


def crowd_cut(contents: SlotContents, table: EngineTable, catalog: Catalog, now: float) -> Prefill | None:
    """Return the cut back of a slot that another conversation may soon take; None if that is not likely."""
    if not table.crowded(now) or not _spares(contents, table.traits):
        return None
    return cut_back(contents, table, catalog)


def parking_step(
    contents: SlotContents, table: EngineTable, catalog: Catalog, now: float, *, most_bytes: int
) -> Step | None:
    """Return the step that saves a state before it is overwritten.

    None if files have the state, if there is no room for it, or if it is not worth a file.
    """
    if not table.may_save(now) or table.bytes_of(contents) > most_bytes:
        return None
    if parked_price(table, contents, now) >= blind_price(table, contents, catalog, now):
        return None
    if back := cut_back(contents, table, catalog):
        return back
    if not unsaved(contents, table.traits, catalog):
        return None
    return first_step(contents, table, catalog, rested=False)


def emptying_step(table: EngineTable, prompt: Tokens, now: float) -> Step:
    """Return the step that makes a slot free its cells, for this prompt in another slot."""
    if table.may_wipe(now) and not wipes(table.traits):
        return Erase()
    return Prefill(foreign_token(prompt or Tokens([0])), Purpose.EMPTY)


def kept_elsewhere(contents: SlotContents, table: EngineTable, catalog: Catalog, step: Step) -> bool:
    """Whether a file has most of what such a step removes from a slot, or the RAM cache will have it."""
    in_files = table.traits.snapshots and not unsaved(contents, table.traits, catalog)
    return in_files or (isinstance(step, Prefill) and table.traits.ram_cache)


def first_step(contents: SlotContents, table: EngineTable, catalog: Catalog, *, rested: bool) -> Step | None:
    """Return the first step to save a slot; None if files have enough of it, or if it is not worth a file."""
    if not table.traits.snapshots or contents.total < WORTH_A_FILE:
        return None
    if contents.rough or table.shadow.stray(contents):
        return None
    if unsaved(contents, table.traits, catalog):
        return _mark(contents, table.traits) or Save(SaveMoment.PAUSE)
    return _next_cut(contents, contents, table, catalog, rested=rested)


def next_step(chore: Chore, catalog: Catalog, *, rested: bool) -> Step | None:
    """Return the step after a successful one; None if all is saved and the slot is at its end again."""
    contents, home = chore.contents, chore.home
    if contents is None or home is None:
        return None
    if contents.total == home.total and home.opaque:  # the file showed the unknown token ids
        home = chore.home = contents
    if isinstance(chore.step, Prefill) and chore.step.purpose is not Purpose.HOME:
        return Save(SaveMoment.PAUSE)
    if chore.leaves:
        return None
    if isinstance(chore.step, Save):  # to the place of the next file
        if contents is home and (mark := _mark(contents, chore.table.traits)):
            return mark
        if cut := _next_cut(contents, home, chore.table, catalog, rested=rested):
            return cut
    return restore_step(chore, catalog)


def restore_step(chore: Chore, catalog: Catalog) -> Step | None:
    """Return the step back to where the slot was; None if it is there, cannot get there, or will be lost."""
    contents, home = chore.contents, chore.home
    if contents is None or home is None or contents.total >= home.total:
        return None
    if chore.leaves or chore.table.leaving:
        return None
    return _step_to_end(contents, home, chore.table, catalog)


def _next_cut(
    contents: SlotContents, home: SlotContents, table: EngineTable, catalog: Catalog, *, rested: bool
) -> Step | None:
    """Return the cut back to the next boundary without a file; None if the slot could not be restored."""
    traits = table.traits
    if not _spares(home, traits):
        return None
    cuts = [cut for cut in _unsaved_cuts(home, traits, catalog) if _near(cut, contents, home, traits)]
    if not cuts or not _step_to_end(contents, home, table, catalog):
        return None
    if not (rested or contents.total < home.total or _opens(cuts[-1], home, traits, catalog)):
        return None
    for cut in cuts:
        if _worth_it(cut, contents, home, table, catalog, cuts=cuts):
            return Prefill(home.tokens.cut(0, cut), Purpose.CUT)
    return None


def _spares(contents: SlotContents, traits: EngineTraits) -> bool:
    """Whether a cut takes no checkpoint from the slot that its next turn probably needs.

    Builds that thin checkpoints out at every task lose that of the last user message to any cut (T7). A
    client that writes its history anew goes back to it; one whose next turn was predicted does not.
    """
    return checkpoints_last(traits) or contents.sure or contents.likely >= EVEN_CHANCE


def _opens(cut: int, home: SlotContents, traits: EngineTraits, catalog: Catalog) -> bool:
    """Whether a user message begins there and no file has any of the tokens before it."""
    first = home.tokens.cut(0, cut)
    return cut - 1 in user_starts(home.tokens, traits) and not catalog.covered(first, traits)


def _worth_it(
    cut: int,
    contents: SlotContents,
    home: SlotContents,
    table: EngineTable,
    catalog: Catalog,
    *,
    cuts: Sequence[int],
) -> bool:
    """Whether a file there saves at least what the restore step and the lost checkpoints cost."""
    traits = table.traits
    left = tuple(c for c in contents.checkpoints if c.at < cut)
    there = replace(contents, tokens=home.tokens.cut(0, cut), opaque=0, checkpoints=left)
    stays = isinstance(_step_to_end(there, home, table, catalog), Prefill)
    if stays and home.total - cut > cut - catalog.covered(there.tokens, traits):
        return False
    # A known next turn does not diverge near the end.
    end = home.total - (MIN_UNSAVED_TOKENS if home.sure else 0)
    lost = [c.at for c in contents.checkpoints if c.at < end and not (stays and c in left)]
    return _worth(lost, home, traits, catalog, cuts) <= _worth([cut - 1], home, traits, catalog)


def _worth(
    checkpoints: Sequence[int],
    home: SlotContents,
    traits: EngineTraits,
    catalog: Catalog,
    cuts: Sequence[int] = (),
) -> float:
    """Return the tokens that the best of these checkpoints saves beyond all files and those at `cuts`."""
    asked = max(user_starts(home.tokens, traits), default=0)
    most = 0.0
    for at in sorted(checkpoints, reverse=True):
        chance = CHANCE_AT_LAST_MESSAGE if at >= asked else CHANCE_BEFORE_LAST_MESSAGE
        filed = max((cut for cut in cuts if cut <= at + 1), default=0)  # one more than its checkpoint
        if chance * (at - filed) > most:
            filed = max(filed, catalog.covered(home.tokens.cut(0, at + 1), traits))
            most = max(most, chance * (at - filed))
    return most


def _near(cut: int, contents: SlotContents, home: SlotContents, traits: EngineTraits) -> bool:
    """Whether the slot can be cut there, and restored to its end, by computing few tokens."""
    if cut >= contents.total or cut - reuse(contents, home.tokens.cut(0, cut), traits) > MAX_STEP_TOKENS:
        return False
    return not traits.speculative or home.total - cut <= MAX_STEP_TOKENS


def _mark(contents: SlotContents, traits: EngineTraits) -> Step | None:
    """Return a prefill of foreign tokens after the end, so that the next file has the draft state there."""
    if not traits.files_carry_drafts or contents.opaque:
        return None
    if any(c.at == contents.total for c in contents.checkpoints) or len(contents.tokens) < WORTH_A_FILE:
        return None
    return None if is_marked(contents.tokens) else Prefill(marked(contents.tokens), Purpose.DRAFT)


def _unsaved_cuts(contents: SlotContents, traits: EngineTraits, catalog: Catalog) -> Iterator[int]:
    """Yield the places where the slot can be cut and no file is, longest first, in tokens.

    None if the engine makes no checkpoints: a cut would compute all tokens before it again.

    Each is one more than its checkpoint. The beginning of the last user message is included even if its
    checkpoint is gone: engines that thin out checkpoints lose it to a prefetch, and an edit will diverge
    there.
    """
    if not traits.files_only_extend or not keeps_checkpoints(traits):
        return
    starts = user_starts(contents.tokens, traits)
    kept = {c.at for c in contents.checkpoints}
    # If the next turn is known to extend the whole slot, no prompt needs the end of the last one.
    last = 0 if contents.sure else max(kept, default=0)
    end = len(contents.tokens) - (MIN_UNSAVED_TOKENS if contents.sure else 0)
    asked = max((at for at in starts if at < end), default=0)
    places = sorted({*kept.intersection({*starts, last}), asked}, reverse=True)
    for at in [at for at in places if contents.tokens.may_end(at + 1)][:MAX_BOUNDARY_FILES]:
        if (
            WORTH_A_FILE <= at < end
            and at - catalog.covered(contents.tokens.cut(0, at + 1), traits) >= MIN_UNSAVED_TOKENS
        ):
            yield at + 1


def _step_to_end(
    contents: SlotContents, home: SlotContents, table: EngineTable, catalog: Catalog
) -> Step | None:
    """Return the step back to the slot's end: a restore of its file, or a prefill.

    With a draft model it is a prefill, because after a restore the drafts would be bad. It is also a prefill
    if that costs less than the restore and the checkpoints that a restore loses. Only the checkpoints count
    if the next turn may not extend the end: then its tokens would be computed for nothing. The file may end a
    few tokens earlier, if these were prefetched after it was written.
    """
    if home.opaque:
        return None
    if table.traits.speculative:
        return Prefill(home.tokens, Purpose.HOME)
    best = catalog.best(home.tokens + NEVER, table.traits, lambda s: float(s.tier is Tier.COLD))
    if best is None or home.total - best[1] >= MIN_UNSAVED_TOKENS:
        return None
    if best[1] <= contents.total < home.total:
        return Prefill(home.tokens, Purpose.HOME)
    if 0 < (computes := home.total - contents.total) <= MAX_STEP_TOKENS:
        lost = _worth([c.at for c in contents.checkpoints], home, table.traits, catalog)
        saves = restore_price(table, best[0]) if home.sure else 0.0
        if computes <= saves + lost:
            return Prefill(home.tokens, Purpose.HOME)
    return Restore(best[0])


# -- warm the slots of an engine that has just started ---------------------------------------------------

# Tokens. They bring two thirds of the lost drafts back; the rest costs the whole prompt (engine.md 2.6).
WARM_TAIL_TOKENS: Final = 2000
RECENT_SECONDS: Final = 3600.0  # seconds: a client that was away for longer will hardly return just now


def coldest(table: EngineTable, catalog: Catalog, now: float) -> Snapshot | None:
    """Return the end of the latest conversation that no slot holds.

    Files that slots hold are not checked again.
    """
    fresh = [snapshot for snapshot in catalog if _fit_to_warm(snapshot, table, now)]
    contents = [h.tokens for h in table.shadow.slots if h]
    if len(table.warmed) > len(catalog):  # some of its files are gone
        table.forget_warmed(but=[s.id for s in catalog])
    for snapshot in sorted(fresh, key=lambda s: (s.used, len(s.tokens)), reverse=True):
        if not any(tokens.lcp(snapshot.tokens) * 2 > len(snapshot.tokens) for tokens in contents):
            return _whole(snapshot, fresh)
        table.tried_to_warm(snapshot.id)
    return None


def _fit_to_warm(snapshot: Snapshot, table: EngineTable, now: float) -> bool:
    """Whether a file can warm an empty slot: it fits the engine, is recent, and was not tried yet."""
    fits = snapshot.fingerprint == table.traits.fingerprint
    fits = fits and set_in(snapshot.tokens.space) == table.traits.adapter_set
    return fits and now - snapshot.used < RECENT_SECONDS and snapshot.id not in table.warmed


def _whole(latest: Snapshot, fresh: Sequence[Snapshot]) -> Snapshot:
    """Return the end of the conversation: its cuts are saved a moment later, and are prefixes of the end."""
    same = (s for s in fresh if s.tokens.begins_with(latest.tokens))  # of the others, few tokens are compared
    whole = (s for s in same if s.tokens.lcp(latest.tokens) == len(latest.tokens))
    return max(whole, key=lambda s: len(s.tokens))


def warming_step(end: Snapshot, catalog: Catalog, table: EngineTable) -> Step | None:
    """Return a restore of the longest file that leaves a tail, or a prefill of a short conversation.

    None if there is no such file and the conversation is too long to compute.
    """
    for tail in (WARM_TAIL_TOKENS, WARM_TAIL_TOKENS // 2):
        early = end.tokens.cut(0, max(0, len(end.tokens) - tail + 1))
        best = catalog.best(early, table.traits, lambda _: 0.0)
        if best and len(best[0].tokens) == best[1]:
            return Restore(best[0])
        if len(end.tokens) <= 2 * tail:
            return Prefill(end.tokens, Purpose.DRAFT)
    return None


# -- when ------------------------------------------------------------------------------------------------

# A pause must be this many times as long as the save, because a save stalls every slot.
PAUSE_PER_SAVE: Final = 20.0
# The same while crowded: the slot will soon be taken, and saved anyway.
PAUSE_PER_SAVE_IN_A_CROWD: Final = 2.0
LONGEST_SAVE_PAUSE_SECONDS: Final = 60.0  # seconds after which a slot is saved, or sooner
# The same beside running answers. Mostly the engine rests for a moment before, and then nobody is stopped.
BESIDE_ANSWERS_SECONDS: Final = 120.0
LOST_ONCE_IN_SECONDS: Final = 3600.0  # so often an engine is assumed to lose a state that is in no file
# Shares of a save's time that a client may be expected to wait for it.
ACCEPTED_WAIT_PER_SAVE: Final = 0.02
ACCEPTED_WAIT_PER_SAVE_IN_A_CROWD: Final = 0.5
# A client may return as late as this many times its earlier pause, or as much sooner.
PAUSE_JITTER: Final = 1.5
LONGEST_PAUSE_SECONDS: Final = 600.0  # a client that was away for longer may as well not return
# The pause before a slot is cut back to save its boundaries is this many times as long.
PAUSES_BEFORE_CUTS: Final = 8.0


def pause(state: State, table: EngineTable, contents: SlotContents, now: float) -> float:
    """Return the seconds that a conversation must pause before its slot is saved.

    While the engine is crowded, the slot may be overwritten before a pause comes, so a quick save is not put
    off. A slow save would delay all slots for a state that may be saved later anyway, when it is parked.
    """
    seconds = table.save_seconds(contents)
    hurried = PAUSE_PER_SAVE_IN_A_CROWD * seconds
    if table.crowded(now) and hurried <= state.limits.pause:
        return hurried
    return min(LONGEST_SAVE_PAUSE_SECONDS, max(state.limits.pause, PAUSE_PER_SAVE * seconds))


def save_due(state: State, table: EngineTable, contents: SlotContents, now: float) -> float:
    """Return when a slot may be saved while its engine works for no client.

    A save stops the engine, and any client may come meanwhile, also that of another slot. So it begins in a
    rest that is expected to last, by the engine's latest ones, or sooner if these usually end about then. The
    longer a state has been at risk, the longer a wait is accepted for its file. In a crowd, a client will
    probably wait for the whole save if it does not begin now.
    """
    takes, rests = table.save_seconds(contents), table.rates.rests
    usual = pause(state, table, contents, now)
    sooner = (max(usual / share, min(usual, state.limits.pause)) for share in (1.0, 2.0, 4.0, 8.0))
    rested = (
        *(takes * share for share in (1.0, 2.0, 4.0, 8.0, PAUSE_PER_SAVE)),
        *(PAUSE_JITTER * rest for rest in rests),
    )
    later = (table.active_at - contents.used + seconds for seconds in sorted(rested))
    hurries = usual < min(LONGEST_SAVE_PAUSE_SECONDS, PAUSE_PER_SAVE * takes)
    accepted = takes * (ACCEPTED_WAIT_PER_SAVE_IN_A_CROWD if hurries else ACCEPTED_WAIT_PER_SAVE)
    lost_each_second = seconds_at_risk(table, contents, state.catalog) / LOST_ONCE_IN_SECONDS
    for paused in (*sooner, *(paused for paused in later if paused > usual)):
        begins = max(now, contents.used + paused)
        at_risk = lost_each_second * (begins - contents.used)
        if expected_wait(rests, begins - table.active_at, takes) <= accepted + at_risk:
            return begins
    return contents.used + pause_beside_answers(table, contents, state.catalog)


def pause_beside_answers(table: EngineTable, contents: SlotContents, catalog: Catalog) -> float:
    """Return the seconds that a conversation must pause before its slot is saved while others are answered.

    A save stops each of these answers. So it begins when the state has been at risk for so long that the
    expected time to compute it again exceeds the stops.
    """
    stops = table.save_seconds(contents) * max(1, len(table.work.served))
    at_risk = seconds_at_risk(table, contents, catalog)
    return max(BESIDE_ANSWERS_SECONDS, LOST_ONCE_IN_SECONDS * stops / at_risk)


def seconds_at_risk(table: EngineTable, contents: SlotContents, catalog: Catalog) -> float:
    """Return the seconds of prefill that are lost with the slot: of the tokens that are in no file."""
    unsaved_tokens = contents.total - catalog.covers(contents, table.traits)
    return max(MIN_UNSAVED_TOKENS, unsaved_tokens) / table.rates.marginal_prefill


def patience(state: State, table: EngineTable, slot: SlotId, contents: SlotContents, now: float) -> float:
    """Return the seconds that a conversation must pause before its next turn is prefetched; inf: never.

    A prefetch of few tokens takes a whole pass through the model, and before it the engine copies the other
    idle slots to its RAM cache. A client that comes meanwhile, this one or another, waits for its end. So it
    begins after the pauses in which that would cost more than it saves. While no pause is known, it begins
    when the pause has lasted as long as the prefetch takes.
    """
    if not (plan := prefetch_plan(contents, table, state.catalog)):
        return inf
    soonest = min(state.limits.pause, pause(state, table, contents, now))
    rates = table.rates
    if not rates.pass_seconds:
        return soonest
    restore, goal, tokens = plan
    saves = rates.beyond_a_pass(tokens)
    if restore:
        saves += restore_price(table, restore.snapshot) / rates.marginal_prefill
    copying = rates.copy_seconds(table.shadow.copied_before(slot, goal.tokens, table.idle))
    takes = rates.pass_seconds + saves + copying
    saves *= contents.likely
    if not table.crowded(now):  # else the other slots are at work when the next task begins
        saves += copying
    begins = max(soonest, takes)
    if seen := [pause.seconds for pause in state.pauses.expected(contents.hash_chain)]:
        begins = _pays_from(soonest, seen, 0.0, takes, saves)
    rest_began = table.active_at - contents.used  # in seconds of this pause
    return _pays_from(begins, rates.rests, rest_began, takes, saves)


def _pays_from(
    earliest: float, rests: Iterable[float], rest_began: float, takes: float, saves: float
) -> float:
    """Return from when on a step saves more seconds than clients are expected to wait for it; inf: never.

    All times are in seconds of one pause. A client may return as late as PAUSE_JITTER times its rests before.
    """
    later = sorted(rest_began + PAUSE_JITTER * rest for rest in rests)
    for begins in (earliest, *(begins for begins in later if begins > earliest)):
        if begins < inf and expected_wait(rests, begins - rest_began, takes) < saves:
            return begins
    return inf


def expected_wait(rests: Iterable[float], begins: float, takes: float) -> float:
    """Return the seconds that a client is expected to wait because of a step, if it comes during the step.

    A rest as long as each that was seen is equally likely, within a factor of PAUSE_JITTER, and one of any
    order of magnitude up to LONGEST_PAUSE_SECONDS.

    Args:
        rests: seconds from an answer to the next request, as they were seen.
        begins: seconds after an answer when the step begins.
        takes: seconds of the step.
    """
    begins = max(begins, SHORTEST)
    soon = min(1.0, log1p(takes / begins) / max(SHORTEST, log(LONGEST_PAUSE_SECONDS / begins)))
    waits = [
        _wait(rest / PAUSE_JITTER - begins, rest * PAUSE_JITTER - begins, takes)
        for rest in rests
        if rest * PAUSE_JITTER > begins
    ]
    return (sum(waits) + soon * takes / 2) / (len(waits) + 1)


def _wait(earliest: float, latest: float, takes: float) -> float:
    """Return the mean wait of a client that comes between two moments, counted from the step's beginning."""
    first, last = max(0.0, earliest), min(latest, takes)
    if last <= first:
        return 0.0
    return (last - first) * (takes - (first + last) / 2) / (latest - first)


def rest_until(state: State, table: EngineTable, contents: SlotContents) -> float:
    """Return when a saved slot may be cut. A cut discards its checkpoints, so it must not be interrupted.

    Not while the engine is crowded: the restore step could take long, and another conversation would take the
    slot meanwhile.
    """
    usual = max(state.limits.pause, PAUSE_PER_SAVE * table.save_seconds(contents))
    rested = contents.used + min(LONGEST_SAVE_PAUSE_SECONDS, PAUSES_BEFORE_CUTS * usual)
    return max(rested, table.rests_at)
