"""Recording rules and alerts of Prometheus. docs/alerts.md has a runbook for each alert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from grafana.promql import (
    TOTAL,
    WAITED,
    Scope,
    beyond_oracle,
    computed_again,
    computed_per_oracle,
    hit_ratio,
    ratio,
    wrong_count,
    wrong_predictions,
)
from slotkeeper.scheduler.types import WITHOUT_PLACE, Reason
from slotkeeper.store.trouble import FOLDER, USUAL

RUNBOOKS: Final = "docs/alerts.md"
JOB: Final = "slotkeeper"  # the job name in prometheus.yaml
# Tokens computed for clients per second. With fewer, one unusual request would raise an alarm.
BUSY: Final = 10
SHORT: Final = Scope(matchers="", by=("job", "instance"), window="5m")
LONG: Final = Scope(matchers="", by=("job", "instance"), window="15m")
HOUR: Final = Scope(matchers="", by=("job", "instance"), window="1h")
# Why a request got no place that is the state of its engine: other alerts watch that.
ENGINES: Final = WITHOUT_PLACE - {Reason.FAIL_OPEN}
FEW: Final = 3  # wrong predictions in a quarter of an hour that are no alarm, with whatever share

COMPUTED_PER_ORACLE: Final = "instance:slotkeeper_computed_per_oracle:ratio_rate15m"
TOTAL_PER_ORACLE: Final = "instance:slotkeeper_total_per_oracle:ratio_rate1h"
BEYOND_ORACLE: Final = "instance:slotkeeper_computed_beyond_oracle:ratio_rate15m"
AGAIN: Final = "instance:slotkeeper_computed_again_tokens:rate15m"
UNKNOWN: Final = "instance:slotkeeper_unknown_per_request:ratio_rate15m"
COMPUTED: Final = "instance:slotkeeper_computed_tokens:rate15m"
HITS: Final = "instance:slotkeeper_cached_per_prompt:ratio_rate15m"
WRONG: Final = "instance:slotkeeper_predictions_wrong:ratio_rate15m"
FAILED: Final = "instance:slotkeeper_requests_failed:ratio_rate5m"
QUEUE: Final = "instance:slotkeeper_queue_wait_seconds:p95_rate5m"
LATENCY: Final = "instance:slotkeeper_time_to_first_token_seconds:p95_rate5m"

RECORDINGS: Final[Mapping[str, str]] = {
    COMPUTED_PER_ORACLE: computed_per_oracle(LONG),
    TOTAL_PER_ORACLE: computed_per_oracle(HOUR, TOTAL),
    BEYOND_ORACLE: beyond_oracle(LONG),
    AGAIN: computed_again(LONG),
    UNKNOWN: ratio(LONG.rate("unknown_requests_total"), LONG.rate("requests_total")),
    COMPUTED: LONG.rate("prefill_tokens_total", purpose=WAITED),
    HITS: hit_ratio(LONG),
    WRONG: wrong_predictions(LONG),
    FAILED: ratio(
        SHORT.rate("requests_total", outcome="~upstream_error|broken"), SHORT.rate("requests_total")
    ),
    QUEUE: SHORT.quantile(0.95, "queue_wait_seconds"),
    LATENCY: SHORT.quantile(0.95, "time_to_first_token_seconds"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert fires if `measure` compares with `threshold` as `over` says, and `meanwhile` has a value."""

    name: str
    measure: str
    over: str  # comparison: ">", "<", "=="
    threshold: float
    hold: str  # how long the condition must hold; empty if `measure` covers a window itself
    severity: str
    summary: str
    meanwhile: str = ""

    @property
    def expr(self) -> str:
        compared = f"{self.measure} {self.over} {self.threshold:g}"
        return f"{compared} and {self.meanwhile}" if self.meanwhile else compared

    @property
    def runbook(self) -> str:
        return f"{RUNBOOKS}#{self.name.lower()}"


def _in_state(*states: str) -> str:
    """Return the series of engines that are in one of these states; it lasts when one follows another."""
    return f"sum by (job, instance, engine) ({LONG.series('engine_state', state='~' + '|'.join(states))})"


ALERTS: Final = (
    Alert(
        name="SlotkeeperDown",
        measure=f'up{{job="{JOB}"}}',
        over="==",
        threshold=0,
        hold="2m",
        severity="critical",
        summary="Slotkeeper does not answer on its admin port.",
    ),
    Alert(
        name="SlotkeeperEngineDown",
        measure=_in_state("down", "awaited", "frozen", "foreign", "loop"),
        over="==",
        threshold=1,
        hold="2m",
        severity="critical",
        summary="The engine {{ $labels.engine }} does not answer.",
    ),
    Alert(
        name="SlotkeeperSlotsUnknown",
        measure=_in_state("key_refused", "no_slots", "unprobed"),
        over="==",
        threshold=1,
        hold="10m",
        severity="warning",
        summary="The engine {{ $labels.engine }} answers but does not show its slots, so none is chosen.",
    ),
    Alert(
        name="SlotkeeperEngineFailing",
        measure=f"avg_over_time({LONG.series('engine_state', state='failing')}[{LONG.window}])",
        over=">",
        threshold=0.5,
        hold="5m",  # else the first minute of a sidecar could be enough
        severity="warning",
        summary="The engine {{ $labels.engine }} answers, but requests fail there.",
    ),
    Alert(
        name="SlotkeeperRequestsFail",
        measure=FAILED,
        over=">",
        threshold=0.05,
        hold="10m",
        severity="critical",
        summary="{{ $value | humanizePercentage }} of all requests fail in the engine or break off.",
    ),
    Alert(
        name="SlotkeeperQueueLong",
        measure=QUEUE,
        over=">",
        threshold=30,
        hold="10m",
        severity="warning",
        summary="One request in twenty waits {{ $value | humanizeDuration }} or longer for a slot.",
    ),
    Alert(
        name="SlotkeeperComputesTwice",
        measure=BEYOND_ORACLE,
        over=">",
        threshold=1.3,
        hold="15m",
        severity="warning",
        summary="Clients wait for {{ $value | humanize }} times what a perfect cache would compute.",
        meanwhile=f"{COMPUTED} > {BUSY}",
    ),
    Alert(
        name="SlotkeeperNothingCached",
        measure=HITS,
        over="<",
        threshold=0.1,
        hold="30m",
        severity="warning",
        summary="Only {{ $value | humanizePercentage }} of all prompt tokens were reused.",
        meanwhile=f"{AGAIN} > {BUSY}",  # prompts that are all new are no fault
    ),
    Alert(
        name="SlotkeeperPredictsWrong",
        measure=WRONG,
        over=">",
        threshold=0.05,
        hold="15m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of all answers reused other tokens than predicted.",
        meanwhile=f"{wrong_count(LONG)} > {FEW}",
    ),
    Alert(
        name="SlotkeeperCountsDiffer",
        measure=LONG.increase("inexact_prompts_total"),
        over=">",
        threshold=0,
        hold="",
        severity="warning",
        summary="The engine's token count of prompts differed from Slotkeeper's.",
    ),
    Alert(
        name="SlotkeeperFailsOpen",
        measure=LONG.increase("fallbacks_total", "reason", reason=f"!~{'|'.join(sorted(ENGINES))}"),
        over=">",
        threshold=3,
        hold="",
        severity="warning",
        summary="Slotkeeper failed and sent requests on unchanged: {{ $labels.reason }}, in 15 minutes.",
    ),
    Alert(
        name="SlotkeeperSlotFolder",
        measure=LONG.increase(
            "snapshot_operations_total", "outcome", op="~open|save", outcome=f"~{'|'.join(FOLDER)}"
        ),
        over=">",
        threshold=0,
        hold="",
        severity="warning",
        summary="Slots are not saved, because of the slot folder: {{ $labels.outcome }}.",
    ),
    Alert(
        name="SlotkeeperSnapshotsFail",
        measure=LONG.increase("snapshot_operations_total", "op", outcome=f"!~{'|'.join((*USUAL, *FOLDER))}"),
        over=">",
        threshold=3,
        hold="",
        severity="warning",
        summary="Snapshots: {{ $labels.op }} failed in the last 15 minutes.",
    ),
)


def recording() -> dict[str, Any]:
    rules = [{"record": name, "expr": expr} for name, expr in RECORDINGS.items()]
    return {"groups": [{"name": "slotkeeper-recording", "rules": rules}]}


def alerts() -> dict[str, Any]:
    return {"groups": [{"name": "slotkeeper-alerts", "rules": [_rule(alert) for alert in ALERTS]}]}


def for_operator() -> dict[str, Any]:
    """Return the same groups as one object for the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": JOB, "labels": {"app.kubernetes.io/name": JOB}},
        "spec": {"groups": [*recording()["groups"], *alerts()["groups"]]},
    }


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        **({"for": alert.hold} if alert.hold else {}),
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook": alert.runbook},
    }
