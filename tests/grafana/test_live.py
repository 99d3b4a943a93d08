"""A real Prometheus and a real sidecar: all panels and rules find data, and exemplars name requests."""

from __future__ import annotations

import json
import math
import subprocess
from typing import Any, Final

import httpx
import pytest
from grafana.__main__ import HERE
from grafana.rules import ALERTS, RECORDINGS

from patience import PATIENCE
from programs import program
from scraping import REQUEST_IDS, TOKEN, Watched
from slotkeeper.engine.child.launch import runs_skulk

DASHBOARD: Final = json.loads((HERE / "dashboards/slotkeeper.json").read_text("utf-8"))
EXPRESSIONS: Final = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
}
# As Grafana fills them in, with "All" selected and for the minutes since the sidecar's start.
VARIABLES: Final = {"$__rate_interval": "2m", "$__range": "2m", "$job": ".*", "$instance": ".*"}
EXEMPLARS: Final = (
    "slotkeeper_time_to_first_token_seconds_bucket",
    "slotkeeper_queue_wait_seconds_bucket",
    "slotkeeper_prediction_error_tokens_bucket",
)


def finite(watched: Watched, expr: str) -> list[float]:
    return [value for value in watched.prometheus.values_since(watched.began, expr) if math.isfinite(value)]


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_panel_has_data(watched, name):
    expr = EXPRESSIONS[name]
    if "slotkeeper_model_" in expr and not runs_skulk():
        pytest.skip("no router runs here: only the program of b10434 is one")
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    assert finite(watched, expr), expr


@pytest.mark.parametrize("label", ["job", "instance"])
def test_a_variable_has_values(watched, label):
    assert watched.prometheus.get(f"label/{label}/values", **{"match[]": "slotkeeper_build_info"})


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_has_data(watched, name):
    assert finite(watched, name)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_the_series_that_an_alert_compares_have_data(watched, alert):
    assert finite(watched, alert.measure)
    if alert.meanwhile:
        measured, _, _ = alert.meanwhile.partition(" > ")
        assert finite(watched, measured)


def test_every_rule_is_evaluated_and_no_alert_fires_on_a_healthy_sidecar(watched):
    rules: list[dict[str, Any]] = [
        rule for group in watched.prometheus.get("rules")["groups"] for rule in group["rules"]
    ]
    assert len(rules) == len(RECORDINGS) + len(ALERTS)
    assert [rule for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


@pytest.mark.parametrize("selector", EXEMPLARS)
def test_exemplars_name_the_requests_of_clients(watched, selector):
    assert watched.prometheus.exemplars(selector) & set(REQUEST_IDS)


def test_the_last_computed_tokens_name_their_request(watched):
    named = watched.prometheus.exemplars('slotkeeper_prompt_tokens_total{source="computed"}')
    assert REQUEST_IDS[-1] in named
    assert watched.prometheus.exemplars('slotkeeper_prompt_tokens_total{source="cached"}') == set()


def test_promtool_accepts_the_metrics_without_a_message(watched):
    token = {"Authorization": f"Bearer {TOKEN}"}
    scraped = httpx.get(f"{watched.admin}/metrics", headers=token, timeout=PATIENCE)
    assert scraped.is_success
    done = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=scraped.text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
