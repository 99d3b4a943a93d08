"""Records clients' requests in files that `replay` and `lint` read (docs/recording.md).

The files hold whole prompts, so recording is off by default. Credentials are left out: only headers that are
known to be harmless are written. Recording delays no request, and its errors fail no request. One thread
writes. Files have mode 0600, and their names sort by time. Each file has one writer, so a crash can damage
only a last line. The oldest files are deleted first.
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

from slotkeeper import system
from slotkeeper.api.document import SESSION_HEADERS
from slotkeeper.api.errors import ClientFault
from slotkeeper.api.head import Secrets, tells_secret
from slotkeeper.api.request import NotPlain, checked
from slotkeeper.observe.log import Seldom, get_logger, sayable

PARTS: Final = 16  # files that a budget is divided into; one such part is deleted at a time
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND


class RotatingFiles:
    """Appends lines to files `PREFIX-TIME.jsonl` in one folder, within a budget of bytes.

    It makes the folder, with mode 0700, if it is missing.
    """

    def __init__(self, folder: Path, prefix: str, budget_bytes: int) -> None:
        self._folder = folder
        self._prefix = prefix
        self._budget = budget_bytes
        self._part = budget_bytes // PARTS
        self._file: int | None = None
        self._size = 0  # bytes of that file

    def __repr__(self) -> str:
        return f"<RotatingFiles {self._folder}/{self._prefix}-*, {self._budget} bytes>"

    def append(self, line: bytes) -> None:
        """Write a line completely or not at all. Raises OSError: EFBIG for a line above the budget."""
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
        if written < len(line):  # the disk became full during the write
            os.ftruncate(file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self, size: int) -> int:
        """Open a new file after making room for it: the size of a part, or `size` if that is more."""
        self.close()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room(max(size, self._part))
        self._file = system.open_plain(
            self._folder / f"{self._prefix}-{moment(time.time_ns())}.jsonl", _CREATE
        )
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
    """Return a time since the epoch as text that sorts by time: 20261121T084035-123456789."""
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(seconds))}-{rest:09}"


# -- recording -------------------------------------------------------------------------------------------

PREFIX: Final = "requests"
WAITING_BYTES: Final = 64 << 20  # requests that wait for a slow disk; beyond this they are not recorded
REQUEST_BYTES: Final = 4096  # memory of one request beside body and headers, so that empty bodies count too
CLOSE_SECONDS: Final = 5.0  # for writing the last requests when we close

# A list of allowed headers, not of forbidden ones: no list of credentials' names is complete.
HARMLESS: Final = frozenset({"user-agent", "content-type", "accept", *SESSION_HEADERS})
FAMILIES: Final = ("anthropic-", "openai-", "x-stainless-", "x-session-")
_PRODUCT: Final = re.compile(r"[\w.+-]+")
_BOM: Final = b"\xef\xbb\xbf"

log = get_logger(__name__)


class TooSlowError(Exception):
    """The disk does not keep up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One request that waits to be written."""

    at: float
    path: str
    headers: Mapping[str, str]
    body: bytes
    client: str
    session: str | int | None
    parsed: bool  # the body is known to be a JSON object

    @property
    def weight(self) -> int:
        """Approximate bytes of memory."""
        headers = sum(len(name) + len(value) for name, value in self.headers.items())
        return REQUEST_BYTES + headers + len(self.body)


class Recorder:
    """Records requests in a separate thread. Calls `failed`, in any thread, for each that is not written."""

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
        parsed: bool = False,
    ) -> None:
        """Queue a request for writing; returns at once and never raises.

        Args:
            path: path and query; the query is not written.
            headers: all headers; only harmless ones are written.
            body: the bytes as received; left out if they are no JSON object, or one with more values or
                nesting than a request may have.
            client: the client's name if there is no User-Agent.
            session: the conversation: the client's name for it, or our number; None without one.
            at: seconds since the epoch.
            parsed: the body is known to be such an object; else it is parsed in the recorder's thread.
        """
        request = RecordedRequest(
            at=at, path=path, headers=headers, body=body, client=client, session=session, parsed=parsed
        )
        with self._lock:
            fits = self._waiting < WAITING_BYTES  # a single body may be larger than the limit
            self._waiting += request.weight if fits else 0
        if fits:
            self._queue.put(request)
        else:
            self._lost(TooSlowError(f"{WAITING_BYTES} bytes wait to be written"))

    async def close(self) -> None:
        """Write the queued requests, for at most CLOSE_SECONDS."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def _work(self) -> None:
        while (request := self._queue.get()) is not None:
            try:
                self._files.append(line(request, self._run))
            except Exception as error:  # noqa: BLE001 - no error here may affect a request
                self._lost(error)
            with self._lock:
                self._waiting -= request.weight
        self._files.close()

    def _lost(self, error: Exception) -> None:
        self._failed(error)
        self._seldom.warning("not_recorded", error=sayable(error))


def line(request: RecordedRequest, run: str) -> bytes:
    """Return a request as one JSON line. `run` makes our session numbers unique across runs."""
    path, _, query = request.path.partition("?")
    secrets = Secrets.of(request.headers, query)
    headers, session = dict(harmless(request.headers, secrets)), request.session
    if isinstance(session, str) and secrets.stand_in(session):
        session = ""
    doc: dict[str, Any] = {
        "t": round(request.at, 6),
        "client": product(headers.get("user-agent", "")) or request.client,
        "session": f"{run}-{session}" if isinstance(session, int) else _clean(session or ""),
        "path": _clean(secrets.hidden(path)),
        "headers": headers,
    }
    if request.parsed or _is_object(request.body):
        body = secrets.masked(request.body.removeprefix(_BOM).strip())
        # Make it one line: in JSON, line ends occur only between values.
        doc["body"] = orjson.Fragment(body.replace(b"\n", b" ").replace(b"\r", b" "))
    return orjson.dumps(doc, option=orjson.OPT_APPEND_NEWLINE)


def _is_object(body: bytes) -> bool:
    """Whether a body is a JSON object that a request may have. A refused request may have any body."""
    try:
        checked(body)
    except (NotPlain, ClientFault):
        return False
    return True


def harmless(headers: Mapping[str, str], secrets: Secrets) -> Iterator[tuple[str, str]]:
    """Yield the headers that may be written, without values that contain one of the request's secrets.

    Some clients send their key as the session's name too.
    """
    for name, value in ((name.lower(), value) for name, value in headers.items()):
        known = name in HARMLESS or (name.startswith(FAMILIES) and not tells_secret(name))
        if known and not secrets.stand_in(value):
            yield name, _clean(value)


def product(user_agent: str) -> str:
    """Return the first program in a User-Agent, without its version."""
    found = _PRODUCT.match(user_agent)
    return found[0] if found else ""


def _clean(text: str) -> str:
    """Replace lone surrogates, which stand for header bytes that are no UTF-8: JSON cannot hold them."""
    return text.encode(errors="replace").decode()
