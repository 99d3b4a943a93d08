"""Logging as it was."""

from __future__ import annotations

import logging

import pytest
import structlog


@pytest.fixture(autouse=True)
def as_before():
    """`configure` holds on to the streams of the test that called it."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers
    structlog.reset_defaults()
