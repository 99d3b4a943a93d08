"""A sidecar's work with a shared store: when states are uploaded, and which files the scheduler hears of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from patience import PATIENCE
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime import sharing as module
from slotkeeper.runtime.sharing import LONGEST, WRITERS, Sharing, sharing_of
from slotkeeper.scheduler.events import Event, SnapshotsChanged
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory, SnapshotId
from slotkeeper.scheduler.snapshots.retention import Wanted
from slotkeeper.scheduler.types import Tier
from slotkeeper.store.index import Kept
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import StoreError, Trouble
from unit.store.saving import ENGINE
from unit.store.sharing import kept_state, sidecar
from unit.store.test_shared import prompt


@asynccontextmanager
async def sharing_in(one: Path, cold: Path) -> AsyncIterator[tuple[Store, Sharing, list[Event]]]:
    events: list[Event] = []
    async with sidecar(one, cold) as (store, _):
        yield store, sharing_of(store, 0, Metrics(), events.append), events


@asynccontextmanager
async def writers(sharing: Sharing, count: int = WRITERS) -> AsyncIterator[None]:
    """Run so many writers. An error of one of them is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sharing.write()) for _ in range(count)]
        yield
        for task in tasks:
            task.cancel()


async def test_uploads_are_tried_again_however_often_they_failed(hot, cold, monkeypatch):
    """A store may be lost for days."""
    paused: asyncio.Queue[float | None] = asyncio.Queue()

    async def pause(seconds: float | None) -> None:
        await paused.put(seconds)
        await asyncio.Event().wait()

    async def lost(_: object) -> bool:
        raise StoreError(Trouble.UNREACHABLE, "no route")

    async with sharing_in(hot, cold) as (store, sharing, _):
        await kept_state(store, hot, 1)
        monkeypatch.setattr(store, "copy_cold", lost)
        monkeypatch.setattr(sharing, "_pause", pause)
        sharing._failures = 1_000_000
        async with writers(sharing, 1):
            assert await paused.get() == LONGEST


async def test_writers_without_work_sleep_while_another_uploads_a_state_that_was_put_off(
    hot, cold, monkeypatch
):
    """Each of them looks for work once more, because it waited for the moment when the state is due again."""
    asked, looks, uploading = 0, 0, asyncio.Event()

    async def leased_at_first(_: object) -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            return False  # another sidecar writes this state
        uploading.set()
        await asyncio.Event().wait()
        return True

    def counted() -> list[Kept]:
        nonlocal looks
        looks += 1
        return [kept]

    monkeypatch.setattr(module, "AGAIN", 0.01)
    async with sharing_in(hot, cold) as (store, sharing, _):
        kept = await kept_state(store, hot, 1)
        monkeypatch.setattr(store, "copy_cold", leased_at_first)
        async with writers(sharing):
            await uploading.wait()
            monkeypatch.setattr(store, "listing", counted)
            for _ in range(100):
                await asyncio.sleep(0)
            assert looks < WRITERS


async def test_a_file_of_ours_that_is_found_in_the_shared_store_stays_in_the_hot_tier(hot, cold):
    """The scheduler would price it as a download, and forget how often it was restored."""
    async with sharing_in(hot, cold) as (store, sharing, events):
        kept = await kept_state(store, hot, 1)
        await store.copy_cold(kept.id)
        await store.used(kept.id, paid=True)
        traits = EngineTraits(memory=Memory.HYBRID, slot_files=True, fingerprint=ENGINE)
        await sharing.look_for(
            [Wanted(traits=traits, prompt=prompt(1), here=kept.manifest.tokens, within=1.0)]
        )
        changes = [event for event in events if isinstance(event, SnapshotsChanged)]
        told = [snapshot for event in changes for snapshot in event.snapshots]
        assert [(each.tier, each.restores) for each in told] in ([], [(Tier.HOT, 1)])


async def test_the_collector_continues_after_an_error_of_the_shared_folder(hot, cold, monkeypatch):
    """A writer may rename its temporary file while the folder is read; NFS may lose the folder."""
    rounds: asyncio.Queue[None] = asyncio.Queue()

    def swept(_: float) -> int:
        asyncio.run_coroutine_threadsafe(rounds.put(None), loop)
        raise FileNotFoundError("blobs/aa/aa-bb#1")

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(module, "TERM", 0.0)
    async with sharing_in(hot, cold) as (_, sharing, _events), asyncio.TaskGroup() as group:
        monkeypatch.setattr(sharing._shared.objects, "sweep", swept)
        monkeypatch.setattr(sharing._collector, "elected", always)
        collector = group.create_task(sharing.collect())
        await rounds.get()
        await rounds.get()
        collector.cancel()


async def always(_: float) -> bool:
    return True


async def test_uploads_that_always_fail_do_not_hold_back_the_others(hot, cold, monkeypatch):
    """For example files that cannot be read: the most recently used ones, as many as there are writers."""
    monkeypatch.setattr(module, "AGAIN", 0.0)
    tried: list[str] = []

    async with sharing_in(hot, cold) as (store, sharing, _):
        good = [(await kept_state(store, hot, seed)).id for seed in (1, 2)]
        bad = [(await kept_state(store, hot, seed)).id for seed in range(3, 3 + WRITERS)]
        copy = store.copy_cold

        async def copied(snapshot: SnapshotId) -> bool:
            tried.append(snapshot)
            if snapshot in bad:
                raise StoreError(Trouble.BROKEN, "it cannot be read")
            return await copy(snapshot)

        monkeypatch.setattr(store, "copy_cold", copied)
        async with writers(sharing), asyncio.timeout(PATIENCE):
            while sum(Tier.COLD in kept.tiers for kept in store.listing()) < len(good):
                await asyncio.sleep(0)
            while min(map(tried.count, bad)) < 3:  # they are tried again
                await asyncio.sleep(0)
        assert {*tried[: len(bad) + len(good)]} == {*bad, *good}


async def test_a_state_is_uploaded_though_the_upload_of_its_continuation_fails(hot, cold, monkeypatch):
    async with sharing_in(hot, cold) as (store, sharing, _):
        first, longer = await kept_state(store, hot, 1), await kept_state(store, hot, 1, 900)
        assert sharing._next() == longer
        sharing._failed_uploads[longer.id] += 1
        assert sharing._next() == first
        await store.copy_cold(first.id)
        assert sharing._next() == longer
        await store.forget(longer.id)
        assert sharing._next() is None
        assert not sharing._failed_uploads
