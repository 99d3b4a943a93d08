"""A folder for recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from unit.observe.room import Room


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path / "made" / "traces")
