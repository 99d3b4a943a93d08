"""The index: what changes about a snapshot after it was kept. SQLite, in one thread.

The folders and manifests are the truth. Without the index nothing is lost but the counts of use, so a
damaged one is rebuilt.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slotkeeper.scheduler.snapshots import SnapshotId

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
