"""Reads the bodies of requests and writes those of answers, with bounded memory for all of them.

A client that reads slowly, or not at all, would hold a slot: the engine would wait for us, and we for the
client. So we read ahead into the write buffer of the client's connection, and the slot is free when the
engine has finished. A client whose buffer is full has some seconds to read a block of it; then its connection
is reset. While other requests wait for a slot, a client that reads nothing for a few seconds is cut off even
before its buffer is full.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from io import BytesIO
from types import TracebackType
from typing import Final, Self

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from slotkeeper.api.errors import ClientFault
from slotkeeper.api.request import LARGE
from slotkeeper.exchange.forwarding import CHUNK, abort
from slotkeeper.observe.log import Seldom, get_logger
from slotkeeper.observe.metrics import ConnectionCut, Metrics

RETRY_AFTER: Final = 5  # seconds
SLOWEST: Final = 16 * 1024  # bytes per second, the slowest upload of a large body
PARSED: Final = 3  # times a body's size that its document, rendered text and tokens take
SENT: Final = 1  # times a body's size that its form for the engine takes, with a slot's number
BLOCK: Final = 256 * 1024  # bytes by which a buffer grows
CROWDED_SECONDS: Final = 5.0  # without a byte read, while other requests wait for a slot
LOOK_SECONDS: Final = 0.5  # between two looks at a client that does not read
FRAMING: Final = 32  # bytes around a chunk, at most
MAX_PUT_BYTES: Final = CHUNK // 4  # that an empty buffer takes in any case

log = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Budget:
    """Memory that many bodies share, in bytes. After `seconds` a client that is too slow loses its share."""

    each: int  # the most for one body
    total: int
    seconds: float
    metrics: Metrics
    reserve: int = 0  # for reading one heavy body in another process (`runtime.heavy`)
    free: int = field(init=False)
    _seldom: Seldom = field(init=False, default_factory=lambda: Seldom(log))

    def __post_init__(self) -> None:
        self.free = self.total

    def stalled(self, client: str | None, unread: int) -> None:
        """Count and log a client that does not read its answer."""
        self.metrics.cut(ConnectionCut.STALLED)
        self._seldom.warning("client_stalled", client=client, unread=unread, seconds=self.seconds)


@dataclass(slots=True, eq=False)
class Loan:
    """What one body takes of a budget. As a context manager it gives the memory back."""

    budget: Budget
    request: web.BaseRequest
    _taken: int = field(init=False, default=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.budget.free += self._taken
        self._taken = 0

    def take(self, wanted: int) -> int:
        """Take up to `wanted` bytes, and return the number taken."""
        taken = max(0, min(wanted, self.budget.free))
        self.budget.free -= taken
        self._taken += taken
        return taken


class Body(Loan):
    """The body of one request. It has `seconds` to arrive, and a large one more (SLOWEST)."""

    __slots__ = ()

    async def read(self) -> bytes | None:
        """Return the whole body; None for a request without one. Raises ClientFault."""
        request = self.request
        if not request.body_exists:
            return None
        self._check(request.content_length or 0)
        if self.budget.free <= self.budget.reserve:
            raise self._full()
        if request.content.is_eof():  # a small body arrived with the head
            whole = await request.content.read()
            self._add(len(whole))
            return whole
        return await self._read(request)

    async def _read(self, request: web.BaseRequest) -> bytes:
        whole = BytesIO()  # its bytes are not copied once more, as those of a bytearray would be
        until = asyncio.get_running_loop().time() + self.budget.seconds
        try:
            async with asyncio.timeout_at(until) as limit:
                while piece := await request.content.readany():
                    self._add(len(piece))
                    whole.write(piece)
                    limit.reschedule(until + self._taken / SLOWEST)
        except TimeoutError as error:
            self.budget.metrics.cut(ConnectionCut.BODY)
            raise ClientFault(
                f"the body did not arrive in time, only {self._taken} bytes of it; send it at once",
                status=408,
            ) from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise ClientFault("the body is not framed as HTTP requires") from error
        return whole.getvalue()

    def extend(self, copies: int = PARSED) -> None:
        """Take the memory for copies of a large body. Raises ClientFault if it is too little."""
        if self._taken > LARGE:
            wanted = copies * self._taken
            if wanted > self.budget.free - self.budget.reserve:
                raise self._full()
            self.take(wanted)

    def _add(self, size: int) -> None:
        self._check(self._taken + size)
        if size > self.budget.free - self.budget.reserve:
            raise self._full()
        self.take(size)

    def _check(self, size: int) -> None:
        if size > self.budget.each:
            raise ClientFault(
                f"the body is larger than {self.budget.each} bytes; raise --max-body-bytes", status=413
            )

    def _full(self) -> ClientFault:
        return ClientFault(
            f"the requests being answered use all {self.budget.total} bytes for bodies; try again later, "
            "or raise --max-body-bytes, of which all bodies may take eight times as much, if that is more",
            status=429,
            retry_after=RETRY_AFTER,
        )


# -- answers ---------------------------------------------------------------------------------------------


class Stalled(ConnectionResetError):  # noqa: N818 - handled like a client that left
    """The client did not read for too long, and its connection was reset."""


@dataclass(slots=True, eq=False)
class Outlet(Loan):
    """Writes one answer to its client, which has `seconds` to read a part of a full buffer."""

    response: web.StreamResponse
    _: KW_ONLY
    crowded: Callable[[], bool] = lambda: False  # whether other requests wait for the slot that it holds
    _high: int = CHUNK  # bytes in the connection's buffer above which a write waits
    _looking: asyncio.Handle | None = None  # the next look at a client that must read
    left: int = 0  # bytes that were unread after the last write
    _read_at: float = field(default_factory=time.monotonic)  # when the client was last seen to have read

    def put(self, data: bytes) -> bool:
        """Write `data` now, without a task in between, if it is short and the client has read all before it.

        Else this returns False, and nothing is written. Raises as `write` does.
        """
        if len(data) > MAX_PUT_BYTES or self._unread():
            return False
        with suppress(StopIteration):  # a write that waits for nothing ends at its first step
            self.response.write(data).send(None)
            raise AssertionError("a write into an empty buffer waits for nothing")
        self.left = self._unread()
        if self.left:
            self._read_at = time.monotonic()
        return True

    async def write(self, data: bytes) -> None:
        """Write `data` as soon as the buffer has room. Raises GONE errors, including Stalled."""
        if self._holds_up():
            raise self._cut_off(self.left)
        if self.request.protocol.writing_paused or not self._fits(len(data)):
            await self._in_time(self.response.write(data))
        else:
            await self.response.write(data)
        self.left = self._unread()

    async def end(self) -> None:
        """End the answer. If bytes are `left`, this waits while the client keeps reading."""
        await self._drained()
        await self.response.write_eof()

    async def cut(self) -> None:
        """End the connection within the answer, after all that was written: the answer is incomplete.

        The chunk that ends a body is missing. Bodies of HTTP/1.0 have none: only a reset tells such clients.
        """
        await self._drained()
        if self.request.version < HttpVersion11:
            abort(self.request)
        elif self.request.transport is not None:
            self.request.transport.close()

    async def _drained(self) -> None:
        plug, protocol = self.request.transport, self.request.protocol
        if plug is not None and self._taken:
            plug.set_write_buffer_limits(high=CHUNK)
        while protocol.writing_paused:
            unread = self._unread()
            try:
                async with asyncio.timeout(self.budget.seconds):
                    await self.request.writer.drain()
            except TimeoutError:
                if self._unread() >= unread:
                    raise self._cut_off(unread) from None

    def _holds_up(self) -> bool:
        """Whether the client has read nothing for CROWDED_SECONDS while other requests wait for its slot."""
        unread, now = self._unread(), time.monotonic()
        if not unread or unread < self.left:
            self.left, self._read_at = unread, now
        return now - self._read_at > CROWDED_SECONDS and self.crowded()

    def _fits(self, size: int) -> bool:
        """Whether the buffer has room for `size` bytes, after it has grown if needed and possible."""
        lacking = self._unread() + size + FRAMING - self._high
        if lacking <= 0:
            return True
        taken = self.take(min(-(-lacking // BLOCK) * BLOCK, self.budget.each - self._high))
        plug = self.request.transport
        if taken and plug is not None:
            self._high += taken
            plug.set_write_buffer_limits(high=self._high, low=max(self._high - BLOCK, self._high // 2))
        return taken >= lacking

    def _unread(self) -> int:
        plug = self.request.transport
        return plug.get_write_buffer_size() if plug is not None else 0

    async def _in_time(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self.budget.seconds) as limit:
                # once `writing` has put its bytes into the buffer
                self._looking = asyncio.get_running_loop().call_soon(self._begin_looking, limit)
                await writing
        except TimeoutError:
            raise self._cut_off(self._unread()) from None
        finally:
            if self._looking is not None:
                self._looking.cancel()

    def _begin_looking(self, limit: asyncio.Timeout) -> None:
        self.left = self._unread()
        self._look(limit)

    def _look(self, limit: asyncio.Timeout) -> None:
        """End the wait if the client holds up other requests; else look again."""
        loop = asyncio.get_running_loop()
        if self._holds_up():
            limit.reschedule(loop.time())
        else:
            self._looking = loop.call_later(LOOK_SECONDS, self._look, limit)

    def _cut_off(self, unread: int) -> Stalled:
        """Reset the connection of a client that does not read, and return the error to raise."""
        abort(self.request)
        self.budget.stalled(self.request.remote, unread)
        return Stalled("the client does not read its answer")
