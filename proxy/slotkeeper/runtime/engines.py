"""All engines behind us, the models of routers among them: which one serves a request, and waiting for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from slotkeeper.api.errors import ClientFault
from slotkeeper.engine.answers import EngineError, EngineGoneError, Health
from slotkeeper.engine.client import ModelEntry
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.http import EngineAddress
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.router_link import RouterLink
from slotkeeper.runtime.tasks import Tasks, lifeline
from slotkeeper.scheduler.events import Event
from slotkeeper.scheduler.types import NO_ROUTER, EngineId, ModelName

PATIENCE: Final = 3.0  # seconds that a request waits for an engine's probe, which takes a fifth of one

LONGEST_NAME: Final = 100  # characters of a model's, in an error

LinkMaker = Callable[[EngineId, EngineAddress, EngineFlags | None], EngineLink]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Hearers:
    """Who is told when an engine comes or goes, and what routers say."""

    on_up: Callable[[EngineLink], None]
    on_lost: Callable[[EngineLink], None]
    post: Callable[[Event], None]


class Engines:
    """The lines to them. Those of a router's models come and go with its listing."""

    def __init__(
        self,
        links: Mapping[EngineId, EngineLink],
        tasks: Tasks,
        metrics: Metrics,
        *,
        wait: float,
        back_by: Callable[[ModelName], float | None],
        new_link: LinkMaker | None = None,
        api_key: str | None = None,
    ) -> None:
        """`links`: to the addresses that were named. `wait`: seconds, for an engine that has ended.

        `back_by`: until when the scheduler waits for one of this model. Without `new_link` a router is
        passed through, and its models are left to it.
        """
        self.links = dict(links)
        self.routers: dict[EngineId, RouterLink] = {}
        self._tasks = tasks
        self._metrics = metrics
        self._wait = wait
        self._back_by = back_by
        self._new_link = new_link
        self._api_key = api_key
        self._tasks_of: dict[EngineId, list[asyncio.Task[None]]] = {}
        self._roused: set[EngineId] = set()  # sleeping engines that are loading their models for us
        self._came_or_went = asyncio.Event()  # the next engine that does
        self._hearers = _Hearers(lambda _: None, lambda _: None, lambda _: None)
        self._watching = False

    def __repr__(self) -> str:
        return f"<Engines {', '.join(self.links)}>"

    def watch(
        self,
        on_up: Callable[[EngineLink], None],
        on_lost: Callable[[EngineLink], None],
        post: Callable[[Event], None],
    ) -> None:
        """Watch all of them from now on; `post` takes what routers say of their models."""

        def told(event: Event) -> None:
            post(event)
            self.came_or_went()

        self._hearers, self._watching = _Hearers(on_up, on_lost, told), True
        for link in self.upstreams:
            self._join(link)

    def _join(self, link: EngineLink) -> None:
        self._watched(link)
        life = lifeline(link.address.base, link.doubt)
        self._tasks_of[link.engine].append(self._tasks.start(life))

    def _watched(self, link: EngineLink) -> None:
        heard = self._hearers
        watch = link.watch(heard.on_up, heard.on_lost, self._router_found)
        self._tasks_of[link.engine] = [self._tasks.start(watch)]

    def _model_added(self, engine: EngineId, entry: ModelEntry) -> EngineLink:
        if self._new_link is None:
            raise AssertionError("routers are followed only where lines can be made")
        front = self.links[EngineId(EngineAddress.of(engine).base)]
        address = EngineAddress(front.address.base, entry.name)
        link = self.links[engine] = self._new_link(engine, address, entry.flags)
        link.listed = False  # until that is said
        self._watched(link)
        return link

    def _forget(self, link: EngineLink) -> None:
        link.part(self._hearers.on_lost)
        self.links.pop(link.engine, None)
        for task in self._tasks_of.pop(link.engine, ()):
            task.cancel()
        self._tasks.start(link.client.close())

    def _router_found(self, front: EngineLink) -> None:
        if front.engine in self.routers or self._new_link is None:
            return
        log.info("router_found", engine=front.engine)
        router = self.routers[front.engine] = RouterLink(
            front,
            api_key=self._api_key,
            tasks=self._tasks,
            metrics=self._metrics,
            post=self._hearers.post,
            added=self._model_added,
            removed=self._forget,
            lost=self._hearers.on_lost,
        )
        self._tasks_of[front.engine].append(self._tasks.start(self._followed(router)))

    def add(self, link: EngineLink) -> None:
        """One more whose address was named."""
        self.links[link.engine] = link
        if self._watching:
            self._join(link)

    def remove(self, link: EngineLink) -> None:
        """One that is not used any more, with its models if it is a router. Nothing may run there."""
        for other in [one for one in self.links.values() if EngineAddress.of(one.engine).base == link.engine]:
            self._forget(other)
        self.came_or_went()

    async def _followed(self, router: RouterLink) -> None:
        try:
            await router.watch()
        finally:
            self.routers.pop(router.front.engine, None)
            await router.close()

    async def close(self) -> None:
        for link in self.links.values():
            await link.client.close()
        for router in self.routers.values():
            await router.close()

    # -- which one ---------------------------------------------------------------------------------

    @property
    def upstreams(self) -> list[EngineLink]:
        """Those whose addresses were named: engines, and routers themselves."""
        return [link for link in self.links.values() if not link.address.model]

    def model_of(self, named: Any) -> ModelName:
        """Which model of a router a request means that names it so; NO_ROUTER where none has that name."""
        routers = self.routers.values() if isinstance(named, str) else ()
        models = (router.model_of(named) for router in routers)
        return next((model for model in models if model), NO_ROUTER)

    async def newest_model_of(self, named: Any) -> ModelName:
        """The same; a name that is not known is looked for in new listings."""
        if not isinstance(named, str) or self.model_of(named):
            return self.model_of(named)
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*(router.next_look() for router in self.routers.values()))
        return self.model_of(named)

    def check_listed(self, link: EngineLink, named: Any) -> None:
        """Raises ClientFault for a model that the router does not list, before a request for it goes there.

        A router knows models under more names, and would give the request a slot that we did not choose.
        """
        if link.routes and isinstance(named, str) and not self.model_of(named):
            name = named[:LONGEST_NAME]
            raise ClientFault(f"model '{name}' not found: name one as GET /v1/models lists it")

    def of(self, model: ModelName) -> list[EngineLink]:
        return [link for link in self.links.values() if link.address.model == model]

    def front(self, model: ModelName = NO_ROUTER) -> EngineLink:
        """The first engine of this model that is ready, else the first of them, else the first named.

        One that is being drained only where there is no other.
        """
        links = sorted(self.of(model), key=lambda link: link.draining)
        ready = (link for link in links if link.ready)
        return next(ready, None) or next(iter(links or self.links.values()))

    def router_of(self, engine: EngineId) -> RouterLink:
        """The router whose model this is. Raises KeyError if that is gone."""
        return self.routers[EngineId(EngineAddress.of(engine).base)]

    def _there(self, link: EngineLink) -> bool:
        """Whether requests can be placed: it is ready, or a router whose models are known."""
        router = self.routers.get(link.engine)
        followed = router is not None and router.reached
        return link.ready or (link.health is Health.ROUTER and (followed or self._new_link is None))

    # -- waiting -----------------------------------------------------------------------------------

    def came_or_went(self) -> None:
        """One did, or what waits for it may have lost its purpose."""
        self._came_or_went.set()
        self._came_or_went = asyncio.Event()

    async def serving(self, model: ModelName, wanted: Callable[[], bool]) -> EngineLink:
        """The line to an engine of a router's model, once it is loaded, as long as that is still `wanted`."""
        while not (link := self.front(model)).ready and model and wanted():
            await self._came_or_went.wait()
        return link

    async def awake(self, since: float, model: ModelName = NO_ROUTER, latest: float = inf) -> None:
        """Wait, but not for long, until an engine is ready, and none may have been restarted unseen.

        For one that has ended and is expected back it waits longer, counted from `since`. For a model that
        is not loaded the request waits in the scheduler. Nothing is waited for after the moment `latest`.
        """
        doubtful = [link for link in self.of(model) if link.doubtful]
        if self._there(self.front(model)) and not doubtful:
            return
        if not all(link.pulse.frozen for link in self.links.values()):
            await self._probed(doubtful, model)
        if not model:
            await self._returned(since, latest)

    def rouse(self, model: ModelName = NO_ROUTER) -> None:
        """Have engines that sleep load their models, if no other is ready, so that a slot can be chosen.

        Any task would wake them, but the slot that it takes is then unknown, and nothing is restored for it.
        """
        for link in self.of(model) if not self.front(model).ready else ():
            if link.health is Health.SLEEPING and link.engine not in self._roused:
                self._roused.add(link.engine)
                self._tasks.start(self._rouse(link))

    async def _rouse(self, link: EngineLink) -> None:
        try:
            await link.client.rouse(headers=link.auth)
        except (EngineError, EngineGoneError) as error:
            log.warning("engine_not_roused", engine=link.engine, error=str(error))
        finally:
            self._roused.discard(link.engine)
            link.kick()

    async def _probed(self, doubtful: list[EngineLink], model: ModelName) -> None:
        starting = [] if model else self.upstreams
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*(link.settle() for link in doubtful))
                if not self._there(self.front(model)):
                    await asyncio.gather(*(link.wake() for link in starting))

    def expects(self, model: ModelName = NO_ROUTER) -> bool:
        """Whether none is ready, and one that has ended should be back soon."""
        coming = any(link.coming for link in self.of(model))
        return not self._there(self.front(model)) and (coming or self._back_by(model) is not None)

    def may_serve(self, model: ModelName) -> bool:
        """Whether one is ready, or expected."""
        return self.front(model).ready or self._back_by(model) is not None

    def has_other(self, engine: EngineId, model: ModelName) -> bool:
        """Whether another engine of this model can take a request."""
        return any(link.ready and not link.draining for link in self.of(model) if link.engine != engine)

    async def _returned(self, since: float, latest: float = inf) -> None:
        """Wait until some engine is ready: all that come while one is expected wait for the same time."""
        until = min(since + self._wait if self.expects() else since, latest)
        while not self._there(self.front()) and any(link.returns for link in self.upstreams):
            if until <= time.monotonic():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(until - time.monotonic()):
                    await self._came_or_went.wait()

    async def comes_back(self, link: EngineLink) -> bool:
        """After a call that it did not answer: whether it had ended, and some engine is ready now."""
        model = link.address.model
        if not await link.was_lost(link.losses):
            return False
        if not model:
            await self._returned(time.monotonic())
        return bool(model) or self.front().ready
