"""Which engines are in use: a user drains them and puts them back; a reload adds and removes some."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from slotkeeper.engine.answers import Health
from slotkeeper.engine.client import EngineAddress
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.states import EngineSeen, EngineState, Service, engine_state, service
from slotkeeper.runtime.engines import Engines, LinkMaker
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.events import DrainAsked, EnginesNamed, Event
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.types import EngineId
from slotkeeper.upstreams import NamedUpstream, UpstreamsError

MOMENT: Final = 0.05  # seconds between looks at whether a removed engine still answers requests

log = get_logger(__name__)


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
