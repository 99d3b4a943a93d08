"""The hot folder, the cold tier behind it, and the threads that work on both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Protocol

from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.scheduler.types import Tier
from slotkeeper.store.files import Halt, Lane
from slotkeeper.store.folders.run_folder import RunFolder
from slotkeeper.store.folders.snapshot_folder import SnapshotFolder, Swept, sweep
from slotkeeper.store.index import Kept
from slotkeeper.store.intake import CheckedFile, SavedFile, SnapshotIntake, transfer
from slotkeeper.store.manifest import Manifest
from slotkeeper.store.trouble import ROOM, StoreError, StoreHealth, Trouble

# -- the cold tier ---------------------------------------------------------------------------------------


class ColdTier(Protocol):
    """Keeps snapshots for which the hot folder has no room. Methods raise SnapshotError and StoreError."""

    @property
    def name(self) -> str: ...

    @property
    def shared(self) -> bool:
        """Whether other sidecars use it too: a fetched snapshot stays there, and we evict nothing."""

    @property
    def unread(self) -> bool:
        """Whether `open` has yet to read its snapshots: it has failed, or another folder is in this place."""

    @property
    def secret(self) -> bytes | None:
        """The secret that signs manifests; None before the tier is open."""

    async def open(self) -> Swept:
        """Open the tier and return its snapshots; a shared tier does not read them here."""

    async def take(self, kept: Kept, hot: SnapshotFolder) -> bool:
        """Copy a snapshot from the hot folder. False: another sidecar is writing the same state."""

    async def give(self, kept: Kept, hot: SnapshotFolder) -> Manifest:
        """Copy a snapshot to the hot folder and verify it.

        Returns the manifest of the file there, which may be another file of the same state.
        """

    async def check(self, kept: Kept) -> None:
        """Read and verify all bytes of a snapshot."""

    async def remove(self, kept: Kept, *, damaged: bool = False) -> None: ...

    async def release(self, kept: Kept) -> None:
        """Give up a snapshot that `give` has brought to the hot folder. A shared tier keeps it."""

    def limit(self, room: float) -> None:
        """Keep what no snapshot needs any more only while everything fits into `room` bytes."""

    def own_bytes(self, kept: Kept) -> int:
        """Return the bytes that count for a snapshot: what it shares with others here counts only once."""

    async def close(self) -> None: ...


class ColdFolder:
    """A cold tier in a folder that only this sidecar uses. It works in the lanes of `Tiers`."""

    shared: Final = False

    def __init__(
        self,
        folder: RunFolder,
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
    def unread(self) -> bool:
        return self._folder.unread

    @property
    def secret(self) -> bytes | None:
        return self._folder.seal.secret if self._folder.claimed else None

    async def open(self) -> Swept:
        return await self._patient.do(lambda _: opened(self._folder, (), self._clock()))

    async def take(self, kept: Kept, hot: SnapshotFolder) -> bool:
        def work(halt: Halt) -> None:
            self._claim()
            written, seconds = self._folder.take(kept.manifest, hot, self._clock(), halt)
            self._health.measured(Tier.COLD, written, seconds)

        await self._patient.do(work)
        return True

    async def give(self, kept: Kept, hot: SnapshotFolder) -> Manifest:
        def work(halt: Halt) -> None:
            self._claim()
            began = time.monotonic()
            transfer(self._folder, hot, kept.manifest, self._clock(), halt)
            self._health.measured(Tier.HOT, kept.manifest.size, time.monotonic() - began)

        await self._urgent.do(work)
        return kept.manifest

    async def check(self, kept: Kept) -> None:
        await self._patient.do(lambda halt: self._folder.check(kept.manifest, halt, reread=True))

    async def remove(self, kept: Kept, *, damaged: bool = False) -> None:
        if damaged:  # all of its parts are read, to find the damaged ones
            await self._patient.do(lambda _: self._folder.quarantine(kept.id))
        else:
            await self._quick.do(lambda _: self._folder.drop(kept.id))

    async def release(self, kept: Kept) -> None:
        await self._quick.do(lambda _: self._folder.release(kept.id))

    def limit(self, room: float) -> None:
        self._folder.room = room

    def own_bytes(self, kept: Kept) -> int:
        return self._folder.own_bytes(kept.id)

    async def close(self) -> None:
        self._folder.close()

    def _claim(self) -> None:
        if not self._folder.ready:  # the folder could not be used at the start
            claim(self._folder, self._clock())


def claim(folder: SnapshotFolder, now: float) -> None:
    """Make a folder, take its lock, and check that it can be written. Raises StoreError."""
    folder.claim()
    folder.probe(now)


def opened(folder: SnapshotFolder, spare: Collection[str], now: float) -> Swept:
    """Make a folder, take its lock and sweep it, except the temporary files in `spare`.

    If the folder is full, that is only noted: its snapshots can still be used. Raises StoreError and OSError.
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
    """Both tiers, and three lanes for their work.

    `urgent` does work that a client waits for, `patient` all other long work, `quick` short operations.
    """

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
            folder = RunFolder(cold, Tier.COLD)
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
        """The secret of the cold tier if that could be opened, else of the hot folder."""
        hot = self.hot.seal.secret if self.hot.claimed else None
        return (self.cold.secret if self.cold else None) or hot

    async def open_hot(self, spare: Collection[str]) -> Swept:
        with self._health.watching(f"open {self.hot.path}", Tier.HOT):
            return await self.patient.do(lambda _: opened(self.hot, spare, self._clock()))

    async def open_cold(self) -> Swept:
        cold = self._cold
        with self._health.watching(f"open {cold.name}", Tier.COLD):
            return await cold.open()

    async def sweep_hot(self, known: Collection[SnapshotId]) -> Swept:
        """Sweep the hot folder while it is in use."""

        def work(_: Halt) -> Swept:
            self.hot.claim()  # it may be another one again, with another seal
            return sweep(self.hot, known=known)

        with self._health.watching(f"read {self.hot.path}", Tier.HOT):
            return await self.patient.do(work)

    async def ask_for(self, size: int) -> None:
        """Check for room for `size` bytes in the hot folder. Raises StoreError, also just after a trouble."""
        if error := self._health.blocking:
            raise error
        with self._health.watching(f"save to {self.hot.path}", Tier.HOT):
            if self._health.doubtful:
                await self.quick.do(lambda _: claim(self.hot, self._clock()))
                self._health.recovered()
            try:
                await self.quick.do(lambda _: self.hot.demand(size))
            except StoreError as error:  # room is checked each time: some may be free later
                self._health.remark(ROOM, error)
                raise
            self._health.remark(ROOM, None)

    async def discard(self, temporary: str) -> None:
        with self._health.watching(f"remove {self.hot.path / temporary}", Tier.HOT):
            await self.quick.do(lambda _: self.hot.discard(temporary))

    async def take_in(self, temporary: str, saved: SavedFile) -> CheckedFile:
        """Make a snapshot of a saved file in the hot folder. Raises as `SnapshotIntake.take` does."""

        def work(halt: Halt) -> CheckedFile:
            began = time.monotonic()
            intake = SnapshotIntake(folder=self.hot, saved=saved, now=self._clock(), halt=halt)
            checked = intake.take(temporary)
            self._health.measured(Tier.HOT, saved.written, time.monotonic() - began)
            return checked

        with self._health.watching(f"keep a snapshot in {self.hot.path}", Tier.HOT):
            return await self.patient.do(work)

    async def check_hot(self, kept: Kept, *, reread: bool = False) -> None:
        """Check the hot file. `reread` reads all bytes, in the patient lane: work for clients goes first."""

        def work(halt: Halt) -> None:
            began = time.monotonic()
            size = self.hot.check(kept.manifest, halt, reread=reread)
            self._health.measured(Tier.HOT, size, time.monotonic() - began)

        with self._health.watching(f"read {kept.id} in {self.hot.path}", Tier.HOT):
            await (self.patient if reread else self.urgent).do(work)

    async def check_cold(self, kept: Kept) -> None:
        cold = self._cold
        with self._health.watching(f"read {kept.id} in {cold.name}", Tier.COLD):
            await cold.check(kept)

    # A failed copy, in either direction, is reported as a trouble of the cold tier. If the hot folder is the
    # cause, its next save will report it.

    async def to_cold(self, kept: Kept) -> bool:
        """Copy to the cold tier.

        Raises SnapshotError if the source is not what was kept, and StoreError, also if there is no room.
        """
        cold = self._cold
        with self._health.watching(f"copy {kept.id} to {cold.name}", Tier.COLD):
            return await cold.take(kept, self.hot)

    async def to_hot(self, kept: Kept) -> Manifest:
        """Copy from the cold tier to the hot folder, and verify. Raises as `to_cold` does."""
        cold = self._cold
        with self._health.watching(f"copy {kept.id} to {self.hot.path}", Tier.COLD):
            return await cold.give(kept, self.hot)

    async def remove(self, kept: Kept, tier: Tier, *, damaged: bool = False) -> None:
        """Remove a snapshot from one tier; a damaged file goes to quarantine."""
        if tier is Tier.COLD:
            cold = self._cold
            with self._health.watching(f"remove {kept.id} from {cold.name}", tier):
                await cold.remove(kept, damaged=damaged)
            return
        act = self.hot.quarantine if damaged else self.hot.drop
        with self._health.watching(f"remove {kept.id} from {self.hot.path}", tier):
            await self.quick.do(lambda _: act(kept.id))

    async def release(self, kept: Kept) -> None:
        """Give up the cold copy of a snapshot that was brought to the hot folder."""
        cold = self._cold
        with self._health.watching(f"remove {kept.id} from {cold.name}", Tier.COLD):
            await cold.release(kept)

    def own_bytes(self, kept: Kept) -> int:
        """Return the bytes that count for a snapshot in the cold tier."""
        return self._cold.own_bytes(kept)

    @property
    def _cold(self) -> ColdTier:
        if self.cold is None:
            raise AssertionError("there is no cold tier to use")
        return self.cold
