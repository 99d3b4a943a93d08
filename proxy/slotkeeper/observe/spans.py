"""The attributes of a request's spans (docs/tracing.md), without any text of a prompt or an answer.

Names follow OpenTelemetry's conventions where there are any; all others begin with `slotkeeper.`.
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
BLAMELESS: Final = frozenset({"ok", "client_error", "client_gone"})  # outcomes that are no server error

Value = str | int | float | bool


def spans_to(endpoint: str) -> Spans | None:
    """Return the sender of spans; None without an endpoint, or if OTEL_SDK_DISABLED is true.

    Raises UsageError if the extra `otel` is not installed.
    """
    if not endpoint or os.environ.get(DISABLED, "").strip().lower() == "true":
        return None
    try:
        from slotkeeper.observe.otel import Spans  # noqa: PLC0415 - takes half a second, and needs an extra
    except ModuleNotFoundError as error:
        raise UsageError(f"otlp_endpoint needs: pip install 'slotkeeper[otel]' ({error})") from error
    return Spans(endpoint)


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
    return {name: value for name, value in known.items() if value is not None}


def stage_attributes(span: Span) -> dict[str, Value]:
    known: dict[str, Value | None] = {"slotkeeper.tokens": span.tokens, "slotkeeper.note": span.note or None}
    return {name: value for name, value in known.items() if value is not None}


def failed(record: Record) -> bool:
    """Whether the server failed: only then may a server's span be an error, by the conventions."""
    return record.outcome not in BLAMELESS or (record.status or 0) >= 500
