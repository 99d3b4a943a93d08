"""Log lines: JSON for machines, colours for people. They contain no text of a prompt and no key."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final, TextIO

import orjson
import structlog
from structlog.dev import ConsoleRenderer
from structlog.processors import ExceptionRenderer, JSONRenderer
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from slotkeeper.api.head import masked
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.observe.standard_error import StandardError

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
        _without_keys,
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


def _without_keys(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Mask what looks like a key in every field: a client can put one into any text that we repeat."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = masked(value)
    return event


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
