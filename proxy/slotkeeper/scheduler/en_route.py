"""Between the choice of a place and the request going there: plants are added, namespaces kept apart.

What to plant is decided in `planting`; here that is made part of a plan.

Namespaces keep a client from seeing in its answers what another has computed. States, files and branches are
told apart by their tokens, and messages by their hash chains, so that nothing of one namespace is ever found
for another. What is left is the engine, which reuses whatever lies where a
task begins: in its slot, or in its RAM cache, which it searches by likeness (engine.md 4).

* A pinned request goes to a slot of its own namespace, or to one that is erased before. Into an empty slot
  the engine loads nothing from its RAM cache (T6); nor does it where half of the slot is kept.
* On a route without id_slot the engine looks through its free slots (T5). So the prompt is put into one of
  them first, and whatever else looks as good is erased before, or waited for.
* What cannot be done so is sent uncached: see `Forward.apart`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from slotkeeper.scheduler import planting
from slotkeeper.scheduler.choice import STEER_TAIL, Plan, blind, cheapest, steer
from slotkeeper.scheduler.costs import WORTH_A_FILE, Rates
from slotkeeper.scheduler.effects import Step, Wipe
from slotkeeper.scheduler.engine_model import TAIL
from slotkeeper.scheduler.events import Arrived, Rendered
from slotkeeper.scheduler.pending import Pending, Stage
from slotkeeper.scheduler.planting import Structure
from slotkeeper.scheduler.shadow import Source
from slotkeeper.scheduler.state import State, user_starts
from slotkeeper.scheduler.table import EngineTable, SlotState
from slotkeeper.scheduler.types import UNKNOWN, Boundary, ModelName, Reason, SlotId, Tokens, in_replies

if TYPE_CHECKING:
    from collections.abc import Sequence


def structured(state: State, prompt: Tokens, boundaries: tuple[Boundary, ...], model: ModelName) -> Structure:
    """Where other prompts may part from this one.

    Not within a reply: where one comes back otherwise than it was sampled, no other prompt will part.
    """
    markers = next((table.traits.markers for table in state.up_for(model)), UNKNOWN)
    tree = state.tree(model)
    found = tree.branches(prompt)
    said = in_replies((branch.at for branch in found), prompt, boundaries, markers) if found else ()
    asked = tuple(branch for branch in found if branch.at not in said)
    return Structure(
        boundaries=boundaries,
        branches=asked,
        known=tree.longest(prompt),
        known_at=tree.passed_at(prompt),
    )


def behind(state: State, pending: Pending, plan: Plan | None) -> Plan | None:
    """The plan; but a request that begins with what is just being saved waits until it lies in a file."""
    prompt, reuse_plan = pending.prompt, plan.reuse_plan if plan else None
    if plan is None or prompt is None or reuse_plan is None or pending.plain:
        return plan
    for shared, least in _coming(state, pending, plan.table.rates):
        common = prompt.lcp(shared)
        if common >= len(shared) - TAIL and common - reuse_plan.reuse > least:
            return replace(plan, wait=True)
    return plan


def _coming(state: State, but: Pending, rates: Rates) -> Iterator[tuple[Tokens, float]]:
    """What will lie in a file in a moment, and how many tokens that must save to be waited for.

    What is written is only checked yet, which takes about as long as its restore will.
    """
    for contents in state.coming.values():
        yield contents.tokens, 2 * rates.restore_price(rates.size_of(contents.total))
    for other in state.requests.values():
        if other.stage is Stage.PREPARING and other.plan and other is not but:
            shared = planting.kept(other.plan.steps, other.steps_left)
            if shared:
                yield shared, WORTH_A_FILE


def planted(state: State, pending: Pending, plan: Plan, now: float) -> Plan:
    """The same plan, with what is planted on the way."""
    prompt, reuse_plan, request = pending.prompt, plan.reuse_plan, pending.arrived
    if prompt is None or reuse_plan is None or pending.plain or request.adapted:
        return plan
    if prompt.space and plan.pinned and not plan.apart:  # it goes uncached: what is planted would be lost
        return plan
    table = plan.table
    found = planting.steps(
        prompt,
        pending.structure,
        reuse_plan=reuse_plan,
        table=table,
        catalog=state.catalog,
        writes=state.writes,
        user_starts=user_starts(prompt, table.traits),
        now=now,
    )
    return _with_plants(plan, found, prompt, pinnable=request.pinnable) if found else plan


def _with_plants(plan: Plan, found: tuple[Step, ...], prompt: Tokens, *, pinnable: bool) -> Plan:
    """The plan with these steps, pinned or steered so that the request finds what they compute."""
    if plan.pinned:
        return replace(plan, steps=(*plan.steps, *found))
    if plan.steps and plan.reason is Reason.STEERED:
        return replace(plan, steps=(*plan.steps[:-1], *found, plan.steps[-1]))
    reuse_plan = plan.reuse_plan
    if reuse_plan is None or reuse_plan.source is Source.RAM:
        return plan
    if pinnable:
        reason = Reason.PREFIX if reuse_plan.reuse else Reason.COLD
        return replace(plan, pinned=True, reason=reason, steps=found)
    if len(prompt) > STEER_TAIL:
        return replace(plan, reason=Reason.STEERED, steps=(*found, steer(prompt)))
    return plan


# -- namespaces ------------------------------------------------------------------------------------------


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
    there = state.open_for(pending.arrived.model)
    able = [table for table in there if _can_be_cleared(table, pending, now)]
    if not able:  # it is refused where it would go out
        return _unpinned(state, there, now)
    free, clear = _free_of_rivals(state, pending, able, now)
    if not free:
        return clear
    prompt, chain = pending.prompt, pending.arrived.hash_chain
    if prompt is None or not all(_known(table, pending) for table in free):
        plan = _unpinned(state, free, now)
    else:
        plan = cheapest(free, prompt, hash_chain=chain, pinnable=False, now=now, catalog=state.catalog)
        plan = behind(state, pending, plan)
    return replace(plan, cleared=True) if plan else None


def _unpinned(state: State, tables: Sequence[EngineTable], now: float) -> Plan | None:
    """The engine chooses, and nothing is put in place before."""
    plan = blind(tables, pinnable=False, now=now, catalog=state.catalog)
    return replace(plan, reason=Reason.UNPINNABLE) if plan else None


def _can_be_cleared(table: EngineTable, pending: Pending, now: float) -> bool:
    """Whether erasing slots there can keep other namespaces' states from it: a RAM cache is not erased."""
    return table.may_wipe(now) and (_known(table, pending) or not table.shadow.may_load)


def _free_of_rivals(
    state: State, pending: Pending, able: Sequence[EngineTable], now: float
) -> tuple[list[EngineTable], Plan | None]:
    """Engines where no slot of another namespace could be chosen for it; else what to erase first."""
    free: list[EngineTable] = []
    clear: Plan | None = None
    for table in sorted(able, key=lambda table: table.load):
        idle, busy = rivals(state, table, pending)
        if idle and not clear and table.open_for_pins(now):
            clear = Plan(table=table, slot=idle[0], reason=Reason.STEERED, steps=(Wipe(),), clears=True)
        if not idle and not busy and table.open_for_unpinned(now):
            free.append(table)
    return free, clear


def clearing(state: State) -> Iterator[tuple[Pending, EngineTable]]:
    """What is being steered, and where: whatever begins meanwhile may have to be erased, or waited for."""
    for owner in (owner for table in state.up for owner in table.owners if owner):
        pending = state.requests.get(owner)
        if pending and pending.stage is Stage.PREPARING and pending.plan and pending.plan.clearing:
            yield pending, pending.plan.table


def rivals(state: State, table: EngineTable, pending: Pending) -> tuple[Sequence[SlotId], Sequence[SlotId]]:
    """Slots of other namespaces that the engine might choose for it: free ones, and those still at work."""
    if not pending.arrived.namespace:
        return (), ()
    idle, busy = list[SlotId](), list[SlotId]()
    for slot, what in enumerate(table.states):
        if _is_rival(state, table, SlotId(slot), pending):
            (idle if what is SlotState.IDLE else busy).append(SlotId(slot))
    return idle, busy


def _is_rival(state: State, table: EngineTable, slot: SlotId, pending: Pending) -> bool:
    """Whether what is there is another namespace's, or may be, and may look as good to the engine."""
    owner, contents = table.owners[slot], table.shadow.slots[slot]
    other = state.requests.get(owner) if owner else None
    if other is pending:
        return False
    space, prompt = pending.arrived.namespace, pending.prompt if _known(table, pending) else None
    if other is not None:
        return other.arrived.namespace != space and _alike(other.prompt, 1, prompt)
    if contents is None:
        return table.states[slot] is not SlotState.IDLE  # unknown what runs there
    return contents.tokens.space != space and _alike(contents.tokens, contents.opaque, prompt)


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
