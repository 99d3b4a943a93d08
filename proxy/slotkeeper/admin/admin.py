"""The admin port: liveness, readiness, metrics, snapshots, and the files of the dashboard."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client.aiohttp import make_aiohttp_handler

from slotkeeper.admin.guard import PROBES, Guard, answer, field_of, private, refused
from slotkeeper.admin.state_routes import EngineRoutes, RequestRoutes, StateRoutes
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.states import ENGINE_TEXTS
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.slot_files import Snapshots
from slotkeeper.scheduler.events import SnapshotsChanged
from slotkeeper.scheduler.slots.slot_contents import SnapshotId
from slotkeeper.scheduler.snapshots.budgets import Budgets, Limits
from slotkeeper.store import files
from slotkeeper.store.index import Kept, by_our_clock
from slotkeeper.store.manifest import LATEST
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import MissingError, SnapshotError, StoreError
from slotkeeper.values import Address

# -- snapshots: list, verify, remove ---------------------------------------------------------------------

OFF: Final = "there are no snapshots here: start the sidecar with --slot-dir"


class FileVerdict(StrEnum):
    """The result of reading every byte of a snapshot."""

    WHOLE = "whole"
    DAMAGED = "damaged"  # a damaged copy is in quarantine now; `tiers` shows whether another one is left
    MISSING = "missing"  # a file is gone, or the snapshot was dropped meanwhile
    UNREAD = "unread"  # the folder cannot be used now, so the state is unknown


class SnapshotRoutes:
    """Routes for the snapshots in the driver's store. Without a slot folder all answer 404."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/snapshots", self._list),
            web.post("/api/snapshots/verify", self._verify),
            web.delete("/api/snapshots/{id}", self._remove),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        """List the snapshots, also while the folder cannot be used: the document says why."""
        store = self._snapshots().store
        fingerprints = {kept.manifest.fingerprint for kept in store.listing()}
        engines = {fingerprint: self._engines(fingerprint) for fingerprint in fingerprints}
        # With thousands of snapshots this takes a tenth of a second.
        return await asyncio.to_thread(self._listed, store, engines)

    def _listed(self, store: Store, engines: Mapping[str, Sequence[str]]) -> web.Response:
        """Return the list. This runs in a thread and only reads."""
        document = overview(store, self._driver.placement.budgets)
        for entry in document["snapshots"]:
            entry["engines"] = engines.get(entry["fingerprint"], [])
            name = self._driver.journal.owners.of(entry["id"])
            entry["name"] = str(name) if name else None
        return answer(document)

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        """Verify snapshots; send one line of JSON for each when it is read, as gigabytes take time.

        The body names some, `{"ids": [...]}`; an empty body means all.
        """
        store = self._usable().store
        wanted = _named(await request.read())
        known = {kept.id for kept in store.listing()}
        if unknown := [id_ for id_ in wanted or () if id_ not in known]:
            raise refused(web.HTTPNotFound, f"there is no snapshot {unknown[0]}")
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await answer.prepare(request)
        for id_ in wanted or sorted(known):
            line = await verified(store, id_)
            if line["verdict"] != FileVerdict.WHOLE:
                self._tell(store, id_)
            await answer.write(orjson.dumps(line) + b"\n")
        await answer.write_eof()
        return answer

    async def _remove(self, request: web.Request) -> web.Response:
        snapshots, id_ = self._usable(), _checked(request.match_info["id"])
        if id_ not in {kept.id for kept in snapshots.store.listing()}:
            raise refused(web.HTTPNotFound, f"there is no snapshot {id_}")
        try:
            await snapshots.forget(id_)
        except StoreError as error:
            raise refused(web.HTTPServiceUnavailable, str(error)) from error
        return answer({"removed": id_})

    def _snapshots(self) -> Snapshots:
        if self._driver.snapshots is None:
            raise refused(web.HTTPNotFound, OFF)
        return self._driver.snapshots

    def _usable(self) -> Snapshots:
        snapshots = self._snapshots()
        if not snapshots.ready:
            why = snapshots.store.trouble or "The slot folder is still being read"
            raise refused(web.HTTPServiceUnavailable, str(why))
        return snapshots

    def _engines(self, fingerprint: str) -> list[str]:
        """Return the engines that may load files with this fingerprint and are up or may be loaded."""
        tables = self._driver.placement.tables.values()
        there = (table for table in tables if table.up or table.model)  # a router may load a model again
        return [table.engine for table in there if fingerprint in table.traits.fingerprints]

    def _tell(self, store: Store, id_: SnapshotId) -> None:
        """Tell the scheduler which files were lost, except for snapshots that it dropped itself."""
        now = self._driver.now()
        left = next((kept for kept in store.listing() if kept.id == id_), None)
        if left is None:
            self._driver.post(SnapshotsChanged(at=now, gone=(id_,)))
        elif id_ in self._driver.placement.catalog:
            self._driver.post(SnapshotsChanged(at=now, snapshots=(by_our_clock(left),)))


# -- documents about a store -----------------------------------------------------------------------------


def overview(store: Store, budgets: Budgets | None = None) -> dict[str, Any]:
    """Return the document of all snapshots, the most recently used first. Sizes are in bytes."""
    listing = sorted(store.listing(), key=lambda kept: kept.use.used, reverse=True)
    trouble = store.trouble
    return {
        "trouble": {"kind": trouble.trouble.value, "what": str(trouble)} if trouble else None,
        "tiers": [
            {
                "tier": tier.value,
                "snapshots": sum(tier in kept.tiers for kept in listing),
                "bytes": size,
                "budget_bytes": budgets.shown(tier) if budgets else None,
            }
            for tier, size in store.sizes().items()
        ],
        "snapshots": [described(kept) for kept in listing],
    }


def described(kept: Kept) -> dict[str, Any]:
    """Return the document of one snapshot.

    `restores` counts restores that paid off by the engine's own count, `failures` the others.
    """
    manifest, use = kept.manifest, kept.use
    return {
        "id": kept.id,
        "tokens": manifest.tokens,
        "bytes": manifest.size,
        "tiers": [tier.value for tier in kept.quickest],
        "checkpoints": list(manifest.checkpoints),
        "created": rfc3339(manifest.created),
        "used": rfc3339(use.used),
        "restores": use.restores,
        "failures": use.failures,
        "golden": manifest.golden,
        "draft": manifest.draft,
        "repaired": manifest.repaired,
        "fingerprint": manifest.fingerprint,
        "adapters": manifest.adapters,
        "build": manifest.build,
    }


async def verified(store: Store, id_: SnapshotId) -> dict[str, Any]:
    """Hash every copy of a snapshot again, off the event loop; damaged copies go to quarantine."""
    verdict, why = FileVerdict.WHOLE, ""
    try:
        await store.verify(id_)
    except MissingError as error:
        verdict, why = FileVerdict.MISSING, str(error)
    except SnapshotError as error:
        verdict, why = FileVerdict.DAMAGED, str(error)
    except StoreError as error:
        verdict, why = FileVerdict.UNREAD, str(error)
    left = next((kept.quickest for kept in store.listing() if kept.id == id_), [])
    return {"id": id_, "verdict": verdict.value, "why": why, "tiers": [tier.value for tier in left]}


def rfc3339(seconds: float) -> str:
    """Return a wall-clock time as text, for any number that a manifest or an index holds."""
    possible = min(max(0.0, seconds), LATEST)  # RFC 3339 has no later time
    return datetime.fromtimestamp(possible, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


# -- bodies of requests ----------------------------------------------------------------------------------


def _named(body: bytes) -> Sequence[SnapshotId]:
    """Return the ids in a body; empty means all."""
    if not body.strip():
        return ()
    ids = field_of(body, "ids")
    if not ids or not isinstance(ids, list):
        raise refused(web.HTTPBadRequest, 'the body must be {"ids": ["...", ...]}, or empty')
    return list(map(_checked, ids))


def _checked(word: Any) -> SnapshotId:
    if not isinstance(word, str) or not files.ours(word + files.SLOT):
        raise refused(web.HTTPBadRequest, f"{word!r} is not the id of a snapshot")
    return SnapshotId(word)


# -- the dashboard ---------------------------------------------------------------------------------------

PAGE: Final = "index.html"
ASSETS: Final = "/assets/"
TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
)
# Scripts, styles, the icon and the API come from this port; everything else is blocked.
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
    """A file of the dashboard. It holds no data, so it needs no token."""

    path: str
    body: bytes
    content_type: str

    @property
    def etag(self) -> str:
        return hashlib.sha256(self.body).hexdigest()[:32]


_FILES: Final = tuple(
    Asset(
        path="/" if file.name == PAGE else ASSETS + file.name,
        body=file.read_bytes(),
        content_type=TYPES["." + file.name.rpartition(".")[2]],
    )
    for file in sorted(resources.files(__package__).joinpath("static").iterdir(), key=lambda file: file.name)
)
OPEN_FILES: Final = frozenset(asset.path for asset in _FILES)  # paths that need no token


def routes() -> list[web.RouteDef]:
    """Return the routes of the page at `/` and of its files below `/assets/`."""
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
    """The admin port: liveness, readiness, metrics, state, and the explanation of requests."""

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
        """`hosts` as for `Guard`."""
        self._snapshots = SnapshotRoutes(driver)
        self._state = StateRoutes(driver, metrics.history, limits, why_text=why_text)
        self._driver = driver
        self._metrics = metrics
        self._token = token
        self._guard = Guard(token, hosts, OPEN)

    def listens(self, data_port: Address, scheme: str = "http") -> None:
        """Note the data port's address, which the dashboard shows as the address for clients."""
        self._state.data_port, self._state.scheme = data_port, scheme

    def draining(self) -> bool:
        return self._state.draining

    def drain(self) -> None:
        """Report not ready from now on."""
        self._state.draining = True

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard.check])
        app.on_response_prepare.append(private)
        app.router.add_get("/livez", self._live)
        app.router.add_get("/healthz", self._live)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", make_aiohttp_handler(self._metrics.registry))
        app.router.add_routes(routes())
        for part in (self._state, RequestRoutes(self._driver), self._snapshots, EngineRoutes(self._driver)):
            app.router.add_routes(part.routes())
        return app

    async def _live(self, _: web.Request) -> web.Response:
        """Answer without asking an engine: a dead engine is no reason to restart the sidecar."""
        return web.Response(text="ok\n")

    def _engines(self) -> str:
        """Return each engine's state; addresses only if every client of this port may see everything."""
        links, state = self._driver.links.values(), self._driver.membership.state
        texts = {link.engine: ENGINE_TEXTS[state(link, self._driver.placement)] for link in links}
        return ", ".join(f"{'one' if self._token else engine} {text}" for engine, text in texts.items())

    async def _ready(self, _: web.Request) -> web.Response:
        if self._state.draining:
            return web.Response(status=503, text="draining\n")
        ready, said = self._driver.engines.readiness()
        if not ready and not self._driver.engines.drained:
            said = f"{said}: {self._engines()}"
        return web.Response(status=200 if ready else 503, text=f"{said}\n")
