"""Steps between the choice of a slot and the request going there: add plants, keep namespaces apart.

`planting` decides what to plant; this module makes it part of a plan.

Namespaces keep a client from seeing in its answers what another has computed. Tokens and hash chains contain
the namespace, so no state, file, branch or message of one namespace is found for another. But the engine
itself reuses whatever it has when a task begins: in the slot, or in its RAM cache, which it searches by
similarity (engine.md 4).

* A pinned request goes to a slot of its own namespace, or to one that is erased first. The engine loads
  nothing from its RAM cache into an empty slot (T6), nor if it keeps half of the slot.
* On a route without id_slot the engine searches its free slots (T5). So we put the prompt into one of them
  first, and erase, or wait for, any other slot that looks as good to the engine.
* A request for which neither is possible is sent uncached: see `Forward.apart`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from slotkeeper.scheduler import planting
from slotkeeper.scheduler.adapters import set_of
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
from slotkeeper.scheduler.tokens import UNKNOWN, Boundary, Tokens, in_replies
from slotkeeper.scheduler.types import ModelName, Reason, SlotId

if TYPE_CHECKING:
    from collections.abc import Sequence


def without_loads_of_others(tables: Collection[EngineTable], space: str) -> list[EngineTable]:
    """Return the engines whose RAM cache can give a request of this space no state of another space."""
    return [table for table in tables if not (table.shadow.apart(space) and table.shadow.may_load)]


def structured(state: State, prompt: Tokens, boundaries: tuple[Boundary, ...], model: ModelName) -> Structure:
    """Return where other prompts may diverge from this one.

    Branch points within a reply do not count: they come from a reply that returned changed, and no other
    prompt will diverge there.
    """
    markers = next((table.traits.markers for table in state.up_for(model)), UNKNOWN)
    tree = state.tree(model)
    branches = tree.branches(prompt)
    inside = in_replies((branch.at for branch in branches), prompt, boundaries, markers) if branches else ()
    outside = tuple(branch for branch in branches if branch.at not in inside)
    return Structure(
        boundaries=boundaries,
        branches=outside,
        known=tree.longest(prompt),
        known_at=tree.passed_at(prompt),
        known_apart=tree.longest_apart(prompt),
    )


def behind(state: State, pending: Pending, plan: Plan | None) -> Plan | None:
    """Return the plan; it waits if the request begins with tokens that are just being saved to a file."""
    prompt, reuse_plan = pending.prompt, plan.reuse_plan if plan else None
    if plan is None or prompt is None or reuse_plan is None or pending.plain:
        return plan
    for shared, least in _coming(state, pending, plan.table.rates):
        common = prompt.lcp(shared)
        if common >= len(shared) - TAIL and common - reuse_plan.reuse > least:
            return replace(plan, wait=True)
    return plan


def _coming(state: State, but: Pending, rates: Rates) -> Iterator[tuple[Tokens, float]]:
    """Yield tokens that a file will soon hold, and the tokens of reuse that justify waiting for it.

    A file that is written needs only its check, which takes about as long as a restore.
    """
    for contents in state.coming.values():
        yield contents.tokens, 2 * rates.restore_price(rates.size_of(contents.total))
    for other in state.requests.values():
        if other.stage is Stage.PREPARING and other.plan and other is not but:
            shared = planting.kept(other.plan.steps, other.steps_left)
            if shared:
                yield shared, WORTH_A_FILE


def planted(state: State, pending: Pending, plan: Plan, now: float) -> Plan:
    """Return the plan with the plants that are worth it."""
    prompt, reuse_plan = pending.prompt, plan.reuse_plan
    if prompt is None or reuse_plan is None or pending.plain:
        return plan
    table = plan.table
    if table.shadow.apart(prompt.space) and plan.pinned and not plan.apart:
        return plan  # it is sent uncached: a plant would be lost
    plants = planting.steps(
        prompt,
        pending.structure,
        reuse_plan=reuse_plan,
        table=table,
        catalog=state.catalog,
        writes=state.writes,
        user_starts=user_starts(prompt, table.traits),
        now=now,
    )
    return _with_plants(plan, plants, prompt, pinnable=pending.arrived.pinnable) if plants else plan


def _with_plants(plan: Plan, plants: tuple[Step, ...], prompt: Tokens, *, pinnable: bool) -> Plan:
    """Return the plan with these steps, pinned or steered so that the request reuses what they compute."""
    if plan.pinned:
        return replace(plan, steps=(*plan.steps, *plants))
    if plan.steps and plan.reason is Reason.STEERED:
        return replace(plan, steps=(*plan.steps[:-1], *plants, plan.steps[-1]))
    reuse_plan = plan.reuse_plan
    if reuse_plan is None or reuse_plan.source is Source.RAM:
        return plan
    if pinnable:
        reason = Reason.PREFIX if reuse_plan.reuse else Reason.COLD
        return replace(plan, pinned=True, reason=reason, steps=plants)
    if len(prompt) > STEER_TAIL:
        return replace(plan, reason=Reason.STEERED, steps=(*plants, steer(prompt)))
    return plan


# -- namespaces ------------------------------------------------------------------------------------------


def confined(event: Arrived) -> Arrived:
    """Return the request as its space allows: salted digests, in a namespace no chosen slot, no bypass."""
    salted = None if event.rewritten is None else _salted(event.rewritten, event.space)
    event = replace(event, hash_chain=_salted(event.hash_chain, event.space), rewritten=salted)
    if not event.namespace:
        return event
    return replace(
        event,
        id_slot=event.id_slot if event.action else None,
        bypass=False,
        uncached=event.uncached or (event.copies > 1 and event.generates),
    )


def _salted(hash_chain: tuple[bytes, ...], space: str, before: str = "") -> tuple[bytes, ...]:
    """Return the digests of a space, in place of those of the one `before`."""
    if space == before:
        return hash_chain
    salt, unsalted = space.encode(), len(before.encode())
    return tuple(salt + digest[unsalted:] for digest in hash_chain)


def moved_to(state: State, pending: Pending, adapters: str) -> None:
    """Put a request that waits into the space of these adapters: what they are depends on its engine."""
    request, before = pending.arrived, pending.arrived.space
    if request.adapters == adapters:
        return
    request = replace(request, adapters=adapters)
    space = request.space
    pending.arrived = replace(request, hash_chain=_salted(request.hash_chain, space, before))
    if other := pending.other:
        chain, prompt = _salted(other.hash_chain, space, before), other.prompt
        pending.other = replace(other, hash_chain=chain, prompt=prompt and prompt.within(space))
    if pending.prompt is not None:
        pending.prompt = pending.prompt.within(space)
        boundaries = pending.structure.boundaries
        pending.structure = structured(state, pending.prompt, boundaries, request.model)


def outdated(table: EngineTable, pending: Pending) -> bool:
    """Whether the engine's adapters have changed since the request was given its place there."""
    return set_of(table.traits.adapters, pending.arrived.lora) != pending.arrived.adapters


def rendered_within(event: Rendered, space: str) -> Rendered:
    """Return the rendered prompts, put into the namespace of their request."""
    if not space:
        return event
    own, other = (prompt and prompt.within(space) for prompt in (event.prompt, event.rewritten))
    return replace(event, prompt=own, rewritten=other)


def emptied(plan: Plan, pending: Pending, now: float) -> Plan | None:
    """Return the plan of a slot that the client chose; what others have left there is erased first.

    None: its tokens must be known to see whether that is so.
    """
    table, slot, request, prompt = plan.table, plan.slot, pending.arrived, pending.prompt
    if slot is None or request.action or not table.shadow.apart(request.space):
        return plan
    if not pending.rendered:
        return None
    shadow = table.shadow
    found = shadow.plan_reuse(slot, prompt) if prompt else shadow.plan_reuse_apart(slot, request.space)
    steps = (Wipe(),) if found.foreign and table.may_wipe(now) else ()
    return replace(plan, reuse_plan=found, steps=steps)


def steered(state: State, pending: Pending, now: float) -> Plan | None:
    """Return the plan for a request whose slot the engine itself chooses; None: the request waits."""
    if not pending.rendered:
        return None
    there = state.fitting(pending.arrived)
    able = [table for table in there if _can_be_cleared(table, pending, now)]
    if not able:  # the request is refused later, when it would be sent
        return _unpinned(state, there, now)
    free, clear = _free_of_rivals(state, pending, able, now)
    if not free:
        return clear
    prompt, chain = pending.prompt, pending.arrived.hash_chain
    if prompt is None or not all(_known(table, pending) for table in free):
        plan = _unpinned(state, free, now)
    else:
        own = pending.arrived.lora is not None
        plan = cheapest(
            free, prompt, hash_chain=chain, pinnable=False, now=now, catalog=state.catalog, own_scales=own
        )
        plan = behind(state, pending, plan)
    return replace(plan, cleared=True) if plan else None


def _unpinned(state: State, tables: Sequence[EngineTable], now: float) -> Plan | None:
    """Return a plan in which the engine chooses the slot and we prepare nothing."""
    plan = blind(tables, pinnable=False, now=now, catalog=state.catalog)
    return replace(plan, reason=Reason.UNPINNABLE) if plan else None


def _can_be_cleared(table: EngineTable, pending: Pending, now: float) -> bool:
    """Whether erasing slots keeps other namespaces' states from the request; a RAM cache is not erased."""
    return table.may_wipe(now) and (_known(table, pending) or not table.shadow.may_load)


def _free_of_rivals(
    state: State, pending: Pending, able: Sequence[EngineTable], now: float
) -> tuple[list[EngineTable], Plan | None]:
    """Return the engines that could choose no other namespace's slot, and a plan that erases one slot."""
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
    """Yield requests that are being steered, and their engines.

    A slot whose task begins meanwhile may have to be erased or waited for.
    """
    for owner in (owner for table in state.up for owner in table.owners if owner):
        pending = state.requests.get(owner)
        if pending and pending.stage is Stage.PREPARING and pending.plan and pending.plan.clearing:
            yield pending, pending.plan.table


def rivals(state: State, table: EngineTable, pending: Pending) -> tuple[Sequence[SlotId], Sequence[SlotId]]:
    """Return the slots of other namespaces that the engine might choose: idle ones, and busy ones."""
    if not table.shadow.apart(pending.arrived.space):
        return (), ()
    idle, busy = list[SlotId](), list[SlotId]()
    for slot, slot_state in enumerate(table.states):
        if _is_rival(state, table, SlotId(slot), pending):
            (idle if slot_state is SlotState.IDLE else busy).append(SlotId(slot))
    return idle, busy


def _is_rival(state: State, table: EngineTable, slot: SlotId, pending: Pending) -> bool:
    """Whether the slot may hold another namespace's state that looks as good to the engine."""
    owner, contents = table.owners[slot], table.shadow.slots[slot]
    other = state.requests.get(owner) if owner else None
    if other is pending:
        return False
    space, prompt = pending.arrived.space, pending.prompt if _known(table, pending) else None
    if other is not None:
        return other.arrived.space != space and _alike(other.prompt, 1, prompt)
    if contents is None:
        return table.states[slot] is not SlotState.IDLE  # an unknown task runs there
    return contents.tokens.space != space and _alike(contents.tokens, contents.opaque, prompt)


def _alike(tokens: Tokens | None, opaque: int, prompt: Tokens | None) -> bool:
    """Whether these tokens and the `opaque` unknown ones after them may match the prompt as a steer does."""
    if prompt is None or tokens is None:
        return True
    common = tokens.within(prompt.space).lcp(prompt)
    return common >= len(prompt) - STEER_TAIL or (common == len(tokens) and opaque > 0)


def _known(table: EngineTable, pending: Pending) -> bool:
    """Whether a steer of the prompt would make the engine choose that slot."""
    length = len(pending.prompt) if pending.prompt is not None and not pending.plain else 0
    return length > STEER_TAIL and (length - STEER_TAIL) / length > table.traits.similarity > 0
