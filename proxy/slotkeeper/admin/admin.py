"""The admin port: liveness, readiness, metrics, what it did and why; and the files of the dashboard."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client.aiohttp import make_aiohttp_handler

from slotkeeper.admin.guard import PROBES, Guard, private
from slotkeeper.admin.snapshot_routes import SnapshotRoutes
from slotkeeper.admin.state_routes import RequestRoutes, StateRoutes
from slotkeeper.engine.answers import SAID
from slotkeeper.engine.client import Health
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.driver import Driver
from slotkeeper.scheduler.costs import Limits
from slotkeeper.units import Address

PAGE: Final = "index.html"
ASSETS: Final = "/assets/"
TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
)
# Scripts, styles, the icon and the API come from here; nothing else comes from anywhere.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
)


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the dashboard. It holds no data, so no token is asked for it."""

    path: str
    body: bytes
    content_type: str

    @property
    def etag(self) -> str:
        return hashlib.sha256(self.body).hexdigest()[:32]


def _assets() -> Iterator[Asset]:
    for file in sorted(files(__package__).joinpath("static").iterdir(), key=lambda file: file.name):
        path = "/" if file.name == PAGE else ASSETS + file.name
        yield Asset(path, file.read_bytes(), TYPES["." + file.name.rpartition(".")[2]])


_FILES: Final = tuple(_assets())
OPEN_FILES: Final = frozenset(asset.path for asset in _FILES)  # paths that want no token


def routes() -> list[web.RouteDef]:
    """The page at `/`, and what it loads below `/assets/`."""
    return [web.get(asset.path, _serving(asset)) for asset in _FILES]


def _serving(asset: Asset) -> Handler:
    etag = asset.etag

    async def serve(request: web.Request) -> web.StreamResponse:
        known = any(given.value in (etag, "*") for given in request.if_none_match or ())
        response = web.Response(status=304, headers=HEADERS) if known else _whole(asset)
        response.etag = etag
        return response

    return serve


def _whole(asset: Asset) -> web.Response:
    return web.Response(body=asset.body, content_type=asset.content_type, charset="utf-8", headers=HEADERS)


# -- the port --------------------------------------------------------------------------------------------

# Probes carry no token, and the page has no data of its own.
OPEN: frozenset[str] = PROBES | OPEN_FILES


class AdminPort:
    """Is it alive, is it ready, what does it count, what did it do and why."""

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

    def draining(self) -> bool:
        return self._state.draining

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
        app.router.add_routes(routes())
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
        if not any(link.health in {Health.OK, Health.ROUTER} for link in self._driver.links.values()):
            return web.Response(status=503, text=f"no engine is up: {self._engines()}\n")
        return web.Response(text="ready\n")
