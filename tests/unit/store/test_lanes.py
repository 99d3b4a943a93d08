"""Threads whose callers can be cancelled."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from slotkeeper.store import files
from slotkeeper.store.files import CHUNK, Halt, Lane, hash_bytes, open_ours
from slotkeeper.store.trouble import HaltedError


@pytest.fixture
async def lane() -> AsyncIterator[Lane]:
    lane = Lane("test")
    yield lane
    await lane.close()


class Slow:
    """Work that runs until it is told to stop, and reports its beginning."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), False
        self._loop = asyncio.get_running_loop()

    def __call__(self, halt: Halt) -> None:
        self._loop.call_soon_threadsafe(self.begun.set)
        if not halt.wait(30):
            raise TimeoutError
        self.ended = True
        raise HaltedError


async def test_a_cancelled_caller_waits_until_its_work_has_ended(lane: Lane):
    slow = Slow()
    caller = asyncio.gather(lane.do(slow))
    await slow.begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert slow.ended


async def test_work_cancelled_before_it_begins_never_runs(lane: Lane):
    slow, done = Slow(), []
    first = asyncio.gather(lane.do(slow))
    second = asyncio.gather(lane.do(lambda _: done.append("second")))
    await slow.begun.wait()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await lane.do(lambda _: done.append("third"))
    assert done == ["third"]


async def test_closing_a_lane_halts_its_work_and_refuses_more():
    lane, slow = Lane("test"), Slow()
    caller = asyncio.gather(lane.do(slow), return_exceptions=True)
    await slow.begun.wait()
    await lane.close()
    assert [type(result) for result in await caller] == [HaltedError]
    with pytest.raises(HaltedError):
        await lane.do(lambda _: None)


async def test_cleanup_of_a_cancelled_caller_runs_after_the_work_before_it():
    """Also if the caller is cancelled again while it waits for the work to end."""
    lane, order = Lane("test"), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def opens(_: Halt) -> None:
        begun.set()
        go_on.wait(30)
        order.append("opened")

    async def caller() -> None:
        try:
            await lane.do(opens)
        finally:
            lane.finish(lambda: order.append("closed"))

    task = asyncio.gather(caller())
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await lane.close()
    assert order == ["opened", "closed"]
    lane.finish(lambda: order.append("at once"))
    assert order[-1] == "at once"


class Watched(Halt):
    """Notes the seconds for which a pass would rest."""

    def __init__(self, *, ends: bool = False) -> None:
        super().__init__()
        self.rests: list[float | None] = []
        self._ends = ends

    def wait(self, timeout: float | None = None) -> bool:
        self.rests.append(timeout)
        if self._ends:
            self.set()
        return self.is_set()


CROWDED = f"0.5 0.5 0.5 {(os.cpu_count() or 1) + 1}/99 7\n"


@pytest.mark.parametrize(
    ("load", "rests"),
    [(CROWDED, 3), (f"0.5 0.5 0.5 {os.cpu_count() or 1}/99 7\n", 0), ("what is this?\n", 0), (None, 0)],
    ids=["more than processors", "as many", "unreadable", "no such file"],
)
def test_a_pass_rests_between_chunks_while_others_want_its_processor(
    load: str | None, rests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files, "LOAD", tmp_path / "load")
    if load is not None:
        (tmp_path / "load").write_text(load)
    (tmp_path / "state").write_bytes(bytes(2 * CHUNK + 1))
    halt = Watched()
    with open_ours(tmp_path / "state") as file:
        assert hash_bytes(file, halt).size == 2 * CHUNK + 1
    assert len(halt.rests) == rests
    assert all(halt.rests), "as long as the last chunk took"


def test_a_pass_that_rests_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "LOAD", tmp_path / "load")
    (tmp_path / "load").write_text(CROWDED)
    (tmp_path / "state").write_bytes(bytes(2 * CHUNK))
    with open_ours(tmp_path / "state") as file, pytest.raises(HaltedError):
        hash_bytes(file, Watched(ends=True))
