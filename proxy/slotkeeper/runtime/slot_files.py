"""Slot files for the scheduler: save, restore, erase, drop. Every step ends in an event, whatever fails.

A kept file differs from what the engine wrote. A sliding window is mended so that it can be extended (T4).
Checkpoints that nothing will be cut back to are left out where they are large; those of other tokens always
are (T11).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, replace
from io import FileIO
from typing import Any, Final

from slotkeeper.engine.client import EngineError, EngineGoneError, SaveResult
from slotkeeper.engine.slotfile import Patch, SlotFile, keep, patched, repair_window, worth_keeping
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.effects import Drop, Erase, Poison, Prove, Restore, Save, SaveMoment
from slotkeeper.scheduler.engine_model import EngineTraits, Memory
from slotkeeper.scheduler.events import Erased, Event, Filed, Loading, Restored, Saved, SnapshotsChanged
from slotkeeper.scheduler.slot_contents import Snapshot, SnapshotId, Tier
from slotkeeper.scheduler.state import user_starts
from slotkeeper.scheduler.types import id_of
from slotkeeper.store import intake
from slotkeeper.store.index import Kept, snapshot
from slotkeeper.store.intake import SlotFileEdit
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import HaltedError, SnapshotError, StoreError


@dataclass(slots=True)
class Editing:
    """The edit of one file. `cuts`: where prompts have parted from it; `stale`: checkpoints to leave out."""

    traits: EngineTraits
    cuts: Collection[int] = ()
    stale: Collection[int] = ()
    written: tuple[int, ...] | None = None  # checkpoints that the engine wrote: the slot has those

    def __call__(self, opened: FileIO, own: SlotFile) -> SlotFileEdit | None:
        self.written = tuple(record.at for record in own.records)
        places = {*self.cuts, *user_starts(own.tokens, self.traits)}
        kept = worth_keeping(own, places, self.stale)
        patch = mended(opened, own, self.traits)
        if len(kept) == len(own.records) and not patch:
            return None
        recipe = keep(own, kept)
        return SlotFileEdit(recipe=patched(recipe, patch) if patch else recipe, repaired=patch is not None)


def mended(opened: FileIO, file: SlotFile, traits: EngineTraits) -> Patch | None:
    if traits.memory is not Memory.SWA or traits.swa_full:
        return None
    return repair_window(opened, file, traits.n_swa)


# -- saving ----------------------------------------------------------------------------------------------

Later = Callable[[Coroutine[Any, Any, None]], object]

log = get_logger(__name__)


def known(kept: Kept) -> Snapshot:
    """As the scheduler has it: by its clock."""
    return snapshot(kept, time.monotonic() - time.time())


@dataclass(frozen=True, slots=True)
class Written:
    """A file that an engine has written, not verified yet."""

    name: str
    result: SaveResult
    started: float  # seconds, our clock


class Saver:
    """Writes to one store. `works` is told whenever the folder could be used."""

    def __init__(
        self, store: Store, metrics: Metrics, post: Callable[[Event], None], works: Callable[[], None]
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._post = post
        self._works = works

    async def save(self, link: EngineLink, traits: EngineTraits, save: Save, later: Later) -> Saved:
        started, place, asker = time.monotonic(), save.place, id_of(save.request)
        failed = Saved(at=started, request=save.request, snapshot=None, lasting=True)
        try:
            name = await self._store.temporary(save.size)
        except StoreError as error:
            self._metrics.snapshot_operation("save", error.trouble.value)
            log.warning("not_saved", request_id=asker, place=str(place), error=str(error))
            return failed
        try:
            result = await link.client.save(place.slot, name, headers=link.auth)
        except (EngineError, EngineGoneError) as error:
            await self._discard(name)
            self._metrics.snapshot_operation("save", "refused" if isinstance(error, EngineError) else "lost")
            log.warning("not_saved", request_id=asker, place=str(place), error=str(error))
            return failed
        later(self._file(link, traits, save, Written(name, result, started)))
        return Saved(at=time.monotonic(), request=save.request, snapshot=None, written=True)

    async def _file(self, link: EngineLink, traits: EngineTraits, save: Save, file: Written) -> None:
        """Keep what was written, while its slot is at work again."""
        saved = None
        try:
            saved = await self._keep(link, traits, save, file)
        except Exception:  # whatever it is, a request may wait for the file
            log.exception("not_filed", request_id=id_of(save.request), place=str(save.place))
            self._metrics.fallback("files")
        self._post(
            Filed(
                at=time.monotonic(),
                engine=save.place.engine,
                request=save.request,
                snapshot=saved.snapshot if saved else None,
                tokens=saved.tokens if saved else None,
                checkpoints=saved.checkpoints if saved else (),
                seconds=file.result.seconds,
                lasting=saved is None or saved.lasting,
            )
        )

    async def _keep(self, link: EngineLink, traits: EngineTraits, save: Save, file: Written) -> Saved:
        """Check what the engine has written, edit it, and add it to the catalog."""
        edit = Editing(traits, save.cuts, save.stale)
        facts = intake.SavedFile(
            fingerprint=traits.fingerprint,
            tokens=save.tokens,
            written=file.result.written,
            layout=link.layout,
            build=link.build,
            edit=edit,
            golden=save.moment is SaveMoment.BOUNDARY,
        )
        try:
            kept = await self._store.keep(file.name, facts)
        except (SnapshotError, StoreError, HaltedError, ValueError) as error:  # the last: an edit failed
            lasting = isinstance(error, StoreError)  # else it is this state alone
            self._metrics.snapshot_operation("save", _outcome(error))
            asker, place = id_of(save.request), str(save.place)
            log.warning("not_kept", request_id=asker, place=place, error=str(error))
            return Saved(at=time.monotonic(), request=save.request, snapshot=None, lasting=lasting)
        self._metrics.snapshot_operation("save", "ok", time.monotonic() - file.started)
        self._works()
        link.saw_layout(kept.manifest.layout)
        log.info(
            "snapshot_saved",
            request_id=id_of(save.request),
            snapshot=kept.id,
            place=str(save.place),
            moment=save.moment.value,
            tokens=len(kept.tokens),
            bytes=kept.manifest.size,
            checkpoints=len(kept.manifest.checkpoints),
            seconds=round(time.monotonic() - file.started, 4),
        )
        return Saved(
            at=time.monotonic(),
            request=save.request,
            snapshot=known(kept),
            tokens=kept.tokens,
            checkpoints=edit.written or (),
            seconds=file.result.seconds,
        )

    async def _discard(self, name: str) -> None:
        try:
            await self._store.discard(name)
        except (StoreError, HaltedError) as error:  # the next start sweeps it
            log.debug("not_discarded", error=str(error))


def _outcome(error: Exception) -> str:
    """As `slotkeeper_snapshot_operations_total` has it."""
    if isinstance(error, StoreError):
        return error.trouble.value
    return type(error).__name__.removesuffix("Error").lower()


CANARY: Final = (1, 2, 3, 4)  # any tokens: an empty slot has none of them
RETRY: Final = 30.0  # seconds until a folder that could not be used is tried again


class Snapshots:
    """One store, and the engines that write to it and read from it."""

    def __init__(self, store: Store, metrics: Metrics, post: Callable[[Event], None]) -> None:
        self.store = store
        self.ready = False
        self.tried = asyncio.Event()  # to open the store, for the first time
        self._metrics = metrics
        self._post = post
        self._saver = Saver(store, metrics, post, self._works_again)
        self._unread: set[SnapshotId] = set()  # asked for while the folder could not be used

    async def open(self) -> None:
        """Runs until the folder can be used; snapshots are offered from then on."""
        said = ""
        while not self.ready:
            try:
                opened = await self.store.open()
            except StoreError as error:
                self._ended("open", error.trouble.value)
                if str(error) != said:
                    said = str(error)
                    log.warning("no_snapshots", trouble=error.trouble.value, error=said)
                self.tried.set()
                await asyncio.sleep(RETRY)
                continue
            self.ready = True
            self.tried.set()
            self._ended("open", "ok")
            for note in opened.notes:
                log.info("snapshots_swept", note=note)
            log.info("snapshots_found", count=len(opened.kept))
            self._post(SnapshotsChanged(at=time.monotonic(), snapshots=tuple(map(known, opened.kept))))

    async def close(self) -> None:
        await self.store.close()

    # -- steps -------------------------------------------------------------------------------------

    async def save(self, link: EngineLink, save: Save, later: Later) -> Saved:
        """Until the engine has written the file, and its slot may be used: the rest is for `later`."""
        if link.traits is None or not self.ready:
            return Saved(at=time.monotonic(), request=save.request, snapshot=None, lasting=True)
        return await self._saver.save(link, link.traits, save, later)

    async def restore(self, link: EngineLink, restore: Restore) -> Restored:
        wanted = restore.snapshot
        fingerprint = link.traits.fingerprint if link.traits else ""
        try:
            name = await self.store.offer(wanted.id, fingerprint, link.layout)
        except (SnapshotError, StoreError, HaltedError) as error:
            log.warning("not_offered", **_about(restore), error=str(error))
            if not isinstance(error, SnapshotError):
                self._unread.add(wanted.id)
            return self._restored(restore, Loading.UNFIT)
        restored = await self._load(link, restore, name)
        if wanted.tier is Tier.COLD:  # told only now: to make room, it might have been moved away again
            moved = replace(wanted, tier=Tier.HOT)
            self._post(SnapshotsChanged(at=time.monotonic(), snapshots=(moved,)))
        return restored

    async def _load(self, link: EngineLink, restore: Restore, name: str) -> Restored:
        started, wanted = time.monotonic(), restore.snapshot
        try:
            result = await link.client.restore(restore.place.slot, name, headers=link.auth)
        except EngineError as error:
            log.warning("restore_refused", **_about(restore), error=str(error))
            return self._restored(restore, await self._after_refusal(link, restore))
        except EngineGoneError as error:
            log.warning("restore_lost", **_about(restore), error=str(error))
            return self._restored(restore, Loading.LOST)
        if result.tokens != len(wanted.tokens):  # then it is not what we think, whatever it is
            log.warning("restored_otherwise", **_about(restore), tokens=result.tokens)
            return self._restored(restore, await self._after_refusal(link, restore))
        self._ended("restore", "ok", time.monotonic() - started)
        log.info(
            "snapshot_restored",
            **_about(restore),
            tokens=result.tokens,
            seconds=round(time.monotonic() - started, 4),
        )
        return Restored(
            at=time.monotonic(),
            request=restore.request,
            outcome=Loading.DONE,
            checkpoints=result.read >= wanted.size,  # else the engine did not take them (engine.md 2.2)
            seconds=result.seconds,
        )

    async def _after_refusal(self, link: EngineLink, restore: Restore) -> Loading:
        """The slot must be empty now: a few tokens must be computed there from the first one on.

        Where they are not, nothing that this engine holds can be relied on, and `up` starts another.
        """
        slot, size = restore.place.slot, len(CANARY)
        try:
            await link.client.erase(slot, headers=link.auth)
            tried = await link.client.prefill(CANARY, slot, headers=link.auth)
            self._metrics.probed(tried.computed)
            await link.client.erase(slot, headers=link.auth)
        except EngineGoneError:
            return Loading.LOST
        except EngineError as error:
            log.debug("canary_refused", **_about(restore), error=str(error))
            tried = None
        if tried and (tried.cached, tried.computed, tried.held) == (0, size, size):
            return Loading.REFUSED
        self._metrics.poisoned.labels(reason=Poison.UNSOUND.value).inc()
        log.warning("engine_unsound", **_about(restore), replaced=link.replace is not None)
        if link.replace:
            link.replace()
        return Loading.LOST

    async def erase(self, link: EngineLink, erase: Erase) -> Erased:
        try:
            await link.client.erase(erase.place.slot, headers=link.auth)
        except (EngineError, EngineGoneError) as error:
            asker, place = id_of(erase.request), str(erase.place)
            log.warning("not_erased", request_id=asker, place=place, error=str(error))
            return Erased(at=time.monotonic(), request=erase.request, ok=False)
        return Erased(at=time.monotonic(), request=erase.request, ok=True)

    # -- in idle time -----------------------------------------------------------------------------

    async def drop(self, drop: Drop) -> None:
        op = "demote" if drop.to_cold else "drop"
        try:
            if drop.to_cold:
                await self.store.demote(drop.snapshot)
            else:
                await self.store.forget(drop.snapshot)
        except SnapshotError as error:
            self._gone(drop.snapshot)
            self._failed(op, drop.snapshot, error)
        except (StoreError, HaltedError) as error:
            if drop.to_cold:  # the cold tier cannot be used: what has no room goes
                self._gone(drop.snapshot)
                await self.drop(Drop(snapshot=drop.snapshot, to_cold=False))
            self._failed(op, drop.snapshot, error)
        else:
            self._ended(op, "ok")
            log.info("snapshot_dropped", snapshot=drop.snapshot, to_cold=drop.to_cold)

    async def evacuate(self) -> None:
        """Move all to the cold tier, what was used last in front: time, or room, may not last for all."""
        for kept in sorted(self.store.listing(), key=lambda kept: kept.use.used, reverse=True):
            try:
                await self.store.demote(kept.id)
            except SnapshotError as error:
                self._failed("demote", kept.id, error)
            except (StoreError, HaltedError) as error:
                return self._failed("demote", kept.id, error)
            else:
                self._ended("demote", "ok")
        return None

    async def prove(self, prove: Prove) -> None:
        try:
            await self.store.used(prove.snapshot, paid=prove.paid)
        except (SnapshotError, StoreError, HaltedError) as error:
            self._failed("prove", prove.snapshot, error)

    async def forget(self, snapshot_id: SnapshotId) -> None:
        """A person wants it gone. Raises SnapshotError, StoreError."""
        self._gone(snapshot_id)
        await self.store.forget(snapshot_id)

    def _gone(self, snapshot_id: SnapshotId) -> None:
        self._post(SnapshotsChanged(at=time.monotonic(), gone=(snapshot_id,)))

    def _works_again(self) -> None:
        """What was asked for in vain while the folder could not be used may be offered again."""
        if self._unread:
            there = tuple(known(kept) for kept in self.store.listing() if kept.id in self._unread)
            self._unread.clear()
            self._post(SnapshotsChanged(at=time.monotonic(), snapshots=there))

    def _restored(self, restore: Restore, outcome: Loading) -> Restored:
        self._ended("restore", outcome.value)
        return Restored(at=time.monotonic(), request=restore.request, outcome=outcome)

    def _failed(self, op: str, snapshot_id: SnapshotId, error: Exception) -> None:
        self._ended(op, "failed")
        log.warning("snapshot_trouble", op=op, snapshot=snapshot_id, error=str(error))

    def _ended(self, op: str, outcome: str, seconds: float | None = None) -> None:
        self._metrics.snapshot_operation(op, outcome, seconds)


def _about(restore: Restore) -> dict[str, str]:
    """For the log."""
    snapshot, place = restore.snapshot.id, str(restore.place)
    return {"request_id": id_of(restore.request), "snapshot": snapshot, "place": place}
