"""Values that every module shares: ids, slots, reasons, outcomes, and the urgency of requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Final, NewType

EngineId = NewType("EngineId", str)  # its name, else its base URL; #MODEL follows for a router's model
SlotId = NewType("SlotId", int)
RequestId = NewType("RequestId", str)
ModelName = NewType("ModelName", str)  # as the router lists it
ClientId = NewType("ClientId", str)  # the owner of a queue: digest of an API key, else an address

NO_ROUTER: Final = ModelName("")  # the model name of an engine without a router, whatever model it serves


def id_of(key: RequestId) -> str:
    """Return the client's own request id from a scheduler key such as "17:ID"; of a chore, its key.

    Every caller passes the id on explicitly. A context variable would be wrong: the work for one request
    often starts in the task of another request, whose end has freed the slot.
    """
    number, _, name = key.partition(":")
    return name if number.isdigit() else key


class Tier(StrEnum):
    """Where a snapshot is stored."""

    HOT = "hot"  # in the engine's --slot-save-path: it can be restored at once
    COLD = "cold"  # elsewhere: it must be copied to the hot tier first


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One slot of one engine."""

    engine: EngineId
    slot: SlotId

    def __str__(self) -> str:
        return f"{self.engine}#{self.slot}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot in the engine's own listing, GET /slots (engine.md 1.7)."""

    slot: SlotId
    busy: bool
    task: int | None = None  # id of the running or last task; None if the slot never ran one
    speculative: bool = False  # whether the slot uses a draft model or MTP
    held: int | None = None  # tokens in the slot now; None if it has not run a task, also after a restore


class Crowded(StrEnum):
    """Why a request was not accepted into the queue."""

    ALL = "all"  # the queue is full
    CLIENT = "client"  # this client already has as many waiting requests as allowed
    KEY_QUEUED = "key_queued"  # this key already has as many waiting requests as the keys file allows
    KEY_CONCURRENT = "key_concurrent"  # the same, running requests included
    KEY_TOKENS = "key_tokens"  # this key has used up its tokens for this minute (keys file)


class Reason(StrEnum):
    """Why a request was placed where it was: the same in logs, metrics, headers and tests."""

    CONTINUES = "continues"  # the request's messages extend those in the slot; decided without token ids
    PREFIX = "prefix"  # cheapest: this slot holds the longest reusable prefix
    RAM_CACHE = "ram_cache"  # the engine loads the prefix from its own RAM prompt cache
    SNAPSHOT = "snapshot"  # a snapshot was restored, because that is cheaper
    COLD = "cold"  # no reusable prefix anywhere: the slot that loses least
    CLIENT_CHOSE = "client_chose"  # the request carried id_slot
    ENGINE_CHOSE = "engine_chose"  # left to the engine, because pinning would lose (engine.md T6)
    STEERED = "steered"  # the route ignores id_slot: prefilled where the engine will look (T5)
    UNPINNABLE = "unpinnable"  # it takes a slot that cannot be chosen (embeddings, n > 1)
    BRIEF = "brief"  # so short that the slot that loses least is best
    UNRENDERED = "unrendered"  # the prompt's tokens are unknown: placed by messages or age alone
    SLOTLESS = "slotless"  # it takes no slot, and waited only for its model
    BYPASS = "bypass"  # X-Slotkeeper-Bypass: 1
    FAIL_OPEN = "fail_open"  # Slotkeeper failed; the request went through unchanged
    NO_ENGINE = "no_engine"  # no engine is up and none is expected
    NOT_PROBED = "not_probed"  # the engine answers, but could not be probed in time
    SLOTS_HIDDEN = "slots_hidden"  # the engine does not show its slots (--no-slots)
    KEY_REFUSED = "key_refused"  # the engine refuses our key, or requires one that we do not have
    KEY_UNCHECKED = "key_unchecked"  # no engine could check the client's key


# The request went to the engine as it came, without a place, although its client did not ask for that.
WITHOUT_PLACE: Final = frozenset(
    {
        Reason.FAIL_OPEN,
        Reason.NO_ENGINE,
        Reason.NOT_PROBED,
        Reason.SLOTS_HIDDEN,
        Reason.KEY_REFUSED,
        Reason.KEY_UNCHECKED,
    }
)


class Loading(StrEnum):
    """How a restore ended."""

    DONE = "done"
    UNFIT = "unfit"  # the file is missing or damaged: the engine was not asked, the slot is unchanged
    REFUSED = "refused"  # the engine refused the file and emptied the slot
    LOST = "lost"  # the engine did not answer


# -- urgency ---------------------------------------------------------------------------------------------
# All hints are optional: a request without them is `NORMAL` and is served as if there were no priorities.


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
    """Acts because of priorities, deadlines or costs. Logs, metrics, `why` and tests use these values."""

    WENT_FIRST = "went_first"  # served before less urgent requests that arrived earlier
    AGED = "aged"  # served before more urgent requests: none of its priority had begun for `AGES_AFTER`
    STOOD_BACK = "stood_back"  # did not begin in a free slot, because more urgent requests ran on that engine
    GAVE_WAY = "gave_way"  # its prefill paused at the end of a batch for a more urgent request
    KEPT_ON = "kept_on"  # its prefill did not pause, because pausing would have cost more than it gains
    EXPIRED = "expired"  # refused, because it could not begin before its deadline
    CHEAPER = "cheaper"  # served before one that arrived earlier, because its prompt takes less time
    SLOT_KEPT = "slot_kept"  # did not begin in a free slot: that is kept for a conversation about to return
