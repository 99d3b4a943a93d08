"""Garbage collection of parts: what no state needs is doomed first, and removed in a later round."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from slotkeeper.engine.slotfile import RUN
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.store.shared_store import shared
from slotkeeper.store.shared_store.object_names import HeadName, part_at, parts_in
from slotkeeper.store.shared_store.part_objects import FRESH
from slotkeeper.store.shared_store.sealing import StoreKey
from slotkeeper.store.shared_store.shared import GRACE, SPARED, Collected, StoreCollector, parts_named
from slotkeeper.store.trouble import StoreError, Trouble
from unit.store.sharing import ALL_IN_PARTS, KEY, found, sidecar
from unit.store.test_collector import HOUR
from unit.store.test_part_objects import KEYS, kept_here, uploaded
from unit.store.test_shared import objects


def everything(cold: Path) -> list[Path]:
    return [path for path in cold.rglob("*") if path.is_file()]


def grow_old(cold: Path, seconds: float) -> None:
    """Let so much time pass for all objects."""
    for path in everything(cold):
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


def stored(cold: Path) -> int:
    return sum(path.stat().st_size for path in objects(cold, "parts"))


@KEYS
async def test_the_parts_that_only_a_removed_state_had_are_removed_after_a_while(tmp_path, key):
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold, key, sizes=ALL_IN_PARTS) as (store, shared_store):
        await uploaded(store, one, 4 * RUN)
        grow_old(cold, HOUR)
        await uploaded(store, one, 6 * RUN)
        grow_old(cold, HOUR)
        both = set(objects(cold, "parts"))
        collected = StoreCollector(shared_store, stored(cold) - 1)
        done = await collected.collect()
        assert (done.states, done.leftovers, done.left_bytes) == (1, 0, stored(cold))
        assert set(objects(cold, "parts")) == both, "a writer may just be using them"
        (doomed,) = objects(cold, "doomed")
        assert (await collected.collect()).states == 0, "what is doomed does not count"
        assert objects(cold, "doomed") == [doomed], "it is doomed once"
        grow_old(cold, GRACE + 1)
        done = await collected.collect()
        assert (done.states, done.leftovers, done.left_bytes) == (0, 2, stored(cold))
        assert len(both) - len(objects(cold, "parts")) == 2, "its checkpoint and its frame"
        (kept,) = await found(shared_store, Tokens(range(7 * RUN)))
        await shared_store.check(kept)
        assert objects(cold, "doomed") == [doomed], "another round may still remove by it"
        grow_old(cold, 2 * FRESH)
        await collected.collect()
        assert objects(cold, "doomed") == []


async def test_the_parts_of_a_killed_writer_are_removed_after_a_while(tmp_path):
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared_store):
        await uploaded(store, one, 2 * RUN)
        before = set(objects(cold, "parts"))
        await uploaded(store, one, 4 * RUN)
        max(objects(cold, "heads"), key=lambda path: path.stat().st_mtime_ns).unlink()
        new = set(objects(cold, "parts")) - before
        collected = StoreCollector(shared_store, 0)
        assert await collected.collect() == Collected(left_bytes=stored(cold))
        assert objects(cold, "doomed") == [], "its head may not be written yet"
        grow_old(cold, GRACE + 1)
        await collected.collect()
        (doomed,) = objects(cold, "doomed")
        assert {*parts_in(doomed.read_bytes())} == {
            part_at(path.relative_to(cold).as_posix()) for path in new
        }
        grow_old(cold, GRACE + 1)
        assert (await collected.collect()).leftovers == len(new)
        assert set(objects(cold, "parts")) == before


async def test_a_doomed_part_that_a_state_needs_meanwhile_stays(tmp_path):
    """The writer had looked before it was doomed."""
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared_store):
        await uploaded(store, one, 2 * RUN)
        await uploaded(store, one, 4 * RUN)
        (head,) = [
            path for path in objects(cold, "heads") if path.name.startswith(f"{0xFFFFFFFF - 4 * RUN:x}")
        ]
        data = head.read_bytes()
        head.unlink()
        grow_old(cold, GRACE + 1)
        collected = StoreCollector(shared_store, 0)
        await collected.collect()
        head.write_bytes(data)
        grow_old(cold, GRACE + 1)
        assert (await collected.collect()).leftovers == 0
        (kept, _) = await found(shared_store, Tokens(range(5 * RUN)))
        assert kept.manifest.tokens == 4 * RUN
        await shared_store.check(kept)


async def test_a_state_that_lost_a_part_is_removed(tmp_path):
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared_store):
        await uploaded(store, one, 2 * RUN)
        objects(cold, "parts")[0].unlink()
        collected = StoreCollector(shared_store, 0)
        await collected.collect()
        assert objects(cold, "heads"), "it may be listed later than its part was"
        grow_old(cold, GRACE + 1)
        await collected.collect()
        assert objects(cold, "heads") == []


async def test_a_collector_without_the_key_keeps_the_parts_of_all_states(tmp_path):
    one, other, cold = tmp_path / "one", tmp_path / "other", tmp_path / "shared"
    async with (
        sidecar(one, cold, KEY, sizes=ALL_IN_PARTS) as (store, shared_store),
        sidecar(other, cold, StoreKey(b"z" * 32), sizes=ALL_IN_PARTS) as (_, stranger),
    ):
        await uploaded(store, one, 2 * RUN)
        before = set(objects(cold, "parts"))
        for _ in range(3):
            grow_old(cold, GRACE + 1)
            assert (await StoreCollector(stranger, 0).collect()).leftovers == 0
        assert set(objects(cold, "parts")) == before
        for kept in await found(shared_store, Tokens(range(3 * RUN))):
            await shared_store.check(kept)
        grow_old(cold, SPARED + 1)
        assert (await StoreCollector(stranger, 1).collect()).states == 1


@pytest.mark.parametrize("folder", ["parts", "heads"])
async def test_nothing_is_doomed_or_removed_while_a_folder_is_missing(tmp_path, folder):
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared_store):
        await uploaded(store, one, 2 * RUN)
        grow_old(cold, GRACE + 1)
        before = {*everything(cold)}
        (cold / folder).rename(tmp_path / "unmounted")
        assert await StoreCollector(shared_store, 1).collect() == Collected()
        (tmp_path / "unmounted").rename(cold / folder)
        assert {*everything(cold)} == before


async def test_nothing_is_removed_if_a_head_disappears_before_it_is_read(tmp_path, monkeypatch):
    """As when a shared folder is unmounted between two requests."""
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared_store):
        await uploaded(store, one, 2 * RUN)
        grow_old(cold, GRACE + 1)
        parts_of = shared_store.parts_of

        async def unmounted(entry: HeadName) -> bytes:
            (cold / "heads").rename(tmp_path / "unmounted")
            try:
                return await parts_of(entry)
            finally:
                (tmp_path / "unmounted").rename(cold / "heads")

        monkeypatch.setattr(shared_store, "parts_of", unmounted)
        assert await StoreCollector(shared_store, 1).collect() == Collected()
        assert objects(cold, "heads")
        assert objects(cold, "doomed") == []


async def test_a_head_is_read_once_by_each_collector(tmp_path, monkeypatch):
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared_store):
        await uploaded(store, one, 2 * RUN)
        grow_old(cold, HOUR)
        await uploaded(store, one, 3 * RUN)
        read, parts_of = Counter[int](), shared_store.parts_of

        async def counted(entry):
            read[entry.tokens] += 1
            return await parts_of(entry)

        monkeypatch.setattr(shared_store, "parts_of", counted)
        collected = StoreCollector(shared_store, 0)
        for _ in range(3):
            await collected.collect()
        assert read == {2 * RUN: 1, 3 * RUN: 3}, "a new one could be replaced within the same second"


async def test_a_round_that_takes_too_long_removes_no_more_parts(tmp_path, monkeypatch):
    """A name is free again some time later, and a writer may use it."""
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared_store):
        kept = await uploaded(store, one, 4 * RUN)
        await store.forget(kept.id)
        collected = StoreCollector(shared_store, 0)
        for _ in range(2):
            grow_old(cold, GRACE + 1)
            with monkeypatch.context() as slow:
                steps = iter([0.0, 0.0, 1.0, FRESH / 2 + 1, *[FRESH] * 99])
                slow.setattr(shared, "time", SimpleNamespace(monotonic=lambda steps=steps: next(steps)))
                done = await collected.collect()
        assert done.leftovers == 2
        assert len(objects(cold, "parts")) > 2
        assert (await collected.collect()).leftovers > 0


async def test_a_write_that_takes_too_long_gets_no_head(tmp_path, monkeypatch):
    """A collector that was not to be seen at its beginning may already remove its parts."""
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, _):
        kept = await kept_here(store, one, 2 * RUN)
        with monkeypatch.context() as slow:
            steps = iter([0.0, FRESH + 1])
            slow.setattr(shared, "time", SimpleNamespace(monotonic=lambda: next(steps)))
            with pytest.raises(StoreError) as raised:
                await store.copy_cold(kept.id)
        assert raised.value.trouble is Trouble.SLOW
        assert objects(cold, "heads") == []
        assert await store.copy_cold(kept.id)


async def test_a_collector_that_ends_at_any_step_leaves_complete_states(tmp_path, monkeypatch):
    one, cold = tmp_path / "one", tmp_path / "shared"
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared_store):
        for runs in (2, 3, 4):
            await uploaded(store, one, runs * RUN)
            grow_old(cold, HOUR)
        budget = stored(cold) - 1
        for steps in range(14):
            with monkeypatch.context() as failing, suppress(StoreError):
                for name in ("remove", "create"):
                    failing.setattr(shared_store.objects, name, at_most(steps, shared_store, name))
                await StoreCollector(shared_store, budget).collect()
            grow_old(cold, GRACE / 2)
            for kept in await found(shared_store, Tokens(range(5 * RUN))):
                await shared_store.check(kept)
            for path in objects(cold, "marks"):
                path.unlink()  # uses by this test do not count
        for _ in range(4):
            grow_old(cold, GRACE + 1)
            await StoreCollector(shared_store, budget).collect()
        needed = set[bytes]()
        for path in objects(cold, "heads"):
            needed.update(parts_in(parts_named(path.read_bytes()) or b""))
        assert len(objects(cold, "heads")) == 2
        assert {part_at(path.relative_to(cold).as_posix()) for path in objects(cold, "parts")} == needed


def at_most(steps: int, shared_store, name: str) -> Callable:
    call, left = getattr(shared_store.objects, name), [steps]

    async def some(path: str, *rest: object) -> object:
        if not left[0]:
            raise StoreError(Trouble.UNREACHABLE, "it is killed")
        left[0] -= 1
        return await call(path, *rest)

    return some
