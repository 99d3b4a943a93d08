"""One folder of snapshots, its room and its sweep: a slot file `ID.slot` with a manifest `ID.json` for each.

A file without the other is unused. The manifest is written last and removed first. So a process that is
killed in between leaves either a complete snapshot or files that the next sweep deletes. All functions block.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Final

from slotkeeper import system
from slotkeeper.engine.child.memory import free_memory
from slotkeeper.engine.slotfile import Damage, read, tokens_with_images
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.scheduler.snapshots.budgets import FolderRoom
from slotkeeper.scheduler.types import Tier
from slotkeeper.store import files
from slotkeeper.store.files import Halt, Stamp
from slotkeeper.store.folders.joined import Source, size_of
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
from slotkeeper.store.trouble import (
    ADVICE,
    MissingError,
    StoreError,
    Trouble,
    UnfitError,
    trouble_in,
    troubles,
)

RESERVE: Final = 64 << 20  # bytes left free: the folder may share its disk with the engine's log and ours
GIVEN_UP: Final = 64  # names of files that an engine may still write
QUARANTINED: Final = 8  # files kept for inspection
QUARANTINE_BYTES: Final = 4 << 30
# Errors that one file may have in a folder that can be used: the disk cannot read it, or we may not.
OF_ONE_FILE: Final = system.DAMAGED | {errno.EACCES, errno.EPERM}


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
        return shutil.disk_usage(self.path).free

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
            system.sync_folder(self.path)
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
        lock = FileIO(system.open_plain(path, os.O_RDWR | os.O_CREAT), "rb+")
        try:
            system.lock(lock.fileno())
        except BlockingIOError as error:
            lock.close()
            raise StoreError(Trouble.IN_USE, f"{self.path} is taken") from error
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


# -- the room in a folder -------------------------------------------------------------------------------

# The file systems of folders for snapshots: how much room they have. All functions block.


Usage = tuple[int, int, int]  # bytes of a disk: all, used, free for us


def rooms_of(folders: Mapping[Tier, Path]) -> dict[Tier, FolderRoom]:
    """Measure the file system of each folder, without our files there; leave out those that fail.

    A folder that does not exist yet will be made, so the folder above it counts.
    """
    there = {
        tier: next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), folder)
        for tier, folder in folders.items()
    }
    found, ours = dict[Tier, tuple[int, Usage]](), dict[int, int]()
    for tier, folder in there.items():
        with suppress(OSError):
            device = folder.stat().st_dev
            found[tier] = device, shutil.disk_usage(folder)
            ours[device] = ours.get(device, 0) + taken(folder)
    in_memory = {device for device, _ in found.values()} & system.devices_in_memory()
    return {
        tier: _room(device, disk, ours[device], in_memory=device in in_memory)
        for tier, (device, disk) in found.items()
    }


def _room(device: int, disk: Usage, ours: int, *, in_memory: bool) -> FolderRoom:
    total, _, free = disk
    if in_memory and (memory := free_memory()) is not None:
        free = min(free, memory) if total else memory  # a tmpfs without a limit says 0 of 0
    return FolderRoom(total=total, free=free + ours, device=device, in_memory=in_memory)


def taken(folder: Path) -> int:
    """Return the bytes on disk of our files in a folder, also unfinished ones. Raises OSError."""
    total = _sum(folder, lambda name: files.ours(name) is not None)
    with suppress(FileNotFoundError, NotADirectoryError):  # only a cold folder has it
        total += _sum(folder / files.RUN_FOLDER, lambda _: True)
    return total


def _sum(folder: Path, ours: Callable[[str], bool]) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if ours(entry.name):
                with suppress(FileNotFoundError):  # it has just been removed
                    total += system.bytes_on_disk(entry.stat(follow_symlinks=False))
    return total


# -- the sweep of a folder ------------------------------------------------------------------------------

# The sweep of a folder: which snapshots it has, and the removal of what can never be used.


@dataclass(slots=True)
class Swept:
    """The snapshots that a sweep found in one folder. `notes` are log texts."""

    found: dict[SnapshotId, tuple[Manifest, Tokens]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def sweep(
    folder: SnapshotFolder, spare: Collection[str] = (), known: Collection[SnapshotId] | None = None
) -> Swept:
    """Read every snapshot's manifest and header, and remove what can never be used.

    1. Temporary files are removed, except those in `spare`, which the engine may be writing.
    2. A file without a manifest, or a manifest without a file, is removed: a process ended halfway.
    3. A file that does not agree with its manifest goes to quarantine. Not all bytes are read for that:
       `Store.offer` does that before an engine gets the file.
    4. A snapshot of a later release stays as it is.
    5. A file that cannot be read or removed stays as it is, and one note says what to do.

    With `known` the folder is in use: these snapshots are passed over, and (1) and (2) are left out, because
    another lane may be writing such files. Files with other names are not touched. OSError passes if the
    folder itself cannot be read.
    """
    swept = Swept()
    left: dict[Trouble, list[str]] = {}
    there: dict[SnapshotId, set[str]] = {}
    temporary: list[Path] = []
    folder.count()
    for path in folder.path.iterdir():
        if files.is_temporary(path.name):
            temporary.append(path)
        elif found := files.ours(path.name):
            there.setdefault(found[0], set()).add(found[1])
    if known is None:
        _remove(temporary, spare, left)  # (1)
    for snapshot in sorted(there.keys() - (known or ())):
        with _leaving(snapshot, left):
            if len(there[snapshot]) > 1 and files.MANIFEST in there[snapshot]:
                _judge(folder, snapshot, swept)
            elif known is None:  # (2)
                folder.drop(snapshot)
                swept.notes.append(f"{snapshot}: unfinished, removed")
    for trouble, what in left.items():
        name, _, why = what[0].partition(": ")
        more = f" and {len(what) - 1} more" if len(what) > 1 else ""
        swept.notes.append(f"{name}{more}: left alone, {why}. {ADVICE[trouble]}")
    folder.take_over(manifest for manifest, _ in swept.found.values())
    folder.unread = False
    return swept


def _remove(paths: Iterable[Path], spare: Collection[str], left: dict[Trouble, list[str]]) -> None:
    for path in paths:
        if path.name not in spare:
            with _leaving(path.name, left):
                files.remove(path)


@contextmanager
def _leaving(name: str, left: dict[Trouble, list[str]]) -> Iterator[None]:
    """Let a sweep continue after an error of one file. `left` collects the errors."""
    try:
        yield
    except (FileNotFoundError, MissingError):
        pass  # it disappeared during the sweep
    except OSError as error:
        left.setdefault(trouble_in(error), []).append(f"{name}: {error.strerror or error}")


def _judge(folder: SnapshotFolder, snapshot: SnapshotId, swept: Swept) -> None:
    manifest = folder.read_manifest(snapshot)
    if manifest is Flaw.NEWER:  # (4)
        swept.notes.append(f"{snapshot}: left alone, {manifest}")
        return
    try:
        found = _agreeing(folder, snapshot, manifest)
    except UnfitError as error:  # (3)
        folder.quarantine(snapshot)
        swept.notes.append(f"{snapshot}: quarantined, {error}")
    else:
        swept.found[snapshot] = found


def _agreeing(
    folder: SnapshotFolder, snapshot: SnapshotId, manifest: Manifest | Flaw
) -> tuple[Manifest, Tokens]:
    """Return manifest and tokens if the size and the header of the slot file agree with the manifest.

    Raises UnfitError if not.
    """
    if isinstance(manifest, Flaw):
        raise UnfitError(f"its manifest cannot be used: {manifest}")
    with folder.open(snapshot) as file:
        size = size_of(file)
        if size != manifest.size:
            raise UnfitError(f"{size} bytes, not {manifest.size}")
        found = read(file, size)
    if isinstance(found, Damage):
        raise UnfitError(found.text)
    tokens = tokens_with_images(found, manifest.chunks)
    if tokens is None or not manifest.fits(tokens):
        raise UnfitError("its tokens are not those that were kept")
    cuts = tuple(record.at for record in found.records)
    if (found.version, found.layout, cuts) != (manifest.version, manifest.layout, manifest.checkpoints):
        raise UnfitError("its structure is not the one that was kept")
    return manifest, tokens
