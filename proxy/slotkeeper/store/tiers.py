"""Both folders, the threads that work in them, and what lies there when a sidecar starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slotkeeper.engine.slotfile import Damage
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
    if not manifest.fits(found.tokens):
        raise UnfitError("its tokens are not those that were kept")
    cuts = tuple(record.at for record in found.records)
    if (found.version, found.layout, cuts) != (manifest.version, manifest.layout, manifest.checkpoints):
        raise UnfitError("its structure is not the one that was kept")
    return manifest, found.tokens


# -- both folders ----------------------------------------------------------------------------------------


class Tiers:
    """`urgent` is for what a client waits for, `patient` for all else that takes time, `quick` for a look."""

    def __init__(
        self, hot: Path, cold: Path | None, *, clock: Callable[[], float], health: StoreHealth
    ) -> None:
        self.hot = SnapshotFolder(hot, Tier.HOT)
        self.folders = {Tier.HOT: self.hot}
        if cold:
            self.folders[Tier.COLD] = SnapshotFolder(cold, Tier.COLD)
        self.urgent, self.patient, self.quick = Lane("urgent"), Lane("patient"), Lane("quick")
        self._clock = clock
        self._health = health

    async def close(self) -> None:
        await asyncio.gather(self.urgent.close(), self.patient.close(), self.quick.close())
        for folder in self.folders.values():
            folder.close()

    @property
    def secret(self) -> bytes | None:
        """Of the last folder that could be opened."""
        secrets = [folder.seal.secret for folder in self.folders.values() if folder.claimed]
        return secrets[-1] if secrets else None

    async def swept(self, tier: Tier, spare: Collection[str]) -> Swept:
        """Make its folder, take its lock and read what lies there, but for the temporary files in `spare`.

        A full one is noted only: what is there can be used.
        """
        folder = self.folders[tier]

        def work(_: Halt) -> Swept:
            folder.claim()
            swept = sweep(folder, spare)
            try:
                folder.probe(self._clock())
            except StoreError as error:
                if error.trouble is not Trouble.DISK_FULL:
                    raise
                swept.notes.append(str(error))
            return swept

        with self._health.watching(f"open {folder.path}", tier):
            return await self.patient.do(work)

    async def ask_for(self, size: int) -> None:
        """Raises StoreError where the hot folder cannot take so many bytes, or could not a moment ago."""
        if error := self._health.blocking:
            raise error
        with self._health.watching(f"save to {self.hot.path}", Tier.HOT):
            if self._health.doubtful:
                await self.quick.do(lambda _: self._try(self.hot))
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

    async def check(self, kept: Kept, tier: Tier, lane: Lane, *, anew: bool = False) -> None:
        folder = self.folders[tier]

        def work(halt: Halt) -> None:
            began = time.monotonic()
            size = folder.check(kept.manifest, halt, anew=anew)
            self._health.measured(tier, size, time.monotonic() - began)

        with self._health.watching(f"read {kept.id} in {folder.path}", tier):
            await lane.do(work)

    async def copy(self, kept: Kept, source: Tier, target: Tier, lane: Lane) -> None:
        """Raises SnapshotError if the source is not what was kept, StoreError also for want of room."""
        folder = self.folders[target]

        def work(halt: Halt) -> None:
            if not folder.ready:  # a cold tier that could not be used when we started
                self._try(folder)
            with self._timed(target, kept.manifest.size):
                transfer(self.folders[source], folder, kept.manifest, self._clock(), halt)

        # Either way the cold tier takes part, and is blamed: what the hot one has, its next save will tell.
        with self._health.watching(f"copy {kept.id} to {folder.path}", Tier.COLD):
            await lane.do(work)

    async def remove(self, snapshot: SnapshotId, tier: Tier, *, damaged: bool = False) -> None:
        """From its folder; a damaged file to quarantine."""
        folder = self.folders[tier]
        act = folder.quarantine if damaged else folder.drop
        with self._health.watching(f"remove {snapshot} from {folder.path}", tier):
            await self.quick.do(lambda _: act(snapshot))

    def _try(self, folder: SnapshotFolder) -> None:
        folder.claim()
        folder.probe(self._clock())

    @contextmanager
    def _timed(self, tier: Tier, size: int) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._health.measured(tier, size, time.monotonic() - began)
