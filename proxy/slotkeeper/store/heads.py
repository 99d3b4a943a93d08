"""The head of a state in a shared store: its manifest, its tokens, and the blob or the parts of its file.

A head is read strictly, and only one that a sidecar with our key or secret has written for its name is
accepted. The names of parts stand at its beginning and are never sealed, as the names of objects are not: a
collector without the key must know which parts are needed. They are only believed if they follow from the
sealed list. A later form of the list needs another ending of the head's name (`IN_PARTS`): sidecars remove
heads that they take for damaged.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Final

import orjson

from slotkeeper.scheduler.slot_contents import SnapshotId
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.store import joined, manifest
from slotkeeper.store.manifest import Flaw, Manifest
from slotkeeper.store.object_names import PART_BYTES, HeadName, ObjectNames
from slotkeeper.store.part_objects import StoredParts, read_back
from slotkeeper.store.sealing import SealError, StoreKey
from slotkeeper.store.trouble import MissingError, UnfitError

LARGEST_HEAD: Final = 16 << 20  # bytes: a manifest, and the ids of a million tokens
LARGEST_TOKENS: Final = 16 << 20  # bytes: four million ids
COUNT: Final = 4  # bytes of a length


@dataclass(frozen=True, slots=True)
class Blob:
    """A whole slot file in the store, and the salt of its key."""

    path: str
    salt: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """The object that describes a state and is read before its blob or its parts."""

    manifest: Manifest
    tokens: Tokens
    body: Blob | StoredParts


class Heads:
    """Writes and reads heads with one key. `secret` signs manifests and lists."""

    def __init__(self, names: ObjectNames, key: StoreKey | None) -> None:
        self._names = names
        self._key = key

    def encode(self, head: Head, entry: HeadName, secret: bytes) -> bytes:
        """Return the head as it is stored under a name."""
        kept, body = head.manifest, head.body
        facts: dict[str, Any] = {"manifest": manifest.encode(kept, secret).decode()}
        public = listing = b""
        if isinstance(body, Blob):
            facts |= {"blob": body.path, "salt": body.salt.hex()}
        else:
            public = b"".join((len(body.names).to_bytes(COUNT, "big"), *body.names))
            listing = joined.encode(body.parts, kept.id, secret)
            facts["list"] = len(listing)
        text = orjson.dumps(facts)
        tokens = zlib.compress(head.tokens.packed, 1)
        data = b"".join((len(text).to_bytes(COUNT, "big"), text, listing, tokens))
        return public + (self._key.seal(data, entry.path) if self._key else data)

    def decode(self, data: bytes, entry: HeadName, secret: bytes) -> Head:
        """Verify a head. Raises UnfitError if it is not ours or was changed; MissingError if it is newer."""
        names = parts_named(data) if entry.in_parts else b""
        if names is None:
            raise UnfitError(f"{entry.path} cannot be read")
        data = data[COUNT + len(names) :] if entry.in_parts else data
        try:
            data = self._key.open(data, entry.path) if self._key else data
            size = int.from_bytes(data[:COUNT], "big")
            facts = orjson.loads(data[COUNT : COUNT + size])
            rest, text = data[COUNT + size :], facts["manifest"].encode()
            named = SnapshotId(str(orjson.loads(text)["id"]))
            listed = int(facts["list"]) if entry.in_parts else 0
            unpacking = zlib.decompressobj()
            packed = unpacking.decompress(rest[listed:], LARGEST_TOKENS)
            blob = None if entry.in_parts else Blob(str(facts["blob"]), bytes.fromhex(facts["salt"]))
        except (SealError, ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
            raise UnfitError(f"{entry.path} cannot be read") from error
        if not unpacking.eof or unpacking.unused_data:
            raise UnfitError(f"{entry.path} is not whole")
        kept = _decoded(text, named, entry.path, secret)
        tokens = Tokens.of(packed, chunks=kept.chunks)
        own = self._names.entry(kept, tokens) if kept.fits(tokens) else None
        if own is None or entry != (own.parted if entry.in_parts else own):
            raise UnfitError(f"{entry.path} says that it is another state")
        body = self._own_blob(blob, own, kept) if blob else _own_parts(rest[:listed], names, kept, secret)
        if body is None:
            raise UnfitError(f"{entry.path} says that it has another file")
        return Head(kept, tokens, body)

    def _own_blob(self, blob: Blob, entry: HeadName, kept: Manifest) -> Blob | None:
        """Return the blob if it has the only name that it may have."""
        return blob if blob.path == self._names.blob(entry, kept.sha256, blob.salt) else None


def parts_named(data: bytes) -> bytes | None:
    """Return the names of the parts in a head, one after the other; None if it is damaged."""
    end = COUNT + PART_BYTES * int.from_bytes(data[:COUNT], "big")
    return data[COUNT:end] if COUNT < end <= len(data) else None


def _own_parts(listing: bytes, names: bytes, kept: Manifest, secret: bytes) -> StoredParts | None:
    """Return the parts that are listed, if they are those of this state."""
    parts = joined.decode(listing, kept.id, secret)
    if parts is None or (parts.division.size, parts.space) != (kept.size, kept.space):
        return None
    return read_back(parts, names, secret)


def _decoded(text: bytes, named: SnapshotId, path: str, secret: bytes) -> Manifest:
    match manifest.decode(text, named, secret):
        case Flaw.NEWER as flaw:
            raise MissingError(f"{path}: {flaw}")
        case Flaw() as flaw:
            raise UnfitError(f"{path}: {flaw}")
        case found:
            return found
