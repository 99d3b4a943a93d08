"""How the newest reply comes back, and why its tokens may not be those that were sampled."""

from __future__ import annotations

from dataclasses import dataclass

from slotkeeper.conversation.reasons import Cause
from slotkeeper.conversation.record import Conversation
from slotkeeper.conversation.requests.layout import Layout, Message, Role, Section


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
    if message.reasoning and message.reasoning.text:
        return Section.REASONING, Cause.TEMPLATE_STRIPS_REASONING
    said = next(reversed(before.replies.values()), None)
    if said and said.get("reasoning_content"):
        return Section.REASONING, Cause.REASONING_DROPPED
    return Section.REPLY, Cause.TEMPLATE_RERENDERS
