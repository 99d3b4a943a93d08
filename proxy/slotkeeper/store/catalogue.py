"""All snapshots that the store knows, in memory; what changes about them is in the index as well."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from slotkeeper.scheduler.snapshots import SnapshotId, Tier
from slotkeeper.store.health import INDEX, StoreHealth
from slotkeeper.store.index import Index
from slotkeeper.store.kept import Kept
from slotkeeper.store.lanes import Lane
from slotkeeper.store.trouble import HaltedError, MissingError, StoreError, Trouble

T = TypeVar("T")


class Catalogue:
    """Changed in the event loop's thread alone. When its index fails it goes on, with a remark."""

    def __init__(self, index: Path, health: StoreHealth) -> None:
        self._index = Index(index)
        self._health = health
        self._lane = Lane("index")
        self._kept: dict[SnapshotId, Kept] = {}
        # Locks that are held or waited for: asking for snapshots that are not there leaves nothing.
        self._locks: WeakValueDictionary[SnapshotId, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, snapshot: SnapshotId) -> Kept:
        if kept := self._kept.get(snapshot):
            return kept
        raise MissingError(f"there is no snapshot {snapshot}")

    def __contains__(self, snapshot: SnapshotId) -> bool:
        return snapshot in self._kept

    def listing(self) -> list[Kept]:
        return list(self._kept.values())

    def lock(self, snapshot: SnapshotId) -> asyncio.Lock:
        """Held by the task that works on its files."""
        return self._locks.setdefault(snapshot, asyncio.Lock())

    async def load(self, found: Iterable[Kept]) -> None:
        """Know these and no others, each with the use that the index remembers."""
        self._kept = {kept.id: kept for kept in found}
        known = {kept.id: kept.use.used for kept in self._kept.values()}
        uses = await self._remember(lambda: self._index.open(known))
        for id_, use in (uses or {}).items():
            self._kept[id_] = replace(self._kept[id_], use=use)

    async def add(self, kept: Kept) -> None:
        self._kept[kept.id] = kept
        await self._remember(lambda: self._index.add(kept.id, kept.use.used))

    async def used(self, snapshot: SnapshotId, now: float, *, paid: bool) -> None:
        kept = self[snapshot]
        use = replace(
            kept.use,
            used=now,
            restores=kept.use.restores + paid,
            failures=kept.use.failures + (not paid),
        )
        self._kept[snapshot] = replace(kept, use=use)
        await self._remember(lambda: self._index.used(snapshot, now, paid=paid))

    async def lies(self, snapshot: SnapshotId, tier: Tier, *, there: bool) -> None:
        """Its file came to a tier, or is gone from it; with the last one it is forgotten."""
        kept = self[snapshot]
        tiers = kept.tiers | {tier} if there else kept.tiers - {tier}
        if tiers:
            self._kept[snapshot] = replace(kept, tiers=tiers)
            return
        del self._kept[snapshot]
        await self._remember(lambda: self._index.drop([snapshot]))

    async def close(self) -> None:
        with suppress(HaltedError):  # closed before
            await self._remember(self._index.close)
        await self._lane.close()

    async def _remember(self, work: Callable[[], T]) -> T | None:
        try:
            result = await self._lane.do(lambda _: work())
        except (sqlite3.Error, OSError) as error:
            what = f"Uses of snapshots are not remembered: {error}"
            self._health.remark(INDEX, StoreError(Trouble.BROKEN, what))
            return None
        self._health.remark(INDEX, None)
        return result
