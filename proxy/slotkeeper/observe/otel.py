"""Spans to an OpenTelemetry collector, over OTLP/HTTP. Only this module needs the extra `otel`.

A request gets its ids when it comes, so that the engine can be told; its spans are made when it is over.
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
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from slotkeeper import __version__
from slotkeeper.observe.log import Seldom, get_logger
from slotkeeper.observe.request_record import Record
from slotkeeper.observe.spans import REQUEST, Value, attributes, failed, stage_attributes

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


class TraceContext:
    """One request's place in a trace. Nothing is sent of it unless `end` is called."""

    __slots__ = ("_caller", "_own", "_send", "trace_parent")

    def __init__(
        self,
        own: SpanContext,
        caller: SpanContext | None,
        send: Callable[[Record, SpanContext, SpanContext | None], None],
    ) -> None:
        self._own = own
        self._caller = caller
        self._send = send
        # The header for the engine, with our span as its parent.
        self.trace_parent = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"

    def end(self, record: Record) -> None:
        """Have the span of a request that has ended sent, unless it is not sampled. Never raises."""
        if not self._own.trace_flags.sampled:  # its caller has decided so, or the sampler
            return
        try:
            self._send(record, self._own, self._caller)
        except Exception:
            log.exception("span_failed", request_id=record.request_id)


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
        self._endpoint = endpoint

    def __repr__(self) -> str:
        return f"<Spans to {self._endpoint}>"

    def begin(self, headers: Mapping[str, str]) -> TraceContext:
        """Of a request with these headers.

        It belongs to the trace that `traceparent` and `tracestate` name, and is sampled if that one is.
        What is no such header is as none.
        """
        around, ids = W3C.extract(headers, Context()), self._provider.id_generator
        caller = get_current_span(around).get_span_context()
        trace = caller.trace_id if caller.is_valid else ids.generate_trace_id()
        sampled = self._provider.sampler.should_sample(around, trace, REQUEST, SpanKind.SERVER)
        wanted = sampled.decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if wanted else TraceFlags.DEFAULT)
        own = _context(trace, ids.generate_span_id(), flags, sampled.trace_state)
        return TraceContext(own, caller if caller.is_valid else None, self._send)

    def _send(self, record: Record, own: SpanContext, caller: SpanContext | None) -> None:
        """All spans are made when all is over, so nothing has to be started, locked or checked."""
        came, status = record.came, Status(StatusCode.ERROR, record.outcome) if failed(record) else Status()
        end = came + (record.seconds or 0.0)
        self._end(REQUEST, own, caller, said=attributes(record), begin=came, end=end, status=status)
        for stage in record.spans:
            if stage.end - stage.begin >= SHORTEST_SECONDS:
                known_as = self._provider.id_generator.generate_span_id()
                self._end(
                    f"slotkeeper.{stage.stage.value}",
                    _context(own.trace_id, known_as, own.trace_flags, own.trace_state),
                    own,
                    said=stage_attributes(stage),
                    begin=came + stage.begin,
                    end=came + stage.end,
                )

    def _end(
        self,
        name: str,
        own: SpanContext,
        parent: SpanContext | None,
        *,
        said: Mapping[str, Value],
        begin: float,
        end: float,
        status: Status | None = None,
    ) -> None:
        """`begin` and `end` in seconds since the epoch."""
        span = ReadableSpan(
            name,
            own,
            parent,
            self._provider.resource,
            said,
            kind=SpanKind.SERVER if name == REQUEST else SpanKind.INTERNAL,
            status=status or Status(),
            start_time=_nanoseconds(begin),
            end_time=_nanoseconds(end),
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


def _context(trace: int, span: int, flags: TraceFlags, state: TraceState | None) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=flags, trace_state=state)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
