"""Slot files for the scheduler: saved, edited (what of a file is kept), restored, erased, dropped.

Every step ends in an event, also on errors.

A file that an engine has written is edited before the store keeps it. The edit repairs a sliding window so
that it can be extended (T4). It leaves out large checkpoints that probably no prompt will need, and always
those of other tokens (T11).
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import FileIO
from typing import TYPE_CHECKING, Any, Final

from slotkeeper.engine.answers import EngineError, EngineGoneError, SaveResult
from slotkeeper.engine.slotfile import Patch, SlotFile, SlotFileRecord, keep, patched, repair_window
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.effects import Drop, Erase, Forget, Poison, Prove, Restore, Save, SaveMoment
from slotkeeper.scheduler.events import Erased, Event, Restored, RoomSeen, Saved, SnapshotsChanged
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory, SnapshotId, user_starts
from slotkeeper.scheduler.types import Loading, Tier, id_of
from slotkeeper.store import intake
from slotkeeper.store.index import Kept, by_our_clock
from slotkeeper.store.intake import SlotFileEdit
from slotkeeper.store.store import Opened, Store
from slotkeeper.store.trouble import HaltedError, LateError, SnapshotError, StoreError

if TYPE_CHECKING:
    from slotkeeper.runtime.sharing import Sharing

CANARY: Final = (1, 2, 3, 4)  # any tokens will do: an empty slot reuses none of them
AT_ONCE: Final = 64  # snapshots that the scheduler is told of at once: some milliseconds
ROOM_SECONDS: Final = 60.0  # between two looks at the room of the folders, which other programs use too
RETRY: Final = 30.0  # seconds until a folder that could not be used is tried again

Later = Callable[[Coroutine[Any, Any, None]], object]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """A file that an engine has written, not verified yet."""

    name: str
    result: SaveResult
    started: float  # seconds, our clock


class Snapshots:
    """Operations on slot files in one store, and on the engines that write and read them."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        post: Callable[[Event], None],
        shared_bytes: int = 0,
    ) -> None:
        """`shared_bytes` is the budget of a shared cold tier; 0: no limit."""
        self.store = store
        self.sharing = _sharing(store, shared_bytes, metrics, post)
        self.ready = False
        self.tried = asyncio.Event()  # the first attempt to open the store has ended
        self._metrics = metrics
        self._post = post
        self._unread: set[SnapshotId] = set()  # not restored, but their files are not at fault

    async def open(self) -> None:
        """Open the store; try until the folder can be used. From then on snapshots are offered."""
        last = ""
        await self._look_at_room()
        while not self.ready:
            try:
                opened = await self.store.open()
            except StoreError as error:
                self._ended("open", error.trouble.value)
                if str(error) != last:
                    last = str(error)
                    log.warning("no_snapshots", trouble=error.trouble.value, error=last)
                self.tried.set()
                await asyncio.sleep(RETRY)
                continue
            await self._tell(opened.kept)
            self.ready = True
            self.tried.set()
            self._ended("open", "ok")
            self._found(opened)

    def _found(self, opened: Opened) -> None:
        for note in opened.notes:
            log.info("snapshots_swept", note=note)
        log.info("snapshots_found", count=len(opened.kept))
        if self.sharing:
            self.sharing.saved()

    async def _look_again(self) -> None:
        """Offer the snapshots of a folder that could not be read at the start, or was mounted since."""
        while True:
            await asyncio.sleep(RETRY)
            if self.ready and self.store.unread:
                with suppress(StoreError, HaltedError):
                    opened = await self.store.look_again()
                    if opened.kept or opened.notes:
                        await self._tell(opened.kept)
                        self._found(opened)

    async def _look_at_room(self) -> None:
        if rooms := await self.store.rooms():
            self._post(RoomSeen(at=time.monotonic(), rooms=rooms))

    async def _watch_room(self) -> None:
        while True:
            await asyncio.sleep(ROOM_SECONDS)
            with suppress(HaltedError):
                await self._look_at_room()

    async def _tell(self, found: Sequence[Kept]) -> None:
        """Tell the scheduler of all snapshots, a few at a time: sorting thousands in takes a second."""
        for at in range(0, len(found) or 1, AT_ONCE):
            part, more = found[at : at + AT_ONCE], at + AT_ONCE < len(found)
            snapshots = tuple(map(by_our_clock, part))
            self._post(SnapshotsChanged(at=time.monotonic(), snapshots=snapshots, more=more))
            await asyncio.sleep(0)

    async def close(self) -> None:
        await self.store.close()

    def lasting(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the coroutines that run for ever."""
        return [self._look_again(), self._watch_room(), *(self.sharing.lasting() if self.sharing else ())]

    async def written(self) -> None:
        """Wait until all snapshots that can be uploaded to a shared store are uploaded."""
        if self.sharing and self.ready:
            await self.sharing.written()

    # -- steps -------------------------------------------------------------------------------------

    async def save(self, link: EngineLink, save: Save, later: Later) -> Saved:
        """Save a slot. Returns when the engine has written the file and the slot is free.

        `later` starts the rest, which ends in another `Saved` event: checking the file and keeping it.
        """
        started, place, asker = time.monotonic(), save.place, id_of(save.request)
        failed = Saved(at=started, request=save.request, snapshot=None, lasting=True)
        if (traits := link.traits) is None or not self.ready:
            return failed
        try:
            name = await self.store.temporary(save.size)
        except StoreError as error:
            self._ended("save", error.trouble.value)
            log.warning("not_saved", request_id=asker, place=str(place), error=str(error))
            return failed
        try:
            result = await link.client.save(place.slot, name, headers=link.auth)
        except (EngineError, EngineGoneError) as error:
            await self._discard(name)
            self._ended("save", "refused" if isinstance(error, EngineError) else "lost")
            log.warning("not_saved", request_id=asker, place=str(place), error=str(error))
            return failed
        later(self._file(link, traits, save, Written(name, result, started)))
        return Saved(at=time.monotonic(), request=save.request, snapshot=None, written=True)

    async def _file(self, link: EngineLink, traits: EngineTraits, save: Save, file: Written) -> None:
        """Keep the written file, and post another `Saved`. Meanwhile its slot may serve a request again."""
        saved = Saved(at=file.started, request=save.request, snapshot=None, lasting=True)
        try:
            saved = await self._keep(link, traits, save, file)
        except Exception:  # any error must be reported: a request may wait for the file
            log.exception("not_filed", request_id=id_of(save.request), place=str(save.place))
            self._metrics.fallback("files")
        engine, seconds = save.place.engine, file.result.seconds
        self._post(replace(saved, at=time.monotonic(), engine=engine, seconds=seconds))

    async def _keep(self, link: EngineLink, traits: EngineTraits, save: Save, file: Written) -> Saved:
        """Check what the engine has written, edit it, and add it to the catalog."""
        edit = Editing(traits, save.cuts, save.stale)
        facts = intake.SavedFile(
            fingerprint=traits.fingerprint_of(save.tokens),
            tokens=save.tokens,
            written=file.result.written,
            layout=link.layout,
            build=link.build,
            edit=edit,
            golden=save.moment is SaveMoment.BOUNDARY,
        )
        try:
            kept = await self.store.keep(file.name, facts)
        except (SnapshotError, StoreError, HaltedError, ValueError) as error:  # the last: an edit failed
            lasting = isinstance(error, StoreError)  # else only this state cannot be kept
            self._ended("save", _outcome(error))
            asker, place = id_of(save.request), str(save.place)
            log.warning("not_kept", request_id=asker, place=place, error=str(error))
            return Saved(at=time.monotonic(), request=save.request, snapshot=None, lasting=lasting)
        self._ended("save", "ok", time.monotonic() - file.started)
        self._works_again()
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
            snapshot=by_our_clock(kept),
            tokens=kept.tokens,
            checkpoints=edit.written or (),
        )

    async def _discard(self, name: str) -> None:
        try:
            await self.store.discard(name)
        except (StoreError, HaltedError) as error:  # the next save removes it
            log.debug("not_discarded", error=str(error))

    async def restore(self, link: EngineLink, restore: Restore) -> Restored:
        """Verify a snapshot's file, from the cold tier if needed, and have the engine load it into a slot."""
        wanted = restore.snapshot
        fingerprint = link.traits.fingerprint_of(wanted.tokens) if link.traits else ""
        began = time.monotonic()
        try:
            name = await self.store.offer(wanted.id, fingerprint, link.layout, within=restore.within)
        except (SnapshotError, StoreError, HaltedError, LateError) as error:
            log.warning("not_offered", **_about(restore), error=str(error))
            if not isinstance(error, SnapshotError):
                self._unread.add(wanted.id)
            late = isinstance(error, LateError)
            unfit = self._restored(restore, Loading.UNFIT)
            return replace(unfit, brought=time.monotonic() - began) if late else unfit
        brought = time.monotonic() - began if wanted.tier is Tier.COLD else 0.0
        restored = replace(await self._load(link, restore, name), brought=brought)
        if wanted.tier is Tier.COLD:  # reported last: else it might be moved away to make room
            moved = replace(wanted, tier=Tier.HOT)
            self._post(SnapshotsChanged(at=time.monotonic(), snapshots=(moved,), counted=self._counted()))
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
        if result.tokens != len(wanted.tokens):  # the slot then holds another state than we think
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
            checkpoints=result.read >= wanted.size,  # else the engine did not read them (engine.md 2.2)
            seconds=result.seconds,
        )

    async def _after_refusal(self, link: EngineLink, restore: Restore) -> Loading:
        """Check that the slot is empty after a refused restore: a few tokens must not find anything to reuse.

        If it is not, no state of this engine can be trusted, and `up` starts another process.
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
        """Remove a snapshot, or move it to the cold tier. Errors are counted and logged."""
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
            if drop.to_cold:  # the cold tier cannot be used: a snapshot without room is removed
                self._gone(drop.snapshot)
                await self.drop(Drop(snapshot=drop.snapshot, to_cold=False))
            self._failed(op, drop.snapshot, error)
        else:
            self._ended(op, "ok")
            log.info("snapshot_dropped", snapshot=drop.snapshot, to_cold=drop.to_cold)
        self._recount()

    async def unlist(self, forget: Forget) -> None:
        """Forget that a shared store has a snapshot, without removing it there."""
        await self.store.unlist(forget.snapshot)

    async def evacuate(self) -> None:
        """Move all snapshots to the cold tier, the most recently used first: time or room may run out."""
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
        """Count whether the engine reused a restored state (`paid`). Errors are counted and logged."""
        try:
            await self.store.used(prove.snapshot, paid=prove.paid)
        except (SnapshotError, StoreError, HaltedError) as error:
            self._failed("prove", prove.snapshot, error)

    async def forget(self, snapshot_id: SnapshotId) -> None:
        """Remove a snapshot because a user asked for it. Raises SnapshotError, StoreError."""
        self._gone(snapshot_id)
        await self.store.forget(snapshot_id)
        self._recount()

    def _gone(self, snapshot_id: SnapshotId) -> None:
        self._post(SnapshotsChanged(at=time.monotonic(), gone=(snapshot_id,)))

    def _counted(self) -> tuple[tuple[SnapshotId, int], ...]:
        """Return what now counts for snapshots in the cold tier, where that has changed."""
        return tuple(self.store.recount())

    def _recount(self) -> None:
        if counted := self._counted():
            self._post(SnapshotsChanged(at=time.monotonic(), counted=counted))

    def _works_again(self) -> None:
        """Offer again the snapshots that could not be read while the folder could not be used."""
        if self.sharing:
            self.sharing.saved()
        if self._unread:
            there = tuple(by_our_clock(kept) for kept in self.store.listing() if kept.id in self._unread)
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


def _sharing(store: Store, budget: int, metrics: Metrics, post: Callable[[Event], None]) -> Sharing | None:
    if not store.shared:
        return None
    from slotkeeper.runtime.sharing import sharing_of  # noqa: PLC0415 - it needs an extra

    return sharing_of(store, budget, metrics, post)


def _about(restore: Restore) -> dict[str, str]:
    """Return the log fields of a restore."""
    snapshot, place = restore.snapshot.id, str(restore.place)
    return {"request_id": id_of(restore.request), "snapshot": snapshot, "place": place}


def _outcome(error: Exception) -> str:
    """Return the label `outcome` of `slotkeeper_snapshot_operations_total` for an error."""
    if isinstance(error, StoreError):
        return error.trouble.value
    return type(error).__name__.removesuffix("Error").lower()


# -- which checkpoints are worth their bytes -------------------------------------------------------------

LARGE: Final = 64 << 20  # bytes: below this sum all checkpoints are kept
NEWEST: Final = 2  # checkpoints: the start of the next turn, and the end of the last prompt
NEAR: Final = 16  # tokens: two checkpoints this close are equally good


def _current(records: Sequence[SlotFileRecord]) -> list[SlotFileRecord]:
    """Return the checkpoints that the engine would use, in ascending order of tokens.

    The engine searches from the end of its list. After a cut the list may not ascend (T11): a checkpoint
    before one with fewer tokens is never used.
    """
    found: list[SlotFileRecord] = []
    for record in reversed(records):
        if not found or record.at < found[-1].at:
            found.append(record)
    return found[::-1]


def worth_keeping(
    file: SlotFile, places: Collection[int], stale: Collection[int] = ()
) -> list[SlotFileRecord]:
    """Return all current checkpoints if they are small in sum, else the ones worth their bytes.

    These are the first, the newest, and those just before `places`, where prompts diverge. Checkpoints at
    `stale` tokens are left out.
    """
    records = [record for record in _current(file.records) if record.at not in stale]
    if sum(record.length for record in records) < LARGE:
        return records
    wanted = {*_nearest(records, places).values(), *_newest(records), *records[:1]}
    return [record for record in records if record in wanted]


def _nearest(records: Sequence[SlotFileRecord], places: Collection[int]) -> dict[int, SlotFileRecord]:
    """Return for each place the last checkpoint at or before it, if one is within `NEAR` tokens."""
    ordered = sorted(records, key=lambda record: record.at)
    found = {}
    for place in places:
        index = bisect_right(ordered, place, key=lambda record: record.at)
        if index and place - ordered[index - 1].at <= NEAR:
            found[place] = ordered[index - 1]
    return found


def _newest(records: Sequence[SlotFileRecord]) -> list[SlotFileRecord]:
    """Return the last `NEWEST` checkpoints; of several within `NEAR` tokens only the last counts."""
    found: list[SlotFileRecord] = []
    for record in reversed(records):
        if len(found) < NEWEST and all(abs(record.at - other.at) > NEAR for other in found):
            found.append(record)
    return found


# -- the edit of a file --------------------------------------------------------------------------------


@dataclass(slots=True)
class Editing:
    """The edit of one file. `cuts`: where prompts diverged from it; `stale`: checkpoints to leave out."""

    traits: EngineTraits
    cuts: Collection[int] = ()
    stale: Collection[int] = ()
    written: tuple[int, ...] | None = None  # tokens of the checkpoints that the engine wrote, as in the slot

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
    """Return the repair of the file's sliding window; None if it needs none or cannot be repaired."""
    if traits.memory is not Memory.SWA or traits.swa_full:
        return None
    return repair_window(opened, file, traits.n_swa)
