"""OpenAI's chat and text completions, and llama-server's own completions: bodies and answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from slotkeeper.api.answers.answer_builder import AnswerBuilder
from slotkeeper.api.document import (
    HEAD,
    SECTIONS,
    Doc,
    NotOurs,
    Prompt,
    SeenRequest,
    Shape,
    integer,
    listed,
    mark,
    options,
    pick,
    rows,
    strings,
    table,
    text,
    tools,
)
from slotkeeper.conversation.layout import Call, Layout, Message, Path, Role, Section, Text

_DONE: Final = b"[DONE]"


@dataclass(slots=True, eq=False)
class OpenAiReading:
    """Reads the first choice; with n > 1, the others share its prompt but not its text."""

    draft: AnswerBuilder

    def event(self, name: str, data: bytes) -> None:  # noqa: ARG002 (its events have no names)
        """Read one chunk."""
        if data == _DONE:
            self.draft.complete = self.draft.error is None
        else:
            doc = orjson.loads(data)
            if not self.draft.failed(doc):
                self._chunk(doc, "delta")

    def body(self, doc: Any) -> None:
        """Read a whole answer."""
        self._chunk(doc, "message")

    def _chunk(self, doc: Doc, part: str) -> None:
        for choice in rows(doc.get("choices")):
            if choice.get("index", 0) != 0:
                continue
            self.draft.opened = True
            self.draft.say(choice.get("text"))
            self._message(table(choice, part))
        if usage := table(doc, "usage"):
            cached = table(usage, "prompt_tokens_details").get("cached_tokens")
            generated = usage.get("completion_tokens")
            self.draft.usage(prompt=usage.get("prompt_tokens"), cached=cached, generated=generated)
        elif progress := table(doc, "prompt_progress"):
            # The engine sends this when the slot starts: it is the first count of cached tokens.
            self.draft.usage(prompt=progress.get("total"), cached=progress.get("cache"))
        self.draft.timings(doc.get("timings"))

    def _message(self, message: Doc) -> None:
        if not message:
            return
        self.draft.say(message.get("content"))
        self.draft.think(message.get("reasoning_content"))
        for position, call in enumerate(rows(message.get("tool_calls"))):
            function = table(call, "function")
            self.draft.call(
                call.get("index", position),
                name=function.get("name"),
                call_id=call.get("id"),
                arguments=function.get("arguments"),
            )


# -- bodies ----------------------------------------------------------------------------------------------

_ROLES: Final = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}
_PARTS: Final = {"text": "text", "refusal": "refusal"}  # a part's type -> the key of its string


def chat_shape(doc: Doc) -> Shape:
    """Return the chat body of a /v1/chat/completions body. Raises NotOurs."""
    messages = doc.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise NotOurs("messages")
    return Shape(chat={"messages": messages, **pick(doc, HEAD)}, media=carries_media(messages))


def carries_media(messages: list[Doc]) -> bool:
    """Whether any message has a part that is not text."""
    parts = (part for message in messages for part in rows(message.get("content")))
    return any(text(part, "type") not in _PARTS for part in parts)


def lay_out_chat(doc: Doc, before: SeenRequest | None = None) -> Layout | None:
    """Return the layout of a /v1/chat/completions body; None if it cannot be read."""
    given, offered = doc.get("messages"), tools(doc)
    if offered is None or not isinstance(given, list) or not all(isinstance(m, dict) for m in given):
        return None
    return Layout(listed(given, "messages", _message, before), offered, options=options(doc))


def _message(message: Doc, path: Path) -> Message:
    role = _ROLES.get(text(message, "role"), Role.USER)
    content = message.get("content")
    media = _media(content)
    answers: tuple[Text, ...] = ()
    if role is Role.TOOL and isinstance(call := message.get("tool_call_id"), str):
        answers = (Text((*path, "tool_call_id"), call, Section.RESULT),)
    return Message(
        role=role,
        path=path,
        texts=strings(content, (*path, "content"), SECTIONS[role], _PARTS),
        calls=_calls(message.get("tool_calls"), path) if role is Role.ASSISTANT else (),
        answers=answers,
        reasoning=_reasoning(message, path) if role is Role.ASSISTANT else None,
        media=media,
        content=None if media else content,
        doc=message if role is Role.SYSTEM else None,
    )


def _media(content: Any) -> tuple[bytes, ...]:
    return tuple(mark(part) for part in rows(content) if text(part, "type") not in _PARTS)


def _calls(calls: Any, path: Path) -> tuple[Call, ...]:
    if not isinstance(calls, list):
        return ()
    return tuple(
        _call(call, (*path, "tool_calls", n))
        for n, call in enumerate(calls)
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    )


def _call(call: Doc, path: Path) -> Call:
    function = table(call, "function")
    return Call(
        name=text(function, "name"),
        id=text(call, "id"),
        id_path=(*path, "id"),
        arguments=function.get("arguments", ""),
        arguments_path=(*path, "function", "arguments"),
    )


def _reasoning(message: Doc, path: Path) -> Text | None:
    """Return the reasoning, by the engine's key or by `reasoning`; with neither, an empty text."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str):
            return Text((*path, key), message[key], Section.REASONING)
    if message.get("reasoning_content") is not None:
        return None
    return Text((*path, "reasoning_content"), "", Section.REASONING)


# -- llama-server's own completions and infill: raw prompts and answers ----------------------------------
# `response_fields` can remove any field; it moves `timings/cache_n` to the root (engine.md 1.3).

_LIFTED: Final = (
    *("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"),
    *("draft_n", "draft_n_accepted"),
)


@dataclass(slots=True, eq=False)
class LlamaReading:
    """Reads the first answer; of others, of n > 1 or of several prompts, only whether they have ended."""

    draft: AnswerBuilder
    _ended: bool = False  # the first answer has ended
    _running: set[Any] = field(default_factory=set)  # the indexes of answers that have begun and not ended

    def event(self, name: str, data: bytes) -> None:  # noqa: ARG002 (its events have no names)
        """Read one chunk. A stream of several tasks begins with `data: null`."""
        doc = orjson.loads(data)
        if not isinstance(doc, dict) or self.draft.failed(doc):
            return
        index, ended = doc.get("index", 0), doc.get("stop", True) is True
        if "index" not in doc:  # only a last chunk can be without it, or without `stop`
            self._running.clear()
        (self._running.discard if ended else self._running.add)(index)
        if index == 0:
            if doc.get("tokens"):
                self.draft.spoke = True  # a token may give no text yet
            self._object(doc)
            self._ended = self._ended or ended
        self.draft.complete = self._ended and not self._running

    def body(self, doc: Any) -> None:
        """Read a whole answer: an object, or a list of objects."""
        self._object(doc[0] if isinstance(doc, list) else doc)

    def _object(self, doc: Doc) -> None:
        self.draft.opened = True
        self.draft.say(doc.get("content"))
        self.draft.usage(prompt=doc.get("tokens_evaluated"), generated=doc.get("tokens_predicted"))
        slot = integer(doc.get("id_slot"))
        if slot is not None and slot >= 0:  # every chunk except the last has -1
            self.draft.slot = slot
        self.draft.timings(doc.get("timings") or pick(doc, _LIFTED))


# -- bodies ----------------------------------------------------------------------------------------------


def prompt_shape(doc: Doc) -> Shape:
    """Return the prompt of a /completion, /completions or /v1/completions body.

    The engine takes six forms of `prompt`. Raises NotOurs for any other.
    """
    if "prompt" not in doc:
        raise NotOurs("prompt")
    prompts = split(doc["prompt"])
    if len(prompts) != 1:
        return Shape()
    prompt, media = single(prompts[0])
    return Shape(prompt=prompt, media=media)


def infill(doc: Doc) -> Shape:
    """Check an /infill body. Its prompt is unknown: the engine builds it with the model's FIM tokens.

    Raises NotOurs.
    """
    if not isinstance(doc.get("input_prefix"), str) and not isinstance(doc.get("input_suffix"), str):
        raise NotOurs("input_prefix")
    return Shape()


def split(prompt: Any) -> list[Any]:
    """Return the prompts: a list with a token id in it is one prompt, any other list holds several."""
    if not isinstance(prompt, list) or any(type(part) is int for part in prompt):
        return [prompt]
    return prompt


def single(prompt: Any) -> tuple[Prompt | None, bool]:
    """Return the prompt and whether it carries media. It is text, ids, a mix, or an object with a text.

    Raises NotOurs for anything else.
    """
    if isinstance(prompt, dict):
        media = bool(prompt.get("multimodal_data"))
        inner = prompt.get("prompt_string")
        return (inner if isinstance(inner, str) and not media else None), media
    if isinstance(prompt, str):
        return prompt, False
    if isinstance(prompt, list) and all(type(part) in {int, str} for part in prompt):
        return prompt, False
    raise NotOurs("prompt")
