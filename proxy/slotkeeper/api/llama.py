"""Raw prompts: llama-server's own completions, OpenAI's text completions, infill."""

from __future__ import annotations

from typing import Any

from slotkeeper.api.document import Doc, NotOurs, Prompt, Shape


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
