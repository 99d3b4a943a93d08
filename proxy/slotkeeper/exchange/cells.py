"""Answers that say that the engine's KV buffer has no free cell (engine.md 14).

The error is a whole answer of 500, or the last event of a stream whose head was sent long before. As long as
the client has only heads and comments, the request can be sent again.
"""

from __future__ import annotations

from typing import Final

import aiohttp

from slotkeeper.api.answer import Answer
from slotkeeper.api.errors import UpstreamFault
from slotkeeper.exchange.upstream import flows, whole
from slotkeeper.runtime.driver import Driver
from slotkeeper.scheduler.events import Exceeded
from slotkeeper.scheduler.types import RequestId

WORDS: Final = b"Context size has been exceeded"
ERRORS: Final = (b'data: {"error"', b"event: error", b"error: ")  # beginnings of an error event
END: Final = b"\n\n"
LONGEST: Final = 4096  # bytes, the longest such answer or event


class OutOfCells(UpstreamFault):
    """The engine had no free cell, and the client has no byte of an answer yet."""


class CellsGate:
    """Holds back the beginning of an answer while it may be this error, and reports it to the driver."""

    def __init__(self, driver: Driver, request: RequestId, *, shut: bool) -> None:
        """`shut`: hold the beginning back. If not, everything passes."""
        self._driver = driver
        self._request = request
        self._shut = shut
        self._held = b""
        self._last = b""

    def ended(self, answer: Answer) -> None:
        """Report the error if it is the last event of an answer that was passed on."""
        if answer.error is not None and WORDS in self._last:
            self._tell(again=False)

    def _out(self) -> OutOfCells:
        self._tell(again=True)
        return OutOfCells("the engine had no room for this request in its KV buffer", status=500)

    def _tell(self, *, again: bool) -> None:
        self._driver.post(Exceeded(at=self._driver.now(), request=self._request, again=again))

    async def whole(self, answer: aiohttp.ClientResponse) -> bytes:
        """Read a short answer of 500 that is no stream, and check it; read nothing of any other answer.

        Returns the bytes read. Raises OutOfCells, UpstreamFault.
        """
        size = answer.content_length
        if not self._shut or answer.status != 500 or flows(answer) or size is None or size > LONGEST:
            return b""
        body = await whole(answer, lambda _: None)
        if WORDS in body and b'"error"' in body:
            raise self._out()
        return body

    def heard(self, chunk: bytes) -> None:
        self._last = chunk

    def passing(self, chunk: bytes) -> bytes:
        """Return the bytes of a stream that may be passed on. Raises OutOfCells."""
        if not self._shut or not chunk:
            return chunk
        self._held += chunk
        out = []
        while self._held.startswith(b":"):  # comments may come before any event
            line, end, rest = self._held.partition(END)
            if not end:
                break
            out.append(line + end)
            self._held = rest
        if self._may_be_error():
            if WORDS in self._held:
                raise self._out()
        else:
            out.append(self.close())
        return b"".join(out)

    def _may_be_error(self) -> bool:
        """Whether the first event is this error, or is incomplete and may become an error."""
        held = self._held
        if len(held) > LONGEST:
            return False
        if not held.startswith(b":") and not any(
            held.startswith(begin) or begin.startswith(held) for begin in ERRORS
        ):
            return False
        return END not in held or WORDS in held.partition(END)[0]

    def close(self) -> bytes:
        """Return the bytes held back; all that follows passes."""
        held, self._held, self._shut = self._held, b"", False
        return held
