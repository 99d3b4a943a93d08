"""The scheduler's whole state, and its queue, which is fair between clients. Only `Placement.on` changes it.

Requests wait here and not in the engine's own deferred queue, which is not fair between clients and leaves
slots idle (engine.md 6).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import Final

from slotkeeper.scheduler.effects import Released
from slotkeeper.scheduler.events import Arrived
from slotkeeper.scheduler.policies.adapters import set_of
from slotkeeper.scheduler.policies.router import Router
from slotkeeper.scheduler.prompts.prompt_tree import PromptTree
from slotkeeper.scheduler.prompts.tokens import UNKNOWN, Tokens
from slotkeeper.scheduler.requests.pending import Ended, Pause, Pending, Prompts, Scene
from slotkeeper.scheduler.requests.steps import Chore
from slotkeeper.scheduler.slots.engine_model import SlotContents, unmarked
from slotkeeper.scheduler.slots.table import EngineTable
from slotkeeper.scheduler.snapshots.budgets import Budgets, FolderRoom, HourlyBudget, Limits, budgets
from slotkeeper.scheduler.snapshots.catalog import Catalog
from slotkeeper.scheduler.types import ClientId, EngineId, ModelName, Priority, RequestId, Tier


class FairQueue:
    """The waiting requests, in the order in which they may be placed."""

    def __init__(self) -> None:
        # The order of the clients is the turn order: a client that was served moves to the end.
        self._lines: OrderedDict[ClientId, OrderedDict[RequestId, None]] = OrderedDict()
        self._client: dict[RequestId, ClientId] = {}

    def __len__(self) -> int:
        return len(self._client)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._client

    def __iter__(self) -> Iterator[RequestId]:
        """Yield one request of each client in turn, then the second of each, and so on."""
        turns = [iter(line) for line in self._lines.values()]
        while len(turns) > 1:
            heads = [next(line, None) for line in turns]
            yield from filter(None, heads)
            if None in heads:
                turns = [line for line, head in zip(turns, heads, strict=True) if head is not None]
        yield from chain.from_iterable(turns)  # one client is left; thousands of its requests may wait

    def of(self, client: ClientId) -> int:
        """Return how many requests of this client wait."""
        return len(self._lines.get(client, ()))

    def add(self, request: RequestId, client: ClientId) -> None:
        self._lines.setdefault(client, OrderedDict())[request] = None
        self._client[request] = client

    def put_back(self, request: RequestId, client: ClientId) -> None:
        """Put a request and its client first in the queue: its turn had come, but it was not sent."""
        self.add(request, client)
        self._lines[client].move_to_end(request, last=False)
        self._lines.move_to_end(client, last=False)

    def served(self, request: RequestId) -> None:
        """Remove a request that is being served, and move its client to the end of the turn order."""
        client = self._client.get(request)
        self.discard(request)
        if client is not None and client in self._lines:
            self._lines.move_to_end(client)

    def discard(self, request: RequestId) -> None:
        """Remove a request that was not served."""
        client = self._client.pop(request, None)
        if client is None:
            return
        line = self._lines[client]
        del line[request]
        if not line:
            del self._lines[client]


# This many requests may overtake one that needs several slots, or that needs other tasks to end.
PASSES: Final = 16

# -- tokens that were computed in idle time --------------------------------------------------------------

MOST: Final = 1024  # states; the oldest are forgotten


@dataclass(slots=True)
class Ahead:
    """Which states end in tokens that were computed in idle time, and where these tokens begin.

    A state is identified by its tokens, because a slot, a file and the engine's RAM cache may all hold it.
    """

    _begins: dict[int, int] = field(default_factory=dict)  # key: hash of the state's tokens

    def computed(self, tokens: Tokens, begin: int) -> None:
        """Record a state that holds `tokens`, computed in idle time from index `begin` on."""
        self._begins.pop(key := hash(tokens), None)
        self._begins[key] = begin
        if len(self._begins) > MOST:
            del self._begins[next(iter(self._begins))]

    def begins(self, tokens: Tokens) -> int | None:
        """Return the index of the first token that was computed in idle time; None if none was."""
        return self._begins.get(hash(unmarked(tokens))) if self._begins else None


# -- the lengths of answers ------------------------------------------------------------------------------

# Tokens expected of an answer if nothing is known of its client and the client sets no limit.
UNKNOWN_OUTPUT: Final = 1024
LEARNED_FROM: Final = 8  # answers of one kind of client after which they count more than its own limit
ANSWERS: Final = 64  # answers of each kind
KINDS: Final = 256  # of clients; the oldest are forgotten
# Factor on the longest of these answers. A client's limit is a bound and not a forecast: agents ask for
# 32,000 tokens and use some hundred, so by their limits two of them could never run side by side.
MARGIN: Final = 4
LEAST_OUTPUT: Final = 1024
HINT_MARGIN: Final = 2  # times what a client says of this very answer, which is a forecast as well


@dataclass(slots=True)
class Outputs:
    """The lengths of answers, by kind of client."""

    _seen: OrderedDict[str, deque[int]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, kind: str, generated: int) -> None:
        seen = self._seen.setdefault(kind, deque(maxlen=ANSWERS))
        seen.append(generated)
        self._seen.move_to_end(kind)
        if len(self._seen) > KINDS:
            self._seen.popitem(last=False)

    def expected(self, request: Arrived, room: int) -> int:
        """Return the tokens that an answer will hardly exceed; at most `room`."""
        limit = room if request.answer_limit is None else min(request.answer_limit, room)
        if request.outgrown:  # the estimate was too low before
            return limit
        if request.hints.output is not None:  # as its client expects, which is no limit
            return min(limit, HINT_MARGIN * request.hints.output)
        seen = self._seen.get(request.kind, ())
        if len(seen) >= LEARNED_FROM:
            return min(limit, max(LEAST_OUTPUT, MARGIN * max(seen)))
        return limit if request.answer_limit is not None else min(limit, UNKNOWN_OUTPUT)


# -- the pauses of conversations -------------------------------------------------------------------------

CONVERSATIONS: Final = 256  # whose pauses are remembered; the oldest are forgotten
PAUSES: Final = 8  # of one conversation
PAUSES_OF_ALL: Final = 15
SEARCHED_MESSAGES: Final = 64  # of a request, the last ones


@dataclass(frozen=True, slots=True)
class _Left:
    """A conversation whose answer has ended."""

    at: float
    client: ClientId
    called_tools: bool | None
    pauses: tuple[Pause, ...]  # before this one


@dataclass(slots=True)
class Pauses:
    """How long conversations pause: from an answer until the request with their next turn arrives.

    A conversation is found by the last message of the request that was answered, which its next one contains.
    """

    of_all: deque[Pause] = field(default_factory=lambda: deque(maxlen=PAUSES_OF_ALL))
    _left: OrderedDict[bytes, _Left] = field(default_factory=OrderedDict)

    def begins(
        self, request: Arrived, pauses: tuple[Pause, ...], called_tools: bool | None, at: float
    ) -> None:
        """Record that the answer to a request has ended. `pauses`: as `ends` returned them."""
        chain = request.hash_chain
        if not chain:
            return
        self._left[chain[-1]] = _Left(at, request.client, called_tools, pauses)
        self._left.move_to_end(chain[-1])
        if len(self._left) > CONVERSATIONS:
            self._left.popitem(last=False)

    def ends(self, chain: Sequence[bytes], at: float) -> tuple[Pause, ...]:
        """Return the pauses of the conversation with which a request goes on, the latest last.

        The first request after an answer ends its pause; those that branch off later do not.
        """
        for link in reversed(chain[-SEARCHED_MESSAGES:]):
            left = self._left.get(link)
            if left is None:
                continue
            if left.at > at or link == chain[-1]:  # it came before the answer had ended, or says nothing new
                return left.pauses
            pause = Pause(at - left.at, left.called_tools)
            self.of_all.append(pause)
            self._left[link] = replace(left, at=inf, pauses=(*left.pauses, pause)[-PAUSES:])
            return self._left[link].pauses
        return ()

    def client(self, chain: Sequence[bytes]) -> ClientId | None:
        """Return whose conversation this is; None: not known."""
        left = self._left.get(chain[-1]) if chain else None
        return left.client if left else None

    def expected(self, chain: Sequence[bytes]) -> Sequence[Pause]:
        """Return the pauses of the conversation whose answered request had this chain, else those of all."""
        left = self._left.get(chain[-1]) if chain else None
        return (left.pauses if left else ()) or tuple(self.of_all)


# -- requests that ended before their engine was known ---------------------------------------------------

EARLY: Final = 16  # the last ones of all engines: the slots hold no more than these

# -- the whole state -------------------------------------------------------------------------------------


@dataclass(slots=True)
class State:
    """The scheduler's memory. Times are in seconds, on the clock of the events."""

    engines: tuple[EngineId, ...]  # in the order of the configuration or of `EnginesNamed`; at least one
    trees: dict[ModelName, PromptTree] = field(default_factory=dict)
    catalog: Catalog = field(default_factory=Catalog)
    tables: dict[EngineId, EngineTable] = field(default_factory=dict)
    freed: list[Released] = field(default_factory=list)  # by engines that are no longer ours
    requests: dict[RequestId, Pending] = field(default_factory=dict)
    early: deque[Pending] = field(default_factory=lambda: deque(maxlen=EARLY))  # see `ended_early`
    queue: FairQueue = field(default_factory=FairQueue)
    bypassing: list[RequestId] = field(default_factory=list)  # waiting until all pinned tasks have begun
    steered: list[RequestId] = field(default_factory=list)  # prompt is prefilled, request not yet sent
    slotless: list[RequestId] = field(default_factory=list)  # waiting for their models to be loaded
    routers: dict[EngineId, Router] = field(default_factory=dict)
    drained: dict[EngineId, bool] = field(default_factory=dict)  # by an operator; whether `Drained` was sent
    limits: Limits = field(default_factory=Limits)
    rooms: dict[Tier, FolderRoom] = field(default_factory=dict)  # as last seen
    budgets: Budgets = field(init=False)  # for snapshots
    told: Budgets | None = None  # those that were reported last
    writes: HourlyBudget = field(init=False)  # bytes
    idle: HourlyBudget = field(init=False)  # tokens
    coming: dict[RequestId, SlotContents] = field(default_factory=dict)  # written, not yet in the catalog
    ahead: Ahead = field(default_factory=Ahead)
    outputs: Outputs = field(default_factory=Outputs)
    pauses: Pauses = field(default_factory=Pauses)
    chores: dict[RequestId, Chore] = field(default_factory=dict)
    chores_begun: int = 0
    begun: int = 0  # requests that have left the queue
    cut_short: bool = False  # the last round left queued requests without a decision
    at: float = 0.0  # of the last event
    hinted: dict[RequestId, None] = field(default_factory=dict)  # with a priority or a deadline, in order
    served_at: dict[Priority, float] = field(default_factory=dict)  # when one of it was served last
    kept_slots_until: float = inf  # when the first of the slots that are kept for conversations is given away
    wakes_at: float | None = None  # when the pending `SetTimer` will be answered
    closing: bool = False

    def __post_init__(self) -> None:
        limits = self.limits
        self.budgets = budgets(limits, self.rooms)
        self.writes = HourlyBudget(self.budgets.hourly, left=self.budgets.hourly, at=0.0)
        self.idle = HourlyBudget(limits.idle_tokens, left=limits.idle_tokens, at=0.0)

    def budget_again(self) -> None:
        """Compute the budgets for snapshots again, after a folder's room or an engine is known."""
        headers = (table.traits.largest_file for table in self.tables.values())
        here = {print_ for table in self.tables.values() for print_ in table.traits.fingerprints}
        files = (snapshot.size for snapshot in self.catalog if snapshot.fingerprint in here)
        self.budgets = budgets(self.limits, self.rooms, max((*headers, *files), default=0))
        self.writes.becomes(self.budgets.hourly)

    @property
    def up(self) -> list[EngineTable]:
        return [table for table in self.tables.values() if table.up]

    def at_work(self, tables: Iterable[EngineTable]) -> tuple[RequestId, ...]:
        """Return the clients' requests that run on these engines."""
        sent = [request for table in tables for request in (*table.owners, *table.unsettled)]
        return tuple(dict.fromkeys(request for request in sent if request in self.requests))

    def full(self, table: EngineTable) -> bool:
        """Whether as many requests are at work there as the user allows."""
        return 0 < self.limits.running <= len(self.at_work([table]))

    def tree(self, model: ModelName) -> PromptTree:
        """Return all prompts that were sent to this model. Prompts of two models have nothing in common."""
        if model not in self.trees:
            self.trees[model] = PromptTree()
        return self.trees[model]

    def prompts(self, model: ModelName) -> Prompts:
        """Return what is known of this model's prompts; its markers are unknown if no engine of it is up."""
        markers = next((table.traits.markers for table in self.up_for(model)), UNKNOWN)
        return Prompts(self.tree(model), markers)

    def up_for(self, model: ModelName) -> list[EngineTable]:
        """Return the engines that are up and serve this model."""
        return [table for table in self.tables.values() if table.up and table.model == model]

    def open_for(self, model: ModelName) -> list[EngineTable]:
        """Return the engines of this model on which work may begin; failing ones only if all are failing."""
        tables = [t for t in self.tables.values() if t.up and t.model == model and not t.leaving]
        return [table for table in tables if not table.failing] or tables

    def sets(self, request: Arrived) -> list[str]:
        """Return the sets of LoRA adapters that a request would have on engines that are open: often one."""
        tables = self.open_for(request.model)
        return list(dict.fromkeys(set_of(table.traits.adapters, request.lora) for table in tables))

    def fitting(self, request: Arrived) -> list[EngineTable]:
        """Return the open engines on which the request would have the adapters that its space names."""
        tables = self.open_for(request.model)
        return [table for table in tables if set_of(table.traits.adapters, request.lora) == request.adapters]

    def isolates(self, request: Arrived) -> bool:
        """Whether the request must be kept from states of other spaces in an engine of its model."""
        if request.namespace:
            return True
        return any(table.shadow.isolates(request.space) for table in self.up_for(request.model))

    def with_room(self, request: Arrived) -> list[EngineTable]:
        """Return the engines with enough idle slots for the request, or with all of their slots idle."""
        tables = self.fitting(request)
        return [table for table in tables if len(table.idle) >= min(request.copies, len(table.states))]

    def back_by(self, now: float, model: ModelName) -> float | None:
        """Return until when to wait for an engine of this model; None if one is up or none is expected."""
        if self.up_for(model):
            return None
        if there := [router for router in self.routers.values() if router.engine_of(model)]:
            return max(filter(None, (router.serves(now) for router in there)), default=None)
        until = max((t.back_by for t in self.tables.values() if t.model == model), default=now)
        return until if until > now else None

    def fallback(self, model: ModelName) -> EngineId:
        """Return where to send a request if no engine of its model is up: the client gets that error."""
        usable = sorted(self.routers.values(), key=lambda router: router.base in self.drained)
        routers = (router.engine_of(model) for router in usable)
        known = (table.engine for table in self.tables.values() if model and table.model == model)
        named = sorted(self.engines, key=lambda engine: engine in self.drained)
        return next(filter(None, (*routers, *known)), named[0])

    def mark_leaving(self) -> None:
        """Mark engines on which nothing may begin: drained ones, and models about to be unloaded."""
        leaving = {engine for router in self.routers.values() for engine in router.leaving}
        leaving |= self.drained.keys()
        for engine in self.drained.keys() & self.routers.keys():
            leaving |= self.routers[engine].models.keys()
        for table in self.tables.values():
            if table.leaving != (table.engine in leaving):
                table.leaves(leaving=not table.leaving)

    @property
    def waiting(self) -> bool:
        return bool(len(self.queue) or self.bypassing or self.steered)

    def wanted(self, table: EngineTable) -> bool:
        """Whether a waiting request could get a slot there. No request can if the engine is leaving."""
        return self.waiting and not table.leaving

    def ends(self, table: EngineTable) -> bool:
        """Whether the engine's slots are about to be lost, so that those that are worth it are saved now."""
        return self.closing or table.leaving

    def decides_again(self) -> None:
        """Let all queued requests be decided again: they may have waited for what has changed elsewhere."""
        for table in self.up:
            table.place_again()

    def open_accounts(self, table: EngineTable) -> bool:
        """Whether a request ended there whose tokens, and so its slot's contents, are not known yet."""
        return any(isinstance(p.stage, Ended) and p.table is table for p in self.requests.values())

    def clearing(self) -> Iterator[tuple[Pending, EngineTable]]:
        """Yield requests that are being steered while slots of other spaces are kept from them, with engines.

        A slot whose task begins meanwhile may have to be erased or waited for.
        """
        for owner in (owner for table in self.up for owner in table.owners if owner):
            pending = self.requests.get(owner)
            if pending and pending.preparing and pending.preparing.plan.clearing:
                yield pending, pending.preparing.plan.table

    def waiting_requests(self) -> Iterator[RequestId]:
        """Yield all requests that wait for an engine, in the order in which they are served."""
        return chain(self.slotless, self.bypassing, self.queue)

    def released(self) -> Iterator[Released]:
        """Yield the requests without a client for which no engine works any more, once each."""
        yield from self.freed
        self.freed.clear()
        for table in self.tables.values():
            if table.freed:
                yield from table.take_freed()

    def forget(self, request: RequestId) -> None:
        """Remove a request that was not served, from every queue."""
        del self.requests[request]
        self.queue.discard(request)
        for line in (self.bypassing, self.steered, self.slotless):
            if request in line:
                line.remove(request)

    def overtaken(self, pending: Pending) -> bool:
        """Whether PASSES requests have begun since this one could have. The first call says that it could."""
        return pending.begun_since(self.begun) >= PASSES

    def scene(self, now: float) -> Scene:
        """Return what queue decisions depend on. While it is unchanged, no decision is made again."""
        several = len(self.up) > 1
        return tuple(
            (
                table.moves,
                *_openings(table, now),
                table.overdue(now) + (table.work.overdue(now) if several else 0),
            )
            for table in self.up
        )

    def ended_early(self, pending: Pending) -> None:
        """Keep a request that went out and ended before its engine was known: a slot may hold its tokens."""
        if pending.finished and pending.finished.left and pending.arrived.generates:
            self.early.append(pending)

    def take_early(self, engine: EngineId) -> list[Pending]:
        """Remove and return those that ended at this engine before it was known, the last one first."""
        there = [p for p in reversed(self.early) if self.fallback(p.arrived.model) == engine]
        self.early = deque((p for p in self.early if p not in there), maxlen=EARLY)
        return there


def _openings(table: EngineTable, now: float) -> tuple[bool, bool, bool]:
    """Whether an engine is open for pins, for unpinned tasks, and for anything."""
    if not table.open_for_pins(now):
        return False, False, table.open_for_anything(now)
    quiet = not table.pin_on_its_way(now)
    return True, quiet, quiet and bool(table.idle)


@dataclass(slots=True)
class CurrentScene:
    """The scene at one moment, computed only when it is needed: most requests are alone in the queue."""

    state: State = field(repr=False)
    now: float
    _drawn: Scene | None = None

    def drawn(self) -> Scene:
        if self._drawn is None:
            self._drawn = self.state.scene(self.now)
        return self._drawn

    def changed(self) -> None:
        self._drawn = None
