"""How much room the file systems of the folders have, with and without our files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slotkeeper.scheduler.types import Tier
from slotkeeper.store import files
from slotkeeper.store.folders import snapshot_folder
from slotkeeper.store.folders.snapshot_folder import rooms_of, taken
from slotkeeper.store.store import Store
from slotkeeper.system import posix

MIB = 1 << 20


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return [total, free] in MiB of every file system, which a test changes."""
    sizes = [1000, 400]

    def statvfs(_: object) -> os.statvfs_result:
        return os.statvfs_result((MIB, MIB, sizes[0], sizes[1] + 7, sizes[1], 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    return sizes


def put(folder: Path, size: int) -> int:
    """Write a file that could be one of ours, and return its bytes on disk."""
    path = folder / files.new_temporary(0.0)
    path.write_bytes(os.urandom(size))
    return path.stat().st_blocks * 512


def test_what_our_files_take_counts_as_free(hot: Path, cold: Path, disk: list[int]):
    hot.mkdir()
    (hot / "strangers.bin").write_bytes(os.urandom(3 * MIB))
    ours = put(hot, MIB) + put(hot, 3)
    assert ours == taken(hot) >= MIB
    (hot / files.RUN_FOLDER).mkdir()
    ours += put(hot / files.RUN_FOLDER, MIB)
    found = rooms_of({Tier.HOT: hot, Tier.COLD: cold})
    assert found[Tier.HOT] == found[Tier.COLD], "one file system, and the cold folder is not made yet"
    assert found[Tier.HOT].total == 1000 * MIB
    assert found[Tier.HOT].free == 400 * MIB + ours


@pytest.mark.parametrize(("kind", "in_memory"), [("tmpfs", True), ("ramfs", True), ("ext4", False)])
def test_a_tmpfs_has_no_more_room_than_the_machine_has_memory(
    kind: str, in_memory: bool, hot: Path, disk: list[int], monkeypatch: pytest.MonkeyPatch
):
    hot.mkdir()
    device = hot.stat().st_dev
    mounts = hot.parent / "mounts"
    mounts.write_text(
        "21 1 0:4 / /proc rw - proc proc rw\n"
        f"36 35 {os.major(device)}:{os.minor(device)} / /ours rw shared:1 - {kind} none rw\n"
    )
    monkeypatch.setattr(posix, "MOUNTS", mounts)
    monkeypatch.setattr(snapshot_folder, "free_memory", lambda: 100 * MIB)
    found = rooms_of({Tier.HOT: hot})[Tier.HOT]
    assert (found.in_memory, found.free) == (in_memory, (100 if in_memory else 400) * MIB)
    disk[:] = [0, 0]  # without a limit of its own
    assert rooms_of({Tier.HOT: hot})[Tier.HOT].free == (100 * MIB if in_memory else 0)


def test_a_folder_that_cannot_be_looked_at_is_left_out(hot: Path, monkeypatch: pytest.MonkeyPatch):
    def stale(_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "statvfs", stale)
    assert rooms_of({Tier.HOT: hot}) == {}


async def test_a_store_measures_its_own_folders_before_it_is_open(hot: Path, cold: Path):
    store = Store(hot, cold)
    assert set(await store.rooms()) == {Tier.HOT, Tier.COLD}
    await store.close()
