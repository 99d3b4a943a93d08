"""Server-sent events out of bytes, cut anywhere: the same events whatever the chunks (WHATWG rules).

Lines are cut with `split`, never byte by byte, and a line in pieces is joined once: cost is linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LIMIT_BYTES: Final = 16 * 2**20  # a final native event echoes its prompt: 131072 tokens stay below 1 MiB
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event; `name` is "" where the stream gave none."""

    name: str
    data: bytes


def comment(*lines: str) -> bytes:
    """Lines that every client skips; the empty one behind them ends no event."""
    return b"".join(b": " + line.encode() + b"\n" for line in lines) + b"\n"


class SseSplitter:
    """Collects chunks and gives back the events that they complete."""

    __slots__ = ("_after_cr", "_data", "_dropping", "_first", "_limit", "_name", "_partial", "_size")

    def __init__(self, *, limit: int = LIMIT_BYTES) -> None:
        self._limit = limit
        self._partial: list[bytes] = []  # pieces of the line that is not complete
        self._data: list[bytes] = []
        self._name = ""
        self._size = 0  # bytes of the event so far, its partial line included
        self._dropping = False
        self._after_cr = False
        self._first = True

    def __repr__(self) -> str:
        state = "dropping" if self._dropping else f"{len(self._data)} data lines"
        return f"<SseSplitter {self._size} of {self._limit} bytes, {state}>"

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """The events that end within `chunk`."""
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if b"\r" in chunk:
            # A CR ends its line at once; a LF that opens the next chunk belongs to it.
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *ended, rest = chunk.split(b"\n")
        events: list[SseEvent] = []
        for piece in ended:
            self._keep(piece)
            line = b"".join(self._partial)
            self._partial = []
            self._line(line, events)
        if rest:
            self._keep(rest)
        return events

    def close(self) -> list[SseEvent]:
        """The last event, where the stream ended without its empty line."""
        events = self.feed(b"\n\n") if self._partial or self._data else []
        self._reset()
        return events

    def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._limit:
            self._dropping = True
            self._data = []
            # What is left of the line must not look like the empty line that ends an event.
            self._partial = [b":"] if piece or self._partial else []
        elif piece:
            self._partial.append(piece)

    def _line(self, line: bytes, events: list[SseEvent]) -> None:
        if self._first:
            line = line.removeprefix(_BOM)
            self._first = False
        if not line:
            if self._data and not self._dropping:
                events.append(SseEvent(self._name, b"\n".join(self._data)))
            self._reset()
            return
        field, _, value = line.partition(b":")
        if field == b"data" and not self._dropping:
            self._data.append(value.removeprefix(b" "))
        elif field == b"event":
            self._name = value.removeprefix(b" ").decode("utf-8", "replace")

    def _reset(self) -> None:
        self._partial = []
        self._data = []
        self._name = ""
        self._size = 0
        self._dropping = False
