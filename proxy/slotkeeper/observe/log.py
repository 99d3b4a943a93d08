"""Log lines: JSON for machines, colours for people, and never a word of a prompt."""

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
from structlog.typing import ExcInfo, Processor

from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.observe.standard_error import StandardError

SELDOM_SECONDS: Final = 60.0
# The text of other errors may quote what they were given: that of a ValueError, that of the HTTP parser, and
# that of llama-server, which says of messages that it cannot read which messages these were.
SAYABLE: Final = (OSError, AssertionError, AttributeError, RuntimeError, TypeError)
OURS: Final = "slotkeeper."


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def configure(level: str, style: str) -> None:
    """`style`: json, console, or auto (console on a terminal)."""
    out = StandardError()
    if style == "auto":
        style = "console" if out.isatty() else "json"
    renderers: list[Processor] = [ExceptionRenderer(_told), JSONRenderer(_json)]
    if style == "console":
        renderers = [ConsoleRenderer(exception_formatter=_print_told)]
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
    """Quicker than the standard library's, which takes what this does not: lone surrogates, large numbers."""
    try:
        return orjson.dumps(event, default=default).decode()
    except TypeError:
        return json.dumps(event, default=default)


class Seldom:
    """A warning that could be due at every request: said at once, then once a minute."""

    def __init__(self, log: structlog.stdlib.BoundLogger) -> None:
        self._log = log
        self._again = 0.0
        self._unsaid = 0

    def warning(self, event: str, **fields: object) -> None:
        """`unsaid` goes along: how often it was due since it was said last."""
        now = time.monotonic()
        if now < self._again:
            self._unsaid += 1
            return
        unsaid, self._unsaid, self._again = self._unsaid, 0, now + SELDOM_SECONDS
        self._log.warning(event, unsaid=unsaid, **fields)


def sayable(error: BaseException) -> str:
    """What a log may say of an error: its text too, unless that may quote a prompt."""
    name = type(error).__name__
    if isinstance(error, EngineError):
        return f"{name}: {error.status}"
    if isinstance(error, EngineGoneError):
        return name
    sayable = isinstance(error, SAYABLE) or type(error).__module__.startswith(OURS)
    return f"{name}: {error}" if sayable else name


def _told(exc_info: ExcInfo) -> str:
    """An error and those behind it, the first cause first: the way of each, and what may be said of it."""
    return "\n\nThen came of it:\n".join(reversed(list(_tellings(exc_info[1]))))


def _tellings(error: BaseException | None) -> Iterator[str]:
    """No local variables: prompts are among them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        way = "".join(traceback.format_tb(error.__traceback__))
        yield f"Traceback (most recent call last):\n{way}{sayable(error)}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _print_told(out: TextIO, exc_info: ExcInfo) -> None:
    out.write("\n" + _told(exc_info))
