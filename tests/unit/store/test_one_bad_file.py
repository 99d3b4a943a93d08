"""The disk cannot read one file while the sidecar runs: only that copy of the snapshot is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from slotkeeper.scheduler.types import Tier
from slotkeeper.store import files
from slotkeeper.store.trouble import StoreError, Trouble, UnfitError
from unit.store.saving import ENGINE, file_of, keep, names_in, offered, opened
from unit.store.test_folders import failing, refusing

BAD = [errno.EIO, errno.EUCLEAN, errno.EACCES]


@pytest.mark.parametrize("number", BAD)
async def test_a_snapshot_whose_file_cannot_be_read_is_lost_and_saves_continue(hot: Path, number: int):
    async with opened(hot) as store:
        bad, good = await keep(store, hot), await keep(store, hot)
        with refusing("open", f"{bad.id}.slot", number):
            with pytest.raises(UnfitError, match="cannot be read"):
                await store.offer(bad.id, ENGINE)
            assert await offered(store, hot, good.id)
            assert await keep(store, hot)
        assert store.trouble is None
        assert bad not in store.listing()
        assert f"slotkeeper-quarantine/{bad.id}.slot" in names_in(hot)


@pytest.mark.parametrize("number", BAD)
async def test_the_cold_copy_of_a_file_that_cannot_be_read_is_used(hot: Path, cold: Path, number: int):
    async with opened(hot, cold) as store:
        kept = await keep(store, hot, file_of(1), seed=1)
        await store.copy_cold(kept.id)
    async with opened(hot, cold) as store:  # which has not read the file yet
        error = OSError(number, os.strerror(number))
        with patch.object(files, "hash_bytes", side_effect=error):
            assert await offered(store, hot, kept.id) == file_of(1)
        assert store.trouble is None


async def test_a_cold_file_that_cannot_be_read_is_not_offered_again(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        kept = await keep(store, hot)
        await store.demote(kept.id)
        with refusing("open", str(cold / f"{kept.id}.slot"), errno.EIO), pytest.raises(UnfitError):
            await store.offer(kept.id, ENGINE)
        assert store.listing() == []
        assert store.trouble is None


async def test_a_copy_that_cannot_be_written_does_not_lose_its_source(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        kept = await keep(store, hot)
        with failing("fsync", errno.EIO), pytest.raises(StoreError):
            await store.copy_cold(kept.id)
        assert [found.tiers for found in store.listing()] == [{Tier.HOT}]


async def test_an_error_of_the_whole_folder_loses_no_snapshot(hot: Path):
    """As on a network file system whose server does not answer."""
    async with opened(hot) as store:
        kept = await keep(store, hot)
        with (
            refusing("open", str(hot), errno.EIO),
            refusing("stat", str(hot), errno.EIO),
            pytest.raises(StoreError) as caught,
        ):
            await store.offer(kept.id, ENGINE)
        assert caught.value.trouble is Trouble.BROKEN
        assert store.trouble is caught.value
        assert await offered(store, hot, kept.id)
