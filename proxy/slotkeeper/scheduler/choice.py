"""Choose where a prompt goes: price every possible place and take the cheapest. Nothing here changes state.

Places on one engine are compared in tokens of prefill, places on several engines in seconds (`prices`). With
several engines a slot in which a request runs is a place as well: the new request waits for it, if that is
cheaper than any free slot.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from typing import Final

from slotkeeper.scheduler.bounds import PriceBounds
from slotkeeper.scheduler.catalog import Catalog
from slotkeeper.scheduler.effects import Keep, Wipe
from slotkeeper.scheduler.engine_model import EngineTraits, checkpoints_last
from slotkeeper.scheduler.offers import Options, pinned, unpinnable, when_over
from slotkeeper.scheduler.pending import Plan
from slotkeeper.scheduler.prices import Comparison, Want, blind_price, loss
from slotkeeper.scheduler.slot_contents import SlotContents, continues, shared_messages
from slotkeeper.scheduler.table import EngineTable, SlotState
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import Reason, SlotId

BEATEN: Final = 5  # plans kept besides the best one, for `why`
TURN: Final = 2  # messages: a reply, and the client's next message
FEW: Final = 4  # slots that are all priced: with more, it is faster to find out first which cannot be cheap

Order = tuple[float, bool, float, SlotId | None]


def continuing(tables: Iterable[EngineTable], hash_chain: Sequence[bytes], now: float) -> Plan | None:
    """Return a plan for a free slot whose messages are the beginning of these; no tokens are needed for that.

    None if another slot shares more messages, even behind other tools: then tokens decide.
    """
    best: Plan | None = None
    most = 0
    for table in tables:
        ready = table.open_for_pins(now)
        for slot, contents in enumerate(table.shadow.slots):
            shared = shared_messages(hash_chain, contents)
            if shared > most:
                best, most = None, shared
                free = ready and table.states[slot] is SlotState.IDLE
                if (
                    free
                    and contents
                    and continues(hash_chain, contents)
                    and _goes_on(contents, hash_chain, table.traits)
                ):
                    best = Plan(table=table, slot=SlotId(slot), reason=Reason.CONTINUES)
    return best


def _goes_on(contents: SlotContents, hash_chain: Sequence[bytes], traits: EngineTraits) -> bool:
    """Whether the request loses little in this slot, even if it diverges from the last reply.

    Otherwise tokens decide. They also decide if more than one turn has passed: a file may have these turns.
    """
    if traits.snapshots and len(hash_chain) - len(contents.hash_chain) > TURN:
        return False
    if traits.cuttable:
        return contents.floor == 0  # T9
    if len(hash_chain) == len(contents.hash_chain):  # same messages again: cut at the end of the last prompt
        return bool(contents.checkpoints) and not contents.sure
    # Another file may have more if checkpoints are thinned out, or if a file brought none. The same holds if
    # the slot gave up many tokens for an expected turn, and this turn is a different one.
    others = traits.snapshots and (contents.from_file or not checkpoints_last(traits))
    risked = traits.n_ubatch if traits.snapshots else traits.n_batch
    return bool(contents.checkpoints) and not others and contents.given_up <= risked


def cheapest(
    tables: Collection[EngineTable],
    prompt: Tokens,
    *,
    hash_chain: Sequence[bytes] = (),
    pinnable: bool,
    now: float,
    catalog: Catalog,
    plain: bool = False,
    own_scales: bool = False,
    bounds: PriceBounds | None = None,
) -> Plan | None:
    """Return the best plan for an exact prompt; None if no slot can be had. `plain`: without steps.

    `own_scales`: the request names its LoRA adapters. `bounds`: among many slots, those that cannot be among
    the cheapest are left out by them. That changes no result.
    """
    if not any(table.open_for_pins(now) if pinnable else table.open_for_unpinned(now) for table in tables):
        return None
    want = Want(prompt, hash_chain, now, catalog, plain=plain, own_scales=own_scales)
    options = [Options(table, want) for table in tables]
    compared = Comparison.of(tables) if len(tables) > 1 else None
    order = partial(_order_of_several, want=want, compared=compared) if compared else partial(_order, now=now)
    if bounds is not None and sum(len(at.slots) for at in options) > FEW:
        best = _least(options, bounds.ranked(options, compared), order, pinnable=pinnable)
    else:
        best = nsmallest(1 + BEATEN, _all_plans(options, pinnable=pinnable), key=order)
    if compared:
        best = [replace(plan, seconds=order(plan)[0]) for plan in best]
    return replace(best[0], beaten=tuple(best[1:])) if best else None


def _all_plans(options: Sequence[Options], *, pinnable: bool) -> Iterator[Plan]:
    """Yield the plans for all slots; on several engines also those that wait for an answer."""
    for at in options:
        yield from _offers(at, at.slots, pinnable=pinnable)
    for at in options if len(options) > 1 else ():
        yield from when_over(at, at.slots)


def _offers(at: Options, slots: Collection[int], *, pinnable: bool) -> Iterator[Plan]:
    """Yield the plans for these slots, those where a request runs excepted."""
    plans = pinned(at, slots) if pinnable else unpinnable(at, slots)
    return (plan for plan in plans if not (at.want.plain and plan.steps))


def _least(
    options: Sequence[Options],
    ranked: Iterable[tuple[float, int, SlotId]],
    order: Callable[[Plan], Order],
    *,
    pinnable: bool,
) -> list[Plan]:
    """Return the same plans as `nsmallest` among all slots, without those whose lower bounds are too high.

    Of equal plans the one of the earlier engine comes first, and those that wait for an answer come last.
    """
    found: list[tuple[Order, bool, int, int, Plan]] = []
    count = 0
    for bound, number, slot in ranked:
        if len(found) > BEATEN and bound > found[BEATEN][0][0]:
            break
        at, only = options[number], (slot,)
        over = when_over(at, only) if len(options) > 1 else ()
        for waits, plans in enumerate((_offers(at, only, pinnable=pinnable), over)):
            for plan in plans:
                count += 1
                insort(found, (order(plan), bool(waits), number, count, plan))
        del found[1 + BEATEN :]
    return [plan for *_, plan in found]


def _order(plan: Plan, now: float) -> Order:
    """Return the key to sort plans by price; of equal ones, those that need not wait come first.

    A file that an engine reads or writes delays all its slots.
    """
    held_up = plan.table.stalled(now) * plan.table.rates.prefill
    return plan.price + held_up, plan.wait, plan.table.load, plan.slot


def _order_of_several(plan: Plan, *, want: Want, compared: Comparison) -> Order:
    """Return the key to sort plans by seconds, over engines of different speed and load."""
    reuse = plan.reuse_plan.reuse if plan.reuse_plan else 0
    parked = any(isinstance(step, Keep) for step in plan.steps)  # nothing is lost
    seconds = compared.seconds(
        plan.table,
        plan.price,
        want.now,
        computes=len(want.prompt) - reuse,
        lost=loss(plan.table, plan.reuse_plan, want) if plan.reuse_plan and not parked else 0.0,
        until=plan.until,
    )
    return seconds, plan.wait, plan.table.load, plan.slot


def blind(
    tables: Collection[EngineTable], *, pinnable: bool, now: float, catalog: Catalog, space: str = ""
) -> Plan | None:
    """Return a plan for the slot that loses least, for a prompt whose tokens are unknown."""
    plans: list[Plan] = []
    for table in tables:
        ready = table.open_for_pins(now) if pinnable else table.open_for_anything(now)
        for slot in table.idle if ready else ():
            price = blind_price(table, table.shadow.slots[slot], catalog, now)
            plan = Plan(table=table, pinned=False, reason=Reason.UNRENDERED, price=price)
            plans.append(_pinned_blind(plan, slot, space, now) if pinnable else plan)
    if len(tables) < 2:
        return min(plans, key=lambda plan: (plan.price, plan.table.load), default=None)
    compared = Comparison.of(tables)

    def seconds(plan: Plan) -> tuple[float, float]:
        return compared.seconds(plan.table, plan.price, now, lost=plan.price), plan.table.load

    return min(plans, key=seconds, default=None)


def _pinned_blind(plan: Plan, slot: SlotId, space: str, now: float) -> Plan:
    """Return the plan pinned to this slot. Contents of another space are erased first."""
    table = plan.table
    reuse_plan = table.shadow.plan_reuse_in_space(slot, space) if table.shadow.isolates(space) else None
    steps = (Wipe(),) if reuse_plan and reuse_plan.foreign and table.may_wipe(now) else ()
    return replace(plan, slot=slot, pinned=True, reuse_plan=reuse_plan, steps=steps)


# -- two forms of one request ----------------------------------------------------------------------------


def changed_by_messages(
    tables: Collection[EngineTable], own: Sequence[bytes], changed: Sequence[bytes], now: float
) -> Plan | None:
    """Return a plan for the changed form if messages alone show that it is cheaper; else None.

    That is the case if a free slot, which can be cut anywhere, holds all earlier messages of the changed
    form, and no state holds as many messages of the client's own form. What both forms share after these
    messages must be computed for either. The opposite cannot be decided without tokens: objects whose keys
    are in another order have the same digest.
    """
    if _reach(tables, changed) <= _reach(tables, own):
        return None
    plan = continuing(tables, changed, now)
    return plan if plan is not None and plan.table.traits.cuttable else None


def _reach(tables: Collection[EngineTable], hash_chain: Sequence[bytes]) -> int:
    """Return the most messages that a known state shares with this form; the tools must be equal."""
    shadows = [table.shadow for table in tables]
    states = [
        contents
        for shadow in shadows
        for contents in (*shadow.slots, *shadow.ram)
        if contents and contents.hash_chain
    ]
    same_head = (contents for contents in states if hash_chain and contents.hash_chain[0] == hash_chain[0])
    return max((shared_messages(hash_chain, contents) for contents in same_head), default=0)
