"""Every way to serve a prompt, now or by waiting for a better slot, each with its price; the cheapest wins.

`Options` are the places that one engine offers, with what their plans share, which is computed once.
`PriceBounds` are lower bounds of their prices, so that among many slots only a few have to be priced.
`cheapest` prices places and takes the cheapest: places on one engine are compared in tokens of prefill,
places on several engines in seconds (`prices`). With several engines a slot in which a request runs is a
place as well: the new request waits for it, if that is cheaper than any free slot. Nothing here changes
state.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from heapq import heapify, heappop, heappush, nsmallest
from itertools import zip_longest
from math import inf
from operator import attrgetter
from typing import Final, NamedTuple

from slotkeeper.scheduler.catalog import Catalog, Covered
from slotkeeper.scheduler.effects import Erase, Prefill, Purpose, Restore, Save, SaveMoment, Step
from slotkeeper.scheduler.engine_model import EngineTraits, checkpoints_last, foreign_token
from slotkeeper.scheduler.pending import Plan
from slotkeeper.scheduler.prices import (
    IN_LARGE_RAM,
    Comparison,
    Want,
    blind_price,
    file_price,
    loss,
    parked_price,
    price_of,
    restore_price,
)
from slotkeeper.scheduler.rates import WORTH_A_FILE
from slotkeeper.scheduler.shadow import ReusePlan, Source
from slotkeeper.scheduler.slot_contents import (
    HALF_LIFE,
    SlotContents,
    Snapshot,
    contains,
    continues,
    cut_to,
    goes_on_from,
    reuse,
    shared_messages,
)
from slotkeeper.scheduler.table import EngineTable, SlotState
from slotkeeper.scheduler.tokens import Tokens, prompt_end
from slotkeeper.scheduler.types import EngineId, Reason, SlotId

# -- the places that one engine offers -------------------------------------------------------------------

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


# -- what slots and RAM caches hold, sorted by tokens ----------------------------------------------------
# A decision asks which of hundreds of states begin like a prompt. Most begin otherwise, and are not compared.

NEAR: Final = 64  # tokens: states that share less with a prompt are not told apart


class Held(NamedTuple):
    """The place of a state: a slot; None: the engine's RAM cache."""

    engine: EngineId
    slot: SlotId | None


def _shared(one: Tokens, other: Tokens) -> int:
    """Return an upper bound of the tokens that two states share: it may end inside an image."""
    return one.same_ids(other) if one.space == other.space else 0


@dataclass(slots=True)
class NearStates:
    """The states that begin like a prompt, and the most tokens that any other state shares with it."""

    slots: dict[EngineId, dict[SlotId, int]] = field(default_factory=dict)
    ram: dict[EngineId, int] = field(default_factory=dict)  # the most of any entry
    others: int = 0

    def add(self, held: Held, common: int) -> None:
        """Take in a state. The states come in order, the one that shares most first."""
        if held.slot is None:
            self.ram.setdefault(held.engine, common)
        else:
            self.slots.setdefault(held.engine, {})[held.slot] = common

    def in_ram(self, engine: EngineId) -> int:
        """Return the most tokens that an entry of this engine's RAM cache shares with the prompt."""
        return max(self.ram.get(engine, 0), self.others)


class LiveStates:
    """States in the order of their tokens; state i shares `_common[i]` tokens with the one before."""

    def __init__(self) -> None:
        self._keys: list[tuple[str, bytes]] = []
        self._tokens: list[Tokens] = []
        self._held: list[Held] = []
        self._common: list[int] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<LiveStates {len(self)}>"

    def replace(self, held: Held, gone: SlotContents | None, come: SlotContents | None) -> None:
        """Record that a place now holds another state."""
        if gone is not None:
            self._drop(gone.tokens, held)
        if come is not None:
            self._put(come.tokens, held)

    def near(self, prompt: Tokens) -> NearStates:
        """Return the states around the prompt's place in the order: those that share most with it."""
        found = NearStates()
        behind = bisect_left(self._keys, (prompt.space, prompt.packed))
        before = behind - 1
        left = _shared(self._tokens[before], prompt) if before >= 0 else 0
        right = _shared(self._tokens[behind], prompt) if behind < len(self._tokens) else 0
        while max(left, right) >= NEAR:
            if left >= right:
                found.add(self._held[before], left)
                left = min(left, self._common[before])  # 0 of the first one
                before -= 1
            else:
                found.add(self._held[behind], right)
                behind += 1
                right = min(right, self._common[behind]) if behind < len(self._common) else 0
        found.others = max(left, right)
        return found

    def _put(self, tokens: Tokens, held: Held) -> None:
        key = (tokens.space, tokens.packed)
        index = bisect_left(self._keys, key)
        before = _shared(self._tokens[index - 1], tokens) if index else 0
        if index < len(self._tokens):
            self._common[index] = _shared(tokens, self._tokens[index])
        self._keys.insert(index, key)
        self._tokens.insert(index, tokens)
        self._held.insert(index, held)
        self._common.insert(index, before)

    def _drop(self, tokens: Tokens, held: Held) -> None:
        key = (tokens.space, tokens.packed)
        index = self._held.index(held, bisect_left(self._keys, key))  # equal states follow one another
        if self._keys[index] != key:
            raise AssertionError(f"no such state in {held}")
        del self._keys[index], self._tokens[index], self._held[index]
        gap = self._common.pop(index)
        if index < len(self._common):
            self._common[index] = min(gap, self._common[index])


# -- lower bounds of prices ------------------------------------------------------------------------------
# Hundreds of slots hold nothing of a prompt. They differ in what their contents are worth, how loaded and how
# fast their engines are, and what files cost there. All of that is known without the prompt, or once for each
# engine. A bound consists of
#
# * the time until the engine can begin, and the time of the answer;
# * the tokens that must be computed: the prompt less the most that any source can give (the slot, the RAM
#   cache, the best file with its price);
# * what is lost by overwriting the slot, or the price of saving it first, if that is less.
#
# No plan for a slot is cheaper than the slot's bound. The losses fade with time, all at one rate, so they are
# kept for each engine until something changes that they depend on.

DRAINS: Final = frozenset({SlotState.DRAINING, SlotState.MAINTENANCE})
OUTDATED: Final = attrgetter("outdated")
ROUNDING: Final = 1e-9  # share of a bound: more than the errors of floating point


class Worth(NamedTuple):
    """The parts of the cost of overwriting a slot that no prompt changes, at one moment; costs in tokens."""

    total: int = 0  # tokens held
    chance: float = 0.0  # of their use
    share: float = 1.0  # of the loss that remains
    recovery: float = 0.0  # the most that they cost once they are lost
    save: float = inf  # the price of saving them before
    restore: float = 0.0  # the price of restoring them

    def lost(self, common: int, faded: float) -> float:
        """Return the least loss if the next prompt shares `common` tokens."""
        return self.chance * faded * min(self.share * max(0, self.total - common), self.recovery)


NOTHING: Final = Worth()
UNCOVERED: Final = Covered(0, None)


@dataclass(frozen=True, slots=True)
class Overwrites:
    """What overwriting the slots of one engine costs at one moment, and all that this was computed from."""

    at: float
    traits: EngineTraits
    terms: tuple[float, ...]
    slots: list[SlotContents | None]
    ram: list[SlotContents]
    covered: list[Covered]
    worths: list[Worth]
    writers: frozenset[bytes]  # `_telling` messages of the requests that wrote the slots
    kind: int  # equal for engines with equal traits and equal prices of files
    least: Worth  # no slot is worth less, whatever it shares below `NEAR` tokens with a prompt

    @classmethod
    def of(
        cls, table: EngineTable, catalog: Catalog, now: float, kind: int, before: Overwrites | None
    ) -> Overwrites:
        """Compute what overwriting costs; costs in `before` that still hold are not computed again."""
        shadow, traits, terms = table.shadow, table.traits, table.file_terms
        kept = before if before and before.traits is traits and before.terms == terms else None
        covered, worths = [], []
        for slot, contents in enumerate(shadow.slots):
            if contents is None:
                covered.append(UNCOVERED)
                worths.append(NOTHING)
            elif kept and kept.slots[slot] is contents and not kept.covered[slot].outdated:
                covered.append(kept.covered[slot])
                share = _share(table, SlotId(slot), contents)
                worths.append(kept.worths[slot]._replace(chance=contents.chance(now), share=share))
            else:
                covered.append(catalog.answer(contents.tokens.cut(0, goes_on_from(contents, traits)), traits))
                worths.append(_worth(table, SlotId(slot), contents, catalog, now))
        writers = frozenset(digest for held in shadow.slots if held for digest in _telling(held.hash_chain))
        slots, ram = ([*shadow.slots], [*shadow.ram])
        return cls(now, traits, terms, slots, ram, covered, worths, writers, kind, _least_worth(worths))

    def hold(self, table: EngineTable) -> bool:
        """Whether nothing has changed that the costs depend on."""
        shadow = table.shadow
        states = self.traits is shadow.traits and self.slots == shadow.slots and self.ram == shadow.ram
        return states and self.terms == table.file_terms and not any(map(OUTDATED, self.covered))


def _share(table: EngineTable, slot: SlotId, contents: SlotContents) -> float:
    """Return the least share of a loss that remains. With a RAM cache, there may be a copy."""
    copied = table.traits.ram_cache or table.shadow.elsewhere(contents, slot)
    return IN_LARGE_RAM if copied else 1.0


def _worth(table: EngineTable, slot: SlotId, contents: SlotContents, catalog: Catalog, now: float) -> Worth:
    rates, total, size = table.rates, contents.total, table.bytes_of(contents)
    return Worth(
        total=total,
        chance=contents.chance(now),
        share=_share(table, slot, contents),
        recovery=file_price(table, contents, catalog),
        save=rates.save_price(size) if total >= WORTH_A_FILE else inf,
        restore=rates.restore_price(size),
    )


def _least_worth(worths: Sequence[Worth]) -> Worth:
    return Worth(
        total=sum(worth.total for worth in worths) + NEAR,
        chance=1.0,
        recovery=min(worth.lost(NEAR, 1.0) for worth in worths),
        save=min(worth.save for worth in worths),
        restore=min(worth.restore * worth.chance for worth in worths),
    )


@dataclass(frozen=True, slots=True)
class SharedTerms:
    """What bounds on all engines share, for one prompt."""

    want: Want
    length: int  # tokens of the prompt
    chain: frozenset[bytes]  # its messages
    near: NearStates
    compared: Comparison | None
    later: float  # the price of a token that is lost
    # The best file for each kind of engine: those with equal traits and equal prices of files.
    files: dict[int, tuple[Snapshot, int] | None] = field(default_factory=dict)


class Engine(NamedTuple):
    """What one engine adds to the bounds of all its slots, for one prompt; in the unit of `ranked`."""

    shared: SharedTerms
    table: EngineTable
    overwrites: Overwrites
    begins: float  # the time until it can begin, and that of the answer
    computes: float  # prefill of the prompt, with the best source besides the slot itself
    token: float  # of each token of the prompt, with the delay of the requests beside it
    price: float  # of each token of prefill, in all other prices
    faded: float  # what is left of the chances since they were computed
    saves: bool
    common: dict[SlotId, int]  # tokens that slots share with the prompt

    def bound(self, worth: Worth, common: int) -> float:
        """Return a lower bound of the price of every plan for a slot that shares `common` tokens."""
        lost = worth.lost(common, self.faded) * self.shared.later
        if self.saves:
            parked = worth.save + worth.restore * worth.chance * self.faded
            lost = min(lost, parked * self.price)
        computes = min(self.computes, max(1, self.shared.length - common) * self.token)
        bound = self.begins + computes + lost
        return bound - ROUNDING * (1 + abs(bound))

    @property
    def rest(self) -> float:
        """A lower bound of the prices in all slots that share too little with the prompt to be told apart."""
        return self.bound(self.overwrites.least, self.shared.near.others)

    @property
    def known(self) -> Sequence[SlotId]:
        """The slots that get a bound of their own at once."""
        states = self.table.states
        differ = SlotState.IDLE not in states or SlotState.MAINTENANCE in states
        if differ or not self.shared.chain.isdisjoint(self.overwrites.writers):
            return [SlotId(slot) for slot in range(len(states))]
        return [*self.common]

    def bound_of(self, slot: SlotId) -> float:
        """Return a lower bound of every plan for this slot."""
        common, worth = self.common.get(slot, self.shared.near.others), self.overwrites.worths[slot]
        contents = self.overwrites.slots[slot]
        if contents and not self.shared.chain.isdisjoint(_telling(contents.hash_chain)):
            worth = NOTHING  # it may be the next turn of what the slot holds, or an edit of its last one
        if self.table.states[slot] is SlotState.MAINTENANCE:
            becomes = self.table.maintenance[slot].becomes
            common = max(common, becomes.same_ids(self.shared.want.prompt) if becomes else 0)
        return self.bound(worth, common)


REST: Final = SlotId(-1)  # in place of a slot: all slots of an engine that have no bound of their own yet


class PriceBounds:
    """Lower bounds of the prices on the engines of the last decision."""

    def __init__(self) -> None:
        self._states = LiveStates()
        self._of: dict[EngineId, Overwrites] = {}
        self._kinds: dict[Hashable, int] = {}
        self._kinds_seen = 0
        self._catalog: Catalog | None = None

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"<PriceBounds {len(self._of)} engines {len(self)} states>"

    def ranked(
        self, options: Sequence[Options], compared: Comparison | None
    ) -> Iterator[tuple[float, int, SlotId]]:
        """Yield a lower bound, the place in `options` and the slot, for each slot; the lowest bounds first.

        Bounds are in seconds, or in tokens of prefill if there is nothing to compare.
        """
        want = options[0].want
        self._update(options, want)
        near = self._states.near(want.prompt)
        later = 1 / compared.fastest if compared else 1.0
        shared = SharedTerms(want, len(want.prompt), frozenset(want.hash_chain), near, compared, later)
        engines = [self._engine(at, shared) for at in options]
        heap: list[tuple[float, int, SlotId]] = []
        for number, engine in enumerate(engines):
            known = engine.known
            heap += ((engine.bound_of(slot), number, slot) for slot in known)
            if len(known) < len(engine.table.states):
                heap.append((engine.rest, number, REST))
        heapify(heap)
        while heap:
            bound, number, slot = heappop(heap)
            if slot != REST:
                yield bound, number, slot
                continue
            engine = engines[number]
            for other in range(len(engine.table.states)):
                if (slot := SlotId(other)) not in engine.common:
                    heappush(heap, (engine.bound_of(slot), number, slot))

    def _update(self, options: Sequence[Options], want: Want) -> None:
        """Bring costs and states up to date with the engines."""
        if self._catalog is not want.catalog:
            self._of.clear()
            self._states, self._catalog = LiveStates(), want.catalog
        for at in options:
            table, before = at.table, self._of.get(at.table.engine)
            if before is None or not before.hold(table):
                kind = self._kind(table.traits, table.file_terms)
                now = Overwrites.of(table, want.catalog, want.now, kind, before)
                self._of[table.engine] = now
                self._moved(table.engine, before, now)
        if len(self._of) > len(options):
            for engine in self._of.keys() - {at.table.engine for at in options}:
                self._moved(engine, self._of.pop(engine), None)

    def _moved(self, engine: EngineId, before: Overwrites | None, now: Overwrites | None) -> None:
        """Replace the states that one engine no longer holds by those that it holds now."""
        old, new = before.slots if before else [], now.slots if now else []
        for slot, (gone, come) in enumerate(zip_longest(old, new)):
            if gone is not come:
                self._states.replace(Held(engine, SlotId(slot)), gone, come)
        old_ram, new_ram = before.ram if before else [], now.ram if now else []
        for gone in _less(old_ram, new_ram):
            self._states.replace(Held(engine, None), gone, None)
        for come in _less(new_ram, old_ram):
            self._states.replace(Held(engine, None), None, come)

    def _kind(self, traits: EngineTraits, terms: tuple[float, ...]) -> int:
        """Return a number that only engines with equal traits and equal prices of files share."""
        if len(self._kinds) > 2 * len(self._of) + 1:
            self._kinds.clear()
        if (key := (traits, terms)) not in self._kinds:
            self._kinds_seen += 1
            self._kinds[key] = self._kinds_seen
        return self._kinds[key]

    def _engine(self, at: Options, shared: SharedTerms) -> Engine:
        table, want = at.table, at.want
        overwrites = self._of[table.engine]
        begins, beside, price = _terms(at, shared.compared)
        token = price * (1 + beside)
        common, source = shared.near.slots.get(table.engine, {}), shared.near.in_ram(table.engine)
        if common and table.traits.ram_cache:  # a touch may copy any slot there
            source = max(source, *common.values())
        computes = max(1, shared.length - source) * token
        if overwrites.kind not in shared.files:
            found = want.catalog.best(want.prompt, table.traits, partial(restore_price, table))
            shared.files[overwrites.kind] = found
        best = shared.files[overwrites.kind]
        at.file = best[0] if best else None
        if best:
            restored = (shared.length - best[1]) * token + restore_price(table, best[0]) * price
            computes = min(computes, restored)
        faded = 2.0 ** (-max(0.0, want.now - overwrites.at) / HALF_LIFE)
        saves = table.may_save(want.now)
        return Engine(shared, table, overwrites, begins, computes, token, price, faded, saves, common)


def _telling(hash_chain: Sequence[bytes]) -> Sequence[bytes]:
    """Return the messages of which a request has one if it continues or replaces (`replaces`) this one."""
    return hash_chain[-2:] if len(hash_chain) > 2 else hash_chain[-1:]


def _less(some: Sequence[SlotContents], others: Sequence[SlotContents]) -> Iterator[SlotContents]:
    """Yield those of some states that are not among the others, by identity."""
    left = Counter(map(id, others))
    for contents in some:
        left[id(contents)] -= 1
        if left[id(contents)] < 0:
            yield contents


def _terms(at: Options, compared: Comparison | None) -> tuple[float, int, float]:
    """Return when the engine can begin, with its answer; the requests beside; the price of a token.

    A slot in which a request runs is free later, and has one request less beside it.
    """
    table, now = at.table, at.want.now
    if compared is None:
        return table.stalled(now) * table.rates.marginal_prefill, 0, 1.0
    held_up, beside = max(table.work.ahead(now), table.stalled(now)), len(table.work.served)
    if (until := over_in(at)) is not None:
        held_up, beside = held_up if DRAINS & set(table.states) else max(held_up, until), max(0, beside - 1)
    answer = compared.reply / compared.decode[table.engine]
    return held_up + answer, beside, 1 / compared.prefill[table.engine]


# -- choose the cheapest place ---------------------------------------------------------------------------

BEATEN: Final = 5  # plans kept besides the best one, for `why`
TURN: Final = 2  # messages: a reply, and the client's next message
ALL_PRICED_SLOTS: Final = 8  # with more, it is faster to find out first which cannot be cheap

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
    if bounds is not None and sum(len(at.slots) for at in options) > ALL_PRICED_SLOTS:
        best = _cheapest_by_bounds(options, bounds.ranked(options, compared), order, pinnable=pinnable)
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


def _cheapest_by_bounds(
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
