"""Steps with slot files, over a real store and a stub of an engine: which files the scheduler hears of."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.slot_files import Snapshots
from slotkeeper.scheduler.effects import Restore
from slotkeeper.scheduler.events import Event
from slotkeeper.scheduler.types import Loading, Place, RequestId, SlotId
from slotkeeper.store.index import by_our_clock
from slotkeeper.store.store import Store
from unit.runtime.stubs import ENGINE, TRAITS, StubLink
from unit.store.saving import ENGINE as FINGERPRINT
from unit.store.saving import keep
from unit.store.test_folders import refusing


@asynccontextmanager
async def snapshots_in(hot: Path, cold: Path | None = None) -> AsyncIterator[tuple[Snapshots, list[Event]]]:
    events: list[Event] = []
    snapshots = Snapshots(Store(hot, cold), Metrics(), events.append)
    try:
        await snapshots.open()
        events.clear()
        yield snapshots, events
    finally:
        await snapshots.close()


async def test_a_file_that_cannot_be_read_is_not_offered_again_after_the_next_save(hot: Path):
    link = StubLink(traits=replace(TRAITS, fingerprint=FINGERPRINT))
    async with snapshots_in(hot) as (snapshots, events):
        bad = by_our_clock(await keep(snapshots.store, hot))
        restore = Restore(request=RequestId("r"), place=Place(ENGINE, SlotId(0)), snapshot=bad)
        with refusing("open", f"{bad.id}.slot", errno.EIO):
            restored = await snapshots.restore(link, restore)
        assert restored.outcome is Loading.UNFIT
        snapshots._works_again()
        assert events == []
