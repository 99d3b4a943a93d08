"""Relays an answer to its client, and sends comments to a client that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import aiohttp
from aiohttp import web

from slotkeeper.api import errors
from slotkeeper.api import head as names
from slotkeeper.api.answer import ProgressFilter, comment
from slotkeeper.api.assembling import Assembler, WholeAnswer
from slotkeeper.api.errors import UpstreamFault
from slotkeeper.api.head import Api
from slotkeeper.exchange.account import Account
from slotkeeper.exchange.answer_filters import AnswerForm, CellsGate, NotAssembled, OutOfCells
from slotkeeper.exchange.bodies import Budget, Outlet
from slotkeeper.exchange.upstream import (
    EVENT_STREAM,
    GONE,
    abort,
    answering,
    copy,
    flows,
    prepared,
    whole,
)
from slotkeeper.observe.log import get_logger
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.effects import Forward

log = get_logger(__name__)


# -- comments while a client waits -----------------------------------------------------------------------
# There may be nothing to send for minutes: the request is queued, steps are taken in its slot, or the
# engine computes the prompt, between its head and its first event. Clients, and proxies in front of us,
# close a silent connection. SSE comments (lines that begin with a colon) prevent that.

WAITING: Final = comment("waiting")
JSON: Final = "application/json; charset=utf-8"  # as llama-server writes it


def only_comments(data: bytes) -> bool:
    """Whether bytes of a stream are comments, and the last one is complete."""
    return data.endswith(b"\n\n") and all(line[:1] in {b"", b":"} for line in data.split(b"\n"))


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
        """`seconds` are between two comments, 0: there are none; `labels` are our own headers, as known."""
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
        if self._talking is not None or not self._seconds:
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
        """Return `passing`, the bytes for the client; the first bytes of an event end the waiting.

        The engine sends comments of its own during a long prefill. They are no part of its answer.
        """
        if passing and (self.begun or not only_comments(passing)):
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

    def whole(self, answer: aiohttp.ClientResponse, made: WholeAnswer) -> web.Response:
        """Return an answer that was made from the engine's stream, with the engine's head and our labels."""
        headers = prepared(answer, self._request_id).headers
        for name in ("Content-Type", "X-Accel-Buffering"):  # those of a stream
            headers.popall(name, None)
        if made.status < 400:
            headers.update(self._labels())
        headers["Content-Type"] = JSON
        return web.Response(status=made.status, headers=headers, body=made.body)

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
    """Relays one answer: whole, as an error event, or visibly broken off (the connection ends within it).

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
        ahead: Budget,
        cells: CellsGate | None,
    ) -> None:
        """`cells` detects that the engine had no free KV cells for the request; None where that cannot be.

        `ahead` is the memory for bytes that the engine has sent and the client has not read yet.
        """
        self._cells = cells
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
        form: AnswerForm,
        *,
        alone: bool,
    ) -> web.StreamResponse:
        """Copy the answer, after our own head if that is sent. The first event ends the waiting.

        `alone`: we may not write comments between the engine's events.
        """
        account, waiting, streams = self._account, self._waiting, flows(answer)
        account.listener.begin(answer)
        body = await self._cells.whole(answer) if self._cells else b""
        await self._predicted()
        if waiting.opened is not None and not streams:
            return await self._retell(answer, forward, link, read=body)
        if form.assembler and streams:
            return await self._assembled(answer, forward, link, form.progress, form.assembler)
        response = await waiting.accept(answer)
        if streams and not alone:
            waiting.start()
        crowded = self._driver.placement.has_waiting
        with Outlet(self._ahead, self._request, response, crowded=crowded) as out:
            try:
                progress = form.progress if streams else None
                await self._copied(answer, link, out.write, waiting.ends_with, progress, read=body)
            except UpstreamFault as fault:
                waiting.stop()
                link.kick()
                # Without a byte of an answer the client sees nothing of this, if it is sent again.
                if not waiting.begun or isinstance(fault, OutOfCells):
                    raise
                account.gone()
                await self._break_off(answer, out, fault)
                return response
            if self._cells:
                self._cells.ended(account.listener.end())
            account.finished(forward, link, answer.status)
            await out.end()
        return response

    async def _copied(
        self,
        answer: aiohttp.ClientResponse,
        link: EngineLink,
        write: Callable[[bytes], Awaitable[None]],
        written: Callable[[bytes], bytes],
        progress: ProgressFilter | None,
        *,
        read: bytes = b"",
    ) -> None:
        """Copy the answer without its progress events. Raises UpstreamFault.

        Before `write` gets bytes, `written` gets them and returns those to write. `read`: bytes read before.
        """
        listener, cells, streams = self._account.listener, self._cells, flows(answer)
        steps = [listener.without(progress)] if progress else []
        if cells and streams:
            steps.append(cells.passing)
        steps.append(written)

        def passing(chunk: bytes) -> bytes:
            for step in steps:
                chunk = step(chunk)
            return chunk

        def seen(chunk: bytes) -> None:
            link.pulse.answered()
            if cells:
                cells.note_last(chunk)
            listener.read(chunk)

        async with answering(link):
            await copy(answer, write, seen, passing, read=read)
        self._waiting.stop()
        self._check_whole(answer, link)  # first: a request without a byte of its answer can be sent again
        if streams:
            await write((cells.close() if cells else b"") + (progress.close() if progress else b""))

    async def _assembled(
        self,
        answer: aiohttp.ClientResponse,
        forward: Forward,
        link: EngineLink,
        progress: ProgressFilter | None,
        assembler: Assembler,
    ) -> web.Response:
        """Return the whole answer that a stream contains. Until it is complete, the client has no byte of it.

        Raises UpstreamFault, NotAssembled.
        """

        async def take(chunk: bytes) -> None:
            assembler.feed(chunk)

        try:
            await self._copied(answer, link, take, bytes, progress)
        except UpstreamFault:
            link.kick()
            raise
        made = assembler.close()
        if made is None:
            link.assembles = False
            log.warning("answer_not_assembled", request_id=self._account.id, engine=link.engine)
            self._driver.metrics.fallback("assemble")
            raise NotAssembled("no whole answer could be made of the engine's stream")
        if self._cells:
            self._cells.ended(self._account.listener.end())
        self._account.finished(forward, link, made.status)
        return self._waiting.whole(answer, made)

    def _check_whole(self, answer: aiohttp.ClientResponse, link: EngineLink) -> None:
        """Check that an answer which ended normally has its end. Raises UpstreamFault.

        A router ends a stream normally if its engine dies (engine.md 13), an engine if another request takes
        its X-Conversation-Id, and a gateway in front of either for reasons of its own. Other servers than
        llama-server may write other last events, so their answers are not checked.
        """
        if not self._api.generates or link.foreign or link.health.unlike_ours:
            return
        if self._account.listener.broke_off(answer):
            of = "the router" if link.address.model else "the engine"
            raise UpstreamFault(f"{of} broke off in the middle of an answer: its last event is missing")

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
                account.listener.read(read)  # `CellsGate` has read a short answer of 500 already
                body = read + await whole(answer, account.listener.read)
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
        """Cut an incomplete answer: its connection ends within it, in a stream after an error event."""
        log.warning("answer_broke_off", request_id=self._account.id, error=fault.message)
        if flows(answer):
            await out.write(b"\n\n" + errors.sse(fault, self._api))
            await out.cut()
        else:
            abort(self._request)
