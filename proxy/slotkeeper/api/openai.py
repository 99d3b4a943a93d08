"""OpenAI chat and text completions: which fields reach the chat template, and what answers say."""

from __future__ import annotations

from typing import Any, Final

import orjson

from slotkeeper.api.answer_builder import AnswerBuilder
from slotkeeper.api.document import Doc, NotOurs, Shape, pick, rows, table, text

_DONE: Final = b"[DONE]"


class OpenAiReading:
    """Reads the first choice; others of n > 1 share its prompt but not its words."""

    __slots__ = ("_draft",)

    def __init__(self, draft: AnswerBuilder) -> None:
        self._draft = draft

    def event(self, name: str, data: bytes) -> None:  # noqa: ARG002 (its events have no names)
        """Take in one chunk."""
        if data == _DONE:
            self._draft.complete = self._draft.error is None
        else:
            doc = orjson.loads(data)
            if not self._draft.failed(doc):
                self._chunk(doc, "delta")

    def body(self, doc: Any) -> None:
        """Take in a whole answer."""
        self._chunk(doc, "message")

    def _chunk(self, doc: Doc, part: str) -> None:
        for choice in rows(doc.get("choices")):
            if choice.get("index", 0) != 0:
                continue
            self._draft.opened = True
            self._draft.say(choice.get("text"))
            self._message(table(choice, part))
        if usage := table(doc, "usage"):
            cached = table(usage, "prompt_tokens_details").get("cached_tokens")
            generated = usage.get("completion_tokens")
            self._draft.usage(prompt=usage.get("prompt_tokens"), cached=cached, generated=generated)
        elif progress := table(doc, "prompt_progress"):
            # Sent when the slot starts: the earliest proof of what is cached.
            self._draft.usage(prompt=progress.get("total"), cached=progress.get("cache"))
        self._draft.timings(doc.get("timings"))

    def _message(self, message: Doc) -> None:
        if not message:
            return
        self._draft.say(message.get("content"))
        self._draft.think(message.get("reasoning_content"))
        for position, call in enumerate(rows(message.get("tool_calls"))):
            function = table(call, "function")
            self._draft.call(
                call.get("index", position),
                name=function.get("name"),
                call_id=call.get("id"),
                arguments=function.get("arguments"),
            )


# -- bodies ----------------------------------------------------------------------------------------------

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
