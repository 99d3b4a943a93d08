"""Records as documents of the admin port: `/api/requests` and `/api/requests/{id}`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from slotkeeper.conversation.rules.shown import ShownChange
from slotkeeper.observe.why.record import Decision, Option, PromptDivergence, Record, Span
from slotkeeper.observe.why.words import place, sentences, verdict
from slotkeeper.scheduler.forms import Weighed

Document = dict[str, Any]


def summary(record: Record) -> Document:
    """One line of a list. Tokens are the engine's counts; times are seconds."""
    divergence, lost, decision = record.divergence, record.lost, record.decision
    usage, saved = record.usage, record.saved_seconds
    return {
        **asked_by(record),
        "route": record.route,
        "outcome": record.outcome,
        "status": record.status,
        "client": record.client,
        "conversation": record.goes_on,
        "named": record.named,
        "kind": record.kind.value if record.kind else None,
        "engine": record.engine,
        "slot": record.slot,
        "decision": decision.chosen.reason.value if decision else None,
        "prompt_tokens": record.prompt_tokens,
        "reused": usage.reused if usage else None,
        "computed": usage.computed if usage else None,
        "planted": usage.planted if usage else 0,
        "prepared": usage.prepared if usage else 0,
        "oracle": record.oracle,
        "cached": usage.cached if usage else None,
        "predicted": record.predicted,
        "generated": record.generated,
        "repeated": record.repeated,
        "seconds": record.seconds,
        "first_token_seconds": record.first_token,
        "saved_seconds": None if saved is None else round(saved, 6),
        "cause": divergence.cause.value if divergence else None,
        "section": divergence.section.value if divergence and divergence.section else None,
        "where": place(divergence) if divergence else None,
        "lost": lost.why.value if lost else None,
        "verdict": verdict(record),
    }


def detail(record: Record, taker: Record | None = None) -> Document:
    """All that is known of one request; `taker` took the slot of its conversation before it came."""
    return summary(record) | {
        "body_bytes": record.body_bytes,
        "explanation": sentences(record, taker),
        "timeline": [_span(span) for span in sorted(record.spans, key=lambda span: span.begin)],
        "choice": _choice(record.decision) if record.decision else None,
        "parting": _divergence_at(record.divergence) if record.divergence else None,
        "lost_tokens": record.lost.tokens if record.lost else 0,
        "slot_taken_by": taker.request_id if taker else None,
        "changes": [_change(change) for change in record.changes],
        "forms": _forms(record.weighed) if record.weighed else None,
    }


def asked_by(record: Record) -> Document:
    """Which request, of what conversation, by whom: the same in every document."""
    return {
        "id": record.request_id,
        "came": _moment(record.came),
        "name": str(record.name),
        "agent": record.name.agent,
        "about": record.name.words or None,
        "conversation_began": _moment(began(record)),
        "model": record.model,
    }


def began(record: Record) -> float:
    """When its conversation did, in seconds since the epoch."""
    first = record.name.began
    return record.came if first is None else record.came - record.at + first


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _span(span: Span) -> Document:
    return {
        "stage": span.stage.value,
        "begin": round(span.begin, 6),
        "end": round(span.end, 6),
        "tokens": span.tokens,
        "note": span.note,
    }


def _choice(decision: Decision) -> Document:
    return {
        "chosen": _option(decision.chosen, decision.rate),
        "beaten": [_option(option, decision.rate) for option in decision.beaten],
        "held_tokens": decision.held,
        "common_tokens": decision.common,
    }


def _option(option: Option, rate: float) -> Document:
    return {
        "decision": option.reason.value,
        "engine": option.engine,
        "slot": option.slot,
        "reuse_tokens": option.reuse,
        "price_tokens": round(option.price, 1),
        "price_seconds": round(option.price / rate, 4) if rate else None,
        "steps": list(option.steps),
    }


def _divergence_at(divergence: PromptDivergence) -> Document:
    """The caller turns its ids into text."""
    return {
        "cause": divergence.cause.value,
        "section": divergence.section.value if divergence.section else None,
        "message": divergence.message,
        "where": place(divergence),
        "token": divergence.token,
        "repeated_tokens": divergence.tokens,
        "seconds": divergence.seconds,
        "rule": divergence.rule.value if divergence.rule else None,
        "fixed": divergence.fixed,
        "text": None,
    }


def _forms(weighed: Weighed) -> Document:
    """Prices are tokens to compute at that moment; null: it was decided without."""
    own, changed = (None if price is None else round(price, 1) for price in (weighed.own, weighed.changed))
    return {"own_price_tokens": own, "changed_price_tokens": changed, "changed": weighed.taken}


def _change(change: ShownChange) -> Document:
    return {
        "rule": change.rule.value if change.rule else None,
        "mode": change.mode.value,
        "declined": change.declined,
        "path": change.path,
        "before": change.before,
        "after": change.after,
    }
