"""Blocking work on files: one pass that copies and hashes, names that appear whole or not at all.

Everything here runs in a thread; reading, hashing and writing let go of the interpreter's lock, and a
`Halt` ends a pass between two chunks. OSError passes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from slotkeeper.engine.slotfile import Piece, Recipe
from slotkeeper.store.trouble import HaltedError

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


def pour(recipe: Recipe, sources: Sequence[FileIO], target: Path, halt: Halt) -> Passed:
    """Write a new file, on the disk when this returns, and hash it on the way.

    If anything goes wrong the target is gone. Raises FileExistsError if there was one, EOFError if a source
    is shorter than the recipe says, HaltedError.
    """
    view, digest, size = memoryview(bytearray(CHUNK)), hashlib.sha256(), 0
    with FileIO(os.open(target, _CREATE, 0o600), "wb") as out:
        try:
            _give(out, sources)
            for piece in recipe:
                for data in _pieces(piece, sources, view, halt):
                    digest.update(data)
                    _write(out, data)
                    size += len(data)
            os.fsync(out.fileno())
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    return Passed(size=size, sha256=digest.hexdigest())


def _pieces(
    piece: Piece, sources: Sequence[FileIO], view: memoryview, halt: Halt
) -> Iterator[bytes | memoryview]:
    """The bytes of one piece, in parts that lie in `view` until the next is asked for."""
    if isinstance(piece, bytes):
        yield piece
        return
    source, left = sources[piece.source], piece.length
    source.seek(piece.offset)
    while left:
        if not (count := _read(source, view[:left], halt)):
            raise EOFError(f"{left} bytes are missing")
        left -= count
        yield view[:count]


def _give(out: FileIO, sources: Sequence[FileIO]) -> None:
    """To the owner of the first source: where we are root and the engine is not, it must read this file."""
    owner, ours = os.fstat(sources[0].fileno()), os.fstat(out.fileno())
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
            _write(out, data)
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


def _write(out: FileIO, data: bytes | memoryview) -> None:
    """All of it: one call may write less, on a nearly full disk for example."""
    left = memoryview(data)
    while left:
        left = left[out.write(left) :]
