"""Spans to an OpenTelemetry collector, over OTLP/HTTP. Only this module needs the extra `otel`.

A span begins when its request comes, so that the engine can be told of it, and is filled when all is over.
Spans are sent in batches by a thread; what goes wrong there is logged and disturbs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_SCHEDULE_DELAY
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from slotkeeper import __version__
from slotkeeper.observe.log import Seldom, get_logger
from slotkeeper.observe.spans import REQUEST, attributes, failed, stage_attributes
from slotkeeper.observe.why.record import Record
from slotkeeper.wire import headers as names

PATH: Final = "/v1/traces"
# Each span costs as much CPU time as a line of the log, and a batch as much as ten spans.
SHORTEST_SECONDS: Final = 0.02  # of a stage that gets one
BATCH_MS: Final = 30_000  # between two batches
CLOSE_SECONDS: Final = 2.0  # for what is still to be sent
LIBRARY: Final = "opentelemetry"  # the logger of all its modules
SENDING: Final = ("opentelemetry.sdk", "opentelemetry.exporter")  # the others complain of clients' headers
SILENT: Final = logging.NullHandler()  # so that what it says after its end is not printed
W3C: Final = TraceContextTextMapPropagator()

log = get_logger(__name__)


class Trace:
    """One request's span. Lost, not sent, unless `end` is called."""

    __slots__ = ("_span", "_stages", "trace_parent")

    def __init__(self, span: Span, stages: Callable[[Span, Record], None]) -> None:
        """`stages` sends what the request spent its time with."""
        self._span = span
        self._stages = stages
        carrier: dict[str, str] = {}
        W3C.inject(carrier, set_span_in_context(span, Context()))
        # The header for the engine, with our span as its parent. None: as it came (OTEL_SDK_DISABLED).
        self.trace_parent = carrier.get(names.TRACE_PARENT)

    def end(self, record: Record) -> None:
        """Fill it from a request that has ended, and have it sent. Never raises."""
        try:
            if self._span.is_recording():  # else its caller has decided otherwise, or the sampler
                self._fill(record)
        except Exception:
            log.exception("span_failed", request_id=record.request_id)

    def _fill(self, record: Record) -> None:
        span = self._span
        span.set_attributes(attributes(record))
        if failed(record):
            span.set_status(Status(StatusCode.ERROR, record.outcome))
        self._stages(span, record)
        span.end(_nanoseconds(record.came + (record.seconds or 0.0)))


class Spans:
    """Makes them, and sends them. `close` it."""

    def __init__(self, endpoint: str) -> None:
        named = Resource.create({"service.name": "slotkeeper", "service.version": __version__})
        resource = named.merge(OTELResourceDetector().detect())  # what OTEL_* variables say wins
        self._library = _library_logs()
        self._exporter = OTLPSpanExporter(endpoint=endpoint + PATH)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        delay = None if OTEL_BSP_SCHEDULE_DELAY in os.environ else BATCH_MS
        self._batches = BatchSpanProcessor(self._exporter, schedule_delay_millis=delay)
        self._provider.add_span_processor(self._batches)
        self._scope = InstrumentationScope("slotkeeper", __version__)
        self._tracer = self._provider.get_tracer("slotkeeper", __version__)
        self._endpoint = endpoint

    def __repr__(self) -> str:
        return f"<Spans to {self._endpoint}>"

    def begin(self, headers: Mapping[str, str], came: float) -> Trace:
        """The span of a request that came at `came` seconds since the epoch.

        It belongs to the trace that `traceparent` and `tracestate` name, and is sampled if that one is.
        What is no such header is as none.
        """
        around = W3C.extract(headers, Context())
        span = self._tracer.start_span(REQUEST, around, SpanKind.SERVER, start_time=_nanoseconds(came))
        return Trace(span, self._send_stages)

    def _send_stages(self, inside: Span, record: Record) -> None:
        """They are made when all is over, so there is nothing to start and nothing to sample."""
        parent = inside.get_span_context()
        for stage in record.spans:
            if stage.end - stage.begin < SHORTEST_SECONDS:
                continue
            own = SpanContext(
                parent.trace_id,
                self._provider.id_generator.generate_span_id(),
                is_remote=False,
                trace_flags=parent.trace_flags,
                trace_state=parent.trace_state,
            )
            span = ReadableSpan(
                f"slotkeeper.{stage.stage.value}",
                own,
                parent,
                self._provider.resource,
                stage_attributes(stage),
                kind=SpanKind.INTERNAL,
                start_time=_nanoseconds(record.came + stage.begin),
                end_time=_nanoseconds(record.came + stage.end),
                instrumentation_scope=self._scope,
            )
            self._batches.on_end(span)

    async def close(self) -> None:
        """Send what waits, for as long as CLOSE_SECONDS."""
        await asyncio.to_thread(self._shut)
        logging.getLogger(LIBRARY).removeHandler(self._library)

    def _shut(self) -> None:
        """The library would try for half a minute to reach a collector that is not there."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)
        if ending.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]


class _Quietly(logging.Handler):
    """What the library says of spans that it cannot send, in our log and not for each of them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seldom = Seldom(log)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(SENDING):
            self._seldom.warning("spans_not_sent", error=record.getMessage())


def _library_logs() -> logging.Handler:
    handler = _Quietly()
    library = logging.getLogger(LIBRARY)
    library.addHandler(handler)
    library.addHandler(SILENT)
    library.propagate = False
    return handler


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
