"""JSON documents of the admin port about recorded requests. No text of a prompt."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from slotkeeper.conversation.rules.apply import ShownChange
from slotkeeper.observe.request_record import (
    Decision,
    Option,
    PromptDivergence,
    Record,
    Span,
)
from slotkeeper.observe.sentences import place, sentences, verdict
from slotkeeper.observe.states import Spent, stages_text, wait_text
from slotkeeper.scheduler.figures import Usage
from slotkeeper.scheduler.pending import Weighed
from slotkeeper.scheduler.types import id_of

Document = dict[str, Any]


def summary(record: Record) -> Document:
    """Return the document of one line of a list. Tokens are the engine's counts; times are in seconds."""
    divergence, lost, decision = record.divergence, record.lost, record.decision
    saved = record.saved_seconds
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
        **_counts(record.usage),
        "oracle": record.oracle,
        "oracle_unknown": record.unknown.value if record.unknown else None,
        "predicted": record.predicted,
        "generated": record.generated,
        "repeated": record.repeated,
        "priority": record.priority.value,
        "seconds": record.seconds,
        "first_token_seconds": record.first_token,
        "stall_seconds": record.stall,
        "saved_seconds": None if saved is None else round(saved, 6),
        "cause": divergence.cause.value if divergence else None,
        "section": divergence.section.value if divergence and divergence.section else None,
        "where": place(divergence) if divergence else None,
        "lost": lost.why.value if lost else None,
        "verdict": verdict(record),
    }


def _counts(usage: Usage | None) -> Document:
    if usage is None:
        return {"reused": None, "computed": None, "planted": 0, "prepared": 0, "cached": None}
    return {
        "reused": usage.reused,
        "computed": usage.computed,
        "planted": usage.planted,
        "prepared": usage.prepared,
        "cached": usage.cached,
    }


def detail(record: Record, taker: Record | None = None) -> Document:
    """Return the document of one request. `taker`: the request that took its conversation's slot."""
    return summary(record) | {
        "body_bytes": record.body_bytes,
        "explanation": sentences(record, taker),
        "timeline": [_span(span) for span in sorted(record.spans, key=lambda span: span.begin)],
        "queued": _queued(record),
        "choice": _choice(record.decision) if record.decision else None,
        "parting": _divergence_at(record.divergence) if record.divergence else None,
        "lost_tokens": record.lost.tokens if record.lost else 0,
        "slot_taken_by": taker.request_id if taker else None,
        "changes": [_change(change) for change in record.changes],
        "forms": _forms(record.weighed) if record.weighed else None,
        **_acts(record),
    }


def time_of(record: Record, now: float) -> Document:
    """Return the stage of the request, and the seconds in each so far; `now` is on the driver's clock."""
    spent, waited = record.spent(now), record.to_first_token(now)
    return {
        "stage": record.stage.value if record.stage else None,
        "stages": {stage.value: round(spent[stage], 6) for stage in Spent if stage in spent},
        "stages_text": stages_text(spent),
        "to_first_token_seconds": None if waited is None else round(waited, 6),
    }


def _queued(record: Record) -> list[Document]:
    """Return what the request waited for in the queue, in the order in which that began."""
    return [
        {
            "wait": wait.value,
            "text": wait_text(wait, [*queued.behind]),
            "seconds": round(queued.seconds, 6),
            "behind": [*queued.behind],
        }
        for wait, queued in record.queued.items()
    ]


def asked_by(record: Record) -> Document:
    """Return which request it is, of which conversation and client, as in every document."""
    return {
        "id": record.request_id,
        "came": _moment(record.received),
        "name": str(record.name),
        "agent": record.name.agent,
        "about": record.name.words or None,
        "conversation_began": _moment(began(record)),
        "model": record.model,
    }


def began(record: Record) -> float:
    """Return when the request's conversation began, in seconds since the epoch."""
    first = record.name.began
    return record.received if first is None else record.received - record.at + first


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
    seconds = option.seconds  # with several engines: includes the queue there and the speed of answers
    if seconds is None and rate:
        seconds = option.price / rate
    return {
        "decision": option.reason.value,
        "engine": option.engine,
        "slot": option.slot,
        "reuse_tokens": option.reuse,
        "price_tokens": round(option.price, 1),
        "price_seconds": None if seconds is None else round(seconds, 4),
        "steps": list(option.steps),
    }


def _divergence_at(divergence: PromptDivergence) -> Document:
    """Return the document of a divergence; the caller sets `text`."""
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
    """Return the prices of the client's own form and of the form that rules changed.

    They are tokens to compute, at the time of the decision; null: it was decided without a price.
    """
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


def _acts(record: Record) -> Document:
    """Return what was done because of the shared KV buffer and of priorities, as fields of a document."""
    return {
        "pool": [{"act": each.act.value, "slot": each.slot, "cells": each.cells} for each in record.pooled],
        "priority_acts": [
            {
                "act": each.act.value,
                "other": id_of(each.other) if each.other else None,
                "waited_seconds": round(each.waited, 3),
                "gain_seconds": None if each.gain is None else round(each.gain, 3),
                "loss_seconds": None if each.loss is None else round(each.loss, 3),
            }
            for each in record.ranked
        ],
    }
