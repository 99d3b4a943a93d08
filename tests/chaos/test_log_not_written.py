"""A log that cannot be written stops no start, no request and no shutdown: lost lines are counted."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from chaos.fake_answers import PATHS, looks_whole, request_body
from chaos.fake_engine import FakeEngine
from patience import PATIENCE
from slotkeeper.api.head import Api
from slotkeeper.engine.child.launch import free_port

DROPPED = "slotkeeper_log_lines_dropped_total"
REQUESTS = 'slotkeeper_requests_total{outcome="ok",route="chat"}'
NOT_RECORDED = 'slotkeeper_fallbacks_total{reason="record"}'


@asynccontextmanager
async def serving(
    fake: FakeEngine, *more: str, stderr: int | None = None, first: Callable[[], object] | None = None
) -> AsyncIterator[tuple[str, str]]:
    """Run a sidecar in its own process, and check that it ends cleanly with SIGTERM. Yields both ports."""
    data, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    where = ("--upstream", fake.base, "--listen", data, "--admin-listen", admin, "--drain-delay", "0")
    command = (sys.executable, "-m", "slotkeeper", "serve", *where, *more)
    process = await asyncio.create_subprocess_exec(*command, stderr=stderr, preexec_fn=first)
    try:
        async with asyncio.timeout(PATIENCE), aiohttp.ClientSession() as client:
            while not await ready(client, admin):
                assert process.returncode is None, "it did not start"
                await asyncio.sleep(0.02)
            yield data, admin
            process.terminate()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def fill(number: int) -> None:
    """Fill a pipe."""
    os.set_blocking(number, False)
    with suppress(BlockingIOError):
        while True:
            os.write(number, b"x" * 4096)
    os.set_blocking(number, True)


async def ready(client: aiohttp.ClientSession, admin: str) -> bool:
    try:
        async with client.get(f"http://{admin}/readyz") as answer:
            return answer.ok
    except aiohttp.ClientConnectionError:
        return False


async def served(data: str, admin: str, *counted: str) -> dict[str, float]:
    """Return the figures of /metrics after a complete answer, when these are counted too."""
    async with aiohttp.ClientSession() as client:
        asked = request_body(Api.CHAT, stream=True)
        async with client.post(f"http://{data}{PATHS[Api.CHAT]}", json=asked) as answer:
            assert answer.status == 200
            assert looks_whole(Api.CHAT, await answer.read())
        figures: dict[str, float] = {}
        while not all(figures.get(name) for name in (REQUESTS, *counted)):  # counted after the request's end
            async with client.get(f"http://{admin}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
            figures = {name: float(value) for name, _, value in pairs}
    return figures


@pytest.mark.parametrize("last", [2, 0], ids=["standard error", "all standard streams"])
async def test_requests_are_served_if_streams_were_closed_before_the_start(fake, last):
    async with serving(fake, first=lambda: os.closerange(last, 3)) as ports:
        assert (await served(*ports))[DROPPED] >= 2


@pytest.mark.parametrize("gone", [True, False], ids=["is gone", "stops reading"])
async def test_requests_are_served_if_the_reader_of_the_log_does_not_read(fake, gone):
    """As with a terminal that is stopped by Ctrl-S: the pipe fills, and nothing waits for it."""
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "wb") as log:  # noqa: ASYNC230, PTH123 - of a pipe
        if gone:
            reader.close()
        else:
            fill(writing)
        async with serving(fake, stderr=log.fileno()) as ports:
            assert (await served(*ports))[DROPPED] >= 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
async def test_requests_are_served_if_the_disk_of_the_log_is_full(fake):
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        async with serving(fake, stderr=full) as ports:
            assert (await served(*ports))[DROPPED] >= 2
    finally:
        os.close(full)


async def test_requests_are_served_if_no_file_can_be_written(fake, tmp_path):
    """Neither the log nor the recording can be written; a limit of the process imitates a full disk."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    with (tmp_path / "log").open("wb") as log:
        async with serving(
            fake, "--record", str(tmp_path / "traces"), stderr=log.fileno(), first=full
        ) as ports:
            figures = await served(*ports, NOT_RECORDED)  # counted by the recorder's thread
    assert figures[DROPPED] >= 2
    assert figures[NOT_RECORDED] == 1
    assert not (tmp_path / "log").read_bytes()


async def test_a_log_that_can_be_written_is_complete_and_no_line_is_dropped(fake, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        async with serving(fake, stderr=log.fileno()) as ports:
            assert (await served(*ports))[DROPPED] == 0
    said = (tmp_path / "log").read_text("utf-8")
    assert '"event":"request"' in said
    assert '"event":"stopped"' in said
