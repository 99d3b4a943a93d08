"""Writes an answer to its client, which may read slowly.

A client that reads slowly, or not at all, would hold a slot: the engine would wait for us, and we for the
client. So we read ahead into the write buffer of the client's connection, and the slot is free when the
engine has finished. That buffer is bounded for each answer, and for all answers together. A client whose
buffer is full has some seconds to read a block of it; then its connection is reset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Final, Self

from aiohttp import web

from slotkeeper.exchange.upstream import CHUNK, abort
from slotkeeper.observe.log import Seldom, get_logger
from slotkeeper.observe.metrics import ConnectionCut, Metrics

BLOCK: Final = 256 * 1024  # bytes by which a buffer grows
FRAMING: Final = 32  # bytes around a chunk, at most

log = get_logger(__name__)


class Stalled(ConnectionResetError):  # noqa: N818 - handled like a client that left
    """The client did not read for too long, and its connection was reset."""


class ReadAhead:
    """The memory budget for bytes of answers that clients have not read yet."""

    def __init__(self, each: int, total: int, *, seconds: float, metrics: Metrics) -> None:
        """`each` and `total` are bytes. A client with a full buffer has `seconds` to read part of it."""
        self.each = max(each, CHUNK)
        self.seconds = seconds
        self.free = total
        self._metrics = metrics
        self._seldom = Seldom(log)

    def take(self, wanted: int) -> int:
        """Take up to `wanted` bytes and return the number taken; the caller must give them back."""
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
    """Writes one answer to its client. As a context manager it gives its memory back."""

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
        """Write `data` as soon as the buffer has room. Raises GONE errors, including Stalled."""
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
        """Whether the buffer has room for `size` bytes, after it has grown if needed and possible."""
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
