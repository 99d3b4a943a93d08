"""Recorded requests: one JSON object a line with `t`, `client`, `session`, `path`, `headers` and `body`.

A recorder may write more (`method`, `kind`, the answer); what we do not know is left alone. Files may be
compressed (`.jsonl.xz`). A line that cannot be read costs that line, not the file.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slotkeeper.api.document import Doc, table, text


class TraceError(Exception):
    """A file that is no trace at all."""


class LineError(ValueError):
    """A line that is no request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One recorded request."""

    at: float  # seconds, on a clock that all traces of one recording share
    client: str
    session: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: Doc | None  # None: a request without a body
    kind: str  # the recorder's own label


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    entries: tuple[Entry, ...]
    problems: tuple[str, ...]  # "FILE:LINE: what is wrong", one for each line left out


def read(path: Path) -> Trace:
    """All of one file. Raises TraceError when the file cannot be read or holds no request."""
    entries: list[Entry] = []
    problems: list[str] = []
    try:
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip():
                continue
            try:
                entries.append(entry(line, session=_name(path)))
            except LineError as error:
                problems.append(f"{path}:{number}: {error}")
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not entries:
        raise TraceError(problems[0] if problems else f"{path}: is empty")
    return Trace(entries=tuple(entries), problems=tuple(problems))


def entry(line: bytes, *, session: str) -> Entry:
    """One line; `session` is its name if it has none itself. Raises LineError."""
    try:
        doc = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise LineError(f"not JSON: {error}") from None
    if not isinstance(doc, dict):
        raise LineError(f"an object is expected, not {type(doc).__name__}")
    path = doc.get("path")
    if not isinstance(path, str) or not path.startswith("/"):
        raise LineError("`path` is missing or does not begin with /")
    return Entry(
        at=_seconds(doc.get("t")),
        client=text(doc, "client", "?"),
        session=text(doc, "session", session),
        method=text(doc, "method", "POST").upper(),
        path=path,
        headers={name: str(value) for name, value in table(doc, "headers").items()},
        body=_body(doc.get("body")),
        kind=text(doc, "kind"),
    )


def merged(traces: Sequence[Trace]) -> list[Entry]:
    """The requests of all traces in the order in which they were sent."""
    return sorted((entry for trace in traces for entry in trace.entries), key=lambda entry: entry.at)


def _lines(path: Path) -> Iterator[bytes]:
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        yield from file


def _name(path: Path) -> str:
    return path.name.partition(".jsonl")[0]


def _seconds(value: Any) -> float:
    """Without a time a request keeps its place: sorting is stable."""
    return float(value) if isinstance(value, int | float) else 0.0


def _body(value: Any) -> Doc | None:
    """The body as an object; some recorders keep the text."""
    if isinstance(value, str) and value:
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise LineError(f"`body` is a text that is not JSON: {error}") from None
    if value in (None, ""):
        return None
    if not isinstance(value, dict):
        raise LineError(f"`body` should be an object, not {type(value).__name__}")
    return value
