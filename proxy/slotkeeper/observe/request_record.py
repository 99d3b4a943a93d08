"""What is kept of one request for `why`, where it is at this moment, and sums over requests.

Times are seconds since the request came. Only for observers: nothing is decided by it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slotkeeper.api.answer import Progress
from slotkeeper.conversation.causes import Cause
from slotkeeper.conversation.layout import Section
from slotkeeper.conversation.likeness import RequestKind
from slotkeeper.conversation.naming import UNKNOWN, Name
from slotkeeper.conversation.rules.apply import ShownChange
from slotkeeper.conversation.rules.base import RuleName
from slotkeeper.scheduler.effects import Pooled, Ranked
from slotkeeper.scheduler.figures import Lost, Sums, Usage, of_request
from slotkeeper.scheduler.hints import Priority
from slotkeeper.scheduler.pending import Weighed
from slotkeeper.scheduler.types import Reason, RequestId

MOST: Final = 99  # per cent, as long as no token has come


class Doing(StrEnum):
    """What is done for a request at this moment."""

    QUEUED = "queued"  # in our line
    PREPARING = "preparing"  # a file is saved or restored for it
    PREFILL = "prefill"  # its prompt is being computed
    GENERATING = "generating"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where a request is at this moment: its place in the queue, or how far its prompt is computed."""

    doing: Doing
    place: int | None = None  # in the line; 1 is the next
    priority: Priority = Priority.NORMAL
    computed: int | None = None  # tokens so far, of those that the engine has to compute
    to_compute: int | None = None
    seconds_left: float | None = None
    estimated: bool = False  # by the learned rate: the engine tells nothing on this route

    @property
    def percent(self) -> int | None:
        if not self.to_compute or self.computed is None:
            return None
        return max(0, min(MOST, int(100 * self.computed / self.to_compute)))

    def shown(self) -> dict[str, Any]:
        left = self.seconds_left
        return {
            "doing": self.doing.value,
            "place": self.place,
            "priority": self.priority.value,
            "percent": self.percent,
            "computed_tokens": self.computed,
            "to_compute_tokens": self.to_compute,
            "seconds_left": None if left is None else round(left, 1),
            "estimated": self.estimated,
        }


def prefilling(record: Record, work: Work, prompt: int | None, now: float) -> Moment:
    """`prompt` tokens, where they are known; `now` on the driver's clock."""
    if work.told is not None:
        return _told(work, now)
    decision = record.decision
    reuse = decision.chosen.reuse if decision else None
    if decision is None or prompt is None or reuse is None:
        return Moment(doing=Doing.PREFILL)
    to_compute, rate = max(1, prompt - reuse), decision.rate
    seen = work.planted + work.planting
    computed = seen if work.planting else max(seen, int((now - work.begun) * rate))
    computed = min(computed, to_compute)
    left = (to_compute - computed) / rate if rate else None
    return Moment(
        doing=Doing.PREFILL,
        computed=computed,
        to_compute=to_compute,
        seconds_left=left,
        estimated=not work.planting,
    )


def _told(work: Work, now: float) -> Moment:
    """By the engine's own progress. What was planted for it counts as computed, not as reused."""
    told = work.told
    if told is None:
        raise AssertionError("only what was told is shown")
    computed = told.processed - told.reused
    rate = computed / told.seconds if told.seconds > 0 else 0.0
    left = (told.total - told.processed) / rate if rate > 0 else None
    if left is not None:
        left = max(0.0, left - (now - work.told_at))
    return Moment(
        doing=Doing.PREFILL,
        computed=min(work.planted, told.reused) + computed,
        to_compute=min(work.planted, told.reused) + told.total - told.reused,
        seconds_left=left,
    )


# -- what is kept of it ----------------------------------------------------------------------------------

NO_REQUEST: Final = RequestId("")
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
    """A part of the time that a request took."""

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
    seconds: float | None = None  # the price beside places on other engines; None: there were none


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
    key: RequestId = NO_REQUEST  # by which the driver knows it now
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
    pooled: list[Pooled] = field(default_factory=list)  # what was done for it in a shared KV buffer
    priority: Priority = Priority.NORMAL
    ranked: list[Ranked] = field(default_factory=list)  # what was done because of that
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
    def handle(self) -> str:
        """What answers call its conversation; empty where it could not be named."""
        return self.name.given or self.name.handle

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


# -- sums by client, and of the last half hour -----------------------------------------------------------
# A client is a program with a key: its name, and the beginning of a digest of the key (of the address,
# where none is sent). The key itself is nowhere.

NAMED_CLIENTS: Final = 20  # clients with sums of their own; all that come later are one
OTHER: Final = "other"
DIGEST: Final = 8  # characters of it that are shown
LABELS: Final = ("agent", "key")


@dataclass(slots=True)
class Client:
    """A program with a key."""

    agent: str
    key: str
    seen: float  # on the driver's clock, when its last counted request came
    sums: Sums = field(default_factory=Sums)

    def shown(self, now: float) -> dict[str, Any]:
        """For JSON. Other work of the engine is not included."""
        sums = self.sums.shown()
        figures = ("requests", "prompt_tokens", "reused", "prepared", "computed", "saved_seconds", "hit_rate")
        idle = round(max(0.0, now - self.seen), 1)
        return {"agent": self.agent, "key": self.key, "idle_seconds": idle} | {
            name: sums[name] for name in figures
        }


class Clients:
    """Sums for each client, for a bounded number of them."""

    def __init__(self, most: int = NAMED_CLIENTS) -> None:
        self._most = most
        self._clients: dict[tuple[str, str], Client] = {}

    def __iter__(self) -> Iterator[Client]:
        """Those that computed most in front, and the others together at the end."""
        order = sorted(self._clients.values(), key=lambda client: -client.sums.computed)
        return iter(sorted(order, key=lambda client: client.agent == client.key == OTHER))

    def add(self, record: Record) -> None:
        """A request that was answered, where the engine gave figures for it."""
        if record.usage is None:
            return
        name = (record.name.agent, record.client[:DIGEST])
        if name not in self._clients and len(self._clients) >= self._most:
            name = (OTHER, OTHER)
        client = self._clients.setdefault(name, Client(*name, seen=record.at))
        client.seen = max(client.seen, record.at)
        client.sums.add(**of_request(record.usage, record.oracle, record.reused_seconds, record.step_seconds))


class ClientFigures(Collector):
    """The same for a scraper. Read at each scrape."""

    def __init__(self, clients: Iterable[Client]) -> None:
        self._clients = clients

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "slotkeeper_client_requests",
            f"Requests by client, for the first {NAMED_CLIENTS} of them.",
            labels=LABELS,
        )
        tokens = CounterMetricFamily(
            "slotkeeper_client_prompt_tokens",
            "Their prompt tokens: what earlier work had left, and what they waited for.",
            labels=(*LABELS, "source"),
        )
        saved = GaugeMetricFamily(
            "slotkeeper_client_saved_seconds",
            "Prefill time that they were spared, less what the steps before their requests took.",
            labels=LABELS,
        )
        for client in self._clients:
            labels = (client.agent, client.key)
            requests.add_metric(labels, client.sums.requests)
            tokens.add_metric((*labels, "cached"), client.sums.reused)
            tokens.add_metric((*labels, "computed"), client.sums.computed)
            saved.add_metric(labels, client.sums.saved_seconds)
        yield from (requests, tokens, saved)


# -- the last half hour ----------------------------------------------------------------------------------

BUCKET: Final = 10.0  # seconds
BUCKETS: Final = 180  # half an hour, if each has something


@dataclass(slots=True)
class _Bucket:
    at: float  # seconds since the epoch, when it begins
    sums: Sums = field(default_factory=Sums)


class History:
    """Sums, and the same in steps of ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._clock = clock
        self._buckets: deque[_Bucket] = deque(maxlen=BUCKETS)
        self.totals = Sums()

    def add(self, **figures: float) -> None:
        """Each by its name in `Sums`."""
        at = self._clock() // BUCKET * BUCKET
        if not self._buckets or self._buckets[-1].at < at:
            self._buckets.append(_Bucket(at))
        self._buckets[-1].sums.add(**figures)
        self.totals.add(**figures)

    def shown(self) -> Iterator[dict[str, Any]]:
        """Oldest first; steps in which nothing happened are left out, and so is what is older."""
        oldest = self._clock() - BUCKET * BUCKETS
        for bucket in self._buckets:
            if bucket.at >= oldest:
                yield {"at": bucket.at, **bucket.sums.shown()}
