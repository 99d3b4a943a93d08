"""Keeps resumable streams within the namespace of the client that started them.

A request with X-Conversation-Id continues in the engine after its client has left, and its stream can be read
(GET), looked up (POST) and stopped (DELETE) under that id (docs/engine.md, section 7). The engine knows no
owner of an id: any request with the same id, on any route, ends the stream that has it. So where clients have
keys of ours or namespaces the engine gets a digest of namespace and id. Where a client could not resume its
stream anyway, or where its key has limits, which must not outlive it, the engine gets no id: it then stops
when the client leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode

import orjson

from slotkeeper.api.answers.answer import SseEvent, SseSplitter
from slotkeeper.api.head import STREAM_ID
from slotkeeper.api.request import checked

STREAM: Final = "/v1/stream"
LOOKUP: Final = "/v1/streams/lookup"
CONVERSATION: Final = "conv_id"  # in the query
IDS: Final = "conversation_ids"  # in the body of a lookup
ENDS: Final = frozenset(
    {"message_stop", "response.completed", "response.incomplete", "response.failed", "error"}
)
END_MARKS: Final = (b'"stop":true', b'"error":')  # of the engine's own API, and of errors
MODEL: Final = "::"  # what follows in an id is a router's model


def is_stream_route(path: str) -> bool:
    """Whether the route reads, looks up or stops resumable streams."""
    return unquote(path) in {STREAM, LOOKUP}


def given_ids(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of a client's X-Conversation-Id as they came; the engine ignores an empty one."""
    return tuple(value for name, value in headers.items() if name.lower() == STREAM_ID.lower() and value)


def digest(namespace: str, stream_id: str) -> str:
    """Return the id by which the engine knows a stream of this namespace."""
    own, mark, model = stream_id.partition(MODEL)
    known = f"{len(namespace)}:{namespace}{own}".encode(errors="surrogateescape")
    return blake2b(known, digest_size=16).hexdigest() + mark + model


def digests(namespace: str, given: Iterable[str]) -> tuple[str, ...]:
    return tuple(digest(namespace, each) for each in given)


def within(namespace: str, target: str) -> str:
    """Return path and query of a GET or DELETE with the id as the engine knows it, and with no second id."""
    path, _, query = target.partition("?")
    fields = parse_qsl(query, keep_blank_values=True)
    ids = [value for name, value in fields if name == CONVERSATION and value][:1]
    rest = [(name, value) for name, value in fields if name != CONVERSATION]
    named = [(CONVERSATION, each) for each in digests(namespace, ids)]
    return f"{path}?{urlencode([*named, *rest], quote_via=quote)}"


class Lookup:
    """A lookup of streams, and its answer, with the ids of one namespace."""

    def __init__(self, namespace: str, body: bytes) -> None:
        """Raises NotPlain for a body that is no JSON object."""
        asked = checked(body)
        ids = asked.get(IDS)
        given = [each for each in ids if isinstance(each, str)] if isinstance(ids, list) else []
        self._known = {digest(namespace, each): each for each in given}
        self.body = orjson.dumps({**asked, IDS: list(self._known)})

    def answer(self, body: bytes) -> bytes:
        """Return the engine's answer with the client's own ids, and without any other id."""
        try:
            found: Any = orjson.loads(body)
        except orjson.JSONDecodeError:
            return b"[]"
        rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
        return orjson.dumps([{**row, **named} for row in rows if (named := self._named(row))])

    def _named(self, row: dict[str, Any]) -> dict[str, str]:
        found = str(row.get("conversation_id"))
        own, mark, model = found.partition(MODEL)
        given = self._known.get(found) or (self._known[own] + mark + model if own in self._known else None)
        return {"conversation_id": given} if given else {}


class LastEvent:
    """The last event of a resumed stream, of whatever API."""

    def __init__(self) -> None:
        self._splitter = SseSplitter()
        self._last: SseEvent | None = None

    def read(self, chunk: bytes) -> None:
        self._last = next(reversed(self._splitter.feed(chunk)), self._last)

    @property
    def ends(self) -> bool:
        """Whether it ends the stream: after all other events the stream was broken off, or stopped."""
        last = next(reversed(self._splitter.close()), self._last)
        if last is None:
            return False
        return last.name in ENDS or last.data == b"[DONE]" or any(mark in last.data for mark in END_MARKS)
