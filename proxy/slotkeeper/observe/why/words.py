"""One request's account in sentences, for people at a terminal and in a browser alike. No prompt text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from slotkeeper.core.canonical.rules import Mode
from slotkeeper.core.conversations.causes import Cause
from slotkeeper.core.conversations.reasons import CAUSES, NEW_SESSION
from slotkeeper.core.effects import Moment, Purpose
from slotkeeper.core.losses import Loss
from slotkeeper.core.requests.layout import Section
from slotkeeper.core.types import Reason
from slotkeeper.observe.why.record import RUNNING, Decision, Option, Parting, Record, Stage

FEW: Final = 16  # tokens that nobody has to ask about: what opens a reply, or the last one of a prompt

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
        Reason.CONTINUES: "its messages go on from those in the slot",
        Reason.PREFIX: "the slot had the longest usable beginning of it",
        Reason.RAM_CACHE: "the engine had its beginning in the RAM cache",
        Reason.SNAPSHOT: "its beginning was restored from a file",
        Reason.COLD: "nothing usable was anywhere; this slot lost least by it",
        Reason.CLIENT_CHOSE: "the client named the slot",
        Reason.ENGINE_CHOSE: "the engine chose the slot, because naming one would have lost more",
        Reason.STEERED: "its beginning was put where the engine would look for it",
        Reason.UNPINNABLE: "nobody can choose a slot on this route",
        Reason.BRIEF: "it is so short that the slot which loses least is best",
        Reason.UNRENDERED: "its tokens were not known, so the slot that loses least was taken",
        Reason.BYPASS: "the client asked for no help",
        Reason.FAIL_OPEN: "something of ours broke, so it went through as it came; the log says what",
    }
)
STEPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        Purpose.TOUCH: "a touch of one token",
        Purpose.STEER: "its beginning was computed there",
        Purpose.PLANT: "planting {}",
        Purpose.BACK: "taking it back to where its own conversation will go on",
        Moment.PARK: "saving what it held",
        Moment.BOUNDARY: "saving what others will begin with",
        Stage.RESTORE: "restoring a file",
        Stage.ERASE: "emptying it",
    }
)
LOST: Final[Mapping[Loss, str]] = MappingProxyType(
    {
        Loss.CHECKPOINT: (
            "the slot held them, but this model's state can be cut only where a checkpoint stands, and none "
            "stood there. More checkpoints or a --slot-dir help; `slotkeeper doctor` says which flags"
        ),
        Loss.OVERWRITTEN: (
            "no free slot and no file had them any more. More slots (-np) or a --slot-dir with more room help"
        ),
        Loss.RESTARTED: "the engine was started anew, and no file had them. A --slot-dir helps",
        Loss.MISPREDICTED: "the engine used less of its slot than it should have. Please report this",
        Loss.UNPLACED: "the request was placed without a look at its tokens",
        Loss.BYPASSED: "the client asked for no help (X-Slotkeeper-Bypass), or for no cache (cache_prompt)",
    }
)


def sentences(record: Record, taker: Record | None = None) -> list[str]:
    """What happened and why, the most important first.

    `taker` is the request that took the slot of this conversation meanwhile.
    """
    if record.outcome == RUNNING:
        return ["It has not ended yet.", *_went(record.decision)]
    return [
        *_computed(record),
        *_parted(record.parting),
        *_lost(record, taker),
        *_weighed(record),
        *_went(record.decision),
    ]


def verdict(record: Record) -> str:
    """The same in a few words, for a line of a list."""
    if record.repeated <= FEW:
        known = record.usage is not None and record.oracle is not None
        return "nothing twice" if known else ""
    parting, lost = record.parting, record.lost
    found = []
    if parting and (parting.tokens > FEW or parting.cause not in NEW_SESSION):
        found.append(f"{place(parting)}: {CAUSES[parting.cause].what}")
    if lost and lost.tokens > FEW:
        found.append(f"cache: {lost.why.value}")
    return "; ".join(found)


def place(parting: Parting) -> str:
    """The section, and the message's number where there is one."""
    if parting.section is None:
        return "template"
    name = PLACES[parting.section]
    return name if parting.message is None else f"{name} (message {parting.message + 1})"


def _computed(record: Record) -> Iterator[str]:
    usage = record.usage
    if usage is None:
        yield "The engine gave no count of tokens."
        return
    said = f"{usage.reused:,} of {usage.prompt:,} prompt tokens were reused and {usage.computed:,} computed"
    if usage.planted:
        said += f", {usage.planted:,} of them by prefills of ours before it went on"
    yield f"{said}; the least possible was {record.oracle:,}." if record.oracle is not None else f"{said}."
    if usage.prepared:
        yield f"{usage.prepared:,} of the reused tokens were computed in idle time before it came."
    if record.predicted is not None and record.predicted != usage.cached:
        yield f"The engine went on from {usage.cached:,} tokens; {record.predicted:,} were foretold."
    if record.repeated <= FEW and record.oracle is not None:
        yield "Nothing was computed twice."


def _parted(parting: Parting | None) -> Iterator[str]:
    if parting is None:
        return
    what = CAUSES[parting.cause].what
    where = f"token {parting.token:,}" + (f", in the {place(parting)}" if parting.section else "")
    if parting.cause in NEW_SESSION:
        yield f"It is {what}: it parts from the one before at {where}."
        return
    if parting.reply:
        yield f"The newest reply came back otherwise than it was sampled, from {where} on: {what}."
        return
    if parting.cause is Cause.OUR_RULE:
        what += f" ({parting.rule.value})" if parting.rule else ""
    yield f"It parts from the request before it at {where}: {what} (cause {parting.cause.value})."
    if parting.fixed and parting.tokens <= FEW:
        yield f"Rule {parting.rule.value if parting.rule else '?'} put that right: it cost nothing."
    elif parting.tokens > FEW:
        time = f", {parting.seconds:.1f} s" if parting.seconds is not None else ""
        yield f"{parting.tokens:,} tokens behind it had not changed and were computed again{time}."
        yield from _advice(parting)


def _advice(parting: Parting) -> Iterator[str]:
    if parting.cause is Cause.OUR_RULE:
        yield f"To have none of it: --rules {parting.rule.value if parting.rule else 'all'}=off."
    elif parting.rule and not parting.fixed:
        yield f"To put that right: --rules {parting.rule.value}=fix."
    elif parting.cause is Cause.TEMPLATE_STRIPS_REASONING:
        yield "No rule can put that right: the model's template leaves it out, whatever is sent."


def _weighed(record: Record) -> Iterator[str]:
    """In which form it went out, and what either would have cost at that moment."""
    weighed = record.weighed
    if weighed is None:
        return
    names = dict.fromkeys(c.rule.value for c in record.changes if c.rule and c.mode is Mode.FIX)
    rules = f"Rule{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else "Our rules"
    if weighed.own is None or weighed.changed is None:
        prices = (
            "its messages go on from a slot in this form only" if weighed.taken else "as it came, they do"
        )
        if not weighed.taken and record.decision and record.decision.chosen.reason is not Reason.CONTINUES:
            prices = "what it would cost could not be found out"
    else:
        prices = f"{weighed.changed:,.0f} tokens to compute, {weighed.own:,.0f} as it came"
    if weighed.taken:
        yield f"{rules} changed it: {prices}."
    else:
        yield f"{rules} would have changed it, and did not, because that is not cheaper: {prices}."


def _lost(record: Record, taker: Record | None) -> Iterator[str]:
    if record.lost and record.lost.tokens > FEW:
        how = LOST[record.lost.why]
        yield f"{record.lost.tokens:,} tokens had been computed before and were again: {how}."
        if taker and record.lost.why is Loss.OVERWRITTEN:
            whose = f" of conversation {taker.conversation}" if taker.conversation is not None else ""
            yield f"Its slot was taken by request {taker.request_id}{whose}."


def _went(decision: Decision | None) -> Iterator[str]:
    if decision is None:
        return
    chosen = decision.chosen
    yield f"It went to {_option(chosen)}: {WENT[chosen.reason]}."
    if decision.beaten:
        second = decision.beaten[0]
        more = second.price - chosen.price
        yield f"The next best was {_option(second)}, at the price of {more:,.0f} more tokens."


def _option(option: Option) -> str:
    where = f"slot {option.slot}" if option.slot is not None else "the engine's own choice"
    counted = Counter(option.steps)
    steps = [STEPS[step].format("one" if count == 1 else count) for step, count in counted.items()]
    return f"{where} ({option.reason.value})" + (f", after {' and '.join(steps)}" if steps else "")
