"""A client and a relay that only read clocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from slotkeeper.bench.rivals import listens

START_SECONDS: Final = 10.0
CHUNK: Final = 1 << 20
LAST_CHUNK: Final = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """One request, by the clock of this process (seconds)."""

    sent: float  # just before the first byte was sent
    first: float  # when the first byte of the answer came
    last: float  # when the answer was complete
    answer: bytes

    @property
    def ok(self) -> bool:
        return self.answer.split(b" ", 2)[1:2] == [b"200"]

    @property
    def body(self) -> bytes:
        head, _, rest = self.answer.partition(b"\r\n\r\n")
        return _joined(rest) if b"transfer-encoding: chunked" in head.lower() else rest


async def post(base: str, path: str, body: bytes) -> Took:
    """Send on a fresh connection and read until it closes."""
    address = urlsplit(base)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=CHUNK)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    sent = time.perf_counter()
    writer.write(head.encode() + body)
    answer = await reader.read(CHUNK)
    first = time.perf_counter()
    answer += await reader.read()
    last = time.perf_counter()
    writer.close()
    return Took(sent=sent, first=first, last=last, answer=answer)


@dataclass(slots=True)
class Line:
    """A client's connection that is reused while the server keeps it, as SDKs do."""

    base: str
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> Took:
        """Send, and read a chunked answer to its last chunk, or any other until the connection closes."""
        address = urlsplit(self.base)
        if self.streams is None or self.streams[0].at_eof():
            self.streams = await asyncio.open_connection(address.hostname, address.port, limit=CHUNK)
        reader, writer = self.streams
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        sent = time.perf_counter()
        writer.write(head.encode() + body)
        answer = await reader.read(CHUNK)
        first = time.perf_counter()
        while not answer.endswith(LAST_CHUNK) and (more := await reader.read(CHUNK)):
            answer += more
        return Took(sent=sent, first=first, last=time.perf_counter(), answer=answer)

    def close(self) -> None:
        if self.streams:
            self.streams[1].close()


@dataclass(slots=True, kw_only=True)
class Relay:
    """A relay that passes every byte on, and records when each request had arrived completely."""

    base: str
    arrivals: list[tuple[str, float]] = field(default_factory=list)  # path, time

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: str) -> None:
        address = urlsplit(upstream)
        to_engine = await asyncio.open_connection(address.hostname, address.port, limit=CHUNK)
        with suppress(ConnectionError):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, to_engine[1]))
                group.create_task(_copy(to_engine[0], writer))
        writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on each request of the connection, and record when it had arrived completely."""
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(head)
                if length := _length(head):
                    writer.write(await reader.readexactly(length))
                self.arrivals.append((head.split(b" ", 2)[1].decode(), time.perf_counter()))
        writer.write_eof()


def _joined(chunks: bytes) -> bytes:
    """Return the body that was sent in these chunks."""
    body = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        length = int(size, 16)
        body, chunks = body + chunks[:length], chunks[length + 2 :]
    return body


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK):
        writer.write(chunk)
        await writer.drain()
    writer.close()  # the engine has finished; some clients wait for the connection to close


@asynccontextmanager
async def relay(upstream: str) -> AsyncIterator[Relay]:
    """Run a relay in front of `upstream` while the block runs."""
    found = Relay(base="")
    server = await asyncio.start_server(
        lambda reader, writer: found.carry(reader, writer, upstream), "127.0.0.1", 0, limit=64 << 20
    )
    found.base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()


async def listening(port: int) -> None:
    """Wait until a server listens there. Raises TimeoutError."""
    async with asyncio.timeout(START_SECONDS):
        while not await listens(port):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)
