"""The admin port: is it alive, is it ready, what does it count, what do slots and snapshots hold."""

from __future__ import annotations

import hmac
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client.aiohttp import make_aiohttp_handler

from slotkeeper import __version__
from slotkeeper.core.limits import Limits
from slotkeeper.core.table import EngineTable
from slotkeeper.engine.client import Health
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.driver import Driver
from slotkeeper.web.snapshots import SnapshotRoutes

OPEN: frozenset[str] = frozenset({"/livez", "/readyz", "/healthz"})  # probes carry no token


class AdminPort:
    def __init__(self, driver: Driver, metrics: Metrics, token: str | None, limits: Limits) -> None:
        """`limits` are the budgets of the snapshots, which are shown with them."""
        self._snapshots = SnapshotRoutes(driver, limits)
        self._driver = driver
        self._metrics = metrics
        self._token = token
        self.draining = False

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/livez", self._live)
        app.router.add_get("/healthz", self._live)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", make_aiohttp_handler(self._metrics.registry))
        app.router.add_get("/api/state", self._state)
        app.router.add_routes(self._snapshots.routes())
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token and request.path not in OPEN:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return web.json_response({"error": "a bearer token is needed here"}, status=401)
        return await handler(request)

    async def _live(self, _: web.Request) -> web.Response:
        """Never touches an engine: a dead engine is no reason to restart us."""
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        if self.draining:
            return web.Response(status=503, text="draining\n")
        # Also an engine that we cannot probe (--no-slots, a key that we lack) is served: unpinned.
        if not any(link.health is Health.OK for link in self._driver.links.values()):
            return web.Response(status=503, text="no engine is up\n")
        return web.Response(text="ready\n")

    async def _state(self, _: web.Request) -> web.Response:
        placement = self._driver.placement
        state = {
            "version": __version__,
            "draining": self.draining,
            "queued": placement.queued,
            "engines": [self._engine(table) for table in placement.tables.values()],
        }
        return web.Response(body=orjson.dumps(state), content_type="application/json")

    def _engine(self, table: EngineTable) -> dict[str, Any]:
        link = self._driver.links[table.engine]
        return {
            "engine": table.engine,
            "up": table.up,
            "health": link.health.value,
            "memory": table.traits.memory.value,
            "context_tokens": table.traits.n_ctx,
            "slots": [
                {
                    "slot": slot,
                    "state": state.value,
                    "held_tokens": held.total if (held := table.shadow.slots[slot]) else 0,
                    "checkpoints": [c.at for c in held.checkpoints] if held else [],
                }
                for slot, state in enumerate(table.states)
            ],
            "ram_cache_entries_tokens": [entry.total for entry in table.shadow.ram],
        }
