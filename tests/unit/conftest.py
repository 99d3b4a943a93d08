"""Fixtures for the tests of several packages."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def hot(tmp_path: Path) -> Path:
    return tmp_path / "hot"


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"
