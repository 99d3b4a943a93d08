"""Requests laid out one after the other: a message that stood there before is the very same object.

A client sends its whole history each time. What is equal to the last request's is not laid out again, and
comparing the two is immediate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from slotkeeper.api.document import Doc
from slotkeeper.api.routes import Api
from slotkeeper.conversation.requests.layout import Layout, Message, Path

RECENT: Final = 16  # requests of all clients; several sessions of one agent are told apart
LIMIT: Final = 32 << 20  # bytes of their bodies
_LISTS: Final = {Api.CHAT: "messages", Api.MESSAGES: "messages", Api.RESPONSES: "input"}


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A client's own list of messages, and what was made of each."""

    raw: Sequence[Any]
    messages: Sequence[Message]
    strict: bool  # arguments are objects in them, and to Python 1, 1.0 and true are equal

    def start(self, given: Sequence[Any]) -> int:
        """How many messages are the same, from the first on."""
        for at, (one, other) in enumerate(zip(self.raw, given, strict=False)):
            if one is not other and (one != other or (self.strict and _written(one) != _written(other))):
                return at
        return min(len(self.raw), len(given))


def seen(api: Api, doc: Doc, layout: Layout) -> SeenRequest | None:
    """What the next request may have in common with this one; None where nothing is worth keeping."""
    raw = doc.get(_LISTS.get(api, ""))
    if not isinstance(raw, list) or any(message.media for message in layout.messages):
        return None
    return SeenRequest(raw, layout.messages[len(layout.messages) - len(raw) :], strict=api is Api.MESSAGES)


def listed(
    given: Sequence[Doc], key: str, make: Callable[[Doc, Path], Message], before: SeenRequest | None
) -> tuple[Message, ...]:
    """The messages of a client's list under `key`. What `make` raises comes through."""
    start = before.start(given) if before else 0
    rest = (make(given[n], (key, n)) for n in range(start, len(given)))
    return (*(before.messages[:start] if before else ()), *rest)


class RecentRequests:
    """The last requests of all clients."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._kept: deque[tuple[Api, str, SeenRequest, int]] = deque()
        self._limit = limit
        self._size = 0

    def __repr__(self) -> str:
        return f"<Recent {len(self._kept)} requests>"

    def of(self, api: Api, client: str) -> list[SeenRequest]:
        """Those of one client, the latest first."""
        return [kept for of, who, kept, _ in reversed(self._kept) if of is api and who == client]

    def add(self, api: Api, client: str, doc: Doc, layout: Layout, size: int) -> SeenRequest | None:
        """Remember it, unless its body of `size` bytes is too large; what there is to remember."""
        kept = seen(api, doc, layout)
        if kept is None or size > self._limit:
            return kept
        self._kept.append((api, client, kept, size))
        self._size += size
        while self._size > self._limit or len(self._kept) > RECENT:
            self._size -= self._kept.popleft()[-1]
        return kept


def most_like(recent: Iterable[SeenRequest], api: Api, doc: Doc) -> SeenRequest | None:
    """The one that has most in common with `doc`."""
    given = doc.get(_LISTS.get(api, ""))
    return max(recent, key=lambda kept: kept.start(given), default=None) if isinstance(given, list) else None


def _written(value: Any) -> bytes:
    return orjson.dumps(value)
