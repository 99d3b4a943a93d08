"""Relays an answer to its client, and sends comments to a client that waits.

A client that reads slowly, or not at all, would hold a slot: the engine waits for us, and we wait for the
client. So we read ahead into the write buffer of the client's connection, and the slot is free when the
engine has finished. That buffer is bounded, for each answer and for all. A client whose buffer is full has
some seconds to read a block of it; then its connection is reset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import aiohttp
from aiohttp import web

from slotkeeper.api import errors
from slotkeeper.api import head as names
from slotkeeper.api.answer import ProgressFilter, comment
from slotkeeper.api.errors import UpstreamFault
from slotkeeper.api.head import Api
from slotkeeper.exchange.account import Account
from slotkeeper.exchange.cells import CellsGate, OutOfCells
from slotkeeper.exchange.upstream import (
    CHUNK,
    EVENT_STREAM,
    GONE,
    abort,
    answering,
    copy,
    flows,
    prepared,
    whole,
)
from slotkeeper.observe.log import Seldom, get_logger
from slotkeeper.observe.metrics import ConnectionCut, Metrics
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.effects import Forward

BLOCK: Final = 256 * 1024  # bytes by which a buffer grows
FRAMING: Final = 32  # bytes around a chunk, at most

log = get_logger(__name__)


class Stalled(ConnectionResetError):  # noqa: N818 - handled like a client that left
    """The connection of a client that did not read for too long was reset."""


class ReadAhead:
    """Memory for bytes of answers that clients have not read yet."""

    def __init__(self, each: int, total: int, *, seconds: float, metrics: Metrics) -> None:
        """`each` and `total` are bytes. A client with a full buffer has `seconds` to read some of it."""
        self.each = max(each, CHUNK)
        self.seconds = seconds
        self.free = total
        self._metrics = metrics
        self._seldom = Seldom(log)

    def take(self, wanted: int) -> int:
        """Take up to `wanted` bytes; the caller must give them back. Returns the bytes taken."""
        taken = max(0, min(wanted, self.free))
        self.free -= taken
        return taken

    def cut_off(self, request: web.BaseRequest, unread: int) -> Stalled:
        """Reset the connection of a client that does not read, and return the error to raise."""
        abort(request)
        self._metrics.cut(ConnectionCut.STALLED)
        self._seldom.warning("client_stalled", client=request.remote, unread=unread, seconds=self.seconds)
        return Stalled("the client does not read its answer")


class Outlet:
    """The client's side of one answer. Use it as a context manager, which gives its memory back."""

    def __init__(self, ahead: ReadAhead, request: web.BaseRequest, response: web.StreamResponse) -> None:
        self._ahead = ahead
        self._request = request
        self._response = response
        self._high = CHUNK  # bytes in the connection's buffer above which a write waits
        self._taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ahead.free += self._taken
        self._taken = 0

    async def write(self, data: bytes) -> None:
        """Write as soon as the buffer has room. Raises GONE errors, including Stalled."""
        if self._request.protocol.writing_paused or not self._fits(len(data)):
            await self._in_time(self._response.write(data))
        else:
            await self._response.write(data)

    async def end(self) -> None:
        """End the answer. Waits while the client keeps reading; the slot is already free."""
        plug, protocol = self._request.transport, self._request.protocol
        if plug is not None and self._taken:
            plug.set_write_buffer_limits(high=CHUNK)
        while protocol.writing_paused:
            unread = self._unread()
            try:
                async with asyncio.timeout(self._ahead.seconds):
                    await self._request.writer.drain()
            except TimeoutError:
                if self._unread() >= unread:
                    raise self._ahead.cut_off(self._request, unread) from None
        await self._response.write_eof()

    def _fits(self, size: int) -> bool:
        """Whether the buffer has room for `size` bytes; it grows if needed and possible."""
        lacking = self._unread() + size + FRAMING - self._high
        if lacking <= 0:
            return True
        wanted = min(-(-lacking // BLOCK) * BLOCK, self._ahead.each - self._high)
        taken = self._ahead.take(wanted)
        plug = self._request.transport
        if taken and plug is not None:
            self._taken += taken
            self._high += taken
            plug.set_write_buffer_limits(high=self._high, low=max(self._high - BLOCK, self._high // 2))
        return taken >= lacking

    def _unread(self) -> int:
        plug = self._request.transport
        return plug.get_write_buffer_size() if plug is not None else 0

    async def _in_time(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._ahead.seconds):
                await writing
        except TimeoutError:
            raise self._ahead.cut_off(self._request, self._unread()) from None


# -- comments while a client waits -----------------------------------------------------------------------
# There may be nothing to send for minutes: the request is queued, steps are taken in its slot, or the
# engine computes the prompt, between its head and its first event. Clients, and proxies in front of us,
# close a silent connection. SSE comments (lines that begin with a colon) prevent that.

WAITING: Final = comment("waiting")


class Waiting:
    """A client that asked for a stream and waits for its first event.

    Once the head of a stream is sent, our own or the engine's, `opened` is the answer to continue. From then
    on headers and status cannot be passed on: an answer that is no stream must become an error event (`end`).
    Until `begun`, the request can still be sent again and another answer can follow.
    """

    def __init__(
        self,
        request: web.Request,
        request_id: str,
        tasks: Tasks,
        *,
        seconds: float,
        labels: Callable[[], Mapping[str, str]],
    ) -> None:
        """`seconds` are between two comments; `labels` are our own headers, as far as they are known."""
        self._request = request
        self._request_id = request_id
        self._tasks = tasks
        self._seconds = seconds
        self._labels = labels
        self._sent: dict[str, str] = {}  # labels that the sent head has
        self._talking: asyncio.Task[None] | None = None
        self.opened: web.StreamResponse | None = None
        self.begun = False  # the client has bytes of the engine's answer

    def start(self) -> None:
        """Start comments, in the open answer or in our own answer, which begins with the first comment.

        If comments of a request that is sent again still run, they continue until `stop`.
        """
        if self._talking is not None:
            return
        owner = asyncio.current_task()
        if owner is None:
            raise AssertionError("a handler runs in a task")
        self._talking = self._tasks.start(self._talk(owner))

    def stop(self) -> None:
        """End the comments: no byte of ours is written after this. No comment is cut off."""
        if self._talking is not None:
            self._talking.cancel()
            self._talking = None

    def ends_with(self, passing: bytes) -> bytes:
        """Return `passing`, the bytes for the client; the first bytes end the waiting."""
        if passing:
            self.begun = True
            self.stop()
        return passing

    async def accept(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Send the engine's head with our labels. After our own head, write late labels as a comment."""
        labels = self._labels()
        if self.opened is None:
            response = prepared(answer, self._request_id)
            if answer.status < 400:  # else a client without a key would see what others have asked
                response.headers.update(labels)
            await response.prepare(self._request)
            if flows(answer):
                self.opened, self._sent = response, dict(labels)
            else:
                self.begun = True
            return response
        late = [f"{name}: {value}" for name, value in labels.items() if self._sent.get(name) != value]
        if late:
            await self.opened.write(comment(*late))
        return self.opened

    async def end(self, event: bytes) -> web.StreamResponse:
        """End a stream that we opened, with one last event, because no stream came from the engine."""
        self.stop()
        if self.opened is None:
            raise AssertionError("only an opened stream can be ended")
        await self.opened.write(event)
        await self.opened.write_eof()
        return self.opened

    async def _talk(self, owner: asyncio.Task[object]) -> None:
        """Write comments for ever. If the client has left, cancel `owner`, the task of its request."""
        try:
            while True:
                await asyncio.sleep(self._seconds)
                response = self.opened or await self._open()
                await response.write(WAITING)
        except GONE:
            if not owner.cancelling():
                owner.cancel()

    async def _open(self) -> web.StreamResponse:
        """Send the head that the engine would send for a stream, with our own labels."""
        self._sent = dict(self._labels())
        origin = self._request.headers.get("Origin")
        self.opened = web.StreamResponse(
            headers={
                "Content-Type": EVENT_STREAM,
                "Server": "slotkeeper",
                "X-Accel-Buffering": "no",
                **({"Access-Control-Allow-Origin": origin} if origin else {}),
                names.REQUEST_ID: self._request_id,
                **self._sent,
            }
        )
        await self.opened.prepare(self._request)
        return self.opened


# -- the answer ------------------------------------------------------------------------------------------

PREDICTION_WAIT: Final = 0.05  # seconds that an answer's head may wait for our own prediction


class Relay:
    """Relays one answer: whole, as an error event, or visibly broken off.

    Raises UpstreamFault if it breaks off before the client has a byte of it.
    """

    def __init__(
        self,
        driver: Driver,
        request: web.Request,
        api: Api,
        account: Account,
        waiting: Waiting,
        *,
        ahead: ReadAhead,
        again: bool,
    ) -> None:
        """`again`: the request may be sent again if the engine has no free cells for it."""
        self._cells = CellsGate(driver, account.key, shut=again)
        self._driver = driver
        self._ahead = ahead
        self._request = request
        self._api = api
        self._account = account
        self._waiting = waiting

    async def run(
        self,
        answer: aiohttp.ClientResponse,
        forward: Forward,
        link: EngineLink,
        progress: ProgressFilter | None,
        *,
        alone: bool,
    ) -> web.StreamResponse:
        """Copy the answer, after our own head if that is sent. The first event ends the waiting.

        `alone`: we may not write comments between the engine's events.
        """
        account, waiting = self._account, self._waiting
        account.listener.begin(answer)
        body = await self._cells.whole(answer)
        await self._predicted()
        if waiting.opened is not None and not flows(answer):
            return await self._retell(answer, forward, link, read=body)
        response = await waiting.accept(answer)
        if not flows(answer):
            progress = None
        elif not alone:
            waiting.start()
        rest = account.listener.without(progress) if progress else bytes

        def observe(chunk: bytes) -> None:
            link.pulse.heard()
            self._cells.heard(chunk)
            account.listener.heard(chunk)

        def passing(chunk: bytes) -> bytes:
            return waiting.ends_with(self._cells.passing(rest(chunk)) if flows(answer) else chunk)

        with Outlet(self._ahead, self._request, response) as out:
            try:
                async with answering(link):
                    await copy(answer, out.write, observe, passing, read=body)
                waiting.stop()
                if flows(answer):
                    await out.write(self._cells.close() + (progress.close() if progress else b""))
                if link.address.model:
                    self._check_whole(answer)
            except UpstreamFault as fault:
                waiting.stop()
                link.kick()
                # If the client has no byte of an answer yet, the request can be sent again unnoticed.
                if not waiting.begun or isinstance(fault, OutOfCells):
                    raise
                account.gone()
                await self._break_off(answer, out, fault)
                return response
            self._cells.ended(account.listener.end())
            account.finished(forward, link, answer.status)
            await out.end()
        return response

    def _check_whole(self, answer: aiohttp.ClientResponse) -> None:
        """Check that a stream is complete: a router ends it normally if its engine dies (engine.md 13).

        Raises UpstreamFault.
        """
        result = self._account.listener.end()
        if flows(answer) and answer.status < 400 and not result.complete and result.error is None:
            raise UpstreamFault("the router broke off in the middle of an answer: its engine has ended")

    async def _predicted(self) -> None:
        """Wait briefly for our prediction: only for a very short prompt it is not ready yet."""
        pending = self._driver.placement.pending(self._account.key)
        if pending and pending.predicted is None and not pending.rendered:
            with suppress(TimeoutError):
                async with asyncio.timeout(PREDICTION_WAIT):
                    await self._account.rendered.wait()

    async def _retell(
        self, answer: aiohttp.ClientResponse, forward: Forward, link: EngineLink, *, read: bytes
    ) -> web.StreamResponse:
        """Send the engine's answer as an error event: it is no stream, but the client already reads one."""
        account = self._account
        try:
            async with answering(link):
                account.listener.heard(read)  # `CellsGate` has read a short answer of 500 already
                body = read + await whole(answer, account.listener.heard)
        except UpstreamFault:
            link.kick()
            raise
        account.finished(forward, link, answer.status)
        fault = errors.retold(answer.status, body)
        if answer.status < 400:
            account.outcome = "upstream_error"
            fault = UpstreamFault(f"the engine answered {answer.content_type} where a stream was asked for")
        return await self._waiting.end(errors.sse(fault, self._api))

    async def _break_off(self, answer: aiohttp.ClientResponse, out: Outlet, fault: UpstreamFault) -> None:
        """End an incomplete answer visibly: with an error event in a stream, else with a reset connection."""
        log.warning("answer_broke_off", request_id=self._account.id, error=fault.message)
        if flows(answer):
            await out.write(b"\n\n" + errors.sse(fault, self._api))
            await out.end()
        else:
            abort(self._request)
