"""Requests as their clients sent them, in files that `replay` and `lint` read (docs/recording.md).

What is written are whole prompts, so it is off unless asked for. Credentials are left out: of the headers
only those go along that are known to be harmless. Nothing here holds up a request, and nothing that fails
here fails one.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import orjson

from slotkeeper.api import identity
from slotkeeper.api.secrets import Secrets, tells_secret
from slotkeeper.observe.log import Seldom, get_logger, sayable
from slotkeeper.observe.rotating import RotatingFiles, moment

PREFIX: Final = "requests"
WAITING_BYTES: Final = 64 << 20  # of requests that may wait for a slow disk; what comes then is not recorded
REQUEST_BYTES: Final = 4096  # that one weighs beside its body and headers: there are bodies without a byte
CLOSE_SECONDS: Final = 5.0  # for what is still to be written

# A list of what may be written, not of what may not: no list of credentials' names is complete.
HARMLESS: Final = frozenset({"user-agent", "content-type", "accept", *identity.HEADERS})
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
