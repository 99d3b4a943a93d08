"""llama-server's own completions: content, then one final object with `stop: true` and every figure.

`response_fields` can take any of them away, and lifts `timings/cache_n` to the root (engine.md 1.3).
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from slotkeeper.api.answer_builder import AnswerBuilder
from slotkeeper.api.document import Doc, integer, pick

_LIFTED: Final = (
    *("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"),
    *("draft_n", "draft_n_accepted"),
)


class LlamaReading:
    """Reads the first answer; further ones of n > 1 or of several prompts are not ours to follow."""

    __slots__ = ("_draft",)

    def __init__(self, draft: AnswerBuilder) -> None:
        self._draft = draft

    def event(self, name: str, data: bytes) -> None:  # noqa: ARG002 (its events have no names)
        """Take in one chunk. Several tasks in one stream begin with `data: null`."""
        doc = orjson.loads(data)
        if not isinstance(doc, dict) or self._draft.failed(doc) or doc.get("index", 0) != 0:
            return
        if doc.get("tokens"):
            self._draft.spoke = True  # a token that gave no text yet
        self._object(doc)
        if doc.get("stop", True) is True:  # only the last can be without it
            self._draft.complete = True

    def body(self, doc: Any) -> None:
        """Take in a whole answer: an object, or a list of them."""
        self._object(doc[0] if isinstance(doc, list) else doc)

    def _object(self, doc: Doc) -> None:
        self._draft.opened = True
        self._draft.say(doc.get("content"))
        self._draft.usage(prompt=doc.get("tokens_evaluated"), generated=doc.get("tokens_predicted"))
        slot = integer(doc.get("id_slot"))
        if slot is not None and slot >= 0:  # -1 in every chunk but the last
            self._draft.slot = slot
        self._draft.timings(doc.get("timings") or pick(doc, _LIFTED))
