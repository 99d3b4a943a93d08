"""OpenAI chat bodies: which of their fields reach the chat template, and which messages carry media."""

from __future__ import annotations

from typing import Any, Final

from slotkeeper.api.document import Doc, NotOurs, Shape, pick, text

# What stands before the messages or decides how they are rendered. `model` chooses the template in router
# mode (engine.md 7). A grammar can come with its own template text, so schemas count.
HEAD: Final = (
    "model",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "chat_template",
    "chat_template_kwargs",
    "enable_thinking",
    "reasoning_effort",
    "reasoning_format",
    "response_format",
    "json_schema",
    "grammar",
    "add_generation_prompt",
    "continue_final_message",
)

_TEXT: Final = frozenset({"text", "refusal"})


def shape(doc: Doc) -> Shape:
    """A /v1/chat/completions body."""
    messages = doc.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise NotOurs("messages")
    return Shape(chat={"messages": messages, **pick(doc, HEAD)}, media=carries_media(messages))


def carries_media(messages: list[Doc]) -> bool:
    """Whether any message has a part that is not text."""
    return any(_foreign(message.get("content")) for message in messages)


def _foreign(content: Any) -> bool:
    if not isinstance(content, list):
        return False
    return any(isinstance(part, dict) and text(part, "type") not in _TEXT for part in content)
