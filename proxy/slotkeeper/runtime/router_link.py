"""The link to one router: its models, each of which is an engine, and the swaps between them.

A router loads any model that a request names, and evicts another one without asking. So requests wait until
their model is loaded (`scheduler/policies/leaving.py`), and all our own calls say `autoload=false`.

llama-swap is a router with other routes (`SwapClient`). It cannot be told not to load a model, so nothing of
ours is sent to a model that it does not list as ready, or that a load of ours may unload.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final

from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.engine.client import EngineAddress
from slotkeeper.engine.routers.router_client import Listing, ModelEntry, RouterClient, listen
from slotkeeper.observe.log import get_logger, sayable
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.events import Event, ModelsListed, SwapFailed
from slotkeeper.scheduler.policies.router import LOADED, ModelStatus, ModelView
from slotkeeper.scheduler.types import EngineId, ModelName

CALM: Final = 1.0  # seconds between looks at the listing; a look wakes no model
EAGER: Final = 0.1  # seconds between looks during a swap of ours
QUIET: Final = 10.0  # seconds between looks while events report every change: llama-swap logs each look
MOMENT: Final = 0.01  # seconds between looks at whether calls have ended
BEGINS: Final = 2.0  # seconds within which the listing shows a load that was accepted
PROBED: Final = 30.0  # seconds in which a loaded model is probed again if that fails; then it serves unpinned
AGAIN: Final = 1.0  # seconds to wait after a swap that the router refused
RUNS: Final = "already running"  # in the router's error text
STOPPED: Final = "not running"  # in the router's error text
UNLISTED: Final = Listing(models=(), most=0)

log = get_logger(__name__)


class RouterLink:
    """Watches one router, and makes a link to each of its models."""

    def __init__(
        self,
        front: EngineLink,
        *,
        client: RouterClient,
        tasks: Tasks,
        metrics: Metrics,
        post: Callable[[Event], None],
        added: Callable[[EngineId, ModelEntry], EngineLink],
        removed: Callable[[EngineLink], None],
        lost: Callable[[EngineLink], None],
    ) -> None:
        """`front` is the link to the router itself, and `client` speaks its routes.

        `lost` is called for a model that will be unloaded.
        """
        self.front = front
        self.client = client
        self.listing = UNLISTED  # the last listing
        self.reached = False
        self._tasks = tasks
        self._metrics = metrics
        self._post = post
        self._added = added
        self._removed = removed
        self._lost = lost
        self._links: dict[EngineId, EngineLink] = {}
        self._ports: dict[EngineId, int] = {}
        self._unloading: set[EngineId] = set()  # nothing is sent to these models
        self._posted: ModelsListed | None = None
        self._since: dict[EngineId, float] = {}  # when a model that is not probed yet was loaded
        self._swaps = 0
        self._losses = 0  # how often the router did not answer
        self._kick = asyncio.Event()
        self._looked = asyncio.Event()

    def __repr__(self) -> str:
        return f"<RouterLink {self.front.address.base} {len(self._links)} models>"

    async def close(self) -> None:
        await self.client.close()

    def model_of(self, named: str) -> ModelName | None:
        """Return the model with this name or alias; None if the router has none."""
        for entry in self.listing.models:
            if named == entry.name or named in entry.aliases:
                return entry.name
        return None

    async def watch(self) -> None:
        """Watch the router until another kind of server answers at its address."""
        ear = self._tasks.start(
            listen(self.client, self._kick.set, rest=CALM, headers=lambda: self.front.auth)
        )
        try:
            while await self._look():
                self._wake()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._rest):
                        await self._kick.wait()
                self._kick.clear()
        finally:
            ear.cancel()
            self._tell_front(told=False)
        self._gone()
        self._take(UNLISTED)

    @property
    def _rest(self) -> float:
        """Seconds until the next look, unless there is an event."""
        if not self.reached:
            return EAGER
        if self.client.told:
            return CALM if self._swaps or self._since else QUIET
        return EAGER if self._swaps else CALM

    async def _look(self) -> bool:
        """Read the listing. Returns whether the server may still be a router."""
        try:
            self._take(await self.client.listing(headers=self.front.auth))
        except EngineGoneError:
            self._gone()
        except EngineError as error:
            if error.foreign:
                return False
        self._tell_front(told=self.reached and self.client.told)
        return True

    def _tell_front(self, *, told: bool) -> None:
        """Say whether events show that the router is there, so that looks at its /health are needless."""
        before, self.front.told = self.front.told, told and self.front.health.routes
        if before and not told:
            self.front.kick()

    def _gone(self) -> None:
        """Mark the router as not answering: its models are lost, but their names are remembered."""
        if not self.reached:
            return
        log.warning("router_lost", engine=self.front.engine)
        self.reached = False
        self._losses += 1
        self._since.clear()
        for link in self._links.values():
            link.part(self._lost)
        self._tell()

    def _wake(self) -> None:
        self._looked.set()
        self._looked = asyncio.Event()

    def _take(self, listing: Listing) -> None:
        self.listing, self.reached = listing, True
        there = {self._engine(entry.name): entry for entry in listing.models}
        for engine in [engine for engine in self._links if engine not in there]:
            self._removed(self._links.pop(engine))
        for engine, entry in there.items():
            link = self._links.get(engine)
            if link is None:
                link = self._links[engine] = self._added(engine, entry)
            self._update(link, entry)
        self._tell()

    def _tell(self) -> None:
        """Post the listing if the scheduler does not know it yet."""
        listed = self.listed()
        if self._posted is None or listed != replace(self._posted, at=listed.at):
            self._posted = listed
            self._post(listed)

    def listed(self) -> ModelsListed:
        """Return the listing for the scheduler; it is empty if the router does not answer."""
        views = tuple(self._view(entry) for entry in self.listing.models if self.reached)
        router, most, swaps = self.front.engine, self.listing.most, self.client.swaps
        return ModelsListed(at=time.monotonic(), router=router, models=views, most=most, chooses=swaps)

    def _view(self, entry: ModelEntry) -> ModelView:
        engine = self._engine(entry.name)
        link = self._links.get(engine)
        foreign = link is not None and link.foreign
        return ModelView(engine=engine, name=entry.name, status=entry.status, foreign=foreign)

    def _update(self, link: EngineLink, entry: ModelEntry) -> None:
        """Update a model's link by the listing. If something has changed, have the link look at once."""
        engine = link.engine
        listed = entry.status in self.client.asked and engine not in self._unloading
        changed = listed != link.listed or self._ports.get(engine) != entry.port
        link.flags, link.listed, self._ports[engine] = entry.flags, listed, entry.port
        link.auth = link.auth or self.front.auth
        if changed:
            link.kick()
        self._check_probed(link, entry)

    def _check_probed(self, link: EngineLink, entry: ModelEntry) -> None:
        """Tell the scheduler not to wait for the probe of a loaded model that cannot be probed."""
        engine, now = link.engine, time.monotonic()
        known = link.up or link.foreign
        if known or not link.listed or entry.status is not ModelStatus.LOADED:
            self._since.pop(engine, None)
        elif now - self._since.setdefault(engine, now) > PROBED and not link.probing:
            del self._since[engine]
            log.warning("model_not_probed", engine=engine)
            self._post(SwapFailed(at=now, engine=engine, broken=True))

    def _engine(self, model: ModelName) -> EngineId:
        return EngineAddress(self.front.engine, model).engine

    def _status(self, model: ModelName) -> ModelStatus:
        entries = (entry.status for entry in self.listing.models if self.reached and entry.name == model)
        return next(entries, ModelStatus.UNLOADED)

    # -- swaps -------------------------------------------------------------------------------------

    def load(self, link: EngineLink, aside: Iterable[EngineLink] = ()) -> None:
        """Load a model. The answer is its link's event once it is probed, or `SwapFailed`.

        Nothing is sent meanwhile to the models `aside`, which the load may unload.
        """
        self._tasks.start(self._swapped(link, self._load(link, tuple(aside))))

    def unload(self, link: EngineLink) -> None:
        """Unload a model. The answer is the next listing, or `SwapFailed`."""
        self._tasks.start(self._swapped(link, self._unload(link)))

    async def _swapped(self, link: EngineLink, swapping: Awaitable[bool]) -> None:
        """Wait for a swap. If it returns False, the model is `broken` and must not be tried again at once.

        Every failure is posted, because the scheduler waits for the result.
        """
        self._swaps += 1
        broken = False
        try:
            if await swapping:
                return
            broken = True
        except Exception as error:  # noqa: BLE001
            log.warning("swap_refused", engine=link.engine, error=sayable(error))
            await asyncio.sleep(AGAIN)
        finally:
            self._swaps -= 1
        self._post(SwapFailed(at=time.monotonic(), engine=link.engine, broken=broken))

    async def _load(self, link: EngineLink, aside: Sequence[EngineLink]) -> bool:
        model, begun, before = link.address.model, time.monotonic(), self._interruptions
        async with self.parted(*aside):
            await self._tolerating(RUNS, self.client.load(model, headers=self.front.auth))
            seen = self.client.swaps  # llama-swap answers only when the load has ended
            for _ in range(2 * seen):  # the first look may have begun before the answer
                await self.next_look()
        loaded = await self._is_loaded(model, seen=seen)
        link.kick()
        while loaded and not (link.up or link.foreign) and self._status(model) is ModelStatus.LOADED:
            link.hurry()  # a request waits for the load
            await self._moment()  # `_check_probed` ends the scheduler's wait if the probe never succeeds
            loaded = await self._is_loaded(model, seen=True)
        if not loaded and self._interruptions != before:
            raise EngineGoneError("the router was lost during the load")
        if not loaded:
            log.warning("model_not_loaded", engine=link.engine)
            self._metrics.loaded(model, None)
            return False
        seconds = time.monotonic() - begun
        self._metrics.loaded(model, seconds)
        log.info("model_loaded", engine=link.engine, seconds=round(seconds, 3))
        return True

    @property
    def _interruptions(self) -> int:
        """How often the router was lost or restarted, perhaps between two looks: then it lost its models."""
        return self._losses + self.client.ends

    async def _is_loaded(self, model: ModelName, *, seen: bool) -> bool:
        """Wait until the router has loaded a model, or has given up. `seen`: its load has begun.

        A busy router accepts a load late, and the first look after that may have begun before.
        """
        accepted, looks = time.monotonic(), 0
        while (status := self._status(model)) not in LOADED:
            if not self.reached:
                raise EngineGoneError("the router does not answer")
            seen = seen or status is ModelStatus.LOADING
            late = looks > 1 and time.monotonic() - accepted > BEGINS
            if status is ModelStatus.UNLOADED and (seen or late):
                return False
            await self._looked.wait()
            looks += 1
        return True

    async def _moment(self) -> None:
        """Wait until the listing has been read again, at most for EAGER seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EAGER):
                await self._looked.wait()

    async def _unload(self, link: EngineLink) -> bool:
        """Unload a model after our calls to it: they would hang until the router kills the process."""
        model, begun = link.address.model, time.monotonic()
        async with self.parted(link):
            await self._tolerating(STOPPED, self.client.unload(model, headers=self.front.auth))
            while self._status(model) is not ModelStatus.UNLOADED:
                await self._looked.wait()
        log.info("model_unloaded", engine=link.engine, seconds=round(time.monotonic() - begun, 3))
        return True

    @asynccontextmanager
    async def parted(self, *links: EngineLink) -> AsyncIterator[None]:
        """Send nothing to these models in this block, which begins when all calls to them have ended."""
        engines = {link.engine for link in links}
        self._unloading |= engines
        try:
            for link in links:
                link.part(self._lost)
            while any(link.busy for link in links):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(MOMENT)
            yield
        finally:
            self._unloading -= engines
            self._kick.set()

    async def unloaded(self, links: Iterable[EngineLink]) -> None:
        """Wait until the listing shows that these models are unloaded, at most BEGINS seconds."""
        models = [link.address.model for link in links]
        with suppress(TimeoutError):
            async with asyncio.timeout(BEGINS):
                await self.next_look()
                await self.next_look()  # the first look may have begun before the unload
                while any(self._status(model) is not ModelStatus.UNLOADED for model in models):
                    await self.next_look()

    def loaded(self) -> list[EngineLink]:
        """Return the links to the models that are loaded, or about to be."""
        taken = [entry.name for entry in self.listing.models if entry.status is not ModelStatus.UNLOADED]
        return [link for link in self._links.values() if self.reached and link.address.model in taken]

    async def next_look(self) -> None:
        """Wait until the listing has been read again."""
        looked = self._looked
        self._kick.set()
        await asyncio.sleep(MOMENT)
        await looked.wait()

    @staticmethod
    async def _tolerating(words: str, asked: Awaitable[None]) -> None:
        """Ignore an error with these words: another client may have done the same."""
        try:
            await asked
        except EngineError as error:
            if words not in error.message:
                raise
