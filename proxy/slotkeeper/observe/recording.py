"""Requests as their clients sent them, in files that `replay` and `lint` read (docs/recording.md).

What is written are whole prompts, so it is off unless asked for. Credentials are left out: of the headers
only those go along that are known to be harmless. Nothing here holds up a request, and nothing that fails
here fails one.

Writing blocks, and is for one thread. The files are of mode 0600, their names sort by time, and a file is
never written to by two processes: what a crash tore is the last line of its file. The oldest files go
first.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import orjson

from slotkeeper.api.document import SESSION_HEADERS
from slotkeeper.api.head import Secrets, tells_secret
from slotkeeper.observe.log import Seldom, get_logger, sayable

PARTS: Final = 16  # files that a budget is for: so much of a recording goes at once
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class RotatingFiles:
    """`PREFIX-TIME.jsonl` in one folder, which is made, of mode 0700, if it is not there."""

    def __init__(self, folder: Path, prefix: str, budget_bytes: int) -> None:
        self._folder = folder
        self._prefix = prefix
        self._budget = budget_bytes
        self._part = budget_bytes // PARTS
        self._file: int | None = None
        self._size = 0  # of that file

    def __repr__(self) -> str:
        return f"<RotatingFiles {self._folder}/{self._prefix}-*, {self._budget} bytes>"

    def append(self, line: bytes) -> None:
        """Write a line, whole or not at all. Raises OSError: EFBIG for one above the budget."""
        if len(line) > self._budget:
            raise OSError(errno.EFBIG, f"{len(line)} bytes are more than the budget of {self._budget}")
        file = self._file
        if file is None or self._size + len(line) > self._part or not os.fstat(file).st_nlink:
            file = self._begin(len(line))
        try:
            written = os.write(file, line)
        except OSError:
            os.ftruncate(file, self._size)
            raise
        if written < len(line):  # a disk that has just become full takes a part
            os.ftruncate(file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self, size: int) -> int:
        """A new file, for which there is room: as much as a file may have, or `size` if that is more."""
        self.close()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room(max(size, self._part))
        self._file = os.open(self._folder / f"{self._prefix}-{moment(time.time_ns())}.jsonl", _CREATE, 0o600)
        self._size = 0
        return self._file

    def _make_room(self, size: int) -> None:
        there = dict(self._sizes())
        total = sum(there.values())
        for path in sorted(there):
            if total + size <= self._budget:
                return
            path.unlink(missing_ok=True)
            total -= there[path]

    def _sizes(self) -> Iterator[tuple[Path, int]]:
        for path in self._folder.glob(f"{self._prefix}-*.jsonl"):
            with suppress(FileNotFoundError):
                yield path, path.lstat().st_size


def moment(nanoseconds: int) -> str:
    """A time since the epoch as a part of a name that sorts: 20261121T084035-123456789."""
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(seconds))}-{rest:09}"


# -- recording -------------------------------------------------------------------------------------------

PREFIX: Final = "requests"
WAITING_BYTES: Final = 64 << 20  # of requests that may wait for a slow disk; what comes then is not recorded
REQUEST_BYTES: Final = 4096  # that one weighs beside its body and headers: there are bodies without a byte
CLOSE_SECONDS: Final = 5.0  # for what is still to be written

# A list of what may be written, not of what may not: no list of credentials' names is complete.
HARMLESS: Final = frozenset({"user-agent", "content-type", "accept", *SESSION_HEADERS})
FAMILIES: Final = ("anthropic-", "openai-", "x-stainless-", "x-session-")
_PRODUCT: Final = re.compile(r"[\w.+-]+")
_BOM: Final = b"\xef\xbb\xbf"

log = get_logger(__name__)


class TooSlowError(Exception):
    """The disk does not keep up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One request on its way to the disk."""

    at: float
    path: str
    headers: Mapping[str, str]
    body: bytes
    client: str
    session: str | int | None

    @property
    def weight(self) -> int:
        """Bytes of memory, about."""
        headers = sum(len(name) + len(value) for name, value in self.headers.items())
        return REQUEST_BYTES + headers + len(self.body)


class Recorder:
    """Writes in a thread of its own. `failed` is told of every request that is not written, in any thread."""

    def __init__(self, folder: Path, budget_bytes: int, failed: Callable[[BaseException], None]) -> None:
        self._files = RotatingFiles(folder, PREFIX, budget_bytes)
        self._failed = failed
        self._seldom = Seldom(log)
        self._run = moment(time.time_ns())
        self._queue: SimpleQueue[RecordedRequest | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0  # bytes
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Recorder {self._files!r}, {self._waiting} bytes wait>"

    def write(
        self,
        *,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        client: str,
        session: str | int | None,
        at: float,
    ) -> None:
        """Have a request written; returns at once and never raises.

        Args:
            path: with its query, which is not written.
            headers: all of them; what is not harmless is left out.
            body: as it came. One that is no JSON object is left out.
            client: who it is if its User-Agent does not say.
            session: its conversation, as the client calls it or by a number of ours; None: of none.
            at: seconds since the epoch.
        """
        heard = RecordedRequest(at=at, path=path, headers=headers, body=body, client=client, session=session)
        with self._lock:
            fits = self._waiting < WAITING_BYTES  # one body may be larger than that
            self._waiting += heard.weight if fits else 0
        if fits:
            self._queue.put(heard)
        else:
            self._lost(TooSlowError(f"{WAITING_BYTES} bytes wait to be written"))

    async def close(self) -> None:
        """Write what waits, for as long as CLOSE_SECONDS."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def _work(self) -> None:
        while (heard := self._queue.get()) is not None:
            try:
                self._files.append(line(heard, self._run))
            except Exception as error:  # noqa: BLE001 - whatever it is, the request itself is well
                self._lost(error)
            with self._lock:
                self._waiting -= heard.weight
        self._files.close()

    def _lost(self, error: Exception) -> None:
        self._failed(error)
        self._seldom.warning("not_recorded", error=sayable(error))


def line(heard: RecordedRequest, run: str) -> bytes:
    """A request as one line. `run` tells our numbers of this run from those of another."""
    path, _, query = heard.path.partition("?")
    secrets = Secrets.of(heard.headers, query)
    headers, session = dict(harmless(heard.headers, secrets)), heard.session
    if isinstance(session, str) and secrets.stand_in(session):
        session = ""
    doc: dict[str, Any] = {
        "t": round(heard.at, 6),
        "client": product(headers.get("user-agent", "")) or heard.client,
        "session": f"{run}-{session}" if isinstance(session, int) else _clean(session or ""),
        "path": _clean(path),
        "headers": headers,
    }
    body = secrets.masked(heard.body.removeprefix(_BOM).strip())
    if body.startswith(b"{") and body.endswith(b"}"):
        # One line: in JSON such bytes stand between values only.
        doc["body"] = orjson.Fragment(body.replace(b"\n", b" ").replace(b"\r", b" "))
    return orjson.dumps(doc, option=orjson.OPT_APPEND_NEWLINE)


def harmless(headers: Mapping[str, str], secrets: Secrets) -> Iterator[tuple[str, str]]:
    """Those that may be written: some clients send their key as the name of a session, too."""
    for name, value in ((name.lower(), value) for name, value in headers.items()):
        known = name in HARMLESS or (name.startswith(FAMILIES) and not tells_secret(name))
        if known and not secrets.stand_in(value):
            yield name, _clean(value)


def product(user_agent: str) -> str:
    """The program that a User-Agent names first, without its version."""
    found = _PRODUCT.match(user_agent)
    return found[0] if found else ""


def _clean(text: str) -> str:
    """Header bytes that are no UTF-8 come as lone surrogates, which no JSON may hold."""
    return text.encode(errors="replace").decode()
