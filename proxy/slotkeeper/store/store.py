"""The snapshot store as the driver uses it: hot folder, cold tier and catalogue together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.scheduler.snapshots.budgets import FolderRoom
from slotkeeper.scheduler.types import Tier
from slotkeeper.store import files
from slotkeeper.store.folders.snapshot_folder import Swept, rooms_of
from slotkeeper.store.index import Catalogue, Kept, Use
from slotkeeper.store.intake import SavedFile
from slotkeeper.store.tiers import ColdTier, Tiers
from slotkeeper.store.trouble import (
    LateError,
    MissingError,
    SnapshotError,
    StoreError,
    StoreHealth,
    UnfitError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The result of `Store.open`: all usable snapshots, of every kind of engine; `notes` are log texts."""

    kept: tuple[Kept, ...]
    notes: tuple[str, ...]


class Store:
    """Snapshots in `hot`, which is the engine's --slot-save-path, and in `cold` if that is given.

    `cold` is a folder of our own, or a tier that several sidecars share.

    Every operation may raise StoreError (a folder or the shared store cannot be used now) and HaltedError
    (the store is closed). After a StoreError the caller continues without snapshots and tries again with the
    next request; `trouble` keeps the error until an operation succeeds. `open` must have succeeded before any
    other method is called.
    """

    def __init__(
        self,
        hot: Path,
        cold: Path | ColdTier | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is the wall clock."""
        self._clock = clock
        self._health = StoreHealth(time.monotonic)
        self._folders = {Tier.HOT: hot} | ({Tier.COLD: cold} if isinstance(cold, Path) else {})
        self._tiers = Tiers(hot, cold, clock=clock, health=self._health)
        self._catalogue = Catalogue(hot / files.INDEX, self._health)
        self._saving: set[str] = set()  # temporary names that an engine may be writing

    def __repr__(self) -> str:
        sizes = ", ".join(f"{size >> 20} MiB {tier}" for tier, size in self.sizes().items())
        counts = f"{len(self.listing())} snapshots | {sizes} | {len(self._saving)} being saved"
        return f"<Store {counts} | {self.trouble or 'well'}>"

    @property
    def trouble(self) -> StoreError | None:
        """The present trouble, for the log and `doctor`; also a slow folder, which can still be used."""
        return self._health.trouble

    @property
    def secret(self) -> bytes | None:
        """The secret of the cold tier if there is one, else of the hot folder; None before it is open."""
        return self._tiers.secret

    def listing(self) -> list[Kept]:
        return self._catalogue.listing()

    def sizes(self) -> dict[Tier, int]:
        """Return the bytes of snapshots in each tier; a snapshot in both tiers counts in both.

        What several have in common in the cold tier counts once.
        """
        sizes = dict.fromkeys(self._tiers.names, 0)
        for kept in self.listing():
            for tier in kept.tiers:
                sizes[tier] += kept.manifest.size if tier is Tier.HOT else self._tiers.own_bytes(kept)
        return sizes

    def recount(self) -> list[tuple[SnapshotId, int]]:
        """Look again at what counts for each snapshot in a cold folder, in bytes.

        Returns those for which it has changed since the last call.
        """
        if self.shared:
            return []
        there = (kept for kept in self.listing() if Tier.COLD in kept.tiers)
        now = [(kept, self._tiers.own_bytes(kept)) for kept in there]
        changed = [(kept.id, size) for kept, size in now if size != kept.cold_bytes]
        for id_, size in changed:
            self._catalogue.counted(id_, size)
        return changed

    def _counted(self, kept: Kept) -> Kept:
        if self.shared or Tier.COLD not in kept.tiers:
            return kept
        return self._catalogue.counted(kept.id, self._tiers.own_bytes(kept))

    def limit_cold(self, room: float) -> None:
        """Let a cold folder keep what no snapshot needs any more while everything fits into `room` bytes."""
        if self.cold:
            self.cold.limit(room)

    async def rooms(self) -> dict[Tier, FolderRoom]:
        """Measure the file systems of our own folders; those that cannot be measured now are left out."""
        return await self._tiers.quick.do(lambda _: rooms_of(self._folders))

    async def open(self) -> Opened:
        """Make the folders, take their locks, sweep them and read their snapshots.

        May be called again after a trouble. If the cold tier fails, the store opens without it.
        """
        swept = {Tier.HOT: await self._tiers.open_hot(self._saving)}
        self._health.recovered()
        notes = list(swept[Tier.HOT].notes)
        if self._tiers.cold:
            try:
                swept[Tier.COLD] = await self._tiers.open_cold()
                notes += swept[Tier.COLD].notes
            except StoreError as error:
                notes.append(f"no cold tier: {error}")
        await self._catalogue.load(_together(swept))
        self.recount()
        return Opened(kept=tuple(self.listing()), notes=tuple(notes))

    @property
    def unread(self) -> bool:
        """Whether `look_again` has a folder to read: it could not be used, or another one is in its place."""
        return self._tiers.hot.unread or (self.cold is not None and self.cold.unread)

    async def look_again(self) -> Opened:
        """Sweep the `unread` folders, and return what is new. An error of the cold tier is only a remark."""
        swept, new = dict[Tier, Swept](), list[Kept]()
        if self._tiers.hot.unread:
            swept[Tier.HOT] = await self._tiers.sweep_hot([kept.id for kept in self.listing()])
        if self.cold and self.cold.unread:
            with suppress(StoreError):
                swept[Tier.COLD] = await self._tiers.open_cold()
        for kept in _together(swept):
            known = kept.id in self._catalogue
            found = await self.found(kept)
            if not known:
                new.append(self._counted(found))
        notes = tuple(note for one in swept.values() for note in one.notes)
        return Opened(kept=tuple(new), notes=notes)

    async def close(self) -> None:
        """End all work in progress; waiting callers get HaltedError."""
        await self._tiers.close()
        await self._catalogue.close()

    async def temporary(self, size: int = 0) -> str:
        """Return a file name to which an engine may save `size` bytes. Raises StoreError if there is no room.

        Pass the name to `keep` or `discard` later. After a trouble this raises for half a minute, then the
        folder is tried again; so call it before the engine is asked to save.
        """
        await self._tiers.ask_for(size)
        name = files.new_temporary(self._clock())
        self._saving.add(name)
        return name

    async def discard(self, temporary: str) -> None:
        """Remove a temporary file: the engine did not save, or the file is no longer wanted.

        If the engine writes it later, the next `temporary` removes it.
        """
        self._own(temporary)
        await self._tiers.discard(temporary)

    async def keep(self, temporary: str, saved: SavedFile) -> Kept:
        """Make a snapshot of what an engine has saved. The temporary file is always removed.

        Raises TornError, and StoreError(NOT_SHARED) if the file is not in the hot folder.
        """
        self._own(temporary)
        taken = await self._tiers.take_in(temporary, saved)
        use = Use(used=taken.manifest.created)
        kept = Kept(manifest=taken.manifest, tokens=taken.tokens, tiers=frozenset({Tier.HOT}), use=use)
        await self._catalogue.add(kept)
        return kept

    async def offer(
        self, snapshot: SnapshotId, fingerprint: str, layout: str = "", *, within: float = inf
    ) -> str:
        """Return the name of the snapshot's verified file in the hot folder.

        The file is hashed, unless this process has hashed it and its metadata has not changed since. `layout`
        is that of the engine's own files, if one was seen: the engine would refuse a file of another layout.
        A damaged file goes to quarantine, and the other tier's copy is tried. Raises UnfitError if the engine
        is of another kind, the first copy's SnapshotError if no copy can be used, MissingError if there is no
        such snapshot, and LateError if it did not come from the cold tier `within` so many seconds.
        """
        async with self._catalogue.lock(snapshot):
            kept, first = self._catalogue[snapshot], None
            other_layout = layout and kept.manifest.layout not in {"", layout}
            if kept.manifest.fingerprint != fingerprint or other_layout:
                raise UnfitError(f"{snapshot} was kept for an engine of another kind")
            for tier in kept.quickest:
                try:
                    await self._bring(kept, tier, within)
                    return self._tiers.hot.slot(snapshot).name
                except SnapshotError as error:
                    await self._lose(kept, tier, error)
                    first = first or error
            raise first or MissingError(f"{snapshot} is in no tier")

    async def copy_cold(self, snapshot: SnapshotId) -> bool:
        """Copy a snapshot to the cold tier. Returns False if another sidecar is writing the same state.

        Raises SnapshotError if the hot file cannot be used; it is then removed.
        """
        async with self._catalogue.lock(snapshot):
            kept = self._catalogue[snapshot]
            if Tier.COLD in kept.tiers:
                return True
            try:
                there = await self._tiers.to_cold(kept)
            except SnapshotError as error:
                await self._lose(kept, Tier.HOT, error)
                raise
            if there:
                await self._catalogue.note_tier(snapshot, Tier.COLD, there=True)
            return there

    async def demote(self, snapshot: SnapshotId) -> None:
        """Move a snapshot to the cold tier. Raises as `copy_cold` does."""
        await self.copy_cold(snapshot)
        async with self._catalogue.lock(snapshot):
            kept = self._catalogue[snapshot]
            if Tier.HOT in kept.tiers:  # also if another sidecar writes the state: its copy will serve
                await self._drop(kept, Tier.HOT)

    @property
    def cold(self) -> ColdTier | None:
        return self._tiers.cold

    @property
    def shared(self) -> bool:
        """Whether other sidecars use the cold tier too."""
        return self.cold is not None and self.cold.shared

    async def found(self, kept: Kept) -> Kept:
        """Add a state that was found in its tiers, so that it can be offered.

        Returns what is known of it now: it may have been fetched meanwhile.
        """
        async with self._catalogue.lock(kept.id):
            if kept.id in self._catalogue:
                for tier in kept.tiers:
                    await self._catalogue.note_tier(kept.id, tier, there=True)
            else:
                await self._catalogue.add(kept)
            return self._catalogue[kept.id]

    async def unlist(self, snapshot: SnapshotId) -> None:
        """Forget that the shared tier has the snapshot, without removing it there."""
        async with self._catalogue.lock(snapshot):
            if snapshot in self._catalogue:
                await self._catalogue.note_tier(snapshot, Tier.COLD, there=False)

    async def forget(self, snapshot: SnapshotId) -> None:
        """Remove a snapshot from all tiers, if it exists."""
        async with self._catalogue.lock(snapshot):
            if snapshot in self._catalogue:
                kept = self._catalogue[snapshot]
                for tier in kept.tiers:
                    await self._drop(kept, tier)

    async def used(self, snapshot: SnapshotId, *, paid: bool) -> None:
        """Count a restore: `paid` if the engine then reused the state. Raises MissingError."""
        await self._catalogue.used(snapshot, self._clock(), paid=paid)

    async def verify(self, snapshot: SnapshotId) -> None:
        """Hash every copy of a snapshot again and drop the damaged ones. Raises the first SnapshotError."""
        async with self._catalogue.lock(snapshot):
            kept, first = self._catalogue[snapshot], None
            for tier in kept.quickest:
                try:
                    if tier is Tier.HOT:
                        await self._tiers.check_hot(kept, reread=True)
                    else:
                        await self._tiers.check_cold(kept)
                except SnapshotError as error:
                    await self._lose(kept, tier, error)
                    first = first or error
            if first:
                raise first

    def _own(self, temporary: str) -> None:
        """Check that we gave this name out: any other name could lead out of the folder."""
        try:
            self._saving.remove(temporary)
        except KeyError:
            raise ValueError(f"{temporary!r} is no name that this store gave out") from None

    async def _bring(self, kept: Kept, tier: Tier, within: float) -> None:
        """Bring the file from this tier to the hot folder, and check it."""
        if tier is Tier.HOT:
            await self._tiers.check_hot(kept)
            return
        try:
            async with asyncio.timeout(within if within < inf else None):
                manifest = await self._tiers.to_hot(kept)
        except TimeoutError:
            raise LateError(f"{kept.id} did not come within {within:.1f} s") from None
        await self._catalogue.brought(kept.id, manifest)
        if not self.shared:
            with suppress(StoreError):  # a snapshot stays in one tier and counts for that tier's budget
                await self._tiers.release(kept)
                await self._catalogue.note_tier(kept.id, Tier.COLD, there=False)

    async def _lose(self, kept: Kept, tier: Tier, error: SnapshotError) -> None:
        """Drop an unusable copy. It is forgotten first: it must not be offered even if its removal fails."""
        await self._catalogue.note_tier(kept.id, tier, there=False)
        damaged = isinstance(error, UnfitError)
        if damaged or tier is Tier.HOT or not self.shared:
            await self._tiers.remove(kept, tier, damaged=damaged)

    async def _drop(self, kept: Kept, tier: Tier) -> None:
        await self._tiers.remove(kept, tier)
        await self._catalogue.note_tier(kept.id, tier, there=False)


def _together(swept: Mapping[Tier, Swept]) -> list[Kept]:
    """Return one entry for each snapshot of both tiers; if the copies differ, the hot one."""
    known: dict[SnapshotId, Kept] = {}
    for tier, folder in swept.items():
        for id_, (manifest, tokens) in folder.found.items():
            use = Use(used=manifest.created)
            kept = known.setdefault(
                id_, Kept(manifest=manifest, tokens=tokens, tiers=frozenset({tier}), use=use)
            )
            if kept.manifest == manifest:
                known[id_] = replace(kept, tiers=kept.tiers | {tier})
    return list(known.values())
