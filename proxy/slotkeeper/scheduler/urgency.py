"""The urgency of requests, and the acts of the scheduler because of it.

All hints are optional: a request without them is `NORMAL` and is served as if there were no priorities.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Final


class Priority(StrEnum):
    """How urgent a request is. Headers, logs, metrics and `why` use these values."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def rank(self) -> int:
        """Rank of the priority; requests of higher rank are served first."""
        return _RANKS[self]


_RANKS: Final = {Priority.LOW: 0, Priority.NORMAL: 1, Priority.HIGH: 2}


class SaidBy(StrEnum):
    """The source of a request's priority."""

    NOTHING = "nothing"
    HEADER = "header"  # X-Slotkeeper-Priority
    AGENT_HINTS = "agent_hints"  # `nvext.agent_hints` in the body
    BODY = "body"  # `service_tier` or `priority`
    SIDE_REQUEST = "side_request"  # the request asks for a title, a suggestion or a summary
    KEY = "key"  # its key in --keys-file may not say more


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHints:
    """Priority, deadline and other hints of one request."""

    priority: Priority = Priority.NORMAL
    said_by: SaidBy = SaidBy.NOTHING
    output: int | None = None  # tokens that the answer will probably have
    prefetch: bool = True  # whether the next turn's prompt may be computed in idle time
    start_by: float = inf  # driver's clock, seconds; a request that has not begun by then is refused

    @property
    def neutral(self) -> bool:
        """Whether these hints leave the order of the queue unchanged and set no deadline."""
        return self.priority is Priority.NORMAL and self.start_by == inf

    def limited(self, most: Priority) -> RequestHints:
        """Return the hints with a priority of at most `most`, which the request's key allows."""
        within = self.priority.rank <= most.rank
        return self if within else replace(self, priority=most, said_by=SaidBy.KEY)


NO_HINTS: Final = RequestHints()


class PriorityAct(StrEnum):
    """Acts because of priorities or deadlines. Logs, metrics, headers, `why` and tests use these values."""

    WENT_FIRST = "went_first"  # served before less urgent requests that arrived earlier
    AGED = "aged"  # served before more urgent requests: none of its priority had begun for `AGES_AFTER`
    STOOD_BACK = "stood_back"  # did not begin in a free slot, because more urgent requests ran on that engine
    GAVE_WAY = "gave_way"  # its prefill paused at the end of a batch for a more urgent request
    KEPT_ON = "kept_on"  # its prefill did not pause, because pausing would have cost more than it gains
    EXPIRED = "expired"  # refused, because it could not begin before its deadline
