"""What every unit test leaves behind as it was."""

from __future__ import annotations

import logging

import pytest
import structlog


@pytest.fixture(autouse=True)
def logs_as_before():
    """`configure` and commands set logging up for their process; the streams of a test do not outlive it."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers
    structlog.reset_defaults()
