"""The driver: feeds the scheduler with events, performs its effects, reports what came of them.

It is the one writer of slot state. `post` is synchronous and runs on the event loop's thread, so
there are no locks; whatever takes time runs in a task and comes back as another event.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Final, ParamSpec

from slotkeeper.engine.answers import EngineGoneError
from slotkeeper.engine.client import EngineError, Health
from slotkeeper.observe.journal import Journal
from slotkeeper.observe.log import Seldom, get_logger, id_of
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.effect_runner import EffectRunner
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.render import NextTurns
from slotkeeper.runtime.slot_files import Snapshots
from slotkeeper.runtime.tasks import Tasks, lifeline
from slotkeeper.scheduler.costs import Limits
from slotkeeper.scheduler.effects import Effect, Forward, Learned, Poisoned, Report
from slotkeeper.scheduler.engine_model import FLAGS
from slotkeeper.scheduler.events import (
    Arrived,
    Closing,
    EngineLost,
    EngineUp,
    Event,
    FilesFound,
    Gone,
    SnapshotsChanged,
)
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.types import EngineId, Reason, RequestId
from slotkeeper.store.store import Store

P = ParamSpec("P")

log = get_logger(__name__)

SWEEP_PATIENCE: Final = 10.0  # seconds: a slow disk must not keep the sidecar from serving
MOMENT: Final = 0.1  # seconds without a request, after which an engine counts as idle for small work
LATEST: Final = 1.0  # seconds that small work which must be done waits for it
PATIENCE: Final = 3.0  # seconds that a request waits for an engine's probe, which takes a fifth of one


class Driver:
    """Owns the placement; all other modules ask it."""

    def __init__(
        self,
        links: Mapping[EngineId, EngineLink],
        metrics: Metrics,
        *,
        store: Store | None = None,
        limits: Limits | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Without a `store` there are no snapshots, without a `journal` there is no `why`."""
        self.links = links
        self.metrics = metrics
        self.journal = Journal(0) if journal is None else journal
        self.tasks = Tasks(self._task_failed)
        self.snapshots = Snapshots(store, metrics, self.post) if store else None
        self.effect_runner = EffectRunner(
            links,
            metrics,
            self.tasks,
            self.post,
            self.snapshots,
            lost=self._engine_lost,
            progress=lambda request, computed: self.note(self.journal.planting, request, computed),
        )
        self.next_turns = NextTurns()
        self.numbers = count(1)  # of requests: a client may send one id twice
        self.learning: set[RequestId] = set()  # whose replies are being rendered
        self._limits = limits
        self.placement = Placement(*links, limits=limits)
        metrics.watch(lambda: self.placement, self.journal.clients)
        self.reports: Callable[[Report], None] = metrics.report
        self._seldom = Seldom(log)
        self._events: deque[Event] = deque()
        self._busy = False
        self._grants: dict[RequestId, asyncio.Future[Forward]] = {}
        self._roused: set[EngineId] = set()  # sleeping engines that are loading their models for us
        self._closing = False
        self._saved = asyncio.Event()
        self._came_or_went = asyncio.Event()  # the next engine that does

    @property
    def front(self) -> EngineLink:
        """The first engine that is ready, else the first that was named."""
        links = self.links.values()
        return next((link for link in links if link.ready), next(iter(links)))

    @property
    def looks_ahead(self) -> bool:
        """Whether the next turn's prefix is wanted."""
        return (self._limits or Limits()).idle_tokens > 0

    async def idle_moment(self, request: RequestId, *, within: float = math.inf) -> bool:
        """Wait until no request runs for a moment; False if its slot has gone on, or after so many seconds.

        Rendering costs the engine and us some milliseconds: too much while its client's next turn, which
        may follow at once, is on its way.
        """
        pause = (self._limits or Limits()).pause
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
        """Files first: a sweep would take the files by which an engine is tried out for leftovers."""
        if self.snapshots:
            self.tasks.start(self.snapshots.open())
        await self.folder_tried()
        for link in self.links.values():
            self.metrics.engine_up(link.engine, up=False)
            self.metrics.freezes.labels(engine=link.engine)
            self.tasks.start(link.watch(self._engine_up, self._engine_lost))
            self.tasks.start(lifeline(link.engine, link.doubt))

    async def folder_tried(self) -> None:
        """Wait, but not for long, until the slot folder is open or cannot be used."""
        if self.snapshots and not self.snapshots.tried.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_PATIENCE):
                    await self.snapshots.tried.wait()

    async def save_all(self, seconds: float, *, evacuate: bool = False) -> None:
        """Save what is worth it while no requests come any more; then `evacuate` what is hot."""
        if self.snapshots is None:
            return
        self._closing = True
        self.post(Closing(at=self.now()))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._saved.wait()
                if evacuate:
                    await self.snapshots.evacuate()

    async def close(self) -> None:
        await self.tasks.close()
        if self.snapshots:
            await self.snapshots.close()
        for link in self.links.values():
            await link.client.close()

    async def awake(self, since: float) -> None:
        """Wait, but not for long, until some engine is ready, and none may have been restarted unseen.

        For one that has ended and is expected back it waits longer, counted from `since`.
        """
        doubtful = [link for link in self.links.values() if link.doubtful]
        if self.front.ready and not doubtful:
            return
        if not all(link.pulse.frozen for link in self.links.values()):
            await self._probed(doubtful)
        await self._returned(since)

    def rouse(self) -> None:
        """Have engines that sleep load their models, if no other is ready, so that a slot can be chosen.

        Any task would wake them, but the slot that it takes is then unknown, and nothing is restored for it.
        """
        for link in self.links.values() if not self.front.ready else ():
            if link.health is Health.SLEEPING and link.engine not in self._roused:
                self._roused.add(link.engine)
                self.tasks.start(self._rouse(link))

    async def _rouse(self, link: EngineLink) -> None:
        try:
            await link.client.rouse(headers=link.auth)
        except (EngineError, EngineGoneError) as error:
            log.warning("engine_not_roused", engine=link.engine, error=str(error))
        finally:
            self._roused.discard(link.engine)
            link.kick()

    async def _probed(self, doubtful: list[EngineLink]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*(link.settle() for link in doubtful))
                if not self.front.ready:
                    await asyncio.gather(*(link.wake() for link in self.links.values()))

    @property
    def expects_one(self) -> bool:
        """Whether none is ready, and one that has ended should be back soon."""
        coming = any(link.coming for link in self.links.values())
        return not self.front.ready and (coming or self.placement.back_by(self.now()) is not None)

    async def _returned(self, since: float) -> None:
        """Wait until some engine is ready: all that come while one is expected wait for the same time."""
        until = since + (self._limits or Limits()).engine_wait if self.expects_one else since
        while not self.front.ready and any(link.returns for link in self.links.values()):
            if until <= self.now():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(until - self.now()):
                    await self._came_or_went.wait()

    async def comes_back(self, link: EngineLink) -> bool:
        """After a call that it did not answer: whether it had ended, and some engine is ready now."""
        if not await link.was_lost(link.losses):
            return False
        await self._returned(self.now())
        return self.front.ready

    def _say_it_came_or_went(self) -> None:
        self._came_or_went.set()
        self._came_or_went = asyncio.Event()

    def admit(self, arrived: Arrived) -> asyncio.Future[Forward]:
        """A request enters; the future says where it goes. Cancel with `post(Gone(...))`."""
        grant: asyncio.Future[Forward] = asyncio.get_running_loop().create_future()
        self._grants[arrived.request] = grant
        self.post(arrived)
        return grant

    def post(self, event: Event) -> None:
        """Take one event in and perform what follows from it. Never raises."""
        self._events.append(event)
        if self._busy:  # an effect below caused it: the loop that is running takes it next
            return
        self._busy = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._busy = False
        if self._closing and not self.placement.unsaved(self.now()):
            self._saved.set()

    def note(self, write: Callable[P, None], *what: P.args, **more: P.kwargs) -> None:
        """Write to the journal. A failure affects no request."""
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
        except Exception:
            # Fail open: a bug of ours must not hold a request back that the engine would answer.
            log.exception("placement_failed", request_id=_asker(event), cause=type(event).__name__)
            self.metrics.fallback("placement")
            released = self._release_all(renew=not isinstance(event, EngineUp | SnapshotsChanged))
            self.note(self.journal.saw, event, released, begun, self.now(), self.placement.pending)
            return
        self.note(self.journal.saw, event, effects, begun, self.now(), self.placement.pending)
        for effect in effects:
            try:
                self._perform(effect)
            except Exception:
                log.exception("effect_failed", request_id=_asker(effect), effect=type(effect).__name__)
                self.metrics.fallback("effect")

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Forward():
                grant = self._grants.pop(effect.request, None)
                if grant and not grant.done():
                    grant.set_result(effect)
                self.metrics.decision(effect.reason)
            case Report():
                self.reports(effect)
            case Learned():
                self._learned(effect)
            case Poisoned():
                self._poisoned(effect)
            case _:
                self.effect_runner.perform(effect)

    def _learned(self, what: Learned) -> None:
        flag, value = FLAGS[what.name], what.value
        log.info("flag_learned", engine=what.engine, flag=flag, value=value, how=what.how.value)
        self.metrics.learned(what.name, what.how)
        link = self.links[what.engine]
        link.learned(what)
        self.tasks.start(link.keep_learned())

    def _poisoned(self, what: Poisoned) -> None:
        place, why = str(what.place) if what.place else None, what.why.value
        self.metrics.poisoned.labels(reason=why).inc()
        self._seldom.warning(
            "slot_poisoned",
            request_id=id_of(what.request),
            place=place,
            reason=why,
            cached=what.cached,
            possible=what.possible,
        )

    # -- when things go wrong ----------------------------------------------------------------------

    def _forget(self, gone: Gone) -> Gone:
        """The client disconnected: its grant and its running plant are cancelled."""
        if grant := self._grants.pop(gone.request, None):
            grant.cancel()
        if left := self.effect_runner.let_go(gone.request):
            reached, cached = left
            return replace(gone, reached=reached, cached=reached, planted=reached - cached)
        return gone

    def _release_all(self, *, renew: bool) -> list[Effect]:
        """All queued requests go through unpinned; a fresh core looks before it gives out a slot.

        Without `renew` it is not even told of engines and files, because it was that which failed.
        """
        waiting, self._grants = self._grants, {}
        catalog = tuple(self.placement.catalog)
        self.placement = Placement(*self.links, limits=self._limits)
        if renew:
            self._events.append(SnapshotsChanged(at=self.now(), snapshots=catalog))
        for link in self.links.values() if renew else ():
            if link.traits and link.up:
                up = EngineUp(at=self.now(), engine=link.engine, traits=link.traits, fresh=False)
                self._events.append(up)
        engine, released = self.front.engine, list[Effect]()
        for request, grant in waiting.items():
            if not grant.done():
                go = Forward(request=request, engine=engine, slot=None, reason=Reason.FAIL_OPEN)
                grant.set_result(go)
                released.append(go)
                self.metrics.decision(Reason.FAIL_OPEN)
        return released

    def _engine_up(self, link: EngineLink) -> None:
        self.metrics.probed(link.probed)
        link.probed = 0
        if link.traits:
            self.metrics.engine_up(link.engine, up=True)
            up = EngineUp(at=self.now(), engine=link.engine, traits=link.traits, fresh=link.fresh)
            self.post(up)
            self._say_it_came_or_went()
            if link.lacks_files:
                self.tasks.start(link.look_for_files(self._files_found))

    def _files_found(self, link: EngineLink) -> None:
        if link.traits:
            log.info("files_found", engine=link.engine)
            self.post(FilesFound(at=self.now(), engine=link.engine, traits=link.traits))

    def _engine_lost(self, link: EngineLink) -> None:
        self.metrics.engine_up(link.engine, up=False)
        if link.pulse.frozen:
            self.metrics.freezes.labels(engine=link.engine).inc()
        self.post(EngineLost(at=self.now(), engine=link.engine, returns=link.returns))
        self._say_it_came_or_went()

    def _task_failed(self, error: BaseException) -> None:
        log.error("task_failed", exc_info=error)
        self.metrics.fallback("task")


def _asker(of: Event | Effect) -> str:
    """The id of the request that an event or an effect is about, for the log."""
    return id_of(getattr(of, "request", RequestId("")))
