"""What it cost that a prompt did not go on where the one before it ended, by the engine's figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from slotkeeper.api.answer_builder import Figures
from slotkeeper.conversation.causes import Explained, by_our_rule, explain, of_template
from slotkeeper.conversation.divergence import length, parted
from slotkeeper.conversation.layout import Conversation, Layout, Match, Message, Role, Section
from slotkeeper.conversation.reasons import CAUSES, Cause
from slotkeeper.conversation.rules.apply import Outcome
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.request_record import Decision, PromptDivergence
from slotkeeper.scheduler.types import Tokens


@dataclass(frozen=True, slots=True)
class Echo:
    """Where it stands, and what to say should it not be what the slot holds."""

    message: int  # index in the layout
    section: Section
    cause: Cause


def echo(before: Conversation, layout: Layout) -> Echo | None:
    """Of a request that goes on from `before`; None where no reply follows."""
    at = len(before.received.messages)
    if at >= len(layout.messages) or layout.messages[at].role is not Role.ASSISTANT:
        return None
    asked = any(message.role is Role.USER for message in layout.messages[at + 1 :])
    section, cause = _why(before, layout.messages[at], asked=asked)
    return Echo(at, section, cause)


def _why(before: Conversation, message: Message, *, asked: bool) -> tuple[Section, Cause]:
    """Templates leave reasoning in place until a user speaks (`asked`)."""
    if message.calls and not asked:
        return Section.CALL, Cause.CALL_RERENDERED
    if message.reasoning_text:
        return Section.REASONING, Cause.TEMPLATE_STRIPS_REASONING
    said = next(reversed(before.replies.values()), None)
    if said and said.get("reasoning_content"):
        return Section.REASONING, Cause.REASONING_DROPPED
    return Section.REPLY, Cause.TEMPLATE_RERENDERS


# -- what it cost ----------------------------------------------------------------------------------------

OPENING: Final = 16  # tokens, at most, that a template puts behind the messages to open a reply
OF_TEMPLATE: Final = frozenset({Cause.TEMPLATE_STRIPS_REASONING, Cause.TEMPLATE_RERENDERS})
OVERSHOOT: Final = 8  # tokens, at most, that a slot holds behind a reply, and that the reply is shorter by
LEAD: Final = 24  # tokens shown before the place where prompts part
BEHIND: Final = 24

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceReport:
    """What is said of a request when it comes; its cost follows with the answer."""

    explained: Explained
    template: Cause | None  # should its tokens part where its texts do not
    parent: Tokens | None  # the prompt that it goes on from, where that is known
    remains: bool  # what goes on parts as well
    echo: Echo | None  # how the newest reply comes back
    lost: float  # characters of its own text, by its length, that stand behind where it parts, unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What it cost that a prompt did not go on where the one before it ended."""

    why: Explained
    first_token: int  # at which they part
    tokens: int  # computed again, though nothing in them had changed
    seconds: float | None


def judge(match: Match, layout: Layout, sent: Outcome) -> DivergenceReport:
    """Of a request that came as `layout` and went out as `sent`."""
    explained = by_our_rule(match, layout, sent.layout, sent.fixed) or explain(match, layout)
    divergence, before = explained.divergence, match.nearest
    return DivergenceReport(
        explained=explained,
        template=of_template(before.received) if before else None,
        parent=before.tokens if before else None,
        remains=divergence is not None and not _mended(match, sent),
        echo=echo(match.before, layout) if match.before and divergence is None else None,
        lost=divergence.lost / length(layout) if divergence else 0.0,
    )


def _mended(match: Match, outcome: Outcome) -> bool:
    """Whether what goes on continues what went on before."""
    before = match.before
    return bool(outcome.edits) and before is not None and parted(before.sent, outcome.layout) is None


def cost_of(judged: DivergenceReport, prompt: Tokens | None, figures: Figures, planted: int) -> Cost | None:
    """By the engine's figures; None where nothing parted, or where prompts or figures are not known."""
    parent, computed = judged.parent, figures.computed
    if parent is None or prompt is None or computed is None:
        return None
    common = prompt.lcp(parent)
    behind = len(parent) - common
    if judged.remains:
        why, tokens = judged.explained, min(behind, round(judged.lost * len(prompt)))
    elif behind > OPENING:
        why = replace(judged.explained, cause=judged.template, rule=None)
        tokens = behind
    elif judged.explained.divergence is not None:  # and it was put right
        why, tokens = judged.explained, 0
    else:
        return None
    tokens = max(0, min(tokens, computed + planted, len(prompt) - common))
    per_token = figures.prefill_ms / 1000 / computed if figures.prefill_ms and computed else None
    seconds = None if per_token is None else tokens * per_token
    return Cost(why=why, first_token=common, tokens=tokens, seconds=seconds)


def report(cost: Cost, *, request_id: str, fixed: bool) -> None:
    """Say it in the log, without any text of the prompt."""
    why, place = cost.why, cost.why.divergence
    log.info(
        "prefix_changed",
        request_id=request_id,
        kind=why.kind.value,
        cause=why.cause.value if why.cause else None,
        section=place.section.value if place else None,
        message=place.message if place else None,
        first_token=cost.first_token,
        tokens=cost.tokens,
        seconds=round(cost.seconds, 4) if cost.seconds is not None else None,
        rule=why.rule.value if why.rule else None,
        fixed=fixed,
    )


def prompt_divergence(
    cost: Cost, cause: Cause, prompt: Tokens | None, parent: Tokens | None, *, fixed: bool, text: bool
) -> PromptDivergence:
    """The same for `why`; with the tokens around the place if `text` may be kept."""
    first, place = cost.first_token, None if cause in OF_TEMPLATE else cost.why.divergence
    since, until = max(0, first - LEAD), first + BEHIND
    was, now = (
        tuple(side.cut(since, min(until, len(side))).ids()) if text and side is not None else ()
        for side in (parent, prompt)
    )
    return PromptDivergence(
        cause=cause,
        section=place.section if place else None,
        message=place.message if place else None,
        token=first,
        tokens=cost.tokens,
        seconds=cost.seconds,
        rule=cost.why.rule,
        fixed=fixed,
        was=was,
        now=now,
        lead=first - since,
    )


def reply_parted(
    judged: DivergenceReport, decision: Decision | None, cached: int | None
) -> PromptDivergence | None:
    """Whether the newest reply came back otherwise than the slot held it, by the engine's count."""
    if judged.echo is None or judged.parent is None or cached is None:
        return None
    if decision is None or decision.common is None:
        return None
    if decision.common < len(judged.parent) - OPENING or cached >= decision.held - OVERSHOOT:
        return None
    return PromptDivergence(
        cause=judged.echo.cause,
        section=judged.echo.section,
        message=judged.echo.message,
        token=decision.common,
        tokens=0,
        seconds=None,
        rule=CAUSES[judged.echo.cause].rule,
        fixed=False,
        reply=True,
    )
