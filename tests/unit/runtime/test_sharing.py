"""A sidecar's work with a shared store: when states are uploaded, and which files the scheduler hears of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.sharing import LONGEST, WRITERS, Sharing, sharing_of
from slotkeeper.scheduler.events import Event
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import StoreError, Trouble
from unit.store.sharing import kept_state, sidecar


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
