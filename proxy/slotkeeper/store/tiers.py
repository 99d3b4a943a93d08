"""Both folders and the threads that work in them. What is known of the snapshots is not kept here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path

from slotkeeper.scheduler.snapshots import SnapshotId, Tier
from slotkeeper.store.files import Halt
from slotkeeper.store.health import ROOM, StoreHealth
from slotkeeper.store.intake import CheckedFile, SavedFile, SnapshotIntake, transfer
from slotkeeper.store.kept import Kept
from slotkeeper.store.lanes import Lane
from slotkeeper.store.snapshot_folder import SnapshotFolder
from slotkeeper.store.sweep import Swept, sweep
from slotkeeper.store.trouble import SnapshotError, StoreError, Trouble


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

    async def take_in(self, temporary: str, saved: SavedFile, others: Sequence[Kept]) -> CheckedFile:
        def work(halt: Halt) -> CheckedFile:
            with ExitStack() as stack, self._timed(Tier.HOT, saved.written):
                usable = [file for kept in others if (file := self._usable(kept, stack, halt))]
                intake = SnapshotIntake(folder=self.hot, saved=saved, now=self._clock(), halt=halt)
                return intake.take(temporary, usable)

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

    def _usable(self, kept: Kept, stack: ExitStack, halt: Halt) -> FileIO | None:
        """Its hot file, open and checked."""
        try:
            self.hot.check(kept.manifest, halt)
            return stack.enter_context(self.hot.open(kept.id))
        except (SnapshotError, OSError):
            return None

    @contextmanager
    def _timed(self, tier: Tier, size: int) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._health.measured(tier, size, time.monotonic() - began)
