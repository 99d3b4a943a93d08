"""What a request says of its own urgency, and the names of what was done about that.

Nothing here is needed: a request that says nothing is `NORMAL`, and is served as if there were no priorities.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final


class Priority(StrEnum):
    """How urgent a request is. In headers, logs, metrics and `why` alike."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def rank(self) -> int:
        """Higher ranks are served first."""
        return _RANKS[self]


_RANKS: Final = {Priority.LOW: 0, Priority.NORMAL: 1, Priority.HIGH: 2}


class SaidBy(StrEnum):
    """What gave a request its priority."""

    NOTHING = "nothing"
    HEADER = "header"  # X-Slotkeeper-Priority
    AGENT_HINTS = "agent_hints"  # `nvext.agent_hints` in the body
    BODY = "body"  # `service_tier` or `priority`
    SIDE_REQUEST = "side_request"  # it asks for a title, a suggestion or a summary


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHints:
    """What is known of a request's urgency."""

    priority: Priority = Priority.NORMAL
    said_by: SaidBy = SaidBy.NOTHING
    output: int | None = None  # tokens that its answer will probably have
    prefetch: bool = True  # whether the next turn's prompt may be computed in idle time
    start_by: float = inf  # seconds of the driver's clock: later it is refused instead

    @property
    def neutral(self) -> bool:
        """Whether nothing in them changes when the request is served."""
        return self.priority is Priority.NORMAL and self.start_by == inf


NO_HINTS: Final = RequestHints()


class PriorityAct(StrEnum):
    """What was done because of priorities or deadlines. In logs, metrics, headers, `why` and tests alike."""

    WENT_FIRST = "went_first"  # it was served before requests that came earlier
    AGED = "aged"  # it was served before more urgent ones, because none of its priority had been for long
    STOOD_BACK = "stood_back"  # a slot was free, but more urgent requests were at work on that engine
    GAVE_WAY = "gave_way"  # its prefill paused at the end of a batch, for a more urgent request
    KEPT_ON = "kept_on"  # it did not pause, because that would have cost more than it gains
    EXPIRED = "expired"  # it could not be started in time, and was refused
