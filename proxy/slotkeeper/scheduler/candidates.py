"""Every way to serve a prompt, now or by waiting for a better slot, each with its price; the cheapest wins.

`Options` are the places that one engine offers, with what their plans share, which is computed once.
`cheapest` prices places and takes the cheapest: places on one engine are compared in tokens of prefill,
places on several engines in seconds (`prices`). With several engines a slot in which a request runs is a
place as well: the new request waits for it, if that is cheaper than any free slot. Among many slots, only
those are priced that share most with the prompt or lose least. Nothing here changes state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from heapq import nsmallest
from typing import Final

from slotkeeper.scheduler.effects import Erase, Prefill, Purpose, Restore, Save, SaveMoment, Step
from slotkeeper.scheduler.prices import (
    Comparison,
    Want,
    blind_price,
    loss,
    parked_price,
    price_of,
    restore_price,
)
from slotkeeper.scheduler.prompts.tokens import ComparedPrompt, Tokens, prompt_end
from slotkeeper.scheduler.rates import WORTH_A_FILE
from slotkeeper.scheduler.requests.pending import Plan
from slotkeeper.scheduler.slots.engine_model import (
    EngineTraits,
    SlotContents,
    Snapshot,
    checkpoints_last,
    contains,
    continues,
    cut_to,
    foreign_token,
    goes_on_from,
    reuse,
    shared_messages,
)
from slotkeeper.scheduler.slots.shadow import ReusePlan, Source
from slotkeeper.scheduler.slots.table import EngineTable, SlotState
from slotkeeper.scheduler.snapshots.catalog import Catalog
from slotkeeper.scheduler.types import Reason, SlotId

# -- the places that one engine offers -------------------------------------------------------------------

# Prices of a round trip, in tokens of prefill: small, so that they only decide between similar places. Priced
# by the measured time of a pass in their place, simulated waits were equal (1.0003 times the seconds).
TOUCH_PRICE: Final = 16.0
STEER_PRICE: Final = 32.0
UNPINNED_PRICE: Final = 8.0  # nothing else starts on that engine until the task's slot is known
STEER_TAIL: Final = 4  # tokens of a steered prompt left for the request itself


class Options:
    """What the plans of all slots of one engine share for one prompt; computed when first needed."""

    def __init__(self, table: EngineTable, want: Want) -> None:
        self.table, self.want, self.idle = table, want, table.idle

    def __repr__(self) -> str:
        return f"<Options {self.table.engine} {len(self.idle)} idle>"

    @property
    def slots(self) -> range:
        return range(len(self.table.states))

    @cached_property
    def closed(self) -> bool:
        """Whether no slot may be given out for some milliseconds: too short to compute a prompt elsewhere."""
        return not self.table.open_for_pins(self.want.now)

    @cached_property
    def file(self) -> Snapshot | None:
        """The file that saves most."""
        table, want = self.table, self.want
        best = want.catalog.best(want.prompt, table.traits, lambda s: restore_price(table, s))
        return best[0] if best else None

    @cached_property
    def restored(self) -> ReusePlan | None:
        """What a restore of that file gives in any idle slot; None if the engine would use something else."""
        if self.file is None or not self.idle:
            return None
        found = self.table.shadow.plan_reuse_restored(self.idle[0], self.want.prompt, self.file)
        return found if found.source is Source.SNAPSHOT and found.reuse else None

    @cached_property
    def reachable(self) -> int:
        """The most tokens that the engine could load from its RAM cache after a touch."""
        shadow, prompt = self.table.shadow, self.want.prompt
        loads = shadow.traits.ram_cache and not shadow.isolates(
            prompt.space
        )  # it could load a state of another space
        return shadow.longest_common(prompt, self.idle) if loads else 0

    @cached_property
    def natural(self) -> ReusePlan | None:
        """What the engine's own choice gives; None if it is unsafe, or where spaces must be kept apart.

        By the time the task arrives, a slot of another space may be free and look better to the engine.
        """
        shadow, prompt = self.table.shadow, self.want.prompt
        found = None if shadow.isolates(prompt.space) else shadow.engine_choice(prompt, self.idle)
        return found if found and not found.unsafe else None


def pinned(at: Options, slots: Collection[int]) -> Iterator[Plan]:
    """Yield the plans for these slots, and the engine's own choice if it is one of them."""
    table, want = at.table, at.want
    free = [slot for slot in at.idle if slot in slots]
    for plan in (*_as_it_is(at, free), *_touched(at, free), *_restored(at, free)):
        yield replace(plan, wait=True) if at.closed else plan
        if not at.closed and (parked := _parking(plan, want)):
            yield parked
    yield from _draining(table, want, slots)
    yield from _in_maintenance(table, want, slots)
    if table.open_for_unpinned(want.now) and (natural := at.natural) and natural.slot in slots:
        price = UNPINNED_PRICE + price_of(table, natural, want)
        yield _plan(table, natural, price, reason=Reason.ENGINE_CHOSE, pinned=False)


def _in_state(table: EngineTable, slots: Collection[int], *states: SlotState) -> list[SlotId]:
    """Return those of the slots that are in one of these states."""
    return [SlotId(slot) for slot in slots if table.states[slot] in states]


def _draining(table: EngineTable, want: Want, slots: Collection[int]) -> Iterator[Plan]:
    """Yield a plan for each draining slot, to be used when its task has ended."""
    for slot in _in_state(table, slots, SlotState.DRAINING):
        reuse_plan = table.shadow.plan_reuse(slot, want.prompt)
        price = table.traits.n_ubatch + price_of(table, reuse_plan, want)
        yield _plan(table, reuse_plan, price, wait=True)


def _in_maintenance(table: EngineTable, want: Want, slots: Collection[int]) -> Iterator[Plan]:
    """Yield a plan for each slot in maintenance, to be used when its step ends.

    The remaining time counts, except for files, which delay every slot of the engine.
    """
    for slot in _in_state(table, slots, SlotState.MAINTENANCE):
        maintenance, reuse_plan = table.maintenance[slot], table.shadow.plan_reuse(slot, want.prompt)
        if (becomes := maintenance.becomes) is not None:
            common = want.prompt.lcp(becomes)
            goes_on = common == len(becomes) < len(want.prompt)
            reuse_plan = replace(reuse_plan, reuse=common if goes_on else min(reuse_plan.reuse, common))
        seconds = 0.0 if maintenance.stalls else maintenance.left(want.now)
        price = seconds * table.rates.marginal_prefill + price_of(table, reuse_plan, want)
        plan = _plan(table, reuse_plan, price, wait=True)
        yield plan
        if parked := _parking(plan, want):  # its state can be saved then, if this step does not save it
            yield parked


def when_over(at: Options, slots: Collection[int]) -> Iterator[Plan]:
    """Yield plans for each of these slots of an engine without a free one, to be used when its request ends.

    Each slot is priced as it will be, and after a restore.
    """
    table, want = at.table, at.want
    until = over_in(at)
    if until is None:
        return
    for slot in _in_state(table, slots, SlotState.LAUNCHED, SlotState.RUNNING):
        reuse_plan = table.shadow.plan_reuse(slot, want.prompt)
        yield replace(_plan(table, reuse_plan, price_of(table, reuse_plan, want), wait=True), until=until)
        if at.file and not want.plain:
            restored = table.shadow.plan_reuse_restored(slot, want.prompt, at.file)
            price = restore_price(table, at.file) + price_of(table, restored, want)
            yield replace(_plan(table, restored, price, wait=True), until=until)


def over_in(at: Options) -> float | None:
    """Return in how many seconds a slot is free; None if one is free now, or if that is unknown."""
    table = at.table
    if at.idle or table.leaving or not table.up:
        return None
    return table.work.free_in(at.want.now)


def _as_it_is(at: Options, free: Collection[SlotId]) -> Iterator[Plan]:
    table, want = at.table, at.want
    for slot in free:
        reuse_plan = table.shadow.plan_reuse(slot, want.prompt)
        wiped = reuse_plan.unsafe or (reuse_plan.foreign and table.may_wipe(want.now) and not want.plain)
        steps = (Erase(),) if wiped else ()
        yield _plan(table, reuse_plan, price_of(table, reuse_plan, want), steps=steps)


def _touched(at: Options, free: Collection[SlotId]) -> Iterator[Plan]:
    """Yield a plan for each slot after a touch, if the engine has more in its RAM cache than in the slot.

    Not if the engine would load what the touch itself moved there: that is no more than the slot as it is.
    """
    table, prompt = at.table, at.want.prompt
    shadow = table.shadow
    for slot in free if at.reachable > TOUCH_PRICE else ():
        if at.reachable - shadow.plan_reuse(slot, prompt).reuse <= TOUCH_PRICE:
            continue
        touched, own = shadow.look_touched(slot, prompt, at.idle), shadow.slots[slot]
        back = own is not None and touched.base is not None and contains(own, touched.base)
        if touched.source is Source.RAM and not touched.unsafe and not back:
            steps = (Prefill(foreign_token(prompt), Purpose.TOUCH),)
            yield _plan(table, touched, TOUCH_PRICE + price_of(table, touched, at.want), steps=steps)


def _restored(at: Options, free: Collection[SlotId]) -> Iterator[Plan]:
    """Yield a plan for each slot after a restore of the file that saves most."""
    table, want, snapshot = at.table, at.want, at.file
    if snapshot is None or at.restored is None:
        return
    for slot in free:
        here = replace(at.restored, slot=slot)  # whatever the slot held is overwritten
        price = restore_price(table, snapshot) + price_of(table, here, want)
        steps = _touch_for_adapters(table, slot, want)
        yield _plan(table, here, price + TOUCH_PRICE * len(steps), steps=(*steps, Restore(snapshot)))


def _touch_for_adapters(table: EngineTable, slot: SlotId, want: Want) -> tuple[Step, ...]:
    """Return a touch under the request's adapters, if the slot's last task had others.

    Without it the engine would empty the slot when the request begins (engine.md T12).
    """
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
    lost, cost = loss(table, reuse_plan, want), parked_price(table, victim, want.now)
    saving: tuple[Step, ...] = (Save(SaveMoment.PARK),)
    if (end := goes_on_from(victim, table.traits)) < victim.total:
        back = victim.tokens.cut(0, end)
        saving = (Prefill(back, Purpose.BACK), *saving)
        cost += TOUCH_PRICE + _lost_by_cut(plan, victim, back, want.prompt)
    if cost >= lost:
        return None
    return replace(plan, steps=(*saving, *plan.steps), price=plan.price - lost + cost)


def _lost_by_cut(plan: Plan, victim: SlotContents, back: Tokens, prompt: Tokens) -> int:
    """Return how many tokens of the prompt the slot gives no more after it was cut `back` (T7)."""
    reuse_plan, traits = plan.reuse_plan, plan.table.traits
    if reuse_plan is None or reuse_plan.source is not Source.SLOT:
        return 0
    return max(0, reuse_plan.reuse - reuse(cut_to(victim, back, traits), prompt, traits))


def unpinnable(at: Options, slots: Collection[int]) -> Iterator[Plan]:
    """Yield plans for a route without id_slot: the engine chooses, or we prefill the prompt first (T5)."""
    table, want, prompt = at.table, at.want, at.want.prompt
    wait = not table.open_for_unpinned(want.now)
    isolates = table.shadow.isolates(prompt.space)
    if (natural := at.natural) and natural.slot in slots:
        price = price_of(table, natural, want)
        yield _plan(table, natural, price, reason=Reason.ENGINE_CHOSE, pinned=False, wait=wait)
    for plan in pinned(at, slots):
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


# -- choose the cheapest place ---------------------------------------------------------------------------

BEATEN: Final = 5  # plans kept besides the best one, for `why`
TURN: Final = 2  # messages: a reply, and the client's next message
PRICED_SLOTS: Final = 8  # of all engines together, at least
LEAST_PRICED_SLOTS: Final = 2  # of one engine, at least

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
) -> Plan | None:
    """Return the best plan for an exact prompt; None if no slot can be had. `plain`: without steps.

    `own_scales`: the request names its LoRA adapters.
    """
    if not any(table.open_for_pins(now) if pinnable else table.open_for_unpinned(now) for table in tables):
        return None
    want = Want(ComparedPrompt(prompt), hash_chain, now, catalog, plain=plain, own_scales=own_scales)
    options = [Options(table, want) for table in tables]
    compared = Comparison.of(tables) if len(tables) > 1 else None
    order = partial(_order_of_several, want=want, compared=compared) if compared else partial(_order, now=now)
    best = nsmallest(1 + BEATEN, _plans(options, pinnable=pinnable), key=order)
    if compared:
        best = [replace(plan, seconds=order(plan)[0]) for plan in best]
    return replace(best[0], beaten=tuple(best[1:])) if best else None


def least_seconds(
    tables: Iterable[EngineTable], prompt: Tokens, *, now: float, catalog: Catalog
) -> float | None:
    """Return the shortest time that a free slot needs for a prompt, as it is or after a load or restore.

    None if no slot is free. What is overwritten does not count.
    """
    want = Want(ComparedPrompt(prompt), (), now, catalog)
    found = [_least(Options(table, want)) / table.rates.marginal_prefill for table in tables if table.idle]
    return min(found, default=None)


def _least(at: Options) -> float:
    """Return the least price of computing the prompt in any free slot, without what is lost there."""
    table, length = at.table, len(at.want.prompt)
    prices = [float(length - table.shadow.plan_reuse(slot, at.want.prompt).reuse) for slot in at.idle]
    if at.reachable > TOUCH_PRICE:
        prices.append(TOUCH_PRICE + length - at.reachable)
    if at.file and at.restored:
        prices.append(restore_price(table, at.file) + length - at.restored.reuse)
    return min(prices)


def _plans(options: Sequence[Options], *, pinnable: bool) -> Iterator[Plan]:
    """Yield plans for the slots worth a price; on several engines also those that wait for an answer."""
    most = max(LEAST_PRICED_SLOTS, PRICED_SLOTS // len(options))
    likely = [_likely(at, most, pinnable=pinnable) for at in options]
    for at, slots in zip(options, likely, strict=True):
        plans = pinned(at, slots) if pinnable else unpinnable(at, slots)
        yield from (plan for plan in plans if not (at.want.plain and plan.steps))
    for at, slots in zip(options, likely, strict=True) if len(options) > 1 else ():
        yield from when_over(at, slots)


def _likely(at: Options, most: int, *, pinnable: bool) -> Collection[int]:
    """Return the slots of one engine worth a price: all, or the `most` free ones and the `most` others.

    They share most with the prompt or lose least. For a route without id_slot, the engine's own choice is
    one of them.
    """
    if len(at.slots) <= most:
        return at.slots
    guess, busy = partial(_guess, at), (SlotId(slot) for slot in at.slots if slot not in at.idle)
    chosen = {*nsmallest(most, at.idle, key=guess), *nsmallest(most, busy, key=guess)}
    if not pinnable and at.natural:
        chosen.add(at.natural.slot)
    return sorted(chosen)


def _guess(at: Options, slot: SlotId) -> float:
    """Return about what a slot costs, in tokens of prefill: what is lost there less what it saves."""
    contents = at.table.shadow.slots[slot]
    if contents is None:
        return 0.0
    common = at.want.prompt.lcp(contents.tokens)
    return contents.chance(at.want.now) * (contents.total - common) - common


def _order(plan: Plan, now: float) -> Order:
    """Return the key to sort plans by price; of equal ones, those that need not wait come first.

    A file that an engine reads or writes delays all its slots.
    """
    held_up = plan.table.stalled(now) * plan.table.rates.marginal_prefill
    return plan.price + held_up, plan.wait, plan.table.load, plan.slot


def _order_of_several(plan: Plan, *, want: Want, compared: Comparison) -> Order:
    """Return the key to sort plans by seconds, over engines of different speed and load."""
    reuse = plan.reuse_plan.reuse if plan.reuse_plan else 0
    parked = any(isinstance(step, Save) for step in plan.steps)  # nothing is lost
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
    places = [
        (blind_price(table, table.shadow.slots[slot], catalog, now), table, slot)
        for table in tables
        if (table.open_for_pins(now) if pinnable else table.open_for_anything(now))
        for slot in table.idle
    ]
    if not places:
        return None
    if len(tables) < 2:
        price, table, slot = min(places, key=lambda place: place[0])
    else:
        compared = Comparison.of(tables)

        def seconds(place: tuple[float, EngineTable, SlotId]) -> tuple[float, float]:
            price, table, _ = place
            return compared.seconds(table, price, now, lost=price), table.load

        price, table, slot = min(places, key=seconds)
    plan = Plan(table=table, pinned=False, reason=Reason.UNRENDERED, price=price)
    return _pinned_blind(plan, slot, space, now) if pinnable else plan


def _pinned_blind(plan: Plan, slot: SlotId, space: str, now: float) -> Plan:
    """Return the plan pinned to this slot. Contents of another space are erased first."""
    table = plan.table
    reuse_plan = table.shadow.plan_reuse_in_space(slot, space) if table.shadow.isolates(space) else None
    steps = (Erase(),) if reuse_plan and reuse_plan.foreign and table.may_wipe(now) else ()
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
