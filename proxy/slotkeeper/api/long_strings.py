"""Parses and changes a body that is heavy by its images, without stopping the event loop.

The JSON parser keeps the interpreter's lock. So long runs of base64 are cut out of the body, the rest is
parsed, and each string is then put together again, in steps between which other threads run. The lock is
also kept while bytes are counted or copied, and new memory is slow: 64 MB take 40 to 300 ms (measured).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from io import BytesIO
from typing import Any, Final

import orjson

LONG_BYTES: Final = 1 << 20  # a shorter string is parsed with the rest
PIECE_BYTES: Final = 1 << 20  # examined at once
BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
BLANKS: Final = b" \t\r\n"

Span = tuple[int, int]  # where a run begins and ends


def loads(body: bytes) -> Any:
    """Return what `orjson.loads` returns. Raises orjson.JSONDecodeError."""
    spans = [*_long_runs(body)]
    if not spans:
        return orjson.loads(body)
    mark, kept, at = secrets.token_hex(16), [], 0
    for number, (start, end) in enumerate(spans):
        kept += [body[at:start], b"%s.%d." % (mark.encode(), number)]
        at = end
    doc = orjson.loads(b"".join([*kept, body[at:]]))
    _put_back(doc, mark, body, spans)
    return doc


def count_of(body: bytes, *marks: bytes) -> int:
    """Return how often these single bytes occur in the body."""
    pieces = range(0, len(body), PIECE_BYTES)
    return sum(body.count(mark, at, at + PIECE_BYTES) for mark in marks for at in pieces)


def inserted(body: bytes, at: int, added: bytes) -> bytes:
    """Return `body` with `added` before its byte `at`."""
    whole, old = BytesIO(), memoryview(body)
    for part in (old[:at], memoryview(added), old[at:]):
        for start in range(0, len(part), PIECE_BYTES):
            whole.write(part[start : start + PIECE_BYTES])
    return whole.getvalue()


def _long_runs(body: bytes) -> Iterator[Span]:
    """Yield the long runs of base64 that end a string which is a value, in order."""
    at = 0
    while at + PIECE_BYTES <= len(body):
        if not _is_base64(body, at, at + PIECE_BYTES):
            at += PIECE_BYTES
            continue
        if (end := body.find(b'"', at)) < 0:
            return
        start = _start(body, at)
        plain = start > 0 and body[start - 1 : start] != b"\\"  # its first letter is not that of an escape
        if plain and end - start >= LONG_BYTES:
            is_key = body[end + 1 : end + PIECE_BYTES].lstrip(BLANKS).startswith(b":")
            if not is_key and _is_base64(body, start, end):
                yield start, end
        at = end + 1


def _is_base64(body: bytes, start: int, end: int) -> bool:
    pieces = range(start, end, PIECE_BYTES)
    return not any(body[at : min(at + PIECE_BYTES, end)].translate(None, BASE64) for at in pieces)


def _start(body: bytes, at: int) -> int:
    """Return where the run begins that goes on at `at`."""
    while at > 0:
        before = max(0, at - PIECE_BYTES)
        if rest := body[before:at].translate(None, BASE64):
            return before + body[before:at].rindex(rest[-1:]) + 1
        at = before
    return 0


def _put_back(doc: Any, mark: str, body: bytes, spans: list[Span]) -> None:
    """Put the runs back into the strings that have their marks, wherever these are."""
    inner = [doc]
    while inner:
        outer = inner.pop()
        for key, value in outer.items() if isinstance(outer, dict) else enumerate(outer):
            if isinstance(value, str) and mark in value:
                before, _, rest = value.partition(mark)
                start, end = spans[int(rest.split(".")[1])]
                outer[key] = before + str(memoryview(body)[start:end], "ascii")
            elif isinstance(value, dict | list):
                inner.append(value)


def longest_string(doc: Any) -> int:
    """Return the characters of the longest string in a document, keys included."""
    longest, inner = 0, [doc]
    while inner:
        outer = inner.pop()
        if isinstance(outer, str):
            longest = max(longest, len(outer))
        elif isinstance(outer, dict):
            inner += [*outer, *outer.values()]
        elif isinstance(outer, list):
            inner += outer
    return longest
