"""`slotkeeper replay`: sends recorded requests again, and counts what the server computed for them.

A recording has one JSON object per line (docs/recording.md). Other fields of a recorder (`method`, `kind`,
the answer) are ignored. Files may be compressed (`.jsonl.xz`). A line that cannot be read is skipped.

Requests are sent one at a time, in the order in which they were recorded over all files: concurrent sessions
stay interleaved. They are sent as recorded, with the recorded history, so the model's new answers play no
part, and the oracle counts prompts only.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from slotkeeper.api.document import Doc, integer, table, text
from slotkeeper.api.head import Api, classify, forwardable
from slotkeeper.api.request import CAPS
from slotkeeper.bench.measure import Sample, comparison, impossible, notes, wide_console
from slotkeeper.bench.target import Shot, Target
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.values import UsageError


class TraceError(Exception):
    """A file that is not a trace."""


class LineError(ValueError):
    """A line that is not a request."""


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
    """The requests of some recordings, and the lines that could not be read."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...]  # "FILE:LINE: what is wrong", one for each skipped line


def read(path: Path) -> Trace:
    """Read one file. Raises TraceError if it cannot be read or holds no request."""
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
    """Parse one line; `session` is the name if the line has none. Raises LineError."""
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
    """Return the requests of all traces in the order in which they were sent."""
    return sorted((entry for trace in traces for entry in trace.entries), key=lambda entry: entry.at)


def _lines(path: Path) -> Iterator[bytes]:
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        yield from file


def _name(path: Path) -> str:
    return path.name.partition(".jsonl")[0]


def _seconds(value: Any) -> float:
    """Return the time, or 0.0 if there is none: sorting is stable, so the request keeps its place."""
    return float(value) if isinstance(value, int | float) else 0.0


def _body(value: Any) -> Doc | None:
    """Return the body as an object; some recorders store it as text."""
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


# -- sending requests again ------------------------------------------------------------------------------

# Keys of another server, and headers that depend on the sent bytes or the client.
NOT_SENT: Final = ("authorization", "x-api-key", "host", "content-length", "content-type", "accept-encoding")


async def replay(
    traces: Sequence[Path], *, base: str, against: str | None, max_tokens: int, engines: Sequence[str] = ()
) -> int:
    """Send, count, print. `engines`: those behind `base` whose own counters are read.

    Returns the exit code: 1 if a request failed, a line could not be read, or the figures are impossible.
    """
    console = wide_console()
    try:
        loaded = tuple(read(path) for path in traces)
    except TraceError as error:
        raise UsageError(str(error)) from None
    entries = [entry for entry in merged(loaded) if generates(entry)]
    _introduce(console, loaded, entries)
    servers = {"base": base} | ({"against": against} if against else {})
    if not await _reachable(console, servers):
        return 1
    behind = {"base": engines}
    samples = {
        name: await _sent(console, name, Target(url, behind.get(name, ())), entries, max_tokens)
        for name, url in servers.items()
    }
    console.print(comparison(samples))
    for note in notes(samples):
        console.print(note, highlight=False)
    unread = any(trace.problems for trace in loaded)
    failed = any(sample.failure for found in samples.values() for sample in found)
    return int(unread or failed or any(map(impossible, samples.values())))


def generates(entry: Entry) -> bool:
    """Whether the request generates tokens; others (lists of models, health) cost nothing."""
    return entry.body is not None and classify(entry.method, entry.path.partition("?")[0]).generates


def shot(entry: Entry, max_tokens: int) -> Shot:
    """Return the request to send for a recorded one."""
    api = classify(entry.method, entry.path.partition("?")[0])
    return Shot(
        session=f"{entry.client}/{entry.session}",
        label=entry.kind or entry.path,
        path=entry.path,
        body=capped(api, entry.body or {}, max_tokens),
        headers=dict(forwardable(entry.headers.items(), drop=NOT_SENT)),
    )


def capped(api: Api, body: Doc, max_tokens: int) -> Doc:
    """Return the body with no limit above `max_tokens`: endless replies would distort the measurement."""
    names = CAPS[api]
    lower = {name: _lower(body[name], max_tokens) for name in names if name in body}
    return {**body, **(lower or {names[0]: max_tokens})}


def _lower(value: Any, limit: int) -> int:
    """Return the lower limit; -1 and null mean "no limit" to the engine, 0 is a limit."""
    asked = integer(value)
    return limit if asked is None or asked < 0 else min(asked, limit)


async def _sent(
    console: Console, name: str, server: Target, entries: Sequence[Entry], max_tokens: int
) -> list[Sample]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    samples = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=len(entries))
        async with server as target:
            for entry in entries:
                samples.append((await target.fire(shot(entry, max_tokens))).sample)
                progress.advance(task)
    return samples


async def _reachable(console: Console, servers: Mapping[str, str]) -> bool:
    """Print which server is which; return whether all answer, before an hour is spent."""
    processes = []
    for name, url in servers.items():
        console.print(f"{name}: {url}", highlight=False)
        try:
            async with Target(url) as target:
                processes.append(await target.process())
        except EngineGoneError:
            console.print(f"[red]Nothing answers at {url}.[/red]", highlight=False)
            return False
        except EngineError as error:
            console.print(
                f"[red]{url} refuses to identify itself: {escape(str(error))}[/red]", highlight=False
            )
            return False
    if len(set(processes)) < len(processes):
        console.print(
            "[yellow]Both URLs lead to the same engine: the second finds the cache that the first has "
            "filled, so its figures say nothing. Give each its own engine.[/yellow]"
        )
    return True


def _introduce(console: Console, traces: Sequence[Trace], entries: Sequence[Entry]) -> None:
    skipped = sum(len(trace.entries) for trace in traces) - len(entries)
    aside = f" ({skipped} others generate no tokens)" if skipped else ""
    console.print(f"{len(entries)} requests in {len(traces)} files{aside}, one at a time.", highlight=False)
    for trace in traces:
        for problem in trace.problems:
            console.print(f"[yellow]{escape(problem)}; skipped[/yellow]", highlight=False)
