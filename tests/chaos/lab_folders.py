"""Faults of a slot folder, and how to end them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


def call(*words: str) -> None:
    """Run a command that mounts or unmounts; skip the test if that is not permitted."""
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault of the folder, how to end it, and its names in metric and log."""

    comes: Callable[[Path], object]
    goes: Callable[[Path], object]
    outcome: str
    said: str


def fill(folder: Path) -> None:
    """Fill the disk to the last byte, so that the engine's files have no room either."""
    free = shutil.disk_usage(folder).free
    (folder / "filler").write_bytes(bytes(free))


def write_protect(folder: Path) -> None:
    """Write-protect the folder by a second mount over the first, which has files open for writing."""
    call("mount", "--bind", str(folder), str(folder))
    call("mount", "-o", "remount,bind,ro", str(folder))


FULL = Trouble(fill, lambda folder: (folder / "filler").unlink(), "disk_full", "Free some space there")
READ_ONLY = Trouble(
    write_protect, lambda folder: call("umount", str(folder)), "read_only", "Mount it writable"
)
REMOVED = Trouble(
    shutil.rmtree, lambda folder: folder.mkdir(exist_ok=True), "missing_folder", "Make the folder"
)
