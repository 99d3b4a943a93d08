"""Blocking work on files: their names, the pass that copies and hashes a file, and the threads it runs in.

Everything here runs in a thread; reading, hashing and writing release the interpreter's lock. A thread cannot
be cancelled. Instead its `Halt` is set, which ends a pass between two chunks, and the cancelled caller waits
until the thread has removed its unfinished file. OSError passes.
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
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Final, TypeVar

from slotkeeper import system
from slotkeeper.engine.slotfile import ByteSpan, Piece, Recipe
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store.trouble import HaltedError

LOCK: Final = "slotkeeper.lock"
INDEX: Final = "slotkeeper.sqlite"
SEAL: Final = "slotkeeper.seal"
FIRST_SEAL: Final = "slotkeeper.seal.first"  # while manifests without a seal are taken over
QUARANTINE: Final = "slotkeeper-quarantine"
SLOT: Final = ".slot"  # the engine's file
MANIFEST: Final = ".json"
RUNS: Final = ".runs"  # the list of a slot file's parts (`joined`)
RUN_FOLDER: Final = "slotkeeper-runs"  # these parts
TEMPORARY: Final = ".tmp"  # the engine or we are writing it

# The time comes first, so that a listing is in the order of creation. No character is one that the engine
# refuses in a file name (engine.md 2.1).
_ID: Final = r"slotkeeper-[0-9a-f]{12}-[0-9a-f]{8}"
_OURS: Final = re.compile(rf"({_ID})(\.slot|\.json|\.runs|\.tmp)")


def new_id(now: float) -> SnapshotId:
    """Return a new snapshot id. `now` is the wall clock, in seconds."""
    return SnapshotId(f"slotkeeper-{int(now * 1000) & 0xFFFFFFFFFFFF:012x}-{secrets.token_hex(4)}")


def new_temporary(now: float) -> str:
    return new_id(now) + TEMPORARY


def ours(name: str) -> tuple[SnapshotId, str] | None:
    """Return the id and the suffix in the name of a file that we made; None for any other name."""
    match = _OURS.fullmatch(name)
    return (SnapshotId(match[1]), match[2]) if match else None


def is_temporary(name: str) -> bool:
    known = ours(name)
    return known is not None and known[1] == TEMPORARY


# -- one pass that copies and hashes ---------------------------------------------------------------------

# Bytes that are read at once. From 256 KiB to 8 MiB the processor time is the same; larger chunks only delay
# a Halt on a slow disk, and smaller ones take the interpreter's lock more often.
CHUNK: Final = 1 << 20
SETTLED_NS: Final = 2_000_000_000  # nanoseconds: the resolution of FAT, the coarsest file system clock
_NEW: Final = os.O_CREAT | os.O_EXCL

LOAD: Final = Path("/proc/loadavg")  # its fourth field begins with the number of tasks that want a processor


class Halt(threading.Event):
    """Ends a pass between two chunks, and lets it rest there while others want its processor."""

    _rested = 0.0  # processor seconds of the thread at the last chunk

    def between_chunks(self) -> None:
        """Raise HaltedError if the pass must end.

        If more tasks want a processor than there are, first rest for as long as the last chunk took. A CPU
        engine with a thread for each processor waits at every layer for its slowest thread: beside a pass
        that never rested, its answers took 46 times as long, beside one that did 1.5 times.
        """
        if self._rested and _crowded():
            self.wait(time.thread_time() - self._rested)
        self._rested = time.thread_time()
        if self.is_set():
            raise HaltedError


def _crowded() -> bool:
    """Whether more tasks want a processor than there are; false where that is not known (not Linux)."""
    with suppress(OSError, ValueError, IndexError):
        return int(LOAD.read_text("ascii").split()[3].partition("/")[0]) > (os.cpu_count() or 1)
    return False


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file's metadata, which cannot stay the same when its bytes change (see `settle`). Times in ns."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The result of one pass over all bytes of a file."""

    size: int
    sha256: str


class RunningHash:
    """Counts and hashes bytes as they pass, in their order.

    With the processor's SHA instructions SHA-256 does 1.7 GB/s, BLAKE2b 1.0 GB/s.
    """

    def __init__(self) -> None:
        self.size, self._digest = 0, hashlib.sha256()

    def take(self, data: bytes | bytearray | memoryview) -> None:
        self._digest.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    @property
    def passed(self) -> Passed:
        return Passed(size=self.size, sha256=self.sha256)


def stamp(file: RawIOBase) -> Stamp:
    now = os.fstat(file.fileno())
    return Stamp(now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


def open_ours(path: Path, *, edit: bool = False) -> FileIO:
    """Open a file of ours for reading, or to `edit` it: no symbolic or hard link, no device and no FIFO.

    Raises OSError, with ELOOP if the path is not a plain file with this one name.
    """
    handle = system.open_plain(path, os.O_RDWR if edit else os.O_RDONLY)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(errno.ELOOP, "it is not a plain file with one name", str(path))  # noqa: TRY301
    except BaseException:
        os.close(handle)
        raise
    return FileIO(handle, "r+b" if edit else "rb")


def hash_bytes(file: RawIOBase, halt: Halt) -> Passed:
    """Hash all bytes of a file. Raises HaltedError."""
    view, hashed = memoryview(bytearray(CHUNK)), RunningHash()
    file.seek(0)
    while count := _read(file, view, halt):
        hashed.take(view[:count])
    return hashed.passed


def hash_recipe(recipe: Recipe, source: RawIOBase, halt: Halt) -> Passed:
    """Hash the bytes of the file that a recipe makes. Raises as `pour` does."""
    hashed = RunningHash()
    for data in bytes_of(recipe, source, halt):
        hashed.take(data)
    return hashed.passed


def pour(recipe: Recipe, source: RawIOBase, target: Path, halt: Halt) -> Passed:
    """Write a new file by the recipe and hash its bytes. The file is on the disk when this returns.

    After an error the target is removed. Raises FileExistsError if the target exists, EOFError if the source
    is shorter than the recipe says, and HaltedError.
    """
    hashed = RunningHash()
    with FileIO(system.open_plain(target, os.O_WRONLY | _NEW), "wb") as out:
        try:
            system.give(out.fileno(), os.fstat(source.fileno()))  # the engine may be another user
            for data in bytes_of(recipe, source, halt):
                hashed.take(data)
                write_all(out, data)
            os.fsync(out.fileno())
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    return hashed.passed


def edit(file: FileIO, recipe: Recipe, halt: Halt) -> Passed:
    """Make a file in place what the recipe says, and hash its bytes.

    Only bytes that change or move are written. After an error the file is neither the old nor the new one.
    Raises ValueError if the recipe would move bytes towards the end, and as `bytes_of` does.
    """
    hashed = RunningHash()
    for piece in recipe:
        source = piece.offset if isinstance(piece, ByteSpan) else hashed.size
        if source < hashed.size:
            raise ValueError(f"the bytes at {source} would move to {hashed.size}")
        stays = isinstance(piece, ByteSpan) and source == hashed.size
        for data in bytes_of((piece,), file, halt):
            if not stays:
                _write_at(file, data, hashed.size)
            hashed.take(data)
    file.truncate(hashed.size)
    return hashed.passed


def bytes_of(recipe: Recipe, source: RawIOBase, halt: Halt) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the file that a recipe makes, in chunks. A chunk is valid until the next one.

    Raises EOFError if the source is shorter than the recipe says, and HaltedError.
    """
    view = memoryview(bytearray(CHUNK))
    for piece in recipe:
        yield from _pieces(piece, source, view, halt)


def spread(data: bytes, recipe: Recipe, target: FileIO) -> None:
    """Write the bytes of a part to the spans of a file from which the recipe takes them."""
    left = memoryview(data)
    for span in recipe:
        if isinstance(span, bytes):
            raise TypeError("a recipe of new bytes has no place in the file")
        _write_at(target, left[: span.length], span.offset)
        left = left[span.length :]


def _pieces(piece: Piece, source: RawIOBase, view: memoryview, halt: Halt) -> Iterator[bytes | memoryview]:
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
    """Create a file, to write and read, that belongs to the owner of its folder. Raises FileExistsError."""
    out = FileIO(system.open_plain(target, os.O_RDWR | _NEW), "r+b")
    try:
        system.give(out.fileno(), target.parent.stat())
    except BaseException:
        out.close()
        target.unlink(missing_ok=True)
        raise
    return out


def settle(file: RawIOBase) -> None:
    """Make a file accessible to its owner only, and set its modification time back.

    A file system's clock ticks every few milliseconds: a byte changed right after the hash could leave
    the same times. With a time in the past every change shows.
    """
    system.make_private(file.fileno())
    system.set_modified(file.fileno(), os.fstat(file.fileno()).st_mtime_ns - SETTLED_NS)


def write_small(target: Path, temporary: Path, data: bytes) -> None:
    """Write a file that exists whole or not at all, even after a crash. It is on the disk on return."""
    out = FileIO(system.open_plain(temporary, os.O_WRONLY | _NEW), "wb")
    try:
        with out:
            write_all(out, data)
            os.fsync(out.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    system.sync_folder(target.parent)


def remove(path: Path) -> None:
    """Unlink the file if it exists. A folder of that name is not ours and stays."""
    with suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()


def sync_file(file: FileIO) -> None:
    os.fsync(file.fileno())


def _read(file: RawIOBase, view: memoryview, halt: Halt) -> int:
    halt.between_chunks()
    return file.readinto(view) or 0


def _write_at(out: FileIO, data: bytes | memoryview, at: int) -> None:
    left = memoryview(data)
    while left:
        count = system.write_at(out, left, at)
        left, at = left[count:], at + count


def write_all(out: FileIO, data: bytes | memoryview) -> None:
    """Write all bytes: one system call may write fewer, for example on a nearly full disk."""
    left = memoryview(data)
    while left:
        left = left[out.write(left) :]


# -- work in a thread, with a caller that can be cancelled -----------------------------------------------

T = TypeVar("T")


class Lane:
    """One thread that does its work in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"slotkeeper-{name}")
        self._halts: set[Halt] = set()
        self._closed = False

    async def do(self, work: Callable[[Halt], T]) -> T:
        """Run `work` in the thread. Raises what `work` raises, and HaltedError if the lane is closed."""
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
                future.exception()  # retrieve it: no caller will
            raise
        finally:
            self._halts.discard(halt)

    def finish(self, work: Callable[[], None]) -> None:
        """Run `work` after all earlier work, without a caller that waits; at once if the lane is closed.

        For resources that must be released even if the caller is cancelled a second time.
        """
        try:
            self._pool.submit(work)
        except RuntimeError:  # the thread has ended
            work()

    async def close(self) -> None:
        self._closed = True
        for halt in self._halts:
            halt.set()
        await asyncio.to_thread(self._pool.shutdown)
