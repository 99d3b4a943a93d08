"""The exact prompt of a request, and of the turn that will follow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from slotkeeper.api.document import Doc
from slotkeeper.api.request import Ask
from slotkeeper.engine.client import EngineError, EngineGoneError
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.vocab.remote import TokenizeError

# ValueError and TokenizeError: a prompt that the tokenizer refuses (ids that are none, several prompts).
FAILURES: Final = (EngineError, EngineGoneError, TokenizeError, ValueError)

# What is put behind a reply so that the template renders it as history. A tool's answer leaves the
# reasoning before it in place, as it was sampled; a user's message may strip it.
AFTER_REASONING: Final[Doc] = {"role": "tool", "tool_call_id": "x", "content": "x"}
AFTER_TEXT: Final[Doc] = {"role": "user", "content": "x"}


async def prompt_of(link: EngineLink, ask: Ask, auth: Mapping[str, str]) -> Tokens | None:
    """The ids that the engine will evaluate; None where they cannot be known (media, infill).

    Raises EngineError for a body that the engine's template refuses, EngineGoneError without an engine.
    """
    if ask.chat is not None:
        return await link.render_chat(ask.chat, auth)
    if ask.prompt is not None:
        return await link.render_prompt(ask.prompt, auth)
    return None


async def with_reply(
    link: EngineLink, ask: Ask, prompt: Tokens, reply: Doc, *, generated: int, auth: Mapping[str, str]
) -> Tokens | None:
    """The ids of prompt and reply, as the slot holds them: all but the last sampled token.

    They are found by rendering the conversation one turn further. None when that does not agree
    with the engine's count: then the reply does not come back as it was sampled.
    """
    total = len(prompt) + max(0, generated - 1)
    said = await link.render_text(str(reply.get("content") or ""), auth)
    # All that was sampled, or all but the token that ended the turn; never more than that.
    whole = len(said) in (generated, generated - 1)
    if ask.chat is None:
        return (prompt + said).cut(0, total) if whole else None
    rendered = await _next_turn(link, ask.chat, reply, auth)
    if rendered.lcp(prompt) < len(prompt):
        return None
    closed = link.end_of_turn in rendered.cut(total, total + 2).ids()
    return rendered.cut(0, total) if whole or closed else None


async def _next_turn(link: EngineLink, chat: Doc, reply: Doc, auth: Mapping[str, str]) -> Tokens:
    after = AFTER_REASONING if reply.get("reasoning_content") or reply.get("tool_calls") else AFTER_TEXT
    return await link.render_chat({**chat, "messages": [*chat["messages"], reply, after]}, auth)
