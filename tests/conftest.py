"""For all tests: what one leaves as it found it, how hypothesis searches, and what `make test` runs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
import pytest
import structlog

# How quick the machine is says nothing about us: no deadline. What fails prints how to see it again.
hypothesis.settings.register_profile(
    "search",  # `make search`: examples that nobody has seen
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
    derandomize=False,
)
# A change must not be refused for a fault that it did not make: here the examples are always the same.
hypothesis.settings.register_profile(
    "slotkeeper", hypothesis.settings.get_profile("search"), derandomize=True
)
hypothesis.settings.load_profile("slotkeeper")

PYTESTS_OWN = "PYTEST_CURRENT_TEST"  # it changes with each phase of a test


@pytest.hookimpl(tryfirst=True)  # before marks are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every second case of an `alternating` test as `remaining`.

    Neighbours on the grid of parameters take turns: each case runs on one build, each build with every second
    case. Where the build is the only parameter, the test's name decides.
    """
    for item in items:
        grid = item.callspec.indices if hasattr(item, "callspec") else {}
        if isinstance(item, pytest.Function) and "build" in grid and item.get_closest_marker("alternating"):
            # Parameters that are given together have one index: it counts once.
            at = grid["build"] + sum({index for name, index in grid.items() if name != "build"})
            if len(grid) == 1:
                at += zlib.crc32(item.originalname.encode())
            if at % 2:
                item.add_marker("remaining")


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Commands set things up for their whole process: give them back, whatever folder the test is in.

    Logging above all: a logger that is bound to the stderr of one test fails in the next one, because pytest
    closes that stream.
    """
    with _logging(), _structlog(), _environment(), _folder(), _signal_handlers(), _event_loop_policy():
        yield


@contextmanager
def _logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.disable(disabled)


@contextmanager
def _structlog() -> Iterator[None]:
    before = structlog.get_config() if structlog.is_configured() else None
    yield
    structlog.reset_defaults()
    if before is not None:
        structlog.configure(**before)


@contextmanager
def _environment() -> Iterator[None]:
    def read() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name != PYTESTS_OWN}

    before = read()
    yield
    after = read()
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if after.get(name) != value})


@contextmanager
def _folder() -> Iterator[None]:
    before = os.open(".", os.O_RDONLY)  # by descriptor: it may have been moved or removed
    try:
        yield
        os.fchdir(before)
    finally:
        os.close(before)


@contextmanager
def _signal_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in signal.Signals}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:  # None: not set from Python
            signal.signal(number, handler)


@contextmanager
def _event_loop_policy() -> Iterator[None]:
    before = _quietly(asyncio.get_event_loop_policy)
    yield
    if _quietly(asyncio.get_event_loop_policy) is not before:
        _quietly(asyncio.set_event_loop_policy, before)


def _quietly(call: Callable[..., Any], *args: Any) -> Any:
    """Python 3.14 deprecates policies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return call(*args)
