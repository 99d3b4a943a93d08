"""The parts of states as objects of a shared store: a part is uploaded once, whichever states have it.

Several sidecars write, read and collect at once, and no object can be locked. Two rules keep every part that
a head names (as in Duplicacy, whose paper calls it lock-free deduplication):

1. A collector never removes a part when it finds it without a head. It writes the part's name into an object
   in `doomed/`, and removes it 2 x FRESH later at the earliest, if a listing of heads of that time names it
   nowhere. After 3 x FRESH it does not begin with it any more, and no round removes anything for longer than
   FRESH / 2. After 4 x FRESH the object in `doomed/` is removed.
2. A writer reads `doomed/` first. A doomed part is not there for it: it uploads another copy, under another
   name. Then it looks which parts are there, uploads the others, and writes the head, all within FRESH.

So if a writer has not seen that a part is doomed, its head is written before any collector lists the heads to
decide about that part. And a part is never written again under a name that is being removed. Both rules hold
while no request for a small object takes longer than FRESH / 2; `objects` gives up far sooner. All ages of
objects are by the store's clock, all durations by one process's own.

A writer that is killed leaves parts without a head. They are used by whoever needs them next, or doomed.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from io import FileIO
from typing import Final

from slotkeeper.engine.slotfile import PartSizes, Recipe
from slotkeeper.store import files
from slotkeeper.store.files import Halt, Lane
from slotkeeper.store.folders import joined
from slotkeeper.store.folders.joined import Parts, Source
from slotkeeper.store.folders.snapshot_folder import SnapshotFolder
from slotkeeper.store.intake import copying
from slotkeeper.store.manifest import Manifest
from slotkeeper.store.shared_store.object_names import DOOMED, MOST_COPIES, PART_BYTES, part_path, parts_in
from slotkeeper.store.shared_store.objects import Objects, ObjectSeen
from slotkeeper.store.shared_store.sealing import SALT_BYTES, TAG, BlobReader, SealError, StoreKey
from slotkeeper.store.trouble import MissingError, StoreError, Trouble, UnfitError

FRESH: Final = 1800.0  # seconds, the longest write of a state, from its first part or blob to its head
KNOWN: Final = FRESH / 2  # seconds for which a part that was seen is not looked at again
MOST_KNOWN: Final = 65536  # parts that are remembered to be there
# A request takes as long as 1 to 3 MB of a stream, so smaller parts cost more in requests than they save in
# bytes; larger ones make each save write more of its unfinished run again, and take memory.
IN_STORE: Final = PartSizes(least=512 << 10, most=8 << 20)
SMALLEST: Final = 4  # times `least`: smaller states stay whole
LOOKS: Final = 16  # questions at a time for one state
UPLOADS: Final = 4  # parts in memory that are on their way up, of all states
DOWNLOADS: Final = 8  # and down
MOST_DOOMED: Final = 100_000  # names in one object


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part: its name in the store, and what it holds.

    `number` and `size`, in bytes, are those in the division of the file; None for the frame, which is
    compressed.
    """

    name: bytes
    digest: str
    number: int | None
    size: int | None

    @property
    def path(self) -> str:
        return part_path(self.name)


@dataclass(frozen=True, slots=True)
class StoredParts:
    """A state in parts as its head describes it.

    `parts` has no frame: that is the last of the objects, compressed, and has the last digest.
    """

    parts: Parts
    names: tuple[bytes, ...]

    def __iter__(self) -> Iterator[StoredPart]:
        sizes = self.parts.division.sizes
        return map(StoredPart, self.names, self.parts.digests, (*range(len(sizes)), None), (*sizes, None))

    def place(self, part: StoredPart) -> Recipe:
        """Return where a part is in the file."""
        division = self.parts.division
        return division.frame if part.number is None else division.part(part.number)


def read_back(listing: Parts, packed: bytes, secret: bytes) -> StoredParts | None:
    """Return the parts that a head lists, if it names the right ones: only its list is signed."""
    names = tuple(parts_in(packed))
    hashes = [bytes.fromhex(name) for name in listing.names(secret)]
    whole = len(hashes) == len(listing.division.sizes) + 1
    return StoredParts(listing, names) if whole and [name[:-1] for name in names] == hashes else None


class PartObjects:
    """Uploads and downloads the parts of states. Methods raise SnapshotError and StoreError."""

    def __init__(self, objects: Objects, key: StoreKey | None, sizes: PartSizes = IN_STORE) -> None:
        self._objects = objects
        self._key = key
        self._sizes = sizes
        self._there: OrderedDict[bytes, float] = OrderedDict()  # parts that were seen -> when, monotonic
        self._doomed: dict[str, frozenset[bytes]] = {}  # by the path of the object that says it
        self._lane = Lane("parts")  # of its own: a state is hashed here while another one is fetched
        self._up, self._down = asyncio.Semaphore(UPLOADS), asyncio.Semaphore(DOWNLOADS)

    def __repr__(self) -> str:
        return f"<PartObjects {len(self._there)} known, {sum(map(len, self._doomed.values()))} doomed>"

    @property
    def least(self) -> int:
        """The bytes of a state below which it stays whole."""
        return SMALLEST * self._sizes.least

    async def close(self) -> None:
        await self._lane.close()

    # -- up ----------------------------------------------------------------------------------------

    async def upload(self, manifest: Manifest, hot: SnapshotFolder, secret: bytes) -> StoredParts | None:
        """Upload what the store lacks of a state in the hot folder. None: the file has to stay whole.

        The caller writes the head within FRESH seconds of this call. Raises UnfitError if the file is not
        what was kept.
        """
        began, opened = time.monotonic(), list[Source]()
        doomed = frozenset[bytes]().union(*(names for _, names in await self.doomed()))

        def divide(halt: Halt) -> tuple[Parts, bytes] | None:
            hot.check(manifest, halt)
            opened.append(hot.open(manifest.id))
            with copying(hot, manifest, halt):
                parts = joined.parts_of(opened[0], manifest, halt, self._sizes)
            return (parts, zlib.compress(parts.frame, 1)) if parts else None

        def data(part: StoredPart, halt: Halt) -> bytes:
            with copying(hot, manifest, halt):
                read = files.bytes_of(stored.place(part), opened[0], halt)
                made = frame if part.number is None else b"".join(map(bytes, read))
            if sha256(made).hexdigest() != part.digest:
                raise UnfitError(f"{manifest.id} was changed while it was uploaded")
            return self._key.seal(made, part.path) if self._key else made

        try:
            if (divided := await self._lane.do(divide)) is None:
                return None
            parts, frame = divided
            listing = replace(parts, frame=b"", digests=(*parts.digests, sha256(frame).hexdigest()))
            hashes = (bytes.fromhex(name) for name in listing.names(secret))
            stored = StoredParts(listing, tuple(_usable(name, doomed) for name in hashes))
            await in_turn((partial(self._put, part, partial(data, part), began) for part in stored), LOOKS)
            await self._lane.do(partial(hot.check, manifest))  # that it was not changed meanwhile
        finally:
            self._lane.finish(partial(close_all, opened))
        return stored

    async def _put(self, part: StoredPart, data: Callable[[Halt], bytes], began: float) -> None:
        """Upload a part, unless it is there. If another sidecar has just written it, it is the same.

        A frame is hardly ever there, so nobody asks.
        """
        if part.number is not None and await self._is_there(part, began):
            return
        async with self._up:
            await self._objects.create(part.path, await self._lane.do(data))
        self._note(part, began)

    async def _is_there(self, part: StoredPart, began: float | None = None) -> bool:
        """Whether the store has a part. One of another size is damaged, and is removed.

        It is remembered if `doomed/` was read, at `began`.
        """
        if time.monotonic() - self._there.get(part.name, -KNOWN) < KNOWN:
            return True
        found = await self._objects.size(part.path)
        if found is not None and part.size is not None and found != self._stored_size(part.size):
            await self._objects.remove(part.path)
            return False
        if found is not None and began is not None:
            self._note(part, began)
        return found is not None

    def _note(self, part: StoredPart, began: float) -> None:
        self._there[part.name] = began
        self._there.move_to_end(part.name)
        if len(self._there) > MOST_KNOWN:
            self._there.popitem(last=False)

    async def all_there(self, stored: StoredParts) -> bool:
        """Whether the store has every part of a state."""
        missing = list[bytes]()

        async def look(part: StoredPart) -> None:
            if not await self._is_there(part):
                missing.append(part.name)

        await in_turn((partial(look, part) for part in stored), LOOKS)
        return not missing

    # -- down --------------------------------------------------------------------------------------

    async def download(self, stored: StoredParts, target: FileIO | None, lane: Lane) -> None:
        """Fetch all parts and write them to their places in a file, which `lane` does; or only verify them.

        Raises MissingError if a part is not there, and UnfitError if one has another size or cannot be
        opened. What is written to a file is not verified: its whole hash decides.
        """

        async def get(part: StoredPart) -> None:
            async with self._down:
                most = joined.LARGEST if part.size is None else self._stored_size(part.size)
                data = await self._objects.read(part.path, most)
                await lane.do(lambda _: self._unpack(part, data, stored.place(part), target))

        try:
            await in_turn((partial(get, part) for part in stored), DOWNLOADS)
        except MissingError:
            self._there.clear()
            raise
        except DamagedPartError as error:
            await self.remove([error.name])
            raise UnfitError("a part is damaged") from error

    def _unpack(self, part: StoredPart, data: bytes, place: Recipe, target: FileIO | None) -> None:
        """Write a part to its place in the file; verify it if there is no file. Blocks."""
        try:
            made = self._key.open(data, part.path) if self._key else data
        except SealError as error:
            raise DamagedPartError(part.name) from error
        if target is None and sha256(made).hexdigest() != part.digest:
            raise DamagedPartError(part.name)
        room = sum(span.length for span in place if not isinstance(span, bytes))
        made = _decompressed(made, room) if part.number is None else made
        if len(made) != room:
            raise DamagedPartError(part.name)
        if target:
            files.spread(made, place, target)

    @staticmethod
    def damaged(stored: StoredParts, file: FileIO, halt: Halt) -> list[bytes]:
        """Return the parts that have other bytes in the file than the list says. Blocks."""
        wrong = [
            part.name
            for part in stored
            if part.number is not None
            and files.hash_recipe(stored.place(part), file, halt).sha256 != part.digest
        ]
        return wrong or [stored.names[-1]]

    async def remove(self, names: Iterable[bytes]) -> None:
        """Remove damaged parts at once: no state that has them can be used."""
        self._there.clear()
        for name in names:
            await self._objects.remove(part_path(name))

    # -- doomed parts ------------------------------------------------------------------------------

    async def doomed(self) -> list[tuple[ObjectSeen, frozenset[bytes]]]:
        """Return the objects in `doomed/`, each with the parts that it names."""
        seen = [each async for each in self._objects.listing(DOOMED)]
        found = {each.path: self._doomed[each.path] for each in seen if each.path in self._doomed}

        async def read(path: str) -> None:
            with suppress(MissingError):  # its time has ended
                found[path] = frozenset(parts_in(await self._objects.read(path, MOST_DOOMED * PART_BYTES)))

        await in_turn((partial(read, each.path) for each in seen if each.path not in found), LOOKS)
        self._doomed = found
        return [(each, found.get(each.path, frozenset())) for each in seen]

    # -- objects -----------------------------------------------------------------------------------

    def _stored_size(self, size: int) -> int:
        return size + (SALT_BYTES + TAG) * (self._key is not None)


class DamagedPartError(Exception):
    """A part does not have the bytes that it should have."""

    def __init__(self, name: bytes) -> None:
        super().__init__(part_path(name))
        self.name = name


def _usable(name: bytes, doomed: Collection[bytes]) -> bytes:
    """Return the first copy of a part that is not doomed."""
    for copy in range(MOST_COPIES):
        if (named := name + bytes([copy])) not in doomed:
            return named
    raise StoreError(Trouble.UNREACHABLE, "All copies of a part are doomed")


def _decompressed(data: bytes, room: int) -> bytes:
    """Return the frame; something shorter if it is damaged."""
    unpacking = zlib.decompressobj()
    with suppress(zlib.error):
        frame = unpacking.decompress(data, room + 1)
        if unpacking.eof and not unpacking.unused_data:
            return frame
    return b""


def close_all(opened: Iterable[Source | BlobReader]) -> None:
    for source in opened:
        source.close()


async def in_turn(jobs: Iterable[Callable[[], Awaitable[None]]], at_once: int) -> None:
    """Do all jobs, so many at once. Raises the first error, after the others were cancelled."""
    waiting = iter(jobs)

    async def work() -> None:
        for job in waiting:
            await job()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
