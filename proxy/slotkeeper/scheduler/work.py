"""What an engine has begun for clients, and when it should be finished, by the engine's measured rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, log2
from typing import Final

from slotkeeper.scheduler.types import RequestId

SHORTEST: Final = 0.01  # seconds: no estimate is shorter


@dataclass(frozen=True, slots=True)
class Expected:
    """Something that is expected to take this many seconds."""

    since: float
    seconds: float

    def left(self, now: float) -> float:
        """Return the expected remaining seconds.

        What has exceeded its estimate is expected to take as long again.
        """
        passed = now - self.since
        return self.seconds - passed if passed < self.seconds else passed

    def overdue(self, now: float) -> int:
        """Return 0 within the estimate, then 1, and one more each time the elapsed time doubles."""
        passed = now - self.since
        return 0 if passed < self.seconds else 1 + int(log2(passed / self.seconds))

    def overdue_at(self, now: float) -> float:
        """Return when `overdue` will next increase."""
        return float(self.since + self.seconds * 2 ** self.overdue(now))


@dataclass(frozen=True, slots=True)
class Served(Expected):
    """One request in an engine."""

    prefilled_at: float = 0.0  # when its prompt should have been computed


@dataclass(slots=True)
class EngineWork:
    """The requests that an engine has begun. It computes their prompts one after the other, oldest first."""

    served: dict[RequestId, Served] = field(default_factory=dict)
    awaiting: int = 0  # requests that wait for one of its slots although other engines have free ones

    def begins(self, request: RequestId, now: float, *, prefill: float, reply: float) -> None:
        """Record a request. `prefill` and `reply`: estimated seconds for its prompt and its answer."""
        self.served.pop(request, None)
        prefilled_at = now + self.ahead(now) + prefill
        self.served[request] = Served(now, max(SHORTEST, prefilled_at - now + reply), prefilled_at)

    def ends(self, request: RequestId) -> None:
        self.served.pop(request, None)

    def ahead(self, now: float) -> float:
        """Seconds of prefill that a new request finds ahead of its own."""
        return max(0.0, max((one.prefilled_at for one in self.served.values()), default=now) - now)

    def free_in(self, now: float) -> float | None:
        """Seconds until a slot is free beyond those that requests wait for; None if that is unknown."""
        left = sorted(one.left(now) for one in self.served.values())
        return left[self.awaiting] if self.awaiting < len(left) else None

    def overdue(self, now: float) -> int:
        """A number that changes when requests that wait for this engine need a new decision."""
        return sum(one.overdue(now) for one in self.served.values())

    def overdue_at(self, now: float) -> float:
        """When that number will change; infinite if no request waits for this engine."""
        times = (one.overdue_at(now) for one in self.served.values() if self.awaiting)
        return min(times, default=inf)
