"""Folders that are swept while the store is used, because they could not be read before."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotkeeper.scheduler.types import Tier
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import MissingError
from unit.store.saving import ENGINE, file_of, keep, names_in, offered, opened
from unit.store.test_folders import moved, unmounted

TEMPORARY = "slotkeeper-0123456789ab-01234567.tmp"


async def test_snapshots_of_a_cold_folder_are_found_when_it_can_be_used_again(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        first = await keep(store, hot, file_of(1), seed=1)
        await store.demote(first.id)
    (cold / TEMPORARY).write_bytes(b"half a state")
    async with opened(cold):
        store = Store(hot, cold)
        assert (await store.open()).kept == ()
        assert store.unread
        assert (await store.look_again()).kept == ()
        assert store.trouble
        assert store.unread
    second, third = await keep(store, hot), await keep(store, hot)
    await store.demote(second.id)
    found = await store.look_again()
    assert [kept.id for kept in found.kept] == [first.id]
    assert not store.unread
    assert {kept.id: kept.tiers for kept in store.listing()} == {
        first.id: {Tier.COLD},
        second.id: {Tier.COLD},
        third.id: {Tier.HOT},
    }
    assert store.sizes()[Tier.COLD] == first.manifest.size + second.manifest.size
    assert TEMPORARY not in names_in(cold)
    assert await offered(store, hot, first.id) == file_of(1)
    await store.close()


async def test_a_copy_in_a_cold_folder_that_was_not_read_counts_when_it_is(hot: Path, cold: Path):
    """A process ended between the copy and the removal from the hot folder."""
    async with opened(hot, cold) as store:
        kept = await keep(store, hot)
        await store.copy_cold(kept.id)
    async with opened(cold):
        store = Store(hot, cold)
        await store.open()
    assert (await store.look_again()).kept == ()
    assert store.listing()[0].tiers == {Tier.HOT, Tier.COLD}
    await store.close()


async def test_snapshots_that_were_forgotten_while_a_disk_was_unmounted_are_found_again(
    hot: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("slotkeeper.store.trouble.RETRY_SECONDS", 0.0)
    async with opened(hot) as store:
        first, other = await keep(store, hot, file_of(1), seed=1), await keep(store, hot)
        away = unmounted(hot)
        await keep(store, hot)  # in the mount point, which is locked for this
        await store.look_again()
        with pytest.raises(MissingError):
            await store.offer(first.id, ENGINE)
        moved(hot, hot.with_name("mount point"))
        moved(away, hot)
        (hot / TEMPORARY).write_bytes(b"another lane may be writing it")
        assert not store.unread
        await keep(store, hot)
        assert store.unread
        assert [kept.id for kept in (await store.look_again()).kept] == [first.id]
        assert await offered(store, hot, first.id) == file_of(1)
        assert await offered(store, hot, other.id)
        assert TEMPORARY in names_in(hot)


async def test_a_disk_that_is_mounted_before_its_mount_point_is_swept_loses_nothing(
    hot: Path, monkeypatch: pytest.MonkeyPatch
):
    """The seal of the mount point is not that of the disk."""
    monkeypatch.setattr("slotkeeper.store.trouble.RETRY_SECONDS", 0.0)
    async with opened(hot) as store:
        kept = await keep(store, hot, file_of(1), seed=1)
        away = unmounted(hot)
        await keep(store, hot)
        with pytest.raises(MissingError):
            await store.offer(kept.id, ENGINE)
        moved(hot, hot.with_name("mount point"))
        moved(away, hot)
        assert [found.id for found in (await store.look_again()).kept] == [kept.id]
        assert await offered(store, hot, kept.id) == file_of(1)
