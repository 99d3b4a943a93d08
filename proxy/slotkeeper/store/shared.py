"""The cold tier that several sidecars share: a state is written once, found by its tokens, and verified.

A state is two objects. The blob is the slot file, sealed with the user's key if there is one. The head has
the manifest and the tokens. It is written last, and only if no other sidecar has written the same state. So a
killed process leaves either a whole state or a blob without a head, which `collector` removes an hour later.
A blob is not trusted: its file is hashed before it gets a name that an engine could be given.
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
from typing import Final

import orjson

from slotkeeper.scheduler.slot_contents import SnapshotId, Tier
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.store import files
from slotkeeper.store.files import Halt, Lane
from slotkeeper.store.hints import Hints
from slotkeeper.store.index import Kept, Use
from slotkeeper.store.intake import place
from slotkeeper.store.manifest import BYTES, Flaw, Manifest, decode, encode
from slotkeeper.store.object_names import STORE_SEAL, HeadName, ObjectNames, entries_to_read
from slotkeeper.store.objects import AT_ONCE, Objects
from slotkeeper.store.sealing import (
    SALT_BYTES,
    BlobReader,
    BlobWriter,
    Pieces,
    SealError,
    StoreKey,
    stored_size,
)
from slotkeeper.store.snapshot_folder import SnapshotFolder
from slotkeeper.store.sweep import Swept
from slotkeeper.store.trouble import LateError, MissingError, SnapshotError, StoreError, Trouble, UnfitError

LARGEST_HEAD: Final = 16 << 20  # bytes: a manifest, and the ids of a million tokens
LARGEST_TOKENS: Final = 16 << 20  # bytes: four million ids
CHEAP: Final = 1 << 20  # bytes: writing a smaller blob is as quick as asking for its state
LONGEST_LOOK: Final = 10.0  # seconds; a request waits for less (`scheduler.retention`)
SEEN: Final = 4096  # entries whose snapshot id is remembered
FRESH: Final = 1800.0  # seconds, the longest write of a state, blob to head: half of the collector's wait
SETTLE: Final = 0.05  # seconds: obstore 0.12 aborts a process that ends right after a failed call


@dataclass(frozen=True, slots=True)
class Head:
    """The object that describes a state and is read before its blob."""

    manifest: Manifest
    tokens: Tokens
    blob: str
    salt: bytes


class SharedStore:
    """One bucket or folder as the cold tier. Methods raise SnapshotError and StoreError."""

    shared: Final = True
    unread: Final = False

    def __init__(self, objects: Objects, key: StoreKey | None = None, hints: Hints | None = None) -> None:
        self.objects = objects
        self.hints = hints
        self.name = objects.url
        self._key = key
        self._names = ObjectNames(key.derived("names") if key else b"")
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
        await self._lane.close()
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
        if kept.manifest.size > CHEAP and await self._has(entry):
            await self._tell_use(entry, kept.manifest.size)  # for the collector it is as new
            return True
        if self.hints is None:
            return await self._write(entry, kept, hot)
        async with self.hints.writing(entry.state, kept.manifest.size) as free:
            if not free:
                return False
            await self._write(entry, kept, hot)
        await self.hints.added(entry.folder, entry.name)
        return True

    async def give(self, kept: Kept, hot: SnapshotFolder) -> Manifest:
        """Fetch a state into the hot folder and verify it. After an error nothing is left there."""
        entry, head = await self._looked_up(kept)
        manifest = replace(head.manifest, id=kept.id)  # another sidecar may have written the same state
        path = hot.path / files.new_temporary(time.time())
        opened: list[BlobWriter] = []  # filled even if the caller is cancelled while the file is created

        def begin(_: Halt) -> None:
            hot.demand(manifest.size)
            opened.append(BlobWriter(path, self._pieces(head.salt)))

        try:
            await self._lane.do(begin)
            await self._fetch(entry, head, opened[0])
            await self._lane.do(lambda _: place(hot, path, manifest))
        finally:
            await self._lane.do(lambda _: _discard_all(opened))
        return manifest

    async def check(self, kept: Kept) -> None:
        """Read a whole state and verify it. Raises UnfitError and MissingError."""
        entry, head = await self._looked_up(kept)
        await self._fetch(entry, head, BlobWriter(None, self._pieces(head.salt)))

    async def remove(self, kept: Kept, *, damaged: bool = False) -> None:
        """Remove a state: the head first, because a blob without a head is never used.

        A damaged state is removed too; the shared store has no quarantine.
        """
        del damaged
        await self._opened()
        entry = self._names.entry(kept.manifest, kept.tokens)
        if entry is None:
            return
        try:
            blob = (await self._head(entry)).blob
        except MissingError:
            return
        except SnapshotError:
            blob = ""
        await self.unlink(entry)
        if blob:
            await self.objects.remove(blob)

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

    async def _write(self, entry: HeadName, kept: Kept, hot: SnapshotFolder) -> bool:
        """Write the blob, check that it is whole, and write the head. Always returns True."""
        manifest, salt, began = kept.manifest, secrets.token_bytes(SALT_BYTES), time.monotonic()
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
            self._lane.finish(partial(_close_all, opened))
        if size > AT_ONCE and await self.objects.size(blob) != size:
            raise StoreError(Trouble.UNREACHABLE, f"{self.name} has not kept what was written")
        if time.monotonic() - began > FRESH:  # a collector may already take the blob for a leftover
            raise StoreError(Trouble.SLOW, f"{self.name} took too long")
        head = self._sealed(entry, kept, blob, salt)
        while not await self.objects.create(entry.path, head):
            if await self._has(entry):
                await self.objects.remove(blob)  # another sidecar was first; no head names our blob
                await self._tell_use(entry, manifest.size)
                break
        return True

    async def _has(self, entry: HeadName) -> bool:
        """Whether the store has a state. A damaged head, or one without a blob, is removed.

        Else the state would never be written again.
        """
        blob = None
        try:
            with suppress(UnfitError):
                blob = (await self._head(entry)).blob
        except MissingError:  # a head of a later release stays
            return await self.objects.size(entry.path) is not None
        if blob and await self.objects.size(blob) is not None:
            return True
        await self.unlink(entry)
        return False

    async def _read(self, source: BlobReader, manifest: Manifest) -> AsyncIterator[bytes]:
        """Yield the blob as stored. Raises UnfitError at the end if the file is not what was kept."""
        while chunk := await self._lane.do(source.next):
            yield chunk
        if (source.size, source.sha256) != (manifest.size, manifest.sha256):
            raise UnfitError(f"{manifest.id} was changed after it was kept")

    async def _looked_up(self, kept: Kept) -> tuple[HeadName, Head]:
        await self._opened()
        entry = self._names.entry(kept.manifest, kept.tokens)
        if entry is None:
            raise MissingError(f"{kept.id} is too short for {self.name}")
        return entry, await self._head(entry)

    async def _fetch(self, entry: HeadName, head: Head, target: BlobWriter) -> None:
        manifest = head.manifest
        try:
            await asyncio.gather(self._tell_use(entry, manifest.size), self._pour(head, target))
        except MissingError:  # a head without a blob is useless
            await self.unlink(entry)
            raise
        except SealError as error:
            raise UnfitError(f"{manifest.id} in {self.name}: {error}") from error
        if (target.size, target.sha256) != (manifest.size, manifest.sha256):
            raise UnfitError(f"{manifest.id} in {self.name} is not what was kept")

    async def _pour(self, head: Head, target: BlobWriter) -> None:
        async for chunk in self.objects.stream_down(head.blob):
            await self._lane.do(partial(_feed, target, chunk))
            if target.size > head.manifest.size:  # however many bytes follow, they must not fill the disk
                raise UnfitError(f"{head.manifest.id} in {self.name} has more bytes than were kept")
        await self._lane.do(lambda _: target.end())

    async def _tell_use(self, entry: HeadName, size: int) -> None:
        """Mark the state as used, so that it is not removed.

        A failed mark is ignored: a full or read-only store can still be read.
        """
        if self.hints:
            await self.hints.reading(entry.state, size)
        with suppress(StoreError):
            await self.objects.mark(entry.used)

    # -- heads -------------------------------------------------------------------------------------

    def _sealed(self, entry: HeadName, kept: Kept, blob: str, salt: bytes) -> bytes:
        secret = self._secret or b""
        manifest = encode(kept.manifest, secret).decode()
        facts = orjson.dumps({"manifest": manifest, "blob": blob, "salt": salt.hex()})
        data = len(facts).to_bytes(4, "big") + facts + zlib.compress(kept.tokens.packed, 1)
        return self._key.seal(data, entry.path) if self._key else data

    async def _head(self, entry: HeadName) -> Head:
        """Read and verify a head. Raises UnfitError if it is not ours or was changed.

        Raises MissingError if there is none, if it is too large, or if a later release wrote it.
        """
        data = await self.objects.read(entry.path, LARGEST_HEAD)
        try:
            data = self._key.open(data, entry.path) if self._key else data
            size = int.from_bytes(data[:4], "big")
            facts = orjson.loads(data[4 : 4 + size])
            blob, salt, text = str(facts["blob"]), bytes.fromhex(facts["salt"]), facts["manifest"].encode()
            unpacking = zlib.decompressobj()
            packed = unpacking.decompress(data[4 + size :], LARGEST_TOKENS)
            named = SnapshotId(str(orjson.loads(text)["id"]))
        except (SealError, ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
            raise UnfitError(f"{entry.path} cannot be read") from error
        if not unpacking.eof or unpacking.unused_data:
            raise UnfitError(f"{entry.path} is not whole")
        manifest = self._decoded(text, named, entry.path)
        tokens = Tokens.of(packed, chunks=manifest.chunks)
        own = self._names.entry(manifest, tokens) if manifest.fits(tokens) else None
        if own != entry or blob != self._names.blob(entry, manifest.sha256, salt):
            raise UnfitError(f"{entry.path} says that it is another state")
        return Head(manifest, tokens, blob, salt)

    def _decoded(self, text: bytes, named: SnapshotId, path: str) -> Manifest:
        match decode(text, named, self._secret or b""):
            case Flaw.NEWER as flaw:
                raise MissingError(f"{path}: {flaw}")
            case Flaw() as flaw:
                raise UnfitError(f"{path}: {flaw}")
            case manifest:
                return manifest

    async def blob_of(self, entry: HeadName) -> str | None:
        """Return the blob that a head names; None if the head cannot be read."""
        try:
            return (await self._head(entry)).blob
        except SnapshotError:
            return None

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


def _close_all(readers: list[BlobReader]) -> None:
    for reader in readers:
        reader.close()


def _discard_all(writers: list[BlobWriter]) -> None:
    for writer in writers:
        writer.discard()


def _feed(target: BlobWriter, chunk: memoryview, _: Halt) -> None:
    target.feed(chunk)
