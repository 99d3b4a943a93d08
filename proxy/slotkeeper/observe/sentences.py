"""Texts about recorded requests, for people. No text of a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from slotkeeper.conversation.divergence import CAUSES, NEW_SESSION, Cause
from slotkeeper.conversation.layout import Section
from slotkeeper.conversation.rules.base import Mode
from slotkeeper.observe.request_record import (
    RUNNING,
    Decision,
    Option,
    PromptDivergence,
    QueueWait,
    Record,
    RequestStage,
)
from slotkeeper.observe.states import BRIEF, Spent, duration, longest, wait_text
from slotkeeper.scheduler.effects import PoolAct, Purpose, Ranked, SaveMoment
from slotkeeper.scheduler.requests.figures import Loss
from slotkeeper.scheduler.requests.pending import Wait
from slotkeeper.scheduler.types import PriorityAct, Reason, id_of

LONG: Final = 1.0  # seconds of a stage that a list names
SPENT_TEXTS: Final[Mapping[Spent, str]] = MappingProxyType(
    {
        Spent.READ: "reading it and counting its tokens",
        Spent.ENGINE: "until an engine was up",
        Spent.SWAP: "until its model was loaded",
        Spent.QUEUE: "in the queue for a slot",
        Spent.PREPARE: "preparing its slot",
        Spent.RESTORE: "restoring a snapshot",
        Spent.PREFILL: "in prefill",
        Spent.ANSWER: "in its answer",
    }
)
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
PLACED: Final[Mapping[Reason, str]] = MappingProxyType(
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
        Reason.BYPASS: (
            "it went past Slotkeeper, because its client asked for that, "
            "or because no engine had said that it accepts its key"
        ),
        Reason.FAIL_OPEN: "Slotkeeper failed, so it went through unchanged; the log says how",
        Reason.NO_ENGINE: "no engine was up, and none was expected back",
        Reason.NOT_PROBED: "the engine could not be probed in time, so it went through unchanged",
        Reason.SLOTS_HIDDEN: "the engine does not show its slots; start it with --slots",
        Reason.KEY_REFUSED: "the engine refuses the sidecar's key; set --engine-api-key to one of its keys",
        Reason.KEY_UNCHECKED: "no engine could say whether it accepts the client's key",
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
POOLED: Final[Mapping[PoolAct, str]] = MappingProxyType(
    {
        PoolAct.WAITED: "It waited: {cells:,} cells were missing in the KV buffer that all slots share.",
        PoolAct.PARKED: "Slot {slot} was emptied for it ({cells:,} cells); what it held can be loaded again.",
        PoolAct.ERASED: "Slot {slot} was emptied for it ({cells:,} cells); nothing else has what it held.",
        PoolAct.PURGED: "The engine emptied slot {slot} by itself ({cells:,} cells).",
        PoolAct.RETRIED: "It failed for lack of cells and was sent again; its client had no byte yet.",
        PoolAct.FAILED: "It failed for lack of cells. With -np N each slot has a KV buffer of its own.",
    }
)
RANKED: Final[Mapping[PriorityAct, str]] = MappingProxyType(
    {
        PriorityAct.WENT_FIRST: "Its priority is {priority}: it went before {other}, which came earlier",
        PriorityAct.AGED: "No request of priority {priority} was served for long, so it was the next",
        PriorityAct.STOOD_BACK: "Its priority is {priority}: it waited while {other} was at work there",
        PriorityAct.GAVE_WAY: "Its priority is {priority}: its prefill paused after a batch for {other}",
        PriorityAct.KEPT_ON: "Its prefill did not pause for {other}, since that would have cost more",
        PriorityAct.EXPIRED: "It could not be started in time, and was refused",
        PriorityAct.CHEAPER: "It went before {other}, which came earlier, because its prompt took less time",
        PriorityAct.SLOT_KEPT: "It waited because the free slot was kept for the next turn of {other}",
    }
)


def sentences(record: Record, taker: Record | None = None) -> list[str]:
    """Return sentences that say what happened and why, the most important first.

    `taker`: the request that took this conversation's slot before this request came.
    """
    if record.outcome == RUNNING:
        return ["It has not ended yet.", *_placed(record.decision), *_acts(record)]
    return [
        *_computed(record),
        *_waited(record),
        *_behind(record),
        *_stalled(record),
        *_parted(record.divergence),
        *_lost(record, taker),
        *_weighed(record),
        *_placed(record.decision),
        *_acts(record),
    ]


def verdict(record: Record) -> str:
    """Return what was computed twice and what made it wait, in a few words for a line of a list.

    It is "" if the former is unknown and the latter is nothing.
    """
    return "; ".join(filter(None, (_repeated(record), _delayed(record))))


def _repeated(record: Record) -> str:
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


def _before_first_token(record: Record) -> list[tuple[Spent, float]]:
    """Return the stages before the first token that took long enough to be named, the longest first.

    Empty while the request has not ended.
    """
    return [] if record.doing is not None else longest(record.spent(record.at + (record.seconds or 0.0)))


def _queue(record: Record) -> list[tuple[str, QueueWait]]:
    """Return what the request waited for in the queue, the longest first, without what was brief.

    Counting its tokens is part of reading it.
    """
    waits = {wait: each for wait, each in record.queued.items() if wait is not Wait.TOKENS}
    named = [(wait_text(wait, [*each.behind]), each) for wait, each in waits.items() if each.seconds >= BRIEF]
    return sorted(named, key=lambda each: -each[1].seconds)


def _waited(record: Record) -> Iterator[str]:
    """Yield a sentence that says for what the request waited, the longest first."""
    if record.first_token is None or not (stages := _before_first_token(record)):
        return
    parts = ", ".join(f"{duration(took)} {SPENT_TEXTS[stage]}" for stage, took in stages)
    yield f"It waited {duration(record.first_token)} for its first token: {parts}."


def _behind(record: Record) -> Iterator[str]:
    """Yield a sentence that says for what the request waited in the queue, and for which requests."""
    if found := _queue(record):
        yield f"In the queue: {'; '.join(f'{text}, {duration(each.seconds)}' for text, each in found)}."


def _stalled(record: Record) -> Iterator[str]:
    """Yield a sentence about a long stall of the answer."""
    if record.stall is not None and record.stall >= LONG:
        yield f"Its answer stood still for {duration(record.stall)} between two tokens."


def _delayed(record: Record) -> str:
    """Return the stage, other than its prefill, that took most of a long wait; "" if there is none."""
    stages = _before_first_token(record)
    if not stages or stages[0][1] < LONG or stages[0][0] is Spent.PREFILL:
        return ""
    (stage, took), found = stages[0], _queue(record)
    why = f": {found[0][0]}" if stage is Spent.QUEUE and found else ""
    return f"waited {duration(took)} {SPENT_TEXTS[stage]}{why}"


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
    names = dict.fromkeys(c.rule.value for c in record.changes if c.rule and c.mode is Mode.FIX)
    rules = f"Rule{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else "Our rules"
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


def _lost(record: Record, taker: Record | None) -> Iterator[str]:
    if record.lost and record.lost.tokens > FEW:
        how = LOST[record.lost.why]
        yield f"{record.lost.tokens:,} tokens were computed a second time: {how}."
        if taker and record.lost.why is Loss.OVERWRITTEN:
            whose = f" of conversation {taker.conversation}" if taker.conversation is not None else ""
            yield f"Its slot was taken by request {taker.request_id}{whose}."


def _placed(decision: Decision | None) -> Iterator[str]:
    if decision is None:
        return
    chosen = decision.chosen
    yield f"It went to {_place_and_price(chosen)}: {PLACED[chosen.reason]}."
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


# -- acts besides the placement: shared cells, priorities and deadlines ---------------------------------


def _acts(record: Record) -> Iterator[str]:
    """Yield a sentence for each act; for equal acts in a row, only for the last."""
    for pooled in record.pooled:
        yield POOLED[pooled.act].format(cells=pooled.cells, slot=pooled.slot)
    for at, ranked in enumerate(record.ranked):
        following = record.ranked[at + 1 : at + 2]
        if not following or following[0].act is not ranked.act:
            yield _ranked(ranked, _times(record.ranked[: at + 1]))


def _times(ranked: list[Ranked]) -> int:
    """Return the number of equal acts at the end of the list."""
    count = 0
    while count < len(ranked) and ranked[-1 - count].act is ranked[-1].act:
        count += 1
    return count


def _ranked(ranked: Ranked, times: int) -> str:
    other = f"request {id_of(ranked.other)}" if ranked.other else "others"
    words = RANKED[ranked.act].format(priority=ranked.priority.value, other=other)
    often = f", the last of {times} times" if times > 1 else ""
    priced = "" if ranked.gain is None else f"; gain {ranked.gain:,.2f} s, loss {ranked.loss:,.2f} s"
    return f"{words}{often} (after {ranked.waited:,.1f} s in the queue{priced})."
