"""Engines that come and go, and what that means for the requests that were sent to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf

from slotkeeper.scheduler.choice import Plan
from slotkeeper.scheduler.effects import Effect, Learned
from slotkeeper.scheduler.events import EngineLost, EngineUp, FilesFound
from slotkeeper.scheduler.outcomes import close_ended
from slotkeeper.scheduler.pending import Stage
from slotkeeper.scheduler.shadow import EngineShadow
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.table import SHARED_FOR, EngineTable
from slotkeeper.scheduler.traits import EngineTraits, Known
from slotkeeper.scheduler.types import EngineId, Reason


def engine_up(state: State, event: EngineUp) -> Iterator[Effect]:
    table = state.tables.get(event.engine)
    if table is None:
        table = state.tables[event.engine] = EngineTable(event.engine, EngineShadow(event.traits))
    table.up = True
    table.reset(event.traits, event.at)
    table.unseen = True
    _still_out(state, table, event.at)
    table.private, table.unknown = event.fresh, 0
    if not event.fresh:
        table.shared_until = event.at + SHARED_FOR
    yield from close_ended(state)


def _still_out(state: State, table: EngineTable, now: float) -> None:
    """What was sent before may have reached this very engine: no slot is sure until it ends or is seen."""
    for request, pending in state.requests.items():
        sent_open = pending.plan is None and table.engine == state.engines[0]
        if pending.stage is Stage.RUNNING and sent_open:
            reason = Reason.BYPASS if pending.arrived.bypass else Reason.FAIL_OPEN
            pending.plan = Plan(table=table, reason=reason, pinned=False)
        if pending.stage is Stage.RUNNING and pending.plan and pending.plan.table is table:
            pending.slot = None
            table.send(request, pending.arrived.copies, now)


def files_found(state: State, event: FilesFound) -> None:
    """What else was learned of the engine meanwhile stays."""
    if table := state.tables.get(event.engine):
        seen = event.traits
        table.shadow.traits = replace(
            table.traits,
            slot_files=seen.slot_files,
            state_version=seen.state_version,
            files_carry=seen.files_carry,
            fingerprint=seen.fingerprint,
        )


def learned(state: State, before: Mapping[EngineId, EngineTraits]) -> Iterator[Effect]:
    """What became known of engines' flags since; what was read from the command line is no news."""
    for engine, table in state.tables.items():
        now, known = table.traits, before.get(engine)
        if now is known:
            continue
        for name, how in now.knowledge.items():
            value = getattr(now, name)
            news = known is None or (known.known(name), getattr(known, name)) != (how, value)
            if news and how is not Known.FLAGS:
                yield Learned(engine=engine, name=name, value=value, how=how)


def engine_lost(state: State, event: EngineLost) -> Iterator[Effect]:
    if table := state.tables.get(event.engine):
        table.up = False
        table.back_by = event.at + state.limits.engine_wait if event.returns else -inf
        table.reset(table.traits, event.at)
    yield from close_ended(state)
