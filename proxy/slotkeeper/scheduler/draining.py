"""Drain engines while others continue: those that an operator drains, and those dropped from the list.

A drained engine is treated like a model that its router is about to unload. Nothing begins there, running
answers end, and what its slots hold is saved at once. So its conversations continue elsewhere, from files.
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
        state.drained[event.engine] = False  # a repeated request is answered again
    else:
        state.drained.pop(event.engine, None)
    state.mark_leaving()


def engines_named(state: State, event: EnginesNamed) -> None:
    gone = set(state.engines) - set(event.engines)
    state.engines = event.engines
    for engine in gone:
        router = state.routers.pop(engine, None)
        for name in (engine, *(router.models if router else ())):
            state.tables.pop(name, None)
            state.drained.pop(name, None)
    state.mark_leaving()


def settle(state: State, now: float) -> Iterator[Effect]:
    """Report each drained engine once, as soon as it is at rest."""
    for engine, reported in state.drained.items():
        if not reported and _at_rest(state, engine, now):
            state.drained[engine] = True
            yield Drained(engine=engine)


def _at_rest(state: State, engine: EngineId, now: float) -> bool:
    """Whether nothing runs there and all slots worth a file are saved; for a router, in all its models."""
    router = state.routers.get(engine)
    known = (state.tables.get(name) for name in (engine, *(router.models if router else ())))
    tables = [table for table in known if table is not None and table.up]
    return all(
        table.at_rest and not state.open_accounts(table) and not chores.left_at(state, table, now)
        for table in tables
    )
