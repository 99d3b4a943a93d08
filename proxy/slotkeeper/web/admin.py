"""The admin port: is it alive, is it ready, what does it count, what did it do and why."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client.aiohttp import make_aiohttp_handler

from slotkeeper.address import Address
from slotkeeper.core.limits import Limits
from slotkeeper.engine.answers import SAID
from slotkeeper.engine.client import Health
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.driver import Driver
from slotkeeper.web.dashboard import routes as dashboard
from slotkeeper.web.requests import RequestRoutes
from slotkeeper.web.snapshots import SnapshotRoutes
from slotkeeper.web.state import StateRoutes

# Probes carry no token, and the page has no data of its own.
OPEN: frozenset[str] = frozenset({"/livez", "/readyz", "/healthz"}) | dashboard.OPEN


class AdminPort:
    def __init__(
        self, driver: Driver, metrics: Metrics, token: str | None, limits: Limits, *, why_text: bool = False
    ) -> None:
        """`limits` are the budgets of the snapshots, which are shown with them."""
        self._snapshots = SnapshotRoutes(driver, limits)
        self._state = StateRoutes(driver, metrics.history, limits, why_text=why_text)
        self._driver = driver
        self._metrics = metrics
        self._token = token

    def listens(self, data_port: Address) -> None:
        """Where clients are to be pointed at."""
        self._state.data_port = data_port

    def drain(self) -> None:
        """Not ready any more, and never again."""
        self._state.draining = True

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/livez", self._live)
        app.router.add_get("/healthz", self._live)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", make_aiohttp_handler(self._metrics.registry))
        app.router.add_routes(dashboard.routes())
        for part in (self._state, RequestRoutes(self._driver), self._snapshots):
            app.router.add_routes(part.routes())
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token and request.path not in OPEN:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                said = "this bearer token is not the right one" if given else "a bearer token is needed here"
                return web.json_response({"error": said}, status=401)
        return await handler(request)

    async def _live(self, _: web.Request) -> web.Response:
        """Never touches an engine: a dead engine is no reason to restart us."""
        return web.Response(text="ok\n")

    def _engines(self) -> str:
        """What each is like; addresses only where everybody here may see everything."""
        links = self._driver.links.values()
        return ", ".join(f"{'one' if self._token else link.engine} {SAID[link.health]}" for link in links)

    async def _ready(self, _: web.Request) -> web.Response:
        if self._state.draining:
            return web.Response(status=503, text="draining\n")
        # Also an engine that we cannot probe (--no-slots, a key that we lack) is served: unpinned.
        if not any(link.health is Health.OK for link in self._driver.links.values()):
            return web.Response(status=503, text=f"no engine is up: {self._engines()}\n")
        return web.Response(text="ready\n")
