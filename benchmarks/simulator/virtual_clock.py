"""Simulated time: actions run in the order of their times, without waiting."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """Runs actions in the order of their times, and actions of one time in the order of their addition."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def __repr__(self) -> str:
        return f"<VirtualClock {self.now:.3f}, {len(self._due)} due>"

    def at(self, time: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (max(time, self.now), self._count, act))

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run actions until `done`. Raises AssertionError if no action is left before that."""
        while not done():
            if not self._due:
                raise AssertionError("the simulation has no more events, but requests are unfinished")
            self.now, _, act = heapq.heappop(self._due)
            act()
