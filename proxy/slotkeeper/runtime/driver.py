"""The driver: gives events to the scheduler, performs its effects, and posts their results as events.

It is the only writer of slot state. `post` is synchronous and runs on the event loop's thread, so
there are no locks. Work that takes time runs in a task and ends in another event.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Final, ParamSpec

from slotkeeper.observe.gauges import EngineFigures, SlotFigures
from slotkeeper.observe.journal import Journal
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.request_record import ClientFigures
from slotkeeper.runtime.effect_runner import EffectRunner, fault_of
from slotkeeper.runtime.engines import Engines, LinkMaker
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.membership import Membership
from slotkeeper.runtime.render import NextTurns
from slotkeeper.runtime.slot_files import Snapshots
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.budgets import FolderRoom, Limits
from slotkeeper.scheduler.effects import (
    Budgeted,
    Drained,
    Effect,
    Forward,
    Learned,
    Poisoned,
    Pooled,
    Ranked,
    Refuse,
    Released,
    Report,
)
from slotkeeper.scheduler.engine_model import FLAGS, EngineTraits
from slotkeeper.scheduler.events import (
    Arrived,
    Closing,
    EngineLost,
    EngineUp,
    Event,
    FilesFound,
    Gone,
    RequestFailed,
    RoomSeen,
    SnapshotsChanged,
)
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.slot_contents import Snapshot, SnapshotId, Tier
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import WITHOUT_PLACE, EngineId, PriorityAct, Reason, RequestId, id_of
from slotkeeper.store.store import Store

P = ParamSpec("P")

log = get_logger(__name__)

SWEEP_PATIENCE: Final = 10.0  # seconds: a slow disk must not keep the sidecar from serving
MOMENT: Final = 0.1  # seconds, at most, between checks whether a request runs
LARGE_RENDERS: Final = 2  # large prompts that are rendered at once: each takes some times its size
LATEST: Final = 1.0  # seconds that small but necessary work waits for an idle moment
RENEWAL_SECONDS: Final = 1.0  # at least, between two new schedulers


class Driver:
    """Owns the placement; all other modules use it through the driver."""

    def __init__(
        self,
        links: Mapping[EngineId, EngineLink],
        metrics: Metrics,
        *,
        store: Store | None = None,
        limits: Limits | None = None,
        journal: Journal | None = None,
        new_link: LinkMaker | None = None,
        api_key: str | None = None,
    ) -> None:
        """Without a `store` there are no snapshots, without a `journal` there is no `why`.

        `new_link` and our own `api_key` are needed for routers and their models.
        """
        self.metrics = metrics
        self.journal = Journal(0) if journal is None else journal
        self.tasks = Tasks(self._task_failed)
        self._limits = limits or Limits()
        self.engines = Engines(
            links,
            self.tasks,
            metrics,
            wait=self._limits.engine_wait,
            back_by=lambda model: self.placement.back_by(self.now(), model),
            new_link=new_link,
            api_key=api_key,
        )
        self.membership = Membership(self.engines, metrics, self.tasks, self.post, new_link)
        self.snapshots = (
            Snapshots(store, metrics, self.post, self._limits.shared_bytes or 0) if store else None
        )
        self.effect_runner = EffectRunner(
            self.engines,
            metrics,
            self.tasks,
            self.post,
            self.snapshots,
            lost=self._engine_lost,
            progress=lambda request, computed: self.note(self.journal.planting, request, computed),
        )
        self.next_turns = NextTurns()
        self.numbers = count(1)  # numbers of requests: a client may send one id twice
        self.large_renders = asyncio.Semaphore(LARGE_RENDERS)
        self.learning: set[RequestId] = set()  # requests whose replies are being rendered
        self._renewal = Renewal(self.engines, self.membership, metrics, self._limits)
        self.placement = self._renewal.new_placement()
        metrics.watch(
            SlotFigures(lambda: self.placement),
            EngineFigures(lambda: self.membership.seen(self.placement)),
            ClientFigures(self.journal.clients),
        )
        self.reports: Callable[[Report], None] = metrics.report
        self._leaving: dict[RequestId, Callable[[int | None], None]] = {}  # see `when_released`
        self._events: deque[Event | None] = deque()  # None: a renewal is due
        self._busy = False
        self._grants: dict[RequestId, asyncio.Future[Forward]] = {}
        self._closing = False
        self._saved = asyncio.Event()

    @property
    def looks_ahead(self) -> bool:
        """Whether prefetch is on, so that the next turn's prefix is needed."""
        return self._limits.idle_tokens > 0

    def context(self, model: object) -> int:
        """Return the tokens that fit into a slot of every engine that may serve the named model; 0: unknown.

        If the slots of an engine share one KV buffer, each slot counts with an equal part.
        """
        traits = [link.traits for link in self.engines.of(self.engines.model_of(model)) if link.traits]
        return min((t.n_ctx // (t.n_slots if t.unified else 1) for t in traits), default=0)

    async def idle_moment(self, request: RequestId, *, within: float = math.inf) -> bool:
        """Wait for MOMENT seconds or less, and then until no request runs. Returns True.

        Returns False if the slot of `request` has another task, or after `within` seconds.

        Rendering costs the engine and us some milliseconds. That is too much if the client's next turn
        follows at once.
        """
        pause = self._limits.pause
        latest = self.now() + within
        while self.now() < latest:
            await asyncio.sleep(min(pause / 2, MOMENT))
            if not self.placement.holds(request):
                return False
            if not self.placement.serving:
                return True
        return False

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def start(self) -> None:
        self.tasks.start(self._start())

    async def _start(self) -> None:
        """Open the store before the engines are probed: a sweep would remove the files of a probe."""
        if self.snapshots:
            self.tasks.start(self.snapshots.open())
            for lasting in self.snapshots.lasting():
                self.tasks.start(lasting)
        await self.folder_tried()
        for link in self.links.values():
            self.metrics.engine_added(link.engine)
        self.engines.watch(self._engine_up, self._engine_lost, self.post)

    @property
    def links(self) -> Mapping[EngineId, EngineLink]:
        """The links to engines by id, including the models of routers."""
        return self.engines.links

    async def folder_tried(self) -> None:
        """Wait, up to SWEEP_PATIENCE seconds, until the slot folder is open or is known to be unusable."""
        if self.snapshots and not self.snapshots.tried.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_PATIENCE):
                    await self.snapshots.tried.wait()

    async def save_all(self, seconds: float, *, evacuate: bool = False) -> None:
        """Save slots, and upload snapshots to a shared store, for at most `seconds`.

        With `evacuate`, then move the snapshots of the hot folder to the cold tier. Call this when no more
        requests come.
        """
        if self.snapshots is None:
            return
        self._closing = True
        self.post(Closing(at=self.now()))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._saved.wait()
                await self.snapshots.written()
                if evacuate:
                    await self.snapshots.evacuate()

    async def look_elsewhere(self, request: RequestId, prompt: Tokens | None) -> None:
        """Look for states of this prompt in a shared store, before the scheduler gets `Rendered`."""
        sharing = self.snapshots.sharing if self.snapshots else None
        if sharing is None or prompt is None:
            return
        if wanted := self.placement.wanted_elsewhere(request, prompt):
            look = self.tasks.start(sharing.look_for(wanted))
            await sharing.waits_for(look, max(each.within for each in wanted))

    async def close(self) -> None:
        await self.tasks.close()
        if self.snapshots:
            await self.snapshots.close()
        await self.engines.close()

    def admit(self, arrived: Arrived) -> asyncio.Future[Forward]:
        """Give a request to the scheduler. Cancel it with `post(Gone(...))`.

        The future says where the request goes; it raises UpstreamFault if the scheduler refuses the request.
        """
        grant: asyncio.Future[Forward] = asyncio.get_running_loop().create_future()
        self._grants[arrived.request] = grant
        if self._renewal.pending and not arrived.bypass:
            arrived = replace(arrived, unplaced=arrived.unplaced or Reason.FAIL_OPEN)
        self.post(arrived)
        return grant

    def when_released(self, request: RequestId, call: Callable[[int | None], None]) -> None:
        """Call `call` when no engine works any more for a request whose client left, perhaps at once.

        It gets the tokens that the request's slot held then; None: unknown.
        """
        if self.placement.works_for(request):
            self._leaving[request] = call
        else:
            call(None)

    def _let_go_of(self, request: RequestId, held: int | None) -> None:
        if call := self._leaving.pop(request, None):
            call(held)

    def post(self, event: Event) -> None:
        """Give one event to the scheduler and perform the effects. Never raises."""
        self._take(event)

    def _take(self, event: Event | None) -> None:
        self._events.append(event)
        if self._busy:  # an effect posted it: the loop below takes it next
            return
        self._busy = True
        try:
            while self._events:
                each = self._events.popleft()
                self._renew() if each is None else self._step(each)
        finally:
            self._busy = False
        if self._closing and self._all_saved():
            self._saved.set()

    def _all_saved(self) -> bool:
        try:
            return not self.placement.unsaved(self.now())
        except Exception as error:  # noqa: BLE001 - of whatever kind the bug is
            self._renewal.failed(Closing(at=self.now()), error)
            return True

    def note(self, write: Callable[P, None], *what: P.args, **more: P.kwargs) -> None:
        """Write to the journal. An error there affects no request."""
        try:
            write(*what, **more)
        except Exception:
            log.exception("journal_failed")
            self.metrics.fallback("journal")

    # -- performing --------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        if isinstance(event, Gone):
            event = self._forget(event)
        begun = self.now()
        try:
            effects = self.placement.on(event)
        except Exception as error:  # noqa: BLE001 - of whatever kind the bug is
            # Fail open: our bug must not hold back a request that the engine would answer.
            self._renewal.failed(event, error)
            self._renewal.keep(self.placement)
            self.placement = self._renewal.new_placement()
            self._release_all(event)
            if (wait := self._renewal.due_in()) is not None:
                self.tasks.start(self._renew_later(wait))
            return
        self._carry_out(event, effects, begun)
        request = getattr(event, "request", None)
        if request is not None and self.placement.pending(request) is None:
            self.metrics.forgotten(request)

    def _carry_out(self, event: Event, effects: list[Effect], begun: float) -> None:
        self.note(self.journal.saw, event, effects, begun, self.now(), self.placement.pending)
        self.note(self.journal.look, event, effects, begun, self.placement.waiting)
        for effect in effects:
            try:
                self._perform(effect)
            except Exception:
                log.exception("effect_failed", request_id=asker(effect), effect=type(effect).__name__)
                self.metrics.fallback("effect")

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Forward():
                grant = self._grants.pop(effect.request, None)
                if grant and not grant.done():
                    grant.set_result(effect)
                self._went_unplaced(effect)
                self.metrics.forwarded(effect)
            case Drained():
                self.membership.drained(effect.engine)
            case Refuse():
                self._refuse(effect)
            case Report():
                self.reports(effect)
            case Learned():
                self._learned(effect)
            case Released():
                self._let_go_of(effect.request, effect.held)
            case Poisoned() | Pooled() | Ranked() | Budgeted():
                self.effect_runner.note(effect)
                if isinstance(effect, Ranked) and effect.act is PriorityAct.EXPIRED:
                    self._refuse(effect)
            case _:
                self.effect_runner.perform(effect)

    def _went_unplaced(self, forward: Forward) -> None:
        """Log and count a request that got no place although its client did not ask for that."""
        if forward.reason in WITHOUT_PLACE:
            asked, reason = id_of(forward.request), forward.reason.value
            log.warning("request_not_placed", request_id=asked, engine=forward.engine, reason=reason)
            self.metrics.fallback(forward.reason)

    def _refuse(self, effect: Refuse | Ranked) -> None:
        grant = self._grants.pop(effect.request, None)
        if grant and not grant.done():
            grant.set_exception(fault_of(effect))

    def _learned(self, what: Learned) -> None:
        flag, value = FLAGS[what.name], what.value
        log.info("flag_learned", engine=what.engine, flag=flag, value=value, how=what.how.value)
        self.metrics.learned(what.name, what.how)
        link = self.links.get(what.engine)
        if link is None:
            return
        link.learned(what)
        self.tasks.start(link.keep_learned())

    # -- failures ----------------------------------------------------------------------------------

    def _forget(self, gone: Gone) -> Gone:
        """Cancel the grant and the running plant of a client that has disconnected."""
        if grant := self._grants.pop(gone.request, None):
            grant.cancel()
        if left := self.effect_runner.let_go(gone.request):
            reached, cached = left
            return replace(gone, reached=reached, cached=reached, planted=reached - cached)
        return gone

    async def _renew_later(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._take(None)

    def _renew(self) -> None:
        """Start a new scheduler, which knows the engines and snapshots, and reconciles first."""
        begun = self.now()
        self._renewal.keep(self.placement)
        self.placement, told = self._renewal.told(closing=self._closing)
        self._release_all(SnapshotsChanged(at=begun))
        for event, effects in told:
            self._carry_out(event, effects, begun)

    def _release_all(self, cause: Event) -> None:
        """Let all requests through unpinned that wait for a scheduler which is no longer used."""
        for left in tuple(self._leaving):
            self._let_go_of(left, None)
        waiting, self._grants = self._grants, {}
        engine, released = self.engines.front().engine, list[Effect]()
        for request, grant in waiting.items():
            if not grant.done():
                go = Forward(request=request, engine=engine, slot=None, reason=Reason.FAIL_OPEN)
                grant.set_result(go)
                released.append(go)
                self._went_unplaced(go)
                self.metrics.decision(Reason.FAIL_OPEN)
        self.note(self.journal.saw, cause, released, cause.at, self.now(), self.placement.pending)

    def _engine_up(self, link: EngineLink) -> None:
        self.metrics.probed(link.probed)
        link.probed = 0
        if link.traits:
            self.post(up(link, link.traits, fresh=link.fresh))
            self.engines.changed()
            if link.lacks_files:
                self.tasks.start(link.look_for_files(self._files_found))

    def _files_found(self, link: EngineLink) -> None:
        if link.traits:
            log.info("files_found", engine=link.engine)
            self.post(FilesFound(at=self.now(), engine=link.engine, traits=link.traits))

    def failed(self, link: EngineLink, *, broken: bool) -> None:
        """Record that a request failed at an engine that may be healthy; `broken`: there was no answer."""
        table = self.placement.tables.get(link.engine)
        before = table is not None and table.failing
        link.kick()
        self.metrics.failures.labels(engine=link.engine).inc()
        self.post(RequestFailed(at=self.now(), engine=link.engine, broken=broken))
        if table is not None and table.failing and not before:
            log.warning("engine_failing", engine=link.engine, failures=table.breaker.failures)

    def _engine_lost(self, link: EngineLink) -> None:
        if link.pulse.frozen:
            self.metrics.freezes.labels(engine=link.engine).inc()
        self.post(EngineLost(at=self.now(), engine=link.engine, returns=link.returns))
        self.engines.changed()

    def _task_failed(self, error: BaseException) -> None:
        log.error("task_failed", exc_info=error)
        self.metrics.fallback("task")


# -- a new scheduler after a bug -------------------------------------------------------------------------

Told = tuple[Placement, list[tuple[Event, list[Effect]]]]


class Renewal:
    """A new scheduler after a bug: when, and what it is told of the engines, the drains and the snapshots.

    If every answer of GET /slots met the bug, renewals at once would meet it a thousand times a second. And
    if an event that tells the new scheduler met it, they would never end.
    """

    def __init__(self, engines: Engines, membership: Membership, metrics: Metrics, limits: Limits) -> None:
        self._engines = engines
        self._membership = membership
        self._metrics = metrics
        self._limits = limits
        self._snapshots: dict[SnapshotId, Snapshot] = {}  # those that no scheduler has been told of yet
        self._rooms: Mapping[Tier, FolderRoom] = {}
        self._at = -math.inf  # when the latest renewal was due
        self._pending = False

    def new_placement(self) -> Placement:
        return Placement(*(link.engine for link in self._engines.upstreams), limits=self._limits)

    def failed(self, event: Event, error: Exception) -> None:
        """Record that a decision failed."""
        log.error("placement_failed", request_id=asker(event), cause=type(event).__name__, exc_info=error)
        self._metrics.fallback("placement")

    @property
    def pending(self) -> bool:
        """Whether the present scheduler is not told of the engines yet."""
        return self._pending

    def keep(self, placement: Placement) -> None:
        """Keep what a scheduler that is replaced knows of snapshots and their folders."""
        self._snapshots |= {snapshot.id: snapshot for snapshot in placement.catalog}
        self._rooms = placement.rooms or self._rooms

    def due_in(self) -> float | None:
        """Return after how many seconds to call `told`; None if that was returned already."""
        if self._pending:
            return None
        now = time.monotonic()
        self._pending, self._at = True, max(now, self._at + RENEWAL_SECONDS)
        return self._at - now

    def told(self, *, closing: bool) -> Told:
        """Return a new scheduler that knows everything, and the effects of each event that told it.

        If one of these events fails, another new scheduler is told of the rest.
        """
        events, self._pending = list(self._events(closing=closing)), False
        self._snapshots.clear()
        while True:
            placement, effects = self.new_placement(), []
            for event in events:
                try:
                    effects.append((event, placement.on(event)))
                except Exception as error:  # noqa: BLE001 - of whatever kind the bug is
                    self.failed(event, error)
                    events.remove(event)
                    break
            else:
                return placement, effects

    def _events(self, *, closing: bool) -> Iterator[Event]:
        now = time.monotonic()
        yield from self._membership.asked()
        yield RoomSeen(at=now, rooms=self._rooms)
        yield SnapshotsChanged(at=now, snapshots=tuple(self._snapshots.values()))
        for router in self._engines.routers.values():
            yield router.listed()
        for link in self._engines.links.values():
            if link.traits and link.up:
                yield up(link, link.traits, fresh=False)
        if closing:
            yield Closing(at=now)


def up(link: EngineLink, traits: EngineTraits, *, fresh: bool) -> EngineUp:
    """Return the event that an engine is up. `fresh`: nothing has run there yet."""
    at, model = time.monotonic(), link.address.model
    return EngineUp(at=at, engine=link.engine, traits=traits, fresh=fresh, model=model)


def asker(of: Event | Effect) -> str:
    """Return the id of the request of an event or effect, for the log."""
    return id_of(getattr(of, "request", RequestId("")))
