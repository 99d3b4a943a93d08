"""The admin port: is it alive, is it ready, what does it count, what did it do and why."""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler

from slotkeeper.address import Address
from slotkeeper.engine.answers import SAID
from slotkeeper.engine.client import Health
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.driver import Driver
from slotkeeper.scheduler.limits import Limits
from slotkeeper.web.dashboard import routes as dashboard
from slotkeeper.web.guard import PROBES, Guard, private
from slotkeeper.web.requests import RequestRoutes
from slotkeeper.web.snapshots import SnapshotRoutes
from slotkeeper.web.state import StateRoutes

# Probes carry no token, and the page has no data of its own.
OPEN: frozenset[str] = PROBES | dashboard.OPEN


class AdminPort:
    def __init__(
        self,
        driver: Driver,
        metrics: Metrics,
        token: str | None,
        limits: Limits,
        *,
        hosts: Collection[str] = (),
        why_text: bool = False,
    ) -> None:
        """`limits` are the budgets of the snapshots, which are shown with them; `hosts` as for `Guard`."""
        self._snapshots = SnapshotRoutes(driver, limits)
        self._state = StateRoutes(driver, metrics.history, limits, why_text=why_text)
        self._driver = driver
        self._metrics = metrics
        self._token = token
        self._guard = Guard(token, hosts, OPEN)

    def listens(self, data_port: Address, scheme: str = "http") -> None:
        """Where clients are to be pointed at."""
        self._state.data_port, self._state.scheme = data_port, scheme

    def drain(self) -> None:
        """Not ready any more, and never again."""
        self._state.draining = True

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard.check])
        app.on_response_prepare.append(private)
        app.router.add_get("/livez", self._live)
        app.router.add_get("/healthz", self._live)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", make_aiohttp_handler(self._metrics.registry))
        app.router.add_routes(dashboard.routes())
        for part in (self._state, RequestRoutes(self._driver), self._snapshots):
            app.router.add_routes(part.routes())
        return app

    async def _live(self, _: web.Request) -> web.Response:
        """Never touches an engine: a dead engine is no reason to restart us."""
        return web.Response(text="ok\n")

    def _engines(self) -> str:
        """What each is like; addresses only where every client of this port may see everything."""
        links = self._driver.links.values()
        return ", ".join(f"{'one' if self._token else link.engine} {SAID[link.health]}" for link in links)

    async def _ready(self, _: web.Request) -> web.Response:
        if self._state.draining:
            return web.Response(status=503, text="draining\n")
        # Also an engine that we cannot probe (--no-slots, a key that we lack) is served: unpinned.
        if not any(link.health is Health.OK for link in self._driver.links.values()):
            return web.Response(status=503, text=f"no engine is up: {self._engines()}\n")
        return web.Response(text="ready\n")
