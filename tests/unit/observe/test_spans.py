"""Spans as a collector receives them, and what happens without a collector."""

from __future__ import annotations

import importlib
import pkgutil
import socket
import sys
from collections.abc import Iterator
from typing import Any

import opentelemetry.semconv
import opentelemetry.semconv._incubating.attributes
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from collector import Collector, collecting, values
from slotkeeper.app import spans_to
from slotkeeper.conversation.likeness import RequestKind
from slotkeeper.observe.log import configure
from slotkeeper.observe.request_record import Decision, Option, Record, RequestStage
from slotkeeper.observe.spans import REQUEST, Spans, attributes, failed
from slotkeeper.scheduler.types import Reason
from slotkeeper.values import UsageError
from unit.looking import counted

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CAME = 1_790_000_000.25  # seconds since the epoch


def record(**more: Any) -> Record:
    chosen = Option(reason=Reason.PREFIX, engine="http://e:1", slot=1, reuse=900, price=100.0)
    what: dict[str, Any] = {
        "request_id": "r-1",
        "route": "chat",
        "received": CAME,
        "at": 50.0,
        "kind": RequestKind.MAIN_TURN,
        "decision": Decision(chosen=chosen),
        "engine": "http://e:1",
        "slot": 1,
        "prompt_tokens": 1000,
        "cached": 900,
        "generated": 20,
        "first_token": 0.5,
        "seconds": 2.0,
        "outcome": "ok",
        "status": 200,
    }
    made = Record(**counted(**what | more))
    made.add(RequestStage.PARSE, 50.0, 50.001)
    made.add(RequestStage.QUEUE, 50.001, 50.05)
    made.add(RequestStage.PLANT, 50.05, 50.3, tokens=128, note="boundary")
    made.add(RequestStage.PREFILL, 50.3, 50.5)
    made.add(RequestStage.GENERATE, 50.5, 52.0)
    return made


async def sent(collector: Collector, *records: Record, **headers: str) -> list[str | None]:
    """Return the trace headers that the engine would get for each."""
    spans, told = Spans(collector.url), []
    for each in records:
        trace = spans.begin(headers)
        told.append(trace.trace_parent)
        trace.end(each)
    await spans.close()
    return told


async def test_a_request_is_one_span_with_a_child_for_each_longer_stage():
    async with collecting() as collector:
        await sent(collector, record(), traceparent=f"00-{TRACE}-{CALLER}-01", tracestate="vendor=1")
    (span,) = collector.named(REQUEST)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    assert span.trace_state == "vendor=1"
    assert span.kind == Span.SPAN_KIND_SERVER
    assert span.start_time_unix_nano == round(CAME * 1e9)
    assert span.end_time_unix_nano == round((CAME + 2) * 1e9)
    assert values(span) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.input_tokens": 1000,
        "gen_ai.usage.cache_read.input_tokens": 900,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.response.time_to_first_chunk": 0.5,
        "slotkeeper.request_id": "r-1",
        "slotkeeper.route": "chat",
        "slotkeeper.engine": "http://e:1",
        "slotkeeper.slot": 1,
        "slotkeeper.decision": "prefix",
        "slotkeeper.computed_tokens": 100,
        "slotkeeper.planted_tokens": 0,
        "slotkeeper.kind": "main_turn",
        "slotkeeper.outcome": "ok",
    }
    inside = collector.inside(span)
    assert sorted(inside) == [f"slotkeeper.{name}" for name in ("generate", "plant", "prefill", "queue")]
    assert {child.trace_id.hex() for child in inside.values()} == {TRACE}
    plant = inside["slotkeeper.plant"]
    assert plant.start_time_unix_nano == round((CAME + 0.05) * 1e9)
    assert plant.end_time_unix_nano == round((CAME + 0.3) * 1e9)
    assert values(plant) == {"slotkeeper.tokens": 128, "slotkeeper.note": "boundary"}
    assert {resource["service.name"] for resource in collector.resources} == {"slotkeeper"}


@pytest.mark.parametrize("said", ["", "junk", f"ff-{TRACE}-{CALLER}-01", f"00-{'0' * 32}-{CALLER}-01"])
async def test_a_request_without_a_valid_trace_begins_a_new_one(said):
    async with collecting() as collector:
        told = await sent(collector, record(), record(), **({"traceparent": said} if said else {}))
    spans = collector.named(REQUEST)
    assert [span.parent_span_id for span in spans] == [b"", b""]
    assert len({span.trace_id for span in spans} - {bytes.fromhex(TRACE), bytes(16)}) == 2
    assert [span.trace_id.hex() for span in spans] == [header.split("-")[1] for header in told]


async def test_the_opentelemetry_variables_set_name_and_attributes_and_headers(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "sidecar-7")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=one")
    async with collecting() as collector:
        await sent(collector, record())
    assert collector.headers[0]["x-tenant"] == "one"
    assert collector.resources[0]["service.name"] == "sidecar-7"
    assert collector.resources[0]["deployment.environment.name"] == "lab"


@pytest.mark.parametrize(("setting", "off"), [("true", True), (" True", True), ("false", False), ("", False)])
async def test_the_opentelemetry_variable_switches_spans_off(setting, off, monkeypatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", setting)
    spans = spans_to("http://127.0.0.1:1")
    assert (spans is None) is off
    if spans is not None:
        await spans.close()


async def test_the_sampler_variable_decides_for_requests_without_a_trace(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    async with collecting() as collector:
        (told,) = await sent(collector, record())
        assert int(told[-2:], 16) & 1 == 0
        await sent(collector, record(), traceparent=f"00-{TRACE}-{CALLER}-01")
    assert len(collector.named(REQUEST)) == 1


@pytest.mark.parametrize(
    ("outcome", "status", "bad"),
    [
        ("ok", 200, False),
        ("client_error", 404, False),
        ("client_gone", None, False),
        ("upstream_error", 503, True),
        ("broken", 200, True),
    ],
)
async def test_only_failures_of_a_server_are_errors(outcome, status, bad):
    ended = record(outcome=outcome, status=status)
    assert failed(ended) is bad
    async with collecting() as collector:
        await sent(collector, ended)
    (span,) = collector.named(REQUEST)
    assert (span.status.code == Status.STATUS_CODE_ERROR) is bad
    assert values(span).get("error.type") == (None if outcome == "ok" else outcome)


def test_a_minimal_record_gives_minimal_attributes():
    bare = Record(request_id="r", route="task", received=CAME, at=0.0)
    assert set(attributes(bare)) == {
        "http.request.method",
        "error.type",
        "slotkeeper.request_id",
        "slotkeeper.route",
        "slotkeeper.outcome",
    }


def conventions() -> Iterator[str]:
    """Return all attribute names of OpenTelemetry's own package."""
    folders = (opentelemetry.semconv, opentelemetry.semconv._incubating)
    for folder in folders:
        package = importlib.import_module(f"{folder.__name__}.attributes")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            yield from (v for v in vars(importlib.import_module(module.name)).values() if isinstance(v, str))


def test_every_attribute_name_is_of_the_conventions_or_of_slotkeeper():
    known = set(conventions())
    names = {name for name in attributes(record(outcome="broken")) if not name.startswith("slotkeeper.")}
    assert len(names) == 8
    assert names <= known


async def test_an_unreachable_collector_disturbs_no_request_and_is_logged_once(capsys):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        configure("info", "json")
        spans = Spans("http://{}:{}".format(*nobody.getsockname()))
        for _ in range(3):
            spans.begin({}).end(record())
        await spans.close()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert '"event":"spans_not_sent"' in said[0]


def test_without_a_collector_there_are_no_spans():
    assert spans_to("") is None


def test_without_the_extra_an_error_names_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "slotkeeper.observe.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    with pytest.raises(UsageError, match=r"pip install 'slotkeeper\[otel\]'"):
        spans_to("http://127.0.0.1:4318")
