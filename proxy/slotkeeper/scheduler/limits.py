"""What files may cost, room and writing; how long the queue may be."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

HOUR: Final = 3600.0
WORTH_A_FILE: Final = 256  # tokens: a shorter state is computed sooner than restored
GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class Limits:
    """Set by the user."""

    hot_bytes: int = 16 * GIB
    cold_bytes: int = 0  # 0 = there is no cold tier
    hourly_bytes: int = 64 * GIB  # that may be written while conversations pause
    pause: float = 0.25  # seconds without a request until a conversation is saved
    engine_wait: float = 60.0  # seconds for which requests wait for an engine that has ended
    idle_tokens: int = 1_000_000  # that may be computed per hour in idle time
    waiting: int = 4000  # requests in line
    waiting_of_one: int = 1000  # of one client


@dataclass(slots=True)
class HourlyBudget:
    """A budget of idle time, bytes or tokens: an hour's worth at once, then as it comes."""

    hourly: int
    left: float
    at: float

    def wait(self, size: int, now: float) -> float:
        """Seconds until `size` may be spent; infinite if that is more than ever may at once."""
        refill = (now - self.at) * self.hourly / HOUR
        self.left, self.at = min(float(self.hourly), self.left + refill), now
        if size <= self.left:
            return 0.0
        return (size - self.left) * HOUR / self.hourly if size <= self.hourly else inf

    def spend(self, size: int, now: float) -> bool:
        """Whether `size` may be spent now; then it is taken off."""
        if self.wait(size, now):
            return False
        self.left -= size
        return True
