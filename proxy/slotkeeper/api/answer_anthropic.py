"""Anthropic messages: content blocks, and a usage whose `input_tokens` leaves out what was cached.

There are no timings here (engine.md 1.3).
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from slotkeeper.api.answer_builder import AnswerBuilder
from slotkeeper.api.document import Doc, compact, integer, rows, table

_SILENT: Final = frozenset({"ping", "content_block_stop"})


class AnthropicReading:
    """Reads the events from message_start to message_stop, or a message."""

    __slots__ = ("_draft",)

    def __init__(self, draft: AnswerBuilder) -> None:
        self._draft = draft

    def event(self, name: str, data: bytes) -> None:
        """Take in one event. Those without a figure or a token are not parsed."""
        if name in _SILENT:
            return
        if name == "message_stop":
            self._draft.complete = self._draft.error is None
            return
        doc = orjson.loads(data)
        if self._draft.failed(doc):
            return
        match doc.get("type"):
            case "message_start":
                self._draft.opened = True
                self._usage(table(doc, "message"))
            case "message_delta":
                self._usage(doc)
            case "content_block_start":
                self._block(doc.get("index"), table(doc, "content_block"))
            case "content_block_delta":
                self._delta(doc.get("index"), table(doc, "delta"))
            case _:
                pass

    def body(self, doc: Any) -> None:
        """Take in a whole message."""
        self._draft.opened = True
        self._usage(doc)
        for index, block in enumerate(rows(doc.get("content"))):
            self._block(index, block)

    def _block(self, index: Any, block: Doc) -> None:
        self._draft.say(block.get("text"))
        self._draft.think(block.get("thinking"))
        if block.get("type") == "tool_use":
            given = block.get("input")
            # A stream opens the block with an empty input and sends the text of it after.
            arguments = compact(given) if given else None
            self._draft.call(index, name=block.get("name"), call_id=block.get("id"), arguments=arguments)

    def _delta(self, index: Any, delta: Doc) -> None:
        self._draft.say(delta.get("text"))
        self._draft.think(delta.get("thinking"))
        if delta.get("type") == "input_json_delta":
            self._draft.call(index, arguments=delta.get("partial_json"))

    def _usage(self, doc: Doc) -> None:
        usage = table(doc, "usage")
        fresh, cached = integer(usage.get("input_tokens")), integer(usage.get("cache_read_input_tokens")) or 0
        self._draft.usage(generated=usage.get("output_tokens"))
        if fresh is not None:
            self._draft.usage(prompt=fresh + cached, cached=cached)
