"""HTTP of the fake engine: how it reads requests, and the frames that it writes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import orjson

LAST_CHUNK: Final = b"0\r\n\r\n"
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class Heard:
    """One request, as it was received."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


async def read_request(reader: asyncio.StreamReader) -> Heard | None:
    try:
        text = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = text.decode("latin-1").split("\r\n")[:-2]
    method, path, _ = first.split(" ")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    return Heard(method, path, headers, await reader.readexactly(length))


def head(status: int, length: int) -> bytes:
    lines = (f"HTTP/1.1 {status} Status", "Content-Type: application/json", f"Content-Length: {length}")
    return "\r\n".join((*lines, "", "")).encode()


def whole(status: int, value: Any) -> bytes:
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return head(status, len(body)) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
