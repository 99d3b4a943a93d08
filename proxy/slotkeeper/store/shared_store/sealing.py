"""Encryption of objects in a shared store, with keys that are derived from the user's key.

Every object has its own key, so that no nonce is ever used twice. A blob is sealed in pieces; each nonce has
the piece's number and whether it is the last one (the STREAM construction). So opening fails if a piece is
missing, repeated, moved or cut off. Calls that read or write files block.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from slotkeeper.store import files
from slotkeeper.store.files import Halt, RunningHash
from slotkeeper.store.folders.joined import Source

LEAST_KEY: Final = 32  # bytes in a key file: `openssl rand -hex 32` writes twice as many
MOST_KEY: Final = 4096
SALT_BYTES: Final = 16
PIECE: Final = 1 << 20  # bytes of a blob that are sealed together
TAG: Final = 16  # bytes that sealing adds
_NONCE: Final = 12


class SealError(Exception):
    """The data was not sealed with this key, or was changed since."""


class KeyFileError(Exception):
    """A key file that cannot be used; the text says why."""


@dataclass(frozen=True, slots=True, repr=False)
class StoreKey:
    """The secret that all sidecars of a store have in common. It never leaves this process."""

    secret: bytes

    @classmethod
    def read(cls, path: Path) -> StoreKey:
        """Read a key file, without the white space around its contents. Raises KeyFileError."""
        try:
            data = path.read_bytes()[: MOST_KEY + 1]
        except OSError as error:
            raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
        data = data.strip()
        if not LEAST_KEY <= len(data) <= MOST_KEY:
            raise KeyFileError(f"{path} has {len(data)} bytes; make a key with: openssl rand -hex 32")
        return cls(data)

    def derived(self, purpose: str) -> bytes:
        """Return 32 bytes for one purpose, from which those for another purpose cannot be computed."""
        return hmac.digest(self.secret, purpose.encode(), "sha256")

    def seal(self, data: bytes, name: str) -> bytes:
        """Seal a small object and bind it to its name: it does not open under another name."""
        salt = secrets.token_bytes(SALT_BYTES)
        return salt + self._cipher(salt).encrypt(bytes(_NONCE), data, name.encode())

    def open(self, sealed: bytes, name: str) -> bytes:
        """Open what `seal` returned. Raises SealError."""
        salt, data = sealed[:SALT_BYTES], sealed[SALT_BYTES:]
        return _opened(self._cipher(salt), bytes(_NONCE), data, name.encode())

    def pieces(self, salt: bytes) -> Pieces:
        """Return the sealer of one blob's pieces. `salt` must never have been used for another blob."""
        return Pieces(self._cipher(salt))

    def _cipher(self, salt: bytes) -> AESGCM:
        return AESGCM(self.derived(f"object {salt.hex()}"))


class Pieces:
    """Seals or opens the pieces of one blob, in order."""

    def __init__(self, cipher: AESGCM) -> None:
        self._cipher = cipher
        self._count = 0

    def seal(self, piece: bytes, *, last: bool) -> bytes:
        return self._cipher.encrypt(self._nonce(last=last), piece, None)

    def open(self, piece: bytes, *, last: bool) -> bytes:
        """Open the next piece. Raises SealError."""
        return _opened(self._cipher, self._nonce(last=last), piece, None)

    def _nonce(self, *, last: bool) -> bytes:
        self._count += 1
        return self._count.to_bytes(_NONCE - 1, "big") + bytes([last])


def _opened(cipher: AESGCM, nonce: bytes, data: bytes, bound: bytes | None) -> bytes:
    try:
        return cipher.decrypt(nonce, data, bound)
    except (InvalidTag, ValueError) as error:
        raise SealError("it was not sealed with this key, or was changed since") from error


class Cutter:
    """Cuts a stream of chunks into pieces of one size; only the last is shorter."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held = bytearray()

    def feed(self, chunk: bytes | memoryview) -> Iterator[bytes]:
        """Yield the whole pieces so far, but keep one that may be the last."""
        self._held += chunk
        while len(self._held) > self._size:
            piece = bytes(self._held[: self._size])
            del self._held[: self._size]
            yield piece

    def rest(self) -> bytes:
        """Return the last piece; it is empty for an empty stream."""
        return bytes(self._held)


# -- slot files on their way to and from the store: read, hashed and sealed in one pass -----------------

NO_BYTES: Final = b""


def stored_size(size: int, *, sealed: bool) -> int:
    """Return the bytes that the blob of a file of `size` bytes has in the store."""
    return size + TAG * max(1, -(-size // PIECE)) if sealed else size


class BlobReader:
    """Reads a slot file for upload, piece by piece. `hashed` has the bytes read so far."""

    def __init__(self, file: Source, pieces: Pieces | None) -> None:
        self._file = file
        self._pieces = pieces
        self._left = os.fstat(file.fileno()).st_size
        self.hashed = RunningHash()

    def next(self, halt: Halt) -> bytes:
        """Return the next piece, sealed if there is a key; empty at the end. Raises HaltedError."""
        halt.between_chunks()
        wanted, piece = min(PIECE, self._left), bytearray()
        while len(piece) < wanted and (part := self._file.read(wanted - len(piece))):
            piece += part
        if not piece:
            return NO_BYTES
        self._left -= len(piece)
        self.hashed.take(piece)
        return self._pieces.seal(bytes(piece), last=not self._left) if self._pieces else bytes(piece)

    def close(self) -> None:
        self._file.close()


class BlobWriter:
    """Opens a downloaded blob and writes the slot file, or only hashes it if there is no file.

    The file is complete and on the disk when `end` has returned.
    """

    def __init__(self, file: FileIO | None, pieces: Pieces | None) -> None:
        self._file = file
        self._pieces = pieces
        self._cutter = Cutter(PIECE + TAG)
        self.hashed = RunningHash()

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
            files.sync_file(self._file)

    def _write(self, data: bytes | memoryview) -> None:
        self.hashed.take(data)
        if self._file:
            files.write_all(self._file, data)
