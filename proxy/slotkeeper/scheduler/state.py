"""Everything the scheduler remembers, the queue among it. Changed only through `Placement.on`.

The engine's own deferred queue knows no fairness and leaves slots idle (engine.md 6), so nothing
waits there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from slotkeeper.scheduler.catalog import Catalog
from slotkeeper.scheduler.costs import HourlyBudget, Limits
from slotkeeper.scheduler.engine_model import EngineTraits, unmarked
from slotkeeper.scheduler.events import Arrived
from slotkeeper.scheduler.hints import Priority
from slotkeeper.scheduler.kv_pool import Outputs
from slotkeeper.scheduler.pending import Pending, Scene, Stage
from slotkeeper.scheduler.prompt_tree import PromptTree
from slotkeeper.scheduler.router import Router
from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.steps import Chore
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.types import ClientId, EngineId, ModelName, RequestId, SlotId, Tokens


class FairQueue:
    """Requests in the order in which they may be placed."""

    def __init__(self) -> None:
        # The clients' own order is the turn order: a served client goes to the end.
        self._lines: OrderedDict[ClientId, OrderedDict[RequestId, None]] = OrderedDict()
        self._client: dict[RequestId, ClientId] = {}

    def __len__(self) -> int:
        return len(self._client)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._client

    def __iter__(self) -> Iterator[RequestId]:
        """One request of each client in turn, then the second of each, and so on."""
        turns = [iter(line) for line in self._lines.values()]
        while len(turns) > 1:
            heads = [next(line, None) for line in turns]
            yield from filter(None, heads)
            if None in heads:
                turns = [line for line, head in zip(turns, heads, strict=True) if head is not None]
        yield from chain.from_iterable(turns)  # at once: thousands may wait

    def of(self, client: ClientId) -> int:
        """How many of its requests wait."""
        return len(self._lines.get(client, ()))

    def add(self, request: RequestId, client: ClientId) -> None:
        self._lines.setdefault(client, OrderedDict())[request] = None
        self._client[request] = client

    def put_back(self, request: RequestId, client: ClientId) -> None:
        """It lost its slot before the engine began, and is the next to be served."""
        self.add(request, client)
        self._lines[client].move_to_end(request, last=False)
        self._lines.move_to_end(client, last=False)

    def served(self, request: RequestId) -> None:
        """It leaves the queue, and its client goes to the end of the turn order."""
        client = self._client.get(request)
        self.discard(request)
        if client is not None and client in self._lines:
            self._lines.move_to_end(client)

    def discard(self, request: RequestId) -> None:
        """It leaves the queue without having been served."""
        client = self._client.pop(request, None)
        if client is None:
            return
        line = self._lines[client]
        del line[request]
        if not line:
            del self._lines[client]


# -- tokens that were computed in idle time --------------------------------------------------------------

MOST: Final = 1024  # states, the oldest are forgotten


@dataclass(slots=True)
class Ahead:
    """Which states end in tokens that were computed in idle time, and where these begin.

    A state is known by its tokens: a slot, a file and the engine's RAM cache may all hold it.
    """

    _begins: dict[int, int] = field(default_factory=dict)  # by the hash of the state's tokens

    def computed(self, tokens: Tokens, begin: int) -> None:
        """The state holds `tokens`; from `begin` on they were computed in idle time."""
        self._begins.pop(key := hash(tokens), None)
        self._begins[key] = begin
        if len(self._begins) > MOST:
            del self._begins[next(iter(self._begins))]

    def begins(self, tokens: Tokens) -> int | None:
        """From which token on; None where nothing of it was computed in idle time."""
        return self._begins.get(hash(unmarked(tokens)))


# -- all of it -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class State:
    """All that is remembered. Times are seconds of the events."""

    engines: tuple[EngineId, ...]  # in the order in which they were named
    trees: dict[ModelName, PromptTree] = field(default_factory=dict)
    catalog: Catalog = field(default_factory=Catalog)
    tables: dict[EngineId, EngineTable] = field(default_factory=dict)
    requests: dict[RequestId, Pending] = field(default_factory=dict)
    queue: FairQueue = field(default_factory=FairQueue)
    bypassing: list[RequestId] = field(default_factory=list)  # waiting for pinned tasks to have begun
    steered: list[RequestId] = field(default_factory=list)  # prompt in place, request not yet sent
    slotless: list[RequestId] = field(default_factory=list)  # waiting for their models to be loaded
    routers: dict[EngineId, Router] = field(default_factory=dict)
    drained: dict[EngineId, bool] = field(default_factory=dict)  # by their users; whether that was reported
    limits: Limits = field(default_factory=Limits)
    writes: HourlyBudget = field(init=False)  # bytes
    idle: HourlyBudget = field(init=False)  # tokens
    coming: dict[RequestId, SlotContents] = field(default_factory=dict)  # written, and not yet in the catalog
    ahead: Ahead = field(default_factory=Ahead)
    outputs: Outputs = field(default_factory=Outputs)
    chores: dict[RequestId, Chore] = field(default_factory=dict)
    chores_begun: int = 0
    begun: int = 0  # requests that were taken from the queue
    at: float = 0.0  # of the last event
    hinted: set[RequestId] = field(default_factory=set)  # with a priority or a deadline
    served_at: dict[Priority, float] = field(default_factory=dict)  # when one of it was served last
    wakes_at: float | None = None  # when a `SetTimer` that is out will be answered
    closing: bool = False

    def __post_init__(self) -> None:
        limits = self.limits
        self.writes = HourlyBudget(limits.hourly_bytes, left=limits.hourly_bytes, at=0.0)
        self.idle = HourlyBudget(limits.idle_tokens, left=limits.idle_tokens, at=0.0)

    @property
    def up(self) -> list[EngineTable]:
        return [table for table in self.tables.values() if table.up]

    def tree(self, model: ModelName) -> PromptTree:
        """All prompts that were sent to this model: those of two models have nothing in common."""
        return self.trees.setdefault(model, PromptTree())

    def up_for(self, model: ModelName) -> list[EngineTable]:
        """Engines that are up and serve this model."""
        return [table for table in self.up if table.model == model]

    def open_for(self, model: ModelName) -> list[EngineTable]:
        """Those of them on which something may begin; where requests fail, only if there is no other."""
        found = [table for table in self.up_for(model) if not table.leaving]
        return [table for table in found if not table.failing] or found

    def try_again(self, now: float) -> None:
        """Engines at which requests have failed, once they have rested for long enough."""
        for table in self.tables.values():
            if table.breaker.resting and now >= table.breaker.until:
                table.breaker.resting = False
                table.moves += 1

    def with_room(self, request: Arrived) -> list[EngineTable]:
        """Engines with as many idle slots as it takes, or with all of theirs."""
        tables = self.open_for(request.model)
        return [table for table in tables if len(table.idle) >= min(request.copies, len(table.states))]

    def back_by(self, now: float, model: ModelName) -> float | None:
        """Until when to wait for an engine of this model; None where one is there, or none is expected."""
        if self.up_for(model):
            return None
        for router in self.routers.values():
            if router.engine_of(model):
                return router.serves(now)
        until = max((t.back_by for t in self.tables.values() if t.model == model), default=now)
        return until if until > now else None

    def fallback(self, model: ModelName) -> EngineId:
        """Where a request for this model goes if no engine is up for it: that speaks for itself."""
        routers = (router.engine_of(model) for router in self.routers.values())
        known = (table.engine for table in self.tables.values() if model and table.model == model)
        named = sorted(self.engines, key=lambda engine: engine in self.drained)
        return next(filter(None, (*routers, *known)), named[0])

    def mark_leaving(self) -> None:
        """Nothing begins on engines that are drained, nor on models that are about to be unloaded."""
        leaving = {router.leaving for router in self.routers.values()} | self.drained.keys()
        for engine in self.drained.keys() & self.routers.keys():
            leaving |= self.routers[engine].models.keys()
        for table in self.tables.values():
            if table.leaving != (table.engine in leaving):
                table.leaving = not table.leaving
                table.moves += 1  # its queued requests can be decided

    @property
    def waiting(self) -> bool:
        return bool(len(self.queue) or self.bypassing or self.steered)

    def wanted(self, table: EngineTable) -> bool:
        """Whether a request waits that could have a slot there: where a model is leaving, none can."""
        return self.waiting and not table.leaving

    def ends(self, table: EngineTable) -> bool:
        """Whether its slots are about to be lost, and what is worth it is saved now."""
        return self.closing or table.leaving

    def open_accounts(self, table: EngineTable) -> bool:
        """Whether a request has ended there whose tokens are still being found: nor are its slot's known."""
        ended = (p.plan for p in self.requests.values() if p.stage is Stage.ENDED and p.plan)
        return any(plan.table is table for plan in ended)

    def waiting_requests(self) -> Iterator[RequestId]:
        """All that wait for an engine, in the order in which they are served."""
        return chain(self.slotless, self.bypassing, self.queue)

    def forget(self, request: RequestId) -> None:
        """It waits no more, and was not served."""
        del self.requests[request]
        self.queue.discard(request)
        for line in (self.bypassing, self.steered, self.slotless):
            if request in line:
                line.remove(request)

    def scene(self, now: float) -> Scene:
        """While it stays the same, queued requests stay queued: a long queue is not decided again."""
        several = len(self.up) > 1
        return tuple(
            (
                table.moves,
                table.open_for_pins(now),
                table.open_for_unpinned(now),
                table.open_for_anything(now),
                table.overdue(now) + (table.work.overdue(now) if several else 0),
            )
            for table in self.up
        )

    def slot_of(self, pending: Pending) -> tuple[EngineTable, SlotId] | None:
        """The slot that a request still owns; None when it has none, or the engine was restarted."""
        if pending.plan is None or pending.slot is None:
            return None
        table = pending.plan.table
        owned = pending.slot < len(table.owners) and table.owners[pending.slot] == pending.arrived.request
        return (table, pending.slot) if owned else None


@dataclass(slots=True)
class CurrentScene:
    """The scene, drawn only where it is needed: most requests are the only one."""

    state: State = field(repr=False)
    now: float
    _drawn: Scene | None = None

    def drawn(self) -> Scene:
        if self._drawn is None:
            self._drawn = self.state.scene(self.now)
        return self._drawn

    def changed(self) -> None:
        self._drawn = None

    def keeps_waiting(self, pending: Pending) -> bool:
        """Whether it was decided in this very scene that the request must wait."""
        return pending.waits_in is not None and pending.waits_in == self.drawn()


def user_starts(prompt: Tokens | None, traits: EngineTraits) -> Sequence[int]:
    """Where user messages begin, in tokens: the engine likes to make checkpoints there."""
    if prompt is None:
        return ()
    return sorted({at for opener in traits.user_start for at in prompt.find_all(Tokens(opener))})
