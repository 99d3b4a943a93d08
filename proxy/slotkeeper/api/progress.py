"""Progress of the prefill: asked for on the way in, taken out again on the way back.

The engine notices that a client has left only when it writes to it, and during a prefill it writes
nothing (engine.md T10): a prompt of 60,000 tokens is computed to its end in vain, and its slot is
busy for minutes. With `return_progress` it writes an event after each batch. The client did not ask
for these events and does not see them; everything else passes as it came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from slotkeeper.api.request import Ask
from slotkeeper.api.routes import Api

# Not Responses: there the events replace one that the client expects. Not Messages: it drops the field.
ROUTES: Final = frozenset({Api.CHAT, Api.COMPLETIONS, Api.COMPLETION})
FIELD: Final = b'"return_progress"'
MARK: Final = b'"prompt_progress":{'  # in text it would stand escaped: \"prompt_progress\"
END: Final = b"\n\n"
LONGEST: Final = 16 * 1024  # bytes of an event that may be one of progress: they have a few hundred


def can_ask(ask: Ask) -> bool:
    """Whether progress can be had without the client's notice."""
    return ask.stream and ask.api in ROUTES and ask.claim.copies == 1 and not ask.progress


def ask_for(body: bytes) -> bytes:
    """The same bytes with the field spliced in after the first brace. The object is not empty."""
    start = body.index(b"{") + 1
    return body[:start] + FIELD + b":true," + body[start:]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prefill is, in tokens of the prompt."""

    total: int
    reused: int  # that the slot had before it began
    processed: int  # the reused ones among them
    seconds: float  # since it began


class ProgressFilter:
    """Takes the progress events out of one stream. They all come before the first of the others."""

    __slots__ = ("_held", "_over", "latest")

    def __init__(self) -> None:
        self._held = b""
        self._over = False
        self.latest: Progress | None = None

    def feed(self, chunk: bytes) -> bytes:
        """What of the bytes so far may go on. One event at most is held back, up to its end."""
        if self._over:
            return chunk
        self._held += chunk
        out = []
        while not self._over:
            event, end, rest = self._held.partition(END)
            if not end:
                self._over = len(self._held) > LONGEST
                break
            self._held = rest
            if MARK in event:
                self.latest = read(event) or self.latest
            else:
                out.append(event + end)
                self._over = not event.startswith(b":")  # a ping says nothing of where we are
        if self._over:
            out.append(self._held)
            self._held = b""
        return b"".join(out)

    def close(self) -> bytes:
        """The rest of a stream that ended within its first event."""
        held, self._held = self._held, b""
        return held


def read(event: bytes) -> Progress | None:
    """What a progress event says; None where it is not as we know it."""
    try:
        told: Any = orjson.loads(event[event.index(b"{") :])["prompt_progress"]
        total, reused, processed = (int(told[name]) for name in ("total", "cache", "processed"))
        return Progress(total, reused, processed, float(told.get("time_ms", 0)) / 1000)
    except (ValueError, KeyError, TypeError):
        return None
