"""Servers that sidecars share: Redis, S3 servers (moto's, versitygw), and a proxy that injects faults.

Each is a separate process on loopback, and is killed by its process id.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

import pytest

from engine.conftest import wait_until
from patience import PATIENCE
from programs import program
from slotkeeper.engine.child.launch import free_port

BUCKET: Final = "slots"
# The credentials that obstore reads; moto checks none of them.
CREDENTIALS: Final = {
    "AWS_ACCESS_KEY_ID": "AKIDOFTESTS",
    "AWS_SECRET_ACCESS_KEY": "secret-of-tests",
    "AWS_REGION": "us-east-1",
}


@contextmanager
def redis_server(folder: Path, port: int = 0) -> Iterator[str]:
    """Run a Redis that writes nothing to disk, and yield its URL."""
    with running_redis(folder, port or free_port()) as (url, _):
        yield url


@contextmanager
def running_redis(folder: Path, port: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    words = f"--port {port} --bind 127.0.0.1 --save  --appendonly no --dir {folder}".split(" ")
    process = subprocess.Popen([program("redis-server"), *words], stdout=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        yield f"redis://127.0.0.1:{port}/0", process
    finally:
        process.kill()
        process.wait()


@contextmanager
def s3_server(port: int = 0) -> Iterator[str]:
    """Run an S3 server with one bucket, and yield its endpoint."""
    port = port or free_port()
    words = [program("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        endpoint = f"http://127.0.0.1:{port}"
        made = urllib.request.Request(f"{endpoint}/{BUCKET}", data=b"", method="PUT")
        urllib.request.urlopen(made, timeout=PATIENCE).close()
        yield endpoint
    finally:
        process.kill()
        process.wait()


@contextmanager
def versitygw(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """An S3 server that users run, with one bucket: buckets are folders, objects are files in them."""
    path = shutil.which(os.environ.get("VERSITYGW") or "versitygw")
    if path is None:
        pytest.skip("versitygw is not installed here: tests/README.md says how to get it")
    user = {
        "ROOT_ACCESS_KEY": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "ROOT_SECRET_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    words = [path, "--quiet", "--port", f"127.0.0.1:{port}", "posix", str(folder)]
    process = subprocess.Popen(
        words, env=os.environ | user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(port, process)
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    def listens() -> bool:
        assert process.poll() is None, f"it ended with {process.returncode}"
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    wait_until(listens)


class Fault(StrEnum):
    """The proxy's fault."""

    NONE = "none"
    ERROR = "error"  # answers 500
    FULL = "full"  # answers 507 to writes
    EXPIRED = "expired"  # answers 403
    TORN = "torn"  # cuts off the bodies of writes
    CUT = "cut"  # cuts off the bodies of reads
    SLOW = "slow"  # answers after seconds
    GONE = "gone"  # accepts no connection


ANSWERS: Final = {
    Fault.ERROR: b"500 Internal Server Error",
    Fault.FULL: b"507 Insufficient Storage",
    Fault.EXPIRED: b"403 Forbidden",
}
EXPIRED_BODY: Final = b"<Error><Code>ExpiredToken</Code><AWSAccessKeyId>AKIDOFTESTS</AWSAccessKeyId></Error>"
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@dataclass(slots=True)
class FaultyProxy:
    """Passes each request on over its own connection with the injected `fault`, and records the requests."""

    upstream: int
    fault: Fault = Fault.NONE
    only: str = ""  # a part of the paths with the fault; empty for all paths
    seconds: float = 3.0  # delay of SLOW
    port: int = 0
    seen: list[str] = field(default_factory=list)  # method and path of each request
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    before: Callable[[str], None] = lambda _: None  # called for each request before it is passed on

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self.tasks.add(task)
        ends = [writer]
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(reader, writer, ends)
        finally:
            for end in ends:
                end.transport.abort() if self.fault is Fault.TORN and end is not writer else end.close()
            for end in ends:
                with suppress(OSError):
                    await end.wait_closed()
            self.tasks.discard(task)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends: list[asyncio.StreamWriter]
    ) -> None:
        if self.fault is Fault.GONE:
            return
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.partition(b"\r\n")[0].decode()
        self.seen.append(line.rpartition(" ")[0])
        self.before(line)
        length = int(found[1]) if (found := _LENGTH.search(head)) else 0
        fault = self.fault if self.only in line else Fault.NONE
        writes = line.startswith(("PUT", "POST"))
        if fault in ANSWERS and (writes or fault is not Fault.FULL):
            await reader.readexactly(length)
            body = EXPIRED_BODY if fault is Fault.EXPIRED else b""
            size = f"Content-Length: {len(body)}".encode()
            lines = [b"HTTP/1.1 " + ANSWERS[fault], b"Connection: close", size, b"", body]
            writer.write(b"\r\n".join(lines))
            await writer.drain()
            return
        if fault is Fault.SLOW:
            await asyncio.sleep(self.seconds)
        there, onward = await asyncio.open_connection("127.0.0.1", self.upstream)
        ends.append(onward)
        onward.write(_closing(head))
        if fault is Fault.TORN and writes and length > 1:
            onward.write(await reader.readexactly(length // 2))
            await onward.drain()
            return
        await _pass(reader, onward, length)
        answer = await there.readuntil(b"\r\n\r\n")
        answered = int(found[1]) if (found := _LENGTH.search(answer)) else -1
        writer.write(_closing(answer))
        if fault is Fault.CUT and line.startswith("GET") and answered > 1:
            writer.write(await there.readexactly(answered // 2))
            await writer.drain()
            return
        await _pass(there, writer, 0 if line.startswith("HEAD") else None)


def _closing(head: bytes) -> bytes:
    """Return the head of a request or an answer with `Connection: close`."""
    lines = [line for line in head.split(b"\r\n") if line and not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*lines, b"Connection: close", b"", b""])


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int | None) -> None:
    """Pass on this many bytes, or all until the end."""
    left = length
    while left is None or left:
        if not (chunk := await reader.read(min(left or 1 << 16, 1 << 16))):
            break
        writer.write(chunk)
        await writer.drain()
        left = None if left is None else left - len(chunk)
    await writer.drain()


@asynccontextmanager
async def faulty(endpoint: str) -> AsyncIterator[FaultyProxy]:
    proxy = FaultyProxy(int(endpoint.rpartition(":")[2]))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in tuple(proxy.tasks):
            task.cancel()
        await asyncio.gather(*proxy.tasks, return_exceptions=True)
