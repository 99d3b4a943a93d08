"""Texts and documents about recorded requests, for people and for the admin port. No prompt text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

from slotkeeper.conversation.causes import Cause
from slotkeeper.conversation.divergence import CAUSES, NEW_SESSION
from slotkeeper.conversation.layout import Section
from slotkeeper.conversation.rules.apply import ShownChange
from slotkeeper.conversation.rules.base import Mode
from slotkeeper.observe import acts
from slotkeeper.observe.request_record import (
    RUNNING,
    Decision,
    Option,
    PromptDivergence,
    Record,
    RequestStage,
    Span,
)
from slotkeeper.scheduler.effects import Purpose, SaveMoment
from slotkeeper.scheduler.figures import Loss
from slotkeeper.scheduler.pending import Weighed
from slotkeeper.scheduler.types import Reason

FEW: Final = 16  # tokens that need no explanation: the beginning of a reply, or the last token of a prompt

PLACES: Final[Mapping[Section, str]] = MappingProxyType(
    {
        Section.OPTIONS: "options of the template",
        Section.TOOLS: "tools",
        Section.SYSTEM: "system text",
        Section.USER: "user message",
        Section.REPLY: "reply",
        Section.REASONING: "reasoning",
        Section.CALL: "tool call",
        Section.RESULT: "tool result",
    }
)
WENT: Final[Mapping[Reason, str]] = MappingProxyType(
    {
        Reason.CONTINUES: "it continues the messages in the slot",
        Reason.PREFIX: "the slot held its longest reusable prefix",
        Reason.RAM_CACHE: "the engine's RAM prompt cache held its prefix",
        Reason.SNAPSHOT: "its prefix was restored from a snapshot",
        Reason.COLD: "no slot or snapshot had a reusable prefix; this slot lost least",
        Reason.CLIENT_CHOSE: "the client named the slot",
        Reason.ENGINE_CHOSE: "the engine chose the slot, because naming one would have lost more",
        Reason.STEERED: "its prefix was prefilled where the engine would look for it",
        Reason.UNPINNABLE: "requests of this kind cannot choose a slot",
        Reason.BRIEF: "it is so short that the slot which loses least is best",
        Reason.UNRENDERED: "its tokens were not known, so the slot that loses least was taken",
        Reason.SLOTLESS: "it takes no slot, and waited for its model to be loaded",
        Reason.BYPASS: "the client asked to bypass Slotkeeper",
        Reason.FAIL_OPEN: "Slotkeeper failed, so it went through unchanged; the log says how",
    }
)
STEPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        Purpose.TOUCH: "a touch of one token",
        Purpose.STEER: "a prefill of its prefix",
        Purpose.PLANT: "planting {}",
        Purpose.PIECE: "computing {} of its batches",
        Purpose.BACK: "cutting it back to where its conversation will continue",
        SaveMoment.PARK: "saving its contents",
        SaveMoment.BOUNDARY: "saving a prefix that others share",
        RequestStage.RESTORE: "restoring a snapshot",
        RequestStage.ERASE: "erasing it",
    }
)
LOST: Final[Mapping[Loss, str]] = MappingProxyType(
    {
        Loss.CHECKPOINT: (
            "the slot held them, but this model's state can be cut only at a checkpoint, and there was none. "
            "More checkpoints or a --slot-dir help; `slotkeeper doctor` says which flags"
        ),
        Loss.OVERWRITTEN: (
            "other prompts had overwritten them, and no snapshot had them. "
            "More slots (-np) or a --slot-dir with more room help"
        ),
        Loss.RESTARTED: "the engine was restarted, and no snapshot had them. A --slot-dir helps",
        Loss.MISPREDICTED: "the engine reused less of its slot than predicted. Please report this",
        Loss.UNPLACED: "the request was placed before its tokens were known",
        Loss.ADAPTERS: "they were computed with other LoRA adapters, whose states are wrong for these",
        Loss.BYPASSED: "the client bypassed Slotkeeper (X-Slotkeeper-Bypass) or the cache (cache_prompt)",
    }
)


def sentences(record: Record, taker: Record | None = None) -> list[str]:
    """Return sentences that say what happened and why, the most important first.

    `taker`: the request that took this conversation's slot before this request came.
    """
    if record.outcome == RUNNING:
        return ["It has not ended yet.", *_went(record.decision), *acts.done(record)]
    return [
        *_computed(record),
        *_parted(record.divergence),
        *_lost(record, taker),
        *_weighed(record),
        *_went(record.decision),
        *acts.done(record),
    ]


def verdict(record: Record) -> str:
    """Return the same in a few words, for a line of a list."""
    if record.repeated <= FEW:
        known = record.usage is not None and record.oracle is not None
        return "nothing twice" if known else ""
    divergence, lost = record.divergence, record.lost
    found = []
    if divergence and (divergence.tokens > FEW or divergence.cause not in NEW_SESSION):
        found.append(f"{place(divergence)}: {CAUSES[divergence.cause].what}")
    if lost and lost.tokens > FEW:
        found.append(f"cache: {lost.why.value}")
    return "; ".join(found)


def place(divergence: PromptDivergence) -> str:
    """Return the name of the section where the prompt diverges, with the message's number if there is one."""
    if divergence.section is None:
        return "template"
    name = PLACES[divergence.section]
    return name if divergence.message is None else f"{name} (message {divergence.message + 1})"


def _computed(record: Record) -> Iterator[str]:
    usage = record.usage
    if usage is None:
        yield "The engine gave no count of tokens."
        return
    said = f"{usage.reused:,} of {usage.prompt:,} prompt tokens were reused and {usage.computed:,} computed"
    if usage.planted:
        said += f", {usage.planted:,} of them by our own prefills just before"
    least = f"; a perfect cache would have computed {record.oracle:,}" if record.oracle is not None else ""
    yield f"{said}{least}."
    if usage.prepared:
        yield f"{usage.prepared:,} of the reused tokens were computed in idle time before it came."
    if record.predicted is not None and record.predicted != usage.cached:
        yield f"The engine reused {usage.cached:,} tokens; {record.predicted:,} were predicted."
    if record.repeated <= FEW and record.oracle is not None:
        yield "Nothing was computed twice."


def _parted(divergence: PromptDivergence | None) -> Iterator[str]:
    if divergence is None:
        return
    what = CAUSES[divergence.cause].what
    where = f"token {divergence.token:,}" + (f", in the {place(divergence)}" if divergence.section else "")
    if divergence.cause in NEW_SESSION:
        yield f"It is {what}: it diverges from the session before it at {where}."
        return
    if divergence.reply:
        yield f"The newest reply came back in another form than it was sampled, from {where} on: {what}."
        return
    if divergence.cause is Cause.OUR_RULE:
        what += f" ({divergence.rule.value})" if divergence.rule else ""
    yield f"It diverges from the request before it at {where}: {what} (cause {divergence.cause.value})."
    yield from _cost(divergence)


def _cost(divergence: PromptDivergence) -> Iterator[str]:
    if divergence.fixed and divergence.tokens <= FEW:
        yield f"Rule {divergence.rule.value if divergence.rule else '?'} undid that: it cost nothing."
    elif divergence.tokens > FEW:
        time = f", {divergence.seconds:.1f} s" if divergence.seconds is not None else ""
        yield f"{divergence.tokens:,} unchanged tokens after it were computed again{time}."
        yield from _advice(divergence)


def _advice(divergence: PromptDivergence) -> Iterator[str]:
    if divergence.cause is Cause.OUR_RULE:
        yield f"To turn that rule off: --rules {divergence.rule.value if divergence.rule else 'all'}=off."
    elif divergence.rule and not divergence.fixed:
        yield f"To undo that: --rules {divergence.rule.value}=fix."
    elif divergence.cause is Cause.TEMPLATE_STRIPS_REASONING:
        yield "No rule can undo that: the model's template leaves it out, whatever is sent."


def _weighed(record: Record) -> Iterator[str]:
    """Yield a sentence that says in which form the request went out, and what each form would have cost."""
    weighed = record.weighed
    if weighed is None:
        return
    rules = _fixing_rules(record)
    if weighed.own is None or weighed.changed is None:
        form = "in this form" if weighed.taken else "unchanged"
        prices = f"only {form} does it continue a slot"
        if not weighed.taken and record.decision and record.decision.chosen.reason is not Reason.CONTINUES:
            prices = "its price could not be found"
    else:
        prices = f"{weighed.changed:,.0f} tokens to compute, {weighed.own:,.0f} unchanged"
    if weighed.taken:
        yield f"{rules} changed it: {prices}."
    else:
        yield f"{rules} would have changed it, but that is not cheaper: {prices}."


def _fixing_rules(record: Record) -> str:
    """Return the subject of a sentence about the rules that changed the request."""
    names = dict.fromkeys(c.rule.value for c in record.changes if c.rule and c.mode is Mode.FIX)
    return f"Rule{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else "Our rules"


def _lost(record: Record, taker: Record | None) -> Iterator[str]:
    if record.lost and record.lost.tokens > FEW:
        how = LOST[record.lost.why]
        yield f"{record.lost.tokens:,} tokens were computed a second time: {how}."
        if taker and record.lost.why is Loss.OVERWRITTEN:
            whose = f" of conversation {taker.conversation}" if taker.conversation is not None else ""
            yield f"Its slot was taken by request {taker.request_id}{whose}."


def _went(decision: Decision | None) -> Iterator[str]:
    if decision is None:
        return
    chosen = decision.chosen
    yield f"It went to {_place_and_price(chosen)}: {WENT[chosen.reason]}."
    if decision.beaten:
        second = decision.beaten[0]
        more = f"{second.price - chosen.price:,.0f} more tokens"
        if chosen.seconds is not None and second.seconds is not None:
            more = f"{second.seconds - chosen.seconds:,.2f} more seconds"
        far = f" of {second.engine}" if second.engine != chosen.engine else ""
        yield f"The next best was {_place_and_price(second)}{far}, for {more}."


def _place_and_price(option: Option) -> str:
    where = f"slot {option.slot}" if option.slot is not None else "the engine's own choice"
    counted = Counter(option.steps)
    steps = [STEPS[step].format("one" if count == 1 else count) for step, count in counted.items()]
    return f"{where} ({option.reason.value})" + (f", after {' and '.join(steps)}" if steps else "")


# -- documents of the admin port -------------------------------------------------------------------------

Document = dict[str, Any]


def summary(record: Record) -> Document:
    """Return the document of one line of a list. Tokens are the engine's counts; times are in seconds."""
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
        "priority": record.priority.value,
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
    """Return the document of one request. `taker` took the slot of its conversation before it came."""
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
        **acts.documents(record),
    }


def asked_by(record: Record) -> Document:
    """Return which request it is, of which conversation and client, as in every document."""
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
    """Return when the request's conversation began, in seconds since the epoch."""
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
    """Return the prices of both forms, in tokens to compute at that moment; null: decided without a price."""
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
