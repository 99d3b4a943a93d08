"""A stand-in for an OpenTelemetry collector: real OTLP over real HTTP; it keeps what it receives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from chaos.raw import until
from patience import PATIENCE


@dataclass(slots=True)
class Collector:
    url: str = ""
    spans: list[Span] = field(default_factory=list)
    resources: list[Mapping[str, Any]] = field(default_factory=list)  # the resource of each span
    headers: list[Mapping[str, str]] = field(default_factory=list)
    raw: bytes = b""

    async def export(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.raw += body
        self.headers.append(request.headers)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
                self.resources.extend([values(resource.resource)] * len(scope.spans))
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type="application/x-protobuf")

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    async def one(self, name: str) -> Span:
        """Return the only span of that name, after it has arrived."""
        await until(lambda: bool(self.named(name)), f"a span {name}")
        (span,) = self.named(name)
        return span

    def children(self, span: Span) -> list[Span]:
        """Return the spans inside a span. A stage that occurs several times has several."""
        return [child for child in self.spans if child.parent_span_id == span.span_id]

    def inside(self, span: Span) -> dict[str, Span]:
        """Return the spans inside a span, by name."""
        return {child.name: child for child in self.children(span)}


def values(thing: Any) -> dict[str, Any]:
    """Return attributes as Python values."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in thing.attributes}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Run a collector that answers.

    A sidecar that ends waits until all spans are sent, on a slow machine too.
    """
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.export)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        collector.url = "http://{}:{}".format(*runner.addresses[0][:2])
        with patch("slotkeeper.observe.spans.CLOSE_SECONDS", PATIENCE):
            yield collector
    finally:
        await runner.cleanup()
