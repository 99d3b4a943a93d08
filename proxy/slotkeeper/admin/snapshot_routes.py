"""Snapshots on the admin port: what lies there, whether it is whole, and away with one of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import orjson
from aiohttp import web

from slotkeeper.admin.guard import answer, refused
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.slot_files import Snapshots
from slotkeeper.scheduler.costs import Limits
from slotkeeper.scheduler.events import SnapshotsChanged
from slotkeeper.scheduler.slot_contents import SnapshotId, Tier
from slotkeeper.store import files
from slotkeeper.store.index import Kept, snapshot
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import MissingError, SnapshotError, StoreError

OFF: Final = "there are no snapshots here: start the sidecar with --slot-dir"
LAST_SECOND: Final = 253402300799.0  # of the year 9999: RFC 3339 has no later one


class FileVerdict(StrEnum):
    """Of one snapshot whose every byte was to be read."""

    WHOLE = "whole"
    DAMAGED = "damaged"  # a copy was, and is in quarantine now; `tiers` says whether another one is left
    MISSING = "missing"  # a file is gone, or the snapshot was dropped meanwhile
    UNREAD = "unread"  # the folder cannot be used now, so nothing is known


class SnapshotRoutes:
    """What the driver's store has. Without a slot folder everything is 404."""

    def __init__(self, driver: Driver, limits: Limits) -> None:
        self._driver = driver
        self._limits = limits

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/snapshots", self._list),
            web.post("/api/snapshots/verify", self._verify),
            web.delete("/api/snapshots/{id}", self._remove),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        """Also while the folder cannot be used, for then a person wants to know why."""
        document = overview(self._snapshots().store, self._limits)
        for entry in document["snapshots"]:
            entry["engines"] = self._engines(entry["fingerprint"])
            name = self._driver.journal.owners.of(entry["id"])
            entry["name"] = str(name) if name else None
        return answer(document)

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        """One line of JSON for each, as soon as it was read: gigabytes take their time.

        The body names some, `{"ids": [...]}`; without one it is all.
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
        """Those that are up and may load files of this kind."""
        tables = self._driver.placement.tables.values()
        there = (table for table in tables if table.up or table.model)  # a model may be loaded again
        return [table.engine for table in there if table.traits.fingerprint == fingerprint]

    def _tell(self, store: Store, id_: SnapshotId) -> None:
        """The scheduler must not offer what was lost. What it had dropped itself it is not given again."""
        now = self._driver.now()
        left = next((kept for kept in store.listing() if kept.id == id_), None)
        if left is None:
            self._driver.post(SnapshotsChanged(at=now, gone=(id_,)))
        elif id_ in self._driver.placement.catalog:
            offset = now - time.time()
            self._driver.post(SnapshotsChanged(at=now, snapshots=(snapshot(left, offset),)))


# -- documents, of any store ---------------------------------------------------------------------------


def overview(store: Store, limits: Limits | None = None) -> dict[str, Any]:
    """All that is kept, what was used last in front. Sizes are in bytes."""
    listing = sorted(store.listing(), key=lambda kept: kept.use.used, reverse=True)
    budgets = {Tier.HOT: limits.hot_bytes, Tier.COLD: limits.cold_bytes} if limits else {}
    trouble = store.trouble
    return {
        "trouble": {"kind": trouble.trouble.value, "what": str(trouble)} if trouble else None,
        "tiers": [
            {
                "tier": tier.value,
                "snapshots": sum(tier in kept.tiers for kept in listing),
                "bytes": size,
                "budget_bytes": budgets.get(tier),
            }
            for tier, size in store.sizes().items()
        ],
        "snapshots": [described(kept) for kept in listing],
    }


def described(kept: Kept) -> dict[str, Any]:
    """`restores` are those that the engine's own count said were worth it, `failures` the others."""
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
        "build": manifest.build,
    }


async def verified(store: Store, id_: SnapshotId) -> dict[str, Any]:
    """Hash every copy of it again, off the loop; what is damaged goes to quarantine."""
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
    """A wall clock's time, whatever a manifest or an index says that it is."""
    possible = min(max(0.0, seconds), LAST_SECOND)
    return datetime.fromtimestamp(possible, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


# -- what was asked ------------------------------------------------------------------------------------


def _named(body: bytes) -> Sequence[SnapshotId]:
    """The ids in a body; none means all."""
    if not body.strip():
        return ()
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError:
        asked = None
    ids = asked.get("ids") if isinstance(asked, dict) else None
    if not ids or not isinstance(ids, list):
        raise refused(web.HTTPBadRequest, 'the body must be {"ids": ["...", ...]}, or empty')
    return list(map(_checked, ids))


def _checked(word: Any) -> SnapshotId:
    if not isinstance(word, str) or not files.ours(word + files.SLOT):
        raise refused(web.HTTPBadRequest, f"{word!r} is no id of a snapshot")
    return SnapshotId(word)
