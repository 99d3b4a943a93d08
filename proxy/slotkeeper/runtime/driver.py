"""The driver: gives events to the scheduler, performs its effects, and posts their results as events.

`Driver` is the only writer of slot state. `post` is synchronous and runs on the event loop's thread, so
there are no locks. Work that takes time runs in a task and ends in another event.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, ParamSpec

from slotkeeper.api.errors import UpstreamFault
from slotkeeper.engine.answers import EngineGoneError
from slotkeeper.engine.client import EngineAddress
from slotkeeper.observe.gauges import EngineFigures, SlotFigures
from slotkeeper.observe.journal import Journal
from slotkeeper.observe.log import Seldom, get_logger, sayable
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.request_record import ClientFigures
from slotkeeper.runtime.engines import Engines, LinkMaker, Membership
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.render import LatestPrompts, NextTurns
from slotkeeper.runtime.slot_files import Snapshots
from slotkeeper.runtime.tasks import Tasks
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
    Poisoned,
    Pooled,
    Prefill,
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
    Announced,
    Arrived,
    Closing,
    EngineLost,
    EngineUp,
    Erased,
    Event,
    FilesFound,
    Gone,
    Observed,
    ObserveFailed,
    Planted,
    Rendered,
    RequestFailed,
    Restored,
    RoomSeen,
    Saved,
    SnapshotsChanged,
    TimerFired,
)
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.policies.router import RETRY_SECONDS
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import FLAGS, EngineTraits, Snapshot, SnapshotId
from slotkeeper.scheduler.snapshots.budgets import Budgets, FolderRoom, Limits
from slotkeeper.scheduler.state import EARLY
from slotkeeper.scheduler.types import (
    WITHOUT_PLACE,
    EngineId,
    Loading,
    PriorityAct,
    Reason,
    RequestId,
    Tier,
    id_of,
)
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
        self.links: Mapping[EngineId, EngineLink] = self.engines.links
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
        self.next_turns, self.latest_prompts = NextTurns(), LatestPrompts()
        self.numbers = count(1)  # numbers of requests: a client may send one id twice
        self.large_renders = asyncio.Semaphore(LARGE_RENDERS)
        self.learning: set[RequestId] = set()  # requests whose replies are being rendered
        self._renewal = Renewal(self.engines, self.membership, metrics, self._limits)
        self.placement = self._renewal.new_placement()
        self.reports: Callable[[Report], None] = metrics.report
        self._leaving: dict[RequestId, Callable[[int | None], None]] = {}  # see `when_released`
        self._events: deque[Event | None] = deque()  # None: a renewal is due
        self._busy = False
        self._grants: dict[RequestId, asyncio.Future[Forward]] = {}
        self._closing = False
        self._saved = asyncio.Event()
        self._register_figures()

    def _register_figures(self) -> None:
        """Let the metrics read the slots, the engines and the clients whenever they are asked."""
        self.metrics.watch(
            SlotFigures(lambda: self.placement),
            EngineFigures(lambda: self.membership.seen(self.placement)),
            ClientFigures(self.journal.clients),
        )
        self.journal.compares = self.metrics.compared

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

    def announce(self) -> None:
        """Have GET /slots read where a decision needs that, while the body of a request arrives.

        Never raises.
        """
        coming = Announced(at=self.now())
        try:
            needed = self.placement.needs_poll(coming.at)
        except Exception as error:  # noqa: BLE001 - of whatever kind the bug is
            self._renewal.failed(coming, error)
            return
        if needed:
            self.post(coming)

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

    def post(self, event: Event | None) -> None:
        """Give one event to the scheduler and perform the effects. Never raises.

        None: a new scheduler is due.
        """
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
        self.post(None)

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
                self.metrics.forwarded(go)
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


# -- the effects: each in its own task ---------------------------------------------------------------
#
# Every effect for whose result the scheduler waits ends in an event, also after an error.

LATE_RENDER_BYTES: Final = 32 << 20  # of the bodies that wait for their engine

Rendering = Callable[[], Coroutine[Any, Any, None]]
FileStep = Save | Restore | Erase
Housekeeping = Drop | Forget | Prove
Operation = (
    Prefill
    | Stop
    | FileStep
    | Housekeeping
    | SetTimer
    | Observe
    | AskAdapters
    | Render
    | LoadModel
    | UnloadModel
)


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
        self.lent: dict[RequestId, Mapping[str, str]] = {}  # clients' credentials, for plants until their end
        self._alarm: asyncio.Task[None] | None = None
        self._plants: dict[RequestId, asyncio.Task[None]] = {}
        self._reached: dict[RequestId, tuple[int, int]] = {}  # of running plants: token, cached

    def perform(self, effect: Operation) -> None:
        match effect:
            case Prefill():
                self._plants[effect.request] = self._tasks.start(self._plant(effect))
            case Stop():
                self._stop(effect)
            case Save() | Restore() | Erase():
                self._tasks.start(self._tend(effect))
            case Drop() | Forget() | Prove():
                self._tasks.start(self._keep_house(effect))
            case SetTimer():
                self._set_alarm(effect)
            case Observe():
                self._tasks.start(self._observe(effect))
            case AskAdapters():
                self._tasks.start(self._ask_adapters(effect))
            case Render():
                self.late_renders.start(effect.request)
            case LoadModel() | UnloadModel():
                self._swap(effect)

    def let_go(self, request: RequestId) -> tuple[int, int] | None:
        """Cancel the running plant of a request. File operations continue: the engine would not stop them.

        Returns the token that the plant had reached and how many of its tokens were cached; None if unknown.
        """
        if plant := self._plants.pop(request, None):
            plant.cancel()
        return self._reached.pop(request, None)

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

    async def _plant(self, plant: Prefill) -> None:
        computed, seconds, copied_seconds, cuts, counted, unsent = None, None, None, None, 0, True
        link = self._engines.links[plant.place.engine]
        auth = self.lent.get(plant.request) or link.auth

        def count(reached: int, cached: int) -> None:  # called during the plant: a stopped one counts too
            nonlocal counted
            self._metrics.planted(plant.purpose, reached - cached - counted, plant.request)
            counted = reached - cached
            if plant.request in self._plants:
                self._reached[plant.request] = reached, cached
            self._progress(plant.request, reached - cached)

        try:
            prompt = await link.prefill_prompt(plant.tokens, auth)
            unsent, called_at = False, time.monotonic()
            result = await link.client.prefill(
                prompt, plant.place.slot, headers=auth, progress=count, lora=plant.lora
            )
            computed, seconds, cuts = result.computed, result.seconds, result.cuts
            copied_seconds = max(0.0, time.monotonic() - called_at - seconds)
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
                copied_seconds=copied_seconds,
                unsent=unsent,
                cuts=cuts,
            )
        )

    async def _tend(self, step: FileStep) -> None:
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

    async def _keep_house(self, order: Housekeeping) -> None:
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
                self._metrics.pool_acts.labels(reason=what.act.value).inc()
                about = {"engine": what.engine, "act": what.act.value, "slot": what.slot, "cells": what.cells}
                log.info("kv_pool", request_id=id_of(what.request), **about)
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


def _about(plant: Prefill) -> dict[str, str]:
    """Return the log fields of a plant."""
    purpose, place = plant.purpose.value, str(plant.place)
    return {"request_id": id_of(plant.request), "purpose": purpose, "place": place}


def _tell(now: Budgets) -> None:
    about = {"hot_bytes": now.hot, "fits": now.fits, "largest_bytes": now.largest}
    log.info("snapshot_budgets", **about, cold_bytes=now.cold, hourly_bytes=now.hourly)
    if now.small:
        log.warning("few_snapshots_fit", **about, advice=now.advice)


def _failed(step: FileStep) -> Event:
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
        self.pending = False  # whether the present scheduler is not told of the engines yet

    def new_placement(self) -> Placement:
        return Placement(*(link.engine for link in self._engines.upstreams), limits=self._limits)

    def failed(self, event: Event, error: Exception) -> None:
        """Record that a decision failed."""
        log.error("placement_failed", request_id=asker(event), cause=type(event).__name__, exc_info=error)
        self._metrics.fallback("placement")

    def keep(self, placement: Placement) -> None:
        """Keep what a scheduler that is replaced knows of snapshots and their folders."""
        self._snapshots |= {snapshot.id: snapshot for snapshot in placement.catalog}
        self._rooms = placement.rooms or self._rooms

    def due_in(self) -> float | None:
        """Return after how many seconds to call `told`; None if that was returned already."""
        if self.pending:
            return None
        now = time.monotonic()
        self.pending, self._at = True, max(now, self._at + RENEWAL_SECONDS)
        return self._at - now

    def told(self, *, closing: bool) -> Told:
        """Return a new scheduler that knows everything, and the effects of each event that told it.

        If one of these events fails, another new scheduler is told of the rest.
        """
        events, self.pending = list(self._events(closing=closing)), False
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
