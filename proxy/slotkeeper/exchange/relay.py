"""An answer on its way to its client, and what a client hears while it is queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import aiohttp
from aiohttp import web

from slotkeeper.api import errors
from slotkeeper.api import head as names
from slotkeeper.api.answer import ProgressFilter, comment
from slotkeeper.api.errors import UpstreamFault
from slotkeeper.api.head import Api
from slotkeeper.exchange.account import Account
from slotkeeper.exchange.cells import CellsGate, OutOfCells
from slotkeeper.exchange.outlet import Outlet, ReadAhead
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


# -- the answer on its way -------------------------------------------------------------------------------
# For minutes there may be nothing to send: the request is queued, steps are taken in its slot, or the
# engine computes the prompt, between its head and its first event. Clients, and the proxies in front of us,
# give up on a silent connection. A comment (a line that begins with a colon) is what SSE has against that.

WAITING: Final = comment("waiting")


class Waiting:
    """One client that asked for a stream.

    Once the head of a stream is out, our own or the engine's, `opened` is the answer to go on with. Then no
    headers and no status can be passed on any more: what is no stream must end as an error event (`end`).
    As long as nothing else has `begun`, another answer may still follow.
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
        """`seconds` between two comments; `labels` are our own headers, as far as they are known by now."""
        self._request = request
        self._request_id = request_id
        self._tasks = tasks
        self._seconds = seconds
        self._labels = labels
        self._said: dict[str, str] = {}  # labels that stand in the head
        self._talking: asyncio.Task[None] | None = None
        self.opened: web.StreamResponse | None = None
        self.begun = False  # bytes of the engine's own are with the client

    def start(self) -> None:
        """Comment from now on, in what is open, else in an answer of our own that begins when it must.

        A request that is sent again may still be commenting: then that goes on, and `stop` ends it.
        """
        if self._talking is not None:
            return
        owner = asyncio.current_task()
        if owner is None:
            raise AssertionError("a handler runs in a task")
        self._talking = self._tasks.start(self._talk(owner))

    def stop(self) -> None:
        """No byte of ours is written after this. Comments are written whole, so none is cut."""
        if self._talking is not None:
            self._talking.cancel()
            self._talking = None

    def ends_with(self, passing: bytes) -> bytes:
        """Called with all that goes on to the client: its first bytes end the waiting."""
        if passing:
            self.begun = True
            self.stop()
        return passing

    async def accept(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """The head is with the client after this: the engine's with our labels, or ours and late labels."""
        labels = self._labels()
        if self.opened is None:
            response = prepared(answer, self._request_id)
            if answer.status < 400:  # else they would tell who has no key what others have asked
                response.headers.update(labels)
            await response.prepare(self._request)
            if flows(answer):
                self.opened, self._said = response, dict(labels)
            else:
                self.begun = True
            return response
        late = [f"{name}: {value}" for name, value in labels.items() if self._said.get(name) != value]
        if late:
            await self.opened.write(comment(*late))
        return self.opened

    async def end(self, event: bytes) -> web.StreamResponse:
        """The last event of a stream of ours that the engine's never followed."""
        self.stop()
        if self.opened is None:
            raise AssertionError("only what was begun can be ended")
        await self.opened.write(event)
        await self.opened.write_eof()
        return self.opened

    async def _talk(self, owner: asyncio.Task[object]) -> None:
        """A client that has left ends its request, even if nothing else has noticed."""
        try:
            while True:
                await asyncio.sleep(self._seconds)
                response = self.opened or await self._open()
                await response.write(WAITING)
        except GONE:
            if not owner.cancelling():
                owner.cancel()

    async def _open(self) -> web.StreamResponse:
        """The head that the engine would send for a stream, and our own labels."""
        self._said = dict(self._labels())
        origin = self._request.headers.get("Origin")
        self.opened = web.StreamResponse(
            headers={
                "Content-Type": EVENT_STREAM,
                "Server": "slotkeeper",
                "X-Accel-Buffering": "no",
                **({"Access-Control-Allow-Origin": origin} if origin else {}),
                names.REQUEST_ID: self._request_id,
                **self._said,
            }
        )
        await self.opened.prepare(self._request)
        return self.opened


# -- the answer ------------------------------------------------------------------------------------------

PREDICTION_WAIT: Final = 0.05  # seconds that an answer's head may wait for our own prediction


class Relay:
    """One answer: whole, retold as an event, or visibly broken off.

    Raises UpstreamFault where it breaks off and no byte of it is with the client.
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
        cells: CellsGate | None,
    ) -> None:
        """`cells`: where the engine may have none left for it."""
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
        progress: ProgressFilter | None,
        *,
        alone: bool,
    ) -> web.StreamResponse:
        """Copy the answer, behind our own head if that is out. The first event ends the waiting.

        `alone`: no comment of ours may stand between the engine's events.
        """
        account, waiting, streams = self._account, self._waiting, flows(answer)
        account.listener.begin(answer)
        body = await self._cells.whole(answer) if self._cells else b""
        await self._predicted()
        if waiting.opened is not None and not streams:
            return await self._retell(answer, forward, link, read=body)
        response = await waiting.accept(answer)
        if streams and not alone:
            waiting.start()
        with Outlet(self._ahead, self._request, response) as out:
            try:
                await self._copied(answer, link, out, progress if streams else None, read=body)
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
        out: Outlet,
        progress: ProgressFilter | None,
        *,
        read: bytes,
    ) -> None:
        """All of it but the progress. Raises UpstreamFault."""
        listener, cells, waiting, streams = self._account.listener, self._cells, self._waiting, flows(answer)
        steps = [listener.without(progress)] if progress else []
        if cells and streams:
            steps.append(cells.passing)
        steps.append(waiting.ends_with)

        def passing(chunk: bytes) -> bytes:
            for step in steps:
                chunk = step(chunk)
            return chunk

        def heard(chunk: bytes) -> None:
            link.pulse.heard()
            if cells:
                cells.heard(chunk)
            listener.heard(chunk)

        async with answering(link):
            await copy(answer, out.write, heard, passing, read=read)
        waiting.stop()
        if streams:
            await out.write((cells.close() if cells else b"") + (progress.close() if progress else b""))
        if link.address.model:
            self._check_whole(answer)

    def _check_whole(self, answer: aiohttp.ClientResponse) -> None:
        """A router ends a stream in order whose engine has died, with a line of its own in it (engine.md 13).

        Raises UpstreamFault.
        """
        heard = self._account.listener.end()
        if flows(answer) and answer.status < 400 and not heard.complete and heard.error is None:
            raise UpstreamFault("the router broke off in the middle of an answer: its engine has ended")

    async def _predicted(self) -> None:
        """The prediction is ready by now but for very short prompts, which may be given a moment."""
        pending = self._driver.placement.pending(self._account.key)
        if pending and pending.predicted is None and not pending.rendered:
            with suppress(TimeoutError):
                async with asyncio.timeout(PREDICTION_WAIT):
                    await self._account.rendered.wait()

    async def _retell(
        self, answer: aiohttp.ClientResponse, forward: Forward, link: EngineLink, *, read: bytes
    ) -> web.StreamResponse:
        """No stream came, and the client reads one by now: what the engine said, as an error event."""
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
        """Never a clean end: an error event where the client reads events, else a broken connection."""
        log.warning("answer_broke_off", request_id=self._account.id, error=fault.message)
        if flows(answer):
            await out.write(b"\n\n" + errors.sse(fault, self._api))
            await out.end()
        else:
            abort(self._request)
