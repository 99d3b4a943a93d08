"""All snapshots that the store knows: in memory, and what changes about them in SQLite.

The folders and manifests are the truth. Without the index nothing is lost but the counts of use, so a
damaged one is rebuilt.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from slotkeeper.scheduler.slot_contents import Snapshot, SnapshotId, Tier
from slotkeeper.scheduler.types import Tokens
from slotkeeper.store.files import Lane
from slotkeeper.store.manifest import Manifest
from slotkeeper.store.trouble import INDEX, HaltedError, MissingError, StoreError, StoreHealth, Trouble

VERSION: Final = 1
BUSY_SECONDS: Final = 2.0
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS snapshots (
    id TEXT PRIMARY KEY,
    used REAL NOT NULL,
    restores INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """`used`: wall clock, seconds. `restores` were worth it, `failures` were not."""

    used: float
    restores: int = 0
    failures: int = 0


class Index:
    """All its methods belong to one thread, the one that opened it. They raise sqlite3.Error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: sqlite3.Connection | None = None

    def open(self, known: Mapping[SnapshotId, float]) -> dict[SnapshotId, Use]:
        """Make it agree with the snapshots that are there (id -> created), and read it."""
        try:
            return self._agree(known)
        except sqlite3.OperationalError:  # locked, no room, read-only: not a fault of what is in it
            raise
        except (sqlite3.DatabaseError, ValueError, TypeError):
            self.close()
            for suffix in ("", "-journal"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            return self._agree(known)

    def add(self, snapshot: SnapshotId, created: float) -> None:
        with self._connection() as rows:
            rows.execute("INSERT OR IGNORE INTO snapshots (id, used) VALUES (?, ?)", (snapshot, created))

    def used(self, snapshot: SnapshotId, now: float, *, paid: bool) -> None:
        column = "restores" if paid else "failures"
        with self._connection() as rows:
            rows.execute(
                f"UPDATE snapshots SET used = ?, {column} = {column} + 1 WHERE id = ?",  # noqa: S608 - ours
                (now, snapshot),
            )

    def drop(self, gone: Iterable[SnapshotId]) -> None:
        with self._connection() as rows:
            rows.executemany("DELETE FROM snapshots WHERE id = ?", [(snapshot,) for snapshot in gone])

    def close(self) -> None:
        if self._rows:
            with suppress(sqlite3.Error):
                self._rows.close()
            self._rows = None

    def _agree(self, known: Mapping[SnapshotId, float]) -> dict[SnapshotId, Use]:
        with self._connection() as rows:
            (version,) = rows.execute("PRAGMA user_version").fetchone()
            if version != VERSION:
                rows.execute("DROP TABLE IF EXISTS snapshots")
                rows.execute(f"PRAGMA user_version = {VERSION}")
            rows.execute(_TABLE)
        with closing(
            self._connection().execute("SELECT id, used, restores, failures FROM snapshots")
        ) as all_:
            found = {
                SnapshotId(id_): Use(used=float(used), restores=int(restores), failures=int(failures))
                for id_, used, restores, failures in all_
            }
        self.drop(found.keys() - known.keys())
        with self._connection() as rows:
            rows.executemany("INSERT OR IGNORE INTO snapshots (id, used) VALUES (?, ?)", known.items())
        return {id_: found.get(id_, Use(used=created)) for id_, created in known.items()}

    def _connection(self) -> sqlite3.Connection:
        """Rolled back by a journal file, not a write-ahead log: that needs memory shared with the disk."""
        if self._rows is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(mode=0o600)  # SQLite would ask the umask
            self._rows = sqlite3.connect(self._path, timeout=BUSY_SECONDS)
            self._rows.execute("PRAGMA synchronous = NORMAL")
        return self._rows


# -- one snapshot ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """`tiers` is where its file lies: one of them, or both."""

    manifest: Manifest
    tokens: Tokens
    tiers: frozenset[Tier]
    use: Use

    @property
    def id(self) -> SnapshotId:
        return self.manifest.id

    @property
    def quickest(self) -> list[Tier]:
        """The tiers that have it, the quickest first."""
        return [tier for tier in Tier if tier in self.tiers]


def snapshot(kept: Kept, clock_offset: float) -> Snapshot:
    """For the scheduler. `clock_offset` is what to add to the wall clock to get its own, in seconds."""
    manifest = kept.manifest
    return Snapshot(
        id=manifest.id,
        fingerprint=manifest.fingerprint,
        tokens=kept.tokens.within(manifest.namespace),
        size=manifest.size,
        checkpoints=manifest.checkpoints,
        repaired=manifest.repaired,
        draft=manifest.draft,
        tier=kept.quickest[0],
        created=manifest.created + clock_offset,
        used=kept.use.used + clock_offset,
        restores=kept.use.restores,
        shared=manifest.golden,
        golden=manifest.golden and kept.use.restores > 0,
    )


# -- all of them -----------------------------------------------------------------------------------------

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

    async def brought(self, snapshot: SnapshotId, manifest: Manifest) -> None:
        """Its file came to the hot tier, or another of the same state, with a size and hash of its own."""
        self._kept[snapshot] = replace(self[snapshot], manifest=manifest)
        await self.lies(snapshot, Tier.HOT, there=True)

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
