"""Namespaces: what keeps one from seeing in its answers what another has computed.

States, files and branches are told apart by their tokens, and messages by their hash chains, so that nothing
of one namespace is ever found for another. What is left is the engine, which reuses whatever lies where a
task begins: in its slot, or in its RAM cache, which it searches by likeness (engine.md 4).

* A pinned request goes to a slot of its own namespace, or to one that is erased before. Into an empty slot
  the engine loads nothing from its RAM cache (T6); nor does it where half of the slot is kept.
* On a route without id_slot the engine looks through its free slots (T5). So the prompt is put into one of
  them first, and whatever else looks as good is erased before, or waited for.
* What cannot be done so is sent uncached: see `Forward.apart`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from slotkeeper.scheduler import en_route
from slotkeeper.scheduler.choice import STEER_TAIL, Plan, blind, cheapest
from slotkeeper.scheduler.events import Arrived, Rendered
from slotkeeper.scheduler.pending import Pending, Stage
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.steps import Wipe
from slotkeeper.scheduler.table import EngineTable, SlotState
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import Reason, SlotId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def confined(event: Arrived) -> Arrived:
    """In a namespace no client chooses a slot or bypasses us, and message digests are salted."""
    if not event.namespace:
        return event
    salt = event.namespace.encode()
    salted = None if event.rewritten is None else tuple(salt + digest for digest in event.rewritten)
    return replace(
        event,
        hash_chain=tuple(salt + digest for digest in event.hash_chain),
        rewritten=salted,
        id_slot=event.id_slot if event.action else None,
        bypass=False,
        uncached=event.uncached or (event.copies > 1 and event.generates),
    )


def rendered_within(event: Rendered, space: str) -> Rendered:
    """The prompts in the namespace of their request."""
    if not space:
        return event
    own, other = (prompt and prompt.within(space) for prompt in (event.prompt, event.rewritten))
    return replace(event, prompt=own, rewritten=other)


def steered(state: State, pending: Pending, now: float) -> Plan | None:
    """Where a request goes whose slot the engine chooses itself. None: it waits."""
    if not pending.rendered:
        return None
    request, free = pending.arrived, []
    able = [table for table in state.up if table.may_wipe(now) and (_known(table, pending) or _bare(table))]
    if not able:  # it is refused where it would go out
        plan = blind(state.up, pinnable=False, now=now, catalog=state.catalog)
        return replace(plan, reason=Reason.UNPINNABLE) if plan else None
    clear: Plan | None = None
    for table in sorted(able, key=lambda table: table.load):
        idle, busy = rivals(state, table, pending)
        if idle and table.open_for_pins(now):
            clear = clear or Plan(
                table=table, slot=idle[0], reason=Reason.STEERED, steps=(Wipe(),), clears=True
            )
        if not idle and not busy and table.open_for_unpinned(now):
            free.append(table)
    if not free:
        return clear
    if pending.prompt is None or not all(_known(table, pending) for table in free):
        plan = blind(free, pinnable=False, now=now, catalog=state.catalog)
        return replace(plan, reason=Reason.UNPINNABLE, cleared=True) if plan else None
    plan = cheapest(
        free, pending.prompt, hash_chain=request.hash_chain, pinnable=False, now=now, catalog=state.catalog
    )
    plan = en_route.behind(state, pending, plan)
    return replace(plan, cleared=True) if plan else None


def clearing(state: State) -> Iterator[Pending]:
    """Requests that are being steered: whatever begins meanwhile may have to be erased, or waited for."""
    for owner in (owner for table in state.up for owner in table.owners if owner):
        pending = state.requests.get(owner)
        if pending and pending.stage is Stage.PREPARING and pending.plan and pending.plan.clearing:
            yield pending


def rivals(state: State, table: EngineTable, pending: Pending) -> tuple[Sequence[SlotId], Sequence[SlotId]]:
    """Slots of other namespaces that the engine might choose for it: free ones, and those still at work."""
    space = pending.arrived.namespace
    if not space:
        return (), ()
    prompt = pending.prompt if _known(table, pending) else None
    idle, busy = list[SlotId](), list[SlotId]()
    for slot, what in enumerate(table.states):
        owner, contents = table.owners[slot], table.shadow.slots[slot]
        other = state.requests.get(owner) if owner else None
        if other is pending:
            continue
        if other is not None:
            if other.arrived.namespace != space and _alike(other.prompt, 1, prompt):
                busy.append(SlotId(slot))
        elif contents is None:
            if what is not SlotState.IDLE:  # unknown what runs there
                busy.append(SlotId(slot))
        elif contents.tokens.space != space and _alike(contents.tokens, contents.opaque, prompt):
            (idle if what is SlotState.IDLE else busy).append(SlotId(slot))
    return idle, busy


def _alike(tokens: Tokens | None, opaque: int, prompt: Tokens | None) -> bool:
    """Whether these tokens, and `opaque` unknown ones behind them, may have as much of it as a steer."""
    if prompt is None or tokens is None:
        return True
    common = tokens.within(prompt.space).lcp(prompt)
    return common >= len(prompt) - STEER_TAIL or (common == len(tokens) and opaque > 0)


def _known(table: EngineTable, pending: Pending) -> bool:
    """Whether its prompt can be put where the engine will find it."""
    length = len(pending.prompt) if pending.prompt is not None and not pending.plain else 0
    return length > STEER_TAIL and (length - STEER_TAIL) / length > table.traits.similarity > 0


def _bare(table: EngineTable) -> bool:
    """Whether an engine whose slots are empty has nothing left: no RAM cache."""
    return not table.shadow.may_load
