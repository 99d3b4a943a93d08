"""One generation request, parsed once: what it asks for, and the two ways to name its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from slotkeeper.api import anthropic, llama, openai, responses
from slotkeeper.api.claim import Claim, claim, load
from slotkeeper.api.document import Doc, NotOurs, Prompt, Shape
from slotkeeper.api.hash_chain import hash_chain
from slotkeeper.api.identity import offered
from slotkeeper.api.routes import Api

__all__ = ["Ask", "NotOurs", "Prompt", "model_of", "parse", "read"]

_LONGEST_MODEL: Final = 128  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One generation request."""

    api: Api
    stream: bool
    claim: Claim
    cache_prompt: bool
    chat: Doc | None  # a chat body for /apply-template; None for raw prompts and for media
    prompt: Prompt | None  # a raw prompt; None when unknown (infill, several prompts, media)
    adapted: bool  # LoRA scales of its own: what its slot holds fits no other request
    media: bool  # images or audio: the token ids cannot be known
    progress: bool  # it says itself whether it wants `return_progress`
    hash_chain: tuple[bytes, ...]  # chained digests: of what stands before the messages, then per message
    conversation: str | None  # whatever the body offers as the name of its conversation


def parse(api: Api, body: bytes) -> Ask:
    """The request in `body`, sent to a route that generates.

    Raises:
        NotOurs: for anything that we cannot read, and nothing else.
    """
    return read(api, load(body))


def read(api: Api, doc: Doc, taken: Claim | None = None) -> Ask:
    """The same of a body that was loaded, and whose claim may be known. Raises NotOurs."""
    shape = _shape(api, doc)
    pinned = api.pinnable  # /v1/messages drops everything that it does not know (T5)
    return Ask(
        api=api,
        stream=doc.get("stream") is True,
        claim=taken or claim(api, doc),
        cache_prompt=not (pinned and doc.get("cache_prompt") is False),
        chat=None if shape.media else shape.chat,
        prompt=shape.prompt,
        adapted=pinned and bool(doc.get("lora")),
        media=shape.media,
        progress="return_progress" in doc,
        hash_chain=() if shape.chat is None else hash_chain(shape.chat, shape.lead),
        conversation=offered(doc),
    )


def model_of(doc: Doc) -> str | None:
    """The model that it names, where that can be shown."""
    model = doc.get("model")
    told = isinstance(model, str) and model.isprintable() and 0 < len(model) <= _LONGEST_MODEL
    return model if told else None


def _shape(api: Api, doc: Doc) -> Shape:
    match api:
        case Api.CHAT:
            return openai.shape(doc)
        case Api.MESSAGES:
            return anthropic.shape(doc)
        case Api.RESPONSES:
            return responses.shape(doc)
        case Api.COMPLETION | Api.COMPLETIONS:
            return llama.shape(doc)
        case Api.INFILL:
            return llama.infill(doc)
        case _:
            raise NotOurs("route")
