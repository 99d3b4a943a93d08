"""Metrics: names that dashboards rely on, the rules of Prometheus, and counts by the engine's figures."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final, get_args

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from slotkeeper import __version__
from slotkeeper.api.head import Api
from slotkeeper.observe.gauges import EngineFigures, SlotFigures
from slotkeeper.observe.metrics import OUTCOMES, Metrics, Part
from slotkeeper.observe.request_record import ClientFigures, Clients
from slotkeeper.observe.states import EngineSeen, EngineState, Spent
from slotkeeper.scheduler.effects import Purpose, Report
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.requests.figures import Loss, Lost, Unknown, Usage
from slotkeeper.scheduler.slots.table import SlotState
from slotkeeper.scheduler.types import WITHOUT_PLACE, EngineId, ModelName, Reason, RequestId
from slotkeeper.store.trouble import OPERATIONS
from unit.observe.watched import record

UNITS: Final = ("_seconds", "_bytes", "_tokens")
ABBREVIATED: Final = re.compile(
    r"_(ms|us|sec|secs|millis|milliseconds|minutes|hours|kb|mb|kib|mib|percent)(_|$)"
)

REPORT: Final = Report(
    request=RequestId("1:r"),
    reason=Reason.PREFIX,
    slot=0,
    usage=Usage(prompt=1000, cached=900),
    predicted=900,
    oracle=80,
    exact=True,
)


ENGINE: Final = EngineId("http://e")


@pytest.fixture
def engines() -> list[EngineSeen]:
    return [EngineSeen(engine=ENGINE, state=EngineState.UP, answers=True, losses=0)]


@pytest.fixture
def metrics(engines) -> Metrics:
    made = Metrics()
    clients = Clients()
    clients.add(record(client="0123456789abcdef/0123", usage=REPORT.usage, reused_seconds=1.0))
    made.watch(SlotFigures(lambda: Placement(ENGINE)), EngineFigures(lambda: engines), ClientFigures(clients))
    return made


@pytest.fixture
def used(metrics) -> Metrics:
    """Return metrics in which every series exists."""
    metrics.engine_added(ENGINE)
    metrics.shared_up.labels(part="store")
    metrics.report(replace(REPORT, model=ModelName("coder")))
    metrics.loaded(ModelName("coder"), 1.5)
    return metrics


def families(metrics):
    """Return the families as a scraper reads them, each under the name that its users write."""
    text = generate_latest(metrics.registry).decode()
    for family in text_string_to_metric_families(text):
        yield family.name + ("_total" if family.type == "counter" else ""), family


def value(metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"slotkeeper_{name}", labels)
    assert found is not None, f"there is no series {name} {labels}"
    return found


# -- names ---------------------------------------------------------------------------------------------


def test_metric_names_follow_the_rules_of_prometheus(used):
    for name, family in families(used):
        assert re.fullmatch(r"slotkeeper_[a-z][a-z0-9_]*", name), name  # so no colons: those are for rules
        assert not ABBREVIATED.search(name), f"{name}: base units, written out"
        assert (family.type == "counter") == name.endswith("_total"), name
        assert family.documentation.endswith("."), name
        if family.type == "histogram":
            assert name.endswith(UNITS), f"{name} has no unit"
        for sample in family.samples:
            assert not {"le", "quantile"} & set(sample.labels) or family.type == "histogram"


def test_the_version_is_a_metric(metrics):
    assert value(metrics, "build_info", version=__version__) == 1


# -- series exist from the start -----------------------------------------------------------------------


def test_series_exist_with_zero_before_anything_is_counted(metrics):
    for reason in Reason:
        assert value(metrics, "decisions_total", reason=reason.value) == 0
    for source in ("cached", "computed"):
        assert value(metrics, "prompt_tokens_total", source=source) == 0
    for purpose in ("client", "plant", "idle", "probe"):
        assert value(metrics, "prefill_tokens_total", purpose=purpose) == 0
    for route in Api:
        for outcome in OUTCOMES:
            assert value(metrics, "requests_total", route=route.value, outcome=outcome) == 0
    for state in SlotState:
        assert value(metrics, "slots", state=state.value) == 0


def test_series_of_failures_exist_with_zero_before_any_failure(metrics):
    for reason in (*get_args(Part), *WITHOUT_PLACE):
        assert value(metrics, "fallbacks_total", reason=reason) == 0
    for loss in Loss:
        assert value(metrics, "lost_tokens_total", reason=loss.value) == 0
    for op, outcomes in OPERATIONS.items():
        for outcome in outcomes:
            assert value(metrics, "snapshot_operations_total", op=op, outcome=outcome) == 0


def test_counting_creates_no_new_series(metrics):
    """Labels are bounded, and Prometheus sees the first event of a kind as an increase."""

    def series():
        return {(s.name, *s.labels.items()) for family in metrics.registry.collect() for s in family.samples}

    before = series()
    metrics.report(replace(REPORT, lost=Lost(Loss.OVERWRITTEN, 20), reused_seconds=2.5))
    metrics.fallback("render")
    metrics.spent("parse", 0.001)
    metrics.ended(dict.fromkeys(Spent, 1.0), "r")
    metrics.waited(1, 2, "r")
    metrics.compared(2.0, 1.0)
    metrics.snapshot_operation("save", "ok", 0.1)
    metrics.snapshot_operation("restore", "refused")
    metrics.planted(Purpose.PLANT, 50, REPORT.request)
    metrics.forgotten(REPORT.request)
    assert series() == before


# -- one report ----------------------------------------------------------------------------------------


def test_a_report_is_counted_by_the_figures_of_the_engine(metrics):
    metrics.report(replace(REPORT, predicted=5))  # a prediction is counted only as an error
    assert value(metrics, "prompt_tokens_total", source="cached") == 900
    assert value(metrics, "prompt_tokens_total", source="computed") == 100
    assert value(metrics, "prefill_tokens_total", purpose="client") == 100
    assert value(metrics, "oracle_tokens_total") == 80
    assert value(metrics, "prediction_error_tokens_sum") == 895


def test_an_answer_without_figures_counts_nothing(metrics):
    before = generate_latest(metrics.registry)
    metrics.report(replace(REPORT, usage=None))
    assert generate_latest(metrics.registry) == before


def test_a_request_whose_oracle_is_unknown_is_in_neither_sum_and_its_number_is_shown(metrics):
    metrics.report(REPORT)
    blind = replace(REPORT, oracle=None, predicted=None, exact=None, unknown=Unknown.NO_SLOTS)
    metrics.report(replace(blind, usage=Usage(prompt=5000, cached=0, planted=40)))
    assert value(metrics, "oracle_tokens_total") == 80
    assert value(metrics, "prefill_tokens_total", purpose="client") == 5100
    assert value(metrics, "prefill_tokens_total", purpose="plant") == 40
    assert value(metrics, "unknown_requests_total", reason="no_slots") == 1
    assert value(metrics, "unknown_tokens_total", reason="no_slots") == 5040
    sums = metrics.history.totals
    assert (sums.waited, sums.total, sums.unknown_requests) == (100 / 80, 100 / 80, 1)
    assert sums.shown()["unknown"] == {"no_slots": 1}


def test_a_report_without_known_tokens_is_counted_by_the_engines_figures(metrics):
    metrics.report(replace(REPORT, oracle=None, predicted=None, exact=None, unknown=Unknown.NO_TOKENS))
    assert value(metrics, "oracle_tokens_total") == 0
    assert metrics.history.totals.waited is None
    assert value(metrics, "prediction_error_tokens_count") == 0
    assert value(metrics, "inexact_prompts_total") == 0
    assert value(metrics, "prompt_tokens_total", source="computed") == 100


@pytest.mark.parametrize(("exact", "counted"), [(True, 0), (False, 1), (None, 0)])
def test_only_a_wrong_token_count_makes_a_prompt_inexact(metrics, exact, counted):
    metrics.report(replace(REPORT, exact=exact))
    assert value(metrics, "inexact_prompts_total") == counted


@pytest.mark.parametrize("purpose", Purpose)
def test_prefills_of_the_sidecar_are_never_counted_as_those_of_a_client(metrics, purpose):
    metrics.planted(purpose, 50, REPORT.request)
    metrics.forgotten(REPORT.request)
    assert value(metrics, "prefill_tokens_total", purpose="idle" if purpose.idle else "plant") == 50
    assert value(metrics, "prefill_tokens_total", purpose="client") == 0
    assert value(metrics, "prompt_tokens_total", source="computed") == 0


def test_tokens_planted_for_a_request_are_not_counted_as_reused(metrics):
    metrics.planted(Purpose.PLANT, 850, REPORT.request)
    metrics.report(replace(REPORT, usage=Usage(prompt=1000, cached=900, planted=850, prepared=20)))
    assert value(metrics, "prompt_tokens_total", source="cached") == 50
    assert value(metrics, "prompt_tokens_total", source="computed") == 950
    assert value(metrics, "prepared_tokens_total") == 20
    assert value(metrics, "prefill_tokens_total", purpose="client") == 100
    assert value(metrics, "prefill_tokens_total", purpose="plant") == 850
    assert (metrics.history.totals.waited, metrics.history.totals.hit_rate) == (950 / 80, 0.05)


def test_a_plant_is_counted_at_the_same_moment_as_the_oracle_of_its_request(metrics):
    """During a long prefill, waited must not rise and fall again when its request ends."""
    metrics.report(REPORT)
    for _ in range(10):
        metrics.planted(Purpose.PLANT, 512, RequestId("8:next"))
        assert value(metrics, "prefill_tokens_total", purpose="plant") == 0
        assert metrics.history.totals.waited == 100 / 80
    usage = Usage(prompt=6000, cached=5120, planted=5120)
    metrics.report(replace(REPORT, request=RequestId("8:next"), usage=usage, oracle=6000))
    metrics.forgotten(RequestId("8:next"))
    assert value(metrics, "prefill_tokens_total", purpose="plant") == 5120
    assert metrics.history.totals.waited == 6100 / 6080


def test_plants_of_a_request_that_ends_without_figures_are_in_no_ratio(metrics):
    metrics.report(REPORT)
    metrics.planted(Purpose.PLANT, 512, RequestId("8:next"))
    metrics.report(replace(REPORT, request=RequestId("8:next"), usage=None, oracle=None))
    assert value(metrics, "prefill_tokens_total", purpose="plant") == 512
    assert value(metrics, "unknown_tokens_total", reason="no_count") == 512
    sums = metrics.history.totals
    assert (sums.engine, sums.waited, sums.requests, sums.unknown_requests) == (612, 100 / 80, 2, 1)


def test_tokens_computed_by_probes_are_counted_neither_for_clients_nor_as_idle_work(metrics):
    metrics.probed(16)
    assert value(metrics, "prefill_tokens_total", purpose="probe") == 16
    assert metrics.history.totals.engine == 16
    assert metrics.history.totals.total is None


def test_lost_tokens_and_saved_time_are_counted(metrics):
    metrics.report(replace(REPORT, lost=Lost(Loss.OVERWRITTEN, 20), reused_seconds=2.5))
    assert value(metrics, "lost_tokens_total", reason="overwritten") == 20
    assert value(metrics, "prefill_saved_seconds_total") == 2.5


def test_time_for_steps_is_subtracted_even_if_the_saved_time_becomes_negative(metrics):
    metrics.report(replace(REPORT, reused_seconds=0.5, step_seconds=0.75))
    assert value(metrics, "prefill_saved_seconds_total") == 0.5
    assert value(metrics, "step_seconds_total") == 0.75
    assert metrics.history.totals.shown()["saved_seconds"] == -0.25


# -- exemplars -----------------------------------------------------------------------------------------


def exemplars(metrics) -> dict[str, set[str]]:
    """Return family -> the request ids in its exemplars, as a scraper of OpenMetrics reads them."""
    text = openmetrics.generate_latest(metrics.registry).decode()
    named: dict[str, set[str]] = {}
    for family in openmetrics_families(text):
        for sample in family.samples:
            if sample.exemplar:
                named.setdefault(family.name, set()).add(sample.exemplar.labels["request_id"])
    return named


@pytest.fixture
def counted():
    """Return metrics in which one request was counted, with the id that its client chose."""

    def count(request_id: str) -> Metrics:
        metrics = Metrics()
        lost = Lost(Loss.OVERWRITTEN, 20)
        metrics.report(replace(REPORT, request=RequestId(f"7:{request_id}"), lost=lost))
        metrics.ended({Spent.QUEUE: 1.0, Spent.PREFILL: 2.0}, request_id)
        metrics.waited(1, 2, request_id)
        return metrics

    return count


def test_exemplars_name_the_request(counted):
    assert exemplars(counted("a:b")) == {
        "slotkeeper_prompt_tokens": {"a:b"},
        "slotkeeper_prediction_error_tokens": {"a:b"},
        "slotkeeper_time_to_first_token_seconds": {"a:b"},
        "slotkeeper_answer_stall_seconds": {"a:b"},
        "slotkeeper_queue_wait_seconds": {"a:b"},
        "slotkeeper_stage_seconds": {"a:b"},
        "slotkeeper_lost_tokens": {"a:b"},
    }


@pytest.mark.parametrize(("length", "named"), [(118, True), (119, False), (128, False)])
def test_an_id_that_is_too_long_for_an_exemplar_is_left_out_and_still_counted(counted, length, named):
    metrics = counted("i" * length)  # 128 runes in all, and the label's name has 10
    assert exemplars(metrics) == ({} if not named else exemplars(counted("i" * 118)))
    assert value(metrics, "queue_wait_seconds_count") == 1
    assert value(metrics, "prompt_tokens_total", source="computed") == 100


# -- gauges --------------------------------------------------------------------------------------------


def test_a_lost_engine_is_shown_as_down(metrics, engines):
    assert value(metrics, "engine_up", engine=ENGINE) == 1
    engines[0] = EngineSeen(engine=ENGINE, state=EngineState.DOWN, answers=False, losses=1)
    assert value(metrics, "engine_up", engine=ENGINE) == 0
    assert value(metrics, "engine_losses_total", engine=ENGINE) == 1


@pytest.mark.parametrize("state", EngineState)
def test_an_engine_is_in_one_state(metrics, engines, state):
    engines[0] = EngineSeen(engine=ENGINE, state=state, answers=True, losses=0)
    told = {other: value(metrics, "engine_state", engine=ENGINE, state=other.value) for other in EngineState}
    assert told == {other: float(other is state) for other in EngineState}


def test_a_model_that_is_not_loaded_has_no_up_metric(metrics, engines):
    engines[0] = EngineSeen(engine=ENGINE, state=EngineState.UNLOADED, answers=False, losses=1)
    assert metrics.registry.get_sample_value("slotkeeper_engine_up", {"engine": ENGINE}) is None


def test_a_removed_engine_has_no_series(metrics, engines):
    metrics.engine_added(ENGINE)
    engines.clear()
    metrics.engine_removed(ENGINE)
    assert ENGINE not in generate_latest(metrics.registry).decode()


# -- models of a router ------------------------------------------------------------------------------------


def test_each_model_has_its_own_figures(metrics):
    metrics.report(replace(REPORT, model=ModelName("coder")))
    metrics.report(replace(REPORT, model=ModelName("writer"), usage=Usage(prompt=10, cached=0), oracle=10))
    metrics.report(REPORT)
    found = {
        (model, source): value(metrics, "model_prompt_tokens_total", model=model, source=source)
        for model in ("coder", "writer")
        for source in ("cached", "computed", "oracle")
    }
    assert list(found.values()) == [900, 100, 80, 0, 10, 10]


def test_model_loads_are_counted_and_timed(metrics):
    metrics.loaded(ModelName("coder"), 1.5)
    metrics.loaded(ModelName("coder"), None)
    assert value(metrics, "model_loads_total", model="coder", outcome="ok") == 1
    assert value(metrics, "model_loads_total", model="coder", outcome="failed") == 1
    assert value(metrics, "model_load_seconds_sum") == 1.5


def test_a_client_whose_saved_time_is_unknown_has_no_figure_of_it():
    clients = Clients()
    clients.add(record(client="c", usage=REPORT.usage))
    made = [each.name for each in ClientFigures(clients).collect() if each.samples]
    assert made == ["slotkeeper_client_requests", "slotkeeper_client_prompt_tokens"]
