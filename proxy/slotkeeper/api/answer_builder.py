"""An answer in the making: what every API's reading fills in, and the figures that come of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from slotkeeper.api.document import Doc, integer

REPLY_LIMIT_CHARS: Final = 64 * 2**20  # a reply beyond this is not remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The engine's own numbers (engine.md 1.3); None where it did not say.

    Tokens, and milliseconds. `computed + cached == prompt_tokens`.
    """

    prompt_tokens: int | None = None
    computed: int | None = None
    cached: int | None = None
    generated: int | None = None
    slot: int | None = None
    prefill_ms: float | None = None
    generate_ms: float | None = None
    draft: int | None = None
    draft_accepted: int | None = None


class AnswerBuilder:
    """What was read so far. Readings write here; `AnswerReader` closes it."""

    __slots__ = (
        "_cached",
        "_calls",
        "_chars",
        "_content",
        "_generated",
        "_prompt",
        "_reasoning",
        "_timings",
        "complete",
        "error",
        "opened",
        "slot",
        "spoke",
        "unread",
    )

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[Any, _Call] = {}
        self._chars = 0
        self._prompt: int | None = None
        self._cached: int | None = None
        self._generated: int | None = None
        self._timings: Doc = {}
        self.slot: int | None = None
        self.opened = False  # the assistant's message began
        self.spoke = False  # a generated token was seen
        self.complete = False
        self.error: str | None = None
        self.unread = 0  # events that could not be read

    def __repr__(self) -> str:
        state = self.error or ("complete" if self.complete else "open")
        return f"<Draft {state}, {self._chars} characters, {len(self._calls)} calls, {self.unread} unread>"

    def say(self, content: Any) -> None:
        """Append to what the assistant said."""
        self._append(self._content, content)

    def think(self, reasoning: Any) -> None:
        """Append to what the assistant thought."""
        self._append(self._reasoning, reasoning)

    def call(self, key: Any, *, name: Any = None, call_id: Any = None, arguments: Any = None) -> None:
        """Add to the tool call under `key`: its name, its id, or a further piece of its arguments."""
        self.opened = self.spoke = True
        call = self._calls.setdefault(key, _Call())
        call.name = name if isinstance(name, str) and name else call.name
        call.call_id = call_id if isinstance(call_id, str) and call_id else call.call_id
        self._append(call.arguments, arguments)

    def usage(self, *, prompt: Any = None, cached: Any = None, generated: Any = None) -> None:
        """Tokens as a `usage` object counts them; what is not an integer changes nothing."""
        self._prompt = self._prompt if integer(prompt) is None else integer(prompt)
        self._cached = self._cached if integer(cached) is None else integer(cached)
        self._generated = self._generated if integer(generated) is None else integer(generated)

    def timings(self, timings: Any) -> None:
        """The engine's `timings` object; the last one stands."""
        if isinstance(timings, dict):
            self._timings = timings

    def failed(self, doc: Any) -> bool:
        """Whether `doc` is an error, in whichever shape; its type is kept, its text is not."""
        error = doc.get("error") if isinstance(doc, dict) else None
        if not error:
            return False
        kind = (error.get("type") or error.get("code")) if isinstance(error, dict) else None
        self.error = str(kind or "error")
        return True

    def reset(self) -> None:
        """Forget the message: a better account of it follows."""
        self._content, self._reasoning, self._calls, self._chars = [], [], {}, 0

    def reply(self) -> Doc | None:
        """The message, or None where none began or it is beyond remembering."""
        if not self.opened or self._chars > REPLY_LIMIT_CHARS:
            return None
        reply: Doc = {"role": "assistant", "content": "".join(self._content)}
        if reasoning := "".join(self._reasoning):
            reply["reasoning_content"] = reasoning
        if self._calls:
            reply["tool_calls"] = [call.message() for call in self._calls.values()]
        return reply

    def figures(self) -> Figures:
        """What the engine said of tokens and time, each from where it says it best."""
        timings = self._timings
        prompt, computed, cached = self._prompt_counts()
        predicted = integer(timings.get("predicted_n"))
        return Figures(
            prompt_tokens=prompt,
            computed=computed,
            cached=cached,
            generated=predicted if self._generated is None else self._generated,
            slot=self.slot,
            prefill_ms=_number(timings.get("prompt_ms")),
            generate_ms=_number(timings.get("predicted_ms")),
            draft=integer(timings.get("draft_n")),
            draft_accepted=integer(timings.get("draft_n_accepted")),
        )

    def _prompt_counts(self) -> tuple[int | None, int | None, int | None]:
        """Tokens of the prompt, computed, and cached: two of them tell the third."""
        prompt, computed = self._prompt, integer(self._timings.get("prompt_n"))
        cached = integer(self._timings.get("cache_n"))
        cached = self._cached if cached is None else cached
        match prompt, computed, cached:
            case None, int(), int():
                prompt = computed + cached
            case int(), None, int():
                computed = prompt - cached
            case int(), int(), None:
                cached = prompt - computed
        return prompt, computed, cached

    def _append(self, pieces: list[str], piece: Any) -> None:
        if not isinstance(piece, str) or not piece:
            return
        self.opened = self.spoke = True
        self._chars += len(piece)
        if self._chars <= REPLY_LIMIT_CHARS:
            pieces.append(piece)


class _Call:
    """A tool call in pieces."""

    __slots__ = ("arguments", "call_id", "name")

    def __init__(self) -> None:
        self.name = ""
        self.call_id = ""
        self.arguments: list[str] = []

    def message(self) -> Doc:
        function = {"name": self.name, "arguments": "".join(self.arguments) or "{}"}
        return {"id": self.call_id, "type": "function", "function": function}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
