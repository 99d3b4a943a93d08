"""Assembles a whole answer from the engine's stream, equal to the answer that the engine would have sent.

A router notices that a client disconnects only if the answer is a stream; otherwise the request runs to its
end (engine.md 13). So answers of a router's models are requested as streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

import orjson

from slotkeeper.api.answers.answer import SseEvent, SseSplitter
from slotkeeper.api.document import Doc, inserted
from slotkeeper.api.head import Api

# Streams lack the tokens and probabilities of text that the engine holds back: a character of several tokens,
# the start of a stop word. The other fields change the contents of a stream.
NOT_FROM_STREAMS: Final = frozenset(
    {
        "logprobs",
        "n_probs",
        "post_sampling_probs",
        "response_fields",
        "return_progress",
        "return_tokens",
        "stream_options",
        "timings_per_token",
        "top_logprobs",
    }
)
STREAM: Final = b',"stream":true'
USAGE: Final = b',"stream_options":{"include_usage":true}'
PROGRESS: Final = b',"return_progress":true'
CHAT_ORDER: Final = ("choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings")
SERVER_ERROR: Final = 500
_UNREADABLE: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError)


def assembles(api: Api, doc: Doc) -> bool:
    """Whether the whole answer to this request, which asks for no stream, can be assembled from one."""
    return api in _ASSEMBLIES and NOT_FROM_STREAMS.isdisjoint(doc)


def as_stream(body: bytes, api: Api, *, progress: bool) -> bytes:
    """Return the request's body with a request for a stream; the engine uses the last of equal keys."""
    more = STREAM + (USAGE if api is Api.CHAT else b"") + (PROGRESS if progress else b"")
    return inserted(body, body.rindex(b"}"), more)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that is not a stream."""

    status: int
    body: bytes


class Assembler:
    """Collects the chunks of one stream and assembles the answer."""

    def __init__(self, api: Api) -> None:
        self._splitter = SseSplitter()
        self._assembly = _ASSEMBLIES[api]()
        self._error: Any = None
        self._unreadable = False

    def feed(self, chunk: bytes) -> None:
        for event in self._splitter.feed(chunk):
            self._take(event)

    def close(self) -> WholeAnswer | None:
        """Return the answer, or the engine's error; None if the stream is incomplete or has another shape."""
        for event in self._splitter.close():
            self._take(event)
        if self._error is not None:
            code = self._error.get("code") if isinstance(self._error, dict) else None
            status = code if isinstance(code, int) and 400 <= code < 600 else SERVER_ERROR
            return WholeAnswer(status, orjson.dumps({"error": self._error}))
        try:
            whole = None if self._unreadable else self._assembly.whole()
        except _UNREADABLE:
            return None
        return None if whole is None else WholeAnswer(200, orjson.dumps(whole))

    def _take(self, event: SseEvent) -> None:
        if event.data == b"[DONE]":
            return
        try:
            doc = orjson.loads(event.data)
            if event.name == "error" or "error" in doc:
                self._error = doc.get("error") or doc
            else:
                self._assembly.event(doc)
        except _UNREADABLE:
            self._unreadable = True


class Assembly(Protocol):
    """Assembles the answer of one API. Both methods may raise the errors in `_UNREADABLE`."""

    def event(self, doc: Doc) -> None:
        """Add one event of the stream."""

    def whole(self) -> Doc | None:
        """Return the answer; None if the stream has not ended."""


class _Completion:
    """llama-server's own API: the last event has all fields, but its text is empty."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._last: Doc = {}

    def event(self, doc: Doc) -> None:
        self._text.append(doc["content"])
        if doc["stop"]:
            self._last = doc

    def whole(self) -> Doc | None:
        if not self._last:
            return None
        settings = self._last["generation_settings"] | {"stream": False}
        return self._last | {"content": "".join(self._text), "generation_settings": settings}


class _Chat:
    """OpenAI's chat API: deltas of one message, then an event that has the figures and no choice."""

    def __init__(self) -> None:
        self._message = _Message()
        self._finish: str | None = None
        self._last: Doc = {}

    def event(self, doc: Doc) -> None:
        for choice in doc["choices"]:
            self._message.add(choice["delta"])
            self._finish = choice["finish_reason"] or self._finish
        if "usage" in doc:
            self._last = doc

    def whole(self) -> Doc | None:
        if not self._last or self._finish is None:
            return None
        choice = {"finish_reason": self._finish, "index": 0, "message": self._message.whole()}
        found = self._last | {"choices": [choice], "object": "chat.completion"}
        return {name: found.pop(name) for name in CHAT_ORDER if name in found} | found


class _Message:
    """The assistant's message in the shape of OpenAI's chat API."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, Doc] = {}

    def add(self, delta: Doc) -> None:
        self._text.append(delta.get("content") or "")
        self._reasoning.append(delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if call["index"] not in self._calls:
                made = {"name": function["name"], "arguments": ""}
                self._calls[call["index"]] = {"type": call["type"], "function": made, "id": call["id"]}
            self._calls[call["index"]]["function"]["arguments"] += function.get("arguments") or ""

    def whole(self) -> Doc:
        message: Doc = {"role": "assistant", "content": "".join(self._text)}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return message


class _AnthropicMessage:
    """Anthropic's API: blocks with deltas, between the start and the end of the message."""

    def __init__(self) -> None:
        self._message: Doc = {}
        self._blocks: dict[int, Doc] = {}
        self._arguments: dict[int, list[str]] = {}
        self._ended = False

    def event(self, doc: Doc) -> None:
        match doc["type"]:
            case "message_start":
                self._message = doc["message"]
            case "content_block_start":
                self._blocks[doc["index"]] = doc["content_block"]
            case "content_block_delta":
                self._delta(doc["index"], doc["delta"])
            case "message_delta":
                self._message |= doc["delta"]
                self._message["usage"] |= doc["usage"]
            case "message_stop":
                self._ended = True

    def _delta(self, index: int, delta: Doc) -> None:
        block = self._blocks[index]
        match delta["type"]:
            case "text_delta":
                block["text"] += delta["text"]
            case "thinking_delta":
                block["thinking"] += delta["thinking"]
            case "signature_delta":
                block["signature"] = delta["signature"]
            case "input_json_delta":
                self._arguments.setdefault(index, []).append(delta["partial_json"])

    def whole(self) -> Doc | None:
        if not self._ended:
            return None
        for index, pieces in self._arguments.items():
            self._blocks[index]["input"] = _arguments("".join(pieces))
        return self._message | {"content": [self._blocks[index] for index in sorted(self._blocks)]}


def _arguments(text: str) -> Any:
    """Return a call's arguments; an empty object if they are not JSON, as the engine does."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}


class _Response:
    """OpenAI's Responses: the last event has the answer except `completed_at` and the status of reasoning."""

    def __init__(self) -> None:
        self._response: Doc | None = None

    def event(self, doc: Doc) -> None:
        if doc["type"] == "response.completed":
            self._response = doc["response"]

    def whole(self) -> Doc | None:
        if self._response is None:
            return None
        for item in self._response["output"]:
            item.setdefault("status", "completed")
        return {"completed_at": self._response["created_at"], **self._response}


_ASSEMBLIES: Final[Mapping[Api, type[Assembly]]] = MappingProxyType(
    {
        Api.COMPLETION: _Completion,
        Api.CHAT: _Chat,
        Api.MESSAGES: _AnthropicMessage,
        Api.RESPONSES: _Response,
    }
)
