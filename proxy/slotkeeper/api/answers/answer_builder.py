"""Collects the parts of one answer while it is read: each API's reading writes here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from slotkeeper.api.document import Doc, integer

REPLY_LIMIT_CHARS: Final = 64 * 2**20  # a reply beyond this is not remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The engine's own figures (engine.md 1.3); None for a figure that it did not give.

    Tokens, except `slot`, a slot's number, and the `_ms` fields, which are milliseconds. If the engine gives
    two of `prompt_tokens`, `computed` and `cached`, the third follows: `computed + cached == prompt_tokens`.
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


@dataclass(slots=True, eq=False)
class AnswerBuilder:
    """The parts of an answer that were read so far. `AnswerReader` makes the `Answer` from them."""

    slot: int | None = None
    opened: bool = False  # the assistant's message has begun
    spoke: bool = False  # a generated token has come
    complete: bool = False
    error: str | None = None
    unread: int = 0  # events, or whole bodies, that could not be read
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: dict[Any, _Call] = field(default_factory=dict)
    _chars: int = 0
    _prompt: int | None = None
    _cached: int | None = None
    _generated: int | None = None
    _timings: Doc = field(default_factory=dict)

    def __repr__(self) -> str:
        state = self.error or ("complete" if self.complete else "open")
        size = f"{self._chars} characters, {len(self._calls)} calls, {self.unread} unread"
        return f"<AnswerBuilder {state}, {size}>"

    def say(self, content: Any) -> None:
        """Append to the content of the assistant's message."""
        self._append(self._content, content)

    def think(self, reasoning: Any) -> None:
        """Append to the reasoning of the assistant's message."""
        self._append(self._reasoning, reasoning)

    def call(self, key: Any, *, name: Any = None, call_id: Any = None, arguments: Any = None) -> None:
        """Add to the tool call with this `key`: its name, its id, or the next piece of its arguments."""
        self.opened = self.spoke = True
        call = self._calls.setdefault(key, _Call())
        call.name = name if isinstance(name, str) and name else call.name
        call.call_id = call_id if isinstance(call_id, str) and call_id else call.call_id
        self._append(call.arguments, arguments)

    def usage(self, *, prompt: Any = None, cached: Any = None, generated: Any = None) -> None:
        """Store the token counts of a `usage` object; a value that is not an integer changes nothing."""
        self._prompt = self._prompt if integer(prompt) is None else integer(prompt)
        self._cached = self._cached if integer(cached) is None else integer(cached)
        self._generated = self._generated if integer(generated) is None else integer(generated)

    def timings(self, timings: Any) -> None:
        """Store the engine's `timings` object; the last one counts."""
        if isinstance(timings, dict):
            self._timings = timings

    def failed(self, doc: Any) -> bool:
        """Whether `doc` is an error, in the shape of any API. Stores its type, not its text."""
        error = doc.get("error") if isinstance(doc, dict) else None
        if not error:
            return False
        kind = (error.get("type") or error.get("code")) if isinstance(error, dict) else None
        self.error = str(kind or "error")
        return True

    def reset(self) -> None:
        """Drop the message, because a complete version of it follows."""
        self._content, self._reasoning, self._calls, self._chars = [], [], {}, 0

    def reply(self) -> Doc | None:
        """Return the message; None if none began or it is longer than REPLY_LIMIT_CHARS."""
        if not self.opened or self._chars > REPLY_LIMIT_CHARS:
            return None
        reply: Doc = {"role": "assistant", "content": "".join(self._content)}
        if reasoning := "".join(self._reasoning):
            reply["reasoning_content"] = reasoning
        if self._calls:
            reply["tool_calls"] = [call.message() for call in self._calls.values()]
        return reply

    def figures(self) -> Figures:
        """Return the engine's figures, each from the most reliable object that has it."""
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
        """Return tokens of the prompt, computed, and cached; any two of them give the third."""
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


@dataclass(slots=True, eq=False)
class _Call:
    """A tool call whose pieces are still coming."""

    name: str = ""
    call_id: str = ""
    arguments: list[str] = field(default_factory=list)

    def message(self) -> Doc:
        function = {"name": self.name, "arguments": "".join(self.arguments) or "{}"}
        return {"id": self.call_id, "type": "function", "function": function}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
