"""The metrics that docs/reference.md lists. Hits are the engine's own counts, never our predictions.

Every label has few values, and all are known from the start. Metrics about one request carry its id as an
exemplar, for scrapers that ask for OpenMetrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import product
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.registry import Collector

from slotkeeper import __version__
from slotkeeper.api.head import Api
from slotkeeper.api.request import Doubt
from slotkeeper.conversation.divergence import Cause
from slotkeeper.conversation.rules.base import RuleName
from slotkeeper.observe.request_record import History
from slotkeeper.observe.standard_error import DROPPED
from slotkeeper.observe.states import Spent
from slotkeeper.scheduler.effects import Forward, Poison, PoolAct, Purpose, Report
from slotkeeper.scheduler.requests.figures import Loss, Unknown
from slotkeeper.scheduler.slots.engine_model import FLAGS, Known
from slotkeeper.scheduler.types import (
    WITHOUT_PLACE,
    Crowded,
    EngineId,
    ModelName,
    Priority,
    PriorityAct,
    Reason,
    RequestId,
    id_of,
)
from slotkeeper.store.trouble import OPERATIONS

# Parts of Slotkeeper that fail open. A request that got no place is counted by its reason.
Part = Literal[
    "assemble",
    "effect",
    "exchange",
    "explain",
    "files",
    "journal",
    "parse",
    "placement",
    "plant",
    "read",
    "record",
    "render",
    "rewrite",
    "task",
]


class ConnectionCut(StrEnum):
    """Why a client's connection was closed or refused."""

    STALLED = "stalled"  # the client did not read its answer
    FULL = "full"  # the limit of connections was reached
    ADDRESS = "address"  # the limit of connections from its address was reached
    REPLACED = "replaced"  # on the admin port: it was idle, and a new one came when the limit was reached
    HEAD = "head"  # the client did not send the request's head in time
    BODY = "body"  # the client did not send the announced body in time
    CLOSING = "closing"  # the client did not read the end of its answer
    HANDSHAKE = "handshake"  # the TLS handshake failed or took too long
    MALFORMED = "malformed"  # the client did not send HTTP


Stage = Literal["parse", "render"]
SharedPart = Literal["store", "hints"]
Action = Literal["fixed", "observed", "declined"]  # declined: the unchanged request was cheaper

# Upper bounds of buckets: seconds, and for ERRORS tokens.
PREFILL: Final = (0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STAGES: Final = (0.001, 0.005, *PREFILL, 600)
FILES: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
OWN: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
ERRORS: Final = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
OUTCOMES: Final = ("ok", "client_error", "upstream_error", "client_gone", "broken")
LEARNT: Final = tuple(how for how in Known if how not in {Known.DEFAULT, Known.FLAGS})
EXEMPLAR_RUNES: Final = 128  # characters of name and value together (OpenMetrics, "Exemplars")
EXEMPLAR: Final = "request_id"

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All metrics of the sidecar, in one registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.history = History()
        self._planted: dict[RequestId, int] = {}  # by plants for requests that have not ended
        self._about_requests()
        self._about_tokens()
        self._about_engines()
        self._about_snapshots()
        self._about_itself()
        self._touch_all()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"slotkeeper_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"slotkeeper_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _about_requests(self) -> None:
        self.requests = self._counter("requests_total", "Requests answered.", "route", "outcome")
        self.decisions = self._counter("decisions_total", "Where requests were sent, and why.", "reason")
        self.crowded = self._counter(
            "crowded_requests_total", "Requests answered 429, because too many waited for a slot.", "reason"
        )
        self.refusals = self._counter(
            "refused_requests_total",
            "Requests answered 400, because the engine might read them differently.",
            "reason",
        )
        self.cuts = self._counter(
            "connections_cut_total", "Client connections that were refused or closed early.", "reason"
        )
        self.sent_again = self._counter(
            "requests_sent_again_total",
            "Requests sent again, because their engine ended before the answer began.",
        )
        self.queue_wait = self._histogram(
            "queue_wait_seconds", "Waiting for a free slot: the stage `queue`.", PREFILL
        )
        self.stages = self._histogram(
            "stage_seconds",
            "Time of requests in each stage.",
            STAGES,
            "stage",
        )
        self.priority_acts = self._counter(
            "priority_total", "What was done because of priorities, deadlines and costs.", "reason"
        )
        self.priority_wait = self._histogram(
            "priority_wait_seconds",
            "Time in the queue.",
            PREFILL,
            "priority",
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", PREFILL
        )
        self.compared_wait = self._counter(
            "compared_wait_seconds_total",
            "First-token waits whose least is known.",
        )
        self.least_wait = self._counter(
            "least_wait_seconds_total",
            "Least of compared waits, by engine speed.",
        )
        self.stall = self._histogram(
            "answer_stall_seconds", "The longest time between two tokens of a streamed answer.", PREFILL
        )
        self.overhead = self._histogram("overhead_seconds", "Time in the sidecar itself.", OWN, "stage")

    def _about_tokens(self) -> None:
        self.prompt_tokens = self._counter(
            "prompt_tokens_total",
            "Prompt tokens of requests: reused, and computed while they waited.",
            "source",
        )
        self.prefill_tokens = self._counter(
            "prefill_tokens_total", "Prompt tokens that the engine computed, by purpose.", "purpose"
        )
        self.oracle_tokens = self._counter(
            "oracle_tokens_total",
            "Prompt tokens that a perfect cache would have computed, if known.",
        )
        self.unknown_requests = self._counter(
            "unknown_requests_total",
            "Requests in no ratio to the oracle, by why it is unknown.",
            "reason",
        )
        self.unknown_tokens = self._counter(
            "unknown_tokens_total",
            "Prompt tokens computed for them: part of client and plant.",
            "reason",
        )
        self.prepared_tokens = self._counter(
            "prepared_tokens_total", "Cached prompt tokens that were computed in idle time."
        )
        self.lost_tokens = self._counter(
            "lost_tokens_total",
            "Prompt tokens computed again, because no cache had them.",
            "reason",
        )
        self.repeated = self._counter(
            "repeated_tokens_total",
            "Prompt tokens computed again, because of what the client had changed.",
            "cause",
        )
        self.rewrites = self._counter(
            "rewrites_total",
            "Requests in which a rule found something; declined: it saves nothing.",
            "rule",
            "action",
        )
        self.saved_seconds = self._counter(
            "prefill_saved_seconds_total",
            "Prefill time that reused tokens would have taken, at the engine's rate.",
        )
        self.step_seconds = self._counter(
            "step_seconds_total",
            "Time of steps before requests, but plants.",
        )
        self.prediction_error = self._histogram(
            "prediction_error_tokens", "Difference of predicted and real reuse.", ERRORS
        )
        self.inexact = self._counter(
            "inexact_prompts_total", "Prompts whose length Slotkeeper counted wrongly."
        )

    def _about_engines(self) -> None:
        self.poisoned = self._counter(
            "poisoned_slots_total",
            "Slots whose engine reported impossible reuse, or computed too little.",
            "reason",
        )
        self.pool_acts = self._counter(
            "kv_pool_total",
            "Actions on a shared KV buffer.",
            "reason",
        )
        self.freezes = self._counter(
            "engine_freezes_total",
            "Times that an engine was frozen.",
            "engine",
        )
        self.failures = self._counter(
            "engine_failures_total",
            "Requests that failed by an engine's fault.",
            "engine",
        )
        self.flags_learned = self._counter(
            "engine_flags_learned_total",
            "Flags that were learned, and how.",
            "flag",
            "how",
        )
        self.model_tokens = self._counter(
            "model_prompt_tokens_total",
            "Prompt tokens by model of a router.",
            "model",
            "source",
        )
        self.model_loads = self._counter(
            "model_loads_total", "Times that a router was asked to load a model.", "model", "outcome"
        )
        self.model_load_seconds = self._histogram(
            "model_load_seconds",
            "Loading a model, without saving the other one.",
            PREFILL,
        )

    def _about_snapshots(self) -> None:
        self.operations = self._counter(
            "snapshot_operations_total", "Operations on slot files.", "op", "outcome"
        )
        self.operation_seconds = self._histogram(
            "snapshot_seconds",
            "Operations on slot files, with waits for the engine.",
            FILES,
            "op",
        )
        self.shared_losses = self._counter(
            "shared_losses_total",
            "Times that the shared store, or its hints, was lost.",
            "part",
        )
        self.shared_up = Gauge(
            "slotkeeper_shared_up",
            "Whether the shared store and its hints can be used.",
            ["part"],
            registry=self.registry,
        )

    def _about_itself(self) -> None:
        self.fallbacks = self._counter(
            "fallbacks_total",
            "Parts of Slotkeeper that failed open, and requests without a place.",
            "reason",
        )
        self.registry.register(DROPPED)
        Info("slotkeeper_build", "The sidecar's own version.", registry=self.registry).info(
            {"version": __version__}
        )

    def watch(self, *figures: Collector) -> None:
        """Register collectors, which are read at each scrape."""
        for one in figures:
            self.registry.register(one)

    def forwarded(self, forward: Forward) -> None:
        """Count a request that was sent to an engine."""
        self.decisions.labels(reason=forward.reason.value).inc()
        if forward.waited is not None:
            self.priority_wait.labels(priority=forward.priority.value).observe(forward.waited)

    def planted(self, purpose: Purpose, computed: int, request: RequestId) -> None:
        """Count tokens of our own prefill: idle work at once, a plant together with its request."""
        if purpose.idle:
            self._prefilled("idle", computed)
        else:
            self._planted[request] = self._planted.get(request, 0) + computed

    @property
    def planting(self) -> int:
        """Tokens planted for requests that have not ended: they are in no counter yet."""
        return sum(self._planted.values())

    def forgotten(self, request: RequestId) -> None:
        """Count what was planted for a request that is over without figures of the engine."""
        if tokens := self._planted.pop(request, 0):
            self._prefilled("plant", tokens)
            self._left_out(Unknown.NO_COUNT, tokens)
            self.history.add(requests=1)
            self.history.leave_out(Unknown.NO_COUNT, tokens)

    def _left_out(self, why: Unknown, tokens: int) -> None:
        self.unknown_requests.labels(reason=why.value).inc()
        self.unknown_tokens.labels(reason=why.value).inc(tokens)

    def probed(self, computed: int) -> None:
        """Count tokens that an engine computed for our probes of its properties."""
        if computed:
            self._prefilled("probe", computed)

    def _prefilled(self, purpose: str, computed: int) -> None:
        self.prefill_tokens.labels(purpose=purpose).inc(computed)
        self.history.add(**{purpose: computed})

    def learned(self, name: str, how: Known) -> None:
        self.flags_learned.labels(flag=FLAGS[name], how=how.value).inc()

    def snapshot_operation(self, op: str, outcome: str, seconds: float | None = None) -> None:
        """Count an operation on a slot file. `seconds`: its whole duration, only if it succeeded."""
        self.operations.labels(op=op, outcome=outcome).inc()
        if seconds is not None:
            self.operation_seconds.labels(op=op).observe(seconds)

    def spent(self, stage: Stage, seconds: float) -> None:
        self.overhead.labels(stage=stage).observe(seconds)

    def ended(self, spent: Mapping[Spent, float], request_id: str) -> None:
        """Count the time of a request that has ended."""
        known_as = exemplar(request_id)
        for stage, seconds in spent.items():
            self.stages.labels(stage=stage.value).observe(seconds, known_as)
        if Spent.QUEUE in spent:
            self.queue_wait.observe(spent[Spent.QUEUE], known_as)

    def waited(self, first_token: float | None, stall: float | None, request_id: str) -> None:
        """Count the waits of an answered request, in seconds; None: there is no such figure."""
        known_as = exemplar(request_id)
        for histogram, seconds in ((self.first_token, first_token), (self.stall, stall)):
            if seconds is not None:
                histogram.observe(seconds, known_as)

    def compared(self, waited: float, least: float) -> None:
        """Count the time to first token of a request, and the least that it can have been, in seconds."""
        self.compared_wait.inc(waited)
        self.least_wait.inc(least)

    def fallback(self, reason: Part | Reason) -> None:
        self.fallbacks.labels(reason=reason).inc()

    def cut(self, reason: ConnectionCut) -> None:
        self.cuts.labels(reason=reason.value).inc()

    def refused(self, doubt: Doubt) -> None:
        self.refusals.labels(reason=doubt.value).inc()

    def rewritten(self, rule: RuleName, action: Action) -> None:
        self.rewrites.labels(rule=rule.value, action=action).inc()

    def lost(self, cause: Cause, tokens: int) -> None:
        self.repeated.labels(cause=cause.value).inc(tokens)

    def engine_added(self, engine: EngineId) -> None:
        """Create the metrics of an engine, so that they are zero and not absent."""
        for counter in (self.freezes, self.failures):
            counter.labels(engine=engine)

    def engine_removed(self, engine: EngineId) -> None:
        """Remove the metrics of an engine that is not used any more."""
        for counter in (self.freezes, self.failures):
            counter.remove(engine)

    def loaded(self, model: ModelName, seconds: float | None) -> None:
        """Count a router's loading of a model. `seconds`: its duration; None: it failed."""
        self.model_loads.labels(model=model, outcome="failed" if seconds is None else "ok").inc()
        if seconds is not None:
            self.model_load_seconds.observe(seconds)

    def report(self, report: Report) -> None:
        """Count one answered request by the engine's figures."""
        usage, counted = report.usage, report.counted
        if usage is None or counted is None:
            self.forgotten(report.request)
            return
        self._planted.pop(report.request, None)  # its plants are part of the report
        known_as = exemplar(id_of(report.request))
        self.history.count(counted)
        self.prefill_tokens.labels(purpose="client").inc(usage.evaluated)
        self.prefill_tokens.labels(purpose="plant").inc(usage.planted)
        if report.unknown is not None:
            self._left_out(report.unknown, usage.work)
        self.prompt_tokens.labels(source="cached").inc(usage.reused)
        self.prompt_tokens.labels(source="computed").inc(usage.computed, known_as)
        self.prepared_tokens.inc(usage.prepared)
        self.oracle_tokens.inc(report.oracle or 0)
        if report.model:  # a name of the router's list, so the label is bounded
            computed = "computed" if report.unknown is None else "unknown"
            of_model = (("cached", usage.reused), (computed, usage.computed), ("oracle", report.oracle or 0))
            for source, count in of_model:
                self.model_tokens.labels(model=report.model, source=source).inc(count)
        self.saved_seconds.inc(report.reused_seconds or 0.0)
        self.step_seconds.inc(report.step_seconds)
        if report.predicted is not None:
            self.prediction_error.observe(abs(report.predicted - usage.cached), known_as)
        if report.exact is False:
            self.inexact.inc()
        if report.lost is not None:
            self.lost_tokens.labels(reason=report.lost.why.value).inc(report.lost.tokens, known_as)

    def _touch_all(self) -> None:
        """Make every series exist from the start, with value zero."""
        known: tuple[tuple[Counter | Histogram, Iterable[str]], ...] = (
            (self.decisions, Reason),
            (self.prompt_tokens, ("cached", "computed")),
            (self.prefill_tokens, ("client", "plant", "idle", "probe")),
            (self.lost_tokens, Loss),
            (self.unknown_requests, Unknown),
            (self.unknown_tokens, Unknown),
            (self.repeated, Cause),
            (self.fallbacks, (*get_args(Part), *sorted(WITHOUT_PLACE))),
            (self.refusals, Doubt),
            (self.poisoned, Poison),
            (self.pool_acts, PoolAct),
            (self.priority_acts, PriorityAct),
            (self.priority_wait, Priority),
            (self.overhead, get_args(Stage)),
            (self.stages, Spent),
            (self.cuts, ConnectionCut),
            (self.crowded, Crowded),
            (self.operation_seconds, ("save", "restore", "upload", "find", "collect")),
            (self.shared_losses, get_args(SharedPart)),
        )
        for metric, values in known:
            for value in values:
                metric.labels(value)
        for rule, action in product(RuleName, get_args(Action)):
            self.rewrites.labels(rule, action)
        for flag, how in product(FLAGS.values(), LEARNT):
            self.flags_learned.labels(flag, how)
        for route, outcome in product(Api, OUTCOMES):
            self.requests.labels(route, outcome)
        for op, outcomes in OPERATIONS.items():
            for outcome in outcomes:
                self.operations.labels(op, outcome)


def exemplar(request_id: str) -> dict[str, str] | None:
    """Return the exemplar of a request; None if its id is too long: cut off, it could equal another id."""
    if not request_id or len(EXEMPLAR) + len(request_id) > EXEMPLAR_RUNES:
        return None
    return {EXEMPLAR: request_id}
