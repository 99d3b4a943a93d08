"""The index of all snapshots in the store: in memory, with the counts of their use in SQLite.

The folders and manifests are authoritative. The index holds only the counts of use, so a damaged index is
rebuilt.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import Snapshot, SnapshotId
from slotkeeper.scheduler.types import Tier
from slotkeeper.store.files import Lane
from slotkeeper.store.manifest import LATEST, Manifest
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
    """How a snapshot was used.

    `used` is the wall clock of the last use, in seconds. `restores` counts the restores after which the
    engine reused the state, `failures` those after which it did not.
    """

    used: float
    restores: int = 0
    failures: int = 0


def _use(used: float, restores: int, failures: int) -> Use:
    """Raises ValueError for numbers that we never write."""
    if not 0.0 <= used <= LATEST or restores < 0 or failures < 0:
        raise ValueError
    return Use(used=used, restores=restores, failures=failures)


class Index:
    """The counts of use in SQLite. Only the thread that opened it may use it. Methods raise sqlite3.Error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: sqlite3.Connection | None = None

    def open(self, known: Mapping[SnapshotId, float]) -> dict[SnapshotId, Use]:
        """Make the index agree with the snapshots in the store (id -> creation time), and read it.

        A damaged index file is removed and created again.
        """
        try:
            return self._agree(known)
        except sqlite3.OperationalError:  # locked, no room, read-only: the contents are not at fault
            raise
        except (sqlite3.DatabaseError, ValueError, TypeError, OverflowError):
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
                SnapshotId(id_): _use(float(used), int(restores), int(failures))
                for id_, used, restores, failures in all_
            }
        self.drop(found.keys() - known.keys())
        with self._connection() as rows:
            rows.executemany("INSERT OR IGNORE INTO snapshots (id, used) VALUES (?, ?)", known.items())
        return {id_: found.get(id_, Use(used=created)) for id_, created in known.items()}

    def _connection(self) -> sqlite3.Connection:
        """Return the connection; open it first if needed.

        It uses a rollback journal: a write-ahead log needs shared memory beside the database file.
        """
        if self._rows is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(mode=0o600)  # SQLite would use the umask
            self._rows = sqlite3.connect(self._path, timeout=BUSY_SECONDS)
            self._rows.execute("PRAGMA synchronous = NORMAL")
        return self._rows


# -- one snapshot ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One snapshot in the store. `tiers` are those that have its file: one of them, or both.

    `cold_bytes` are the bytes that count for it in a cold folder, where it may have others in common with
    newer snapshots. None: they were not counted, or it is not there.
    """

    manifest: Manifest
    tokens: Tokens
    tiers: frozenset[Tier]
    use: Use
    cold_bytes: int | None = None

    @property
    def id(self) -> SnapshotId:
        return self.manifest.id

    @property
    def quickest(self) -> list[Tier]:
        """The tiers that have the file, the quickest first."""
        return [tier for tier in Tier if tier in self.tiers]


def snapshot(kept: Kept, clock_offset: float, *, now: float) -> Snapshot:
    """Return the snapshot as the scheduler knows it.

    `clock_offset`, in seconds, converts the wall clock to the scheduler's clock. No time is later than `now`,
    by the latter: a clock that was ahead has written such times.
    """
    manifest = kept.manifest
    return Snapshot(
        id=manifest.id,
        fingerprint=manifest.fingerprint,
        tokens=kept.tokens.within(manifest.space),
        size=manifest.size,
        checkpoints=manifest.checkpoints,
        repaired=manifest.repaired,
        draft=manifest.draft,
        tier=kept.quickest[0],
        cold_bytes=kept.cold_bytes,
        created=min(now, manifest.created + clock_offset),
        used=min(now, kept.use.used + clock_offset),
        restores=kept.use.restores,
        shared=manifest.golden,
        golden=manifest.golden and kept.use.restores > 0,
    )


def by_our_clock(kept: Kept) -> Snapshot:
    """Return the snapshot with times of this process's monotonic clock, which is the scheduler's."""
    now = time.monotonic()
    return snapshot(kept, now - time.time(), now=now)


# -- all of them -----------------------------------------------------------------------------------------

T = TypeVar("T")


class Catalogue:
    """All snapshots of the store. Only the event loop's thread changes it.

    If the index fails, the catalogue keeps working and sets a remark in the store's health.
    """

    def __init__(self, index: Path, health: StoreHealth) -> None:
        self._index = Index(index)
        self._health = health
        self._lane = Lane("index")
        self._kept: dict[SnapshotId, Kept] = {}
        # Weak, so that only locks that are held or waited for stay, also for ids of unknown snapshots.
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
        """Return the lock that a task holds while it works on the snapshot's files."""
        return self._locks.setdefault(snapshot, asyncio.Lock())

    async def load(self, found: Iterable[Kept]) -> None:
        """Replace all entries by these, each with its counts of use from the index."""
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

    async def note_tier(self, snapshot: SnapshotId, tier: Tier, *, there: bool) -> None:
        """Record whether a tier has the snapshot's file. A snapshot without any file is dropped."""
        kept = self[snapshot]
        tiers = kept.tiers | {tier} if there else kept.tiers - {tier}
        if tiers:
            self._kept[snapshot] = replace(kept, tiers=tiers)
            return
        del self._kept[snapshot]
        await self._remember(lambda: self._index.drop([snapshot]))

    def counted(self, snapshot: SnapshotId, cold_bytes: int) -> Kept:
        """Record the bytes that count for a snapshot in the cold tier."""
        self._kept[snapshot] = replace(self[snapshot], cold_bytes=cold_bytes)
        return self._kept[snapshot]

    async def brought(self, snapshot: SnapshotId, manifest: Manifest) -> None:
        """Record that the file was brought to the hot tier.

        It may be another sidecar's file of the same state, with another size and hash; so the manifest
        is replaced.
        """
        self._kept[snapshot] = replace(self[snapshot], manifest=manifest)
        await self.note_tier(snapshot, Tier.HOT, there=True)

    async def close(self) -> None:
        with suppress(HaltedError):  # the lane is already closed
            await self._remember(self._index.close)
        await self._lane.close()

    async def _remember(self, work: Callable[[], T]) -> T | None:
        try:
            result = await self._lane.do(lambda _: work())
        except (sqlite3.Error, OSError) as error:
            what = f"The use of snapshots is not remembered: {error}"
            self._health.remark(INDEX, StoreError(Trouble.BROKEN, what))
            return None
        self._health.remark(INDEX, None)
        return result
