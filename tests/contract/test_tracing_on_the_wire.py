"""Trace headers that an engine receives, with the sidecar's spans and without."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from chaos.conftest import ready, settings
from chaos.fake_answers import PATHS, request_body
from chaos.fake_engine import Fault
from chaos.raw import dial
from collector import collecting, values
from slotkeeper.api.head import Api
from slotkeeper.app import running
from slotkeeper.observe.spans import REQUEST

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER}-01"
STATE = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"
WORD = "Xylophonkonzert"  # is in every prompt below


async def post(data: str, path: str, body: Any, *headers: str) -> None:
    raw = orjson.dumps(body)
    async with dial(data) as wire:
        lines = (f"POST {path} HTTP/1.1", "Host: x", *headers, f"Content-Length: {len(raw)}", "", "")
        await wire.send("\r\n".join(lines).encode() + raw)
        await wire.body(await wire.head())


@pytest.mark.parametrize("path", [*(PATHS[api] for api in PATHS), "/tokenize"])
async def test_without_spans_trace_headers_are_forwarded_unchanged(fake, data, path):
    api = next((api for api in PATHS if PATHS[api] == path), Api.CHAT)
    body = request_body(api, stream=False)
    await post(data, path, body, f"traceparent: {PARENT}", f"tracestate: {STATE}", "tracestate: third=1")
    (heard,) = (heard for heard in (*fake.ran, *fake.heard) if heard.header("traceparent"))
    assert heard.path == path
    assert heard.header("traceparent") == [PARENT]
    assert heard.header("tracestate") == [STATE, "third=1"]


async def test_without_spans_no_trace_header_is_added(fake, data):
    await post(data, PATHS[Api.CHAT], request_body(Api.CHAT, stream=False))
    assert not fake.ran[-1].header("traceparent")


@pytest.mark.parametrize("flags", ["01", "00"])
async def test_with_spans_the_engine_gets_the_sidecars_span_as_its_parent(fake, flags):
    async with collecting() as collector:
        async with running(settings(fake.base, otlp_endpoint=collector.url, drain_timeout=1.0)) as sidecar:
            await ready(sidecar)
            headers = (f"Traceparent: 00-{TRACE}-{CALLER}-{flags}", f"tracestate: {STATE}")
            await post(sidecar.addresses[0], PATHS[Api.CHAT], request_body(Api.CHAT, stream=True), *headers)
    heard = fake.ran[-1]
    (parent,) = heard.header("traceparent")
    version, trace, ours, told = parent.split("-")
    assert (version, trace, told) == ("00", TRACE, flags)
    assert ours != CALLER
    assert heard.header("tracestate") == [STATE]
    spans = collector.named(REQUEST)
    assert [(span.span_id.hex(), span.parent_span_id.hex()) for span in spans] == [(ours, CALLER)] * int(
        flags
    )


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.DIE_IN_STREAM])
async def test_every_request_has_one_span_with_its_outcome_and_no_word_of_its_prompt(fake, fault):
    async with collecting() as collector:
        async with running(settings(fake.base, otlp_endpoint=collector.url, drain_timeout=1.0)) as sidecar:
            await ready(sidecar)
            for api, path in PATHS.items():
                fake.script.append(fault)
                async with dial(sidecar.addresses[0]) as wire:
                    headers = {"X-Request-Id": api, "Connection": "close"}
                    await wire.post(path, request_body(api, stream=True, text=WORD), headers)
                    await wire.rest()
    spans = {values(span)["slotkeeper.request_id"]: values(span) for span in collector.named(REQUEST)}
    assert set(spans) == set(PATHS)
    outcomes = {span["slotkeeper.outcome"] for span in spans.values()}
    # If the sidecar reads late, it learns of the end before it has passed a byte on.
    assert outcomes <= ({"ok"} if fault is Fault.NONE else {"broken", "upstream_error"})
    assert WORD.encode() not in collector.raw
