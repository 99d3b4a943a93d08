"""The shared cold tier: writes a state once for all sidecars, finds it by its tokens, and verifies it.

A large state is kept in parts, which states have in common (`part_objects`). A small one, or one whose layout
is not understood, is a blob: its slot file. Both are sealed with the user's key if there is one. The head has
the manifest, the tokens, and the names of the parts. It is written last, and only if no other sidecar has
written the same state. So a killed process leaves either a whole state, or a blob or parts without a head,
which `collector` removes later. Neither is trusted: a file is hashed before it gets a name that an engine
could be given.

A head is read strictly, and only one that a sidecar with our key or secret has written for its name is
accepted. The names of parts stand at its beginning and are never sealed, as the names of objects are not: a
collector without the key must know which parts are needed. They are only believed if they follow from the
sealed list. A later form of the list needs another ending of the head's name (`IN_PARTS`): sidecars remove
heads that they take for damaged.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Final

import orjson

from slotkeeper.engine.slot_file.slotfile_runs import PartSizes
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.slot_contents import SnapshotId, Tier
from slotkeeper.store import files, manifest
from slotkeeper.store.files import Halt, Lane
from slotkeeper.store.folders import joined
from slotkeeper.store.folders.snapshot_folder import SnapshotFolder
from slotkeeper.store.folders.sweep import Swept
from slotkeeper.store.index import Kept, Use
from slotkeeper.store.intake import place
from slotkeeper.store.manifest import BYTES, Flaw, Manifest
from slotkeeper.store.shared_store.hints import Hints
from slotkeeper.store.shared_store.object_names import (
    PART_BYTES,
    STORE_SEAL,
    HeadName,
    ObjectNames,
    entries_to_read,
)
from slotkeeper.store.shared_store.objects import AT_ONCE, Objects
from slotkeeper.store.shared_store.part_objects import (
    FRESH,
    IN_STORE,
    PartObjects,
    StoredParts,
    close_all,
    read_back,
)
from slotkeeper.store.shared_store.sealing import (
    SALT_BYTES,
    BlobReader,
    BlobWriter,
    Pieces,
    SealError,
    StoreKey,
    stored_size,
)
from slotkeeper.store.trouble import LateError, MissingError, SnapshotError, StoreError, Trouble, UnfitError

# -- the head of a state: its manifest, its tokens, and the blob or the parts of its file ----------------

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


# -- the store -------------------------------------------------------------------------------------------

CHEAP: Final = 1 << 20  # bytes: writing a smaller blob is as quick as asking for its state
LONGEST_LOOK: Final = 10.0  # seconds; a request waits for less (`scheduler.snapshots.retention`)
SEEN: Final = 4096  # entries whose snapshot id is remembered
SETTLE: Final = 0.05  # seconds: obstore 0.12 aborts a process that ends right after a failed call


class SharedStore:
    """One bucket or folder as the cold tier. Methods raise SnapshotError and StoreError."""

    shared: Final = True
    unread: Final = False

    def __init__(
        self,
        objects: Objects,
        key: StoreKey | None = None,
        hints: Hints | None = None,
        sizes: PartSizes = IN_STORE,
    ) -> None:
        self.objects = objects
        self.parts = PartObjects(objects, key, sizes)
        self.hints = hints
        self.name = objects.url
        self._key = key
        self._names = ObjectNames(key.derived("names") if key else b"")
        self._heads = Heads(self._names, key)
        self._secret = key.derived("manifests") if key else None
        self._lane = Lane("shared")
        self._seen: OrderedDict[str, SnapshotId] = OrderedDict()  # by the path of a head

    def __repr__(self) -> str:
        return f"<SharedStore {self.objects!r} {'sealed' if self._key else 'open'}>"

    @property
    def secret(self) -> bytes | None:
        """The secret that signs manifests and salts namespaces, the same for all sidecars.

        None before the store is open.
        """
        return self._secret

    async def open(self) -> Swept:
        """Open the store without reading its states: `find` looks them up when a prompt arrives."""
        await self._opened()
        return Swept()

    async def close(self) -> None:
        await asyncio.gather(self._lane.close(), self.parts.close())
        if self.hints:
            await self.hints.close()
        await asyncio.sleep(SETTLE)

    # -- finding -----------------------------------------------------------------------------------

    async def find(
        self, prompt: Tokens, fingerprint: str, *, beyond: int, known: Collection[SnapshotId]
    ) -> list[Kept]:
        """Return states that share more than `beyond` tokens with a prompt and are not `known`.

        Raises LateError after LONGEST_LOOK seconds.
        """
        try:
            async with asyncio.timeout(LONGEST_LOOK):
                return await self._find(prompt, fingerprint, beyond, known)
        except TimeoutError:
            raise LateError(f"{self.name} did not answer within {LONGEST_LOOK:.0f} s") from None

    async def _find(
        self, prompt: Tokens, fingerprint: str, beyond: int, known: Collection[SnapshotId]
    ) -> list[Kept]:
        folders = self._names.folders(prompt, fingerprint)
        await self._opened()  # manifests cannot be verified without the secret
        names = await asyncio.gather(*map(self._listed, folders))
        found, marks = zip(folders, names, strict=True), self._names.marks(prompt)
        good = await asyncio.to_thread(entries_to_read, found, marks, len(prompt), beyond)
        unknown = [entry for entry in good if self._seen.get(entry.path) not in known]
        heads = await asyncio.gather(*(self._head_or_none(entry, prompt.space) for entry in unknown))
        return [
            self._found(entry, head) for entry, head in zip(unknown, heads, strict=True) if head is not None
        ]

    async def _listed(self, folder: str) -> Collection[str]:
        names = await self.hints.names(folder) if self.hints else None
        if names is None:
            names = {seen.path.rpartition("/")[2] async for seen in self.objects.listing(folder)}
            if self.hints:
                await self.hints.listed(folder, names)
        return names

    async def _head_or_none(self, entry: HeadName, space: str) -> Head | None:
        try:
            head = await self._head(entry)
        except MissingError:
            if self.hints:
                await self.hints.removed(entry.folder, entry.name)
            return None
        except SnapshotError:  # another sidecar's, with another key
            return None
        return head if head.manifest.space == space else None

    def _found(self, entry: HeadName, head: Head) -> Kept:
        self._seen[entry.path] = head.manifest.id
        self._seen.move_to_end(entry.path)
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        use = Use(used=head.manifest.created)
        return Kept(manifest=head.manifest, tokens=head.tokens, tiers=frozenset({Tier.COLD}), use=use)

    # -- one state ---------------------------------------------------------------------------------

    async def take(self, kept: Kept, hot: SnapshotFolder) -> bool:
        """Write a state from the hot folder, unless the store has it. False: another sidecar writes it."""
        await self._opened()
        entry = self._names.entry(kept.manifest, kept.tokens)
        if entry is None:
            return True
        if kept.manifest.size > CHEAP:
            for form in self._forms(entry, kept.manifest):
                if await self.objects.size(form.path) is not None and await self._has(form):
                    await self._tell_use(form, kept.manifest.size)  # for the collector it is as new
                    return True
        if self.hints is None:
            await self._write(entry, kept, hot)
            return True
        async with self.hints.writing(entry.state, kept.manifest.size) as free:
            if not free:
                return False
            entry = await self._write(entry, kept, hot)
        await self.hints.added(entry.folder, entry.name)
        return True

    def _forms(self, entry: HeadName, manifest: Manifest) -> list[HeadName]:
        """Return the heads that a state may have, the likelier one first.

        Earlier releases have written large states whole.
        """
        return [entry] if manifest.size < self.parts.least else [entry.parted, entry]

    async def give(self, kept: Kept, hot: SnapshotFolder) -> Manifest:
        """Fetch a state into the hot folder and verify it. After an error nothing is left there."""
        entry, head = await self._looked_up(kept)
        manifest = replace(head.manifest, id=kept.id)  # another sidecar may have written the same state
        path = hot.path / files.new_temporary(time.time())
        opened: list[FileIO] = []  # filled even if the caller is cancelled while the file is created

        def begin(_: Halt) -> None:
            hot.demand(manifest.size)
            opened.append(files.create(path))

        try:
            await self._lane.do(begin)
            await self._fetch(entry, head, opened[0])
            await self._lane.do(lambda _: place(hot, path, manifest))
        finally:
            await self._lane.do(lambda _: _discard(opened, path))
        return manifest

    async def check(self, kept: Kept) -> None:
        """Read a whole state and verify it. Raises UnfitError and MissingError."""
        await self._fetch(*await self._looked_up(kept), None)

    async def remove(self, kept: Kept, *, damaged: bool = False) -> None:
        """Remove a state: the head first, because a blob or part without a head is never used.

        The collector removes the parts that no other state has. A damaged state is removed too; the shared
        store has no quarantine.
        """
        del damaged
        await self._opened()
        entry = self._names.entry(kept.manifest, kept.tokens)
        if entry is None:
            return
        for form in self._forms(entry, kept.manifest):
            await self._remove(form)

    async def _remove(self, entry: HeadName) -> None:
        body: Blob | StoredParts | None = None
        try:
            body = (await self._head(entry)).body
        except MissingError:
            return
        except SnapshotError:
            pass
        await self.unlink(entry)
        if isinstance(body, Blob):
            await self.objects.remove(body.path)

    async def release(self, kept: Kept) -> None:
        """Do nothing: a state stays for the other sidecars."""

    def limit(self, room: float) -> None:
        """Do nothing: the collector keeps the store within its budget."""

    def own_bytes(self, kept: Kept) -> int:
        return kept.manifest.size

    async def unlink(self, entry: HeadName) -> None:
        """Remove a state's head and its hint."""
        await self.objects.remove(entry.path)
        if self.hints:
            await self.hints.removed(entry.folder, entry.name)

    async def _write(self, entry: HeadName, kept: Kept, hot: SnapshotFolder) -> HeadName:
        """Write a state, in parts if its file has any, and then its head. Returns the head's name."""
        manifest, began = kept.manifest, time.monotonic()
        parts = None
        if manifest.size >= self.parts.least:
            parts = await self.parts.upload(manifest, hot, self._secret or b"")
        body = parts or await self._write_blob(entry, manifest, hot)
        entry = entry.parted if parts else entry
        head = self._heads.encode(Head(manifest, kept.tokens, body), entry, self._secret or b"")
        while True:
            if time.monotonic() - began > FRESH:  # a collector may already take it for a leftover
                raise StoreError(Trouble.SLOW, f"{self.name} took too long")
            if await self.objects.create(entry.path, head):
                break
            if await self._has(entry):  # else it was damaged, and was removed
                if isinstance(body, Blob):
                    await self.objects.remove(body.path)  # another sidecar was first; no head names our blob
                await self._tell_use(entry, manifest.size)
                break
        return entry

    async def _write_blob(self, entry: HeadName, manifest: Manifest, hot: SnapshotFolder) -> Blob:
        """Write a whole file, and check that it is whole."""
        salt = secrets.token_bytes(SALT_BYTES)
        blob = self._names.blob(entry, manifest.sha256, salt)
        size = stored_size(manifest.size, sealed=self._key is not None)
        opened: list[BlobReader] = []  # filled even if the caller is cancelled while the reader opens
        try:
            await self._lane.do(
                lambda _: opened.append(BlobReader(hot.open(manifest.id), self._pieces(salt)))
            )
            source = opened[0]
            if size <= AT_ONCE:
                data = b"".join([chunk async for chunk in self._read(source, manifest)])
                await self.objects.create(blob, data)  # written whole or not at all
            else:
                await self.objects.stream_up(blob, self._read(source, manifest))
        finally:
            self._lane.finish(partial(close_all, opened))
        if size > AT_ONCE and await self.objects.size(blob) != size:
            raise StoreError(Trouble.UNREACHABLE, f"{self.name} has not kept what was written")
        return Blob(blob, salt)

    async def _has(self, entry: HeadName) -> bool:
        """Whether the store has a state. A damaged head, or one without its blob or parts, is removed.

        Else the state would never be written again.
        """
        body: Blob | StoredParts | None = None
        try:
            with suppress(UnfitError):
                body = (await self._head(entry)).body
        except MissingError:  # a head of a later release stays
            return await self.objects.size(entry.path) is not None
        there = False
        if isinstance(body, Blob):
            there = await self.objects.size(body.path) is not None
        elif body:
            there = await self.parts.all_there(body)
        if not there:
            await self.unlink(entry)
        return there

    async def _read(self, source: BlobReader, manifest: Manifest) -> AsyncIterator[bytes]:
        """Yield the blob as stored. Raises UnfitError at the end if the file is not what was kept."""
        while chunk := await self._lane.do(source.next):
            yield chunk
        if (source.hashed.size, source.hashed.sha256) != (manifest.size, manifest.sha256):
            raise UnfitError(f"{manifest.id} was changed after it was kept")

    async def _looked_up(self, kept: Kept) -> tuple[HeadName, Head]:
        await self._opened()
        entry = self._names.entry(kept.manifest, kept.tokens)
        if entry is None:
            raise MissingError(f"{kept.id} is too short for {self.name}")
        for form in self._forms(entry, kept.manifest):
            with suppress(MissingError):
                return form, await self._head(form)
        raise MissingError(f"{kept.id} is not in {self.name} any more")

    async def _fetch(self, entry: HeadName, head: Head, file: FileIO | None) -> None:
        """Fetch a state into a new file, or only verify it."""
        manifest, body = head.manifest, head.body
        got = (
            self._pour(manifest, body, BlobWriter(file, self._pieces(body.salt)))
            if isinstance(body, Blob)
            else self._put_together(manifest, body, file)
        )
        try:
            await asyncio.gather(self._tell_use(entry, manifest.size), got)
        except MissingError:  # a head without a blob, or without a part, is useless
            await self.unlink(entry)
            raise
        except SealError as error:
            raise UnfitError(f"{manifest.id} in {self.name}: {error}") from error

    async def _pour(self, manifest: Manifest, blob: Blob, target: BlobWriter) -> None:
        async for chunk in self.objects.stream_down(blob.path):
            await self._lane.do(partial(_feed, target, chunk))
            if target.hashed.size > manifest.size:  # however many bytes follow, they must not fill the disk
                raise UnfitError(f"{manifest.id} in {self.name} has more bytes than were kept")
        await self._lane.do(lambda _: target.end())
        if (target.hashed.size, target.hashed.sha256) != (manifest.size, manifest.sha256):
            raise UnfitError(f"{manifest.id} in {self.name} is not what was kept")

    async def _put_together(self, manifest: Manifest, stored: StoredParts, file: FileIO | None) -> None:
        await self.parts.download(stored, file, self._lane)
        if file is None:
            return
        target = file

        def damaged(halt: Halt) -> list[bytes]:
            files.sync_file(target)
            passed = files.hash_bytes(target, halt)
            right = (passed.size, passed.sha256) == (manifest.size, manifest.sha256)
            return [] if right else self.parts.damaged(stored, target, halt)

        if wrong := await self._lane.do(damaged):
            await self.parts.remove(wrong)
            raise UnfitError(f"{manifest.id} in {self.name} is not what was kept")

    async def _tell_use(self, entry: HeadName, size: int) -> None:
        """Mark the state as used, so that it is not removed.

        A failed mark is ignored: a full or read-only store can still be read.
        """
        if self.hints:
            await self.hints.reading(entry.state, size)
        with suppress(StoreError):
            await self.objects.mark(entry.used)

    # -- heads -------------------------------------------------------------------------------------

    async def _head(self, entry: HeadName) -> Head:
        """Read and verify a head. Raises UnfitError if it is not ours or was changed.

        Raises MissingError if there is none, if it is too large, or if a later release wrote it.
        """
        data = await self.objects.read(entry.path, LARGEST_HEAD)
        return self._heads.decode(data, entry, self._secret or b"")

    async def blob_of(self, entry: HeadName) -> str | None:
        """Return the blob that a head names; None if the head cannot be read."""
        with suppress(SnapshotError):
            if isinstance(body := (await self._head(entry)).body, Blob):
                return body.path
        return None

    async def parts_of(self, entry: HeadName) -> bytes:
        """Return the names of the parts of a state of any key; none if its head is damaged.

        Raises MissingError if there is no such head.
        """
        try:
            return parts_named(await self.objects.read(entry.path, LARGEST_HEAD)) or b""
        except MissingError:
            if await self.objects.size(entry.path) is None:
                raise
            return b""  # it is too large

    def _pieces(self, salt: bytes) -> Pieces | None:
        return self._key.pieces(salt) if self._key else None

    async def _opened(self) -> None:
        """Make the secret known. Without a key it is an object of the store; the first sidecar writes it.

        Raises StoreError if that object is not a secret: manifests could then be signed by anyone.
        """
        if self._secret is None:
            await self.objects.create(STORE_SEAL, secrets.token_bytes(BYTES))
            secret = b""
            with suppress(MissingError):  # it is too large, or was removed just now
                secret = await self.objects.read(STORE_SEAL, BYTES)
            if len(secret) != BYTES:
                raise StoreError(Trouble.UNREACHABLE, f"The object {STORE_SEAL} in {self.name} is damaged")
            self._secret = secret


def _discard(opened: list[FileIO], path: Path) -> None:
    """Close the file and remove its temporary name, if that is still there."""
    for file in opened:
        file.close()
        path.unlink(missing_ok=True)


def _feed(target: BlobWriter, chunk: memoryview, _: Halt) -> None:
    target.feed(chunk)
