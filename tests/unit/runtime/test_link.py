"""The watch over an engine."""

from __future__ import annotations

import asyncio

import pytest

from patience import PATIENCE
from slotkeeper.core.types import EngineId
from slotkeeper.engine.client import Health
from slotkeeper.runtime import link as link_module
from slotkeeper.runtime.link import EngineLink

NOBODY = EngineId("http://127.0.0.1:9")


class Told:
    """An engine whose health is what a test says."""

    def __init__(self) -> None:
        self.said = Health.OK
        self.asked = 0

    async def health(self, **_: object) -> Health:
        self.asked += 1
        return self.said

    async def props(self, **_: object) -> dict[str, str]:
        return {"media_marker": "one"}


@pytest.mark.parametrize(
    ("said", "silence", "lost"),
    [
        (Health.SILENT, 60.0, False),  # a busy machine
        (Health.SILENT, 0.0, True),  # it was silent for too long
        (Health.DOWN, 60.0, True),  # refused, or the connection broke
    ],
)
async def test_an_engine_that_is_slow_to_answer_is_not_lost(said, silence, lost, monkeypatch):
    monkeypatch.setattr(link_module, "SILENCE", silence)
    link, gone, engine = EngineLink(NOBODY, api_key=None), [], Told()
    await link.client.close()
    monkeypatch.setattr(link, "client", engine)
    link.up, link.process = True, "one"
    watch = asyncio.get_running_loop().create_task(link.watch(lambda _: None, gone.append))
    async with asyncio.timeout(PATIENCE):
        while engine.asked < 1:
            await asyncio.sleep(0)
        engine.said, before = said, engine.asked
        while engine.asked < before + 2:
            link.kick()
            await asyncio.sleep(0)
    watch.cancel()
    await asyncio.wait([watch], timeout=PATIENCE)
    assert bool(gone) is lost
    assert link.up is not lost


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
