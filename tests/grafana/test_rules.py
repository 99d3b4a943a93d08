"""Rules, checked by Prometheus' own promtool: they are well formed, and each alert fires when it should."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from docs.generate import heading_anchors
from grafana.__main__ import HERE
from grafana.rules import ALERTS, BEYOND_ORACLE, COMPUTED_PER_ORACLE, ENGINES, JOB, QUEUE, RUNBOOKS

from playbooks.playbook import ends, filled, knows, sees, starts
from programs import program
from slotkeeper.observe.metrics import Metrics
from slotkeeper.scheduler.effects import Forward, Prefill, Report
from slotkeeper.scheduler.prompts.tokens import Boundary, BoundaryKind, Tokens
from unit.observe.watched import WatchedPlay

ROOT: Final = HERE.parent
RULES: Final = (HERE / "prometheus/recording.yaml", HERE / "prometheus/alerts.yaml")
MINUTES: Final = 60  # length of each scene

Series = Mapping[str, int]  # name and labels -> increase per minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Counters for which an alert fires, and counters for which it just does not. A gauge has its value."""

    fires: Series
    quiet: Series
    gauges: bool = False


def tokens(client: int, plant: int, oracle: int, cached: int) -> Series:
    return {
        'prefill_tokens_total{purpose="client"}': client,
        'prefill_tokens_total{purpose="plant"}': plant,
        'prefill_tokens_total{purpose="idle"}': 100_000,  # no client waits for these
        "oracle_tokens_total": oracle,
        'unknown_tokens_total{reason="no_slots"}': 0,
        'lost_tokens_total{reason="bypassed"}': 0,
        'lost_tokens_total{reason="overwritten"}': max(0, client + plant - oracle),
        'repeated_tokens_total{cause="date"}': 0,
        'prompt_tokens_total{source="computed"}': client,
        'prompt_tokens_total{source="cached"}': cached,
    }


def waiting(within_10s: int, longer: int) -> Series:
    bucket = "queue_wait_seconds_bucket"
    return {
        f'{bucket}{{le="10.0"}}': within_10s,
        f'{bucket}{{le="60.0"}}': within_10s + longer,
        f'{bucket}{{le="+Inf"}}': within_10s + longer,
    }


def predicted(right: int, wrong: int) -> Series:
    error = "prediction_error_tokens"
    return {f'{error}_bucket{{le="64.0"}}': right, f"{error}_count": right + wrong}


def states(**values: int) -> Series:
    return {f'engine_state{{engine="a",state="{state}"}}': value for state, value in values.items()}


def operation(op: str, outcome: str) -> str:
    return f'snapshot_operations_total{{op="{op}",outcome="{outcome}"}}'


def requests(ok: int, gone: int, broken: int) -> Series:
    counts = {"ok": ok, "client_gone": gone, "broken": broken}
    return {f'requests_total{{outcome="{outcome}",route="chat"}}': count for outcome, count in counts.items()}


SCENES: Final = {
    "SlotkeeperDown": Scene(fires={"up": 0}, quiet={"up": 1}, gauges=True),
    "SlotkeeperEngineDown": Scene(
        fires=states(down=0, awaited=1, frozen=0, up=0),
        quiet=states(down=0, awaited=0, up=0, drained=1, loading=1),  # a drained one may well be down
        gauges=True,
    ),
    "SlotkeeperSlotsUnknown": Scene(
        fires=states(no_slots=1, up=0), quiet=states(no_slots=0, probing=1), gauges=True
    ),
    "SlotkeeperEngineFailing": Scene(
        fires=states(failing=1, up=0), quiet=states(failing=0, up=1), gauges=True
    ),
    "SlotkeeperRequestsFail": Scene(fires=requests(80, 10, 10), quiet=requests(80, 18, 2)),
    "SlotkeeperQueueLong": Scene(fires=waiting(80, 20), quiet=waiting(99, 1)),
    "SlotkeeperComputesTwice": Scene(
        fires=tokens(1000, 1000, 1000, 9000),  # because of plants for clients
        quiet=tokens(1100, 100, 1000, 9000),
    ),
    "SlotkeeperNothingCached": Scene(
        fires={**tokens(1000, 0, 1000, 10), 'repeated_tokens_total{cause="date"}': 900},
        quiet=tokens(1000, 0, 1000, 10),  # all prompts are new
    ),
    "SlotkeeperPredictsWrong": Scene(fires=predicted(90, 10), quiet=predicted(99, 1)),
    "SlotkeeperCountsDiffer": Scene(fires={"inexact_prompts_total": 1}, quiet={"inexact_prompts_total": 0}),
    "SlotkeeperFailsOpen": Scene(
        fires={'fallbacks_total{reason="fail_open"}': 1},
        quiet={'fallbacks_total{reason="fail_open"}': 0},
    ),
    "SlotkeeperSlotFolder": Scene(
        fires={operation("open", "missing_folder"): 2}, quiet={operation("open", "ok"): 2}
    ),
    "SlotkeeperSnapshotsFail": Scene(
        fires={operation("save", "torn"): 1}, quiet={operation("save", "ok"): 100}
    ),
}


def series(scene: Series, *, gauges: bool) -> list[dict[str, str]]:
    """Return the series of one sidecar as promtool reads them."""
    made = []
    for name, growth in scene.items():
        metric, _, labels = name.removesuffix("}").partition("{")
        named = f'{metric if metric == "up" else f"slotkeeper_{metric}"}{{job="{JOB}",instance="i"'
        values = f"{growth}+0x{MINUTES}" if gauges else f"0+{growth}x{MINUTES}"
        made.append({"series": f"{named},{labels}}}" if labels else f"{named}}}", "values": values})
    return made


def firing(scene: Series, expected: list[str], *, gauges: bool) -> dict[str, Any]:
    """Return a test for promtool: these alerts fire at the end, and no others."""
    return {
        "interval": "1m",
        "input_series": series(scene, gauges=gauges),
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected],
            }
        ],
    }


def promtool(*words: str | Path) -> str:
    done = subprocess.run([program("promtool"), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def outcome(folder: Path, tests: list[dict[str, Any]]) -> str:
    """Return promtool's messages; empty if all passed."""
    document = {
        "rule_files": [str(path) for path in RULES],
        "evaluation_interval": "1m",
        "tests": tests,
    }
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump(document), "utf-8")
    done = subprocess.run(
        [program("promtool"), "test", "rules", path], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_rules_are_well_formed():
    assert "SUCCESS" in promtool("check", "rules", *RULES)


def test_the_configuration_is_well_formed():
    promtool("check", "config", "--syntax-only", HERE / "prometheus/prometheus.yaml")


def test_every_alert_has_a_scene():
    assert set(SCENES) == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("name", SCENES)
def test_an_alert_fires_only_for_its_counters(name, tmp_path):
    scene = SCENES[name]
    tests = [
        firing(scene.fires, [name], gauges=scene.gauges),
        firing(scene.quiet, [], gauges=scene.gauges),
    ]
    assert outcome(tmp_path, tests) == ""


def test_an_alert_that_does_not_fire_is_detected(tmp_path):
    quiet = SCENES["SlotkeeperDown"].quiet
    assert "FAILED" in outcome(tmp_path, [firing(quiet, ["SlotkeeperDown"], gauges=True)])


QUIET: Final = {
    "little traffic": tokens(100, 0, 10, 0),  # one unusual request in a quiet hour says nothing
    "an oracle that is unknown": {
        **tokens(11_000, 0, 1000, 10),
        'unknown_tokens_total{reason="no_slots"}': 10_000,
        'lost_tokens_total{reason="overwritten"}': 0,
    },
    "clients that bypass the cache": {
        **tokens(11_000, 0, 1000, 10),
        'lost_tokens_total{reason="bypassed"}': 10_000,
        'lost_tokens_total{reason="overwritten"}': 0,
    },
}


@pytest.mark.parametrize("name", QUIET)
def test_tokens_that_are_no_fault_of_the_cache_fire_no_alert(name, tmp_path):
    assert outcome(tmp_path, [firing(QUIET[name], [], gauges=False)]) == ""


@pytest.mark.parametrize("reason", ["render", "plant", "placement", "fail_open", *sorted(ENGINES)])
def test_only_our_own_faults_fire_the_alert_that_we_fail_open(tmp_path, reason):
    """What no engine takes is told by the state of the engines."""
    fires = ["SlotkeeperFailsOpen"] if reason not in ENGINES else []
    scene = firing({f'fallbacks_total{{reason="{reason}"}}': 10}, fires, gauges=False)
    assert outcome(tmp_path, [scene]) == ""


def test_one_wrong_prediction_in_few_requests_does_not_fire_an_alert(tmp_path):
    """One request in three minutes, and each fourth of them is wrong."""
    error = "slotkeeper_prediction_error_tokens"
    minutes = range(MINUTES + 1)
    made = {"bucket": [m // 3 - m // 12 for m in minutes], "count": [m // 3 for m in minutes]}
    scene = firing({}, [], gauges=False) | {
        "input_series": [
            {
                "series": f'{error}_{part}{{job="{JOB}",instance="i"{extra}}}',
                "values": " ".join(map(str, made[part])),
            }
            for part, extra in (("bucket", ',le="64.0"'), ("count", ""))
        ]
    }
    assert outcome(tmp_path, [scene]) == ""


# -- an hour of one slow client ----------------------------------------------------------------------------

RATE: Final = 60.0  # prefill tokens per second
ANSWER: Final = 20.0  # seconds
BATCH: Final = 512  # tokens between two reports of progress
HEAD: Final = 9000  # tokens before the first message


class SlowHour(WatchedPlay):
    """Our own scheduler, journal and metrics in simulated time, with a scrape every minute.

    One client sends a request after the other. Each takes minutes, although both slots are free.
    """

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.scrapes: list[dict[str, float]] = []
        super().__init__(n_slots=2, eager_thinning=False)
        self.began = self.clock
        self._scrape()

    def later(self, seconds: float) -> SlowHour:
        end = self.clock + seconds
        while (due := self.began + 60 * len(self.scrapes)) <= end:
            self.clock = due
            self._scrape()
        self.clock = end
        return self

    def _scrape(self) -> None:
        seen = {"up": 1.0}
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                seen[f"{sample.name}{{{labels}}}"] = sample.value
        self.scrapes.append(seen)

    def ask(self, number: int) -> None:
        """Serve one request as an engine of RATE would."""
        prompt = Tokens(range(100_000 * number, 100_000 * number + HEAD + 3000))
        request = f"r{number}"
        came = self.comes(request)
        _ = self << knows(request, prompt, Boundary(HEAD, BoundaryKind.HEAD))
        if self.looking:  # its slots were not seen for some time
            _ = self << sees()
        while isinstance(step := self.effects.popleft(), Prefill):
            self.step = step
            self._plant(step)
        assert isinstance(step, Forward)
        cached = self.pending(request).predicted or 0
        self.later((len(prompt) - cached) / RATE) << starts(request)
        came.first_token = self.clock - came.at
        spent = (len(prompt) - cached) / RATE
        _ = self.later(ANSWER) << ends(request, len(prompt), cached, prefill_seconds=spent)
        report = self.effects.popleft()
        assert isinstance(report, Report)
        self.metrics.report(report)
        self.metrics.ended(came.spent(self.clock), request)
        self.metrics.waited(came.first_token, None, request)
        self.metrics.requests.labels(route="chat", outcome="ok").inc()

    def _plant(self, plant: Prefill) -> None:
        shadow = self.table.shadow
        computed = len(plant.tokens) - shadow.plan_reuse(plant.place.slot, plant.tokens).reuse
        for _ in range(0, computed, BATCH):
            self.later(BATCH / RATE)
            self.metrics.planted(plant.purpose, min(BATCH, computed), plant.request)
        _ = self << filled(computed, seconds=computed / RATE)

    def series(self) -> list[dict[str, str]]:
        """Return what Prometheus has seen, as promtool reads it."""
        made = []
        for name in self.scrapes[0]:
            metric, _, labels = name.removesuffix("}").partition("{")
            series = f'{metric}{{job="{JOB}",instance="i"{"," if labels else ""}{labels}}}'
            values = " ".join(f"{scrape[name]:g}" for scrape in self.scrapes)
            made.append({"series": series, "values": values})
        return made


def test_no_alert_is_even_pending_in_an_hour_of_one_slow_client(tmp_path):
    hour, number = SlowHour(), 0
    while len(hour.scrapes) <= MINUTES:
        number += 1
        hour.ask(number)
    value = hour.metrics.registry.get_sample_value
    assert value("slotkeeper_prefill_tokens_total", {"purpose": "plant"}) > 9000 * (number - 1)
    assert number > 10, "a client that waits for minutes"
    never = (
        "count_over_time(ALERTS[1h])",
        f"max_over_time({COMPUTED_PER_ORACLE}[1h]) > 1.05",
        f"max_over_time({BEYOND_ORACLE}[1h]) > 1.05",
        f"max_over_time({QUEUE}[1h]) > 1",
    )
    seen = {
        "interval": "1m",
        "input_series": hour.series(),
        "promql_expr_test": [{"expr": expr, "eval_time": f"{MINUTES}m", "exp_samples": []} for expr in never],
    }
    assert outcome(tmp_path, [seen]) == ""


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_links_to_its_runbook(alert):
    page, _, anchor = alert.runbook.partition("#")
    assert page == RUNBOOKS
    anchors = heading_anchors((ROOT / page).read_text("utf-8"))
    assert anchors.get(alert.name) == anchor
