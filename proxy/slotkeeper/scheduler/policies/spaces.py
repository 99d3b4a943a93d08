"""Spaces: a slot's state of one namespace or set of LoRA adapters is never reused for a request of another.

A space is one namespace with one set of adapters (`adapters.space_of`). Namespaces keep a client from seeing
in its answers what another has computed. Tokens and hash chains contain the space, so no state, file, branch
or message of one space is found for another. But the engine itself reuses whatever it has when a task begins:
in the slot, or in its RAM cache, which it searches by similarity (engine.md 4).

* A pinned request goes to a slot of its own space, or to one that is erased first. The engine loads nothing
  from its RAM cache into an empty slot (T6), nor if it keeps half of the slot.
* On a route without id_slot the engine searches its free slots (T5). So we put the prompt into one of them
  first, and erase, or wait for, any other slot that looks as good to the engine.
* A request for which neither is possible is sent uncached: see `Forward.isolated`.

The adapters of a running engine may change, by a client's `POST /lora-adapters` through us or directly. The
engine's scales apply to every request that names none. The engine keeps the contents of its slots and
continues from them (engine.md T12). These contents remain usable under the set that computed them. Requests
after the change belong to the new set, so that no state of the old set is found for them.

A change through us is exact: no task begins until it is complete. A direct change is only seen afterwards: it
happened at some time since the last look. Slots and files of tasks that began or ended since then are
discarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from slotkeeper.scheduler.candidates import STEER_TAIL, blind, cheapest
from slotkeeper.scheduler.effects import AskAdapters, Effect, Erase
from slotkeeper.scheduler.events import AdaptersChange, AdaptersSeen, Arrived
from slotkeeper.scheduler.policies.adapters import UNSURE, salted, set_in, set_of
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.pending import Pending, Plan
from slotkeeper.scheduler.slots.table import EngineTable, SlotState
from slotkeeper.scheduler.snapshots import retention
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import Reason, SlotId


def confined(event: Arrived) -> Arrived:
    """Return the request as its own space allows: salted digests, and in a namespace no chosen slot."""
    rewritten = None if event.rewritten is None else salted(event.rewritten, event.space)
    event = replace(event, hash_chain=salted(event.hash_chain, event.space), rewritten=rewritten)
    if not event.namespace:
        return event
    return replace(
        event,
        id_slot=event.id_slot if event.action else None,
        bypass=False,
        uncached=event.uncached or (event.copies > 1 and event.generates),
    )


def outdated(table: EngineTable, pending: Pending) -> bool:
    """Whether the engine's adapters have changed since the request was given its place there."""
    return set_of(table.traits.adapters, pending.arrived.lora) != pending.arrived.adapters


def emptied(plan: Plan, pending: Pending, now: float) -> Plan | None:
    """Return the plan of a slot that the client chose; contents of another space are erased first.

    None: the tokens of the request must be known first.
    """
    table, slot, request, prompt = plan.table, plan.slot, pending.arrived, pending.prompt
    if slot is None or request.action or not table.shadow.isolates(request.space):
        return plan
    if not pending.rendered:
        return None
    shadow = table.shadow
    found = shadow.plan_reuse(slot, prompt) if prompt else shadow.plan_reuse_in_space(slot, request.space)
    steps = (Erase(),) if found.foreign and table.may_wipe(now) else ()
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
    return replace(plan, cleared=True) if plan else None


def _unpinned(state: State, tables: Sequence[EngineTable], now: float) -> Plan | None:
    """Return a plan in which the engine chooses the slot and we prepare nothing."""
    plan = blind(tables, pinnable=False, now=now, catalog=state.catalog)
    return replace(plan, reason=Reason.UNPINNABLE) if plan else None


def _can_be_cleared(table: EngineTable, pending: Pending, now: float) -> bool:
    """Whether erasing slots keeps other spaces' states from the request; a RAM cache is not erased."""
    return table.may_wipe(now) and (_known(table, pending) or not table.shadow.may_load)


def _free_of_rivals(
    state: State, pending: Pending, able: Sequence[EngineTable], now: float
) -> tuple[list[EngineTable], Plan | None]:
    """Return the engines that could choose no other space's slot, and a plan that erases one slot."""
    free: list[EngineTable] = []
    clear: Plan | None = None
    for table in sorted(able, key=lambda table: table.load):
        idle, busy = rivals(state, table, pending)
        if idle and not clear and table.open_for_pins(now):
            clear = Plan(table=table, slot=idle[0], reason=Reason.STEERED, steps=(Erase(),), clears=True)
        if not idle and not busy and table.open_for_unpinned(now):
            free.append(table)
    return free, clear


def rivals(state: State, table: EngineTable, pending: Pending) -> tuple[Sequence[SlotId], Sequence[SlotId]]:
    """Return the slots of other spaces that the engine might choose: idle ones, and busy ones."""
    if not table.shadow.isolates(pending.arrived.space):
        return (), ()
    idle, busy = list[SlotId](), list[SlotId]()
    for slot, slot_state in enumerate(table.states):
        if _is_rival(state, table, SlotId(slot), pending):
            (idle if slot_state is SlotState.IDLE else busy).append(SlotId(slot))
    return idle, busy


def _is_rival(state: State, table: EngineTable, slot: SlotId, pending: Pending) -> bool:
    """Whether the slot may hold another space's state that looks as good to the engine."""
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


# -- the adapters of a running engine change -----------------------------------------------------------------


def ask_adapters(state: State, now: float) -> Iterator[Effect]:
    """Ask engines for their adapters if work waits for the answer, or a task ran since the last answer.

    At other times the question would keep an engine awake (`--sleep-idle-seconds`).
    """
    for table in state.up:
        if table.asking or table.changing or table.adapters_known(now):
            continue
        if state.waiting or table.adapters_wanted or max(table.changed) > table.adapters_at:
            table.asks_adapters()
            yield AskAdapters(engine=table.engine)


def adapters_changed(state: State, event: AdaptersChange | AdaptersSeen) -> Iterator[Effect]:
    """Handle the announcement of a change, or an engine's answer with its current adapters."""
    table = state.tables.get(event.engine)
    if table is None:
        return
    if isinstance(event, AdaptersChange):
        table.adapters_change()
        return
    before = table.traits.adapter_set
    if (since := table.adapters_seen(event)) is not None:
        yield from _doubt(state, table, before, since)


def _doubt(state: State, table: EngineTable, before: str, since: float) -> Iterator[Effect]:
    """Discard states made since `since`, and mark running work: each may be of the old or the new set."""
    saves = (*state.coming, *(chore.id for chore in state.chores.values() if chore.table is table))
    table.doubt(before, since, saves)
    for pending in state.requests.values():
        if pending.table is table and pending.arrived.lora is None:
            pending.moves_to(UNSURE, state.prompts(table.model))
    yield from _drop_newer(state, table, before, since)


def _drop_newer(state: State, table: EngineTable, before: str, since: float) -> Iterator[Effect]:
    """Drop the engine's files of the set `before` that were written since `since`."""
    for snapshot in [*state.catalog]:
        fresh = snapshot.created >= since and snapshot.fingerprint == table.traits.fingerprint
        if fresh and set_in(snapshot.tokens.space) == before:
            yield from retention.drop(state, snapshot)
