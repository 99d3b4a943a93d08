"""The cold folder: a folder of snapshots that stores the parts (runs) which states have in common once.

Instead of a slot file `ID.slot` a snapshot has a list `ID.runs` here, and its parts are files in a folder of
their own, named by their contents. A state is written in this order: the parts that are not there yet, the
list, the manifest; it is removed in the opposite order. So a killed process leaves parts that no list names,
never a list without parts. A file that has to stay whole (`slotfile.divided`) is `ID.slot` here too.

A part that no snapshot has any more is removed with the last one, or stays as a leftover while there is room:
a state that moved to the hot folder may well come back, and then hardly anything has to be written.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import FileIO
from math import inf
from pathlib import Path
from typing import Final

from slotkeeper import system
from slotkeeper.engine.slotfile import Recipe
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.scheduler.types import Tier
from slotkeeper.store import files
from slotkeeper.store.files import Halt, Stamp
from slotkeeper.store.folders import joined
from slotkeeper.store.folders.joined import JoinedFile, Parts, Source
from slotkeeper.store.folders.snapshot_folder import RESERVE, SnapshotFolder
from slotkeeper.store.intake import copying, transfer
from slotkeeper.store.manifest import Manifest
from slotkeeper.store.trouble import StoreError, Trouble, UnfitError

_NAME: Final = re.compile(rf"[0-9a-f]{{{joined.NAME}}}")


class RunFolder(SnapshotFolder):
    """A folder of snapshots in parts. Leftovers stay while everything fits into `room` bytes."""

    def __init__(self, folder: Path, tier: Tier) -> None:
        super().__init__(folder, tier)
        self.room = inf
        self._runs = folder / files.RUN_FOLDER
        self._shares = Shares()
        self._guard = threading.Lock()  # of the accounts, and of what they say is on the disk
        self._sound: dict[str, Stamp] = {}  # parts whose hash this process has verified

    def own_bytes(self, snapshot: SnapshotId) -> int:
        """Return the bytes that count for a snapshot (`Shares`)."""
        with self._guard:
            return self._shares.own(snapshot)

    def count(self) -> None:
        with self._guard:
            self._shares = Shares()
            for path in self.path.iterdir():
                if found := files.ours(path.name):
                    with suppress(FileNotFoundError):  # another lane has just removed it
                        self._count(path, *found)
            for _, name, size in sorted(self._stored()):
                self._shares.left(name, size)

    def _count(self, path: Path, snapshot: SnapshotId, suffix: str) -> None:
        if suffix == files.SLOT:
            self._shares.add(snapshot, {path.name: path.lstat().st_size})
        elif suffix == files.RUNS and (parts := self._listed(snapshot)):
            self._shares.add(snapshot, self._sizes(parts, path.lstat().st_size, path.name))

    def open(self, snapshot: SnapshotId) -> Source:
        try:
            listing = files.open_ours(self._list(snapshot))
        except FileNotFoundError:
            return super().open(snapshot)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UnfitError(f"{snapshot} is not a plain file: {error.strerror}") from error
            raise
        try:
            return self._joined(listing, snapshot)
        except BaseException:
            listing.close()
            raise

    def _joined(self, listing: FileIO, snapshot: SnapshotId) -> JoinedFile:
        parts = joined.decode(listing.read(joined.LARGEST), snapshot, self.seal.secret)
        if parts is None:
            raise UnfitError(f"the list of {snapshot} was changed")
        paths = [self._runs / name for name in parts.names(self.seal.secret)]
        for path, size in zip(paths, parts.division.sizes, strict=True):
            try:
                there = path.lstat().st_size
            except FileNotFoundError:
                there = -1
            if there != size:
                raise UnfitError(f"a part of {snapshot} has {there} bytes, not {size}")
        return JoinedFile(listing, parts, paths)

    def check(self, manifest: Manifest, halt: Halt, *, reread: bool = False) -> int:
        if not self._list(manifest.id).exists():
            return super().check(manifest, halt, reread=reread)
        with self._reading(manifest.id), self.open(manifest.id) as file:
            passed = files.hash_bytes(file, halt)
        if (passed.size, passed.sha256) != (manifest.size, manifest.sha256):
            raise UnfitError(f"{manifest.id} was changed after it was kept")
        return passed.size

    # -- writing -----------------------------------------------------------------------------------

    def take(self, manifest: Manifest, source: SnapshotFolder, now: float, halt: Halt) -> tuple[int, float]:
        """Copy a snapshot from another folder. Returns the bytes written, and the seconds that took.

        Raises as `transfer` does; after an error nothing of it is left.
        """
        source.check(manifest, halt)
        with copying(source, manifest, halt), source.open(manifest.id) as file:
            parts = joined.parts_of(file, manifest, halt)
            listing = joined.encode(parts, manifest.id, self.seal.secret) if parts else b""
            began = time.monotonic()
            if parts is None or len(listing) > joined.LARGEST:
                transfer(source, self, manifest, now, halt)
                with self._guard:
                    self._shares.add(manifest.id, {self.slot(manifest.id).name: manifest.size})
                return manifest.size, time.monotonic() - began
            try:
                written, seconds = self._write_missing(parts, listing, file, manifest, halt)
                source.check(manifest, halt)  # that it was not changed meanwhile
                self._write(manifest)
            except BaseException:
                self.drop(manifest.id)
                raise
            return written, seconds

    def _write_missing(
        self, parts: Parts, listing: bytes, file: Source, manifest: Manifest, halt: Halt
    ) -> tuple[int, float]:
        """Write the parts that are not there, and the list. Returns as `take` does."""
        target = self._list(manifest.id)
        names, sizes = parts.names(self.seal.secret), self._sizes(parts, len(listing), target.name)
        with self._guard:  # from here on no other thread removes one of them
            self._shares.add(manifest.id, sizes)
        digests = dict(zip(names, parts.digests, strict=True))
        recipes = dict(zip(names, parts.division.parts(), strict=True))
        missing = [name for name in recipes if not self._is_sound(name, digests[name], halt)]
        written = sum(sizes[name] for name in missing) + len(listing)
        self._demand(written)
        began = time.monotonic()
        if missing:
            self._make_folder()
        for name in missing:
            if self._pour(recipes[name], file, self._runs / name, manifest.created, halt) != digests[name]:
                raise UnfitError(f"{manifest.id} was changed while it was copied")
            with files.open_ours(self._runs / name) as part:
                self._sound[name] = files.stamp(part)
        if missing:
            system.sync_folder(self._runs)
        self._pour((listing,), file, target, manifest.created, halt)
        system.sync_folder(self.path)
        return written, time.monotonic() - began

    def _pour(self, recipe: Recipe, source: Source, target: Path, now: float, halt: Halt) -> str:
        """Write a file that exists whole or not at all. Returns its SHA-256."""
        path = self.path / files.new_temporary(now)
        try:
            passed = files.pour(recipe, source, path, halt)
            with files.open_ours(path) as file:
                files.settle(file)
            path.replace(target)
        finally:
            path.unlink(missing_ok=True)
        return passed.sha256

    def _is_sound(self, name: str, digest: str, halt: Halt) -> bool:
        """Whether a part is there and has the right bytes; they are read once in the life of this process."""
        try:
            with files.open_ours(self._runs / name) as file:
                now = files.stamp(file)
                if self._sound.get(name) != now:
                    if files.hash_bytes(file, halt).sha256 != digest:
                        return False
                    self._sound[name] = now
        except OSError:
            return False
        return True

    def _demand(self, size: int) -> None:
        """Remove leftovers beyond the room of the folder, and all that are needed for room on the disk."""
        self._remove_leftovers(self.room)
        try:
            self.demand(size)
        except StoreError as error:
            if error.trouble is not Trouble.DISK_FULL:
                raise
            with suppress(OSError):
                self._remove_leftovers(self._shares.total - size - RESERVE + self.free())
            self.demand(size)

    def _make_folder(self) -> None:
        with suppress(FileExistsError):
            self._runs.mkdir(mode=0o700)
        if not stat.S_ISDIR(self._runs.lstat().st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(self._runs))

    # -- removing ----------------------------------------------------------------------------------

    def drop(self, snapshot: SnapshotId) -> None:
        """Remove a snapshot, and the parts that no other one has."""
        super().drop(snapshot)
        with self._guard:
            for name in self._released(snapshot):
                self._remove(name)

    def release(self, snapshot: SnapshotId) -> None:
        """Remove a snapshot that has moved to the hot folder; its parts may stay as leftovers."""
        super().drop(snapshot)
        with self._guard:
            self._released(snapshot)

    def _released(self, snapshot: SnapshotId) -> list[str]:
        """Remove a snapshot's list. Returns the parts that no other snapshot has."""
        files.remove(self._list(snapshot))
        alone = self._shares.drop(snapshot)
        for name in alone:
            if not _NAME.fullmatch(name):
                self._shares.gone(name)
        return list(filter(_NAME.fullmatch, alone))

    def quarantine(self, snapshot: SnapshotId) -> None:
        """Remove a snapshot that must not be used, and its damaged parts.

        Other snapshots with such a part cannot be used either, until a copy writes it again. A file that is
        not in parts is kept for inspection, as in any folder.
        """
        with suppress(OSError):
            if parts := self._listed(snapshot):
                for name, digest in zip(parts.names(self.seal.secret), parts.digests, strict=True):
                    self._sound.pop(name, None)
                    if not self._is_sound(name, digest, Halt()):
                        files.remove(self._runs / name)
        super().quarantine(snapshot)

    def _remove_leftovers(self, room: float) -> None:
        with self._guard:
            for name in self._shares.beyond(room):
                self._remove(name)

    def _remove(self, name: str) -> None:
        """Remove a leftover. Before a sweep it is not known what other snapshots have."""
        if not self.unread:
            files.remove(self._runs / name)
            self._sound.pop(name, None)
            self._shares.gone(name)

    # -- names -------------------------------------------------------------------------------------

    def _list(self, snapshot: SnapshotId) -> Path:
        return self.path / (snapshot + files.RUNS)

    def _listed(self, snapshot: SnapshotId) -> Parts | None:
        """Read the list of a snapshot, without its frame; None if there is none, or if it cannot be used."""
        try:
            with files.open_ours(self._list(snapshot)) as file:
                data = file.read(joined.LARGEST)
                return joined.decode(data, snapshot, self.seal.secret, framed=False)
        except OSError:
            return None

    def _sizes(self, parts: Parts, listing: int, name: str) -> Mapping[str, int]:
        """Return the bytes of the parts and of the list, by their names."""
        named = zip(parts.names(self.seal.secret), parts.division.sizes, strict=True)
        return {**dict(named), name: listing}

    def _stored(self) -> Iterator[tuple[int, str, int]]:
        """Yield the time of each part in ns, its name and its bytes."""
        if self._runs.is_dir() and not self._runs.is_symlink():
            with os.scandir(self._runs) as entries:
                for entry in entries:
                    if _NAME.fullmatch(entry.name):
                        found = entry.stat(follow_symlinks=False)
                        yield found.st_mtime_ns, entry.name, found.st_size


# -- accounts of the parts that snapshots have in common: pure, no files ---------------------------------


class _Part:
    """One part: its name and bytes, and the snapshots that have it."""

    __slots__ = ("holders", "name", "size")

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.holders: list[SnapshotId] = []

    @property
    def holder(self) -> SnapshotId | None:
        """The snapshot for which it counts."""
        return max(self.holders, default=None)


class Shares:
    """The bytes of each part, and who has it. Newer snapshots have greater ids.

    Every part is stored once and counts once: for the newest snapshot that has it. So dropping an old state
    of a conversation frees what is counted for it, and the sum is what the disk holds. Parts that no snapshot
    has any more may stay as leftovers, the oldest first in line to go.
    """

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._of: dict[SnapshotId, tuple[_Part, ...]] = {}
        self._own: dict[SnapshotId, int] = {}
        self._left: dict[str, None] = {}  # leftovers, the oldest first
        self.total = 0  # bytes of all parts, with leftovers

    def __repr__(self) -> str:
        return f"<Shares of {len(self._of)} in {len(self._parts)} parts, {len(self._left)} left over>"

    def own(self, snapshot: SnapshotId) -> int:
        """Return the bytes that count for a snapshot; 0 if it is unknown."""
        return self._own.get(snapshot, 0)

    def left(self, part: str, size: int) -> None:
        """Add a part that no snapshot has."""
        if part not in self._parts:
            self._parts[part] = _Part(part, size)
            self._left[part] = None
            self.total += size

    def add(self, snapshot: SnapshotId, parts: Mapping[str, int]) -> None:
        """Add a snapshot with its parts and their bytes; nothing if it is known already."""
        if snapshot in self._of:
            return
        self._own[snapshot] = 0
        for name, size in parts.items():
            self.left(name, size)
            self._left.pop(name, None)
            self._counted(self._parts[name], -1)
            self._parts[name].holders.append(snapshot)
            self._counted(self._parts[name], 1)
        self._of[snapshot] = tuple(self._parts[name] for name in parts)

    def drop(self, snapshot: SnapshotId) -> list[str]:
        """Remove a snapshot. Returns the parts that no other one has: they are leftovers now."""
        alone = []
        for part in self._of.pop(snapshot, ()):
            self._counted(part, -1)
            part.holders.remove(snapshot)
            self._counted(part, 1)
            if not part.holders:
                self._left[part.name] = None
                alone.append(part.name)
        self._own.pop(snapshot, None)
        return alone

    def gone(self, part: str) -> None:
        """Forget a leftover, because it was removed."""
        if part in self._left:
            del self._left[part]
            self.total -= self._parts.pop(part).size

    def beyond(self, room: float) -> Iterator[str]:
        """Yield the leftovers to be removed, by the caller, until all parts fit into `room` bytes."""
        over = self.total - room
        for name in [*self._left]:
            if over <= 0:
                return
            over -= self._parts[name].size
            yield name

    def _counted(self, part: _Part, sign: int) -> None:
        if part.holder is not None:
            self._own[part.holder] += sign * part.size
