"""The life of a snapshot: saved, kept, offered, moved between tiers, removed, found at the next start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from recipes import damaged
from slotkeeper.engine.slotfile import SlotFile
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.types import Tier
from slotkeeper.store.index import snapshot
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import HaltedError, MissingError, UnfitError
from unit.engine.slotfiles import whole_file
from unit.store.saving import ENGINE, file_of, ids, keep, mode, names_in, offered, opened, times


async def test_a_kept_state_is_offered_byte_for_byte(hot: Path):
    async with opened(hot) as store:
        kept = await keep(store, hot, file_of(3), seed=3)
        assert kept.tokens == Tokens(ids(3))
        assert kept.manifest.checkpoints == (8, 16)
        assert kept.manifest.draft
        assert kept.manifest.version == 4
        assert kept.manifest.layout == whole_file(file_of(3)).layout
        assert await offered(store, hot, kept.id) == file_of(3)
        assert names_in(hot) == {f"{kept.id}.slot", f"{kept.id}.json"}


async def test_files_are_private_to_their_owner(hot: Path):
    async with opened(hot) as store:
        kept = await keep(store, hot)
    assert mode(hot) == 0o700
    assert mode(hot / f"{kept.id}.slot") == mode(hot / f"{kept.id}.json") == 0o600


async def test_modification_times_are_set_back_so_that_a_later_write_is_detected(hot: Path):
    """If the file system's clock has not ticked since the hash, a write would leave the same times."""
    async with opened(hot) as store:
        kept = await keep(store, hot)
        written, changed = times(hot / f"{kept.id}.slot")
        assert written < changed - 1e9
        assert await store.offer(kept.id, ENGINE)
        assert times(hot / f"{kept.id}.slot") == (written, changed)  # not hashed again


async def test_a_new_process_finds_all_kept_snapshots(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        a, b, c = [await keep(store, hot) for _ in range(3)]
        await store.demote(b.id)
        await store.copy_cold(c.id)
        await store.used(a.id, paid=True)
        await store.used(a.id, paid=False)
        store.recount()
        store.recount()
        before = {kept.id: kept for kept in store.listing()}
    later = Store(hot, cold)
    found = await later.open()
    await later.close()
    await later.close()
    assert {kept.id: kept for kept in found.kept} == before
    assert found.notes == ()
    assert before[a.id].use.restores == before[a.id].use.failures == 1
    assert before[b.id].tiers == {Tier.COLD}
    assert before[c.id].tiers == {Tier.HOT, Tier.COLD}


async def test_times_of_snapshots_are_converted_to_the_clock_of_the_core(hot: Path):
    async with opened(hot, clock=lambda: 5000.0) as store:
        kept = await keep(store, hot, golden=True)
        core = snapshot(kept, -4900.0, now=200.0)
    assert (core.created, core.used, core.restores) == (100.0, 100.0, 0)
    assert core.shared
    assert not core.golden  # it was never restored
    assert not core.repaired
    assert (core.id, core.tokens, core.size) == (kept.id, kept.tokens, kept.manifest.size)
    assert (core.checkpoints, core.draft, core.tier) == ((8, 16), True, Tier.HOT)


async def test_a_snapshot_moves_to_the_cold_tier_and_back(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        kept = await keep(store, hot, file_of(1), seed=1)
        await store.demote(kept.id)
        assert names_in(hot) == set()
        assert names_in(cold) == {f"{kept.id}.slot", f"{kept.id}.json"}
        assert store.sizes() == {Tier.HOT: 0, Tier.COLD: len(file_of(1))}
        assert await offered(store, hot, kept.id) == file_of(1)
        assert names_in(hot) == {f"{kept.id}.slot", f"{kept.id}.json"}
        assert names_in(cold) == set()
        assert store.sizes() == {Tier.HOT: len(file_of(1)), Tier.COLD: 0}
        await store.demote(kept.id)
        assert names_in(hot) == set()
        await store.forget(kept.id)
        await store.forget(kept.id)
        assert names_in(cold) == set()
        assert store.listing() == []


async def test_a_damaged_hot_copy_is_replaced_from_the_cold_tier(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        kept = await keep(store, hot, file_of(1), seed=1)
        await store.copy_cold(kept.id)
        (hot / f"{kept.id}.slot").write_bytes(file_of(2))
        assert await offered(store, hot, kept.id) == file_of(1)
        assert f"slotkeeper-quarantine/{kept.id}.slot" in names_in(hot)
        assert store.listing()[0].tiers == {Tier.HOT}


async def test_a_snapshot_with_a_missing_file_is_forgotten(hot: Path):
    async with opened(hot) as store:
        kept = await keep(store, hot)
        (hot / f"{kept.id}.slot").unlink()
        with pytest.raises(MissingError):
            await store.offer(kept.id, ENGINE)
        assert store.listing() == []
        assert names_in(hot) == set()
        with pytest.raises(MissingError):
            await store.offer(kept.id, ENGINE)


async def test_a_snapshot_is_not_offered_to_an_engine_of_another_kind(hot: Path):
    async with opened(hot) as store:
        kept = await keep(store, hot)
        with pytest.raises(UnfitError):
            await store.offer(kept.id, "of another engine")
        with pytest.raises(UnfitError):
            await store.offer(kept.id, ENGINE, "of another layout")
        assert [kept] == store.listing()
        assert await store.offer(kept.id, ENGINE, kept.manifest.layout) == f"{kept.id}.slot"


async def test_verify_finds_damage_in_every_tier(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        good, bad, worse = [await keep(store, hot) for _ in range(3)]
        for kept in (bad, worse):
            await store.copy_cold(kept.id)
        (cold / f"{bad.id}.slot").write_bytes(b"x")
        (cold / f"{worse.id}.slot").unlink()
        (hot / f"{worse.id}.slot").unlink()
        found = await damaged(store)
        assert {id_: type(error) for id_, error in found.items()} == {
            bad.id: UnfitError,
            worse.id: MissingError,
        }
        assert {kept.id: kept.tiers for kept in store.listing()} == {
            good.id: {Tier.HOT},
            bad.id: {Tier.HOT},
        }


async def test_concurrent_operations_on_one_snapshot_run_one_after_the_other(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        kept = await keep(store, hot, file_of(1), seed=1)
        work = [store.demote(kept.id), store.offer(kept.id, ENGINE), store.copy_cold(kept.id)] * 4
        await asyncio.gather(*work)
        assert await offered(store, hot, kept.id) == file_of(1)
        assert await damaged(store) == {}


class Stuck:
    """An editor that runs until it is halted."""

    def __init__(self, store: Store) -> None:
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._store = store

    def __call__(self, _file: object, _found: SlotFile) -> None:
        self._loop.call_soon_threadsafe(self.begun.set)
        (halt,) = self._store._tiers.patient._halts
        assert halt.wait(30)


async def test_closing_the_store_halts_running_work(hot: Path):
    store = Store(hot)
    await store.open()
    stuck = Stuck(store)
    saving = asyncio.gather(keep(store, hot, edit=stuck), return_exceptions=True)
    await stuck.begun.wait()
    await store.close()
    assert [type(result) for result in await saving] == [HaltedError]
    with pytest.raises(HaltedError):
        await store.temporary()
    assert names_in(hot) == set()


async def test_the_repr_of_the_store_shows_its_state(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        await keep(store, hot)
        await store.temporary()
        assert repr(store) == "<Store 1 snapshots | 0 MiB hot, 0 MiB cold | 1 being saved | well>"
