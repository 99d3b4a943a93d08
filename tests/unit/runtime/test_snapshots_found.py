"""What the scheduler is told of the snapshots in an opened store."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.slot_files import AT_ONCE, Snapshots
from slotkeeper.scheduler.events import Event, SnapshotsChanged
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.slot_contents import SnapshotId, Tier
from slotkeeper.scheduler.snapshots.budgets import FolderRoom
from slotkeeper.store.index import Kept, Use
from slotkeeper.store.store import Opened
from unit.store.test_manifest import MANIFEST


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
