"""The admin port: liveness, readiness, metrics, snapshots, and what dashboard, `top` and `why` show."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from importlib import resources
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client.aiohttp import make_aiohttp_handler

from slotkeeper import __version__
from slotkeeper.admin.guard import PROBES, Guard, answer, field_of, number, private, refused
from slotkeeper.api.answers.answer import waits
from slotkeeper.api.head import masked
from slotkeeper.conversation.rules.apply import ShownChange
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.request_record import (
    RUNNING,
    Decision,
    History,
    Option,
    PromptDivergence,
    Record,
    Span,
    moment_of,
    places_in,
)
from slotkeeper.observe.sentences import FEW, place, sentences, verdict
from slotkeeper.observe.states import (
    ENGINE_TEXTS,
    Spent,
    service_text,
    stages_text,
    unknown_text,
    wait_text,
)
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.slot_files import Snapshots
from slotkeeper.scheduler.events import SnapshotsChanged
from slotkeeper.scheduler.requests.figures import Usage
from slotkeeper.scheduler.requests.pending import Weighed
from slotkeeper.scheduler.slots.engine_model import FlagSeen, Memory, SlotContents, SnapshotId
from slotkeeper.scheduler.slots.table import EngineTable
from slotkeeper.scheduler.snapshots.budgets import Budgets, Limits
from slotkeeper.scheduler.types import RequestId, Tier, id_of
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


# -- the state of the sidecar, for the dashboard, `top` and `why` ---------------------------------------

# Documents of the admin port: engines, slots, figures, tiers, the prompt tree, and the last requests.
#
# Also the routes that drain and undrain an engine.


NOTHING_KNOWN: Final[dict[str, Any]] = {
    "memory": Memory.UNKNOWN.value,
    "context_tokens": 0,
    "pool": None,
    "checkpoint_limit": 0,
    "adapters": "",
    "flags": [],
    "prefill_tokens_per_second": None,
    "slots": [],
    "ram_cache_entries_tokens": [],
}
TWIGS: Final = 200  # edges of the prompt tree in an answer, unless the query names another limit
MOST_TWIGS: Final = 2000
EMPTY_SLOT: Final[dict[str, Any]] = {
    "held_tokens": 0,
    "checkpoints": [],
    "request": None,
    "conversation": None,
    "name": None,
    "about": None,
    "idle_seconds": None,
    "saved": False,
}
FILES: Final = 200  # snapshots that are searched for in the tree

Document = dict[str, Any]
Latest = dict[tuple[str | None, int | None], Record]  # by engine and slot


def flag(seen: FlagSeen) -> Document:
    """Return the document of one of an engine's flags, and how it is known."""
    return {"flag": seen.flag, "value": seen.value, "how": seen.how.value}


def membership(driver: Driver, link: EngineLink) -> dict[str, Any]:
    """Return the document of an engine's address, labels and use."""
    table = driver.placement.tables.get(link.engine)
    return {
        "address": link.address.base,
        "labels": dict(link.labels),
        "draining": link.draining,
        "drained": driver.placement.drained(link.engine),
        "failing": table is not None and table.up and table.failing,
    }


class StateRoutes:
    """`/api/state` and `/api/tree`."""

    def __init__(self, driver: Driver, history: History, limits: Limits, *, why_text: bool) -> None:
        self._driver = driver
        self._history = history
        self._engine_wait = limits.engine_wait
        self._why_text = why_text
        self._began = time.monotonic()
        self.draining = False
        self.data_port: Address | None = None  # set when it listens
        self.scheme = "http"  # of the data port's URL

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/api/state", self._state), web.get("/api/tree", self._tree)]

    async def _state(self, _: web.Request) -> web.Response:
        placement, now = self._driver.placement, self._driver.now()
        latest, totals = self._last_in_slots(), self._history.totals
        service = self._driver.membership.service(placement)  # what happens to a request that arrives now
        return answer(
            {
                "version": __version__,
                "draining": self.draining,
                "uptime_seconds": round(time.monotonic() - self._began, 1),
                "tasks": len(asyncio.all_tasks()),
                "queued": placement.queued,
                "service": {"state": service.value, "text": service_text(service, self._engine_wait)},
                "data_port": self._data_port(),
                "running": self._running(),
                "clients": [client.shown(now) for client in self._driver.journal.clients],
                "why_text": self._why_text,
                "totals": {**totals.shown(), "unknown_text": unknown_text(totals)},
                "waits": waits(one.waited for one in self._driver.journal).shown(),
                "history": list(self._history.shown()),
                "tiers": self._tiers(),
                "engines": [
                    self._engine(link, placement.tables.get(link.engine), latest, now)
                    for link in self._driver.links.values()
                    if not link.routes
                ],
            }
        )

    def _data_port(self) -> Document | None:
        """Return the address for clients; `everywhere`: any other address of this machine works too."""
        if self.data_port is None:
            return None
        reached = self.data_port.reached
        return {
            "scheme": self.scheme,
            "address": str(reached),
            "port": reached.port,
            "everywhere": reached != self.data_port,
        }

    def _last_in_slots(self) -> Latest:
        """Return the request of each slot: the one at work there, else the newest recorded one."""
        latest: Latest = {(one.engine, one.slot): one for one in reversed(tuple(self._driver.journal))}
        for record in self._driver.journal.running():
            if (place := place_of(self._driver, record)) != (None, None):
                latest[place] = record
        return latest

    def _tiers(self) -> list[Document]:
        if self._driver.snapshots is None:
            return []
        catalog, budgets = self._driver.placement.catalog, self._driver.placement.budgets
        return [
            {
                "tier": tier.value,
                "snapshots": catalog.count(tier),
                "bytes": catalog.size(tier),
                "budget_bytes": budgets.shown(tier),
                "advice": budgets.advice if tier is Tier.HOT else "",
            }
            for tier in Tier
        ]

    def _running(self) -> list[Document]:
        """Return unfinished requests: those that wait in the order of the queue, then the newest first."""
        places = places_in(self._driver.placement)
        found = [
            {
                **asked_by(record),
                **dict(zip(("engine", "slot"), place_of(self._driver, record), strict=True)),
                "seconds": round(self._driver.now() - record.at, 1),
                "now": moment.shown(),
                **time_of(record, self._driver.now()),
            }
            for record in self._driver.journal.running()
            if (moment := moment_of(self._driver.placement, record, places, self._driver.now()))
        ]
        return sorted(found, key=lambda one: (one["now"]["place"] is None, one["now"]["place"] or 0))

    def _engine(self, link: EngineLink, table: EngineTable | None, latest: Latest, now: float) -> Document:
        """Return the document of an engine, with few fields if it was never up."""
        known: Document = {
            "engine": link.engine,
            "model": link.address.model or None,
            **membership(self._driver, link),
            "up": bool(table and table.up),
            "health": link.health.value,
            "state": (state := self._driver.membership.state(link, self._driver.placement)).value,
            "state_text": ENGINE_TEXTS[state],
            "down_seconds": None if link.down_since is None else round(max(0.0, now - link.down_since), 1),
            "build": link.build,
        }
        if table is None:
            return known | NOTHING_KNOWN
        rate = table.rates.prefill
        return known | {
            "memory": table.traits.memory.value,
            "context_tokens": table.traits.n_ctx,
            "pool": self._driver.placement.pool_of(table),
            "checkpoint_limit": table.traits.checkpoint_cap,
            "adapters": table.traits.adapter_set,
            "flags": [flag(seen) for seen in table.traits.flags_seen()],
            "prefill_tokens_per_second": round(rate.mean, 1) if rate.measured else None,
            "slots": [
                {
                    "slot": slot,
                    "state": state.value,
                    **self._held(table, contents, latest.get((table.engine, slot)), now),
                }
                for slot, (state, contents) in enumerate(zip(table.states, table.shadow.slots, strict=True))
            ],
            "ram_cache_entries_tokens": [entry.total for entry in table.shadow.ram],
        }

    def _held(
        self, table: EngineTable, contents: SlotContents | None, last: Record | None, now: float
    ) -> Document:
        named = {
            "request": last.request_id if last else None,
            "conversation": last.conversation if last else None,
            "name": str(last.name) if last else None,
            "about": (last.name.words or None) if last else None,
        }
        if contents is None:
            at_work = last is not None and last.outcome == RUNNING
            return EMPTY_SLOT | (named if at_work else {})
        covered = self._driver.placement.catalog.covers(contents, table.traits)
        return {
            "held_tokens": contents.total,
            "checkpoints": [checkpoint.at for checkpoint in contents.checkpoints],
            **named,
            "idle_seconds": round(max(0.0, now - contents.used), 1),
            "saved": covered * 2 > contents.total,
        }

    async def _tree(self, request: web.Request) -> web.Response:
        placement, now = self._driver.placement, self._driver.now()
        model = placement.busiest
        tree = placement.tree(model)
        twigs = tree.recent_edges(min(MOST_TWIGS, number(request, "limit", TWIGS)))
        slots: dict[int | None, list[Document]] = {}
        for table in placement.tables.values():
            for slot, contents in enumerate(table.shadow.slots):
                if contents and table.model == model:
                    place = {"engine": table.engine, "slot": slot}
                    slots.setdefault(tree.twig(contents.tokens), []).append(place)
        files = Counter(tree.twig(snapshot.tokens) for snapshot in islice(placement.catalog, FILES))
        return answer(
            {
                "tokens": tree.tokens,
                "leaves": tree.leaves,
                "nodes": [
                    {
                        "id": str(twig.id),
                        "parent": str(twig.parent) if twig.parent is not None else None,
                        "begin": twig.begin,
                        "end": twig.end,
                        "ways": twig.ways,
                        "passed": twig.passed,
                        "idle_seconds": round(max(0.0, now - twig.used), 1),
                        "slots": slots.get(twig.id, []),
                        "snapshots": files[twig.id],
                    }
                    for twig in twigs
                ],
            }
        )


# -- draining an engine ----------------------------------------------------------------------------------


class EngineRoutes:
    """`POST /api/drain` and `/api/undrain`. The body names the engine: {"engine": NAME}."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/api/drain", self._drain), web.post("/api/undrain", self._undrain)]

    async def _drain(self, request: web.Request) -> web.Response:
        return await self._set(request, drain=True)

    async def _undrain(self, request: web.Request) -> web.Response:
        return await self._set(request, drain=False)

    async def _set(self, request: web.Request, *, drain: bool) -> web.Response:
        members, word = self._driver.membership, _engine_in(await request.read())
        link = members.find(word)
        if link is None:
            known = ", ".join(link.engine for link in self._driver.engines.upstreams)
            raise refused(web.HTTPNotFound, f"there is no engine {word[:100]!r}; there is {known}")
        members.drain(link, drain=drain)
        return answer({"engine": link.engine, **membership(self._driver, link)})


def _engine_in(body: bytes) -> str:
    word = field_of(body, "engine")
    if not word or not isinstance(word, str):
        raise refused(web.HTTPBadRequest, 'the body must be {"engine": "NAME"}')
    return word


# -- the last requests -----------------------------------------------------------------------------------


def place_of(driver: Driver, record: Record) -> tuple[str | None, int | None]:
    """Return the engine and the slot where a request is or was at work; None for what is not known."""
    pending = driver.placement.pending(record.key) if record.outcome == RUNNING else None
    if pending is None or pending.plan is None:
        return record.engine, record.slot
    slot = pending.slot
    if slot is None and pending.plan.pinned:
        slot = pending.plan.slot
    return pending.plan.table.engine, slot


# -- their documents: no text of a prompt ----------------------------------------------------------------


def summary(record: Record) -> Document:
    """Return the document of one line of a list. Tokens are the engine's counts; times are in seconds."""
    divergence, lost, decision = record.divergence, record.lost, record.decision
    saved = record.saved_seconds
    return {
        **asked_by(record),
        "route": record.route,
        "outcome": record.outcome,
        "status": record.status,
        "client": record.client,
        "conversation": record.goes_on,
        "named": record.named,
        "kind": record.kind.value if record.kind else None,
        "engine": record.engine,
        "slot": record.slot,
        "decision": decision.chosen.reason.value if decision else None,
        "prompt_tokens": record.prompt_tokens,
        **_counts(record.usage),
        "oracle": record.oracle,
        "oracle_unknown": record.unknown.value if record.unknown else None,
        "predicted": record.predicted,
        "generated": record.generated,
        "repeated": record.repeated,
        "priority": record.priority.value,
        "seconds": record.seconds,
        "first_token_seconds": record.first_token,
        "stall_seconds": record.stall,
        "saved_seconds": None if saved is None else round(saved, 6),
        "cause": divergence.cause.value if divergence else None,
        "section": divergence.section.value if divergence and divergence.section else None,
        "where": place(divergence) if divergence else None,
        "lost": lost.why.value if lost else None,
        "verdict": verdict(record),
    }


def _counts(usage: Usage | None) -> Document:
    if usage is None:
        return {"reused": None, "computed": None, "planted": 0, "prepared": 0, "cached": None}
    return {
        "reused": usage.reused,
        "computed": usage.computed,
        "planted": usage.planted,
        "prepared": usage.prepared,
        "cached": usage.cached,
    }


def detail(record: Record, taker: Record | None = None) -> Document:
    """Return the document of one request. `taker`: the request that took its conversation's slot."""
    return summary(record) | {
        "body_bytes": record.body_bytes,
        "explanation": sentences(record, taker),
        "timeline": [_span(span) for span in sorted(record.spans, key=lambda span: span.begin)],
        "queued": _queued(record),
        "choice": _choice(record.decision) if record.decision else None,
        "parting": _divergence_at(record.divergence) if record.divergence else None,
        "lost_tokens": record.lost.tokens if record.lost else 0,
        "slot_taken_by": taker.request_id if taker else None,
        "changes": [_change(change) for change in record.changes],
        "forms": _forms(record.weighed) if record.weighed else None,
        **_acts(record),
    }


def time_of(record: Record, now: float) -> Document:
    """Return the stage of the request, and the seconds in each so far; `now` is on the driver's clock."""
    spent, waited = record.spent(now), record.to_first_token(now)
    return {
        "stage": record.stage.value if record.stage else None,
        "stages": {stage.value: round(spent[stage], 6) for stage in Spent if stage in spent},
        "stages_text": stages_text(spent),
        "to_first_token_seconds": None if waited is None else round(waited, 6),
    }


def _queued(record: Record) -> list[Document]:
    """Return what the request waited for in the queue, in the order in which that began."""
    return [
        {
            "wait": wait.value,
            "text": wait_text(wait, [*queued.behind]),
            "seconds": round(queued.seconds, 6),
            "behind": [*queued.behind],
        }
        for wait, queued in record.queued.items()
    ]


def asked_by(record: Record) -> Document:
    """Return which request it is, of which conversation and client, as in every document."""
    return {
        "id": record.request_id,
        "came": _moment(record.received),
        "name": str(record.name),
        "agent": record.name.agent,
        "about": record.name.words or None,
        "conversation_began": _moment(began(record)),
        "model": record.model,
    }


def began(record: Record) -> float:
    """Return when the request's conversation began, in seconds since the epoch."""
    first = record.name.began
    return record.received if first is None else record.received - record.at + first


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _span(span: Span) -> Document:
    return {
        "stage": span.stage.value,
        "begin": round(span.begin, 6),
        "end": round(span.end, 6),
        "tokens": span.tokens,
        "note": span.note,
    }


def _choice(decision: Decision) -> Document:
    return {
        "chosen": _option(decision.chosen, decision.rate),
        "beaten": [_option(option, decision.rate) for option in decision.beaten],
        "held_tokens": decision.held,
        "common_tokens": decision.common,
    }


def _option(option: Option, rate: float) -> Document:
    seconds = option.seconds  # with several engines: includes the queue there and the speed of answers
    if seconds is None and rate:
        seconds = option.price / rate
    return {
        "decision": option.reason.value,
        "engine": option.engine,
        "slot": option.slot,
        "reuse_tokens": option.reuse,
        "price_tokens": round(option.price, 1),
        "price_seconds": None if seconds is None else round(seconds, 4),
        "steps": list(option.steps),
    }


def _divergence_at(divergence: PromptDivergence) -> Document:
    """Return the document of a divergence; the caller sets `text`."""
    return {
        "cause": divergence.cause.value,
        "section": divergence.section.value if divergence.section else None,
        "message": divergence.message,
        "where": place(divergence),
        "token": divergence.token,
        "repeated_tokens": divergence.tokens,
        "seconds": divergence.seconds,
        "rule": divergence.rule.value if divergence.rule else None,
        "fixed": divergence.fixed,
        "text": None,
    }


def _forms(weighed: Weighed) -> Document:
    """Return the prices of the client's own form and of the form that rules changed.

    They are tokens to compute, at the time of the decision; null: it was decided without a price.
    """
    own, changed = (None if price is None else round(price, 1) for price in (weighed.own, weighed.changed))
    return {"own_price_tokens": own, "changed_price_tokens": changed, "changed": weighed.taken}


def _change(change: ShownChange) -> Document:
    return {
        "rule": change.rule.value if change.rule else None,
        "mode": change.mode.value,
        "declined": change.declined,
        "path": change.path,
        "before": change.before,
        "after": change.after,
    }


def _acts(record: Record) -> Document:
    """Return what was done because of the shared KV buffer and of priorities, as fields of a document."""
    return {
        "pool": [{"act": each.act.value, "slot": each.slot, "cells": each.cells} for each in record.pooled],
        "priority_acts": [
            {
                "act": each.act.value,
                "other": id_of(each.other) if each.other else None,
                "waited_seconds": round(each.waited, 3),
                "gain_seconds": None if each.gain is None else round(each.gain, 3),
                "loss_seconds": None if each.loss is None else round(each.loss, 3),
            }
            for each in record.ranked
        ],
    }


# -- routes ----------------------------------------------------------------------------------------------

LIMIT: Final = 50
MOST: Final = 500
NEWEST: Final = "last"

log = get_logger(__name__)


class RequestRoutes:
    """`/api/requests` and `/api/requests/{id}`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/requests", self._list),
            web.get("/api/requests/{id}", self._one),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        """List requests, the newest first, filtered by `limit`, `conversation` and `repeated=1`."""
        most, conversation = min(MOST, number(request, "limit", LIMIT)), number(request, "conversation", -1)
        found = (
            record
            for record in self._driver.journal
            if conversation in (-1, record.goes_on)
            and (request.query.get("repeated") != "1" or record.repeated > FEW)
        )
        now = partial(self._now, places=places_in(self._driver.placement))
        return answer({"requests": [now(record) | summary(record) for record in islice(found, most)]})

    async def _one(self, request: web.Request) -> web.Response:
        wanted = request.match_info["id"]
        record = self._find(wanted)
        if record is None:
            kept = len(self._driver.journal)
            among = f"none of the last {kept} requests" if kept else "no request is kept, so none"
            raise refused(web.HTTPNotFound, f"{among} has the id {wanted}")
        places, took = places_in(self._driver.placement), self._driver.journal.took_slot(record)
        document = self._now(record, places) | detail(record, took)
        if record.divergence and record.divergence.now:
            document["parting"]["text"] = await self._text(record, record.divergence)
        return answer(document)

    def _now(self, record: Record, places: dict[RequestId, int]) -> Document:
        moment = moment_of(self._driver.placement, record, places, self._driver.now())
        return {"now": moment and moment.shown(), **time_of(record, self._driver.now())}

    def _find(self, wanted: str) -> Record | None:
        if wanted == NEWEST:
            return next(iter(self._driver.journal), None)
        return self._driver.journal.find(wanted)

    async def _text(self, record: Record, divergence: PromptDivergence) -> dict[str, str] | None:
        """Return the text around the divergence, detokenized by the engine; None if it does not answer."""
        link = next((link for link in self._driver.links.values() if link.engine == record.engine), None)
        if link is None:
            return None
        pieces = (
            divergence.now[: divergence.lead],
            divergence.was[divergence.lead :],
            divergence.now[divergence.lead :],
        )
        texts = [[token for token in piece if token >= 0] for piece in pieces]  # images have no words
        try:
            lead, was, now = [await link.client.detokenize(ids, headers=link.auth) for ids in texts]
        except (EngineError, EngineGoneError) as error:
            log.debug("not_detokenized", request_id=record.request_id, error=type(error).__name__)
            return None
        return {"lead": masked(lead), "was": masked(was), "now": masked(now)}
