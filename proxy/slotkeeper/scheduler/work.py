"""What an engine has begun for clients, and when that should be over, by the rates that it has shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, log2
from typing import Final

from slotkeeper.scheduler.types import RequestId

SHORTEST: Final = 0.01  # seconds: nothing is foretold more finely


@dataclass(frozen=True, slots=True)
class Expected:
    """Something that should take so many seconds."""

    since: float
    seconds: float

    def left(self, now: float) -> float:
        """Seconds. What has taken longer than it should will take as long again."""
        passed = now - self.since
        return self.seconds - passed if passed < self.seconds else passed

    def overdue(self, now: float) -> int:
        """0 while it takes no longer than it should, then one more with each doubling of the time."""
        passed = now - self.since
        return 0 if passed < self.seconds else 1 + int(log2(passed / self.seconds))

    def overdue_at(self, now: float) -> float:
        """When that will be more."""
        return float(self.since + self.seconds * 2 ** self.overdue(now))


@dataclass(frozen=True, slots=True)
class Served(Expected):
    """One request."""

    prefilled_at: float = 0.0  # when its prompt should be computed


@dataclass(slots=True)
class EngineWork:
    """Requests that were begun. The engine computes their prompts one after the other, as they came."""

    served: dict[RequestId, Served] = field(default_factory=dict)
    awaiting: int = 0  # requests that wait for one of its slots, though others are free

    def begins(self, request: RequestId, now: float, *, prefill: float, reply: float) -> None:
        """`prefill` and `reply`: the seconds that its prompt and its answer should take."""
        self.served.pop(request, None)
        prefilled_at = now + self.ahead(now) + prefill
        self.served[request] = Served(now, max(SHORTEST, prefilled_at - now + reply), prefilled_at)

    def ends(self, request: RequestId) -> None:
        self.served.pop(request, None)

    def ahead(self, now: float) -> float:
        """Seconds of prefill that a request would find before its own."""
        return max(0.0, max((one.prefilled_at for one in self.served.values()), default=now) - now)

    def free_in(self, now: float) -> float | None:
        """Seconds until one more of its slots is free than requests wait for; None where nothing is known."""
        left = sorted(one.left(now) for one in self.served.values())
        return left[self.awaiting] if self.awaiting < len(left) else None

    def overdue(self, now: float) -> int:
        """Changes when requests that wait for it are to be decided again."""
        return sum(one.overdue(now) for one in self.served.values())

    def overdue_at(self, now: float) -> float:
        """When that will change; infinite where none waits for it."""
        times = (one.overdue_at(now) for one in self.served.values() if self.awaiting)
        return min(times, default=inf)
