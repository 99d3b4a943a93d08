"""The file systems of folders for snapshots: how much room they have. All functions block."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from slotkeeper.engine.child.memory import free_memory
from slotkeeper.scheduler.slots.slot_contents import Tier
from slotkeeper.scheduler.snapshots.budgets import FolderRoom
from slotkeeper.store import files

MOUNTS: Final = Path("/proc/self/mountinfo")
OF_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
BLOCK: Final = 512  # bytes, the unit of st_blocks


def rooms_of(folders: Mapping[Tier, Path]) -> dict[Tier, FolderRoom]:
    """Measure the file system of each folder, without our files there; leave out those that fail.

    A folder that does not exist yet will be made, so the folder above it counts.
    """
    there = {
        tier: next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), folder)
        for tier, folder in folders.items()
    }
    found, ours = dict[Tier, tuple[int, os.statvfs_result]](), dict[int, int]()
    for tier, folder in there.items():
        with suppress(OSError):
            device = folder.stat().st_dev
            found[tier] = device, os.statvfs(folder)
            ours[device] = ours.get(device, 0) + taken(folder)
    in_memory = {device for device, _ in found.values()} & _devices_of_memory()
    return {
        tier: _room(device, system, ours[device], in_memory=device in in_memory)
        for tier, (device, system) in found.items()
    }


def _room(device: int, system: os.statvfs_result, ours: int, *, in_memory: bool) -> FolderRoom:
    total, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    if in_memory and (memory := free_memory()) is not None:
        free = min(free, memory) if total else memory  # a tmpfs without a limit says 0 of 0
    return FolderRoom(total=total, free=free + ours, device=device, in_memory=in_memory)


def taken(folder: Path) -> int:
    """Return the bytes on disk of our files in a folder, also unfinished ones. Raises OSError."""
    total = _sum(folder, lambda name: files.ours(name) is not None)
    with suppress(FileNotFoundError, NotADirectoryError):  # only a cold folder has it
        total += _sum(folder / files.RUN_FOLDER, lambda _: True)
    return total


def _sum(folder: Path, ours: Callable[[str], bool]) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if ours(entry.name):
                with suppress(FileNotFoundError):  # it has just been removed
                    total += entry.stat(follow_symlinks=False).st_blocks * BLOCK
    return total


def _devices_of_memory() -> set[int]:
    """Return the device numbers of file systems in memory; none where the system does not tell."""
    devices = set()
    with suppress(OSError, ValueError):
        for line in MOUNTS.read_text("utf-8", "replace").splitlines():
            before, _, after = line.partition(" - ")  # optional fields end with a dash
            if after.split(" ", 1)[0] in OF_MEMORY:
                major, minor = map(int, before.split()[2].split(":"))
                devices.add(os.makedev(major, minor))
    return devices
