"""Logging as it was, and a folder for recordings."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import structlog

from unit.observe.room import Room


@pytest.fixture(autouse=True)
def as_before():
    """`configure` holds on to the streams of the test that called it."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers
    structlog.reset_defaults()


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path / "made" / "traces")
