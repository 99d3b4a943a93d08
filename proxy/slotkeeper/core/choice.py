"""Where a prompt goes: every possible place is looked at, priced in tokens, and the cheapest taken.

A price is what the engine must compute now, plus what overwriting a slot will probably cost later.
Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from slotkeeper.core.effects import Purpose
from slotkeeper.core.held import Held, continues, shared_messages, succeeds
from slotkeeper.core.shadow import Look, Source
from slotkeeper.core.table import EngineTable, SlotState
from slotkeeper.core.tokens import Tokens
from slotkeeper.core.types import Reason, SlotId

# Prices of a round trip, in tokens of prefill: small beside any real prompt, so that they only
# decide between places that are otherwise alike.
TOUCH_PRICE: Final = 16.0
STEER_PRICE: Final = 32.0
UNPINNED_PRICE: Final = 8.0  # nothing else starts on that engine until the slot is known
IN_RAM: Final = 0.1  # share of a loss that remains when the RAM cache keeps a copy: it may drop it
STEER_TAIL: Final = 4  # tokens of a steered prompt left for the request itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one request will be served."""

    table: EngineTable
    reason: Reason
    slot: SlotId | None = None  # expected; certain when pinned
    pinned: bool = True
    look: Look | None = None
    plants: tuple[tuple[Tokens, Purpose], ...] = ()
    price: float = 0.0
    wait: bool = False  # the best place will be free in a moment


def continuing(tables: Iterable[EngineTable], outline: Sequence[bytes], now: float) -> Plan | None:
    """A free slot whose messages are the beginning of these: no tokens needed to see it.

    None where another slot has more of these messages, if only behind other tools: then tokens decide.
    """
    best: Plan | None = None
    most = 0
    for table in tables:
        ready = table.open_for_pins(now)
        for slot, held in enumerate(table.shadow.slots):
            shared = shared_messages(outline, held)
            if shared > most:
                best, most = None, shared
                if ready and table.states[slot] is SlotState.IDLE and continues(outline, held):
                    best = Plan(table=table, slot=SlotId(slot), reason=Reason.CONTINUES)
    return best


def cheapest(
    tables: Collection[EngineTable],
    prompt: Tokens,
    *,
    outline: Sequence[bytes] = (),
    pinnable: bool,
    now: float,
    plants: bool = True,
) -> Plan | None:
    """The best place for an exact prompt; None when no slot can be had."""
    if not any(table.open_for_pins(now) if pinnable else table.open_for_unpinned(now) for table in tables):
        return None
    offers = _pinned if pinnable else _unpinnable
    want = _Want(prompt, outline, now)
    plans = (plan for table in tables for plan in offers(table, want) if plants or not plan.plants)
    return min(plans, key=lambda plan: (plan.price, plan.table.load, plan.slot), default=None)


def blind(tables: Iterable[EngineTable], *, pinnable: bool, now: float) -> Plan | None:
    """The slot that loses least, for a prompt whose tokens are unknown."""
    plans = []
    for table in tables:
        ready = table.open_for_pins(now) if pinnable else table.open_for_anything(now)
        for slot in table.idle if ready else ():
            held = table.shadow.slots[slot]
            price = held.total * held.chance(now) if held else 0.0
            plans.append(
                Plan(
                    table=table,
                    slot=slot if pinnable else None,
                    pinned=pinnable,
                    reason=Reason.UNRENDERED,
                    price=price,
                )
            )
    return min(plans, key=lambda plan: (plan.price, plan.table.load), default=None)


@dataclass(frozen=True, slots=True)
class _Want:
    """What is to be placed, and when."""

    prompt: Tokens
    outline: Sequence[bytes]
    now: float


def _pinned(table: EngineTable, want: _Want) -> Iterator[Plan]:
    shadow, idle, prompt, now = table.shadow, table.idle, want.prompt, want.now
    wait = not table.open_for_pins(now)  # for milliseconds: not worth being computed again elsewhere
    reachable = shadow.longest_common(prompt, idle) if shadow.traits.ram_cache else 0
    for slot in idle:
        look = shadow.look(slot, prompt)
        yield _plan(table, look, _price(table, look, want), wait=wait)
        if reachable - look.reuse > TOUCH_PRICE:
            touched = shadow.look_touched(slot, prompt, idle)
            if touched.source is Source.RAM:
                plants = ((_foreign_token(prompt), Purpose.TOUCH),)
                price = TOUCH_PRICE + _price(table, touched, want)
                yield _plan(table, touched, price, plants=plants, wait=wait)
    for slot in table.in_state(SlotState.DRAINING):
        look = shadow.look(slot, prompt)
        price = shadow.traits.n_ubatch + _price(table, look, want)
        yield _plan(table, look, price, wait=True)
    if table.open_for_unpinned(now) and (natural := shadow.engine_choice(prompt, idle)):
        price = UNPINNED_PRICE + _price(table, natural, want)
        yield _plan(table, natural, price, reason=Reason.ENGINE_CHOSE, pinned=False)


def _unpinnable(table: EngineTable, want: _Want) -> Iterator[Plan]:
    """A route without id_slot: leave it to the engine, or first put the prompt where we want it (T5)."""
    prompt, now = want.prompt, want.now
    wait = not table.open_for_unpinned(now)
    natural = table.shadow.engine_choice(prompt, table.idle)
    if natural:
        price = _price(table, natural, want)
        yield _plan(table, natural, price, reason=Reason.ENGINE_CHOSE, pinned=False, wait=wait)
    for plan in _pinned(table, want):
        if plan.wait:
            yield plan
        elif plan.pinned and plan.look and len(prompt) > STEER_TAIL:
            steer = (prompt.cut(0, len(prompt) - STEER_TAIL), Purpose.STEER)
            yield _plan(
                table,
                plan.look,
                STEER_PRICE + plan.price,
                reason=Reason.STEERED,
                pinned=False,
                plants=(*plan.plants, steer),
                wait=wait,
            )


def _plan(
    table: EngineTable,
    look: Look,
    price: float,
    *,
    reason: Reason | None = None,
    pinned: bool = True,
    plants: tuple[tuple[Tokens, Purpose], ...] = (),
    wait: bool = False,
) -> Plan:
    kind = {Source.SLOT: Reason.PREFIX, Source.RAM: Reason.RAM_CACHE, Source.NOTHING: Reason.COLD}
    return Plan(
        table=table,
        slot=look.slot,
        pinned=pinned,
        reason=reason or kind[look.source],
        look=look,
        plants=plants,
        price=price,
        wait=wait,
    )


def _price(table: EngineTable, look: Look, want: _Want) -> float:
    """Tokens to compute now, and the tokens that will be missed later."""
    lost = 0.0
    victim = table.shadow.slots[look.slot]
    if victim and not succeeds(want.outline, victim):
        copied = look.parked or table.shadow.elsewhere(victim, look.slot)
        lost += _missed(victim, want) * (IN_RAM if copied else 1.0)
    moved = look.base if look.source is Source.RAM else None
    if moved and not any(h and _same(h, moved) for h in table.shadow.slots):
        lost += _missed(moved, want)  # a loaded entry leaves the RAM cache
    return len(want.prompt) - look.reuse + lost


def _missed(held: Held, want: _Want) -> float:
    return (held.total - held.tokens.lcp(want.prompt)) * held.chance(want.now)


def _same(one: Held, other: Held) -> bool:
    return one.total == other.total and one.tokens == other.tokens


def _foreign_token(prompt: Tokens) -> Tokens:
    """One valid token that does not begin the prompt: the slot must look worthless to the engine."""
    first = prompt[0]
    return Tokens([next((token for token in prompt if token != first), first)])
