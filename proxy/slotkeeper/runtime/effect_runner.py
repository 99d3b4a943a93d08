"""Performs the scheduler's effects: reports at once, all others each in its own task.

Every effect for whose result the scheduler waits ends in an event, also after an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from slotkeeper.api.errors import UpstreamFault
from slotkeeper.engine.answers import EngineGoneError
from slotkeeper.engine.http import EngineAddress
from slotkeeper.observe.log import Seldom, get_logger, sayable
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.engines import Engines
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.slot_files import Snapshots
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.budgets import Budgets
from slotkeeper.scheduler.effects import (
    AskAdapters,
    Budgeted,
    Drained,
    Drop,
    Effect,
    Erase,
    Forget,
    Forward,
    Learned,
    LoadModel,
    Observe,
    Plant,
    Poisoned,
    Pooled,
    Prove,
    Ranked,
    Refuse,
    Released,
    Render,
    Report,
    Restore,
    Save,
    SetTimer,
    Stop,
    UnloadModel,
)
from slotkeeper.scheduler.events import (
    AdaptersSeen,
    Erased,
    Event,
    Observed,
    ObserveFailed,
    Planted,
    Rendered,
    Restored,
    Saved,
    TimerFired,
)
from slotkeeper.scheduler.router import RETRY_SECONDS
from slotkeeper.scheduler.state import EARLY
from slotkeeper.scheduler.types import Loading, RequestId, id_of

log = get_logger(__name__)

LATE_RENDER_BYTES: Final = 32 << 20  # of the bodies that wait for their engine

Rendering = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class LateRenders:
    """Requests that cannot be rendered because their engine is not known yet: they wait for it.

    The last of them are kept: at most EARLY, with bodies of at most LATE_RENDER_BYTES together.
    """

    tasks: Tasks
    post: Callable[[Event], None]
    _kept: dict[RequestId, tuple[int, Rendering]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size(self) -> int:
        """The bytes of their bodies."""
        return sum(size for size, _ in self._kept.values())

    def keep(self, request: RequestId, size: int, rendering: Rendering) -> None:
        """Keep a request. `size`: bytes of its body. `rendering` must end in `Rendered`."""
        self._kept[request] = size, rendering
        while len(self._kept) > EARLY or self.size > LATE_RENDER_BYTES:
            del self._kept[next(iter(self._kept))]

    def start(self, request: RequestId) -> None:
        """Render a request now. If it is not kept any more, its tokens stay unknown."""
        _, rendering = self._kept.pop(request, (0, None))
        if rendering is None:
            self.post(Rendered(at=time.monotonic(), request=request, prompt=None))
        else:
            self.tasks.start(rendering())


class EffectRunner:
    """Performs the scheduler's effects on engines and files."""

    def __init__(
        self,
        engines: Engines,
        metrics: Metrics,
        tasks: Tasks,
        post: Callable[[Event], None],
        snapshots: Snapshots | None,
        *,
        lost: Callable[[EngineLink], None],
        progress: Callable[[RequestId, int], None] = lambda _, __: None,
    ) -> None:
        """`progress` is called with the tokens that the plant for a request has computed so far."""
        self._engines = engines
        self._metrics = metrics
        self._seldom = Seldom(log)
        self._tasks = tasks
        self._post = post
        self._snapshots = snapshots
        self._lost = lost
        self._progress = progress
        self.late_renders = LateRenders(tasks, post)
        self._lent: dict[RequestId, Mapping[str, str]] = {}
        self._alarm: asyncio.Task[None] | None = None
        self._plants: dict[RequestId, asyncio.Task[None]] = {}
        self._reached: dict[RequestId, tuple[int, int]] = {}  # of running plants: token, cached

    def perform(self, effect: Effect) -> None:
        match effect:
            case Plant():
                self._plants[effect.request] = self._tasks.start(self._plant(effect))
            case Stop():
                self._stop(effect)
            case Save() | Restore() | Erase():
                self._tasks.start(self._tend(effect))
            case Drop() | Forget() | Prove():
                self._tasks.start(self._keep_house(effect))
            case SetTimer():
                self._set_alarm(effect)
            case Observe() | AskAdapters():
                self._tasks.start(self._ask(effect))
            case Render():
                self.late_renders.start(effect.request)
            case LoadModel() | UnloadModel():
                self._swap(effect)
            case (
                Forward()
                | Drained()
                | Refuse()
                | Report()
                | Released()
                | Learned()
                | Budgeted()
                | Poisoned()
                | Pooled()
                | Ranked()
            ):
                raise AssertionError(f"{type(effect).__name__} is for the driver itself")

    async def _ask(self, effect: Observe | AskAdapters) -> None:
        if isinstance(effect, Observe):
            await self._observe(effect)
        else:
            await self._ask_adapters(effect)

    def let_go(self, request: RequestId) -> tuple[int, int] | None:
        """Cancel the running plant of a request. File operations continue: the engine would not stop them.

        Returns the token that the plant had reached and how many of its tokens were cached; None if unknown.
        """
        if plant := self._plants.pop(request, None):
            plant.cancel()
        return self._reached.pop(request, None)

    def lend(self, request: RequestId, auth: Mapping[str, str]) -> None:
        """Use the client's credential for plants of this request, until `forget`."""
        if auth:
            self._lent[request] = auth

    def forget(self, request: RequestId) -> None:
        self._lent.pop(request, None)

    def computed(self, request: RequestId) -> int:
        """Return the tokens that a running plant for this request has computed so far."""
        reached, cached = self._reached.get(request, (0, 0))
        return reached - cached

    def _stop(self, stop: Stop) -> None:
        """Stop a plant and post its answer; if it has just ended, its own answer is already posted."""
        if stop.request in self._plants:
            self.let_go(stop.request)
            now = time.monotonic()
            self._post(Planted(at=now, request=stop.request, computed=None, stopped=True))

    @property
    def planting(self) -> int:
        return len(self._plants)

    async def _plant(self, plant: Plant) -> None:
        computed, seconds, cuts, counted, unsent = None, None, None, 0, True
        link = self._engines.links[plant.place.engine]
        auth = self._lent.get(plant.request) or link.auth

        def count(reached: int, cached: int) -> None:  # called during the plant: a stopped one counts too
            nonlocal counted
            self._metrics.planted(plant.purpose, reached - cached - counted, plant.request)
            counted = reached - cached
            if plant.request in self._plants:
                self._reached[plant.request] = reached, cached
            self._progress(plant.request, reached - cached)

        try:
            prompt = await link.prefill_prompt(plant.tokens, auth)
            unsent = False
            result = await link.client.prefill(
                prompt, plant.place.slot, headers=auth, progress=count, lora=plant.lora
            )
            computed, seconds, cuts = result.computed, result.seconds, result.cuts
            count(result.computed + result.cached, result.cached)
            log.debug("planted", **_about(plant), tokens=len(plant.tokens), computed=computed)
        except Exception as error:  # noqa: BLE001 - the request continues without the plant
            if link.traits and 0 < link.traits.n_ctx <= len(plant.tokens):  # its request is refused too
                log.debug("plant_too_long", **_about(plant))
            else:
                log.warning("plant_failed", **_about(plant), error=sayable(error))
                self._metrics.fallback("plant")
        self._plants.pop(plant.request, None)
        self._reached.pop(plant.request, None)
        self._post(
            Planted(
                at=time.monotonic(),
                request=plant.request,
                computed=computed,
                wasted=counted if computed is None else 0,
                seconds=seconds,
                unsent=unsent,
                cuts=cuts,
            )
        )

    async def _tend(self, step: Save | Restore | Erase) -> None:
        """Perform a file operation, and post its result. Errors are results too."""
        link, snapshots = self._engines.links[step.place.engine], self._snapshots
        if snapshots is None:
            raise AssertionError("the scheduler plans no file operations without a store")
        try:
            match step:
                case Save():
                    ended: Event = await snapshots.save(link, step, self._tasks.start)
                case Restore():
                    ended = await snapshots.restore(link, step)
                case Erase():
                    ended = await snapshots.erase(link, step)
        except Exception:  # after any error: a request may wait for the result
            name, place = type(step).__name__, str(step.place)
            log.exception("step_failed", request_id=id_of(step.request), step=name, place=place)
            self._metrics.fallback("files")
            ended = _failed(step)
        self._post(ended)

    async def _keep_house(self, order: Drop | Forget | Prove) -> None:
        if self._snapshots is None:
            return
        match order:
            case Drop():
                await self._snapshots.drop(order)
            case Forget():
                await self._snapshots.unlist(order)
            case Prove():
                await self._snapshots.prove(order)

    def _swap(self, effect: LoadModel | UnloadModel) -> None:
        link = self._engines.links[effect.engine]
        router = self._engines.router_of(effect.engine)
        if isinstance(effect, LoadModel):
            router.load(link, (self._engines.links[engine] for engine in effect.aside))
        else:
            router.unload(link)

    def _set_alarm(self, wake: SetTimer) -> None:
        """Replace the timer: the old one would fire later, and is set again if it is still needed."""
        if self._alarm:
            self._alarm.cancel()
        self._alarm = self._tasks.start(self._wake(wake))

    async def _wake(self, wake: SetTimer) -> None:
        await asyncio.sleep(wake.delay)
        self._alarm = None
        self._post(TimerFired(at=time.monotonic()))

    async def _ask_adapters(self, ask: AskAdapters) -> None:
        link, now = self._engines.links.get(ask.engine), time.monotonic()
        if link is None or not link.listed:  # its model is about to be unloaded: a call would hang
            self._post(AdaptersSeen(at=now, asked=now, engine=ask.engine, adapters=None))
        else:
            self._post(await link.see_adapters())

    async def _observe(self, look: Observe) -> None:
        if look.delay:
            await asyncio.sleep(look.delay)
        link, asked = self._engines.links.get(look.engine), time.monotonic()
        if link is None or not link.listed:  # its model is being unloaded: a call would hang
            self._post(ObserveFailed(at=asked, engine=look.engine))
            return
        try:
            slots = await link.client.slots(headers=link.auth)
        except Exception as error:  # noqa: BLE001 - without an event the scheduler never looks again
            log.debug("slots_unseen", engine=look.engine, error=str(error))
            if isinstance(error, EngineGoneError):
                link.kick()
            elif link.slots_refused():
                self._lost(link)
            self._post(ObserveFailed(at=time.monotonic(), engine=look.engine))
            return
        link.slots_shown()
        self._post(Observed(at=time.monotonic(), asked=asked, engine=look.engine, slots=slots))

    # -- reports -----------------------------------------------------------------------------------

    def note(self, what: Pooled | Poisoned | Ranked | Budgeted) -> None:
        """Count and log an effect that only reports."""
        match what:
            case Pooled():
                self._pooled(what)
            case Poisoned():
                self._poisoned(what)
            case Ranked():
                self._ranked(what)
            case Budgeted():
                _tell(what.budgets)
                if self._snapshots:
                    self._snapshots.store.limit_cold(what.budgets.cold)

    def _poisoned(self, what: Poisoned) -> None:
        place, why = str(what.place) if what.place else None, what.why.value
        self._metrics.poisoned.labels(reason=why).inc()
        self._seldom.warning(
            "slot_poisoned",
            request_id=id_of(what.request),
            place=place,
            reason=why,
            cached=what.cached,
            possible=what.possible,
        )

    def _pooled(self, what: Pooled) -> None:
        self._metrics.pool_acts.labels(reason=what.act.value).inc()
        about = {"engine": what.engine, "act": what.act.value, "slot": what.slot, "cells": what.cells}
        log.info("kv_pool", request_id=id_of(what.request), **about)

    def _ranked(self, what: Ranked) -> None:
        self._metrics.priority_acts.labels(reason=what.act.value).inc()
        log.info(
            "priority",
            request_id=id_of(what.request),
            act=what.act.value,
            priority=what.priority.value,
            other=id_of(what.other) if what.other else None,
            engine=what.engine,
            waited=round(what.waited, 3),
            gain=None if what.gain is None else round(what.gain, 3),
            loss=None if what.loss is None else round(what.loss, 3),
        )


def _about(plant: Plant) -> dict[str, str]:
    """Return the log fields of a plant."""
    purpose, place = plant.purpose.value, str(plant.place)
    return {"request_id": id_of(plant.request), "purpose": purpose, "place": place}


def _tell(now: Budgets) -> None:
    about = {"hot_bytes": now.hot, "fits": now.fits, "largest_bytes": now.largest}
    log.info("snapshot_budgets", **about, cold_bytes=now.cold, hourly_bytes=now.hourly)
    if now.small:
        log.warning("few_snapshots_fit", **about, advice=now.advice)


def _failed(step: Save | Restore | Erase) -> Event:
    """Return the answer to a step whose outcome is unknown."""
    now = time.monotonic()
    match step:
        case Save():
            return Saved(at=now, request=step.request, snapshot=None, lasting=True)
        case Restore():
            return Restored(at=now, request=step.request, outcome=Loading.LOST)
        case Erase():
            return Erased(at=now, request=step.request, ok=False)


def fault_of(what: Refuse | Ranked) -> UpstreamFault:
    """Return the error for the client of a refused request."""
    if isinstance(what, Ranked):
        return UpstreamFault(
            f"no slot was free within {what.waited:.1f} s, and X-Slotkeeper-Max-Wait allows no more; "
            "nothing of this request was sent to an engine",
            status=503,
            retry_after=what.retry_after,
        )
    model = EngineAddress.of(what.engine).model
    return UpstreamFault(
        f"the model {model} could not be loaded; the log of its router says why",
        status=503,
        retry_after=int(RETRY_SECONDS),
    )
