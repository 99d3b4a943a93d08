"""Standard error, where the log goes: what it does not take is counted and dropped, and nothing waits for it.

Its reader may be gone or stuck, its disk full, it may have been closed before the start. None of that is a
reason to end, or to hold up a request.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from typing import Any, Final

from prometheus_client import Counter

SLOW_SECONDS: Final = 0.1  # for a reader that is behind; one that was once is not waited for again
DROPPED: Final = Counter(
    "slotkeeper_log_lines_dropped_total",
    "Log lines that could not be written: standard error closed or stuck, or its disk full.",
    registry=None,  # there is one standard error, however many sidecars a process has
)


class StandardError:
    """A stream for loggers: `sys.stderr` as it is when this is made. Neither `write` nor `flush` raises.

    It goes around the buffer of `sys.stderr`, which would keep what could not be written and fail with it at
    the end of the process.
    """

    def __init__(self) -> None:
        self._stream: Any = sys.stderr
        buffer = getattr(self._stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)  # with PYTHONUNBUFFERED there is no buffer between them
        self._raw = raw if isinstance(raw, io.FileIO) else None  # else a test's
        self._lock = threading.Lock()
        self._torn = False  # a part of the last line was written
        self._stuck = False

    def write(self, text: str) -> int:
        with self._lock:
            try:
                self._write(text)
            except (AttributeError, OSError, ValueError):  # there is none; it fails; it was closed
                DROPPED.inc()
        return len(text)

    def isatty(self) -> bool:
        try:
            return bool(self._stream.isatty())
        except (AttributeError, ValueError):
            return False

    def flush(self) -> None:
        """`write` did."""

    def _write(self, text: str) -> None:
        if self._raw is None:
            self._stream.write(text)
            self._stream.flush()
            return
        data = text.encode(self._stream.encoding, "backslashreplace")
        self._torn = not self._put(self._raw, b"\n" + data if self._torn else data)
        if self._torn:
            raise BlockingIOError

    def _put(self, raw: io.FileIO, data: bytes) -> bool:
        """Whether all of it was written. Raises OSError if nothing was."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._some(raw, left[: select.PIPE_BUF]) :]
            except OSError:
                if len(left) == len(data):
                    raise
                return False
        return True

    def _some(self, raw: io.FileIO, data: memoryview) -> int:
        """So much goes into a pipe without waiting, if anything does."""
        poll = select.poll()
        poll.register(raw, select.POLLOUT)
        self._stuck = not poll.poll(0 if self._stuck else SLOW_SECONDS * 1000)
        written: int | None = None if self._stuck else raw.write(data)
        if written is None:
            raise BlockingIOError
        return written


def hold_standard_streams() -> None:
    """Open the null device for those that were closed before the start: their numbers are not for sockets.

    In place of standard error it is open for reading only: what is written there fails, and is counted.
    """
    for name in ("stdin", "stdout", "stderr"):  # in the order of their numbers: the lowest free one is taken
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_WRONLY if name == "stdout" else os.O_RDONLY)
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115, PTH123
