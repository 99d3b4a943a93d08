"""The watch over an engine."""

from __future__ import annotations

import asyncio

import pytest

from patience import PATIENCE
from slotkeeper.core.types import EngineId
from slotkeeper.runtime.link import EngineLink

NOBODY = EngineId("http://127.0.0.1:9")


@pytest.mark.parametrize("turns", range(6))
async def test_a_watch_that_is_cancelled_while_it_is_kicked_ends(turns):
    """As at the end of a sidecar whose last answer broke off."""
    link = EngineLink(NOBODY, api_key=None)
    watch = asyncio.get_running_loop().create_task(link.watch(lambda _: None, lambda _: None))
    await asyncio.sleep(0.05)  # it waits for the next look
    link.kick()
    for _ in range(turns):  # of the loop, between its waking up and being cancelled
        await asyncio.sleep(0)
    watch.cancel()
    ended, _ = await asyncio.wait([watch], timeout=PATIENCE)
    watch.cancel()
    await link.client.close()
    assert ended
