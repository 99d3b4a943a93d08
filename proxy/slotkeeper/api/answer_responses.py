"""OpenAI responses: output items, whole in `response.completed`, before that as deltas."""

from __future__ import annotations

from typing import Any, Final

import orjson

from slotkeeper.api.answer_builder import AnswerBuilder
from slotkeeper.api.document import Doc, rows, table

_ENDS: Final = frozenset({"response.completed", "response.incomplete"})


class ResponsesReading:
    """Follows the deltas; the final response, which repeats everything, takes their place."""

    __slots__ = ("_draft",)

    def __init__(self, draft: AnswerBuilder) -> None:
        self._draft = draft

    def event(self, name: str, data: bytes) -> None:
        """Take in one event. The `done` events repeat what the deltas said and are not parsed."""
        if name.endswith(".done"):
            return
        doc = orjson.loads(data)
        kind = doc.get("type", name)
        response = table(doc, "response")
        if kind in {"error", "response.failed"}:
            if not (self._draft.failed(doc) or self._draft.failed(response)):
                self._draft.error = str(doc.get("code") or "error")
        elif kind in _ENDS:
            self._draft.complete = self._draft.error is None
            self.body(response)
            self._draft.timings(doc.get("timings"))
        elif not self._draft.failed(doc):
            self._delta(kind, doc)

    def body(self, doc: Any) -> None:
        """Take in a whole response."""
        output = rows(doc.get("output"))
        if output:
            self._draft.reset()
        self._draft.opened = True
        for item in output:
            self._item(item)
        usage = table(doc, "usage")
        cached = table(usage, "input_tokens_details").get("cached_tokens")
        generated = usage.get("output_tokens")
        self._draft.usage(prompt=usage.get("input_tokens"), cached=cached, generated=generated)
        self._draft.timings(doc.get("timings"))

    def _delta(self, kind: str, doc: Doc) -> None:
        self._draft.opened = True
        match kind:
            case "response.output_text.delta":
                self._draft.say(doc.get("delta"))
            case "response.reasoning_text.delta":
                self._draft.think(doc.get("delta"))
            case "response.function_call_arguments.delta":
                self._draft.call(doc.get("item_id"), arguments=doc.get("delta"))
            case "response.output_item.added":
                item = table(doc, "item")
                if item.get("type") == "function_call":
                    self._call(item)
            case _:
                pass

    def _item(self, item: Doc) -> None:
        match item.get("type"):
            case "reasoning":
                for part in rows(item.get("content")):
                    self._draft.think(part.get("text"))
            case "message":
                for part in rows(item.get("content")):
                    self._draft.say(part.get("text"))
            case "function_call":
                self._call(item)
            case _:
                pass

    def _call(self, item: Doc) -> None:
        key = item.get("id") or item.get("call_id")
        self._draft.call(
            key,
            name=item.get("name"),
            call_id=item.get("call_id"),
            arguments=item.get("arguments"),
        )
