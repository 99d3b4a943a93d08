"""When all of Python's objects are searched for garbage."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from slotkeeper.app import serve
from slotkeeper.runtime import garbage
from slotkeeper.runtime.garbage import DUE, LATEST, NEVER, QUIET, collect_when_quiet
from slotkeeper.settings import Settings


class Python:
    """The collector of an interpreter, a number of looks, and whether a request runs at each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.younger, self.full, self.looks, self.serving = 0, 0, 0, True
        monkeypatch.setattr(gc, "get_count", lambda: (0, 0, self.younger))
        monkeypatch.setattr(gc, "collect", self._collect)
        monkeypatch.setattr(garbage, "EVERY", 0)

    def _collect(self) -> None:
        self.full, self.younger = self.full + 1, 0

    def _serves(self) -> bool:
        self.looks += 1
        return self.serving

    @asynccontextmanager
    async def looked_after(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect_when_quiet(self._serves))
            yield
            task.cancel()

    async def passes(self, looks: int) -> None:
        self.looks = 0
        while self.looks < looks:
            await asyncio.sleep(0)


async def test_nothing_is_collected_while_requests_run(monkeypatch):
    python = Python(monkeypatch)
    async with python.looked_after():
        python.younger = DUE
        await python.passes(LATEST // 2)
        assert python.full == 0
        python.serving = False
        await python.passes(QUIET - 1)
        assert python.full == 0, "the next turn may follow at once"
        await python.passes(2)
        assert python.full == 1


async def test_nothing_is_collected_until_there_are_many_new_objects(monkeypatch):
    python = Python(monkeypatch)
    async with python.looked_after():
        python.serving, python.younger = False, DUE - 1
        await python.passes(3 * LATEST)
        assert python.full == 0
        python.younger = DUE
        await python.passes(10)
        assert python.full == 1, "once"


async def test_under_constant_load_garbage_is_collected_at_last(monkeypatch):
    python = Python(monkeypatch)
    async with python.looked_after():
        python.younger = DUE
        await python.passes(LATEST - 2)
        assert python.full == 0
        await python.passes(4)
        assert python.full == 1


async def test_python_begins_no_full_collection_meanwhile(monkeypatch):
    python, before = Python(monkeypatch), gc.get_threshold()
    async with python.looked_after():
        await python.passes(1)
        young, middle, old = gc.get_threshold()
        assert (young, middle) == before[:2], "as often as usual"
        assert old > 1_000_000
    assert gc.get_threshold() == before


async def test_the_program_begins_full_collections_itself(unused_tcp_port_factory):
    before, up = gc.get_threshold(), asyncio.Event()
    settings = Settings(
        upstream=(f"http://127.0.0.1:{unused_tcp_port_factory()}",),
        listen="127.0.0.1:0",
        admin_listen="127.0.0.1:0",
    )
    async with asyncio.TaskGroup() as group:
        work = group.create_task(serve(settings, listening=lambda *_: up.set()))
        await up.wait()
        await asyncio.sleep(0.05)
        during = gc.get_threshold()
        work.cancel()
    assert during == (*before[:2], NEVER)
    assert gc.get_threshold() == before
