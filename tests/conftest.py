"""For all tests: restoring of process state, profiles of hypothesis, and the cases that `make test` runs."""

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

# No deadline: a slow machine is no failure. A failure prints how to reproduce it.
hypothesis.settings.register_profile(
    "search",  # `make search`: new random examples
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
    derandomize=False,
)
# A change must not fail for a fault that it did not make, so these examples are always the same.
hypothesis.settings.register_profile(
    "slotkeeper", hypothesis.settings.get_profile("search"), derandomize=True
)
hypothesis.settings.load_profile("slotkeeper")

ONE_IN = 4  # cases of tests that run on two builds of the engine
PYTESTS_OWN = "PYTEST_CURRENT_TEST"  # pytest changes it with each phase of a test


@pytest.hookimpl(tryfirst=True)  # before marks are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `make test` leaves to `make test-remaining`, and those of `make test-twins`.

    `make test` runs one in ONE_IN of the cases of tests with a build, and one in N of slow tests, which have
    the mark `one_in(N)`; CI runs both commands. A slow case runs on one build in them, and its twin on the
    other build in `make test-twins`. Neighbours on the grid of parameters differ, so each build gets its
    share.
    """
    for item in items:
        grid = item.callspec.indices if hasattr(item, "callspec") else {}
        slow = item.get_closest_marker("one_in")
        one_in = slow.args[0] if slow else ONE_IN if "build" in grid else 1
        # Parameters that are given together have one index, which counts once.
        at = grid.get("build", 0) + sum({index for name, index in grid.items() if name != "build"})
        at += zlib.crc32(item.originalname.encode()) if isinstance(item, pytest.Function) else 0
        if at % one_in:
            item.add_marker("twin" if slow and "build" in grid and at % 2 else "remaining")


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Restore the state of the process after each test, since commands change it.

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
    before = os.open(".", os.O_RDONLY)  # a descriptor, since the folder may have been moved or removed
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
    """Ignore that Python 3.14 deprecates event loop policies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return call(*args)
