"""Other contents of a folder: other programs' files, links, leftovers of a kill, damaged files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from recipes import damaged, whole
from slotkeeper.store.folders import snapshot_folder
from slotkeeper.store.intake import SlotFileEdit
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import SnapshotError, StoreError, UnfitError
from unit.store.saving import ENGINE, SAVED, file_of, keep, mode, names_in, opened, owner

TEMPORARY = "slotkeeper-0123456789ab-01234567.tmp"


async def test_files_of_others_are_never_changed(hot: Path, cold: Path, tmp_path: Path):
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


async def test_leftovers_of_a_killed_sidecar_are_removed_when_the_folder_is_opened(hot: Path):
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


async def test_files_of_a_later_release_are_not_changed(hot: Path):
    async with opened(hot) as store:
        kept = await keep(store, hot)
    (hot / f"{kept.id}.json").write_bytes(b'{"format": 3}')
    async with opened(hot) as store:
        assert store.listing() == []
    assert names_in(hot) == {f"{kept.id}.slot", f"{kept.id}.json"}


async def test_a_temporary_file_that_is_being_written_is_kept(hot: Path):
    async with opened(hot) as store:
        name = await store.temporary()
        (hot / name).write_bytes(file_of(1))
        await store.open()
        assert await store.keep(name, SAVED)


@pytest.mark.parametrize("how", ["symlink", "hard link", "fifo", "folder", "dangling"])
@pytest.mark.parametrize("suffix", ["tmp", "slot", "json"])
async def test_links_and_special_files_are_not_followed(hot: Path, tmp_path: Path, how: str, suffix: str):
    """A file outside with a link under one of our names is neither read nor written nor removed."""
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
            with pytest.raises((StoreError, SnapshotError)):
                await store.keep(path.name, SAVED)
        elif suffix == "slot":
            with pytest.raises(UnfitError):
                await store.offer(kept.id, ENGINE)
    async with opened(hot) as store:
        assert store.listing() == []
    assert outside.read_bytes() == file_of(1)
    assert mode(outside) == 0o644


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
async def test_quarantine_does_not_follow_a_link_out_of_the_folder(hot: Path, tmp_path: Path, how: str):
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
    monkeypatch.setattr(snapshot_folder, "QUARANTINED", 3)
    async with opened(hot) as store:
        kept = [await keep(store, hot) for _ in range(5)]
        for one in kept:
            (hot / f"{one.id}.slot").write_bytes(b"x" * 10)
            with pytest.raises(UnfitError):
                await store.offer(one.id, ENGINE)
        assert len(names_in(hot)) == 3
        monkeypatch.setattr(snapshot_folder, "QUARANTINE_BYTES", 15)
        one = await keep(store, hot)
        (hot / f"{one.id}.slot").write_bytes(b"x" * 10)
        await damaged(store)
        assert names_in(hot) == {f"slotkeeper-quarantine/{one.id}.slot"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_files_stay_readable_for_an_engine_that_runs_as_another_user(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        name = await store.temporary()
        (hot / name).write_bytes(file_of(1))
        os.chown(hot / name, 12345, 12345)
        edited = replace(SAVED, edit=lambda _file, found: SlotFileEdit(recipe=whole(found)))
        kept = await store.keep(name, edited)
        await store.demote(kept.id)
        path = hot / await store.offer(kept.id, ENGINE)
        assert owner(path) == 12345
        assert mode(path) == 0o600
