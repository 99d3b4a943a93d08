"""One KV buffer for all slots: which request may use how many of its cells.

With a unified buffer (`--kv-unified`, and a llama-server without `-np`), all slots share the context of
`n_ctx` tokens. A slot takes prompt + generated - 1 cells, and equal prefixes count twice. The engine refuses
nothing at admission. If cells run out, it empties idle slots without saving them, the lowest first. If no
slot is idle, all running requests fail together (engine.md 14). So, before a request is sent:

1. Its prompt and its expected answer must fit beside what the other slots hold or were promised.
2. If they would fit with empty idle slots, the cheapest of these slots are emptied, and saved first if that
   pays.
3. Otherwise the request waits in our queue until answers have ended. After `state.PASSES` other requests
   have overtaken it, no further one may.
4. A prompt that fits into no slot is sent: the engine refuses it, and nothing is lost.

The length of an answer is unknown. `state.Outputs` estimates a bound that is rarely exceeded. If it is
exceeded, the engine may still fail requests. Those of which no byte was sent to a client are sent once more,
with room for the longest possible answer.

An engine counts as unified only if that was read or observed, never because it is likely.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from slotkeeper.scheduler.effects import Effect, PoolAct, Pooled, Prefill, Restore
from slotkeeper.scheduler.events import Exceeded
from slotkeeper.scheduler.prices import blind_price, parked_price
from slotkeeper.scheduler.requests.pending import Pending, Plan, Running
from slotkeeper.scheduler.slots.engine_model import Known, cells_of, wipes
from slotkeeper.scheduler.slots.shadow import Source
from slotkeeper.scheduler.slots.table import EngineTable, SlotState
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import RequestId, SlotId

EMPTIED: Final = 1  # token that may remain in a slot that cannot be erased; the engine can free its cell
DRAFTED: Final = 64  # additional cells that the drafts of one answer may take
BYTES_PER_TOKEN: Final = 2  # of a body, at least: used only while the tokens are unknown


# -- accounting ------------------------------------------------------------------------------------------


def need(state: State, pending: Pending, table: EngineTable) -> int:
    """Return the most cells that a request is expected to take; 0: the engine will refuse it."""
    pool, most, request = cells_of(table.traits), table.traits.n_ctx, pending.arrived
    prompt = _prompt_tokens(pending, table)
    if prompt >= most:
        return 0
    answer = state.outputs.expected(request, most - prompt) if request.generates else 0
    drafts = DRAFTED if table.traits.speculative else 0
    return min(pool, (prompt + max(0, answer - 1) + drafts) * request.copies)


def _prompt_tokens(pending: Pending, table: EngineTable) -> int:
    """Return the tokens of the prompt, or an upper bound while they are unknown.

    If they will never be known, the bound is also limited to the slot's fair share of the context.
    """
    if pending.prompt is not None:
        return len(pending.prompt)
    least = pending.arrived.size // BYTES_PER_TOKEN
    if not pending.rendered:
        return min(least, table.traits.n_ctx - 1)
    return min(least, table.traits.n_ctx // table.traits.n_slots)


def taken(state: State, table: EngineTable, slot: SlotId) -> int:
    """Return the cells that a slot holds or was promised."""
    contents, what = table.shadow.slots[slot], table.states[slot]
    held = contents.total if contents else 0
    if what is SlotState.IDLE:
        return held if held > EMPTIED else 0
    owner = table.owners[slot]
    if owner is not None and (chore := state.chores.get(owner)):
        home, goal = chore.home, chore.goal
        whole = max(home.total if home else 0, len(goal.tokens) if goal else 0)
        return max(held, whole, _step_takes(chore.step))
    promised = table.promised.get(slot, 0)
    pending = state.requests.get(owner) if owner is not None else None
    if pending is not None and isinstance(pending.stage, Running):
        return max(promised, need(state, pending, table))  # its previous contents are gone
    if what is SlotState.FOREIGN:
        return max(held, promised, table.traits.n_ctx // table.traits.n_slots)
    return max(held, promised)


def _step_takes(step: object) -> int:
    match step:
        case Prefill(tokens):
            return len(tokens)
        case Restore(snapshot):
            return len(snapshot.tokens)
        case _:
            return 0


def _adrift(state: State, table: EngineTable) -> int:
    """Return the cells of requests whose slots are unknown."""
    sent = (state.requests.get(request) for request in table.unsettled)
    share = table.traits.n_ctx // table.traits.n_slots
    unseen = sum(share if orphan.total is None else orphan.total for orphan in table.orphans)
    return unseen + sum(need(state, pending, table) for pending in sent if pending)


def in_use(state: State, table: EngineTable, *, but: SlotId | None = None, idle: bool = True) -> int:
    """Return the cells held or promised, without those of slot `but`. `idle`: whether idle slots count."""
    counted = [slot for slot in range(len(table.states)) if idle or table.states[slot] is not SlotState.IDLE]
    slots = (SlotId(slot) for slot in counted if slot != but)
    return _adrift(state, table) + sum(taken(state, table, slot) for slot in slots)


def has_room(state: State, table: EngineTable, slot: SlotId, tokens: int) -> bool:
    """Whether idle work may put this many tokens into a slot without displacing anything."""
    pool = cells_of(table.traits)
    return not pool or in_use(state, table, but=slot) + tokens <= pool


# -- admission -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a request cannot be sent now."""

    cells: int  # cells that are missing; 0: it waits for another reason
    victims: tuple[SlotId, ...]  # idle slots that must be emptied; none: running requests have to end first


def shortage(state: State, pending: Pending, plan: Plan, now: float) -> Shortage | None:
    """Return what keeps a request from the chosen place, whose engine has a pool; None if it may go there."""
    table, request = plan.table, pending.arrived
    pool = cells_of(table.traits)
    if request.action or plan.clears:
        return None
    if wipes(table.traits) and _beginning(state, table, but=plan.slot):
        return Shortage(0, ())
    wanted = need(state, pending, table)
    if not wanted:
        return None
    lacking = _takes_in_all(state, plan, wanted) - pool
    if lacking <= 0:
        return None
    if not pending.rendered and not request.brief:
        return Shortage(0, ())  # it may fit: its tokens are still being counted
    return _made_up(state, plan, lacking, now)


def _made_up(state: State, plan: Plan, lacking: int, now: float) -> Shortage | None:
    """Return how the missing cells can be obtained; None if the engine does it by itself."""
    table = plan.table
    if not table.may_wipe(now) and now < table.no_touch_until:  # the engine empties them itself
        lacking -= sum(taken(state, table, slot) for slot in table.idle if slot != plan.slot)
        return Shortage(lacking, ()) if lacking > 0 else None
    if not table.open_for_pins(now):  # a task on its way may take any idle slot
        return Shortage(lacking, ())
    coming = sum(taken(state, table, slot) for slot in table.in_state(SlotState.MAINTENANCE))
    return Shortage(lacking, _victims(state, table, lacking - coming, but=plan.slot, now=now))


def _takes_in_all(state: State, plan: Plan, wanted: int) -> int:
    """Return the cells in use when the request ends, or while a state is loaded for it, whichever is more.

    On an engine where each task wipes the idle slots, it does so after it loads a state from its RAM cache
    for the task, but a touch makes it wipe them before.
    """
    table, reuse_plan = plan.table, plan.reuse_plan
    loads = max(map(_step_takes, plan.steps), default=0)
    if reuse_plan and reuse_plan.source is Source.RAM and reuse_plan.base:
        loads = max(loads, reuse_plan.base.total)
    if not wipes(table.traits):
        return in_use(state, table, but=plan.slot) + max(wanted, loads)
    touched = any(isinstance(step, Prefill) for step in plan.steps)
    at_end = in_use(state, table, but=plan.slot, idle=False) + max(wanted, loads)
    return max(at_end, in_use(state, table, but=plan.slot) + loads) if loads and not touched else at_end


def _beginning(state: State, table: EngineTable, *, but: SlotId | None) -> bool:
    """Whether a task is on its way that will empty all slots that the engine considers idle.

    A slot to which a request was sent, or into which a file was restored, is idle for the engine until its
    task begins.
    """
    chores = (state.chores.get(owner) for owner in table.owners if owner is not None)
    computes = any(isinstance(chore.step, Prefill | Restore) for chore in chores if chore)
    return computes or any(slot != but for slot in table.in_state(SlotState.LAUNCHED))


def _victims(
    state: State, table: EngineTable, lacking: int, *, but: SlotId | None, now: float
) -> tuple[SlotId, ...]:
    """Return the idle slots that are cheapest for their cells; none if all together do not suffice."""
    sizes = {slot: size for slot in table.idle if slot != but and (size := taken(state, table, slot))}
    if lacking <= 0 or sum(sizes.values()) < lacking:
        return ()
    prices = {slot: _price(state, table, slot, now) for slot in sizes}
    chosen: list[SlotId] = []
    for slot in sorted(sizes, key=lambda slot: (prices[slot] / sizes[slot], slot)):
        if lacking > 0:
            chosen.append(slot)
            lacking -= sizes[slot]
    for slot in sorted(chosen, key=lambda slot: prices[slot], reverse=True):
        if lacking + sizes[slot] <= 0:  # the last one was so large that this one can stay
            chosen.remove(slot)
            lacking += sizes[slot]
    return tuple(chosen)


def _price(state: State, table: EngineTable, slot: SlotId, now: float) -> float:
    """Return the price of emptying a slot: computing its contents again, or saving and restoring them."""
    contents = table.shadow.slots[slot]
    if contents is None:
        return 0.0
    lost = blind_price(table, contents, state.catalog, now)
    return min(lost, parked_price(table, contents, now)) if table.may_save(now) else lost


# -- what the engine did ---------------------------------------------------------------------------------


def purged(state: State, table: EngineTable, pending: Pending, cells: int) -> Iterator[Effect]:
    """Report the idle slots that the engine has emptied for an answer of these cells, the lowest first."""
    pool = cells_of(table.traits)
    if wipes(table.traits):
        return
    others = [SlotId(slot) for slot in range(len(table.states)) if slot != pending.slot]
    over = cells - pool + sum(_at_least(state, table, slot) for slot in others)
    for slot in others:
        contents = table.shadow.slots[slot]
        if over > 0 and contents and table.states[slot] is SlotState.IDLE:
            over -= contents.total
            yield _emptied(table, slot, PoolAct.PURGED, pending.arrived.request, contents.total)


def _at_least(state: State, table: EngineTable, slot: SlotId) -> int:
    """Return the cells that a slot certainly held a moment ago."""
    contents, owner = table.shadow.slots[slot], table.owners[slot]
    if table.states[slot] is SlotState.IDLE:
        return contents.total if contents else 0
    running = state.requests.get(owner) if owner is not None else None
    started = running is not None and table.states[slot] is SlotState.RUNNING
    return len(running.prompt) if running and started and running.prompt is not None else 0


def _emptied(table: EngineTable, slot: SlotId, act: PoolAct, request: RequestId, cells: int) -> Pooled:
    table.purged(slot)
    return Pooled(request=request, engine=table.engine, act=act, slot=slot, cells=cells)


def exceeded(state: State, event: Exceeded) -> Iterator[Effect]:
    """Record that a request failed for lack of cells. Before that, the engine emptied all idle slots."""
    pending = state.requests.get(event.request)
    table = pending.table if pending else None
    if pending is None or table is None:
        return
    act = PoolAct.RETRIED if event.again else PoolAct.FAILED
    yield Pooled(request=event.request, engine=table.engine, act=act, slot=pending.slot, cells=0)
    if not cells_of(table.traits):
        table.learn(table.traits.learned(Known.FAILED, unified=True))
    for slot in table.idle if cells_of(table.traits) else ():
        if contents := table.shadow.slots[slot]:
            yield _emptied(table, slot, PoolAct.PURGED, event.request, contents.total)
    table.look()
