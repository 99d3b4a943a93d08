"""Choose where a prompt goes: price every possible place and take the cheapest. Nothing here changes state.

Places on one engine are compared in tokens of prefill, places on several engines in seconds (`prices`). With
several engines a slot in which a request runs is a place as well: the new request waits for it, if that is
cheaper than any free slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from itertools import chain
from typing import Final

from slotkeeper.scheduler.catalog import Catalog
from slotkeeper.scheduler.costs import WORTH_A_FILE
from slotkeeper.scheduler.effects import Keep, Load, Prefill, Purpose, SaveMoment, Step, Wipe
from slotkeeper.scheduler.engine_model import EngineTraits, checkpoints_last, foreign_token
from slotkeeper.scheduler.pending import Plan
from slotkeeper.scheduler.prices import (
    Comparison,
    Want,
    blind_price,
    loss,
    parked_price,
    price_of,
    restore_price,
)
from slotkeeper.scheduler.shadow import ReusePlan, Source
from slotkeeper.scheduler.slot_contents import (
    SlotContents,
    contains,
    continues,
    goes_on_from,
    shared_messages,
)
from slotkeeper.scheduler.table import EngineTable, SlotState
from slotkeeper.scheduler.tokens import Tokens, prompt_end
from slotkeeper.scheduler.types import Reason, SlotId

# Prices of a round trip, in tokens of prefill: small, so that they only decide between similar places.
TOUCH_PRICE: Final = 16.0
STEER_PRICE: Final = 32.0
UNPINNED_PRICE: Final = 8.0  # nothing else starts on that engine until the task's slot is known
BEATEN: Final = 5  # plans kept besides the best one, for `why`
TURN: Final = 2  # messages: a reply, and the client's next message
STEER_TAIL: Final = 4  # tokens of a steered prompt left for the request itself


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
) -> Plan | None:
    """Return the best plan for an exact prompt; None if no slot can be had. `plain`: without steps.

    `own_scales`: the request names its LoRA adapters.
    """
    if not any(table.open_for_pins(now) if pinnable else table.open_for_unpinned(now) for table in tables):
        return None
    offers = _pinned if pinnable else _unpinnable
    want = Want(prompt, hash_chain, now, catalog, plain=plain, own_scales=own_scales)
    plans: Iterable[Plan] = (
        plan for table in tables for plan in offers(table, want) if not (plain and plan.steps)
    )
    order = partial(_order, now=now)
    if len(tables) > 1:
        plans = chain(plans, *(_when_over(table, want) for table in tables))
        order = partial(_order_of_several, want=want, compared=Comparison.of(tables))
    best = nsmallest(1 + BEATEN, plans, key=order)
    if len(tables) > 1:
        best = [replace(plan, seconds=order(plan)[0]) for plan in best]
    return replace(best[0], beaten=tuple(best[1:])) if best else None


def _order(plan: Plan, now: float) -> tuple[float, bool, float, SlotId | None]:
    """Return the key to sort plans by price; of equal ones, those that need not wait come first.

    A file that an engine reads or writes delays all its slots.
    """
    held_up = plan.table.stalled(now) * plan.table.rates.prefill
    return plan.price + held_up, plan.wait, plan.table.load, plan.slot


def _order_of_several(
    plan: Plan, *, want: Want, compared: Comparison
) -> tuple[float, bool, float, SlotId | None]:
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
    """Return the plan pinned to this slot. Contents of another namespace are erased first."""
    table = plan.table
    reuse_plan = table.shadow.plan_reuse_in_space(slot, space) if table.shadow.isolates(space) else None
    steps = (Wipe(),) if reuse_plan and reuse_plan.foreign and table.may_wipe(now) else ()
    return replace(plan, slot=slot, pinned=True, reuse_plan=reuse_plan, steps=steps)


def _pinned(table: EngineTable, want: Want) -> Iterator[Plan]:
    shadow, idle, prompt, now = table.shadow, table.idle, want.prompt, want.now
    wait = not table.open_for_pins(now)  # for milliseconds: not worth computing the prompt elsewhere
    for plan in (*_as_it_is(table, want), *_touched(table, want), *_restored(table, want)):
        yield replace(plan, wait=True) if wait else plan
        if not wait and (parked := _parking(plan, want)):
            yield parked
    for slot in table.in_state(SlotState.DRAINING):
        reuse_plan = shadow.plan_reuse(slot, prompt)
        price = shadow.traits.n_ubatch + price_of(table, reuse_plan, want)
        yield _plan(table, reuse_plan, price, wait=True)
    yield from _in_maintenance(table, want)
    if (
        not shadow.isolates(prompt.space)  # later another slot may be free and look better to the engine
        and table.open_for_unpinned(now)
        and (natural := shadow.engine_choice(prompt, idle))
        and not natural.unsafe
    ):
        price = UNPINNED_PRICE + price_of(table, natural, want)
        yield _plan(table, natural, price, reason=Reason.ENGINE_CHOSE, pinned=False)


def _in_maintenance(table: EngineTable, want: Want) -> Iterator[Plan]:
    """Yield a plan for each slot in maintenance, to be used when its step ends.

    The remaining time counts, except for files, which delay every slot of the engine.
    """
    for slot in table.in_state(SlotState.MAINTENANCE):
        maintenance, reuse_plan = table.maintenance[slot], table.shadow.plan_reuse(slot, want.prompt)
        if (becomes := maintenance.becomes) is not None:
            common = becomes.lcp(want.prompt)
            goes_on = common == len(becomes) < len(want.prompt)
            reuse_plan = replace(reuse_plan, reuse=common if goes_on else min(reuse_plan.reuse, common))
        seconds = 0.0 if maintenance.stalls else maintenance.left(want.now)
        price = seconds * table.rates.prefill + price_of(table, reuse_plan, want)
        yield _plan(table, reuse_plan, price, wait=True)


def _when_over(table: EngineTable, want: Want) -> Iterator[Plan]:
    """Yield plans for each slot of an engine without a free one, to be used when its request ends.

    Each slot is priced as it will be, and after a restore.
    """
    until = table.work.free_in(want.now)
    if table.idle or until is None or table.leaving or not table.up:
        return
    best = want.catalog.best(want.prompt, table.traits, lambda s: restore_price(table, s))
    for slot in table.in_state(SlotState.LAUNCHED, SlotState.RUNNING):
        reuse_plan = table.shadow.plan_reuse(slot, want.prompt)
        yield replace(_plan(table, reuse_plan, price_of(table, reuse_plan, want), wait=True), until=until)
        if best and not want.plain:
            restored = table.shadow.plan_reuse_restored(slot, want.prompt, best[0])
            price = restore_price(table, best[0]) + price_of(table, restored, want)
            yield replace(_plan(table, restored, price, wait=True), until=until)


def _as_it_is(table: EngineTable, want: Want) -> Iterator[Plan]:
    for slot in table.idle:
        reuse_plan = table.shadow.plan_reuse(slot, want.prompt)
        wiped = reuse_plan.unsafe or (reuse_plan.foreign and table.may_wipe(want.now) and not want.plain)
        steps = (Wipe(),) if wiped else ()
        yield _plan(table, reuse_plan, price_of(table, reuse_plan, want), steps=steps)


def _touched(table: EngineTable, want: Want) -> Iterator[Plan]:
    """Yield a plan for each slot after a touch, if the engine has more in its RAM cache than in the slot.

    Not if the engine would load what the touch itself moved there: that is no more than the slot as it is.
    """
    shadow, idle, prompt = table.shadow, table.idle, want.prompt
    loads = shadow.traits.ram_cache and not shadow.isolates(prompt.space)  # it could load a state of others
    reachable = shadow.longest_common(prompt, idle) if loads else 0
    for slot in idle:
        if reachable - shadow.plan_reuse(slot, prompt).reuse <= TOUCH_PRICE:
            continue
        touched, own = shadow.look_touched(slot, prompt, idle), shadow.slots[slot]
        back = own is not None and touched.base is not None and contains(own, touched.base)
        if touched.source is Source.RAM and not touched.unsafe and not back:
            steps = (Prefill(foreign_token(prompt), Purpose.TOUCH),)
            yield _plan(table, touched, TOUCH_PRICE + price_of(table, touched, want), steps=steps)


def _restored(table: EngineTable, want: Want) -> Iterator[Plan]:
    """Yield a plan for each slot after a restore of the file that saves most."""
    best = want.catalog.best(want.prompt, table.traits, lambda s: restore_price(table, s))
    if best is None:
        return
    snapshot, idle = best[0], table.idle
    reuse_plan = table.shadow.plan_reuse_restored(idle[0], want.prompt, snapshot) if idle else None
    if reuse_plan and reuse_plan.source is Source.SNAPSHOT and reuse_plan.reuse:
        for slot in idle:
            here = replace(reuse_plan, slot=slot)  # whatever the slot held is overwritten
            price = restore_price(table, snapshot) + price_of(table, here, want)
            steps = _touch_for_adapters(table, slot, want)
            yield _plan(table, here, price + TOUCH_PRICE * len(steps), steps=(*steps, Load(snapshot)))


def _touch_for_adapters(table: EngineTable, slot: SlotId, want: Want) -> tuple[Step, ...]:
    """A touch under its adapters: else the engine empties the slot once the request comes (engine.md T12)."""
    shadow, space = table.shadow, want.prompt.space
    if not (want.own_scales or shadow.own_set(space)) or not shadow.has_other_adapters(slot, space):
        return ()
    return (Prefill(foreign_token(want.prompt), Purpose.TOUCH),)


def _parking(plan: Plan, want: Want) -> Plan | None:
    """Return the same plan with the slot saved before it is overwritten; None if that does not pay."""
    table, reuse_plan = plan.table, plan.reuse_plan
    victim = table.shadow.slots[reuse_plan.slot] if reuse_plan else None
    if reuse_plan is None or victim is None or not table.may_save(want.now):
        return None
    if victim.total < WORTH_A_FILE or table.shadow.stray(victim):
        return None
    kept = reuse_plan.parked or table.shadow.elsewhere(victim, reuse_plan.slot)
    if kept and table.engine_keeps(victim):  # the engine saves it itself, or has done so
        return None
    lost, cost = loss(table, reuse_plan, want), parked_price(table, victim, want.now)
    saving: tuple[Step, ...] = (Keep(SaveMoment.PARK),)
    if (end := goes_on_from(victim, table.traits)) < victim.total:
        saving, cost = (Prefill(victim.tokens.cut(0, end), Purpose.BACK), *saving), cost + TOUCH_PRICE
    if cost >= lost:
        return None
    return replace(plan, steps=(*saving, *plan.steps), price=plan.price - lost + cost)


def _unpinnable(table: EngineTable, want: Want) -> Iterator[Plan]:
    """Yield plans for a route without id_slot: the engine chooses, or we prefill the prompt first (T5)."""
    prompt, now = want.prompt, want.now
    wait = not table.open_for_unpinned(now)
    isolates = table.shadow.isolates(prompt.space)
    natural = None if isolates else table.shadow.engine_choice(prompt, table.idle)
    if natural and not natural.unsafe:
        price = price_of(table, natural, want)
        yield _plan(table, natural, price, reason=Reason.ENGINE_CHOSE, pinned=False, wait=wait)
    for plan in _pinned(table, want):
        if plan.wait:
            yield plan
        elif plan.pinned and len(prompt) > STEER_TAIL and (plan.isolated or not isolates):
            price, steps = STEER_PRICE + plan.price, (*plan.steps, steer(prompt))
            yield replace(plan, price=price, reason=Reason.STEERED, pinned=False, steps=steps, wait=wait)


def steer(prompt: Tokens) -> Prefill:
    """Prefill the prompt in the slot where the engine will then look for it (T5).

    The prompt must be longer than `STEER_TAIL`.
    """
    end = prompt_end(prompt.chunks, len(prompt) - STEER_TAIL)
    return Prefill(prompt.cut(0, end), Purpose.STEER)


def _plan(
    table: EngineTable,
    reuse_plan: ReusePlan,
    price: float,
    *,
    reason: Reason | None = None,
    pinned: bool = True,
    steps: tuple[Step, ...] = (),
    wait: bool = False,
) -> Plan:
    reasons = {
        Source.SLOT: Reason.PREFIX,
        Source.RAM: Reason.RAM_CACHE,
        Source.SNAPSHOT: Reason.SNAPSHOT,
        Source.NOTHING: Reason.COLD,
    }
    return Plan(
        table=table,
        slot=reuse_plan.slot,
        pinned=pinned,
        reason=reason or reasons[reuse_plan.source],
        reuse_plan=reuse_plan,
        steps=steps,
        price=price,
        wait=wait,
    )


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
