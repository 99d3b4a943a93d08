"""Coroutines that have nothing to wait for, run without an event loop."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(doing: Coroutine[Any, Any, T]) -> T:
    """What it returns. Fails where it waits for something."""
    try:
        doing.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waited")
