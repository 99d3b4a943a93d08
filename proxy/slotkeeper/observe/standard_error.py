"""Standard error as a stream for the log: lines that cannot be written are counted and dropped.

The reader may be gone or stuck, the disk full, or the stream closed before the start. None of these may end
the process or delay a request. Commands that only ask a sidecar use it without the log, so they start sooner.
"""

from __future__ import annotations

import io
import sys
import threading
from typing import Any, Final

from prometheus_client import Counter

from slotkeeper import system

SLOW_SECONDS: Final = 0.1  # wait for a slow reader; while it stays stuck, later lines do not wait
DROPPED: Final = Counter(
    "slotkeeper_log_lines_dropped_total",
    "Log lines that could not be written: standard error closed or stuck, or its disk full.",
    registry=None,  # a process has one standard error, even with several sidecars
)


class StandardError:
    """A stream for loggers that writes to `sys.stderr` as it is now. Neither `write` nor `flush` raises.

    It bypasses the buffer of `sys.stderr`, which would keep text that could not be written, and fail on it at
    the end of the process.
    """

    def __init__(self) -> None:
        self._stream: Any = sys.stderr
        buffer = getattr(self._stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)  # with PYTHONUNBUFFERED there is no buffer between them
        self._raw = raw if isinstance(raw, io.FileIO) else None  # None for a test's stream
        self._lock = threading.Lock()
        self._torn = False  # whether the last line was written only in part
        self._stuck = False  # whether the reader was too slow at the last write

    def write(self, text: str) -> int:
        with self._lock:
            try:
                self._write(text)
            except (AttributeError, OSError, ValueError):  # no stream; a failed write; a closed stream
                DROPPED.inc()
        return len(text)

    def isatty(self) -> bool:
        try:
            return bool(self._stream.isatty())
        except (AttributeError, ValueError):
            return False

    def flush(self) -> None:
        """Do nothing: `write` does not buffer."""

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
        """Write the data; return whether all of it was written. Raises OSError if nothing was."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._some(raw, left[: system.PIPE_BYTES]) :]
            except OSError:
                if len(left) == len(data):
                    raise
                return False
        return True

    def _some(self, raw: io.FileIO, data: memoryview) -> int:
        """Write at most PIPE_BYTES, which a ready pipe takes at once; return the count.

        Raises BlockingIOError if the reader is stuck.
        """
        self._stuck = not system.takes_text(raw, 0 if self._stuck else SLOW_SECONDS)
        written: int | None = None if self._stuck else raw.write(data)
        if written is None:
            raise BlockingIOError
        return written


def complain(command: str, what: object) -> None:
    StandardError().write(f"slotkeeper {command}: {what}\n")
