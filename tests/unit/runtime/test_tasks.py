"""Background tasks: kept, reported, ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from patience import PATIENCE
from slotkeeper.runtime.tasks import Tasks


@pytest.fixture
def failures() -> list[BaseException]:
    return []


@pytest.fixture
def tasks(failures) -> Tasks:
    return Tasks(failures.append)


async def settled() -> None:
    """Let all ready tasks run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_task_without_other_references_runs_to_its_end(tasks, failures):
    """The event loop itself keeps weak references only."""
    go, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go.wait()
        done.set()

    tasks.start(work())
    await settled()
    gc.collect()
    assert len(tasks) == 1
    go.set()
    async with asyncio.timeout(PATIENCE):
        await done.wait()
    await settled()
    assert (len(tasks), failures) == (0, [])


async def test_a_failed_task_is_reported_once_and_removed(tasks, failures):
    error = RuntimeError("a bug")

    async def work() -> None:
        raise error

    tasks.start(work())
    await settled()
    assert failures == [error]
    assert len(tasks) == 0


async def test_a_cancelled_task_is_not_a_failure(tasks, failures):
    task = tasks.start(asyncio.Event().wait())
    await settled()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert failures == []
    assert len(tasks) == 0


async def test_close_cancels_all_tasks_and_waits_for_their_cleanup(tasks):
    cleaned: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleaning up may itself have to wait
            cleaned.append(number)

    for number in range(3):
        tasks.start(work(number))
    await settled()
    await tasks.close()
    assert sorted(cleaned) == [0, 1, 2]
    assert len(tasks) == 0


async def test_close_reports_a_task_that_fails_in_its_cleanup(tasks, failures):
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("in its cleaning up")

    tasks.start(work())
    await settled()
    await tasks.close()
    await settled()
    assert [str(failure) for failure in failures] == ["in its cleaning up"]
