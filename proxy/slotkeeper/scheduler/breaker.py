"""The circuit breaker of one engine: requests fail there, though it answers /health.

It matters only while another engine of the model can be used: the only one is never spared.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

TRIPS: Final = 3  # answers in a row with an error of the engine: one may be the request's own fault
FIRST: Final = 1.0  # seconds until it is tried again, doubled with each further failure
LONGEST: Final = 60.0


@dataclass(slots=True)
class Breaker:
    failures: int = 0  # in a row
    until: float = -inf  # when it is tried again
    resting: bool = False  # whether that is still to come

    def failed(self, now: float, *, broken: bool) -> None:
        """A request did. `broken`: without an answer, so that the next one is not sent after it."""
        self.failures += 1
        if broken or self.failures >= TRIPS:
            self.until = now + min(LONGEST, FIRST * 2 ** min(max(0, self.failures - TRIPS), 16))
            self.resting = True

    def worked(self) -> None:
        self.failures, self.until, self.resting = 0, -inf, False

    def on_trial(self, *, busy: bool) -> bool:
        """Whether it is tried with one request, and has that already."""
        return self.failures >= TRIPS and busy
