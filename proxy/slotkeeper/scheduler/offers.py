"""The places that one engine offers for a prompt, each as a plan with its price. Nothing here changes state.

What the plans of all its slots share is computed once (`Options`), so that some slots can be asked for alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Final

from slotkeeper.scheduler.costs import WORTH_A_FILE
from slotkeeper.scheduler.effects import Keep, Load, Prefill, Purpose, SaveMoment, Step, Wipe
from slotkeeper.scheduler.engine_model import foreign_token
from slotkeeper.scheduler.pending import Plan
from slotkeeper.scheduler.prices import Want, loss, parked_price, price_of, restore_price
from slotkeeper.scheduler.shadow import ReusePlan, Source
from slotkeeper.scheduler.slot_contents import (
    SlotContents,
    Snapshot,
    contains,
    cut_to,
    goes_on_from,
    reuse,
)
from slotkeeper.scheduler.table import EngineTable, SlotState
from slotkeeper.scheduler.tokens import Tokens, prompt_end
from slotkeeper.scheduler.types import Reason, SlotId

# Prices of a round trip, in tokens of prefill: small, so that they only decide between similar places.
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
            common = becomes.lcp(want.prompt)
            goes_on = common == len(becomes) < len(want.prompt)
            reuse_plan = replace(reuse_plan, reuse=common if goes_on else min(reuse_plan.reuse, common))
        seconds = 0.0 if maintenance.stalls else maintenance.left(want.now)
        price = seconds * table.rates.prefill + price_of(table, reuse_plan, want)
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
        steps = (Wipe(),) if wiped else ()
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
        yield _plan(table, here, price + TOUCH_PRICE * len(steps), steps=(*steps, Load(snapshot)))


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
    kept = reuse_plan.parked or table.shadow.elsewhere(victim, reuse_plan.slot)
    if kept and table.engine_keeps(victim):  # the engine saves it itself, or has done so
        return None
    lost, cost = loss(table, reuse_plan, want), parked_price(table, victim, want.now)
    saving: tuple[Step, ...] = (Keep(SaveMoment.PARK),)
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
