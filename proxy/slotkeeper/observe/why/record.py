"""What is kept of one request for `why`. Times are seconds since it came."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from slotkeeper.api.progress import Progress
from slotkeeper.conversation.agents import UNKNOWN
from slotkeeper.conversation.causes import Cause
from slotkeeper.conversation.kinds import RequestKind
from slotkeeper.conversation.naming import Name
from slotkeeper.conversation.requests.layout import Section
from slotkeeper.conversation.rules.base import RuleName
from slotkeeper.conversation.rules.shown import ShownChange
from slotkeeper.scheduler.figures import Usage
from slotkeeper.scheduler.forms import Weighed
from slotkeeper.scheduler.losses import Lost
from slotkeeper.scheduler.types import Reason, RequestId

NOBODY: Final = RequestId("")
RUNNING: Final = "running"  # the outcome of what has not ended


class RequestStage(StrEnum):
    """What a request spends its time with."""

    PARSE = "parse"  # reading the body, finding what its client changed, putting that right
    QUEUE = "queue"  # in our line, until its place is decided
    RENDER = "render"  # finding its tokens, beside the line
    DECIDE = "decide"  # comparing places
    SAVE = "save"  # what the slot held, before it is overwritten, or a beginning that others share
    RESTORE = "restore"  # a file into the slot
    ERASE = "erase"
    PLANT = "plant"  # computing up to a boundary, so that the engine keeps a checkpoint there
    FORWARD = "forward"  # until the engine's head came: it has begun
    PREFILL = "prefill"  # until the first token
    GENERATE = "generate"  # until the end


@dataclass(frozen=True, slots=True)
class Span:
    stage: RequestStage
    begin: float
    end: float
    tokens: int | None = None  # that it was about
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way in which a request could have been served."""

    reason: Reason
    engine: str
    slot: int | None
    reuse: int | None  # tokens that the engine would not compute; None: not looked at
    price: float  # in tokens of prefill: to compute now, for files, and what will be missed later
    steps: tuple[str, ...] = ()  # that would be taken in the slot first


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where it went, and what that beat. Tokens and seconds are estimates of the moment."""

    chosen: Option
    beaten: tuple[Option, ...] = ()  # cheapest first; none where nothing else was looked at
    rate: float = 0.0  # tokens of prefill a second
    held: int = 0  # tokens in the state that it goes on from
    common: int | None = None  # of them the same as the prompt's first


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDivergence:
    """Where its prompt parts from the one that it goes on from, and what that cost."""

    cause: Cause
    section: Section | None  # None: its texts go on, but the template renders them otherwise
    message: int | None  # its index among the request's messages
    token: int  # the first that differs, counted from 0
    tokens: int  # computed again, though nothing in them had changed
    seconds: float | None
    rule: RuleName | None  # that puts it right
    fixed: bool  # it did
    reply: bool = False  # only the newest reply came back otherwise than it was sampled
    was: tuple[int, ...] = ()  # token ids around the place, where text may be kept
    now: tuple[int, ...] = ()
    lead: int = 0  # how many of them stand before it


@dataclass(slots=True)
class Work:
    """How far the prompt of a request is computed, while it is."""

    begun: float  # on the driver's clock: its first plant, or the request itself
    planted: int = 0  # tokens, by plants that have ended
    planting: int = 0  # by the one that runs
    told: Progress | None = None  # by the engine, of the request itself
    told_at: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """One request. All observers write to it; nothing waits for this."""

    request_id: str
    route: str
    came: float  # seconds since the epoch
    at: float  # the same moment on the driver's clock
    key: RequestId = NOBODY  # by which the driver knows it now
    client: str = ""  # a digest
    name: Name = field(default_factory=lambda: Name(UNKNOWN))  # of its conversation
    model: str | None = None  # as the client asked for it
    named: str | None = None  # what the client calls its conversation
    body_bytes: int = 0
    conversation: int | None = None
    kind: RequestKind | None = None
    spans: list[Span] = field(default_factory=list)
    decision: Decision | None = None
    divergence: PromptDivergence | None = None
    changes: tuple[ShownChange, ...] = ()
    weighed: Weighed | None = None  # in which form it went out, where rules would have changed it
    engine: str | None = None  # where it was sent in the end
    slot: int | None = None
    prompt_tokens: int | None = None
    usage: Usage | None = None  # None: the engine gave no figures
    generated: int | None = None
    predicted: int | None = None
    oracle: int | None = None
    lost: Lost | None = None
    reused_seconds: float | None = None  # of prefill that the reused tokens would have taken
    step_seconds: float = 0.0  # that it waited for restores, touches and steers
    first_token: float | None = None  # seconds
    seconds: float | None = None
    work: Work | None = None
    outcome: str = RUNNING
    status: int | None = None

    def add(
        self, stage: RequestStage, begin: float, end: float, *, tokens: int | None = None, note: str = ""
    ) -> None:
        """A span between two moments of the driver's clock."""
        self.spans.append(Span(stage, begin - self.at, end - self.at, tokens, note))

    @property
    def goes_on(self) -> int | None:
        """Its conversation; until that is settled, the one that it seems to go on, whose name it has."""
        return self.name.conversation if self.conversation is None else self.conversation

    @property
    def saved_seconds(self) -> float | None:
        return None if self.reused_seconds is None else self.reused_seconds - self.step_seconds

    @property
    def repeated(self) -> int:
        """Tokens computed twice: lost by the cache, or unchanged behind what the client had changed.

        What is both counts once.
        """
        found = (self.lost.tokens if self.lost else 0) + (self.divergence.tokens if self.divergence else 0)
        return min(found, self.usage.work if self.usage else 0)
