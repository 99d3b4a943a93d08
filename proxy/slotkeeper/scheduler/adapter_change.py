"""A change of a running engine's adapters, by a client's `POST /lora-adapters` through us or directly.

The engine's scales apply to every request that names none. The engine keeps the contents of its slots and
continues from them (engine.md T12). These contents remain usable under the set that computed them. Requests
after the change belong to the new set, so that no state of the old set is found for them.

A change through us is exact: no task begins until it is complete. A direct change is only seen afterwards: it
happened at some time since the last look. Slots and files of tasks that began or ended since then are
discarded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slotkeeper.scheduler import en_route, retention
from slotkeeper.scheduler.adapters import UNSURE, AdaptersChange, AdaptersSeen, set_in
from slotkeeper.scheduler.effects import AskAdapters, Effect
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.table import EngineTable, SlotState
from slotkeeper.scheduler.types import SlotId


def looks(state: State, now: float) -> Iterator[Effect]:
    """Ask engines for their adapters if work waits for the answer, or a task ran since the last answer.

    At other times the question would keep an engine awake (`--sleep-idle-seconds`).
    """
    for table in state.up:
        if table.asking or table.changing or table.adapters_known(now):
            continue
        if state.waiting or table.adapters_wanted or max(table.changed) > table.adapters_at:
            table.asking, table.adapters_wanted = True, False
            yield AskAdapters(engine=table.engine)


def heard(state: State, event: AdaptersChange | AdaptersSeen) -> Iterator[Effect]:
    """Handle the announcement of a change, or an engine's answer with its current adapters."""
    table = state.tables.get(event.engine)
    if table is None:
        return
    if isinstance(event, AdaptersChange):
        table.changing = True
    else:
        yield from _seen(state, table, event)


def _seen(state: State, table: EngineTable, event: AdaptersSeen) -> Iterator[Effect]:
    table.moves += 1
    if event.announced:
        table.changing = False
    else:
        table.asking = False
    if event.asked < max(table.reset_at, table.adapters_at) or table.changing:
        return
    if event.adapters is not None and event.adapters != table.traits.adapters:
        before, since = table.traits.adapter_set, table.adapters_at
        table.shadow.traits = replace(table.traits, adapters=event.adapters)
        table.shadow.mixed = True
        if not event.exact:
            yield from _doubt(state, table, before, since)
    table.adapters_at = event.asked


def _doubt(state: State, table: EngineTable, before: str, since: float) -> Iterator[Effect]:
    """Discard states made since `since`, and mark running work: each may be of the old or the new set."""
    for slot, contents in enumerate(table.shadow.slots):
        place = SlotId(slot)
        if table.states[place] is SlotState.MAINTENANCE:
            table.doubted.add(place)
        elif contents and table.changed[place] >= since and set_in(contents.tokens.space) == before:
            table.doubt(place)
    for pending in state.requests.values():
        if pending.plan and pending.plan.table is table and pending.arrived.lora is None:
            en_route.moved_to(state, pending, UNSURE)
    table.suspect = {*state.coming, *(chore.id for chore in state.chores.values() if chore.table is table)}
    yield from _drop_newer(state, table, before, since)


def _drop_newer(state: State, table: EngineTable, before: str, since: float) -> Iterator[Effect]:
    """Drop the engine's files of the set `before` that were written since `since`."""
    for snapshot in [*state.catalog]:
        fresh = snapshot.created >= since and snapshot.fingerprint == table.traits.fingerprint
        if fresh and set_in(snapshot.tokens.space) == before:
            yield from retention.drop(state, snapshot)
