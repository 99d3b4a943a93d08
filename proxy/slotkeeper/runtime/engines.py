"""All engines, also models of routers: which are in use, which serves a request, how long to wait for it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Final
from urllib.parse import unquote

from slotkeeper.addresses import NamedUpstream, UpstreamsError
from slotkeeper.api.errors import ClientFault
from slotkeeper.api.request import PromptSize, named_in_form
from slotkeeper.engine.answers import EngineError, EngineGoneError, Health
from slotkeeper.engine.client import UPSTREAM, VERSIONLESS, EngineAddress
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.routers.router_client import ModelEntry, RouterClient
from slotkeeper.engine.routers.swap_client import SwapClient
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.states import EngineSeen, EngineState, Service, engine_state, service
from slotkeeper.runtime.images import Pictures
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.router_link import RouterLink
from slotkeeper.runtime.tasks import Tasks, lifeline
from slotkeeper.scheduler.events import DrainAsked, EnginesNamed, Event
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.types import NO_ROUTER, EngineId, ModelName, Reason

LEAST_WAIT: Final = 3.0  # seconds that a request waits for a probe, also with a shorter `wait`
BEING_PROBED: Final = "the engine is being probed"
LISTING_SECONDS: Final = 3.0  # that a request waits for new listings of routers

SHORT_TOKEN: Final = 16  # characters; a text that has more for each token of the context is looked at closer

LONGEST_NAME: Final = 100  # characters of a model's name in an error text
WORDS: Final = 8  # between slashes, in a model's name: a path of thousands would take a tenth of a second

LinkMaker = Callable[[EngineId, EngineAddress, EngineFlags | None], EngineLink]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Hearers:
    """Callbacks for an engine that comes up or is lost, and for events of routers."""

    on_up: Callable[[EngineLink], None]
    on_lost: Callable[[EngineLink], None]
    post: Callable[[Event], None]


class Engines:
    """The links to all engines. The links to a router's models come and go with its listing."""

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
        """`links` go to the addresses in the settings. `wait`: seconds to wait for an engine that has ended.

        `back_by` returns until when the scheduler waits for an engine of a model; None: it expects none back.
        Without `new_link` requests to a router are passed through, and it chooses its models itself.
        """
        self.links = dict(links)
        self.routers: dict[EngineId, RouterLink] = {}
        self.pictures = Pictures()
        self._tasks = tasks
        self._metrics = metrics
        self._wait = wait
        self._back_by = back_by
        self._new_link = new_link
        self._api_key = api_key
        self._tasks_of: dict[EngineId, list[asyncio.Task[None]]] = {}
        self._roused: set[EngineId] = set()  # sleeping engines that are loading their models for us
        self._change = asyncio.Event()  # set when the next engine comes or goes
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
        """Watch all engines from now on. `post` takes the events of routers."""

        def post_and_wake(event: Event) -> None:
            post(event)
            self.changed()

        self._hearers, self._watching = _Hearers(on_up, on_lost, post_and_wake), True
        for link in self.upstreams:
            self._join(link)

    def _join(self, link: EngineLink) -> None:
        self._watched(link)
        life = lifeline(link.address.base, link.doubt)
        self._tasks_of[link.engine].append(self._tasks.start(life))

    def _watched(self, link: EngineLink) -> None:
        hearers = self._hearers
        link.images.pictures = self.pictures
        link.awaited = lambda: self._back_by(link.address.model) is not None
        link.changed = self.changed
        watch = link.watch(hearers.on_up, hearers.on_lost, self._router_found)
        self._tasks_of[link.engine] = [self._tasks.start(watch)]

    def _model_added(self, engine: EngineId, entry: ModelEntry) -> EngineLink:
        if self._new_link is None:
            raise AssertionError("routers can be followed only with a `new_link`")
        front = self.links[EngineId(EngineAddress.of(engine).base)]
        swaps = front.health is Health.SWAPPER
        address = EngineAddress(front.address.base, entry.name, swaps=swaps)
        link = self.links[engine] = self._new_link(engine, address, entry.flags)
        link.listed = False  # until the listing says otherwise
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
        log.info("router_found", engine=front.engine, kind=front.health.value)
        speaks = SwapClient if front.health is Health.SWAPPER else RouterClient
        router = self.routers[front.engine] = RouterLink(
            front,
            client=speaks(front.address.base, api_key=self._api_key),
            tasks=self._tasks,
            metrics=self._metrics,
            post=self._hearers.post,
            added=self._model_added,
            removed=self._forget,
            lost=self._hearers.on_lost,
        )
        self._tasks_of[front.engine].append(self._tasks.start(self._followed(router)))

    def add(self, link: EngineLink) -> None:
        """Add an engine that the settings now name."""
        self.links[link.engine] = link
        if self._watching:
            self._join(link)

    def remove(self, link: EngineLink) -> None:
        """Remove an engine, and its models if it is a router. Nothing may run there."""
        for other in [one for one in self.links.values() if EngineAddress.of(one.engine).base == link.engine]:
            self._forget(other)
        self.changed()

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

    # -- choice of an engine -----------------------------------------------------------------------

    @property
    def upstreams(self) -> list[EngineLink]:
        """The links to the addresses in the settings: engines, and routers themselves."""
        return [link for link in self.links.values() if not link.address.model]

    def model_of(self, named: Any) -> ModelName:
        """Return the model of a router that a request means by this name; NO_ROUTER if none has it."""
        routers = self.routers.values() if isinstance(named, str) else ()
        models = (router.model_of(named) for router in routers)
        return next((model for model in models if model), NO_ROUTER)

    def route_at(self, path: str) -> tuple[ModelName, str]:
        """Return the model of llama-swap that a raw path names, and the path at that model's own server.

        That is /upstream/MODEL/PATH. /v/PATH names no model, and is PATH there. Of any other path it returns
        NO_ROUTER and the path itself.
        """
        if path in VERSIONLESS and self.router_with(NO_ROUTER, swaps=True):
            return NO_ROUTER, path.removeprefix("/v")
        words = path.removeprefix(UPSTREAM).split("/") if path.startswith(UPSTREAM) else []
        for end in range(min(len(words), WORDS), 0, -1):  # a name may contain slashes
            if model := self.model_of(unquote("/".join(words[:end]))):
                return model, "/".join(["", *words[end:]])
        return NO_ROUTER, path

    def model_of_form(self, headers: Mapping[str, str], form: bytes | None) -> ModelName:
        """Return the model of llama-swap that a form names. llama-server's router reads no forms."""
        if self.router_with(NO_ROUTER, swaps=True) is None:
            return NO_ROUTER
        model = self.model_of(named_in_form(headers.get("Content-Type", ""), form or b""))
        return model if self.router_with(model, swaps=True) else NO_ROUTER

    async def newest_model_of(self, named: Any) -> ModelName:
        """Return the same as `model_of`, but look for an unknown name in new listings."""
        if not self.routers:
            return NO_ROUTER
        if not isinstance(named, str) or self.model_of(named):
            return self.model_of(named)
        with suppress(TimeoutError):
            async with asyncio.timeout(LISTING_SECONDS):
                await asyncio.gather(*(router.next_look() for router in self.routers.values()))
        return self.model_of(named)

    def check_listed(self, link: EngineLink, named: Any) -> None:
        """Raise ClientFault for a model that the router does not list, before the request is sent there.

        A router knows models under more names, and would give the request a slot that we did not choose.
        llama-swap lists all names of its models; other names are those of its peers and selectors, or lead to
        an error.
        """
        router = self.routers.get(link.engine)
        if router is not None and router.client.swaps:
            return
        if isinstance(named, str) and not self.model_of(named):
            name = named[:LONGEST_NAME]
            raise ClientFault(f"model '{name}' not found: name one as GET /v1/models lists it")

    def of(self, model: ModelName) -> list[EngineLink]:
        """Return the links to the engines of a router's model; with NO_ROUTER the same as `upstreams`."""
        return [link for link in self.links.values() if link.address.model == model]

    async def least_too_long(
        self, size: PromptSize, model: ModelName, auth: Mapping[str, str]
    ) -> tuple[int, int] | None:
        """Return the least tokens of a prompt and the largest context, if it fits no engine of the model.

        None: it may fit one, for all that is known without tokenizing it.
        """
        links = self.of(model)
        contexts = [link.traits.n_ctx if link.ready and link.traits else 0 for link in links]
        context = max(contexts, default=0)
        if not all(contexts) or size.tokens(SHORT_TOKEN) <= context:
            return None
        longest = [await link.longest_token(auth) for link in links]
        if not all(longest):
            return None
        least = size.tokens(max(filter(None, longest)))
        return (least, context) if least > context else None

    def front(self, model: ModelName = NO_ROUTER) -> EngineLink:
        """Return the first ready engine of this model, else its first engine, else the first of all.

        A draining engine is returned only if there is no other.
        """
        links = sorted(self.of(model), key=lambda link: link.draining)
        ready = (link for link in links if link.ready)
        return next(ready, None) or next(iter(links or self.links.values()))

    def router_of(self, engine: EngineId) -> RouterLink:
        """Return the router of this model. Raises KeyError if the router is gone."""
        return self.routers[EngineId(EngineAddress.of(engine).base)]

    def router_with(self, model: ModelName, *, swaps: bool) -> RouterLink | None:
        """Return the router that has this model; without a model, the first one that is (not) llama-swap."""
        for router in self.routers.values():
            if router.client.swaps is swaps and (not model or router.model_of(model)):
                return router
        return None

    def _there(self, link: EngineLink) -> bool:
        """Whether requests can be placed: the engine is ready, or it is a router whose models are known."""
        router = self.routers.get(link.engine)
        followed = router is not None and router.reached
        return link.ready or (link.health.routes and (followed or self._new_link is None))

    @property
    def drained(self) -> bool:
        """Whether no engine takes requests, because their operator has drained all of them."""
        return all(link.draining for link in self.upstreams)

    def readiness(self) -> tuple[bool, str]:
        """Return whether this sidecar can serve now, and a sentence.

        A sleeping engine counts as ready, because only a request wakes it. So does an engine on which nothing
        can ever be placed as it is: its requests go through as they come.
        """
        links = self.upstreams
        if self.drained:
            return False, "all engines are drained"
        if any(self._there(link) for link in links):
            return True, "ready"
        if any(link.health is Health.SLEEPING for link in links):
            return True, "asleep: the next request wakes it"
        answering = [link for link in links if link.health is Health.OK]
        if any(link.obstacle is not Reason.NOT_PROBED for link in answering):
            return True, "ready, but requests go through unplaced: the log says why (engine_probe_failed)"
        return False, BEING_PROBED if answering else "no engine is up"

    # -- waiting -----------------------------------------------------------------------------------

    def changed(self) -> None:
        """Wake the requests that wait for an engine: an engine came or went, or a request may be gone."""
        self._change.set()
        self._change = asyncio.Event()

    async def serving(self, model: ModelName, wanted: Callable[[], bool]) -> EngineLink:
        """Return `front`. For a router's model, wait until it is ready or no longer `wanted`."""
        while not (link := self.front(model)).ready and model and wanted():
            await self._change.wait()
        return link

    async def awake(self, since: float, model: ModelName = NO_ROUTER, latest: float = inf) -> None:
        """Wait until an engine is ready and no engine may have restarted unnoticed.

        That is: while an engine loads or is probed, or has ended and is expected back; at most `wait` seconds
        from `since`, and until `latest`. Experiments of a probe in progress are left out. For a model of a
        router that is not loaded, the request waits in the scheduler instead.
        """
        for link in self.of(model):
            link.hurry()
        doubtful = [link for link in self.of(model) if link.doubtful]
        if self._there(self.front(model)) and not doubtful:
            return
        if not all(link.pulse.frozen for link in self.links.values()):
            until = max(since + self._wait, time.monotonic() + LEAST_WAIT)
            await self._probed(doubtful, model, min(until, latest))
        if not model:
            await self._returned(since, latest)

    def rouse(self, model: ModelName = NO_ROUTER) -> None:
        """Have sleeping engines load their models, if no engine is ready, so that a slot can be chosen.

        Any task would wake them, but its slot would be unknown, and nothing would be restored for it.
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

    async def _probed(self, doubtful: list[EngineLink], model: ModelName, until: float) -> None:
        """Wait for the looks in progress, probes included, until one engine is ready."""
        looks = set[asyncio.Task[None]]()
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await asyncio.gather(*(link.settle() for link in doubtful))
                if not model:
                    looks = {self._tasks.start(link.wake()) for link in self.upstreams}
                while looks and not self._there(self.front(model)):
                    _, looks = await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            for look in looks:
                look.cancel()

    def obstacle(self, model: ModelName) -> Reason | None:
        """Return why no engine of this model can place a request now; None if one can."""
        link = self.front(model)
        if self._there(link):
            return None
        return link.obstacle if link.health is Health.OK else Reason.NO_ENGINE

    def expects(self) -> bool:
        """Whether no engine is ready, and one that loads, wakes, or has ended should be ready soon."""
        coming = self._wait > 0 and any(map(self._comes, self.of(NO_ROUTER)))
        return not self._there(self.front()) and (coming or self._back_by(NO_ROUTER) is not None)

    def _comes(self, link: EngineLink) -> bool:
        return link.coming or link.engine in self._roused

    def may_serve(self, model: ModelName) -> bool:
        """Whether an engine of this model is ready, or expected back."""
        return self.front(model).ready or self._back_by(model) is not None

    def has_other(self, engine: EngineId, model: ModelName) -> bool:
        """Whether another engine of this model can take a request."""
        return any(link.ready and not link.draining for link in self.of(model) if link.engine != engine)

    async def _returned(self, since: float, latest: float = inf) -> None:
        """Wait until an engine is ready, at most `wait` seconds from `since` if one is expected back."""
        until = min(since + self._wait if self.expects() else since, latest)
        while not self._there(self.front()):
            if not any(link.returns or self._comes(link) for link in self.upstreams):
                return
            if until <= time.monotonic():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(until - time.monotonic()):
                    await self._change.wait()

    async def comes_back(self, link: EngineLink) -> bool:
        """Whether an engine that did not answer a call had ended, and an engine is ready now."""
        model = link.address.model
        if not await link.was_lost(link.losses):
            return False
        if not model:
            await self._returned(time.monotonic())
        return bool(model) or self.front().ready


# -- which engines are in use: drained, put back, added and removed by a reload -------------------------

MOMENT: Final = 0.05  # seconds between looks at whether a removed engine still answers requests


def link_to(
    upstream: NamedUpstream, new_link: LinkMaker, flags: EngineFlags | None = None
) -> tuple[EngineId, EngineLink]:
    """Make the link to an engine that a setting names."""
    engine = EngineId(upstream.name)
    link = new_link(engine, EngineAddress(upstream.base), flags)
    link.labels = upstream.labels
    return engine, link


class Membership:
    """Tells the scheduler which engines are drained or changed, and removes engines once they are drained."""

    def __init__(
        self,
        engines: Engines,
        metrics: Metrics,
        tasks: Tasks,
        post: Callable[[Event], None],
        new_link: LinkMaker | None,
    ) -> None:
        self._engines = engines
        self._metrics = metrics
        self._tasks = tasks
        self._post = post
        self._new_link = new_link
        self._aside = Counter[EngineId]()  # models that clients unload, and by how many requests
        self._at_rest: dict[EngineId, asyncio.Event] = {}  # set when nothing runs there any more
        self._going: set[EngineId] = set()  # drained because the settings no longer name them

    def find(self, word: str) -> EngineLink | None:
        """Return the engine with this name or address, with or without http://; None if there is none."""
        for link in self._engines.upstreams:
            base = link.address.base
            if word.rstrip("/") in {link.engine, base, base.rpartition("://")[2]}:
                return link
        return None

    def drain(self, link: EngineLink, *, drain: bool) -> None:
        """Drain an engine: no request begins there. With `drain=False`, put it back into use."""
        if link.draining == drain:
            return
        link.draining = drain
        if drain:
            log.info("engine_draining", engine=link.engine)
        else:
            self._going.discard(link.engine)
            log.info("engine_undrained", engine=link.engine)
        if all(other.draining for other in self._engines.upstreams):
            log.warning("all_engines_drained")
        self._post(self._asked(link))

    def drained(self, engine: EngineId) -> None:
        """Handle that nothing runs on a draining engine: remove it if the settings no longer name it."""
        link = self._engines.links.get(engine)
        log.info("engine_drained", engine=engine)
        if rests := self._at_rest.get(engine):
            rests.set()
        if link is not None and engine in self._going:
            self._tasks.start(self._remove(link))

    @asynccontextmanager
    async def unloading(self, links: Sequence[EngineLink], seconds: float) -> AsyncIterator[None]:
        """Let nothing begin on these models in this block, in which a client's request unloads them.

        The block begins when nothing runs there and their slots are saved, but after at most `seconds`.
        """
        for link in links:
            self._aside[link.engine] += 1
            self._at_rest.setdefault(link.engine, asyncio.Event())
            self._post(DrainAsked(at=time.monotonic(), engine=link.engine, drain=True))
        try:
            async with self._resting(links, seconds):
                yield
        finally:
            for link in links:
                self._aside[link.engine] -= 1
                if not self._aside[link.engine]:
                    del self._aside[link.engine], self._at_rest[link.engine]
                    self._post(DrainAsked(at=time.monotonic(), engine=link.engine, drain=False))

    @asynccontextmanager
    async def _resting(self, links: Sequence[EngineLink], seconds: float) -> AsyncIterator[None]:
        """Run a block in which nothing of ours is sent to these models, if they rest within `seconds`."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(seconds):
                    for link in links:
                        await self._at_rest[link.engine].wait()
                    for link in links:
                        router = self._engines.router_of(link.engine)
                        await stack.enter_async_context(router.parted(link))
            except TimeoutError:
                log.warning("model_unloaded_in_use", engine=[link.engine for link in links])
            yield

    def seen(self, placement: Placement) -> Iterator[EngineSeen]:
        """Yield the state of each engine, for a scrape of the metrics."""
        for link in self._engines.links.values():
            answers = link.up or link.health is Health.SLEEPING or link.health.routes
            state = self.state(link, placement)
            yield EngineSeen(engine=link.engine, state=state, answers=answers, losses=link.losses)

    def state(self, link: EngineLink, placement: Placement) -> EngineState:
        """Return the state of an engine as users see it."""
        table = placement.tables.get(link.engine)
        failing = table is not None and table.failing
        return engine_state(link.signs(drained=placement.drained(link.engine), failing=failing))

    def service(self, placement: Placement) -> Service:
        """Return what happens to a request that arrives now."""
        states = [self.state(link, placement) for link in self._engines.links.values()]
        return service(states, waits=self._engines.expects())

    def asked(self) -> Iterator[Event]:
        """Return an event for each draining engine, for a new scheduler."""
        yield from (self._asked(link) for link in self._engines.upstreams if link.draining)
        yield from (DrainAsked(at=time.monotonic(), engine=engine, drain=True) for engine in self._aside)

    def change(self, upstreams: Sequence[NamedUpstream]) -> None:
        """Use exactly these engines from now on. Raises UpstreamsError, without any change, if it cannot."""
        now, wanted = self._engines.upstreams, {one.name: one for one in upstreams}
        self._check(now, wanted.values())
        for link in now:
            if one := wanted.get(link.engine):
                link.labels = one.labels
        new = [one for one in upstreams if one.name not in self._engines.links]
        back = [link for link in now if link.engine in wanted and link.engine in self._going]
        gone = [link for link in now if link.engine not in wanted and link.engine not in self._going]
        for one in new:
            self._add(one)
        for link in back:
            self.drain(link, drain=False)
        for link in gone:
            self._retire(link)
        log.info("upstreams_reloaded", upstream=list(wanted), added=len(new) + len(back), removed=len(gone))

    def _retire(self, link: EngineLink) -> None:
        """Drain an engine that the settings no longer name. It is removed once it is drained."""
        self._going.add(link.engine)
        if link.draining:  # a user drained it, perhaps long ago: ask for `Drained` again
            self._post(self._asked(link))
        self.drain(link, drain=True)

    @staticmethod
    def _check(links: Iterable[EngineLink], wanted: Iterable[NamedUpstream]) -> None:
        bases = {link.engine: link.address.base for link in links}
        names = {base: engine for engine, base in bases.items()}
        for one in wanted:
            if bases.get(EngineId(one.name), one.base) != one.base:
                raise UpstreamsError(
                    f"{one.name} has another address now; give it another name, or restart the sidecar"
                )
            if names.get(one.base, one.name) != one.name:
                raise UpstreamsError(
                    f"{one.base} is called {names[one.base]} here; keep that name, or restart the sidecar"
                )

    def _add(self, upstream: NamedUpstream) -> None:
        if self._new_link is None:
            raise AssertionError("engines can be added only with a `new_link`")
        engine, link = link_to(upstream, self._new_link)
        self._metrics.engine_added(engine)
        log.info("engine_added", engine=engine, url=upstream.base)
        self._engines.add(link)
        self._name()

    async def _remove(self, link: EngineLink) -> None:
        """Remove a drained engine after its last answers. The scheduler knows no requests without a slot."""
        while link.busy and link.engine in self._going:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(MOMENT)
        if link.engine not in self._going:
            return
        self._going.discard(link.engine)
        self._engines.remove(link)
        self._metrics.engine_removed(link.engine)
        log.info("engine_removed", engine=link.engine)
        self._name()

    def _name(self) -> None:
        engines = tuple(link.engine for link in self._engines.upstreams)
        self._post(EnginesNamed(at=time.monotonic(), engines=engines))

    @staticmethod
    def _asked(link: EngineLink) -> DrainAsked:
        return DrainAsked(at=time.monotonic(), engine=link.engine, drain=link.draining)
