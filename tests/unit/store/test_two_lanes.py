"""Two lanes that take a folder's lock at the same moment."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE
from slotkeeper.scheduler.slots.slot_contents import Tier
from slotkeeper.store.folders.snapshot_folder import SnapshotFolder
from slotkeeper.store.trouble import StoreError

MOMENT = 0.2  # seconds in which the other thread would meet the lock


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
        other.join(MOMENT)
        real(*words)

    monkeypatch.setattr(fcntl, "flock", during)
    claim()
    other.join(PATIENCE)
    assert failed == []
    folder.demand(0)  # the lock is open
    assert folder.ready
    folder.close()
