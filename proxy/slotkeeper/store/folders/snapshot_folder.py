"""One folder of snapshots: each is a slot file `ID.slot` with a manifest `ID.json`, else it is unused.

The manifest is written last and removed first. So a process that is killed in between leaves either a
complete snapshot or files that the next sweep deletes. All functions block.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Final

from slotkeeper.scheduler.slots.slot_contents import SnapshotId, Tier
from slotkeeper.store import files
from slotkeeper.store.files import Halt, Stamp
from slotkeeper.store.folders.joined import Source
from slotkeeper.store.manifest import (
    LARGEST,
    Flaw,
    Manifest,
    Seal,
    decode,
    encode,
    possible,
    seal_of,
    taken_over,
)
from slotkeeper.store.trouble import MissingError, StoreError, Trouble, UnfitError, troubles

RESERVE: Final = 64 << 20  # bytes left free: the folder may share its disk with the engine's log and ours
GIVEN_UP: Final = 64  # names of files that an engine may still write
QUARANTINED: Final = 8  # files kept for inspection
QUARANTINE_BYTES: Final = 4 << 30
# Errors that one file may have in a folder that can be used: the disk cannot read it, or we may not.
OF_ONE_FILE: Final = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EACCES, errno.EPERM})


class SnapshotFolder:
    """One folder of snapshots. Two threads may use it at once, but not for the same snapshot."""

    def __init__(self, folder: Path, tier: Tier) -> None:
        self.path = folder
        self.tier = tier
        self._lock: FileIO | None = None
        self._one_at_a_time = threading.RLock()  # two lanes may take the lock at the same moment
        self._seal: Seal | None = None  # set by `claim`
        self.unread = True  # it was not swept since it was locked
        self._given_up: deque[str] = deque(maxlen=GIVEN_UP)
        self._proved: dict[SnapshotId, Stamp] = {}  # files whose hash this process has verified

    def __repr__(self) -> str:
        return f"<SnapshotFolder {self.tier} {self.path} {'open' if self._lock else 'closed'}>"

    @property
    def ready(self) -> bool:
        """Whether the folder is locked for this sidecar."""
        return self._lock is not None

    @property
    def claimed(self) -> bool:
        """Whether the folder's seal was read."""
        return self._seal is not None

    def claim(self) -> None:
        """Make the folder, take its lock and read its seal. Raises StoreError. May be called again."""
        with troubles(f"use {self.path} for snapshots"), self._one_at_a_time:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            self._seal = seal_of(self.path)

    def probe(self, now: float) -> None:
        """Check that a byte can be written and that the reserve is free. Raises StoreError."""
        with troubles(f"write to {self.path}"):
            path = self.path / files.new_temporary(now)
            try:
                with FileIO(path, "xb") as file:
                    file.write(b"\0")
            finally:
                path.unlink(missing_ok=True)
        self.demand(0)

    def demand(self, size: int) -> None:
        """Check that `size` bytes and the reserve are free. Raises StoreError if not.

        Files that an engine has written too late are removed first.
        If another folder is in this place, as when a disk is unmounted or mounted, it is claimed.
        """
        self._remove_late()
        with troubles(f"look at {self.path}"):
            free = self.free()
            replaced = self._lock is not None and not self._held()
        if replaced:
            self.claim()
        if free < size + RESERVE:
            need = f"{size + RESERVE >> 20} MiB are needed and {free >> 20} MiB are free"
            raise StoreError(Trouble.DISK_FULL, f"No room in {self.path}: {need}")

    def free(self) -> int:
        """Return the free bytes of the folder's disk. Raises OSError."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def discard(self, temporary: str) -> None:
        """Remove an engine's temporary file. If it is not there, the engine may write it later."""
        self._given_up.append(temporary)
        with suppress(FileNotFoundError):
            (self.path / temporary).unlink()
            self._given_up.remove(temporary)

    def _remove_late(self) -> None:
        for name in tuple(self._given_up):
            with suppress(OSError, ValueError):  # not there, or another lane has removed it
                (self.path / name).unlink()
                self._given_up.remove(name)

    def close(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def slot(self, snapshot: SnapshotId) -> Path:
        return self.path / (snapshot + files.SLOT)

    def manifest(self, snapshot: SnapshotId) -> Path:
        return self.path / (snapshot + files.MANIFEST)

    def admit(self, temporary: Path, manifest: Manifest, before: Stamp) -> None:
        """Rename a hashed temporary file to its snapshot's name, then write its manifest.

        `before` is the file's stamp when it was hashed; the rename changes only its ctime.
        Raises UnfitError if the file has changed since, or if the manifest is not plausible; OSError.
        """
        final = self.slot(manifest.id)
        if not possible(manifest):  # `decode` would not accept it
            raise UnfitError(f"its values are impossible: checkpoints at {manifest.checkpoints}")
        try:
            temporary.replace(final)
            files.sync_folder(self.path)
            with files.open_ours(final) as file:
                after = files.stamp(file)
            if (after.inode, after.size, after.mtime_ns) != (before.inode, before.size, before.mtime_ns):
                raise UnfitError(f"{final.name} was changed while it was taken in")  # noqa: TRY301
            self._write(manifest)
        except BaseException:
            self.drop(manifest.id)  # if the disk is too full for a manifest, free the gigabytes at once
            raise
        self._proved[manifest.id] = after

    def check(self, manifest: Manifest, halt: Halt, *, reread: bool = False) -> int:
        """Verify the slot file by its hash, unless its stamp proves that nothing changed (not with `reread`).

        Returns the number of bytes read. Raises UnfitError for a file that was changed, or that alone cannot
        be read, MissingError if the folder is there but not the file, and OSError.
        """
        with self._reading(manifest.id), self.open(manifest.id) as file:
            if not reread and self._proved.get(manifest.id) == files.stamp(file):
                return 0
            self._proved.pop(manifest.id, None)
            dated = _settled(file)
            before = files.stamp(file)
            if before.size != manifest.size:
                raise UnfitError(f"{manifest.id} has {before.size} bytes, not {manifest.size}")
            passed = files.hash_bytes(file, halt)
            if passed.sha256 != manifest.sha256 or files.stamp(file) != before:
                raise UnfitError(f"{manifest.id} was changed after it was kept")
            if dated:
                self._proved[manifest.id] = before
            return passed.size

    @contextmanager
    def _reading(self, snapshot: SnapshotId) -> Iterator[None]:
        """Turn an error of this one file into UnfitError. OSError passes if the folder cannot be used."""
        try:
            yield
        except OSError as error:
            if error.errno in OF_ONE_FILE and self._held():
                raise UnfitError(f"{snapshot} cannot be read: {error.strerror}") from error
            raise

    def count(self) -> None:
        """Take stock before a sweep, in a folder that keeps accounts of what it holds. Raises OSError."""

    def open(self, snapshot: SnapshotId) -> Source:
        """Open a slot file. Raises UnfitError for a link, MissingError as `check` does, and OSError."""
        try:
            return files.open_ours(self.slot(snapshot))
        except FileNotFoundError as error:
            if self._held():  # else the folder itself is not there
                raise MissingError(f"{snapshot} is not in {self.path} any more") from error
            raise
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UnfitError(f"{snapshot} is not a plain file: {error.strerror}") from error
            raise

    def read_manifest(self, snapshot: SnapshotId) -> Manifest | Flaw:
        try:
            with files.open_ours(self.manifest(snapshot)) as file:
                return decode(file.read(LARGEST), snapshot, self.seal.secret, unkeyed=self.seal.takes_over)
        except OSError as error:
            if error.errno == errno.ELOOP:
                return Flaw.FOREIGN
            raise

    @property
    def seal(self) -> Seal:
        if self._seal is None:
            raise AssertionError("a folder is claimed before it is used")
        return self._seal

    def take_over(self, found: Iterable[Manifest]) -> None:
        """Seal the manifests in `found` with our secret: once, for folders of releases that had no secret."""
        if self.seal.takes_over:
            for manifest in found:
                self._write(manifest)
            self._seal = taken_over(self.path, self.seal)

    def _write(self, manifest: Manifest) -> None:
        place = self.path / files.new_temporary(manifest.created)
        files.write_small(self.manifest(manifest.id), place, encode(manifest, self.seal.secret))

    def drop(self, snapshot: SnapshotId) -> None:
        self._proved.pop(snapshot, None)
        files.remove(self.manifest(snapshot))
        files.remove(self.slot(snapshot))

    def quarantine(self, snapshot: SnapshotId) -> None:
        """Move a slot file that must not be used to a folder for inspection.

        It is deleted if it is not plain, or if it cannot be moved, as on a full disk.
        """
        files.remove(self.manifest(snapshot))
        with suppress(OSError):
            _set_aside(self.slot(snapshot), self.path / files.QUARANTINE)
        self.drop(snapshot)

    def _held(self) -> bool:
        """Whether the folder is the one that we have locked. Raises OSError."""
        path = self.path / files.LOCK
        with self._one_at_a_time:
            return (
                self._lock is not None
                and path.exists()
                and os.path.samestat(os.fstat(self._lock.fileno()), path.lstat())
            )

    def _take_lock(self) -> None:
        """Lock the folder for this sidecar: a second one would sweep away files that are being written.

        The lock is advisory; the system releases it when the process ends in any way. The file stays: if it
        were removed, two processes could hold a lock of the same name.
        """
        path = self.path / files.LOCK
        if self._held():
            return
        self.close()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = FileIO(os.open(path, flags, 0o600), "rb+")
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                lock.close()
                raise StoreError(Trouble.IN_USE, f"{self.path} is taken") from error
            # Some network file systems have no locks; then we assume that no other sidecar is here.
        self._lock, self.unread = lock, True


def _settled(file: RawIOBase) -> bool:
    try:
        files.settle(file)
    except OSError:  # in a read-only folder the file is usable, but must be hashed each time
        return False
    return True


def _is_plain(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether the path exists and is of this kind, and no link, which could lead out of the folder."""
    try:
        return kind(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _set_aside(source: Path, aside: Path) -> None:
    with suppress(FileExistsError):
        aside.mkdir(mode=0o700)
    if _is_plain(source, stat.S_ISREG) and _is_plain(aside, stat.S_ISDIR):
        source.replace(aside / source.name)
        _bound(aside)


def _bound(aside: Path) -> None:
    """Delete the oldest quarantined files above the bounds: these files hold prompts, and are large."""
    found = sorted(path for path in aside.iterdir() if files.ours(path.name))  # ids begin with the time
    sizes = [path.lstat().st_size for path in found]
    while found and (len(found) > QUARANTINED or sum(sizes) > QUARANTINE_BYTES):
        files.remove(found.pop(0))
        sizes.pop(0)
