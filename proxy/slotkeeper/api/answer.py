"""What an answer said: the engine's own figures and the assistant's message, read from the passing bytes.

Nothing here raises: whatever cannot be read is left out, and the bytes go to the client all the same.
One reading per API stands beside this file; this one feeds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from slotkeeper.api.answer_builder import AnswerBuilder, Figures
from slotkeeper.api.anthropic import AnthropicReading
from slotkeeper.api.document import Doc
from slotkeeper.api.llama import LlamaReading
from slotkeeper.api.openai import OpenAiReading
from slotkeeper.api.responses import ResponsesReading
from slotkeeper.api.routes import Api
from slotkeeper.api.sse import SseEvent, SseSplitter

__all__ = ["Answer", "AnswerReader", "Figures"]

BODY_LIMIT_BYTES: Final = 64 * 2**20  # a native answer echoes its prompt, with token probabilities far more
_UNREADABLE: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, as far as it could be read."""

    figures: Figures
    reply: Doc | None  # the assistant's message as the client will send it back, in OpenAI's chat shape
    complete: bool  # it ended as this API ends
    error: str | None  # the type of an error that it carried, never its text


class AnswerReading(Protocol):
    """How one API writes its answers."""

    def event(self, name: str, data: bytes) -> None:
        """Take in one event of a stream."""

    def body(self, doc: Any) -> None:
        """Take in a whole answer."""


class AnswerReader:
    """Fed with the bytes of one answer, uncompressed, in any cuts."""

    __slots__ = ("_body", "_body_bytes", "_draft", "_reading", "_splitter", "_status", "events")

    def __init__(self, api: Api, *, stream: bool, status: int = 200) -> None:
        self._draft = AnswerBuilder()
        self._reading = _reading(api, self._draft)
        # An error is plain JSON even where a stream was asked for (engine.md 7).
        self._splitter = SseSplitter() if stream and status < 400 else None
        self._status = status
        self._body: list[bytes] = []
        self._body_bytes = 0
        self.events = 0  # of a stream

    def __repr__(self) -> str:
        form = "stream" if self._splitter else f"body of {self._body_bytes} bytes"
        return f"<AnswerReader {self._reading.__class__.__name__} {form}, {self._draft!r}>"

    def feed(self, chunk: bytes) -> None:
        """Take in the next bytes."""
        if self._splitter is not None:
            for event in self._splitter.feed(chunk):
                self._event(event)
            return
        self._body_bytes += len(chunk)
        if self._body_bytes > BODY_LIMIT_BYTES:
            self._body = []
        elif chunk:
            self._body.append(chunk)
            self._draft.spoke = self._draft.spoke or self._status < 400

    def first_token(self) -> bool:
        """Whether generated content was seen: not the role alone, not pings, not prompt progress."""
        return self._draft.spoke

    def close(self) -> Answer:
        """What was read."""
        if self._splitter is not None:
            for event in self._splitter.close():
                self._event(event)
        elif self._body:
            self._whole(b"".join(self._body))
            self._body = []
        draft = self._draft
        if self._status >= 400 and draft.error is None:
            draft.error = str(self._status)
        return Answer(
            figures=draft.figures(),
            reply=draft.reply() if draft.error is None else None,
            complete=draft.complete,
            error=draft.error,
        )

    def _event(self, event: SseEvent) -> None:
        self.events += 1
        try:
            self._reading.event(event.name, event.data)
        except _UNREADABLE:
            self._draft.unread += 1

    def _whole(self, body: bytes) -> None:
        try:
            doc = orjson.loads(body)
            self._draft.complete = True
            if not self._draft.failed(doc):
                self._reading.body(doc)
        except _UNREADABLE:
            self._draft.unread += 1


def _reading(api: Api, draft: AnswerBuilder) -> AnswerReading:
    match api:
        case Api.MESSAGES:
            return AnthropicReading(draft)
        case Api.RESPONSES:
            return ResponsesReading(draft)
        case Api.COMPLETION | Api.INFILL:
            return LlamaReading(draft)
        case _:
            return OpenAiReading(draft)
