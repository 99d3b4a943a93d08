"""Placement: events in, effects out. All slot state changes go through here.

A request is served by the first of these that applies (`arrivals` carries the numbers):

0 `X-Slotkeeper-Bypass`: forward it unpinned, ahead of the queue.
1 It takes several slots (`n` > 1, or several prompts): forward it unpinned, once that many slots are free.
2 It carries `id_slot`: pin it to that slot, when the slot is free.
3 The messages of a free slot are the beginning of its messages: pin it there, without waiting for tokens.
4 It is a few words long: the free slot that loses least. Rendering it would cost more than it can save.
5 Its tokens are known: the cheapest place. Places are every free slot as it is, after a one-token touch (so
  that the engine loads from its RAM cache) or after a restore, and the engine's own choice. What is
  overwritten is saved first if that pays. See `candidates`.
  With several engines, prices are compared in seconds, and a slot in which a request runs is a place too: see
  `prices`. Then 3 does not apply, because it has no price.
6 Its tokens cannot be known: the free slot that loses least.
7 Otherwise it waits in our queue, never in the engine's. If only tasks on their way keep it from a free slot,
  no later request goes first.
8 If all slots share one KV buffer, the request takes the place from 1 to 6 only if its cells fit. Otherwise
  idle slots are emptied for it, or it waits as in 7. See `kv_pool`.
9 A long request of low priority waits while more urgent ones are at work on that engine. See `priority`.
10 A prompt that takes longer than a pass through the model waits until the engine has begun the one before,
  because it would compute both in one batch.

The order in which requests are considered: see `priority`.

A slot gets no other task until the engine has released it (engine.md T1): see `table`.
In idle time, slots whose conversations have paused are saved: see `idle_work`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Any, Final

from slotkeeper.scheduler import (
    arrivals,
    idle_work,
    kv_pool,
    launching,
    leaving,
    outcomes,
    priority,
    retention,
    spaces,
)
from slotkeeper.scheduler.adapters import set_of
from slotkeeper.scheduler.budgets import Budgets, FolderRoom, Limits
from slotkeeper.scheduler.catalog import Catalog
from slotkeeper.scheduler.effects import Effect, Learned, Render
from slotkeeper.scheduler.engine_model import EngineTraits, Known, cells_of, may_share
from slotkeeper.scheduler.events import (
    Acted,
    AdaptersChange,
    AdaptersSeen,
    Arrived,
    Closing,
    DrainAsked,
    EngineLost,
    EnginesNamed,
    EngineUp,
    Erased,
    Event,
    Exceeded,
    Filed,
    FilesFound,
    Finished,
    Gone,
    ModelsListed,
    NextKnown,
    Observed,
    ObserveFailed,
    Planted,
    Rendered,
    ReplyKnown,
    RequestFailed,
    Restored,
    RoomSeen,
    Saved,
    SnapshotsChanged,
    Started,
    SwapFailed,
    TimerFired,
)
from slotkeeper.scheduler.pending import Pending, Stage, Waiting
from slotkeeper.scheduler.prices import share_guesses
from slotkeeper.scheduler.prompt_tree import PromptTree
from slotkeeper.scheduler.retention import Wanted
from slotkeeper.scheduler.shadow import EngineShadow
from slotkeeper.scheduler.slot_contents import Tier
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import NO_ROUTER, ClientId, Crowded, EngineId, ModelName, RequestId


def engine_up(state: State, event: EngineUp) -> Iterator[Effect]:
    """Take in an engine that answers: no slot is given out before GET /slots has shown them."""
    table = state.tables.get(event.engine)
    if table is None:
        shadow = EngineShadow(event.traits)
        table = state.tables[event.engine] = EngineTable(event.engine, shadow, model=event.model)
    for router in state.routers.values():
        router.came_up(event.engine, event.at)
    table.came_up(event.traits, event.at, fresh=event.fresh, leaving=event.engine in state.drained)
    share_guesses(state.up_for(table.model))
    yield from _adopted(state, table, event.at)
    yield from outcomes.close_ended(state)
    state.budget_again()


def _adopted(state: State, table: EngineTable, now: float) -> Iterator[Effect]:
    """Take over the requests that were sent to this engine before it was known, and have them rendered."""
    adopted = [*_still_out(state, table, now), *_ended_early(state, table, now)]
    for pending in adopted:
        table.computed_for_others()
        if not pending.rendered:
            yield Render(request=pending.arrived.request)


def _still_out(state: State, table: EngineTable, now: float) -> Iterator[Pending]:
    """Count requests that were sent earlier as sent here: slots are uncertain until they end or are seen.

    Yields those that had no place before.
    """
    for pending in state.requests.values():
        sent_open = pending.plan is None and table.engine == state.fallback(pending.arrived.model)
        if pending.stage is Stage.RUNNING and (sent_open or pending.table is table):
            pending.runs_unseen(table, now)
            if sent_open:
                yield pending


def _ended_early(state: State, table: EngineTable, now: float) -> Iterator[Pending]:
    """Look for the slots of requests that have ended, the last one first: it has the newest task."""
    for pending in state.take_early(table.engine):
        request, done = pending.arrived, pending.finished
        if done is None or not _of_one_set(table, pending):
            continue
        pending.adopted(table)
        adapters = set_of(table.traits.adapters, request.lora)
        pending.moves_to(adapters, state.prompts(request.model))
        table.shadow.sends(pending.arrived.space)
        state.requests[request.request] = pending
        table.ended_early(request.request, request.copies, done.left, now)
        yield pending


def _of_one_set(table: EngineTable, pending: Pending) -> bool:
    """Whether all of the request's tokens were certainly computed with the adapters that it names.

    The engine's own scales, and those of a state that it continued from, may have changed since.
    """
    done = pending.finished
    return not table.traits.adapters or (
        pending.arrived.lora is not None and done is not None and done.cached == 0
    )


def files_found(state: State, event: FilesFound) -> None:
    """Take over the facts about slot files only: other facts may have been learned meanwhile."""
    if table := state.tables.get(event.engine):
        seen = event.traits
        table.learn(
            replace(
                table.traits,
                slot_files=seen.slot_files,
                state_version=seen.state_version,
                files_carry=seen.files_carry,
                fingerprint=seen.fingerprint,
                projector=seen.projector,
            )
        )
    state.budget_again()


def learned(state: State, before: Mapping[EngineId, EngineTraits]) -> Iterator[Effect]:
    """Report flags that were learned since. Flags read from the command line are not reported."""
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
        table.went_down(event.at, back_by=event.at + state.limits.engine_wait if event.returns else -inf)
    yield from outcomes.close_ended(state)


def rendered(state: State, event: Rendered) -> Iterator[Effect]:
    arrivals.rendered(state, event)
    yield from outcomes.rendered_late(state, event)


def snapshots_changed(state: State, event: SnapshotsChanged) -> Iterable[Effect]:
    """Take in files that were found, moved or lost. Slots whose files are gone are not saved again."""
    if event.gone:
        idle_work.not_saved_again(state)
    return retention.snapshots_changed(state, event)


def timer_fired(state: State, event: TimerFired) -> None:
    """Clear the pending timer. An earlier timer may fire too, so the time is checked."""
    if state.wakes_at is not None and event.at >= state.wakes_at - EARLY:
        state.wakes_at = None


def closing(state: State, _: Closing) -> None:
    """Take in that the sidecar is being stopped."""
    state.closing = True


# -- the public interface --------------------------------------------------------------------------------

EARLY: Final = 0.01  # seconds by which a timer may fire too early
# What takes in each event. It changes the state and returns or yields the effects, if there are any.
TAKE_IN: Final[Mapping[type[Event], Callable[[State, Any], Iterable[Effect] | None]]] = MappingProxyType(
    {
        # requests
        Arrived: arrivals.arrived,
        Rendered: rendered,
        Started: outcomes.started,
        Finished: outcomes.finished,
        Exceeded: kv_pool.exceeded,
        Acted: outcomes.acted,
        Gone: outcomes.gone,
        ReplyKnown: outcomes.reply_known,
        NextKnown: outcomes.next_known,
        # steps in slots, and files
        Planted: launching.ended,
        Saved: launching.ended,
        Restored: launching.ended,
        Erased: launching.ended,
        Filed: launching.filed,
        SnapshotsChanged: snapshots_changed,
        RoomSeen: retention.room_seen,
        # engines
        EngineUp: engine_up,
        FilesFound: files_found,
        EngineLost: engine_lost,
        Observed: outcomes.observed,
        ObserveFailed: outcomes.observe_failed,
        RequestFailed: outcomes.request_failed,
        AdaptersChange: spaces.adapters_changed,
        AdaptersSeen: spaces.adapters_changed,
        DrainAsked: leaving.drain_asked,
        EnginesNamed: leaving.engines_named,
        ModelsListed: leaving.models_listed,
        SwapFailed: leaving.swap_failed,
        # the sidecar
        TimerFired: timer_fired,
        Closing: closing,
    }
)


class Placement:
    """All decisions about the slots of all engines."""

    def __init__(self, *known: EngineId, limits: Limits | None = None) -> None:
        self._state = State(engines=known, limits=limits or Limits())

    def __repr__(self) -> str:
        state = self._state
        tables = " ".join(map(repr, state.tables.values()))
        return f"<Placement {len(state.requests)} requests, {len(state.queue)} queued | {tables}>"

    def on(self, event: Event) -> list[Effect]:
        """Take in one event, and return what must be done now."""
        self._state.at = event.at
        before = {engine: table.traits for engine, table in self._state.tables.items()}
        taken = TAKE_IN[type(event)](self._state, event) or ()
        effects = [*taken, *arrivals.settle(self._state, event.at)]
        news = (*learned(self._state, before), *retention.budgeted(self._state))
        return [*effects, *news, *self._state.released()]

    # -- for observers ---------------------------------------------------------------------------

    @property
    def tables(self) -> dict[EngineId, EngineTable]:
        return self._state.tables

    @property
    def queued(self) -> int:
        return len(self._state.queue)

    @property
    def line(self) -> Sequence[RequestId]:
        """The waiting requests, the next one first, as far as the order is known now."""
        return (*self._state.bypassing, *priority.in_turn(self._state, self._state.at))

    @property
    def divided(self) -> bool:
        """Whether a request is computed in pieces, or waits to be: what its slot holds must not be lost."""
        state = self._state
        return any(p.divisible for r in state.hinted if (p := state.requests.get(r)))

    def has_waiting(self) -> bool:
        """Whether any request is queued for a slot."""
        return len(self._state.queue) > 0

    def waiting_of(self, client: ClientId) -> int:
        """Return how many requests of this client are queued."""
        return self._state.queue.of(client)

    def no_room_for(self, client: ClientId) -> Crowded | None:
        """Return why another request of this client may not be queued; None if it may."""
        state, limits = self._state, self._state.limits
        if len(state.queue) + len(state.bypassing) >= limits.waiting:
            return Crowded.ALL
        return Crowded.CLIENT if state.queue.of(client) >= limits.waiting_of_one else None

    def wanted_elsewhere(self, request: RequestId, prompt: Tokens) -> Sequence[Wanted]:
        """Return the states of a newly rendered prompt that are worth looking for in the shared store."""
        return tuple(retention.wanted_elsewhere(self._state, request, prompt))

    @property
    def budgets(self) -> Budgets:
        """The budgets for snapshots that are in force."""
        return self._state.budgets

    @property
    def rooms(self) -> Mapping[Tier, FolderRoom]:
        """The file systems of the folders for snapshots, as last seen."""
        return self._state.rooms

    @property
    def catalog(self) -> Catalog:
        return self._state.catalog

    def tree(self, model: ModelName = NO_ROUTER) -> PromptTree:
        """Return all prompts that were sent to this model."""
        return self._state.tree(model)

    @property
    def busiest(self) -> ModelName:
        """The model that received the most tokens."""
        trees = self._state.trees
        return max(trees, key=lambda model: trees[model].tokens, default=NO_ROUTER)

    @property
    def serving(self) -> bool:
        """Whether any request runs or waits."""
        return self._state.waiting or any(table.serving for table in self._state.up)

    def holds(self, request: RequestId) -> bool:
        """Whether a slot still holds what this request left there."""
        tables = self._state.tables.values()
        return any(
            contents is not None and contents.request == request
            for t in tables
            for contents in t.shadow.slots
        )

    def works_for(self, request: RequestId) -> bool:
        """Whether an engine may still work for a request whose client left; `Released` follows then."""
        return any(table.works_for(request) for table in self._state.tables.values())

    def pool_of(self, table: EngineTable) -> dict[str, int] | None:
        """Return the cells of an engine's shared KV buffer, and those in use; None if none is shared."""
        cells = cells_of(table.traits)
        return {"cells": cells, "taken": kv_pool.in_use(self._state, table)} if cells else None

    def may_lack_cells(self, engine: EngineId) -> bool:
        """Whether a request may fail there because the KV buffer is full that slots share."""
        table = self.tables.get(engine)
        return table is not None and may_share(table.traits)

    def back_by(self, now: float, model: ModelName) -> float | None:
        """Return until when to wait for an engine of this model; None if one is up or none is expected."""
        return self._state.back_by(now, model)

    def drained(self, engine: EngineId) -> bool:
        """Whether the engine was drained and is at rest."""
        return self._state.drained.get(engine, False)

    def unsaved(self, now: float) -> bool:
        """Whether anything remains to be saved before the sidecar stops."""
        return idle_work.left(self._state, now)

    def waiting(self, request: RequestId) -> Waiting | None:
        """Return what a queued request waits for; None if it is not queued."""
        pending = self._state.requests.get(request)
        return arrivals.waiting(self._state, pending) if pending else None

    def pending(self, request: RequestId) -> Pending | None:
        """Return a request that has not ended."""
        return self._state.requests.get(request)
