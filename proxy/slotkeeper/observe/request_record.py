"""What is recorded of one request for `why`, its current progress, and sums over requests.

Times are seconds since the request came, unless a comment names a clock. Records serve observers only: no
decision depends on them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slotkeeper.api.answers.answer import Progress, TokenTimes, Waited
from slotkeeper.conversation.divergence import Cause
from slotkeeper.conversation.layout import Section
from slotkeeper.conversation.likeness import RequestKind
from slotkeeper.conversation.naming import UNKNOWN, Name
from slotkeeper.conversation.rules.apply import ShownChange
from slotkeeper.conversation.rules.base import RuleName
from slotkeeper.observe.states import DOING, Doing, Moment, Spent
from slotkeeper.scheduler.effects import Pooled, Ranked
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.requests.figures import Counted, Lost, Sums, Unknown, Usage
from slotkeeper.scheduler.requests.pending import Wait, Weighed
from slotkeeper.scheduler.types import Priority, Reason, RequestId, id_of


def places_in(placement: Placement) -> dict[RequestId, int]:
    """Return the queued requests with their places. Called once for an answer, not for each request."""
    return {request: place for place, request in enumerate(placement.line, start=1)}


def moment_of(
    placement: Placement, record: Record, places: Mapping[RequestId, int], now: float
) -> Moment | None:
    """Return the present state of a request, `now` on the driver's clock; None if it has ended."""
    if record.outcome != RUNNING:
        return None
    pending = placement.pending(record.key)
    prompt = None if pending is None or pending.prompt is None else len(pending.prompt)
    found = replace(moment(record, prompt, now), priority=record.priority)
    if found.doing is not Doing.QUEUED:
        return found
    waiting = placement.waiting(record.key)
    return replace(
        found,
        place=places.get(record.key),
        wait=waiting.wait if waiting else _UNPLACED.get(record.stage),
        behind=tuple(map(id_of, waiting.behind)) if waiting else (),
    )


# What a request waits for that is not in the queue yet.
_UNPLACED: Final[Mapping[Spent | None, Wait]] = MappingProxyType(
    {Spent.ENGINE: Wait.ENGINE, Spent.SWAP: Wait.MODEL}
)


def moment(record: Record, prompt: int | None, now: float) -> Moment:
    """Return the present state of a request by its stage, `now` on the driver's clock.

    `prompt`: its tokens, None: unknown. What a queued request waits for is not in its record.
    """
    doing, step = DOING[record.stage or Spent.READ], record.doing
    if record.work and doing is Doing.PREFILL:
        return prefilling(record, record.work, prompt, now)
    if record.work and step is RequestStage.PLANT:
        return replace(prefilling(record, record.work, prompt, now), doing=doing, step=step.value)
    return Moment(doing=doing, step=step.value if step and doing is Doing.PREPARING else None)


def planting(record: Record, moment: Moment, now: float) -> Progress | None:
    """Return the progress of a plant for the request, as the engine reports that of a prefill.

    `moment` is the request's present state, `now` on the driver's clock. None if no plant runs, or if the
    tokens to compute are unknown.
    """
    reuse = record.decision.chosen.reuse if record.decision else None
    if record.work is None or reuse is None or moment.computed is None or moment.to_compute is None:
        return None
    if record.doing is not RequestStage.PLANT:
        return None
    total, processed = reuse + moment.to_compute, reuse + moment.computed
    return Progress(total, reuse, processed, now - record.work.begun)


def prefilling(record: Record, work: Work, prompt: int | None, now: float) -> Moment:
    """Return the progress of a prefill of `prompt` tokens (None: unknown), `now` on the driver's clock.

    What the engine does not report is estimated by its measured rate. If the prefill takes longer than that,
    its progress is unknown.
    """
    if work.progress is not None:
        return _by_progress(work, now)
    decision = record.decision
    reuse = decision.chosen.reuse if decision else None
    if decision is None or prompt is None or reuse is None:
        return Moment(doing=Doing.PREFILL)
    to_compute, rate = max(1, prompt - reuse), decision.rate if decision.measured else 0.0
    seen, estimated = work.planted + work.planting, not work.planting
    if estimated and not rate:
        return Moment(doing=Doing.PREFILL, to_compute=to_compute)
    computed = max(seen, int((now - work.begun) * rate)) if estimated else seen
    computed = min(computed, to_compute)
    left = (to_compute - computed) / rate if rate and computed < to_compute else None
    return Moment(
        doing=Doing.PREFILL, computed=computed, to_compute=to_compute, seconds_left=left, estimated=estimated
    )


def _by_progress(work: Work, now: float) -> Moment:
    """Return the progress that the engine reports; no time left if that cannot be said any more.

    Tokens planted for the request count as computed, not as reused.
    """
    progress = work.progress
    if progress is None:
        raise AssertionError("the engine has reported no progress")
    computed = progress.processed - progress.reused
    rate = computed / progress.seconds if progress.seconds > 0 else 0.0
    left = (progress.total - progress.processed) / rate if rate > 0 else None
    if left is not None:
        left -= now - work.progress_at  # the engine reports once for each batch
    return Moment(
        doing=Doing.PREFILL,
        computed=min(work.planted, progress.reused) + computed,
        to_compute=min(work.planted, progress.reused) + progress.total - progress.reused,
        seconds_left=left if left is None or left > 0 else None,  # the batch takes longer than the last one
    )


# -- the record of a request -----------------------------------------------------------------------------

NO_REQUEST: Final = RequestId("")
RUNNING: Final = "running"  # the outcome of an unfinished request


class RequestStage(StrEnum):
    """The stages in which a request spends its time. All but RENDER follow each other."""

    PARSE = "parse"  # reading the body, finding what its client changed, applying rules
    ENGINE = "engine"  # no engine can take it: it is down, being probed, or loading its only model
    SWAP = "swap"  # its router has not loaded its model
    QUEUE = "queue"  # in our queue, until its slot is decided
    RENDER = "render"  # finding its tokens, in parallel to the queue
    DECIDE = "decide"  # comparing slots
    SAVE = "save"  # the slot's contents before they are overwritten, or a prefix that others share
    RESTORE = "restore"  # loading a file into the slot
    ERASE = "erase"
    PLANT = "plant"  # computing up to a boundary, so that the engine keeps a checkpoint there
    FORWARD = "forward"  # until the head of the engine's answer
    PREFILL = "prefill"  # until the first token
    GENERATE = "generate"  # until the end


SPENT_ON: Final[Mapping[RequestStage, Spent]] = MappingProxyType(
    {
        RequestStage.PARSE: Spent.READ,
        RequestStage.ENGINE: Spent.ENGINE,
        RequestStage.SWAP: Spent.SWAP,
        RequestStage.QUEUE: Spent.QUEUE,
        RequestStage.DECIDE: Spent.QUEUE,
        RequestStage.SAVE: Spent.PREPARE,
        RequestStage.ERASE: Spent.PREPARE,
        RequestStage.PLANT: Spent.PREPARE,
        RequestStage.RESTORE: Spent.RESTORE,
        RequestStage.FORWARD: Spent.PREFILL,
        RequestStage.PREFILL: Spent.PREFILL,
        RequestStage.GENERATE: Spent.ANSWER,
    }
)
MOST_BEHIND: Final = 32  # requests whose ids are kept for one thing that a request waits for
BRIEFEST_WAIT: Final = 0.005  # seconds: a shorter gap between two stages is our own work


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the time that a request took."""

    stage: RequestStage
    begin: float
    end: float
    tokens: int | None = None  # that the stage handled
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to serve a request."""

    reason: Reason
    engine: str
    slot: int | None
    reuse: int | None  # tokens that the engine would not compute; None: not examined
    price: float  # in tokens of prefill: to compute now, for files, and lost for later requests
    steps: tuple[str, ...] = ()  # in the slot, before the request
    seconds: float | None = None  # the price for comparison with other engines; None: there were none


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request was sent, and what that beat. Tokens and seconds are estimates of that moment."""

    chosen: Option
    beaten: tuple[Option, ...] = ()  # cheapest first; empty if nothing else was examined
    rate: float = 0.0  # prefill tokens per second
    measured: bool = True  # the rate; false: it is a guess, because the engine has computed too little
    held: int = 0  # tokens in the state that the request continues
    common: int | None = None  # tokens that this state and the prompt have in common


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDivergence:
    """Where a request's prompt diverges from the one that it continues, and what that cost."""

    cause: Cause
    section: Section | None  # None: the texts are equal, but the template renders them differently
    message: int | None  # its index among the request's messages
    token: int  # index of the first that differs
    tokens: int  # computed again although unchanged
    seconds: float | None  # of computing these
    rule: RuleName | None  # that undoes the change
    fixed: bool  # whether the rule did so
    reply: bool = False  # only the newest reply came back in another form than sampled
    was: tuple[int, ...] = ()  # token ids around the divergence, if text may be kept
    now: tuple[int, ...] = ()
    lead: int = 0  # number of these ids before the divergence


@dataclass(slots=True)
class QueueWait:
    """How long a request waited in the queue for one thing, and for which requests."""

    seconds: float = 0.0
    behind: dict[str, None] = field(default_factory=dict)  # their ids, in the order in which they were seen

    def sees(self, ids: Iterable[str]) -> None:
        self.behind |= dict.fromkeys(islice((each for each in ids if each not in self.behind), self._room))

    @property
    def _room(self) -> int:
        return MOST_BEHIND - len(self.behind)


@dataclass(slots=True)
class Work:
    """The progress of a request's prefill."""

    begun: float  # on the driver's clock: its first plant, or the request itself
    planted: int = 0  # tokens, by finished plants
    planting: int = 0  # by the running plant
    progress: Progress | None = None  # the engine's report on the request itself
    progress_at: float = 0.0  # on the driver's clock


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """One request. All observers write to it; nothing waits for it."""

    request_id: str
    route: str
    received: float  # seconds since the epoch
    at: float  # the same moment on the driver's clock
    key: RequestId = NO_REQUEST  # the driver's id of the request
    client: str = ""  # a digest
    name: Name = field(default_factory=lambda: Name(UNKNOWN))  # its conversation's name
    model: str | None = None  # as the client asked for it
    named: str | None = None  # what the client calls its conversation
    body_bytes: int = 0
    keyed: bool = False  # its body holds a key, so that none of its words are kept for `why`
    conversation: int | None = None
    kind: RequestKind | None = None
    spans: list[Span] = field(default_factory=list)
    doing: RequestStage | None = RequestStage.PARSE  # the stage that has not ended; None: the request has
    since: float = field(init=False)  # when that stage began, on the driver's clock
    renders: float | None = None  # since when its tokens are being found, on the driver's clock
    queued: dict[Wait, QueueWait] = field(default_factory=dict)  # what it waited for in the queue
    decision: Decision | None = None
    divergence: PromptDivergence | None = None
    changes: tuple[ShownChange, ...] = ()
    weighed: Weighed | None = None  # in which form it was sent, if rules would have changed it
    engine: str | None = None  # where it was finally sent
    slot: int | None = None
    prompt_tokens: int | None = None
    usage: Usage | None = None  # None: the engine gave no figures
    generated: int | None = None
    predicted: int | None = None
    oracle: int | None = None
    unknown: Unknown | None = None  # why there is no oracle, once it has ended
    lost: Lost | None = None
    reused_seconds: float | None = None  # of prefill that reuse saved
    step_seconds: float = 0.0  # of waiting for restores, erasures, touches and steers
    pooled: list[Pooled] = field(default_factory=list)  # actions for it on a shared KV buffer
    priority: Priority = Priority.NORMAL
    ranked: list[Ranked] = field(default_factory=list)  # actions because of priorities
    first_token: float | None = None  # seconds
    stall: float | None = None  # seconds: the longest of its answer (api/answers/answer.py)
    least_seconds: float | None = None  # the least time to its first token, once it has ended
    seconds: float | None = None
    work: Work | None = None
    outcome: str = RUNNING
    status: int | None = None

    def __post_init__(self) -> None:
        self.since = self.at

    def times(self, seen: TokenTimes) -> None:
        """Take over when the tokens of its answer came; of a request sent again, the first token stays."""
        if self.first_token is None and seen.first is not None:
            self.first_token = seen.first - self.at
        self.stall = seen.stall

    @property
    def waited(self) -> Waited:
        """What it adds to the figures of many answers."""
        return Waited(self.first_token, self.stall, self.least_seconds)

    def add(
        self, stage: RequestStage, begin: float, end: float, *, tokens: int | None = None, note: str = ""
    ) -> None:
        """Add a span between two moments of the driver's clock."""
        self.spans.append(Span(stage, begin - self.at, end - self.at, tokens, note))

    def passes(
        self,
        at: float,
        then: RequestStage | None,
        *,
        stage: RequestStage | None = None,
        tokens: int | None = None,
        note: str = "",
    ) -> None:
        """End the present stage, which is known as `stage` now, and begin the next one; None: the end."""
        ended, last = stage or self.doing, self.spans[-1] if self.spans else None
        if ended is RequestStage.GENERATE and last and last.stage is ended:  # it goes on
            self.spans[-1] = replace(last, end=at - self.at)
        elif ended:
            self.add(ended, self.since, at, tokens=tokens, note=note)
        self.doing, self.since = then, at

    def spent(self, now: float) -> dict[Spent, float]:
        """Return the seconds spent in each stage, until `now` on the driver's clock if it has not ended.

        A stage that it never reached is missing. While its tokens are being found, a request is in the queue
        without waiting for a slot: that time counts as READ.
        """
        seconds: dict[Spent, float] = {}
        spans = tuple(self._until(now))
        for span in spans:
            if (on := SPENT_ON.get(span.stage)) is not None:
                seconds[on] = seconds.get(on, 0.0) + span.end - span.begin
        queued = [span for span in spans if span.stage is RequestStage.QUEUE]
        for read in (span for span in spans if span.stage is RequestStage.RENDER):
            for span in queued:
                both = max(0.0, min(read.end, span.end) - max(read.begin, span.begin))
                seconds[Spent.QUEUE] -= both
                seconds[Spent.READ] = seconds.get(Spent.READ, 0.0) + both
        return seconds

    def _until(self, now: float) -> Iterator[Span]:
        """Yield the spans, and the stage that has not ended."""
        yield from self.spans
        if self.renders is not None:
            yield Span(RequestStage.RENDER, self.renders - self.at, now - self.at)
        if self.doing is None:
            return
        begin, end, first = self.since - self.at, now - self.at, self.first_token
        if self.doing is RequestStage.FORWARD and first is not None:
            yield Span(RequestStage.FORWARD, begin, max(begin, first))
            yield Span(RequestStage.GENERATE, max(begin, first), max(begin, first, end))
        else:
            yield Span(self.doing, begin, max(begin, end))

    @property
    def stage(self) -> Spent | None:
        """The stage that the request is in; None if it has ended."""
        if self.doing is RequestStage.FORWARD and self.first_token is not None:
            return Spent.ANSWER
        return SPENT_ON[self.doing] if self.doing else None

    def to_first_token(self, now: float) -> float | None:
        """Return the seconds to the first token, so far if there is none; None if it ended without one."""
        if self.first_token is not None or self.outcome != RUNNING:
            return self.first_token
        return now - self.at

    @property
    def handle(self) -> str:
        """The conversation's name in answers; empty if it has none."""
        return self.name.given or self.name.handle

    def urgency(self, *, namespaced: bool) -> str:
        """Return priority and acts for the header of an answer; "" for normal priority without acts.

        `namespaced`: acts are left out, because they would reveal the load of other namespaces.
        """
        acts = dict.fromkeys(ranked.act.value for ranked in ([] if namespaced else self.ranked))
        return "; ".join([self.priority.value, *acts]) if acts or self.priority is not Priority.NORMAL else ""

    @property
    def goes_on(self) -> int | None:
        """The conversation; until that is settled, the one that the request seems to continue."""
        return self.name.conversation if self.conversation is None else self.conversation

    @property
    def saved_seconds(self) -> float | None:
        return None if self.reused_seconds is None else self.reused_seconds - self.step_seconds

    @property
    def repeated(self) -> int:
        """Tokens computed twice: lost by the cache, or unchanged after what the client had changed.

        Tokens that are both count once.
        """
        found = (self.lost.tokens if self.lost else 0) + (self.divergence.tokens if self.divergence else 0)
        return min(found, self.usage.work if self.usage else 0)


# -- sums by client, and of the last half hour -----------------------------------------------------------
# A client is a program with a key: the program's name, and the beginning of a digest of the key (of the
# address, if no key is sent). The key itself is not kept.

NAMED_CLIENTS: Final = 20  # clients with separate sums; all later clients share one
OTHER: Final = "other"
DIGEST: Final = 8  # characters of the digest that are shown
LABELS: Final = ("agent", "key")


@dataclass(slots=True)
class Client:
    """A program with a key."""

    agent: str
    key: str
    seen: float  # on the driver's clock, when its last counted request came
    sums: Sums = field(default_factory=Sums)

    def shown(self, now: float) -> dict[str, Any]:
        """Return the sums for JSON. The engine's other work is not included."""
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
        """Yield the clients, those with most computed tokens first, and the sum of all others last."""
        order = sorted(self._clients.values(), key=lambda client: -client.sums.computed)
        return iter(sorted(order, key=lambda client: client.agent == client.key == OTHER))

    def add(self, record: Record) -> None:
        """Count an answered request, if the engine gave figures for it."""
        if record.usage is None:
            return
        name = (record.name.agent, record.client[:DIGEST])
        if name not in self._clients and len(self._clients) >= self._most:
            name = (OTHER, OTHER)
        client = self._clients.setdefault(name, Client(*name, seen=record.at))
        client.seen = max(client.seen, record.at)
        client.sums.count(
            Counted(
                usage=record.usage,
                oracle=record.oracle,
                unknown=record.unknown,
                reused_seconds=record.reused_seconds,
                step_seconds=record.step_seconds,
            )
        )


class ClientFigures(Collector):
    """The sums by client as metrics. Read at each scrape."""

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
            "Prompt tokens by client: reused, and computed while it waited.",
            labels=(*LABELS, "source"),
        )
        saved = GaugeMetricFamily(
            "slotkeeper_client_saved_seconds",
            "Prefill time saved by client, less the time of the steps before its requests.",
            labels=LABELS,
        )
        for client in self._clients:
            labels = (client.agent, client.key)
            requests.add_metric(labels, client.sums.requests)
            tokens.add_metric((*labels, "cached"), client.sums.reused)
            tokens.add_metric((*labels, "computed"), client.sums.computed)
            if client.sums.saved_seconds is not None:
                saved.add_metric(labels, client.sums.saved_seconds)
        yield from (requests, tokens, saved)


# -- the last half hour ----------------------------------------------------------------------------------

BUCKET: Final = 10.0  # seconds
BUCKETS: Final = 180  # half an hour, if no bucket is empty


@dataclass(slots=True)
class _Bucket:
    at: float  # seconds since the epoch, when it begins
    sums: Sums = field(default_factory=Sums)


class History:
    """Sums in all, and in buckets of ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._clock = clock
        self._buckets: deque[_Bucket] = deque(maxlen=BUCKETS)
        self.totals = Sums()

    def add(self, **figures: float) -> None:
        """Add figures by their names in `Sums`."""
        for sums in self._now():
            sums.add(**figures)

    def count(self, request: Counted) -> None:
        """Add one answered request."""
        for sums in self._now():
            sums.count(request)

    def leave_out(self, why: Unknown, tokens: int) -> None:
        """Keep tokens out of the ratios."""
        for sums in self._now():
            sums.leave_out(why, tokens)

    def _now(self) -> tuple[Sums, Sums]:
        """Return the sums that anything that happens now belongs to."""
        at = self._clock() // BUCKET * BUCKET
        if not self._buckets or self._buckets[-1].at < at:
            self._buckets.append(_Bucket(at))
        return self._buckets[-1].sums, self.totals

    def shown(self) -> Iterator[dict[str, Any]]:
        """Yield the buckets, oldest first, without empty ones and those older than half an hour."""
        oldest = self._clock() - BUCKET * BUCKETS
        for bucket in self._buckets:
            if bucket.at >= oldest:
                yield {"at": bucket.at, **bucket.sums.shown()}
