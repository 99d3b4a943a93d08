"""The snapshot store: what the driver calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from slotkeeper.scheduler.slot_contents import SnapshotId, Tier
from slotkeeper.store import files
from slotkeeper.store.index import Catalogue, Kept, Use
from slotkeeper.store.intake import SavedFile
from slotkeeper.store.tiers import ColdTier, Swept, Tiers
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
    """All snapshots that can be used, for every kind of engine; `notes` are sentences for the log."""

    kept: tuple[Kept, ...]
    notes: tuple[str, ...]


class Store:
    """Snapshots in `hot`, which is the engine's --slot-save-path, and in `cold`, if that is given.

    `cold` is a folder of our own, or a tier that several sidecars share.

    Every operation may raise StoreError: a folder cannot be used now. The caller goes on without, and asks
    again with the next request; `trouble` says what it was until something works again. `open` must have
    succeeded before anything else is called.
    """

    def __init__(
        self,
        hot: Path,
        cold: Path | ColdTier | None = None,
        *,
        state: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`state` is where the index lies; without it, the hot folder. `clock` is the wall clock."""
        self._clock = clock
        self._health = StoreHealth(time.monotonic)
        self._tiers = Tiers(hot, cold, clock=clock, health=self._health)
        self._catalogue = Catalogue((state or hot) / files.INDEX, self._health)
        self._saving: set[str] = set()  # temporary names that an engine may be writing to

    def __repr__(self) -> str:
        sizes = ", ".join(f"{size >> 20} MiB {tier}" for tier, size in self.sizes().items())
        counts = f"{len(self.listing())} snapshots | {sizes} | {len(self._saving)} being saved"
        return f"<Store {counts} | {self.trouble or 'well'}>"

    @property
    def trouble(self) -> StoreError | None:
        """What is wrong now, for the log and `doctor`; a slow folder too, which can still be used."""
        return self._health.trouble

    @property
    def secret(self) -> bytes | None:
        """Of the folder that lasts longer, the cold one if there is one; None before it is open."""
        return self._tiers.secret

    def listing(self) -> list[Kept]:
        return self._catalogue.listing()

    def sizes(self) -> dict[Tier, int]:
        """Bytes of slot files in each tier; a snapshot that lies in both counts in both."""
        kept = self.listing()
        return {tier: sum(k.manifest.size for k in kept if tier in k.tiers) for tier in self._tiers.names}

    async def open(self) -> Opened:
        """Make the folders, take their locks, sweep them and read what lies there.

        May be called again, after a trouble. Without the cold tier it goes on, and says so.
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
        return Opened(kept=tuple(self.listing()), notes=tuple(notes))

    async def close(self) -> None:
        """End what is going on; waiting callers get HaltedError."""
        await self._tiers.close()
        await self._catalogue.close()

    async def temporary(self, size: int = 0) -> str:
        """A file name to let an engine save to, where there is room for so many bytes.

        Give it to `keep` or `discard`. After a trouble it is refused for half a minute, then the folder is
        tried again; so ask here before the engine is asked.
        """
        await self._tiers.ask_for(size)
        name = files.new_temporary(self._clock())
        self._saving.add(name)
        return name

    async def discard(self, temporary: str) -> None:
        """The engine did not save, or the file is no longer wanted."""
        self._own(temporary)
        await self._tiers.unlink(temporary)

    async def keep(self, temporary: str, saved: SavedFile) -> Kept:
        """Make a snapshot of what an engine has saved. The temporary file is gone afterwards.

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
        """The name of its file in the hot folder, where its bytes are those that were kept.

        They are hashed, unless this process has hashed them and the system says that nothing changed since.
        `layout` is that of the engine's own files, where one was seen: the engine would refuse another.
        A damaged file goes to quarantine, and the other tier's copy is tried. Raises UnfitError if none is
        left or the engine is of another kind, MissingError if there is none, LateError if it did not come
        from the cold tier `within` so many seconds.
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
            raise first or MissingError(f"{snapshot} lies nowhere")

    async def copy_cold(self, snapshot: SnapshotId) -> bool:
        """Have it in the cold tier too. Raises SnapshotError if it cannot be used, and then it is gone.

        False: another sidecar is just writing the same state.
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
                await self._catalogue.lies(snapshot, Tier.COLD, there=True)
            return there

    async def demote(self, snapshot: SnapshotId) -> None:
        """Have it in the cold tier only. Raises as `copy_cold` does."""
        await self.copy_cold(snapshot)
        async with self._catalogue.lock(snapshot):
            kept = self._catalogue[snapshot]
            if Tier.HOT in kept.tiers:  # of what another sidecar writes, it is the copy that counts
                await self._drop(kept, Tier.HOT)

    @property
    def cold(self) -> ColdTier | None:
        return self._tiers.cold

    @property
    def shared(self) -> bool:
        """Whether the cold tier is one that others use too."""
        return self.cold is not None and self.cold.shared

    async def found(self, kept: Kept) -> None:
        """What another sidecar has written to the shared tier may be offered here too."""
        async with self._catalogue.lock(kept.id):
            if kept.id in self._catalogue:
                await self._catalogue.lies(kept.id, Tier.COLD, there=True)
            else:
                await self._catalogue.add(kept)

    async def unlist(self, snapshot: SnapshotId) -> None:
        """Do as if it were not in the shared tier, where it stays."""
        async with self._catalogue.lock(snapshot):
            if snapshot in self._catalogue:
                await self._catalogue.lies(snapshot, Tier.COLD, there=False)

    async def forget(self, snapshot: SnapshotId) -> None:
        """Remove it everywhere; nothing happens if it is not there."""
        async with self._catalogue.lock(snapshot):
            if snapshot in self._catalogue:
                kept = self._catalogue[snapshot]
                for tier in kept.tiers:
                    await self._drop(kept, tier)

    async def used(self, snapshot: SnapshotId, *, paid: bool) -> None:
        """It was restored: `paid` if the engine then reused what it should. Raises MissingError."""
        await self._catalogue.used(snapshot, self._clock(), paid=paid)

    async def verify(self, snapshot: SnapshotId) -> None:
        """Hash every copy again; the damaged ones are lost. Raises SnapshotError with the first of them."""
        async with self._catalogue.lock(snapshot):
            kept, first = self._catalogue[snapshot], None
            for tier in kept.quickest:
                try:
                    if tier is Tier.HOT:
                        await self._tiers.check_hot(kept, anew=True)
                    else:
                        await self._tiers.check_cold(kept)
                except SnapshotError as error:
                    await self._lose(kept, tier, error)
                    first = first or error
            if first:
                raise first

    async def verify_all(self) -> dict[SnapshotId, SnapshotError]:
        """`verify` of each; those with a copy that was damaged or gone, and why."""
        bad = {}
        for kept in self.listing():
            try:
                await self.verify(kept.id)
            except SnapshotError as error:
                bad[kept.id] = error
        return bad

    def _own(self, temporary: str) -> None:
        """It must be one that we gave out: a name from elsewhere could lead out of the folder."""
        try:
            self._saving.remove(temporary)
        except KeyError:
            raise ValueError(f"{temporary!r} is no name that this store gave out") from None

    async def _bring(self, kept: Kept, tier: Tier, within: float) -> None:
        """Have the hot file there and checked, from this tier."""
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
            with suppress(StoreError):  # it lies in one tier, whose budget it counts for
                await self._drop(kept, Tier.COLD)

    async def _lose(self, kept: Kept, tier: Tier, error: SnapshotError) -> None:
        """Forgotten first: it must not be offered even where it cannot be put away."""
        await self._catalogue.lies(kept.id, tier, there=False)
        damaged = isinstance(error, UnfitError)
        if damaged or tier is Tier.HOT or not self.shared:
            await self._tiers.remove(kept, tier, damaged=damaged)

    async def _drop(self, kept: Kept, tier: Tier) -> None:
        await self._tiers.remove(kept, tier)
        await self._catalogue.lies(kept.id, tier, there=False)


def _together(swept: Mapping[Tier, Swept]) -> list[Kept]:
    """One entry for each snapshot, wherever it lies; of two that differ, the hot one."""
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
