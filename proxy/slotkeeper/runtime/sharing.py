"""The sidecar's work with a shared store: it uploads states, looks for states, and collects garbage.

Only the search for a state delays a request, and for no longer than computing the state would take.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from heapq import nlargest
from typing import Any, Final

from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.scheduler.events import Event, SnapshotsChanged
from slotkeeper.scheduler.slots.engine_model import Snapshot, SnapshotId
from slotkeeper.scheduler.snapshots.retention import Wanted
from slotkeeper.scheduler.types import Tier
from slotkeeper.store.index import Kept, by_our_clock
from slotkeeper.store.shared_store.shared import GRACE, TERM, SharedStore, StoreCollector
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import HaltedError, LateError, MissingError, SnapshotError, StoreError

AGAIN: Final = 5.0  # seconds until a failed or postponed upload is tried again
WRITERS: Final = 4  # uploads at the same time
CANDIDATES: Final = 16  # snapshots from which the next upload is chosen
PATIENT: Final = 3  # late looks in a row, after which requests do not wait for looks for a while
MOST_LOOKS: Final = 64  # looks in progress at the same time
LONGEST: Final = 120.0  # seconds, the longest wait after repeated failures
DOUBLINGS: Final = 10  # of the wait: more than reach LONGEST

log = get_logger(__name__)


def _outgrown(kept: Kept, others: Iterable[Kept]) -> bool:
    """Whether another snapshot continues this one."""
    longer = (other for other in others if len(other.tokens) > len(kept.tokens))
    return any(other.tokens.begins_with(kept.tokens) for other in longer)


def sharing_of(store: Store, budget: int, metrics: Metrics, post: Callable[[Event], None]) -> Sharing:
    if not isinstance(store.cold, SharedStore):
        raise TypeError("the store's cold tier is not shared")
    return Sharing(store, store.cold, budget, metrics, post)


class Sharing:
    """The shared store that is the cold tier of our store."""

    def __init__(
        self,
        store: Store,
        shared: SharedStore,
        budget: int,
        metrics: Metrics,
        post: Callable[[Event], None],
    ) -> None:
        self._store = store
        self._shared = shared
        self._collector = StoreCollector(shared, budget)
        self._metrics = metrics
        self._post = post
        self._wanted = asyncio.Event()  # there may be something to upload
        self._idle = asyncio.Event()  # there is nothing to upload
        self._looks = 0  # in progress
        self._late = 0  # looks in a row that took too long
        self._hurried_until = 0.0
        self._writing: set[SnapshotId] = set()
        self._failures = 0  # failed uploads in a row
        self._failed_uploads: Counter[SnapshotId] = Counter()
        self._put_off: dict[SnapshotId, float] = {}  # another sidecar writes them -> when to try again

    def lasting(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the coroutines that run for ever: the writers and the collector."""
        return [*(self.write() for _ in range(WRITERS)), self.collect()]

    # -- finding -----------------------------------------------------------------------------------

    async def waits_for(self, look: asyncio.Task[None], seconds: float) -> None:
        """Wait up to `seconds` for a look; not at all if the last looks took too long.

        The look continues in either case: a request that has no slot yet when it ends can use its result.
        """
        if time.monotonic() < self._hurried_until:
            return
        done, _ = await asyncio.wait([look], timeout=seconds)
        self._late = 0 if done else self._late + 1
        if not done:
            self._metrics.snapshot_operation("find", "late")
        if self._late >= PATIENT:
            self._hurried_until = time.monotonic() + AGAIN

    async def look_for(self, wanted: Iterable[Wanted]) -> None:
        """Look for states and add those found to our store, so that they can be offered. Never raises."""
        if self._looks < MOST_LOOKS:
            self._looks += 1
            try:
                await asyncio.gather(*map(self._look_for, wanted))
            finally:
                self._looks -= 1

    async def _look_for(self, wanted: Wanted) -> None:
        began, there = time.monotonic(), {kept.id for kept in self._store.listing()}
        try:
            states = await self._shared.find(
                wanted.prompt,
                wanted.traits.fingerprint_of(wanted.prompt),
                beyond=wanted.here,
                known=there,
            )
            found = [await self._store.found(kept) for kept in states if kept.id not in there]
        except (LateError, StoreError, SnapshotError, HaltedError) as error:
            return self._failed("find", "failed", error)
        self._metrics.snapshot_operation("find", "ok" if found else "nothing", time.monotonic() - began)
        if found:
            self._tell(found)
            tokens = max(len(kept.tokens) for kept in found)
            log.info("snapshots_found_elsewhere", count=len(found), tokens=tokens)
        return None

    def _tell(self, found: Iterable[Kept]) -> None:
        snapshots: tuple[Snapshot, ...] = tuple(map(by_our_clock, found))
        self._post(SnapshotsChanged(at=time.monotonic(), snapshots=snapshots))

    # -- writing -----------------------------------------------------------------------------------

    def saved(self) -> None:
        """Wake the writers: the hot folder has a new snapshot."""
        self._idle.clear()
        self._wanted.set()
        self._wanted = asyncio.Event()  # tasks that wait hold the old event

    async def written(self) -> None:
        """Wait until every snapshot that can be uploaded is uploaded."""
        self.saved()
        await self._idle.wait()

    async def write(self) -> None:
        """Upload snapshots for ever. Several run at once, so that a large state does not delay all others."""
        while True:
            if (kept := self._next()) is None:
                if not self._writing:
                    self._idle.set()
                soonest = min(self._put_off.values(), default=None)
                await self._pause(None if soonest is None else max(0.0, soonest - time.monotonic()))
                continue
            self._writing.add(kept.id)
            self._put_off.pop(kept.id, None)
            try:
                await self._write(kept)
                self._failures = 0
            except (StoreError, HaltedError) as error:
                self._failures += 1
                self._failed_uploads[kept.id] += 1
                self._failed("upload", "failed", error, kept.id)
                self._idle.set()  # a lost store must not block `written`
                await self._pause(min(LONGEST, AGAIN * 2 ** min(self._failures // WRITERS, DOUBLINGS)))
            finally:
                self._writing.discard(kept.id)

    async def _write(self, kept: Kept) -> None:
        began = time.monotonic()
        try:
            there = await self._store.copy_cold(kept.id)
        except MissingError:  # it was dropped meanwhile
            return
        except SnapshotError as error:  # the file was damaged, and the store has dropped it
            self._failed("upload", "unfit", error, kept.id)
            self._post(SnapshotsChanged(at=time.monotonic(), gone=(kept.id,)))
            return
        seconds = time.monotonic() - began
        if there:
            self._metrics.snapshot_operation("upload", "ok", seconds)
            log.info(
                "snapshot_uploaded",
                snapshot=kept.id,
                bytes=kept.manifest.size,
                tokens=kept.manifest.tokens,
                seconds=round(seconds, 4),
            )
        else:
            self._put_off[kept.id] = time.monotonic() + AGAIN
            self._metrics.snapshot_operation("upload", "leased")

    def _next(self) -> Kept | None:
        """Return the snapshot to upload next: the most recently used one that no other one continues.

        Its conversation is the most likely to move to another sidecar. A snapshot whose upload failed comes
        after those that failed less often: else a few that always fail would hold back all others.
        """
        due = self._due(time.monotonic())
        fewest = min((self._failed_uploads[kept.id] for kept in due), default=0)
        first = (kept for kept in due if self._failed_uploads[kept.id] == fewest)
        newest = nlargest(CANDIDATES, first, key=lambda kept: kept.use.used)
        return next((kept for kept in newest if not _outgrown(kept, newest)), None)

    def _due(self, now: float) -> list[Kept]:
        """Return the snapshots that are not in the store and may be uploaded now."""
        here = [kept for kept in self._store.listing() if Tier.COLD not in kept.tiers]
        ids = {kept.id for kept in here}  # all others are forgotten
        self._put_off = {id_: until for id_, until in self._put_off.items() if id_ in ids}
        self._failed_uploads = Counter({id_: n for id_, n in self._failed_uploads.items() if id_ in ids})
        return [k for k in here if k.id not in self._writing and self._put_off.get(k.id, now) <= now]

    async def _pause(self, seconds: float | None) -> None:
        """Wait until a snapshot is saved, or for so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wanted.wait()

    # -- garbage -----------------------------------------------------------------------------------

    async def collect(self) -> None:
        """Collect garbage for ever, in the terms for which this sidecar is elected."""
        while True:
            try:
                if await self._collector.elected(time.time()):
                    await self._collect()
            except (StoreError, SnapshotError, HaltedError, OSError) as error:
                self._failed("collect", "failed", error)
            await asyncio.sleep(TERM)

    async def _collect(self) -> None:
        began = time.monotonic()
        done = await self._collector.collect()
        await asyncio.to_thread(self._shared.objects.sweep, GRACE)
        self._metrics.snapshot_operation("collect", "ok", time.monotonic() - began)
        log.info("store_collected", states=done.states, leftovers=done.leftovers, left_bytes=done.left_bytes)

    def _failed(self, op: str, outcome: str, error: Exception, snapshot: SnapshotId | None = None) -> None:
        self._metrics.snapshot_operation(op, outcome)
        log.debug("sharing_failed", op=op, outcome=outcome, snapshot=snapshot, error=str(error))
