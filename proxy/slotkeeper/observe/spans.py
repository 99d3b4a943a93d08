"""What a trace says of a request (docs/tracing.md): names and values, and no text of a prompt or an answer.

The names are those of OpenTelemetry's conventions where it has any, else they begin with `slotkeeper.`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from slotkeeper.api.head import Api
from slotkeeper.config import UsageError
from slotkeeper.observe.request_record import Record, Span

if TYPE_CHECKING:
    from slotkeeper.observe.otel import Spans

REQUEST: Final = "slotkeeper.request"
DISABLED: Final = "OTEL_SDK_DISABLED"
OPERATIONS: Final[Mapping[str, str]] = {
    Api.CHAT: "chat",
    Api.MESSAGES: "chat",
    Api.RESPONSES: "chat",
    Api.COMPLETIONS: "text_completion",
    Api.COMPLETION: "text_completion",
    Api.INFILL: "text_completion",
}
BLAMELESS: Final = frozenset({"ok", "client_error", "client_gone"})  # outcomes that are no error of a server

Value = str | int | float | bool


def spans_to(endpoint: str) -> Spans | None:
    """Where spans go; None without a collector, or where the library's own variable forbids it.

    Raises UsageError where the extra `otel` is not installed.
    """
    if not endpoint or os.environ.get(DISABLED, "").strip().lower() == "true":
        return None
    try:
        from slotkeeper.observe.otel import Spans  # noqa: PLC0415 - half a second, and an extra
    except ModuleNotFoundError as error:
        raise UsageError(f"otlp_endpoint needs: pip install 'slotkeeper[otel]' ({error})") from error
    return Spans(endpoint)


def attributes(record: Record) -> dict[str, Value]:
    """Of a request that has ended; what is not known of it is left out."""
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
    return {name: value for name, value in known.items() if value is not None}


def stage_attributes(span: Span) -> dict[str, Value]:
    known: dict[str, Value | None] = {"slotkeeper.tokens": span.tokens, "slotkeeper.note": span.note or None}
    return {name: value for name, value in known.items() if value is not None}


def failed(record: Record) -> bool:
    """Whether the server is to blame, as the conventions want it of a server's span."""
    return record.outcome not in BLAMELESS or (record.status or 0) >= 500
