"""Runs coroutines that never wait, without an event loop."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(doing: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result. Fails if it waits for something."""
    try:
        doing.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waited")
