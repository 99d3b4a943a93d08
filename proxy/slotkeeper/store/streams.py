"""Slot files on their way to and from a shared store: read, hashed and sealed in one pass. Calls block."""

from __future__ import annotations

import hashlib
import os
from io import FileIO
from pathlib import Path
from typing import Final

from slotkeeper.store import files
from slotkeeper.store.files import Halt
from slotkeeper.store.sealing import PIECE, TAG, Cutter, Pieces
from slotkeeper.store.trouble import HaltedError

NO_BYTES: Final = b""


def stored_size(size: int, *, sealed: bool) -> int:
    """Return the bytes that the blob of a file of `size` bytes has in the store."""
    return size + TAG * max(1, -(-size // PIECE)) if sealed else size


class BlobReader:
    """Reads a slot file for upload, piece by piece. `size` and `sha256` are of the bytes read so far."""

    def __init__(self, file: FileIO, pieces: Pieces | None) -> None:
        self._file = file
        self._pieces = pieces
        self._left = os.fstat(file.fileno()).st_size
        self._digest = hashlib.sha256()
        self.size = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def next(self, halt: Halt) -> bytes:
        """Return the next piece, sealed if there is a key; empty at the end. Raises HaltedError."""
        if halt.is_set():
            raise HaltedError
        wanted, piece = min(PIECE, self._left), bytearray()
        while len(piece) < wanted and (part := self._file.read(wanted - len(piece))):
            piece += part
        if not piece:
            return NO_BYTES
        self._left -= len(piece)
        self._digest.update(piece)
        self.size += len(piece)
        return self._pieces.seal(bytes(piece), last=not self._left) if self._pieces else bytes(piece)

    def close(self) -> None:
        self._file.close()


class BlobWriter:
    """Opens a downloaded blob and writes the slot file, or only hashes it if there is no path.

    The file is complete when `end` has returned.
    """

    def __init__(self, path: Path | None, pieces: Pieces | None) -> None:
        """Create the file, if a path is given. Raises FileExistsError."""
        self._path = path
        self._file = files.create(path) if path else None
        self._pieces = pieces
        self._cutter = Cutter(PIECE + TAG)
        self._digest = hashlib.sha256()
        self.size = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def feed(self, chunk: memoryview) -> None:
        """Take the next chunk of the blob. Raises SealError."""
        if self._pieces is None:
            self._write(chunk)
            return
        for piece in self._cutter.feed(chunk):
            self._write(self._pieces.open(piece, last=False))

    def end(self) -> None:
        """Take the last piece and write the file to the disk. Raises SealError."""
        if self._pieces:
            self._write(self._pieces.open(self._cutter.rest(), last=True))
        if self._file:
            os.fsync(self._file.fileno())
            self._file.close()

    def discard(self) -> None:
        """Close the file and remove its temporary name, if that is still there."""
        if self._file and self._path:
            self._file.close()
            self._path.unlink(missing_ok=True)

    def _write(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self.size += len(data)
        if self._file:
            files.write_all(self._file, data)
