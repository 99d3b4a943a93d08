"""A slot file in parts, which opens like the file itself, and the list that says what its parts are.

The list `ID.runs` has the file's frame and the digests of its parts (`slotfile.divided`). It is sealed with
the folder's secret, so it is read only if it was written here for this snapshot. That does not make the parts
right: whoever gives the file to an engine hashes all of it first, as any other file.
"""

from __future__ import annotations

import hmac
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from slotkeeper import system
from slotkeeper.engine.slotfile import AS_THEY_ARE, Band, Division, PartSizes, Rows, SlotFile, divided, read
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store import files
from slotkeeper.store.files import Halt
from slotkeeper.store.manifest import Manifest

FORMAT: Final = 1
SEAL_BYTES: Final = 32
DIGEST: Final = 64  # hexadecimal digits of a SHA-256
NAME: Final = 40  # and of a name
LARGEST: Final = 256 << 20  # bytes of a list: ten million tokens
DESCRIPTORS: Final = 64  # of parts that stay open; two files may be read at once, and clients need more


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The content of a list."""

    division: Division
    digests: tuple[str, ...]  # the SHA-256 of each part
    frame: bytes
    space: str  # states of two spaces (namespaces, adapters) have no part in common

    def names(self, secret: bytes) -> list[str]:
        """Return the name of each part: its content cannot be guessed from it without the secret."""
        kind = f"run {len(self.space)}:{self.space} "
        return [
            hmac.digest(secret, (kind + digest).encode(), "sha256").hex()[:NAME] for digest in self.digests
        ]


def parts_of(file: Source, manifest: Manifest, halt: Halt, sizes: PartSizes = AS_THEY_ARE) -> Parts | None:
    """Divide the file of a snapshot, and hash its parts; None if it has to stay whole.

    Raises EOFError if the file became shorter, and HaltedError; OSError passes.
    """
    found = read(file, manifest.size)
    division = divided(file, found, sizes) if isinstance(found, SlotFile) else None
    if division is None:
        return None
    return Parts(
        division=division,
        digests=tuple(files.hash_recipe(recipe, file, halt).sha256 for recipe in division.parts()),
        frame=b"".join(map(bytes, files.bytes_of(division.frame, file, halt))),
        space=manifest.space,
    )


def encode(parts: Parts, snapshot: SnapshotId, secret: bytes) -> bytes:
    """Return the list as it is stored for a snapshot."""
    bands = [
        {"rows": [(rows.offset, rows.width) for rows in band.rows], "counts": band.counts}
        for band in parts.division.bands
    ]
    facts = {
        "format": FORMAT,
        "space": parts.space,
        "size": parts.division.size,
        "bands": bands,
        "digests": "".join(parts.digests),
    }
    head = zlib.compress(orjson.dumps(facts), 1)
    data = len(head).to_bytes(4, "big") + head + zlib.compress(parts.frame, 1)
    return _seal(data, snapshot, secret) + data


def decode(stored: bytes, snapshot: SnapshotId, secret: bytes, *, framed: bool = True) -> Parts | None:
    """Read a list that `encode` wrote for this snapshot; None for anything else, also of a later release.

    Without `framed` the frame is left out, which is most of the work.
    """
    data = stored[SEAL_BYTES:]
    if not hmac.compare_digest(stored[:SEAL_BYTES], _seal(data, snapshot, secret)):
        return None
    end = 4 + int.from_bytes(data[:4], "big")
    facts: dict[str, Any] = orjson.loads(zlib.decompress(data[4:end]))
    if facts["format"] != FORMAT:
        return None
    digests = facts["digests"]
    return Parts(
        division=Division(
            facts["size"],
            [
                Band(tuple(Rows(*rows) for rows in band["rows"]), tuple(band["counts"]))
                for band in facts["bands"]
            ],
        ),
        digests=tuple(digests[at : at + DIGEST] for at in range(0, len(digests), DIGEST)),
        frame=zlib.decompress(data[end:]) if framed else b"",
        space=facts["space"],
    )


def _seal(data: bytes, snapshot: SnapshotId, secret: bytes) -> bytes:
    return hmac.digest(secret, b"runs of " + snapshot.encode() + data, "sha256")


class JoinedFile(RawIOBase, BinaryIO):
    """Reads a slot file out of its parts, in the file's order.

    If a part is missing or too short, the file ends there. `fileno` is the list's: the state has its owner.
    """

    def __init__(self, listing: FileIO, parts: Parts, paths: Sequence[Path]) -> None:
        self._listing = listing
        self._frame = memoryview(parts.frame)
        self._division = parts.division
        self._paths = paths
        self._open: dict[int, FileIO] = {}
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._listing.fileno()

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._division.size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view, done = memoryview(buffer).cast("B"), 0
        while done < len(view) and self._at < self._division.size:
            place = self._division.find(self._at)
            target = view[done : done + place.length]
            if place.part is None:
                target[:] = self._frame[place.at : place.at + len(target)]
                count = len(target)
            else:
                count = self._read(place.part, place.at, target)
            if not count:
                break
            done += count
            self._at += count
        return done

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()
        self._listing.close()
        super().close()

    def _read(self, part: int, at: int, target: memoryview) -> int:
        """Read bytes of a part from an offset on; return how many, 0 if the part is missing.

        All parts are read for each layer. So the first ones stay open: no order of closing would help more.
        """
        if part in self._open:
            return system.read_at(self._open[part], target, at)
        path = self._paths[part]
        try:
            file = files.open_ours(path)
        except FileNotFoundError:
            if not path.parent.is_dir():  # the folder itself is not there: the state is not at fault
                raise
            return 0
        if len(self._open) < DESCRIPTORS:
            self._open[part] = file
            return system.read_at(file, target, at)
        with file:
            return system.read_at(file, target, at)


Source = FileIO | JoinedFile


def size_of(file: Source) -> int:
    """Return the size of a slot file, in parts or not, in bytes."""
    return file.seek(0, io.SEEK_END)
