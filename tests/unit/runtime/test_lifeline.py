"""A connection that ends when the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from patience import PATIENCE
from slotkeeper.runtime.tasks import lifeline


@asynccontextmanager
async def lifeline_to(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any], ended: Callable[[], Awaitable[bool]]
) -> AsyncIterator[None]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    line = asyncio.get_running_loop().create_task(lifeline(f"http://127.0.0.1:{port}", ended))
    async with asyncio.timeout(PATIENCE):
        yield
    line.cancel()
    server.close()


async def test_a_lifeline_reports_that_the_other_end_closed():
    ends = asyncio.Event()
    talks: list[asyncio.StreamWriter] = []

    async def ended() -> bool:
        ends.set()
        return True

    async with lifeline_to(lambda _, writer: talks.append(writer), ended):
        while not talks:
            await asyncio.sleep(0.01)
        assert not ends.is_set()
        talks[0].transport.abort()
        await ends.wait()


async def lines_that_are_cut_at_once(at_least: int, is_another: Callable[[int], bool]) -> int:
    """Return the number of connections half a second after the first `at_least`.

    `is_another`: whether the engine is a new one after so many.
    """
    lines, enough = 0, asyncio.Event()

    async def cut(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lines
        lines += 1
        if lines == at_least:
            enough.set()
        writer.transport.abort()

    async def ended() -> bool:
        return is_another(lines)

    async with lifeline_to(cut, ended):
        await enough.wait()
        await asyncio.sleep(0.5)
    return lines


async def test_a_connection_that_is_always_closed_at_once_is_not_retried_in_a_loop():
    """A load balancer without a backend closes connections like this."""
    assert await lines_that_are_cut_at_once(1, lambda _: False) == 1


async def test_an_engine_that_restarts_often_is_connected_to_at_once():
    """The second restart must not be missed because the first connection was short."""
    assert await lines_that_are_cut_at_once(5, lambda lines: lines < 5) == 5


async def test_a_lifeline_waits_for_an_engine_that_is_down():
    ends: list[bool] = []

    async def ended() -> bool:
        ends.append(True)
        return True

    line = asyncio.get_running_loop().create_task(lifeline("http://127.0.0.1:9", ended))
    await asyncio.sleep(0.3)
    assert not line.done()
    assert not ends
    line.cancel()
