"""The driver: feeds the core with events, performs its effects, reports what came of them.

It is the one writer of slot state. `post` is synchronous and runs on the event loop's thread, so
there are no locks; whatever takes time runs in a task and comes back as another event.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, assert_never

from slotkeeper.core.effects import Effect, Forward, Observe, Plant, Report
from slotkeeper.core.events import (
    Arrived,
    EngineLost,
    EngineUp,
    Event,
    Gone,
    Observed,
    ObserveFailed,
    Planted,
)
from slotkeeper.core.placement import Placement
from slotkeeper.core.types import EngineId, Reason, RequestId
from slotkeeper.engine.client import EngineGoneError
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.tasks import Tasks

log = get_logger(__name__)


PATIENCE: Final = 3.0  # seconds that a request waits for an engine's probe, which takes a fifth of one


class Driver:
    """Owns the placement; everybody else asks it."""

    def __init__(self, links: Mapping[EngineId, EngineLink], metrics: Metrics) -> None:
        self.links = links
        self.metrics = metrics
        self.placement = Placement(*links)
        metrics.watch(lambda: self.placement)
        self.tasks = Tasks(self._task_failed)
        self.reports: Callable[[Report], None] = metrics.report
        self._events: deque[Event] = deque()
        self._busy = False
        self._grants: dict[RequestId, asyncio.Future[Forward]] = {}
        self._plants: dict[RequestId, asyncio.Task[None]] = {}

    @property
    def front(self) -> EngineLink:
        """The first engine that is ready, else the first that was named."""
        links = self.links.values()
        return next((link for link in links if link.ready), next(iter(links)))

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def start(self) -> None:
        for link in self.links.values():
            self.tasks.start(link.watch(self._engine_up, self._engine_lost))

    async def close(self) -> None:
        await self.tasks.close()
        for link in self.links.values():
            await link.client.close()

    async def awake(self) -> None:
        """Wait, but not for long, until some engine is ready."""
        if self.front.ready:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*(link.wake() for link in self.links.values()))

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

    def observe_soon(self, engine: EngineId) -> None:
        """Somebody changed slots behind the core's back: a slot action passed through us."""
        self.tasks.start(self._observe(Observe(engine=engine, delay=0.0)))

    # -- performing --------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        if isinstance(event, Gone):
            self._forget(event.request)
        try:
            effects = self.placement.on(event)
        except Exception:
            # Fail open: a bug of ours must not hold a request back that the engine would answer.
            log.exception("placement_failed", cause=type(event).__name__)
            self.metrics.fallback("placement")
            self._release_all(renew=not isinstance(event, EngineUp))
            return
        for effect in effects:
            try:
                self._perform(effect)
            except Exception:
                log.exception("effect_failed", effect=type(effect).__name__)
                self.metrics.fallback("effect")

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Forward():
                grant = self._grants.pop(effect.request, None)
                if grant and not grant.done():
                    grant.set_result(effect)
                self.metrics.decision(effect.reason)
            case Plant():
                self._plants[effect.request] = self.tasks.start(self._plant(effect))
            case Observe():
                self.tasks.start(self._observe(effect))
            case Report():
                self.reports(effect)
            case _:
                assert_never(effect)

    async def _plant(self, plant: Plant) -> None:
        computed: int | None = None
        link = self.links[plant.place.engine]
        try:
            result = await link.client.prefill(plant.tokens.ids(), plant.place.slot, headers=link.auth)
            computed = result.computed
            self.metrics.planted(plant.purpose, computed)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request goes on without it
            log.warning("plant_failed", purpose=plant.purpose.value, place=str(plant.place), error=str(error))
            self.metrics.fallback("plant")
        self._plants.pop(plant.request, None)
        self.post(Planted(at=self.now(), request=plant.request, computed=computed))

    async def _observe(self, look: Observe) -> None:
        if look.delay:
            await asyncio.sleep(look.delay)
        link, asked = self.links[look.engine], self.now()
        try:
            slots = await link.client.slots(headers=link.auth)
        except Exception as error:  # noqa: BLE001 - without an answer to it the core would never look again
            log.debug("slots_unseen", engine=look.engine, error=str(error))
            if isinstance(error, EngineGoneError):
                link.kick()
            elif link.slots_refused():
                self._engine_lost(link)
            self.post(ObserveFailed(at=self.now(), engine=look.engine))
            return
        link.slots_shown()
        self.post(Observed(at=self.now(), asked=asked, engine=look.engine, slots=slots))

    # -- when things go wrong ----------------------------------------------------------------------

    def _forget(self, request: RequestId) -> None:
        """The client left: nobody waits for a grant, and a running plant has lost its purpose."""
        if grant := self._grants.pop(request, None):
            grant.cancel()
        if plant := self._plants.pop(request, None):
            plant.cancel()

    def _release_all(self, *, renew: bool) -> None:
        """Everybody who waits goes through unpinned; a fresh core looks before it gives out a slot.

        Without `renew` it is not even told of the engines, because it was that which failed.
        """
        waiting, self._grants = self._grants, {}
        self.placement = Placement(*self.links)
        for link in self.links.values() if renew else ():
            if link.traits and link.up:
                up = EngineUp(at=self.now(), engine=link.engine, traits=link.traits, fresh=False)
                self._events.append(up)
        engine = self.front.engine
        for request, grant in waiting.items():
            if not grant.done():
                grant.set_result(
                    Forward(request=request, engine=engine, slot=None, reason=Reason.FAIL_OPEN, pin=False)
                )
                self.metrics.decision(Reason.FAIL_OPEN)

    def _engine_up(self, link: EngineLink) -> None:
        if link.traits:
            self.metrics.engine_up(link.engine, up=True)
            up = EngineUp(at=self.now(), engine=link.engine, traits=link.traits, fresh=link.fresh)
            self.post(up)

    def _engine_lost(self, link: EngineLink) -> None:
        self.metrics.engine_up(link.engine, up=False)
        self.post(EngineLost(at=self.now(), engine=link.engine))

    def _task_failed(self, error: BaseException) -> None:
        log.error("task_failed", exc_info=error)
        self.metrics.fallback("task")
