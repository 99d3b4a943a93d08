"""Steps with slot files, over a real store and a stub of an engine: which files the scheduler hears of."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from patience import PATIENCE
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime import slot_files
from slotkeeper.runtime.slot_files import Snapshots
from slotkeeper.scheduler.effects import Restore
from slotkeeper.scheduler.events import Event, SnapshotsChanged
from slotkeeper.scheduler.slots.slot_contents import Tier
from slotkeeper.scheduler.types import Loading, Place, RequestId, SlotId
from slotkeeper.store.index import by_our_clock
from slotkeeper.store.store import Store
from unit.runtime.stubs import ENGINE, TRAITS, StubLink
from unit.store.saving import ENGINE as FINGERPRINT
from unit.store.saving import keep, opened
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


async def test_snapshots_of_a_cold_folder_that_failed_at_the_start_are_offered_when_it_works(
    hot: Path, cold: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slot_files, "RETRY", 0.01)
    async with opened(hot, cold) as store:
        kept = await keep(store, hot)
        await store.demote(kept.id)
    other = Store(cold)  # another sidecar has not ended yet
    await other.open()
    async with snapshots_in(hot, cold) as (snapshots, events), asyncio.TaskGroup() as group:
        tasks = [group.create_task(lasting) for lasting in snapshots.lasting()]
        await asyncio.sleep(0.1)
        assert events == []
        await other.close()
        async with asyncio.timeout(PATIENCE):
            while not events:
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
    (told,) = events
    assert isinstance(told, SnapshotsChanged)
    assert [(snapshot.id, snapshot.tier) for snapshot in told.snapshots] == [(kept.id, Tier.COLD)]
