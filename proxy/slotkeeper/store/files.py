"""Blocking work on files: their names, one pass that copies and hashes, and the threads that it runs in.

Everything here runs in a thread; reading, hashing and writing let go of the interpreter's lock. A thread
cannot be cancelled: its `Halt` is set, which ends a pass between two chunks, and the cancelled caller waits
until the thread has put away what it was making. OSError passes.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final, TypeVar

from slotkeeper.engine.slotfile import Piece, Recipe
from slotkeeper.scheduler.slot_contents import SnapshotId
from slotkeeper.store.trouble import HaltedError

LOCK: Final = "slotkeeper.lock"
INDEX: Final = "slotkeeper.sqlite"
SEAL: Final = "slotkeeper.seal"
FIRST_SEAL: Final = "slotkeeper.seal.first"  # while manifests without one are taken over
QUARANTINE: Final = "slotkeeper-quarantine"
SLOT: Final = ".slot"  # the engine's file
MANIFEST: Final = ".json"
TEMPORARY: Final = ".tmp"  # being written, by the engine or by us

# Time first, so that a listing is in the order of making; none of the characters that the engine refuses
# in a file name (engine.md 2.1).
_ID: Final = r"slotkeeper-[0-9a-f]{12}-[0-9a-f]{8}"
_OURS: Final = re.compile(rf"({_ID})(\.slot|\.json|\.tmp)")


def new_id(now: float) -> SnapshotId:
    """`now` is the wall clock, in seconds."""
    return SnapshotId(f"slotkeeper-{int(now * 1000) & 0xFFFFFFFFFFFF:012x}-{secrets.token_hex(4)}")


def new_temporary(now: float) -> str:
    return new_id(now) + TEMPORARY


def ours(name: str) -> tuple[SnapshotId, str] | None:
    """The id and the suffix of a file that we made, None for any other name."""
    match = _OURS.fullmatch(name)
    return (SnapshotId(match[1]), match[2]) if match else None


def is_temporary(name: str) -> bool:
    known = ours(name)
    return known is not None and known[1] == TEMPORARY


# -- one pass that copies and hashes ---------------------------------------------------------------------

# 1 MiB at once. From 256 KiB to 8 MiB it takes the same processor time; larger pieces only delay a Halt on
# a slow disk, and smaller ones ask for the interpreter's lock more often.
CHUNK: Final = 1 << 20
SETTLED_NS: Final = 2_000_000_000  # more than the coarsest clock of a file system, FAT's
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # not waiting for a FIFO's writer
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Halt = threading.Event


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the system says of a file; it cannot stay the same when the bytes change."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """One pass over all bytes of a file."""

    size: int
    sha256: str


def stamp(file: FileIO) -> Stamp:
    now = os.fstat(file.fileno())
    return Stamp(now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


def open_ours(path: Path) -> FileIO:
    """Open for reading what can only be a file of ours: no link of either kind, no device, no FIFO.

    Raises OSError, with ELOOP for anything that is not a plain file with this one name.
    """
    handle = os.open(path, _READ)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(handle)
        raise OSError(errno.ELOOP, "it is not a plain file with one name", str(path))
    return FileIO(handle, "rb")


def hash_bytes(file: FileIO, halt: Halt) -> Passed:
    """SHA-256 of all bytes. With the processor's own instructions for it this is 1.7 GB/s and BLAKE2b 1.0."""
    view, digest, size = memoryview(bytearray(CHUNK)), hashlib.sha256(), 0
    file.seek(0)
    while count := _read(file, view, halt):
        digest.update(view[:count])
        size += count
    return Passed(size=size, sha256=digest.hexdigest())


def pour(recipe: Recipe, source: FileIO, target: Path, halt: Halt) -> Passed:
    """Write a new file, on the disk when this returns, and hash it on the way.

    If anything goes wrong the target is gone. Raises FileExistsError if there was one, EOFError if the source
    is shorter than the recipe says, HaltedError.
    """
    view, digest, size = memoryview(bytearray(CHUNK)), hashlib.sha256(), 0
    with FileIO(os.open(target, _CREATE, 0o600), "wb") as out:
        try:
            _give(out, os.fstat(source.fileno()))
            for piece in recipe:
                for data in _pieces(piece, source, view, halt):
                    digest.update(data)
                    write_all(out, data)
                    size += len(data)
            os.fsync(out.fileno())
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    return Passed(size=size, sha256=digest.hexdigest())


def _pieces(piece: Piece, source: FileIO, view: memoryview, halt: Halt) -> Iterator[bytes | memoryview]:
    """The bytes of one piece, in parts that lie in `view` until the next is asked for."""
    if isinstance(piece, bytes):
        yield piece
        return
    left = piece.length
    source.seek(piece.offset)
    while left:
        if not (count := _read(source, view[:left], halt)):
            raise EOFError(f"{left} bytes are missing")
        left -= count
        yield view[:count]


def create(target: Path) -> FileIO:
    """A new file, in a folder whose owner it belongs to. Raises FileExistsError."""
    out = FileIO(os.open(target, _CREATE, 0o600), "wb")
    try:
        _give(out, target.parent.stat())
    except BaseException:
        out.close()
        target.unlink(missing_ok=True)
        raise
    return out


def _give(out: FileIO, owner: os.stat_result) -> None:
    """To the owner of the source: where we are root and the engine is not, it must read this file."""
    ours = os.fstat(out.fileno())
    if (owner.st_uid, owner.st_gid) != (ours.st_uid, ours.st_gid):
        os.fchown(out.fileno(), owner.st_uid, owner.st_gid)


def settle(file: FileIO) -> None:
    """Make a file ours alone, and date it back.

    The clock of a file system ticks every few milliseconds: a byte changed right after we hashed could
    leave the very times that we saw. Against a time in the past any change shows.
    """
    os.fchmod(file.fileno(), 0o600)
    past = os.fstat(file.fileno()).st_mtime_ns - SETTLED_NS
    os.utime(file.fileno(), ns=(past, past))


def write_small(target: Path, temporary: Path, data: bytes) -> None:
    """A file that is there whole or not at all, whatever happens; on the disk when this returns."""
    with FileIO(os.open(temporary, _CREATE, 0o600), "wb") as out:
        try:
            write_all(out, data)
            os.fsync(out.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    temporary.replace(target)
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Unlink it, if it is there. A folder of that name is none of ours and stays."""
    with suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()


def sync_file(file: FileIO) -> None:
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Put its names on the disk. Some network file systems refuse that: they do it at each rename."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def _read(file: FileIO, view: memoryview, halt: Halt) -> int:
    if halt.is_set():
        raise HaltedError
    return file.readinto(view)


def write_all(out: FileIO, data: bytes | memoryview) -> None:
    """All of it: one call may write less, on a nearly full disk for example."""
    left = memoryview(data)
    while left:
        left = left[out.write(left) :]


# -- in a thread, whose waiting caller can be cancelled --------------------------------------------------

T = TypeVar("T")


class Lane:
    """One thread; its work is done in the order in which it was asked for."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"slotkeeper-{name}")
        self._halts: set[Halt] = set()
        self._closed = False

    async def do(self, work: Callable[[Halt], T]) -> T:
        """Raises what `work` raises, and HaltedError when the lane is closed."""
        if self._closed:
            raise HaltedError
        halt = Halt()
        self._halts.add(halt)
        running = self._pool.submit(work, halt)
        future = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            halt.set()
            if not running.cancel():
                await asyncio.wait([future])
                future.exception()  # retrieved: no caller will ask for it
            raise
        finally:
            self._halts.discard(halt)

    async def close(self) -> None:
        self._closed = True
        for halt in self._halts:
            halt.set()
        await asyncio.to_thread(self._pool.shutdown)
