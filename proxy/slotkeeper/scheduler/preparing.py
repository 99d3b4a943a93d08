"""Steps that ended: what they changed, and what comes next for their requests."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Final, assert_never

from slotkeeper.scheduler import chores, giving_way, kv_pool, retention
from slotkeeper.scheduler.effects import Effect, Load, Prefill, Purpose, Step, Wipe
from slotkeeper.scheduler.events import Erased, Filed, Loading, Planted, Restored, Saved
from slotkeeper.scheduler.evidence import by_batches
from slotkeeper.scheduler.hints import PriorityAct
from slotkeeper.scheduler.launching import forward, next_step, requeue
from slotkeeper.scheduler.outcomes import SURPRISE
from slotkeeper.scheduler.pending import Pending, Stage
from slotkeeper.scheduler.shadow import Source
from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.steps import Chore
from slotkeeper.scheduler.table import EngineTable, SlotState
from slotkeeper.scheduler.types import SlotId

Ended = Planted | Saved | Restored | Erased

SAME: Final = {Purpose.HOME, Purpose.DRAFT, Purpose.BACK}  # the slot remains its conversation's
SAVES_REST: Final = 60.0  # seconds without saves after one has failed
HOPELESS: Final = 3600.0  # the same where files cannot be used


def ended(state: State, event: Ended) -> Iterator[Effect]:
    if chore := state.chores.get(event.request):
        yield from _of_chore(state, chore, event)
        return
    if isinstance(event, Saved) and event.request not in state.requests and event.snapshot:
        yield from retention.kept(state, event.snapshot, event.at)  # its client has left meanwhile
    pending = state.requests.get(event.request)
    if pending is not None and isinstance(event, Planted):
        _count_planted(pending, event)
    if pending is not None and pending.plan is not None and pending.stage is Stage.PREPARING:
        yield from _step_ended(state, pending, event)


def _step_ended(state: State, pending: Pending, event: Ended) -> Iterator[Effect]:
    owned = state.slot_of(pending)
    if owned is None:  # the engine was restarted
        requeue(state, pending)
        return
    ok, effects = _take_in(state, *owned, pending.step, event)
    yield from effects
    pending.step_seconds += _beside(pending.step, event, event.at - pending.step_began)
    step = pending.step
    if ok and isinstance(step, Prefill) and step.purpose is not Purpose.TOUCH:
        pending.reached = len(step.tokens)
    if not ok and not isinstance(event, Saved):
        # Where a file is gone another may do; where the engine refuses one it may refuse them all.
        pending.plain = not isinstance(event, Restored) or event.outcome is not Loading.UNFIT
        _without(state, pending, *owned, now=event.at)
        return
    yield from _go_on(state, pending, *owned, now=event.at)


def _count_planted(pending: Pending, event: Planted) -> None:
    computed = event.wasted if event.computed is None else event.computed
    pending.planted += computed
    if pending.stage is Stage.PREPARING and isinstance(pending.step, Prefill) and pending.step.parks:
        pending.parked += computed


def _of_chore(state: State, chore: Chore, event: Ended) -> Iterator[Effect]:
    if chore.owns and isinstance(event, Saved) and event.written:
        chore.written = True
    elif chore.owns:
        _note_ahead(state, chore, event)
        ok, effects = _take_in(state, chore.table, chore.slot, chore.step, event)
        chore.recognise()
        yield from effects
        yield from chores.went_on(state, chore, ok=ok, now=event.at)
    else:  # the engine was restarted; a file that it has written is as good as before
        del state.chores[event.request]
        if isinstance(event, Saved) and event.snapshot:
            yield from retention.kept(state, event.snapshot, event.at)


def _note_ahead(state: State, chore: Chore, event: Ended) -> None:
    """Before the slot is known to hold it: what was broken off began where the slot's state did."""
    step = chore.step
    if isinstance(event, Planted) and isinstance(step, Prefill) and step.purpose is Purpose.NEXT:
        if event.computed is not None:
            state.ahead.computed(step.tokens, len(step.tokens) - event.computed)
        elif event.stopped:
            state.ahead.computed(step.tokens, chore.table.shadow.plan_reuse(chore.slot, step.tokens).reuse)


def _beside(step: Step, event: Ended, seconds: float) -> float:
    """Of a step's time, what was not spent on computing the prompt, nor on keeping what the slot held."""
    match step:
        case Prefill(_, Purpose.TOUCH) | Load() | Wipe():
            return seconds
        case Prefill(_, Purpose.STEER):
            computing = event.seconds if isinstance(event, Planted) else None
            return max(0.0, seconds - (computing or 0.0))
        case _:
            return 0.0


def _without(state: State, pending: Pending, table: EngineTable, slot: SlotId, *, now: float) -> None:
    """A step has failed, or the slot is not certain any more: it is placed again."""
    if table.owners[slot] == pending.arrived.request:
        table.move(slot, SlotState.IDLE, None, now)
    requeue(state, pending)


def _go_on(
    state: State, pending: Pending, table: EngineTable, slot: SlotId, *, now: float
) -> Iterator[Effect]:
    """The next step of a request, or the request itself."""
    pending.steps_left -= 1
    paused = yield from _after_piece(state, pending, slot, now)
    if (
        paused or table.unsettled or table.orphans
    ):  # one that went unpinned meanwhile may have the slot by now (T1)
        _without(state, pending, table, slot, now=now)
    elif pending.steps_left:
        yield next_step(state, pending, now)
    elif pending.plan and pending.plan.clears:
        _without(state, pending, table, slot, now=now)
    elif pending.plan and pending.plan.pinned:
        yield forward(pending, now)
    else:
        table.move(slot, SlotState.RUNNING, pending.arrived.request, now)
        state.steered.append(pending.arrived.request)


def _after_piece(state: State, pending: Pending, slot: SlotId, now: float) -> Generator[Effect, None, bool]:
    """Whether a request gives way to another one, now that a part of its prompt is computed."""
    plan = pending.plan
    if plan is None or not giving_way.at_border(pending, plan):
        return False
    pending.pieces_until = now
    weighed = giving_way.after_piece(state, pending, slot, now)
    if weighed is not None:
        yield weighed
    return weighed is not None and weighed.act is PriorityAct.GAVE_WAY


def _take_in(
    state: State, table: EngineTable, slot: SlotId, step: Step, event: Ended
) -> tuple[bool, list[Effect]]:
    """The shadow takes the step that the engine took. Returns whether its owner can go on, and effects."""
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
                table.no_wipe_until = event.at + SAVES_REST
            return event.ok, []
        case _:
            assert_never(event)


def _planted(table: EngineTable, slot: SlotId, step: Step, event: Planted) -> bool:
    if not isinstance(step, Prefill):
        raise AssertionError("a plant answers a prefill")  # noqa: TRY004
    tokens, shadow = step.tokens, table.shadow
    if event.computed is None:  # the engine may still be at work on it
        shadow.slots[slot] = (
            shadow.broken_off(shadow.plan_reuse(slot, tokens), tokens) if event.stopped else None
        )
        if step.purpose is Purpose.EMPTY:
            table.no_touch_until = event.at + SAVES_REST
        table.leave(slot, event.at)
        return False
    end, cached = len(tokens), len(tokens) - event.computed
    table.rates.prefilled(event.computed, event.seconds)
    table.learn(by_batches(table.traits, cached=cached, end=end, cuts=event.cuts))
    if step.purpose in {Purpose.TOUCH, Purpose.EMPTY}:
        shadow.touch(slot, table.idle_beside(slot))
    else:
        _prefilled(table, slot, step, event, cached)
    return True


def _prefilled(table: EngineTable, slot: SlotId, step: Prefill, event: Planted, cached: int) -> None:
    """The slot holds what was planted; of that the engine had `cached` tokens."""
    tokens, shadow = step.tokens, table.shadow
    before, reuse_plan = shadow.slots[slot], shadow.plan_reuse(slot, tokens)
    shadow.launch(reuse_plan, table.idle_beside(slot))
    if reuse_plan.source is Source.RAM and cached < reuse_plan.reuse - SURPRISE:
        shadow.forget_ram()  # it took another entry
    shadow.finish(
        slot,
        prompt=tokens,
        prompt_tokens=len(tokens),
        cached=cached,
        generated=0,
        user_starts=(),  # a raw prompt has no messages (engine.md 1.6)
        hash_chain=before.hash_chain if before and step.purpose in SAME else (),
        request=event.request,
        now=before.used if before and step.purpose.idle else event.at,
    )


def filed(state: State, event: Filed) -> Iterator[Effect]:
    """A file that its engine has written is in the catalog now, or will not be."""
    if event.request in state.chores:
        yield from ended(
            state,
            Saved(
                at=event.at,
                request=event.request,
                snapshot=event.snapshot,
                tokens=event.tokens,
                checkpoints=event.checkpoints,
                seconds=event.seconds,
                lasting=event.lasting,
            ),
        )
        return
    contents = state.coming.pop(event.request, None)
    table = state.tables.get(event.engine)
    if table is None:
        yield from retention.kept(state, event.snapshot, event.at) if event.snapshot else ()
        return
    table.moves += 1  # its queued requests can be decided
    yield from _account(state, table, event, contents)


def _saved(state: State, table: EngineTable, slot: SlotId, event: Saved) -> list[Effect]:
    """The file says what the slot really held, and which of its checkpoints."""
    contents = table.shadow.slots[slot]
    if event.written:
        if contents:
            state.coming[event.request] = contents
        return []
    if contents and event.tokens is not None:
        carried = event.checkpoints if event.snapshot and table.traits.files_carry else None
        if carried:
            table.learn(table.doubts.by_file(table.traits, contents, carried))
        table.shadow.slots[slot] = contents.seen_as(event.tokens, carried)
    return _account(state, table, event, contents)


def _account(
    state: State, table: EngineTable, event: Saved | Filed, contents: SlotContents | None
) -> list[Effect]:
    """What a save tells of the engine and its folder; and a new file may push others out."""
    snapshot = event.snapshot
    if snapshot is None:
        if event.lasting:
            table.no_save_until = event.at + SAVES_REST
        return []
    table.learn_files(snapshot)
    table.rates.saved(snapshot.size, len(snapshot.tokens), event.seconds)
    if contents and not snapshot.shared:
        snapshot = replace(snapshot, turns=contents.turns)
    effects = retention.kept(state, snapshot, event.at)
    fits = snapshot.id in state.catalog  # else there was no room for it
    if fits and not state.catalog.covered(snapshot.tokens, table.traits):  # it can not be extended (T4)
        table.no_save_until = event.at + HOPELESS
        effects += retention.drop(state, snapshot)
    return effects


def _restored(state: State, table: EngineTable, slot: SlotId, step: Step, event: Restored) -> list[Effect]:
    if not isinstance(step, Load):
        raise AssertionError("a restore answers a load")  # noqa: TRY004
    snapshot = step.snapshot
    table.rates.brought(snapshot.size, event.brought)
    match event.outcome:
        case Loading.DONE:
            whole = snapshot if event.checkpoints else replace(snapshot, checkpoints=())
            table.shadow.restore(slot, whole, event.at)
            table.loaded.add(slot)
            table.rates.restored(snapshot.size, event.seconds)
            return []
        case Loading.UNFIT:
            state.catalog.take(snapshot.id)
            return []
        case Loading.REFUSED:
            table.shadow.erase(slot)
            if not kv_pool.cells_of(table.traits):  # which may have no room in a row for it
                state.catalog.take(
                    snapshot.id
                )  # but not deleted: it may be the engine that is not as we think
            return []
        case Loading.LOST:
            table.shadow.slots[slot] = None
            table.leave(slot, event.at)
            return []
        case _:
            assert_never(event.outcome)
