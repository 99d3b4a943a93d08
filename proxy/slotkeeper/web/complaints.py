"""What the HTTP server says of its connections, as lines of our log.

By itself it writes a traceback for every request that is no HTTP, so any client fills
the log. That is counted here, and said once a minute.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

from slotkeeper.observe.log import Seldom, get_logger
from slotkeeper.observe.metrics import ConnectionCut, Metrics

log = get_logger(__name__)


class Complaints(logging.Logger):
    """The `logger` of a server. It is in no hierarchy, and has no handlers."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(__name__)
        self._metrics = metrics
        self._seldom = Seldom(log)

    def debug(self, *args: Any, exc_info: Any = None, **_: Any) -> None:
        """For a client that speaks another protocol from the start; the rest is of no interest."""
        if isinstance(exc_info, HttpProcessingError):
            self._malformed(exc_info, args)

    def exception(self, *args: Any, exc_info: Any = True, **_: Any) -> None:
        """For a client that sends something malformed later; anything else is a fault of ours."""
        if isinstance(exc_info, HttpProcessingError):
            self._malformed(exc_info, args)
        else:
            log.error("connection_failed", exc_info=exc_info)

    def _malformed(self, error: HttpProcessingError, args: tuple[Any, ...]) -> None:
        """Its text quotes what was sent, so it is not said."""
        self._metrics.cut(ConnectionCut.MALFORMED)
        _, *clients = args
        self._seldom.warning(
            "malformed_request", error=type(error).__name__, client=clients[0] if clients else None
        )
