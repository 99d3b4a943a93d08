"""The shared cold tier: writes a state once for all sidecars, finds it by its tokens, verifies and collects.

A large state is kept in parts, which states have in common (`part_objects`). A small one, or one whose layout
is not understood, is a blob: its slot file. Both are sealed with the user's key if there is one. The head has
the manifest, the tokens, and the names of the parts. It is written last, and only if no other sidecar has
written the same state. So a killed process leaves either a whole state, or a blob or parts without a head,
which the collector removes later. Neither is trusted: a file is hashed before it gets a name that an engine
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
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Final

import orjson

from slotkeeper.engine.slotfile import PartSizes
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.scheduler.types import Tier
from slotkeeper.store import files, manifest
from slotkeeper.store.files import Halt, Lane
from slotkeeper.store.folders import joined
from slotkeeper.store.folders.snapshot_folder import SnapshotFolder, Swept
from slotkeeper.store.index import Kept, Use
from slotkeeper.store.intake import place
from slotkeeper.store.manifest import BYTES, Flaw, Manifest
from slotkeeper.store.shared_store.hints import Hints
from slotkeeper.store.shared_store.object_names import (
    BLOBS,
    DOOMED,
    ELECTIONS,
    HEADS,
    IN_PARTS,
    MARKS,
    PART_BYTES,
    PARTS,
    STORE_SEAL,
    USED,
    HeadName,
    ObjectNames,
    entries_to_read,
    parsed,
    part_at,
    part_path,
    parts_in,
    state_of,
)
from slotkeeper.store.shared_store.objects import AT_A_TIME, AT_ONCE, Objects, ObjectSeen
from slotkeeper.store.shared_store.part_objects import (
    FRESH,
    IN_STORE,
    LOOKS,
    MOST_DOOMED,
    PartObjects,
    StoredParts,
    close_all,
    in_turn,
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


# -- the collector of what no head needs ----------------------------------------------------------------

# Garbage collection in a shared store, normally by one sidecar at a time.
#
# Two sidecars that collect at once do no harm: both remove the same objects in the same order. A collector
# may be killed after any step:
#
# 1. Blobs are listed before heads. A blob without a head is a leftover, or its head is not written yet. It is
#    removed when it is older than any writer needs from the blob to the head.
# 2. A head without its blob, or without one of its parts, cannot be restored. It is removed at the same age.
# 3. While all blobs and parts together exceed the budget, the least recently used state is removed: the head
#    first, because a blob without a head is never looked for. A state that was just fetched or written stays.
# 4. If the folder of the blobs, parts or heads is not there, as when a disk is unmounted, nothing is removed.
# 5. Marks of use are removed with their state; elections are removed when their term has ended.
# 6. A part that no head names is doomed first and removed in a later round, by the rules in `part_objects`.
#    Once it is doomed it does not count for the budget.
#
# All ages are by the store's own clock, which is read from an object that is written for this purpose.


GRACE: Final = 2 * FRESH  # seconds after which an unfinished state will not be finished
SPARED: Final = 600.0  # seconds for which a state that was written or fetched is not removed
TERM: Final = 300  # seconds for which one sidecar is elected
SETTLED: Final = 60.0  # seconds; a younger head may be replaced by one that has the same time


@dataclass(slots=True)
class Collected:
    """The numbers of objects (leftovers) and states that one round removed, and the bytes of blobs left."""

    leftovers: int = 0
    states: int = 0
    left_bytes: int = 0


@dataclass(slots=True)
class _State:
    """All objects of one state."""

    blobs: list[ObjectSeen] = field(default_factory=list)
    head: ObjectSeen | None = None
    entry: HeadName | None = None
    used: ObjectSeen | None = None
    named: bytes = b""  # the parts in its head

    @property
    def parts(self) -> list[bytes]:
        return parts_in(self.named)

    @property
    def touched(self) -> float:
        return max((seen.changed for seen in (self.head, self.used, *self.blobs) if seen), default=0.0)


@dataclass(slots=True)
class _Survey:
    """All that a store has: states, and the bytes and times of parts."""

    states: dict[str, _State] = field(default_factory=dict)
    parts: dict[bytes, ObjectSeen] = field(default_factory=dict)
    needed: Counter[bytes] = field(default_factory=Counter)  # in how many heads a part is

    def state(self, name: str, *, in_parts: bool) -> _State:
        """Return the record of a state, which may be there both ways; make one if there is none."""
        return self.states.setdefault(name + IN_PARTS * in_parts, _State())

    def released(self, state: _State) -> Iterator[bytes]:
        """Yield the parts that no state needs once this one is removed."""
        for part in state.parts:
            self.needed[part] -= 1
            if not self.needed[part] and part in self.parts:
                yield part

    def size_of(self, parts: Collection[bytes]) -> int:
        return sum(self.parts[part].size for part in parts if part in self.parts)


class StoreCollector:
    """Keeps one store within a budget in bytes. 0 means no budget: only leftovers are removed."""

    def __init__(
        self, store: SharedStore, budget: int, *, grace: float = GRACE, spared: float = SPARED
    ) -> None:
        self._store = store
        self._objects: Objects = store.objects
        self._budget = budget
        self._grace = grace
        self._spared = spared
        self._named: dict[ObjectSeen, bytes] = {}  # the parts in each head, which never changes

    async def elected(self, now: float) -> bool:
        """Whether this sidecar collects in this term. `now` is the wall clock; other sidecars' may differ."""
        if self._store.hints:
            ours = await self._store.hints.collects(TERM)
            if ours is not None:
                return ours
        return await self._objects.create(f"{ELECTIONS}/{int(now / TERM):012d}", b"")

    async def collect(self) -> Collected:
        """Collect once. Raises StoreError; the next round continues where this one ended."""
        began = time.monotonic()
        now = await self._time()
        doomed = await self._store.parts.doomed()
        try:
            survey = await self._survey(now)
        except MissingError:  # (4), or nothing was ever written
            return Collected()
        done = Collected()
        for number, state in enumerate(list(survey.states.values()), start=1):
            done.leftovers += await self._clear(state, survey, now)
            if number % AT_A_TIME == 0:  # most states are as they should be, and need no call
                await asyncio.sleep(0)
        for seen, parts in doomed:
            done.leftovers += await self._clear_doomed(seen, parts, survey, now, began)
        names = frozenset[bytes]().union(*(parts for _, parts in doomed))
        leaving = {part for part in names if part in survey.parts and not survey.needed[part]}
        leaving |= {
            part
            for part, seen in survey.parts.items()
            if now - seen.changed > self._grace and not survey.needed[part]
        }
        await self._fit(survey, leaving, now, done)
        await self._doom(sorted(leaving - names))
        return done

    async def _fit(self, survey: _Survey, leaving: set[bytes], now: float, done: Collected) -> None:
        """Remove states until the budget holds all others (3). Adds parts that none needs to `leaving`."""
        states = survey.states.values()
        total = sum(blob.size for state in states for blob in state.blobs) + survey.size_of(survey.parts)
        done.left_bytes = total
        total -= survey.size_of(leaving)
        for state in sorted((s for s in states if s.entry), key=lambda state: state.touched):
            if not self._budget or total <= self._budget:
                break
            if now - state.touched > self._spared and await self._removed(state):
                blobs, parts = sum(blob.size for blob in state.blobs), set(survey.released(state))
                total -= blobs + survey.size_of(parts - leaving)
                leaving |= parts
                done.left_bytes -= blobs
                done.states += 1

    # -- parts (6) ---------------------------------------------------------------------------------

    async def _clear_doomed(
        self, seen: ObjectSeen, parts: Collection[bytes], survey: _Survey, now: float, began: float
    ) -> int:
        """Remove the parts that were doomed long enough and that no head names. Returns how many."""
        age, cleared = now - seen.changed - self._grace, 0
        if age > 2 * FRESH:
            await self._objects.remove(seen.path)
        if not 0.0 <= age <= FRESH:
            return 0
        for part in parts:
            if part not in survey.parts or survey.needed[part]:
                continue
            if time.monotonic() - began > FRESH / 2:  # a writer may soon use this name again
                break
            await self._objects.remove(part_path(part))
            del survey.parts[part]
            cleared += 1
        return cleared

    async def _doom(self, parts: Sequence[bytes]) -> None:
        for at in range(0, len(parts), MOST_DOOMED):
            path = f"{DOOMED}/{secrets.token_hex(8)}"
            await self._objects.create(path, b"".join(parts[at : at + MOST_DOOMED]))

    async def _time(self) -> float:
        """Return the time of the store's clock, in seconds, from an object written for that.

        Objects of elections whose term has ended are removed.
        """
        path = f"{ELECTIONS}/clock-{secrets.token_hex(8)}"
        await self._objects.create(path, b"")
        seen = [each async for each in self._objects.listing(ELECTIONS)]
        now = next((each.changed for each in seen if each.path == path), 0.0)
        await self._objects.remove(path)
        for each in seen:
            if now - each.changed > max(self._grace, 2 * TERM):
                await self._objects.remove(each.path)
        return now

    async def _survey(self, now: float) -> _Survey:
        """Return what there is. Raises MissingError if a folder that should be there is not."""
        survey = _Survey()
        absent = {folder for folder in (BLOBS, PARTS) if not await self._bodies(folder, survey)}  # (1)
        async for seen in self._objects.listing(HEADS, existing=True):
            if entry := parsed(seen.path):
                if (PARTS if entry.in_parts else BLOBS) in absent:
                    raise MissingError("there are heads, but no folder of what they name")
                state = survey.state(entry.state, in_parts=entry.in_parts)
                state.head, state.entry = seen, entry
        for folder in (USED, MARKS):
            async for seen in self._objects.listing(folder):
                if name := state_of(seen.path):
                    survey.state(name, in_parts=folder == MARKS).used = seen
        await self._read_heads(survey, now)
        return survey

    async def _bodies(self, folder: str, survey: _Survey) -> bool:
        """List the blobs or parts; whether their folder, and each in it, is there."""
        try:
            async for seen in self._objects.listing(folder, existing=True):
                if part := part_at(seen.path):
                    survey.parts[part] = seen
                elif name := state_of(seen.path):
                    survey.state(name, in_parts=False).blobs.append(seen)
        except MissingError:
            return False
        return True

    async def _read_heads(self, survey: _Survey, now: float) -> None:
        """Read which parts are needed. A head is read once in the life of this process.

        Raises MissingError if a head is not there any more.
        """
        states = {
            state.head: state
            for state in survey.states.values()
            if state.head and state.entry and state.entry.in_parts
        }
        self._named = {head: named for head, named in self._named.items() if head in states}
        new = (
            partial(self._read_head, state, now) for head, state in states.items() if head not in self._named
        )
        await in_turn(new, LOOKS)
        for number, (head, state) in enumerate(states.items(), start=1):
            state.named = self._named.get(head, state.named)
            survey.needed.update(state.parts)
            if number % AT_A_TIME == 0:
                await asyncio.sleep(0)

    async def _read_head(self, state: _State, now: float) -> None:
        if state.head and state.entry:
            state.named = await self._store.parts_of(state.entry)
            if now - state.head.changed > SETTLED:
                self._named[state.head] = state.named

    async def _clear(self, state: _State, survey: _Survey, now: float) -> int:
        """Remove the unusable objects of one state, and return how many."""
        gone = [seen for seen in await self._unusable(state, survey) if now - seen.changed > self._grace]
        for seen in gone:
            await self._objects.remove(seen.path)
            if seen in state.blobs:
                state.blobs.remove(seen)
            if seen is state.head:
                survey.needed.subtract(state.parts)
                state.head = state.entry = None
        return len(gone)

    async def _unusable(self, state: _State, survey: _Survey) -> list[ObjectSeen]:
        if state.entry is None or state.head is None:
            return [*state.blobs, *filter(None, [state.used])]  # (1), (5)
        if state.entry.in_parts:
            whole = state.named and all(part in survey.parts for part in state.parts)
            return [] if whole else [state.head]  # (2)
        if not state.blobs:
            return [state.head]  # (2)
        named = await self._store.blob_of(state.entry) if len(state.blobs) > 1 else None
        return [blob for blob in state.blobs if blob.path != named] if named else []

    async def _removed(self, state: _State) -> bool:
        hints = self._store.hints
        if state.entry is None or (hints and await hints.is_read(state.entry.state)):
            return False
        await self._store.unlink(state.entry)  # (3)
        for seen in (*state.blobs, *filter(None, [state.used])):
            await self._objects.remove(seen.path)
        return True
