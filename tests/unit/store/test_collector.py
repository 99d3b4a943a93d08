"""Garbage collection of a shared store: what is removed, in which order; every step may be the last."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import Counter
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from slotkeeper.store.shared_store.objects import AT_A_TIME, Objects
from slotkeeper.store.shared_store.shared import Collected, SharedStore, StoreCollector
from slotkeeper.store.trouble import StoreError, Trouble
from unit.store.saving import offered
from unit.store.sharing import KEY, found, kept_state, sidecar, unheard
from unit.store.test_shared import objects, prompt

HOUR = 3600.0


def aged(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def age_new(cold: Path, seconds: float) -> None:
    for path in cold.rglob("*"):
        if path.is_file() and time.time() - path.stat().st_mtime < HOUR / 2:
            aged(path, seconds)


async def filled(store, one: Path, cold: Path, count: int) -> None:
    """Write this many states, the oldest first."""
    for seed in range(1, count + 1):
        await store.copy_cold((await kept_state(store, one, seed)).id)
        age_new(cold, (count + 2 - seed) * HOUR)


def size(cold: Path) -> int:
    return sum(path.stat().st_size for path in objects(cold, "blobs"))


@pytest.mark.parametrize("key", [None, KEY])
async def test_the_least_recently_used_states_are_removed(tmp_path, key):
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold, key) as (store, shared):
        await filled(store, one, cold, 4)
        each = size(cold) // 4
        (first,) = await found(shared, prompt(1))
        await shared.check(first)  # it was fetched just now
        done = await StoreCollector(shared, 2 * each).collect()
        assert (done.states, done.leftovers, done.left_bytes) == (2, 0, 2 * each)
        assert [bool(await found(shared, prompt(seed))) for seed in (1, 2, 3, 4)] == [
            True,
            False,
            False,
            True,
        ]
        assert (await StoreCollector(shared, 2 * each).collect()).states == 0


async def test_a_state_that_was_just_written_or_fetched_is_kept_at_any_budget(tmp_path):
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold) as (store, shared):
        await store.copy_cold((await kept_state(store, one, 1)).id)
        assert (await StoreCollector(shared, 1).collect()).states == 0
        assert (await StoreCollector(shared, 1, spared=-1.0).collect()).states == 1
        assert objects(cold, "heads") == objects(cold, "blobs") == []


async def test_leftovers_are_removed_once_no_sidecar_can_be_using_them(tmp_path):
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold, KEY) as (store, shared):
        for seed in (1, 2, 3):
            await store.copy_cold((await kept_state(store, one, seed)).id)
        heads, blobs = objects(cold, "heads"), objects(cold, "blobs")
        heads[0].unlink()  # killed between blob and head
        state = heads[1].name.rpartition("-")[2]
        next(path for path in blobs if path.name.startswith(state)).unlink()
        loser = blobs[0].with_name(f"{heads[2].name.rpartition('-')[2]}-{'0' * 64}-{'1' * 32}")
        loser.parent.parent.joinpath(loser.name[:2]).mkdir(exist_ok=True)
        loser = loser.parent.parent / loser.name[:2] / loser.name
        loser.write_bytes(b"another sidecar was first")
        collector = StoreCollector(shared, 0)
        assert (await collector.collect()).leftovers == 0
        for path in (heads[1], loser, *blobs):
            if path.exists():
                aged(path, 2 * HOUR)
        assert (await collector.collect()).leftovers == 3
        assert len(objects(cold, "heads")) == len(objects(cold, "blobs")) == 1
        (kept,) = [each for seed in (1, 2, 3) for each in await found(shared, prompt(seed))]
        assert await offered(store, one, kept.id)


async def test_a_collector_that_ends_at_any_step_leaves_complete_states_for_the_next_one(
    tmp_path, monkeypatch
):
    """The store fails at its first, second, third removal: every state is complete or not found."""
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold) as (store, shared):
        await filled(store, one, cold, 4)
        each, remove = size(cold) // 4, shared.objects.remove
        for steps in range(12):
            left = [steps]

            async def some(path: str, left: list[int] = left) -> None:
                if not left[0]:
                    raise StoreError(Trouble.UNREACHABLE, "it is killed")
                left[0] -= 1
                await remove(path)

            with monkeypatch.context() as failing, suppress(StoreError):
                failing.setattr(shared.objects, "remove", some)
                await StoreCollector(shared, each).collect()
            for seed in (1, 2, 3, 4):
                for kept in await found(shared, prompt(seed)):
                    await shared.check(kept)
            for path in cold.rglob("*"):
                if path.is_file() and path.parent.name == "used":
                    path.unlink()  # uses by this test do not count
        for path in objects(cold, "blobs"):
            aged(path, 2 * HOUR)
        await StoreCollector(shared, each).collect()
        assert len(objects(cold, "heads")) == len(objects(cold, "blobs")) == 1


async def test_one_collector_is_elected_for_each_term(tmp_path):
    cold = tmp_path / "shared"
    async with sidecar(tmp_path / "one", cold) as (_, one), sidecar(tmp_path / "other", cold) as (_, other):
        collectors = [StoreCollector(one, 0), StoreCollector(other, 0)]
        now = time.time()
        assert [await each.elected(now) for each in collectors] == [True, False]
        assert [await each.elected(now + 600) for each in collectors] == [True, False]
        for path in objects(cold, "elections"):
            aged(path, 3 * HOUR)
        await collectors[0].collect()
        assert objects(cold, "elections") == []


async def test_temporary_files_of_killed_writers_are_removed(tmp_path):
    cold = tmp_path / "shared"
    async with sidecar(tmp_path / "one", cold) as (_, shared):
        (cold / "blobs").mkdir()
        staged, other = cold / "blobs" / "aa-bb#1", cold / "blobs" / "aa-bb"
        for path in (staged, other):
            path.write_bytes(b"half")
        assert shared.objects.sweep(HOUR) == 0
        aged(staged, 2 * HOUR)
        assert shared.objects.sweep(HOUR) == 1
        assert other.exists()


async def test_temporary_files_that_are_renamed_meanwhile_are_left_alone(tmp_path, monkeypatch):
    cold = tmp_path / "shared"
    async with sidecar(tmp_path / "one", cold) as (_, shared):
        (cold / "blobs").mkdir()
        renamed, staged = cold / "blobs" / "aa-bb#1", cold / "blobs" / "aa-bb#2"
        staged.write_bytes(b"half")
        aged(staged, 2 * HOUR)
        monkeypatch.setattr(Path, "rglob", lambda *_: iter((renamed, staged)))
        assert shared.objects.sweep(HOUR) == 1


async def test_the_event_loop_runs_while_thousands_of_states_are_listed_and_looked_at(tmp_path, monkeypatch):
    """A round over 8,192 states took 0.4 s of the event loop, every five minutes."""
    folder, count, turns = tmp_path / "blobs" / "00", 4 * AT_A_TIME, 0
    folder.mkdir(parents=True)
    (tmp_path / "heads").mkdir()
    for n in range(count):
        (folder / f"{n:032x}-{'c' * 64}-{'d' * 32}").write_bytes(b"")
    bucket = Objects(str(tmp_path), unheard)
    looked_at, clear = Counter[int](), StoreCollector._clear

    async def counted(collector: StoreCollector, *given: Any) -> int:
        looked_at[turns] += 1
        return await clear(collector, *given)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(StoreCollector, "_clear", counted)
    async with asyncio.TaskGroup() as group:
        other = group.create_task(others())
        listed = Counter([turns async for _ in bucket.listing("blobs")])
        await StoreCollector(SharedStore(bucket), 0).collect()
        other.cancel()
    for counts in (listed, looked_at):
        assert counts.total() == count
        assert max(counts.values()) <= AT_A_TIME


@pytest.mark.parametrize("part", ["", "/*"], ids=["whole", "part"])
@pytest.mark.parametrize("kind", ["blobs", "heads"])
async def test_nothing_is_removed_if_a_folder_is_missing_when_listed(tmp_path, monkeypatch, kind, part):
    """As when the disk of a shared folder is unmounted for a moment, or while the listing goes on."""
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold) as (store, shared):
        await filled(store, one, cold, 3)
        before, scan = objects(cold, "heads") + objects(cold, "blobs"), os.scandir

        def scanned(path: Path | str) -> Any:
            if fnmatch(str(path), f"{cold}/{kind}{part}"):
                raise FileNotFoundError(errno.ENOENT, "it is not there")
            return scan(path)

        collector = StoreCollector(shared, 1)
        with monkeypatch.context() as unmounted:
            unmounted.setattr(os, "scandir", scanned)
            assert await collector.collect() == Collected()
        assert objects(cold, "heads") + objects(cold, "blobs") == before
        assert shared.objects.up
        assert (await collector.collect()).states == 3


async def test_a_store_without_states_is_collected(tmp_path):
    async with sidecar(tmp_path / "one", tmp_path / "shared") as (_, shared):
        assert await StoreCollector(shared, 1).collect() == Collected()
        assert shared.objects.up
