"""A change of an engine's adapters while it runs: by `POST /lora-adapters` of a client, ours or another.

The scales of adapters count for every request that names none. The engine keeps its slots as they are and
goes on from them (engine.md T12). What they hold stays of use under the set with which it was computed;
requests are of the new one from here on, so that nothing of the old one is found for them.

A change of which we are told is exact: nothing begins until it is over. One that is only seen has happened at
some time since we looked last. What began or ended since then is not used again: neither slots nor files.
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
    """Ask engines which adapters they use, where something waits for that, or ran since they said.

    Not at other times: the question would keep an engine awake (`--sleep-idle-seconds`).
    """
    for table in state.up:
        if table.asking or table.changing or table.adapters_known(now):
            continue
        if state.waiting or table.adapters_wanted or max(table.changed) > table.adapters_at:
            table.asking, table.adapters_wanted = True, False
            yield AskAdapters(engine=table.engine)


def heard(state: State, event: AdaptersChange | AdaptersSeen) -> Iterator[Effect]:
    """Take in that adapters are about to change, or which there are now."""
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
    """Discard states made since then, and mark running work: each may be of the old set or the new one."""
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
    """Drop the engine's files of the old set that were written since then."""
    for snapshot in [*state.catalog]:
        fresh = snapshot.created >= since and snapshot.fingerprint == table.traits.fingerprint
        if fresh and set_in(snapshot.tokens.space) == before:
            yield from retention.drop(state, snapshot)
