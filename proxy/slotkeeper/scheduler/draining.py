"""Engines that are taken out of use while others go on: drained by their user, or named no more.

A drained engine is left as a model is that a router is about to unload: nothing begins there, running answers
end, and what its slots hold is saved at once. So its conversations go on elsewhere, from files.
"""

from __future__ import annotations

from collections.abc import Iterator

from slotkeeper.scheduler import chores
from slotkeeper.scheduler.effects import Drained, Effect
from slotkeeper.scheduler.events import DrainAsked, EnginesNamed
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import EngineId


def drain_asked(state: State, event: DrainAsked) -> None:
    if event.drain:
        state.drained[event.engine] = False  # asked for once more, it is said once more
    else:
        state.drained.pop(event.engine, None)
    state.mark_leaving()


def engines_named(state: State, event: EnginesNamed) -> None:
    gone = set(state.engines) - set(event.engines)
    state.engines = event.engines
    for engine in gone:
        router = state.routers.pop(engine, None)
        for one in (engine, *(router.models if router else ())):
            state.tables.pop(one, None)
            state.drained.pop(one, None)
    state.mark_leaving()


def settle(state: State, now: float) -> Iterator[Effect]:
    """Say once of each that it is at rest."""
    for engine, told in state.drained.items():
        if not told and _at_rest(state, engine, now):
            state.drained[engine] = True
            yield Drained(engine=engine)


def _at_rest(state: State, engine: EngineId, now: float) -> bool:
    """Whether nothing runs there, and all is saved that is worth it: in a router, of all its models."""
    router = state.routers.get(engine)
    found = (state.tables.get(one) for one in (engine, *(router.models if router else ())))
    tables = [table for table in found if table is not None and table.up]
    return all(
        table.at_rest and not state.open_accounts(table) and not chores.left_at(state, table, now)
        for table in tables
    )
