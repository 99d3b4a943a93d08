"""What kind of request it is, as seen from the conversation that it goes on from."""

from __future__ import annotations

from enum import StrEnum

from slotkeeper.conversation.divergence import Divergence, parted
from slotkeeper.conversation.likeness import tool_name
from slotkeeper.conversation.phrases import (
    ASIDE,
    ASIDE_SYSTEM,
    SUMMARIZED,
    SUMMARIZER,
    SUMMARY_ASKED,
    says,
    user_says,
)
from slotkeeper.conversation.record import Match
from slotkeeper.conversation.requests.layout import Layout, Message, Role, Section


class RequestKind(StrEnum):
    """In reports, logs, metrics and tests alike."""

    COLD = "cold"  # a conversation begins; a sub-agent's as well
    TOOL_ROUND_TRIP = "tool_round_trip"  # the last request, the reply, and what its tools gave
    MAIN_TURN = "main_turn"  # the same, and the user speaks
    REWRITE = "rewrite"  # something was changed in front of what is still there
    COMPACTION = "compaction"  # asks for a summary, or is the first request after it
    SIDE = "side"  # a title, a suggestion, a commit message
    RETRY = "retry"  # the very same request again
    BRANCH = "branch"  # goes back to an earlier message and on from there


def kind_at(layout: Layout, match: Match, divergence: Divergence | None) -> RequestKind:
    """Every request has one; what a client's own words say of it comes first.

    The divergence is where it parts from the one before it.
    """
    if by_words := _by_words(layout, match):
        return by_words
    before = match.before
    if before is None:
        return RequestKind.SIDE if _beside(layout, match) else RequestKind.COLD
    if before.aside and divergence is None:
        return RequestKind.SIDE
    old = before.received
    if divergence is None or divergence.section is Section.OPTIONS:
        return _going_on(old, layout)
    if match.common >= len(old.messages) - old.lead:
        return RequestKind.REWRITE  # all of its messages are still there
    return RequestKind.REWRITE if _still_there(old, layout, old.lead + match.common) else RequestKind.BRANCH


def leads_nowhere(layout: Layout, match: Match) -> bool:
    """Whether its conversation does not go on from it: the next turn leaves a title or a summary out."""
    by_words = _by_words(layout, match)
    if by_words is not None:
        return by_words is RequestKind.SIDE or asks_for_summary(layout)
    if match.before is None:
        return _beside(layout, match)
    return match.before.aside and parted(match.before.received, layout) is None


def asks_for_summary(layout: Layout) -> bool:
    lead, newest = layout.messages[: layout.lead], layout.messages[layout.lead :][-1:]
    return any(says(m, SUMMARIZER) for m in lead) or any(user_says(m, SUMMARY_ASKED) for m in newest)


def new_messages(layout: Layout, match: Match) -> tuple[Message, ...]:
    """Those that the conversation did not have."""
    return layout.messages[layout.lead + match.common :] if match.before else layout.messages[layout.lead :]


def _by_words(layout: Layout, match: Match) -> RequestKind | None:
    if asks_for_summary(layout):
        return RequestKind.COMPACTION
    lead, new = layout.messages[: layout.lead], new_messages(layout, match)
    if any(says(m, ASIDE_SYSTEM) for m in lead) or any(user_says(m, ASIDE) for m in new[-1:]):
        return RequestKind.SIDE
    if _cut_short(match) and any(user_says(m, SUMMARIZED) for m in (*new, *layout.messages[-1:])):
        return RequestKind.COMPACTION
    return None


def _cut_short(match: Match) -> bool:
    """Whether some of the conversation is gone; a user may well ask what was done so far."""
    old = match.before.received if match.before else None
    return old is None or match.common < len(old.messages) - old.lead


def _beside(layout: Layout, match: Match) -> bool:
    """None of the tools that this client's conversations have, and at most one, for the answer."""
    if match.beside is None or not match.beside.received.tools:
        return False
    theirs = {tool_name(tool) for tool in match.beside.received.tools}
    return len(layout.tools) <= 1 and theirs.isdisjoint(map(tool_name, layout.tools))


def _going_on(old: Layout, new: Layout) -> RequestKind:
    if len(new.messages) == len(old.messages):
        return RequestKind.RETRY
    if len(new.messages) < len(old.messages):
        return RequestKind.BRANCH
    return RequestKind.TOOL_ROUND_TRIP if _answers(new.messages[-1]) else RequestKind.MAIN_TURN


def _answers(message: Message) -> bool:
    """Whether it brings results, and no word of a user but a program's reminder."""
    return message.role is Role.TOOL or bool(message.answers)


def _still_there(old: Layout, new: Layout, at: int) -> bool:
    """Whether messages behind the first that differs are found again."""
    kept = {(m.role, m.said) for m in old.messages[at + 1 :] if m.said.strip()}
    return any((m.role, m.said) in kept for m in new.messages[at:])
