"""A client made of a socket, for what HTTP clients do not do: stall, disconnect, speak HTTP/1.0."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from patience import PATIENCE


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: list[tuple[str, str]]  # with duplicates, in order

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def __getitem__(self, name: str) -> str:
        (value,) = self.all(name)
        return value


class Wire:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        lines = {"Host": "x", "Content-Type": "application/json", **(headers or {})}
        lines["Content-Length"] = str(len(data))
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        await self.send(f"POST {path} HTTP/1.1\r\n{text}\r\n".encode("latin-1") + data)

    async def head(self) -> Head:
        async with asyncio.timeout(PATIENCE):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [line.partition(":") for line in lines[1:-2]]
        return Head(int(lines[0].split(" ")[1]), [(name, value.strip()) for name, _, value in pairs])

    async def body(self, head: Head) -> bytes:
        """Return the whole body. Raises IncompleteReadError or ConnectionError if it is cut short."""
        async with asyncio.timeout(PATIENCE):
            if head.all("Transfer-Encoding"):
                return b"".join([chunk async for chunk in self.chunks()])
            if head.all("Content-Length"):
                return await self.reader.readexactly(int(head["Content-Length"]))
            return await self.reader.read()

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def cut(self) -> bytes:
        """Return the bytes of a chunked body whose connection ends within it; fails if it is complete."""
        got = b""
        try:
            async with asyncio.timeout(PATIENCE):
                async for piece in self.chunks():
                    got += piece
        except (asyncio.IncompleteReadError, ConnectionError):
            return got
        raise AssertionError(f"the body is complete: {got[-200:]!r}")

    async def rest(self) -> tuple[bytes, bool]:
        """Return all bytes to the end of the connection, and whether a reset ended it."""
        data = b""
        async with asyncio.timeout(PATIENCE):
            try:
                while piece := await self.reader.read(65536):
                    data += piece
            except ConnectionError:
                return data, True
        return data, False

    def leave(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def dial(address: str, *, window: int | None = None, source: str | None = None) -> AsyncIterator[Wire]:
    """Connect to host:port, from `source`; `window` makes the receive buffer small."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    plug = socket.socket()
    if window is not None:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    if source is not None:
        plug.bind((source, 0))
    plug.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(plug, (host, int(port)))
    except OSError:
        plug.close()
        raise
    reader, writer = await asyncio.open_connection(sock=plug, limit=window or 2**16)
    wire = Wire(reader, writer)
    try:
        yield wire
    finally:
        wire.leave()


async def cut_short(answer: aiohttp.ClientResponse) -> bytes:
    """Return what can be read of a stream that the server cuts off; fails if the stream ends cleanly.

    When aiohttp sees the end, it drops the bytes that were not read yet: the error event may be missing.
    """
    got = b""
    try:
        async with asyncio.timeout(PATIENCE):
            while piece := await answer.content.readany():
                got += piece
    except aiohttp.ClientPayloadError:
        return got
    raise AssertionError(f"the stream ends cleanly: {got[-200:]!r}")


async def until(true: Callable[[], object], why: str = "") -> None:
    """Wait for a condition by polling."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not true():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not so within {PATIENCE:g} s: {why}") from None


async def until_async(true: Callable[[], Awaitable[object]], why: str = "") -> None:
    """Wait for a condition whose check takes a request."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not await true():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not so within {PATIENCE:g} s: {why}") from None
