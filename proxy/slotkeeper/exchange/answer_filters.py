"""Chooses the filters through which an answer passes on its way to the client.

* Its form: as the client wants it, with progress, or a stream from which a whole answer is assembled.
* A gate for the error that the engine's KV buffer has no free cell (engine.md 14). That is a whole answer of
  500, or the last event of a stream whose head was sent long before. As long as the client has only
  heads and comments, the request can be sent again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import aiohttp

from slotkeeper.api.answer import Answer, ProgressFilter
from slotkeeper.api.assembling import Assembler, as_stream
from slotkeeper.api.errors import UpstreamFault
from slotkeeper.api.request import PROGRESS_ROUTES, Ask, ask_for, can_ask, can_assemble
from slotkeeper.exchange.upstream import flows, whole
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.events import Exceeded
from slotkeeper.scheduler.types import Reason, RequestId

# Requests that are not changed, or are so short that progress does not help.
NO_PROGRESS: Final = frozenset({Reason.BYPASS, Reason.BRIEF})


class NotAssembled(UpstreamFault):
    """A stream ended, but no whole answer could be assembled. The client has received no byte of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The body to send to the engine, and the filters for its answer."""

    body: bytes
    progress: ProgressFilter | None = None
    assembler: Assembler | None = None  # the client wants a whole answer, and the engine sends a stream


def form_for(ask: Ask | None, body: bytes, forward: Forward, link: EngineLink) -> AnswerForm:
    """Choose the form. Only a router's model is asked for a stream that the client did not request."""
    if ask is None:
        return AnswerForm(body=body)
    routed = bool(link.address.model) and not link.address.swaps and link.assembles
    if routed and forward.reason is not Reason.BYPASS and can_assemble(ask):
        watched = ask.api in PROGRESS_ROUTES
        return AnswerForm(
            body=as_stream(body, ask.api, progress=watched),
            progress=ProgressFilter() if watched else None,
            assembler=Assembler(ask.api),
        )
    if can_ask(ask) and _reports_progress(forward, link):
        return AnswerForm(body=ask_for(body), progress=ProgressFilter())
    return AnswerForm(body=body)


def _reports_progress(forward: Forward, link: EngineLink) -> bool:
    """Whether the engine may be asked for its progress: other servers may refuse the field."""
    return forward.reason not in NO_PROGRESS and not link.health.unlike_ours


# -- no free cell --------------------------------------------------------------------------------------

NO_CELLS: Final = b"Context size has been exceeded"
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
        self.lacked = False  # the answer was this error

    def ended(self, answer: Answer) -> None:
        """Report the error if it is the last event of an answer that was passed on."""
        if answer.error is not None and NO_CELLS in self._last:
            self._report(again=False)

    def _out_of_cells(self) -> OutOfCells:
        self._report(again=True)
        return OutOfCells("the engine had no room for this request in its KV buffer", status=500)

    def _report(self, *, again: bool) -> None:
        self.lacked = True
        self._driver.post(Exceeded(at=self._driver.now(), request=self._request, again=again))

    async def whole(self, answer: aiohttp.ClientResponse) -> bytes:
        """Read a short answer of 500 that is no stream, and check it; read nothing of any other answer.

        Returns the bytes read. Raises OutOfCells, UpstreamFault.
        """
        size = answer.content_length
        if not self._shut or answer.status != 500 or flows(answer) or size is None or size > LONGEST:
            return b""
        body = await whole(answer, lambda _: None)
        if NO_CELLS in body and b'"error"' in body:
            raise self._out_of_cells()
        return body

    def note_last(self, chunk: bytes) -> None:
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
            if NO_CELLS in self._held:
                raise self._out_of_cells()
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
        return END not in held or NO_CELLS in held.partition(END)[0]

    def close(self) -> bytes:
        """Return the bytes held back; all that follows passes."""
        held, self._held, self._shut = self._held, b"", False
        return held


def gate_for(driver: Driver, forward: Forward, *, outgrown: bool) -> CellsGate | None:
    """Return the gate for an answer; None where slots share no KV buffer: no answer can be this error.

    `outgrown`: the request was sent again once for this error, so the gate holds nothing back.
    """
    if not driver.placement.may_lack_cells(forward.engine):
        return None
    return CellsGate(driver, forward.request, shut=not outgrown and forward.reason is not Reason.BYPASS)
