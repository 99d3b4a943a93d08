"""llama-server's own completions and infill: raw prompts, and what answers say.

`response_fields` can take away any field; it lifts `timings/cache_n` to the root (engine.md 1.3).
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from slotkeeper.api.answer_builder import AnswerBuilder
from slotkeeper.api.document import Doc, NotOurs, Prompt, Shape, integer, pick

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


# -- bodies ----------------------------------------------------------------------------------------------


def shape(doc: Doc) -> Shape:
    """A /completion, /completions or /v1/completions body: `prompt` in one of the engine's six forms."""
    if "prompt" not in doc:
        raise NotOurs("prompt")
    prompts = split(doc["prompt"])
    if len(prompts) != 1:
        return Shape()
    prompt, media = _single(prompts[0])
    return Shape(prompt=prompt, media=media)


def infill(doc: Doc) -> Shape:
    """An /infill body: the engine puts the prompt together from the model's own FIM tokens."""
    if not isinstance(doc.get("input_prefix"), str) and not isinstance(doc.get("input_suffix"), str):
        raise NotOurs("input_prefix")
    return Shape()


def split(prompt: Any) -> list[Any]:
    """One prompt or several: a list that holds a token id is one prompt, any other list is a list of them."""
    if not isinstance(prompt, list) or any(type(part) is int for part in prompt):
        return [prompt]
    return prompt


def _single(prompt: Any) -> tuple[Prompt | None, bool]:
    """The prompt, and whether it carries media: text, ids, a mix, or an object around a text."""
    if isinstance(prompt, dict):
        media = bool(prompt.get("multimodal_data"))
        inner = prompt.get("prompt_string")
        return (inner if isinstance(inner, str) and not media else None), media
    if isinstance(prompt, str):
        return prompt, False
    if isinstance(prompt, list) and all(_is_part(part) for part in prompt):
        return prompt, False
    raise NotOurs("prompt")


def _is_part(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, int) and not isinstance(part, bool))
