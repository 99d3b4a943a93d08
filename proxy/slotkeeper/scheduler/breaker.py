"""The circuit breaker of one engine, for requests that fail there although it answers /health.

It has an effect only while another engine of the model can be used. The only engine always gets the requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

TRIPS: Final = 3  # errors of the engine in a row: one error may be the request's own fault
FIRST: Final = 1.0  # seconds until the engine is tried again; doubled with each further failure
LONGEST: Final = 60.0  # seconds


@dataclass(slots=True)
class Breaker:
    failures: int = 0  # in a row
    until: float = -inf  # when the engine is tried again
    resting: bool = False  # whether that time is still to come

    def failed(self, now: float, *, broken: bool) -> None:
        """Record a failed request. `broken`: it got no answer, so no other request follows at once."""
        self.failures += 1
        if broken or self.failures >= TRIPS:
            self.until = now + min(LONGEST, FIRST * 2 ** min(max(0, self.failures - TRIPS), 16))
            self.resting = True

    def worked(self) -> None:
        self.failures, self.until, self.resting = 0, -inf, False

    def on_trial(self, *, busy: bool) -> bool:
        """Whether the engine is being tried with one request at a time, and that one is running."""
        return self.failures >= TRIPS and busy
