"""What a client hears while it waits for its stream: if need be a head of ours, then comments.

Nothing may come for minutes: the request waits in our line, steps are taken in its slot, or the engine
computes the prompt, between its head and its first event. Clients, and the proxies in front of us, give
up on a connection that says nothing. A line that begins with a colon is what SSE has against that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import aiohttp
from aiohttp import web

from slotkeeper.api import headers as names
from slotkeeper.api.sse import comment
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.web.upstream import EVENT_STREAM, GONE, flows, prepared

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
