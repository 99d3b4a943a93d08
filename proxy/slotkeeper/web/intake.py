"""Bodies on their way in: how large one may be, how large all of them together."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from slotkeeper.api.errors import ClientFault
from slotkeeper.observe.metrics import ConnectionCut, Metrics

RETRY_AFTER: Final = 5  # seconds
SLOWEST: Final = 16 * 1024  # bytes a second of a body that takes longer than that


class Intake:
    """Room for the bodies of requests, from their first byte to the end of their answers."""

    def __init__(self, *, each: int, total: int, seconds: float, metrics: Metrics) -> None:
        """Bytes; `seconds` for a body to come, and more for a large one."""
        self.each = each
        self.total = total
        self.free = total
        self.seconds = seconds
        self.metrics = metrics

    def body(self, request: web.BaseRequest) -> Body:
        return Body(self, request)


class Body:
    """Of one request. Use as a context manager, which gives its room back."""

    def __init__(self, intake: Intake, request: web.BaseRequest) -> None:
        self._intake = intake
        self._request = request
        self._taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._intake.free += self._taken
        self._taken = 0

    async def read(self) -> bytes | None:
        """All of it; None for a request without one. Raises ClientFault."""
        request = self._request
        if not request.body_exists:
            return None
        self._check(request.content_length or 0)
        if self._intake.free <= 0:
            raise self._full()
        if request.content.is_eof():  # a small one came with its head
            whole = await request.content.read()
            self._take(len(whole))
            return whole
        return await self._read(request)

    async def _read(self, request: web.BaseRequest) -> bytes:
        whole = bytearray()
        until = asyncio.get_running_loop().time() + self._intake.seconds
        try:
            async with asyncio.timeout_at(until) as limit:
                while piece := await request.content.readany():
                    self._take(len(piece))
                    whole += piece
                    limit.reschedule(until + self._taken / SLOWEST)
        except TimeoutError as error:
            self._intake.metrics.cut(ConnectionCut.BODY)
            raise ClientFault(
                f"the body did not come in time: {self._taken} bytes of it; send it at once, or raise "
                "--body-timeout",
                status=408,
            ) from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise ClientFault("the body is not framed as HTTP says") from error
        return bytes(whole)

    def _take(self, size: int) -> None:
        self._check(self._taken + size)
        if size > self._intake.free:
            raise self._full()
        self._taken += size
        self._intake.free -= size

    def _check(self, size: int) -> None:
        if size > self._intake.each:
            raise ClientFault(
                f"the body is larger than {self._intake.each} bytes; raise --max-body-bytes", status=413
            )

    def _full(self) -> ClientFault:
        return ClientFault(
            f"the requests that are being answered hold all of {self._intake.total} bytes of bodies; come "
            "again, or raise --all-bodies-bytes",
            status=429,
            retry_after=RETRY_AFTER,
        )
