"""A tiny llama-server made of raw sockets: it answers plausibly, and fails on command.

`script` has the faults of the next generating requests, one entry each; without an entry there is no fault.
`broken` maps control routes to the status with which they fail.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self

from chaos.fake_answers import WORDS, answer_body, answer_events
from chaos.fake_control import FakeControl, error, loads
from chaos.fake_http import LAST_CHUNK, STREAM_HEAD, Heard, chunk, head, read_request, whole
from slotkeeper.api.head import Api, classify
from slotkeeper.scheduler.types import EngineId

TICK: Final = 0.005
FLOOD_BYTES: Final = 512 * 2**20
PIECE: Final = b"data: " + b"x" * 65536 + b"\n\n"


class Fault(StrEnum):
    NONE = "none"
    HANG = "hang"  # accepts the request, and sends nothing until the client disconnects
    DIE_BEFORE_HEAD = "die_before_head"
    DIE_IN_BODY = "die_in_body"  # half of a body with Content-Length
    DIE_IN_CHUNKS = "die_in_chunks"  # half of a chunked body
    DIE_IN_STREAM = "die_in_stream"  # between two events
    CUT_A_CHUNK = "cut_a_chunk"  # within one chunk
    LOADING = "loading"
    TRICKLE = "trickle"  # one event for each `go`
    FLOOD = "flood"  # far more bytes than any buffer holds
    CUSTOM = "custom"  # the bytes of `custom`, headers and all
    CUSTOM_AND_END = "custom_and_end"  # the same, and then closes the connection


@dataclass(frozen=True, slots=True)
class Job:
    """One generating request that runs."""

    api: Api
    heard: Heard
    slot: int
    tokens: int
    fault: Fault
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def events(self) -> list[bytes]:
        return answer_events(self.api, self.tokens, self.slot)

    def bytes(self) -> bytes:
        """Return the answer, or what its fault leaves of it."""
        body = answer_body(self.api, self.tokens, self.slot)
        match self.fault:
            case Fault.LOADING:
                return whole(503, error(503))
            case Fault.DIE_IN_BODY:
                return head(200, len(body)) + body[: len(body) // 2]
            case Fault.DIE_IN_CHUNKS:
                plain = STREAM_HEAD.replace(b"text/event-stream", b"application/json")
                return plain + chunk(body[: len(body) // 2])
            case Fault.DIE_IN_STREAM:
                return STREAM_HEAD + b"".join(map(chunk, self.events[:2]))
            case Fault.CUT_A_CHUNK:
                return STREAM_HEAD + chunk(self.events[0]) + chunk(self.events[1])[:-9]
            case _ if loads(self.heard.body).get("stream"):
                return STREAM_HEAD + b"".join(map(chunk, self.events)) + LAST_CHUNK
            case _:
                return whole(200, body)


class Hangup(Exception):  # noqa: N818 - an order, not an error
    """Close this connection without another byte."""


class FakeEngine:
    """Use as an async context manager; `base` is its URL."""

    def __init__(self, slots: int = 2) -> None:
        self.script: deque[Fault] = deque()
        self.broken: dict[str, int] = {}
        self.custom = b""
        # generating requests that began; a request that is sent twice is there twice
        self.ran: list[Heard] = []
        self.heard: list[Heard] = []  # all other requests
        self.control = FakeControl([None] * slots, [0] * slots)
        self.collisions = 0  # a pinned request came to a busy slot (engine.md T1)
        self.left = 0  # clients that disconnected during an answer
        self.sent = 0  # bytes of a flood that were sent
        self.go = asyncio.Semaphore(0)
        self._writers: set[asyncio.StreamWriter] = set()
        self._idle: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def base(self) -> EngineId:
        return EngineId(f"http://127.0.0.1:{self.port}")

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**26)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()

    def close_idle(self) -> None:
        """Close every connection on which no request runs, as llama-server does after five seconds."""
        for writer in tuple(self._idle):
            writer.close()

    async def die(self) -> None:
        """Stop as a killed process does; the port refuses connections from now on."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        while self._writers:
            await asyncio.sleep(TICK)

    # -- HTTP --------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            self._idle.add(writer)
            while heard := await read_request(reader):
                self._idle.discard(writer)
                await self._answer(heard, reader, writer)
                self._idle.add(writer)
        except (Hangup, ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            self._idle.discard(writer)

    async def _answer(self, heard: Heard, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = heard.path.partition("?")[0]
        api = classify(heard.method, path)
        if api.generates and path not in self.broken:
            self.ran.append(heard)
            fault = self.script.popleft() if self.script else Fault.NONE
            slot = await self._enter(loads(heard.body).get("id_slot"))
            tokens = self.control.prompt_tokens(heard.body)
            try:
                await self._generate(Job(api, heard, slot, tokens, fault, reader, writer))
                self.control.held[slot] = tokens + len(WORDS) - 1
            finally:
                self.control.slots[slot] = None
            return
        self.heard.append(heard)
        status = self.broken.get(path, 200)
        value = self.control.answer(path, heard.body) if status == 200 else error(status)
        writer.write(whole(404, error(404)) if value is None else whole(status, value))
        await writer.drain()

    async def _enter(self, wanted: Any) -> int:
        slots = self.control.slots
        if isinstance(wanted, int) and slots[wanted] is not None:
            self.collisions += 1
        while True:
            free = [slot for slot, task in enumerate(slots) if task is None]
            if chosen := [slot for slot in free if wanted in (None, slot)]:
                slots[chosen[0]] = len(self.ran)
                return chosen[0]
            await asyncio.sleep(TICK)

    # -- generation --------------------------------------------------------------------------------

    async def _generate(self, job: Job) -> None:
        match job.fault:
            case Fault.HANG:
                await self._wait(job, lambda: False)
            case Fault.DIE_BEFORE_HEAD:
                raise Hangup
            case Fault.FLOOD:
                await self._flood(job)
            case Fault.TRICKLE:
                await self._trickle(job)
            case Fault.CUSTOM:
                job.writer.write(self.custom)
            case Fault.CUSTOM_AND_END:
                self.control.slots[job.slot] = None  # before its client can know of it
                job.writer.write(self.custom)
                job.writer.close()
                await job.writer.wait_closed()
                raise Hangup
            case _:
                job.writer.write(job.bytes())
        await job.writer.drain()
        if job.fault.startswith(("die", "cut")):
            await asyncio.sleep(TICK)  # what was written is sent before the connection ends
            raise Hangup

    async def _trickle(self, job: Job) -> None:
        job.writer.write(STREAM_HEAD)
        for event in job.events:
            await self._wait(job, lambda: not self.go.locked())
            await self.go.acquire()
            job.writer.write(chunk(event))
            await job.writer.drain()
        job.writer.write(LAST_CHUNK)

    async def _flood(self, job: Job) -> None:
        job.writer.write(STREAM_HEAD)
        while self.sent < FLOOD_BYTES:
            job.writer.write(chunk(PIECE))
            await job.writer.drain()
            self.sent += len(PIECE)

    async def _wait(self, job: Job, done: Callable[[], bool]) -> None:
        while not done():
            if job.reader.at_eof():
                self.left += 1
                raise Hangup
            await asyncio.sleep(TICK)
