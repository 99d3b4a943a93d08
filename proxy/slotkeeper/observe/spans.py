"""Sends spans to an OpenTelemetry collector, over OTLP/HTTP. Only this module needs the extra `otel`.

A request gets its trace ids when it arrives, so that the engine gets them too; its spans are made when it has
ended. A thread sends spans in batches; errors there are logged and affect no request.
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
from slotkeeper.api.head import Api, masked
from slotkeeper.observe.log import Seldom, get_logger
from slotkeeper.observe.request_record import Record, Span

PATH: Final = "/v1/traces"
# A span costs as much CPU time as a log line, and a batch as much as ten spans.
SHORTEST_SECONDS: Final = 0.02  # shorter stages get no span
BATCH_MS: Final = 30_000  # between two batches
CLOSE_SECONDS: Final = 2.0  # for sending the last spans when we close
LIBRARY: Final = "opentelemetry"  # the parent logger of the library's modules
SENDING: Final = ("opentelemetry.sdk", "opentelemetry.exporter")  # other modules warn of clients' headers
SILENT: Final = logging.NullHandler()  # keeps messages after `close` off standard error
W3C: Final = TraceContextTextMapPropagator()

log = get_logger(__name__)


class TraceContext:
    """One request's place in a trace. Its spans are sent only if `end` is called."""

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
        # The header for the engine; our span is the parent of the engine's.
        self.trace_parent = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"

    def end(self, record: Record) -> None:
        """Queue the spans of a request that has ended, if it is sampled. Never raises."""
        if not self._own.trace_flags.sampled:  # the caller or the sampler has decided so
            return
        try:
            self._send(record, self._own, self._caller)
        except Exception:
            log.exception("span_failed", request_id=record.request_id)


class Spans:
    """Makes spans and sends them. The owner must `close` it."""

    def __init__(self, endpoint: str) -> None:
        named = Resource.create({"service.name": "slotkeeper", "service.version": __version__})
        resource = named.merge(OTELResourceDetector().detect())  # OTEL_* variables take precedence
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
        """Return the trace context of a request with these headers, of which none may hold a secret.

        It belongs to the trace that `traceparent` and `tracestate` name, and is sampled if the caller's span
        is. Invalid headers count as missing.
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
        """Make and queue all spans of a request. It has ended, so no span needs to be started or locked."""
        status = Status(StatusCode.ERROR, record.outcome) if failed(record) else Status()
        begin, attrs = record.received, attributes(record)
        end = begin + (record.seconds or 0.0)
        self._end(REQUEST, own, caller, attrs=attrs, begin=begin, end=end, status=status)
        for stage in record.spans:
            if stage.end - stage.begin >= SHORTEST_SECONDS:
                known_as = self._provider.id_generator.generate_span_id()
                self._end(
                    f"slotkeeper.{stage.stage.value}",
                    _context(own.trace_id, known_as, own.trace_flags, own.trace_state),
                    own,
                    attrs=stage_attributes(stage),
                    begin=begin + stage.begin,
                    end=begin + stage.end,
                )

    def _end(
        self,
        name: str,
        own: SpanContext,
        parent: SpanContext | None,
        *,
        attrs: Mapping[str, Value],
        begin: float,
        end: float,
        status: Status | None = None,
    ) -> None:
        """Queue one span. `begin` and `end` are seconds since the epoch."""
        span = ReadableSpan(
            name,
            own,
            parent,
            self._provider.resource,
            attrs,
            kind=SpanKind.SERVER if name == REQUEST else SpanKind.INTERNAL,
            status=status or Status(),
            start_time=_nanoseconds(begin),
            end_time=_nanoseconds(end),
            instrumentation_scope=self._scope,
        )
        self._batches.on_end(span)

    async def close(self) -> None:
        """Send the queued spans, for at most CLOSE_SECONDS."""
        await asyncio.to_thread(self._shut)
        logging.getLogger(LIBRARY).removeHandler(self._library)

    def _shut(self) -> None:
        """Shut the library down in a thread: it would try for half a minute to reach a lost collector."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)
        if ending.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]


class _Quietly(logging.Handler):
    """Logs the library's errors about spans that it cannot send, at most once a minute."""

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


# -- the attributes of spans (docs/tracing.md), without any text of a prompt or an answer ---------------

# Names follow OpenTelemetry's conventions where there are any; all others begin with `slotkeeper.`.

REQUEST: Final = "slotkeeper.request"
OPERATIONS: Final[Mapping[str, str]] = {
    Api.CHAT: "chat",
    Api.MESSAGES: "chat",
    Api.RESPONSES: "chat",
    Api.COMPLETIONS: "text_completion",
    Api.COMPLETION: "text_completion",
    Api.INFILL: "text_completion",
}
BLAMELESS: Final = frozenset({"ok", "client_error", "client_gone"})  # outcomes that are no server error

Value = str | int | float | bool


def attributes(record: Record) -> dict[str, Value]:
    """Return the attributes of a request that has ended, without unknown values."""
    chosen = record.decision.chosen.reason.value if record.decision else None
    usage = record.usage
    known: dict[str, Value | None] = {
        "http.request.method": "POST",  # of every route that takes a slot
        "http.response.status_code": record.status,
        "error.type": None if record.outcome == "ok" else record.outcome,
        "gen_ai.operation.name": OPERATIONS.get(record.route),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.reused if usage else None,
        "gen_ai.usage.output_tokens": record.generated,
        "gen_ai.response.time_to_first_chunk": record.first_token,  # seconds
        "slotkeeper.request_id": record.request_id,
        "slotkeeper.route": record.route,
        "slotkeeper.engine": record.engine,
        "slotkeeper.slot": record.slot,
        "slotkeeper.decision": chosen,
        "slotkeeper.computed_tokens": usage.computed if usage else None,
        "slotkeeper.predicted_tokens": record.predicted,
        "slotkeeper.oracle_tokens": record.oracle,
        "slotkeeper.planted_tokens": usage.planted if usage else None,
        "slotkeeper.conversation": record.conversation,
        "slotkeeper.kind": record.kind.value if record.kind else None,
        "slotkeeper.cause": record.divergence.cause.value if record.divergence else None,
        "slotkeeper.outcome": record.outcome,
    }
    return _told(known)


def stage_attributes(span: Span) -> dict[str, Value]:
    known: dict[str, Value | None] = {"slotkeeper.tokens": span.tokens, "slotkeeper.note": span.note or None}
    return _told(known)


def _told(known: Mapping[str, Value | None]) -> dict[str, Value]:
    """Return the known values; what looks like a key is masked, as in the log."""
    return {
        name: masked(value) if isinstance(value, str) else value
        for name, value in known.items()
        if value is not None
    }


def failed(record: Record) -> bool:
    """Whether the server failed: only then may a server's span be an error, by the conventions."""
    return record.outcome not in BLAMELESS or (record.status or 0) >= 500
