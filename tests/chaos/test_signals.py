"""SIGTERM and SIGINT, as from an orchestrator and from a person: running answers end complete."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import orjson
import pytest

from chaos.conftest import settings
from chaos.fake_answers import PATHS, WORDS, looks_whole, request_body
from chaos.fake_engine import FakeEngine, Fault
from chaos.raw import Wire, dial, until
from commands.process import NOBODY, SLOTKEEPER, environ
from patience import PATIENCE
from slotkeeper.api.head import Api
from slotkeeper.app import running
from slotkeeper.engine.child.launch import free_port

pytestmark = pytest.mark.one_in(8)

CHAT = PATHS[Api.CHAT]
UNPROBED = """
import runpy
from slotkeeper.settings import Settings
Settings.probe = False
runpy.run_module("slotkeeper", run_name="__main__")
"""
HASTY = """
import os, runpy, signal
from slotkeeper.cli import starting
starting.patience_of = lambda settings: lambda answers: os.kill(os.getpid(), signal.SIGINT)
runpy.run_module("slotkeeper", run_name="__main__")
"""
BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@dataclass(frozen=True, slots=True)
class Served:
    """A sidecar in its own process."""

    process: Process
    data: str
    admin: str

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()


@asynccontextmanager
async def serving(fake: FakeEngine, *more: str, program: str = "") -> AsyncIterator[Served]:
    """Run `slotkeeper serve`, by the text of a Python program if there is one."""
    data, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    words = ("--upstream", fake.base, "--listen", data, "--admin-listen", admin, *more)
    run = ("-c", program) if program else ("-m", "slotkeeper")
    command = (sys.executable, *run, "serve", *words)
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
    try:
        await becomes(admin, "/readyz", 200)
        yield Served(process, data, admin)
    finally:
        if process.returncode is None:
            process.kill()
        _, errors = await process.communicate()
        assert b"Traceback" not in errors, errors.decode()
        assert not re.search(rb"never (awaited|retrieved)|Unclosed", errors), errors.decode()


def patient(fake: FakeEngine) -> AbstractAsyncContextManager[Served]:
    """Run a sidecar that waits up to an hour for running answers."""
    return serving(fake, "--drain-delay", "0", "--drain-timeout", "3600", program=UNPROBED)


async def status(address: str, path: str) -> int:
    """Return the status; 0 if nothing answers."""
    try:
        async with dial(address) as wire:
            await wire.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            return (await wire.head()).status
    except (ConnectionError, asyncio.IncompleteReadError):
        return 0


async def becomes(address: str, path: str, wanted: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while await status(address, path) != wanted:
            await asyncio.sleep(0.02)


async def begun(fake: FakeEngine, wire: Wire) -> AsyncIterator[bytes]:
    """Return a stream that has its first token, and continues with each release of `fake.go`."""
    fake.script.append(Fault.TRICKLE)
    fake.go.release()
    await wire.post(CHAT, request_body(Api.CHAT, stream=True))
    await wire.head()
    chunks = wire.chunks()
    assert b"one" in await anext(chunks)
    return chunks


@BOTH
async def test_at_a_signal_a_running_stream_ends_complete_and_no_new_connection_is_accepted(fake, number):
    async with serving(fake, "--drain-delay", "0.5") as served, dial(served.data) as wire:
        chunks = await begun(fake, wire)
        served.process.send_signal(number)
        await becomes(served.data, "/health", 0)
        assert served.process.returncode is None, "the sidecar waits for the stream"
        for _ in range(len(WORDS) + 2):
            fake.go.release()
        assert looks_whole(Api.CHAT, b"".join([chunk async for chunk in chunks]))
        assert await served.ended() == 0
    assert not fake.left


async def test_during_the_drain_delay_requests_are_served_and_health_is_503(fake):
    async with serving(fake, "--drain-delay", "3600", program=UNPROBED) as served:
        served.process.terminate()
        await becomes(served.admin, "/readyz", 503)
        assert await status(served.data, "/v1/models") == 200
        assert await status(served.data, "/health") == 503, "so that a gateway sends no new requests"
        served.process.terminate()
        assert await served.ended() == 0


@BOTH
async def test_a_second_signal_ends_the_sidecar_at_once(fake, number):
    async with patient(fake) as served, dial(served.data) as wire:
        await begun(fake, wire)
        served.process.send_signal(number)
        await becomes(served.data, "/health", 0)
        served.process.send_signal(number)
        assert await served.ended() == 0
        rest, _ = await wire.rest()
        assert not looks_whole(Api.CHAT, rest)
    await until(lambda: fake.left, "the engine sees that the client left")


async def test_a_second_signal_before_the_port_waits_for_its_answers_ends_the_sidecar_at_once(fake):
    """HASTY sends it when a person is told of it, which is before the drain begins."""
    hasty = serving(fake, "--drain-timeout", "3600", program=HASTY)
    async with hasty as served, dial(served.data) as wire:
        await begun(fake, wire)
        served.process.send_signal(signal.SIGINT)
        assert await served.ended() == 0
        rest, _ = await wire.rest()
        assert not looks_whole(Api.CHAT, rest)


async def test_a_stream_that_does_not_end_within_the_drain_timeout_is_cut_off(fake):
    hasty = serving(fake, "--drain-delay", "0", "--drain-timeout", "0.5")
    async with hasty as served, dial(served.data) as wire:
        await begun(fake, wire)
        served.process.terminate()
        assert await served.ended() == 0
        rest, _ = await wire.rest()
        assert not looks_whole(Api.CHAT, rest)


async def test_an_http_1_0_client_sees_that_its_stream_was_cut_off(fake):
    """In HTTP/1.0 the end of the connection ends a body, so only a reset shows that it is incomplete."""
    fake.script.append(Fault.TRICKLE)
    fake.go.release()
    body = orjson.dumps(request_body(Api.CHAT, stream=True))
    async with patient(fake) as served, dial(served.data) as wire:
        await wire.send(f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await wire.head()
        served.process.terminate()
        await becomes(served.data, "/health", 0)
        served.process.terminate()
        assert await served.ended() == 0
        _, reset = await wire.rest()
    assert reset


@pytest.mark.parametrize("turns", range(4))
async def test_a_connection_accepted_at_the_moment_of_the_drain_does_not_delay_it(fake, turns):
    """It has sent no request. `turns`: rounds of the event loop between its accept and the drain."""
    loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()
    with theirs:
        async with running(settings(fake.base, drain_timeout=3600)) as sidecar:
            ours.setblocking(False)
            accepted = loop.create_task(loop.connect_accepted_socket(sidecar._data.server, ours))
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(PATIENCE):
                await sidecar.drain(delay=0)
            await accepted


async def test_idle_connections_do_not_delay_the_end(fake):
    async with patient(fake) as served, dial(served.data) as wire:
        await wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await wire.body(await wire.head())
        served.process.terminate()
        assert await served.ended() == 0


async def test_sighup_without_files_to_read_again_ends_nothing(fake):
    async with serving(fake) as served:
        served.process.send_signal(signal.SIGHUP)
        served.process.send_signal(signal.SIGHUP)
        assert await status(served.data, "/v1/models") == 200
        assert b"nothing_to_reload" in await anext(lines_with(served, b"SIGHUP"))
        assert await status(served.admin, "/readyz") == 200
        served.process.terminate()
        assert await served.ended() == 0


async def lines_with(served: Served, word: bytes) -> AsyncIterator[bytes]:
    async with asyncio.timeout(PATIENCE):
        while line := await served.process.stderr.readline():
            if word in line:
                yield line


HANDLED: Final = b"handled\n"  # our first line has run: from then on an interrupt ends the process
TELLING: Final = f"""
import signal, sys
from slotkeeper.__main__ import run

handle = signal.signal

def telling(*arguments):
    signal.signal = handle
    handle(*arguments)
    sys.stderr.buffer.write({HANDLED!r})
    sys.stderr.flush()

signal.signal = telling
sys.exit(run())
"""


@contextmanager
def interruptible(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `slotkeeper` so that interrupts reach it, even if a shell has us ignore them, as in the background.

    It has just written HANDLED. Before that line Python would print a traceback.
    """
    process = subprocess.Popen(
        (sys.executable, "-c", TELLING, *words),
        stderr=subprocess.PIPE,
        env=environ(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - it has one thread
    )
    with process:
        try:
            assert process.stderr.readline() == HANDLED
            yield process
        finally:
            process.kill()


def test_an_interrupt_at_any_moment_of_a_start_prints_no_traceback():
    """The moments are parts of the time that a start takes on this machine now."""
    words = ("serve", "--upstream", NOBODY, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
    with interruptible(words) as process:
        begun = time.monotonic()
        for line in process.stderr:
            if b"listening" in line:
                break
        took = time.monotonic() - begun
    for part in (0.0, 0.3, 0.6, 0.9, 1.0):
        with interruptible(words) as process:
            time.sleep(part * took)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode in {0, -signal.SIGINT}, part
        assert b"Traceback" not in errors, errors.decode()
        assert b"never awaited" not in errors, errors.decode()


async def test_a_person_who_presses_ctrl_c_is_told_what_a_second_one_does(fake):
    """The sidecar runs on a terminal, as for a person; nothing else tells the two apart."""
    ours, theirs = pty.openpty()
    data, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    words = ("serve", "--upstream", fake.base, "--listen", data, "--admin-listen", admin)
    process = await asyncio.create_subprocess_exec(*SLOTKEEPER, *words, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""

    def read() -> None:
        nonlocal shown
        with suppress(OSError):  # the terminal is closed
            shown += os.read(ours, 65536)

    asyncio.get_running_loop().add_reader(ours, read)
    try:
        await becomes(admin, "/readyz", 200)
        async with dial(data) as wire:
            await begun(fake, wire)
            process.send_signal(signal.SIGINT)
            await until(lambda: b"Press Ctrl-C again to stop now" in shown, "it is said")
            assert b"1 answer gets up to 300 s" in shown
            assert process.returncode is None
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(PATIENCE):
                assert await process.wait() == 0
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert b"Traceback" not in shown
