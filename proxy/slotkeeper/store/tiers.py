"""The hot folder, the cold tier behind it, the threads that work there, and what lies there at the start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from slotkeeper.engine.slotfile import Damage, told
from slotkeeper.engine.slotfile_reader import read
from slotkeeper.scheduler.slot_contents import SnapshotId, Tier
from slotkeeper.scheduler.types import Tokens
from slotkeeper.store import files
from slotkeeper.store.files import Halt, Lane
from slotkeeper.store.index import Kept
from slotkeeper.store.intake import CheckedFile, SavedFile, SnapshotIntake, transfer
from slotkeeper.store.manifest import Flaw, Manifest
from slotkeeper.store.snapshot_folder import SnapshotFolder
from slotkeeper.store.trouble import ROOM, StoreError, StoreHealth, Trouble, UnfitError


@dataclass(slots=True)
class Swept:
    """What was found in one folder. `notes` are sentences for the log."""

    found: dict[SnapshotId, tuple[Manifest, Tokens]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def sweep(folder: SnapshotFolder, spare: Collection[str] = ()) -> Swept:
    """Read every snapshot's manifest and header, and take away what can never be used.

    1. Temporary files, but for those in `spare`: the engine may be writing them.
    2. A file without a manifest, a manifest without a file: something ended while they were made or dropped.
    3. What does not agree with its manifest goes to quarantine. Only `offer` reads all its bytes.
    4. What a later release wrote stays as it is.

    Files with other names are not touched. OSError passes.
    """
    swept = Swept()
    there: dict[SnapshotId, set[str]] = {}
    for path in list(folder.path.iterdir()):
        if files.is_temporary(path.name):
            if path.name not in spare:  # (1)
                files.remove(path)
        elif known := files.ours(path.name):
            there.setdefault(known[0], set()).add(known[1])
    for snapshot, suffixes in sorted(there.items()):
        if len(suffixes) == 2:
            _judge(folder, snapshot, swept)
        else:  # (2)
            folder.drop(snapshot)
            swept.notes.append(f"{snapshot}: unfinished, removed")
    folder.take_over(manifest for manifest, _ in swept.found.values())
    return swept


def _judge(folder: SnapshotFolder, snapshot: SnapshotId, swept: Swept) -> None:
    manifest = folder.read_manifest(snapshot)
    if manifest is Flaw.NEWER:  # (4)
        swept.notes.append(f"{snapshot}: left alone, {manifest}")
        return
    try:
        found = _agreeing(folder, snapshot, manifest)
    except UnfitError as error:  # (3)
        folder.quarantine(snapshot)
        swept.notes.append(f"{snapshot}: quarantined, {error}")
    else:
        swept.found[snapshot] = found


def _agreeing(
    folder: SnapshotFolder, snapshot: SnapshotId, manifest: Manifest | Flaw
) -> tuple[Manifest, Tokens]:
    """Manifest and tokens, if all that can be read quickly of the slot file is as the manifest says."""
    if isinstance(manifest, Flaw):
        raise UnfitError(f"its manifest cannot be used: {manifest}")
    with folder.open(snapshot) as file:
        size = files.stamp(file).size
        if size != manifest.size:
            raise UnfitError(f"{size} bytes, not {manifest.size}")
        found = read(file, size)
    if isinstance(found, Damage):
        raise UnfitError(found.text)
    tokens = told(found, manifest.chunks)
    if tokens is None or not manifest.fits(tokens):
        raise UnfitError("its tokens are not those that were kept")
    cuts = tuple(record.at for record in found.records)
    if (found.version, found.layout, cuts) != (manifest.version, manifest.layout, manifest.checkpoints):
        raise UnfitError("its structure is not the one that was kept")
    return manifest, tokens


# -- the cold tier ---------------------------------------------------------------------------------------


class ColdTier(Protocol):
    """Where snapshots go that have no room in the hot folder. Methods raise SnapshotError and StoreError."""

    @property
    def name(self) -> str: ...

    @property
    def shared(self) -> bool:
        """Whether others use it too: what is brought back stays there, and room is not ours to make."""

    @property
    def secret(self) -> bytes | None:
        """None before it is open."""

    async def open(self) -> Swept:
        """What lies there, as far as all of it is read."""

    async def take(self, kept: Kept, hot: SnapshotFolder) -> bool:
        """Have what lies in the hot folder. False: another sidecar is just writing that."""

    async def give(self, kept: Kept, hot: SnapshotFolder) -> Manifest:
        """Have it in the hot folder, verified. Returns what lies there: maybe another file of that state."""

    async def check(self, kept: Kept) -> None:
        """Read all its bytes."""

    async def remove(self, kept: Kept, *, damaged: bool = False) -> None: ...

    async def close(self) -> None: ...


class ColdFolder:
    """A folder of our own, and the lanes of `Tiers`."""

    shared: Final = False

    def __init__(
        self,
        folder: SnapshotFolder,
        *,
        urgent: Lane,
        patient: Lane,
        quick: Lane,
        clock: Callable[[], float],
        health: StoreHealth,
    ) -> None:
        self.name = str(folder.path)
        self._folder = folder
        self._urgent, self._patient, self._quick = urgent, patient, quick
        self._clock = clock
        self._health = health

    @property
    def secret(self) -> bytes | None:
        return self._folder.seal.secret if self._folder.claimed else None

    async def open(self) -> Swept:
        return await self._patient.do(lambda _: opened(self._folder, (), self._clock()))

    async def take(self, kept: Kept, hot: SnapshotFolder) -> bool:
        await self._patient.do(lambda halt: self._copy(kept, hot, self._folder, halt))
        return True

    async def give(self, kept: Kept, hot: SnapshotFolder) -> Manifest:
        await self._urgent.do(lambda halt: self._copy(kept, self._folder, hot, halt))
        return kept.manifest

    async def check(self, kept: Kept) -> None:
        await self._patient.do(lambda halt: self._folder.check(kept.manifest, halt, anew=True))

    async def remove(self, kept: Kept, *, damaged: bool = False) -> None:
        act = self._folder.quarantine if damaged else self._folder.drop
        await self._quick.do(lambda _: act(kept.id))

    async def close(self) -> None:
        self._folder.close()

    def _copy(self, kept: Kept, source: SnapshotFolder, target: SnapshotFolder, halt: Halt) -> None:
        if not self._folder.ready:  # it could not be used when we started
            claim(self._folder, self._clock())
        began = time.monotonic()
        transfer(source, target, kept.manifest, self._clock(), halt)
        self._health.measured(target.tier, kept.manifest.size, time.monotonic() - began)


def claim(folder: SnapshotFolder, now: float) -> None:
    folder.claim()
    folder.probe(now)


def opened(folder: SnapshotFolder, spare: Collection[str], now: float) -> Swept:
    """Make a folder, take its lock and read what lies there, but for the temporary files in `spare`.

    A full one is noted only: what is there can be used.
    """
    folder.claim()
    swept = sweep(folder, spare)
    try:
        folder.probe(now)
    except StoreError as error:
        if error.trouble is not Trouble.DISK_FULL:
            raise
        swept.notes.append(str(error))
    return swept


# -- both tiers ------------------------------------------------------------------------------------------


class Tiers:
    """`urgent` is for what a client waits for, `patient` for all else that takes time, `quick` for a look."""

    def __init__(
        self,
        hot: Path,
        cold: Path | ColdTier | None,
        *,
        clock: Callable[[], float],
        health: StoreHealth,
    ) -> None:
        self.hot = SnapshotFolder(hot, Tier.HOT)
        self.urgent, self.patient, self.quick = Lane("urgent"), Lane("patient"), Lane("quick")
        self._clock = clock
        self._health = health
        self.cold: ColdTier | None = None
        if isinstance(cold, Path):
            folder = SnapshotFolder(cold, Tier.COLD)
            self.cold = ColdFolder(
                folder,
                urgent=self.urgent,
                patient=self.patient,
                quick=self.quick,
                clock=clock,
                health=health,
            )
        elif cold:
            self.cold = cold

    async def close(self) -> None:
        await asyncio.gather(self.urgent.close(), self.patient.close(), self.quick.close())
        self.hot.close()
        if self.cold:
            await self.cold.close()

    @property
    def names(self) -> list[Tier]:
        return [Tier.HOT, Tier.COLD] if self.cold else [Tier.HOT]

    @property
    def secret(self) -> bytes | None:
        """Of the cold tier, where that could be opened."""
        hot = self.hot.seal.secret if self.hot.claimed else None
        return (self.cold.secret if self.cold else None) or hot

    async def open_hot(self, spare: Collection[str]) -> Swept:
        with self._health.watching(f"open {self.hot.path}", Tier.HOT):
            return await self.patient.do(lambda _: opened(self.hot, spare, self._clock()))

    async def open_cold(self) -> Swept:
        cold = self._cold
        with self._health.watching(f"open {cold.name}", Tier.COLD):
            return await cold.open()

    async def ask_for(self, size: int) -> None:
        """Raises StoreError where the hot folder cannot take so many bytes, or could not a moment ago."""
        if error := self._health.blocking:
            raise error
        with self._health.watching(f"save to {self.hot.path}", Tier.HOT):
            if self._health.doubtful:
                await self.quick.do(lambda _: claim(self.hot, self._clock()))
                self._health.recovered()
            try:
                await self.quick.do(lambda _: self.hot.demand(size))
            except StoreError as error:  # asked each time: there may be room now
                self._health.remark(ROOM, error)
                raise
            self._health.remark(ROOM, None)

    async def unlink(self, name: str) -> None:
        path = self.hot.path / name
        with self._health.watching(f"remove {path}", Tier.HOT):
            await self.quick.do(lambda _: path.unlink(missing_ok=True))

    async def take_in(self, temporary: str, saved: SavedFile) -> CheckedFile:
        def work(halt: Halt) -> CheckedFile:
            with self._timed(Tier.HOT, saved.written):
                intake = SnapshotIntake(folder=self.hot, saved=saved, now=self._clock(), halt=halt)
                return intake.take(temporary)

        with self._health.watching(f"keep a snapshot in {self.hot.path}", Tier.HOT):
            return await self.patient.do(work)

    async def check_hot(self, kept: Kept, *, anew: bool = False) -> None:
        """A person who wants all bytes read anew waits behind what clients wait for."""

        def work(halt: Halt) -> None:
            began = time.monotonic()
            size = self.hot.check(kept.manifest, halt, anew=anew)
            self._health.measured(Tier.HOT, size, time.monotonic() - began)

        with self._health.watching(f"read {kept.id} in {self.hot.path}", Tier.HOT):
            await (self.patient if anew else self.urgent).do(work)

    async def check_cold(self, kept: Kept) -> None:
        cold = self._cold
        with self._health.watching(f"read {kept.id} in {cold.name}", Tier.COLD):
            await cold.check(kept)

    # Either way the cold tier takes part, and is blamed: what the hot one has, its next save will tell.

    async def to_cold(self, kept: Kept) -> bool:
        """Raises SnapshotError if the source is not what was kept, StoreError also for want of room."""
        cold = self._cold
        with self._health.watching(f"copy {kept.id} to {cold.name}", Tier.COLD):
            return await cold.take(kept, self.hot)

    async def to_hot(self, kept: Kept) -> Manifest:
        cold = self._cold
        with self._health.watching(f"copy {kept.id} to {self.hot.path}", Tier.COLD):
            return await cold.give(kept, self.hot)

    async def remove(self, kept: Kept, tier: Tier, *, damaged: bool = False) -> None:
        """A damaged file goes to quarantine."""
        if tier is Tier.COLD:
            cold = self._cold
            with self._health.watching(f"remove {kept.id} from {cold.name}", tier):
                await cold.remove(kept, damaged=damaged)
            return
        act = self.hot.quarantine if damaged else self.hot.drop
        with self._health.watching(f"remove {kept.id} from {self.hot.path}", tier):
            await self.quick.do(lambda _: act(kept.id))

    @property
    def _cold(self) -> ColdTier:
        if self.cold is None:
            raise AssertionError("nothing lies in a tier that there is not")
        return self.cold

    @contextmanager
    def _timed(self, tier: Tier, size: int) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._health.measured(tier, size, time.monotonic() - began)
