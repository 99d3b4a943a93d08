"""Slot files, in a real store or many in a stub of one: which of them the scheduler hears of."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime import slot_files
from slotkeeper.runtime.slot_files import AT_ONCE, Snapshots
from slotkeeper.scheduler.effects import Restore
from slotkeeper.scheduler.events import Event, SnapshotsChanged
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.scheduler.snapshots.budgets import FolderRoom
from slotkeeper.scheduler.types import Loading, Place, RequestId, SlotId, Tier
from slotkeeper.store.index import Kept, Use, by_our_clock
from slotkeeper.store.store import Opened, Store
from unit.runtime.stubs import ENGINE, TRAITS, StubLink
from unit.store.saving import ENGINE as FINGERPRINT
from unit.store.saving import keep, opened
from unit.store.test_folders import refusing
from unit.store.test_manifest import MANIFEST


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


class OpenStore:
    """A store with so many snapshots."""

    shared = False
    trouble = None

    def __init__(self, count: int) -> None:
        self.kept = tuple(
            Kept(
                manifest=replace(MANIFEST, id=SnapshotId(f"s{n}")),
                tokens=Tokens(range(n, n + 50)),
                tiers=frozenset({Tier.HOT}),
                use=Use(used=float(n)),
            )
            for n in range(count)
        )

    async def rooms(self) -> dict[Tier, FolderRoom]:
        return {}

    async def open(self) -> Opened:
        return Opened(kept=self.kept, notes=())


@pytest.mark.parametrize("count", [0, 1, AT_ONCE, AT_ONCE + 1, 4096])
async def test_the_scheduler_is_told_of_few_snapshots_at_once_and_the_loop_runs_between(count):
    """Sorting 8,192 long prompts into the catalog takes 0.3 to 0.8 s: nothing was served meanwhile."""
    turns, events = 0, list[tuple[int, bool, Event]]()
    store: Any = OpenStore(count)
    snapshots = Snapshots(store, Metrics(), lambda event: events.append((turns, snapshots.ready, event)))

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        other = group.create_task(others())
        await snapshots.open()
        other.cancel()
    told = [event for _, _, event in events if isinstance(event, SnapshotsChanged)]
    assert [each.id for event in told for each in event.snapshots] == [kept.id for kept in store.kept]
    assert all(len(event.snapshots) <= AT_ONCE for event in told)
    assert [event.more for event in told] == [True] * (len(told) - 1) + [False]
    at = [turn for turn, _, _ in events]
    assert at == sorted(set(at)), "another task ran between any two of them"
    assert not any(ready for _, ready, _ in events)
    assert snapshots.ready
    assert snapshots.tried.is_set()
