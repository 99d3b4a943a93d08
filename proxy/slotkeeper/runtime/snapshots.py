"""Slot files for the core: save, restore, erase, drop. Every step ends in an event, whatever fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

from slotkeeper.core.effects import Drop, Erase, Moment, Prove, Restore, Save
from slotkeeper.core.events import Erased, Event, Filed, Loading, Restored, Saved, Shelved
from slotkeeper.core.snapshots import Snapshot, SnapshotId, Tier
from slotkeeper.engine.client import EngineError, EngineGoneError, SaveResult
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.editing import Editing
from slotkeeper.runtime.link import EngineLink
from slotkeeper.store import intake
from slotkeeper.store.kept import Kept, snapshot
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import HaltedError, SnapshotError, StoreError

RETRY: Final = 30.0  # seconds until a folder that could not be used is tried again

Later = Callable[[Coroutine[Any, Any, None]], object]

log = get_logger(__name__)


class Snapshots:
    """One store, and the engines that write to it and read from it."""

    def __init__(self, store: Store, metrics: Metrics, post: Callable[[Event], None]) -> None:
        self.store = store
        self.ready = False
        self.tried = asyncio.Event()  # to open the store, for the first time
        self._metrics = metrics
        self._post = post
        self._unread: set[SnapshotId] = set()  # asked for while the folder could not be used

    async def open(self) -> None:
        """Runs until the folder can be used; snapshots are offered from then on."""
        said = ""
        while not self.ready:
            try:
                opened = await self.store.open()
            except StoreError as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("no_snapshots", trouble=error.trouble.value, error=said)
                self.tried.set()
                await asyncio.sleep(RETRY)
                continue
            self.ready = True
            self.tried.set()
            for note in opened.notes:
                log.info("snapshots_swept", note=note)
            log.info("snapshots_found", count=len(opened.kept))
            self._post(Shelved(at=time.monotonic(), snapshots=tuple(map(_known, opened.kept))))

    async def close(self) -> None:
        await self.store.close()

    # -- steps -------------------------------------------------------------------------------------

    async def save(self, link: EngineLink, save: Save, later: Later) -> Saved:
        """Where a client waits for it only until the engine has written the file: the rest is for `later`."""
        started, place = time.monotonic(), save.place
        failed = Saved(at=started, request=save.request, snapshot=None, lasting=True)
        if link.traits is None or not self.ready:
            return failed
        try:
            name = await self.store.temporary(save.size)
        except StoreError as error:
            self._ended("save", error.trouble.value)
            log.warning("not_saved", place=str(place), error=str(error))
            return failed
        try:
            result = await link.client.save(place.slot, name, headers=link.auth)
        except (EngineError, EngineGoneError) as error:
            await self._discard(name)
            self._ended("save", "refused" if isinstance(error, EngineError) else "lost")
            log.warning("not_saved", place=str(place), error=str(error))
            return failed
        if not save.moment.waited_for:
            return await self._keep(link, save, name, result, started)
        later(self._file(link, save, name, result, started))
        return Saved(at=time.monotonic(), request=save.request, snapshot=None, written=True)

    async def _file(
        self, link: EngineLink, save: Save, name: str, result: SaveResult, started: float
    ) -> None:
        """Keep what was written, while its slot is at work again."""
        saved = None
        try:
            saved = await self._keep(link, save, name, result, started)
        except Exception:  # whatever it is, somebody may be waiting for the file
            log.exception("not_filed", place=str(save.place))
            self._metrics.fallback("files")
        self._post(
            Filed(
                at=time.monotonic(),
                engine=save.place.engine,
                request=save.request,
                snapshot=saved.snapshot if saved else None,
                seconds=result.seconds,
                lasting=saved is None or saved.lasting,
            )
        )

    async def _keep(
        self, link: EngineLink, save: Save, name: str, result: SaveResult, started: float
    ) -> Saved:
        """Check what the engine has written, edit it, and put it on the shelf."""
        traits, place = link.traits, save.place
        failed = Saved(at=started, request=save.request, snapshot=None, lasting=True)
        if traits is None:  # the engine is gone
            await self._discard(name)
            return failed
        edit = Editing(traits, save.cuts)
        facts = intake.Saved(
            fingerprint=traits.fingerprint,
            tokens=save.tokens,
            written=result.written,
            layout=link.layout,
            build=link.build,
            edit=edit,
            golden=save.moment is Moment.BOUNDARY,
        )
        try:
            kept = await self.store.keep(name, facts, save.others)
        except (SnapshotError, StoreError, HaltedError, ValueError) as error:  # the last: an edit failed
            self._ended("save", type(error).__name__.removesuffix("Error").lower())
            log.warning("not_kept", place=str(place), error=str(error))
            return replace(failed, lasting=isinstance(error, StoreError))  # else it is this state alone
        self._ended("save", "ok", time.monotonic() - started)
        self._works_again()
        link.saw_layout(kept.manifest.layout)
        log.info(
            "snapshot_saved",
            snapshot=kept.id,
            place=str(place),
            moment=save.moment.value,
            tokens=len(kept.tokens),
            bytes=kept.manifest.size,
            checkpoints=len(kept.manifest.checkpoints),
            seconds=round(time.monotonic() - started, 4),
        )
        return Saved(
            at=time.monotonic(),
            request=save.request,
            snapshot=_known(kept),
            tokens=kept.tokens,
            checkpoints=edit.written or (),
            seconds=result.seconds,
        )

    async def restore(self, link: EngineLink, restore: Restore) -> Restored:
        wanted = restore.snapshot
        fingerprint = link.traits.fingerprint if link.traits else ""
        try:
            name = await self.store.offer(wanted.id, fingerprint, link.layout)
        except (SnapshotError, StoreError, HaltedError) as error:
            log.warning("not_offered", snapshot=wanted.id, error=str(error))
            if not isinstance(error, SnapshotError):
                self._unread.add(wanted.id)
            return self._restored(restore, Loading.UNFIT)
        restored = await self._load(link, restore, name)
        if wanted.tier is Tier.COLD:  # told only now: to make room, it might have been moved away again
            moved = replace(wanted, tier=Tier.HOT)
            self._post(Shelved(at=time.monotonic(), snapshots=(moved,)))
        return restored

    async def _load(self, link: EngineLink, restore: Restore, name: str) -> Restored:
        started, wanted = time.monotonic(), restore.snapshot
        try:
            result = await link.client.restore(restore.place.slot, name, headers=link.auth)
        except EngineError as error:
            log.warning("restore_refused", snapshot=wanted.id, place=str(restore.place), error=str(error))
            return self._restored(restore, Loading.REFUSED)
        except EngineGoneError as error:
            log.warning("restore_lost", snapshot=wanted.id, place=str(restore.place), error=str(error))
            return self._restored(restore, Loading.LOST)
        if result.tokens != len(wanted.tokens):  # then it is not what we think, whatever it is
            log.warning("restored_otherwise", snapshot=wanted.id, tokens=result.tokens)
            return self._restored(restore, Loading.REFUSED)
        self._ended("restore", "ok", time.monotonic() - started)
        log.info(
            "snapshot_restored",
            snapshot=wanted.id,
            place=str(restore.place),
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

    async def erase(self, link: EngineLink, erase: Erase) -> Erased:
        try:
            await link.client.erase(erase.place.slot, headers=link.auth)
        except (EngineError, EngineGoneError) as error:
            log.warning("not_erased", place=str(erase.place), error=str(error))
            return Erased(at=time.monotonic(), request=erase.request, ok=False)
        return Erased(at=time.monotonic(), request=erase.request, ok=True)

    # -- what nobody waits for ---------------------------------------------------------------------

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
        self._post(Shelved(at=time.monotonic(), gone=(snapshot_id,)))

    def _works_again(self) -> None:
        """What was asked for in vain while the folder could not be used may be offered again."""
        if self._unread:
            there = tuple(_known(kept) for kept in self.store.listing() if kept.id in self._unread)
            self._unread.clear()
            self._post(Shelved(at=time.monotonic(), snapshots=there))

    async def _discard(self, name: str) -> None:
        try:
            await self.store.discard(name)
        except (StoreError, HaltedError) as error:  # the next start sweeps it
            log.debug("not_discarded", error=str(error))

    def _restored(self, restore: Restore, outcome: Loading) -> Restored:
        self._ended("restore", outcome.value)
        return Restored(at=time.monotonic(), request=restore.request, outcome=outcome)

    def _failed(self, op: str, snapshot_id: SnapshotId, error: Exception) -> None:
        self._ended(op, "failed")
        log.warning("snapshot_trouble", op=op, snapshot=snapshot_id, error=str(error))

    def _ended(self, op: str, outcome: str, seconds: float | None = None) -> None:
        self._metrics.snapshot_operation(op, outcome, seconds)


def _known(kept: Kept) -> Snapshot:
    """As the core has it: by its clock."""
    return snapshot(kept, time.monotonic() - time.time())
