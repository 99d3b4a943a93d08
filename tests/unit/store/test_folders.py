"""Folders that are full, read-only, missing, slow or taken: reported, survived, and used again afterwards."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from patience import PATIENCE
from slotkeeper.scheduler.types import Tier
from slotkeeper.store import files
from slotkeeper.store.folders import snapshot_folder
from slotkeeper.store.folders.snapshot_folder import SnapshotFolder
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import ADVICE, MissingError, StoreError, Trouble, UnfitError
from unit.store.saving import ENGINE, SAVED, file_of, keep, names_in, offered, opened


@contextmanager
def failing(name: str, number: int) -> Iterator[None]:
    """Make a system call fail."""
    with patch.object(os, name, side_effect=OSError(number, os.strerror(number))):
        yield


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """Mount a file system; only root can."""
    folder.mkdir(exist_ok=True)
    if system("mount", "-t", "tmpfs", "-o", options, "slotkeeper-test", str(folder)):
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        assert system("umount", str(folder)) == 0


def system(program: str, *words: str) -> int:
    path = shutil.which(program)
    return subprocess.run([path, *words], capture_output=True, check=False).returncode if path else 1


async def test_a_full_disk_is_a_trouble_that_ends_when_there_is_room_again(hot: Path):
    with mounted(hot, f"size={snapshot_folder.RESERVE + (1 << 20)}"):
        async with opened(hot) as store:
            kept = await keep(store, hot)
            with pytest.raises(StoreError, match=r"66 MiB are needed and 6\d MiB are free") as caught:
                await store.temporary(2 << 20)
            assert caught.value.trouble is Trouble.DISK_FULL
            assert store.trouble is caught.value
            ballast = hot / "a user's own file"
            ballast.write_bytes(b"x" * (1 << 20))
            with pytest.raises(StoreError):
                await store.temporary()
            assert await offered(store, hot, kept.id)  # existing snapshots can be used
            ballast.unlink()
            assert await keep(store, hot)
            assert store.trouble is None
            ballast.write_bytes(b"x" * (1 << 20))
        store = Store(hot)
        found = await store.open()
        assert len(found.kept) == 2
        assert ["No room" in note for note in found.notes] == [True]
        assert await offered(store, hot, kept.id)
        await store.close()


@pytest.mark.parametrize(
    ("number", "trouble"),
    [
        (errno.ENOSPC, Trouble.DISK_FULL),
        (errno.EDQUOT, Trouble.DISK_FULL),
        (errno.EFBIG, Trouble.DISK_FULL),
        (errno.EROFS, Trouble.READ_ONLY),
        (errno.EACCES, Trouble.NOT_OURS),
        (errno.EIO, Trouble.BROKEN),
        (errno.ESTALE, Trouble.MISSING_FOLDER),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "open", "utime", "fstat"])
async def test_every_system_error_is_reported_and_leaves_no_file(
    hot: Path, call: str, number: int, trouble: Trouble
):
    async with opened(hot) as store:
        name = await store.temporary()
        (hot / name).write_bytes(file_of(1))
        with failing(call, number), pytest.raises(StoreError) as caught:
            await store.keep(name, SAVED)
        assert caught.value.trouble is trouble
        assert str(caught.value).endswith(ADVICE[trouble])
        assert store.trouble is caught.value
        assert names_in(hot) == set()
        assert store.listing() == []


async def test_a_failed_folder_is_tried_again_later_and_recovers(hot: Path, monkeypatch: pytest.MonkeyPatch):
    async with opened(hot) as store:
        with failing("fsync", errno.ENOSPC), pytest.raises(StoreError):
            await keep(store, hot)
        with pytest.raises(StoreError):  # not tried again at once
            await store.temporary()
        monkeypatch.setattr("slotkeeper.store.trouble.RETRY_SECONDS", 0.0)
        with failing("statvfs", errno.EIO), pytest.raises(StoreError, match="Input/output"):
            await store.temporary()
        assert await keep(store, hot)
        assert store.trouble is None


async def test_a_read_only_folder_is_reported_when_it_is_opened(hot: Path):
    with mounted(hot, "size=70m"):
        async with opened(hot) as store:
            await keep(store, hot)
        system("mount", "-o", "remount,ro", str(hot))
        store = Store(hot)
        with pytest.raises(StoreError, match="Mount it writable") as caught:
            await store.open()
        assert caught.value.trouble is Trouble.READ_ONLY
        await store.close()


@contextmanager
def refusing(call: str, name: str, number: int) -> Iterator[None]:
    """Make a system call fail for the paths that contain `name`."""
    real = getattr(os, call)

    def refuse(path: Any, *words: Any, **more: Any) -> Any:
        if name in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *words, **more)

    with patch.object(os, call, refuse):
        yield


@pytest.mark.parametrize("suffix", ["slot", "json"])
@pytest.mark.parametrize(
    ("number", "advice"), [(errno.EACCES, "(chown), mode 0700."), (errno.EIO, "wrong with this disk.")]
)
async def test_files_that_cannot_be_read_are_left_alone_and_the_others_are_used(
    hot: Path, suffix: str, number: int, advice: str
):
    async with opened(hot) as store:
        bad, good, worse = [await keep(store, hot) for _ in range(3)]
    before = names_in(hot)
    store = Store(hot)
    with refusing("open", f"{bad.id}.{suffix}", number), refusing("open", f"{worse.id}.{suffix}", number):
        found = await store.open()
    assert found.kept == (good,)
    (note,) = found.notes
    assert f"{bad.id} and 1 more" in note
    assert note.endswith(advice)
    assert names_in(hot) == before
    assert len((await store.open()).kept) == 3
    await store.close()


async def test_a_file_that_cannot_be_removed_does_not_keep_the_store_closed(hot: Path):
    temporary = "slotkeeper-0123456789ab-01234567.tmp"
    async with opened(hot) as store:
        kept, half = await keep(store, hot), await keep(store, hot)
    (hot / temporary).write_bytes(b"half a state")
    (hot / f"{half.id}.json").unlink()
    store = Store(hot)
    with refusing("unlink", temporary, errno.EPERM), refusing("unlink", half.id, errno.EPERM):
        found = await store.open()
    assert found.kept == (kept,)
    assert len(found.notes) == 1
    await store.close()


async def test_a_file_that_disappears_during_the_sweep_is_not_missed(hot: Path):
    async with opened(hot) as store:
        gone, kept = await keep(store, hot), await keep(store, hot)
    store = Store(hot)
    with refusing("open", f"{gone.id}.slot", errno.ENOENT):
        found = await store.open()
    assert (found.kept, found.notes) == ((kept,), ())
    await store.close()


@pytest.mark.parametrize(("call", "name"), [("mkdir", "quarantine"), ("replace", ".slot")])
async def test_a_damaged_file_that_cannot_be_set_aside_is_removed(hot: Path, call: str, name: str):
    """On a full disk there may be no room for the folder of the quarantine."""
    async with opened(hot) as store:
        bad, kept = await keep(store, hot), await keep(store, hot)
        (hot / f"{bad.id}.slot").write_bytes(b"damaged")
        with refusing(call, name, errno.ENOSPC), pytest.raises(UnfitError):
            await store.offer(bad.id, ENGINE)
        assert store.trouble is None
        assert names_in(hot) == {f"{kept.id}.slot", f"{kept.id}.json"}


async def test_a_folder_that_became_read_only_still_offers_its_snapshots(hot: Path):
    """The kernel remounts it after disk errors: times cannot be set back, so every file is hashed again."""
    async with opened(hot) as store:
        kept = await keep(store, hot, file_of(1), seed=1)
        with (
            failing("utime", errno.EROFS),
            patch.object(files, "hash_bytes", wraps=files.hash_bytes) as hashed,
        ):
            await store.verify(kept.id)
            assert await offered(store, hot, kept.id) == file_of(1)
            assert await offered(store, hot, kept.id) == file_of(1)
            assert hashed.call_count == 3
        assert store.trouble is None


@pytest.mark.parametrize("unmounts", [False, True], ids=["removed", "unmounted"])
async def test_a_missing_folder_is_reported_and_loses_no_snapshot_until_it_is_back(
    hot: Path, unmounts: bool, monkeypatch: pytest.MonkeyPatch
):
    """The mount point of an unmounted disk is an empty folder."""
    monkeypatch.setattr("slotkeeper.store.trouble.RETRY_SECONDS", 0.0)
    async with opened(hot) as store:
        kept = await keep(store, hot)
        away = unmounted(hot) if unmounts else moved(hot, hot.with_name("away"))
        with pytest.raises(StoreError) as caught:
            await store.offer(kept.id, ENGINE)
        assert caught.value.trouble is Trouble.MISSING_FOLDER
        if unmounts:
            moved(hot, hot.with_name("mount point"))
        moved(away, hot)
        assert await offered(store, hot, kept.id)
        assert await keep(store, hot)
        (hot / f"{kept.id}.slot").unlink()
        with pytest.raises(MissingError):
            await store.offer(kept.id, ENGINE)


async def test_what_is_saved_when_a_folder_is_mounted_again_has_that_folders_seal(
    hot: Path, monkeypatch: pytest.MonkeyPatch
):
    """Meanwhile states are saved in the mount point, which is another folder."""
    monkeypatch.setattr("slotkeeper.store.trouble.RETRY_SECONDS", 0.0)
    async with opened(hot) as store:
        first = await keep(store, hot)
        away = unmounted(hot)
        lost = await keep(store, hot)
        moved(hot, hot.with_name("mount point"))
        moved(away, hot)
        with pytest.raises(StoreError):  # a third sidecar's
            async with opened(hot.with_name("mount point")):
                pass
        second = await keep(store, hot)
        async with opened(hot.with_name("mount point")) as other:
            assert [kept.id for kept in other.listing()] == [lost.id]
        assert await offered(store, hot, first.id)
        with pytest.raises(MissingError):
            await store.offer(lost.id, ENGINE)
    async with opened(hot) as store:
        assert {kept.id for kept in store.listing()} == {first.id, second.id}


async def test_a_file_in_place_of_the_folder_is_reported(tmp_path: Path):
    (tmp_path / "hot").write_bytes(b"")
    store = Store(tmp_path / "hot")
    with pytest.raises(StoreError):
        await store.open()
    assert store.trouble
    await store.close()


async def test_a_folder_can_be_opened_by_one_sidecar_only(hot: Path):
    async with opened(hot) as first:
        second = Store(hot)
        with pytest.raises(StoreError, match="folder of its own") as caught:
            await second.open()
        assert caught.value.trouble is Trouble.IN_USE
        kept = await keep(first, hot)
    assert (await second.open()).kept == (kept,)  # the first sidecar ended
    await second.close()


def test_two_lanes_that_claim_a_folder_at_once_are_one_sidecar(hot: Path, monkeypatch: pytest.MonkeyPatch):
    folder, failed, real = SnapshotFolder(hot, Tier.HOT), list[Exception](), fcntl.flock

    def claim() -> None:
        try:
            folder.claim()
        except (StoreError, ValueError) as error:
            failed.append(error)

    other = threading.Thread(target=claim)

    def during(*words: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        other.start()
        other.join(0.2)  # meanwhile it would meet the lock
        real(*words)

    monkeypatch.setattr(fcntl, "flock", during)
    claim()
    other.join(PATIENCE)
    assert failed == []
    folder.demand(0)  # the lock is open
    assert folder.ready
    folder.close()


async def test_the_store_continues_without_a_cold_tier_that_is_in_use(hot: Path, cold: Path):
    async with opened(cold):
        store = Store(hot, cold)
        found = await store.open()
        assert ["no cold tier" in note for note in found.notes] == [True]
        kept = await keep(store, hot)
        with pytest.raises(StoreError):
            await store.demote(kept.id)
    await store.demote(kept.id)  # the sidecar that used it has ended
    assert store.listing()[0].tiers == {Tier.COLD}
    await store.close()


async def test_a_slow_folder_is_reported_and_still_used(
    hot: Path, cold: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("slotkeeper.store.trouble.TELLING_BYTES", 1)
    monkeypatch.setattr("slotkeeper.store.trouble.SLOW_BYTES_PER_SECOND", 1e15)
    async with opened(hot, cold) as store:
        kept = await keep(store, hot)
        assert store.trouble
        assert store.trouble.trouble is Trouble.SLOW
        assert "MB/s" in str(store.trouble)
        await store.temporary()
        monkeypatch.setattr("slotkeeper.store.trouble.SLOW_BYTES_PER_SECOND", 0.0)
        await store.verify(kept.id)
        assert store.trouble is None


def unmounted(path: Path) -> Path:
    """Leave an empty folder in place of this one, and return where it is now."""
    away = moved(path, path.with_name("away"))
    path.mkdir()
    return away


def moved(path: Path, target: Path) -> Path:
    return path.rename(target)
