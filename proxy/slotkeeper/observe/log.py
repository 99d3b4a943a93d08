"""Log lines: JSON for machines, colours for people. They never contain text of a prompt.

They go to standard error. Its reader may be gone or stuck, the disk full, or the stream closed before the
start. None of these may end the process or delay a request.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final, TextIO

import orjson
import structlog
from prometheus_client import Counter
from structlog.dev import ConsoleRenderer
from structlog.processors import ExceptionRenderer, JSONRenderer
from structlog.typing import ExcInfo, Processor

from slotkeeper.engine.answers import EngineError, EngineGoneError

SELDOM_SECONDS: Final = 60.0
# The text of other errors may quote their input: a ValueError, an error of the HTTP parser, and an error of
# llama-server, which quotes messages that it cannot parse.
SAYABLE: Final = (OSError, AssertionError, AttributeError, RuntimeError, TypeError)
OURS: Final = "slotkeeper."


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def configure(level: str, style: str) -> None:
    """Set up logging. `style` is json, console, or auto (console on a terminal, else json)."""
    out = StandardError()
    if style == "auto":
        style = "console" if out.isatty() else "json"
    renderers: list[Processor] = [ExceptionRenderer(_formatted), JSONRenderer(_json)]
    if style == "console":
        renderers = [ConsoleRenderer(exception_formatter=_print_formatted)]
    first: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*first, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(out),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
    libraries = logging.StreamHandler(out)
    libraries.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
            foreign_pre_chain=[*first, structlog.stdlib.add_logger_name],
        )
    )
    logging.basicConfig(handlers=[libraries], level=logging.WARNING)


def _json(event: Any, default: Callable[[Any], Any] | None = None, **_: object) -> str:
    """Encode an event with orjson, or with the slower `json` if it has lone surrogates or large numbers."""
    try:
        return orjson.dumps(event, default=default).decode()
    except TypeError:
        return json.dumps(event, default=default)


class Seldom:
    """Logs warnings that every request could cause: the first at once, then at most one a minute."""

    def __init__(self, log: structlog.stdlib.BoundLogger) -> None:
        self._log = log
        self._again = 0.0
        self._unsaid = 0

    def warning(self, event: str, **fields: object) -> None:
        """Log a warning, or drop it. The field `unsaid` counts those dropped since the last one logged."""
        now = time.monotonic()
        if now < self._again:
            self._unsaid += 1
            return
        unsaid, self._unsaid, self._again = self._unsaid, 0, now + SELDOM_SECONDS
        self._log.warning(event, unsaid=unsaid, **fields)


def sayable(error: BaseException) -> str:
    """Return what may be logged of an error: its type, and its text unless that may quote a prompt."""
    name = type(error).__name__
    if isinstance(error, EngineError):
        return f"{name}: {error.status}"
    if isinstance(error, EngineGoneError):
        return name
    sayable = isinstance(error, SAYABLE) or type(error).__module__.startswith(OURS)
    return f"{name}: {error}" if sayable else name


def _formatted(exc_info: ExcInfo) -> str:
    """Return the tracebacks of an error and its causes, the first cause first."""
    return "\n\nThis error led to another:\n".join(reversed(list(_tracebacks(exc_info[1]))))


def _tracebacks(error: BaseException | None) -> Iterator[str]:
    """Yield the traceback of an error and of each cause, without local variables, which may hold prompts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = "".join(traceback.format_tb(error.__traceback__))
        yield f"Traceback (most recent call last):\n{frames}{sayable(error)}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _print_formatted(out: TextIO, exc_info: ExcInfo) -> None:
    out.write("\n" + _formatted(exc_info))


# -- standard error: lines that cannot be written are counted and dropped -------------------------------

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
                left = left[self._some(raw, left[: select.PIPE_BUF]) :]
            except OSError:
                if len(left) == len(data):
                    raise
                return False
        return True

    def _some(self, raw: io.FileIO, data: memoryview) -> int:
        """Write at most PIPE_BUF bytes, which a ready pipe takes at once; return the count.

        Raises BlockingIOError if the reader is stuck.
        """
        poll = select.poll()
        poll.register(raw, select.POLLOUT)
        self._stuck = not poll.poll(0 if self._stuck else SLOW_SECONDS * 1000)
        written: int | None = None if self._stuck else raw.write(data)
        if written is None:
            raise BlockingIOError
        return written


def hold_standard_streams() -> None:
    """Open the null device for standard streams that were closed, so that no socket gets their descriptors.

    For standard error it is opened for reading only, so that writes fail and are counted as dropped.
    """
    for name in ("stdin", "stdout", "stderr"):  # in the order of descriptors: open() takes the lowest free
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_WRONLY if name == "stdout" else os.O_RDONLY)
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115, PTH123
