"""Folders that cannot be used, files that are not ours, and what is swept at the start."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from slotkeeper.core.snapshots import Tier
from slotkeeper.core.tokens import Tokens
from slotkeeper.engine.slotfile import whole
from slotkeeper.store import files, health, shelf
from slotkeeper.store.intake import Edit, Saved
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import ADVICE, SnapshotError, StoreError, Trouble, UnfitError
from unit.store.saving import ENGINE, file_of, ids, keep, mode, names_in, offered, opened, owner

TEMPORARY = "slotkeeper-0123456789ab-01234567.tmp"


@pytest.fixture
def hot(tmp_path: Path) -> Path:
    return tmp_path / "hot"


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@contextmanager
def failing(name: str, number: int) -> Iterator[None]:
    """A call of the system's that is refused."""
    with patch.object(files.os, name, side_effect=OSError(number, os.strerror(number))):
        yield


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system of its own; only root can."""
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


async def test_a_full_disk_is_a_trouble_that_ends(hot: Path):
    with mounted(hot, f"size={shelf.RESERVE + (1 << 20)}"):
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
            assert await offered(store, hot, kept.id)  # what is there can be used
            ballast.unlink()
            assert await keep(store, hot)
            assert store.trouble is None


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
async def test_whatever_the_system_refuses_is_told_and_leaves_nothing(
    hot: Path, call: str, number: int, trouble: Trouble
):
    async with opened(hot) as store:
        name = await store.temporary()
        (hot / name).write_bytes(file_of(1))
        saved = Saved(fingerprint=ENGINE, tokens=Tokens(ids(1)), written=len(file_of(1)))
        with failing(call, number), pytest.raises(StoreError) as caught:
            await store.keep(name, saved)
        assert caught.value.trouble is trouble
        assert str(caught.value).endswith(ADVICE[trouble])
        assert store.trouble is caught.value
        assert names_in(hot) == set()
        assert store.listing() == []


async def test_it_recovers_by_itself(hot: Path, monkeypatch: pytest.MonkeyPatch):
    async with opened(hot) as store:
        with failing("fsync", errno.ENOSPC), pytest.raises(StoreError):
            await keep(store, hot)
        with pytest.raises(StoreError):  # not tried again at once
            await store.temporary()
        monkeypatch.setattr(health, "RETRY_SECONDS", 0.0)
        with failing("statvfs", errno.EIO), pytest.raises(StoreError, match="Input/output"):
            await store.temporary()
        assert await keep(store, hot)
        assert store.trouble is None


async def test_a_disk_that_fills_in_the_middle_of_an_edit(hot: Path, monkeypatch: pytest.MonkeyPatch):
    def short(_out: object, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with opened(hot) as store:
        monkeypatch.setattr(files, "_write", short)
        with pytest.raises(StoreError, match="Free some space"):
            await keep(store, hot, edit=lambda _file, _files: Edit(recipe=(b"some bytes",)))
        assert names_in(hot) == set()


async def test_a_read_only_folder(hot: Path):
    with mounted(hot, "size=70m"):
        async with opened(hot) as store:
            await keep(store, hot)
        system("mount", "-o", "remount,ro", str(hot))
        store = Store(hot)
        with pytest.raises(StoreError, match="Mount it writable") as caught:
            await store.open()
        assert caught.value.trouble is Trouble.READ_ONLY
        await store.close()


async def test_a_folder_that_became_read_only_still_gives(hot: Path):
    """As the kernel makes it after errors of the disk: nothing can be dated back, so all is hashed anew."""
    async with opened(hot) as store:
        kept = await keep(store, hot, file_of(1), seed=1)
        with (
            failing("utime", errno.EROFS),
            patch.object(shelf.files, "hash_bytes", wraps=files.hash_bytes) as hashed,
        ):
            await store.verify(kept.id)
            assert await offered(store, hot, kept.id) == file_of(1)
            assert await offered(store, hot, kept.id) == file_of(1)
            assert hashed.call_count == 3
        assert store.trouble is None


async def test_a_folder_that_is_gone(hot: Path, monkeypatch: pytest.MonkeyPatch):
    async with opened(hot) as store:
        kept = await keep(store, hot)
        away = moved(hot, hot.with_name("away"))
        with pytest.raises(StoreError) as caught:
            await store.offer(kept.id, ENGINE)
        assert caught.value.trouble is Trouble.MISSING_FOLDER
        moved(away, hot)
        monkeypatch.setattr(health, "RETRY_SECONDS", 0.0)
        assert await keep(store, hot)
        assert await offered(store, hot, kept.id)


async def test_a_folder_that_is_a_file(tmp_path: Path):
    (tmp_path / "hot").write_bytes(b"")
    store = Store(tmp_path / "hot")
    with pytest.raises(StoreError):
        await store.open()
    assert store.trouble
    await store.close()


async def test_one_sidecar_for_each_folder(hot: Path):
    async with opened(hot) as first:
        second = Store(hot)
        with pytest.raises(StoreError, match="folder of its own") as caught:
            await second.open()
        assert caught.value.trouble is Trouble.IN_USE
        kept = await keep(first, hot)
    assert (await second.open()).kept == (kept,)  # the first one ended
    await second.close()


async def test_without_a_cold_tier_it_goes_on(hot: Path, cold: Path):
    async with opened(cold):
        store = Store(hot, cold)
        found = await store.open()
        assert ["no cold tier" in note for note in found.notes] == [True]
        kept = await keep(store, hot)
        with pytest.raises(StoreError):
            await store.demote(kept.id)
    await store.demote(kept.id)  # whoever had it has ended
    assert store.listing()[0].tiers == {Tier.COLD}
    await store.close()


async def test_a_slow_folder_is_told_and_used(hot: Path, cold: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health, "TELLING_BYTES", 1)
    monkeypatch.setattr(health, "SLOW_BYTES_PER_SECOND", 1e15)
    async with opened(hot, cold) as store:
        kept = await keep(store, hot)
        assert store.trouble
        assert store.trouble.trouble is Trouble.SLOW
        assert "MB/s" in str(store.trouble)
        await store.temporary()
        monkeypatch.setattr(health, "SLOW_BYTES_PER_SECOND", 0.0)
        await store.verify(kept.id)
        assert store.trouble is None


async def test_what_is_not_ours_is_never_touched(hot: Path, cold: Path, tmp_path: Path):
    theirs = {
        "notes.slot": b"a user's own state",
        "slotkeeper.slot": b"",
        "slotkeeper-2.tmp": b"",
        "SLOTKEEPER-0123456789AB-01234567.tmp": b"",
        TEMPORARY + "x": b"",
        "quarantine": b"",
    }
    for folder in (hot, cold):
        folder.mkdir()
        for name, data in theirs.items():
            (folder / name).write_bytes(data)
        (folder / TEMPORARY).mkdir()
        (folder / TEMPORARY.replace("tmp", "slot")).mkdir()
    async with opened(hot, cold) as store:
        kept = await keep(store, hot)
        await store.demote(kept.id)
        await store.forget(kept.id)
    for folder in (hot, cold):
        assert {name: (folder / name).read_bytes() for name in names_in(folder)} == theirs
        assert (folder / TEMPORARY).is_dir()


async def test_what_a_kill_left_is_swept(hot: Path):
    async with opened(hot) as store:
        a, b, c, d = [await keep(store, hot) for _ in range(4)]
    (hot / TEMPORARY).write_bytes(b"half a state")
    (hot / f"{a.id}.json").unlink()
    (hot / f"{b.id}.slot").unlink()
    (hot / f"{c.id}.slot").write_bytes(file_of(999))
    later = Store(hot)
    found = await later.open()
    await later.close()
    assert [kept.id for kept in found.kept] == [d.id]
    assert len(found.notes) == 3
    assert names_in(hot) == {f"{d.id}.slot", f"{d.id}.json", f"slotkeeper-quarantine/{c.id}.slot"}


async def test_what_a_later_release_wrote_is_left_alone(hot: Path):
    async with opened(hot) as store:
        kept = await keep(store, hot)
    (hot / f"{kept.id}.json").write_bytes(b'{"format": 2}')
    async with opened(hot) as store:
        assert store.listing() == []
    assert names_in(hot) == {f"{kept.id}.slot", f"{kept.id}.json"}


async def test_a_temporary_file_that_is_being_written_is_spared(hot: Path):
    async with opened(hot) as store:
        name = await store.temporary()
        (hot / name).write_bytes(file_of(1))
        await store.open()
        saved = Saved(fingerprint=ENGINE, tokens=Tokens(ids(1)), written=len(file_of(1)))
        assert await store.keep(name, saved)


@pytest.mark.parametrize("how", ["symlink", "hard link", "fifo", "folder", "dangling"])
@pytest.mark.parametrize("suffix", ["tmp", "slot", "json"])
async def test_no_link_is_followed(hot: Path, tmp_path: Path, how: str, suffix: str):
    """Neither read nor written nor removed: a file outside, behind a name of ours."""
    outside = tmp_path / "outside"
    outside.write_bytes(file_of(1))
    outside.chmod(0o644)
    async with opened(hot) as store:
        if suffix == "tmp":
            path = hot / await store.temporary()
        else:
            kept = await keep(store, hot, file_of(1), seed=1)
            path = hot / f"{kept.id}.{suffix}"
            path.unlink()
        trick(path, how, outside)
        if suffix == "tmp":
            saved = Saved(fingerprint=ENGINE, tokens=Tokens(ids(1)), written=len(file_of(1)))
            with pytest.raises((StoreError, SnapshotError)):
                await store.keep(path.name, saved)
        elif suffix == "slot":
            with pytest.raises(UnfitError):
                await store.offer(kept.id, ENGINE)
    async with opened(hot) as store:
        assert store.listing() == []
    assert outside.read_bytes() == file_of(1)
    assert mode(outside) == 0o644


def moved(path: Path, target: Path) -> Path:
    return path.rename(target)


def trick(path: Path, how: str, outside: Path) -> None:
    match how:
        case "symlink":
            path.symlink_to(outside)
        case "dangling":
            path.symlink_to(outside.with_name("nowhere"))
        case "hard link":
            path.hardlink_to(outside)
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()


@pytest.mark.parametrize("how", ["symlink", "file"])
async def test_quarantine_does_not_lead_out(hot: Path, tmp_path: Path, how: str):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with opened(hot) as store:
        kept = await keep(store, hot)
        aside = hot / "slotkeeper-quarantine"
        aside.symlink_to(elsewhere) if how == "symlink" else aside.write_bytes(b"")
        (hot / f"{kept.id}.slot").write_bytes(b"damaged")
        with pytest.raises(UnfitError):
            await store.offer(kept.id, ENGINE)
        assert list(elsewhere.iterdir()) == []
        assert not (hot / f"{kept.id}.slot").exists()


async def test_quarantine_is_bounded(hot: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shelf, "QUARANTINED", 3)
    async with opened(hot) as store:
        kept = [await keep(store, hot) for _ in range(5)]
        for one in kept:
            (hot / f"{one.id}.slot").write_bytes(b"x" * 10)
            with pytest.raises(UnfitError):
                await store.offer(one.id, ENGINE)
        assert len(names_in(hot)) == 3
        monkeypatch.setattr(shelf, "QUARANTINE_BYTES", 15)
        one = await keep(store, hot)
        (hot / f"{one.id}.slot").write_bytes(b"x" * 10)
        await store.verify_all()
        assert names_in(hot) == {f"slotkeeper-quarantine/{one.id}.slot"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_where_the_engine_is_another_user_it_can_read_what_we_write(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        name = await store.temporary()
        (hot / name).write_bytes(file_of(1))
        os.chown(hot / name, 12345, 12345)
        saved = Saved(
            fingerprint=ENGINE,
            tokens=Tokens(ids(1)),
            written=len(file_of(1)),
            edit=lambda _file, found: Edit(recipe=whole(found[0])),
        )
        kept = await store.keep(name, saved)
        await store.demote(kept.id)
        path = hot / await store.offer(kept.id, ENGINE)
        assert owner(path) == 12345
        assert mode(path) == 0o600
