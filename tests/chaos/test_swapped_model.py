"""A model of llama-swap: a request whose path names it gets a slot, and an answer may end in the middle."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
import pytest

from chaos.conftest import settings
from chaos.fake_answers import PATHS, WORDS, request_body
from chaos.fake_engine import FakeEngine, Fault
from chaos.fake_http import LAST_CHUNK, STREAM_HEAD, chunk
from chaos.raw import dial, until
from slotkeeper.api.answers.answer import SseSplitter
from slotkeeper.api.head import Api
from slotkeeper.app import Sidecar, running
from slotkeeper.exchange.exchange import BRIEF_BYTES
from slotkeeper.scheduler.types import EngineId
from swap_like import SwapLike, Swapped, serving

CHAT = PATHS[Api.CHAT]


@pytest.fixture
async def base(fake: FakeEngine) -> AsyncIterator[str]:
    """Return the URL of a llama-swap whose only model is served by the fake engine."""

    async def start() -> str:
        return fake.base

    async def stop() -> None:
        """The engine stays until the test ends."""

    async with serving(SwapLike({"m": Swapped(start=start, stop=stop)})) as base:
        yield base


@pytest.fixture
async def sidecar(base: str) -> AsyncIterator[Sidecar]:
    async with running(settings(base, drain_timeout=1.0)) as sidecar:
        await until(lambda: EngineId(f"{base}#m") in sidecar.driver.links, "the model is listed")
        yield sidecar


@pytest.mark.parametrize(("asked", "slot"), [({}, "1"), ({"id_slot": 0}, "0")], ids=["any slot", "busy slot"])
async def test_a_request_to_a_path_with_a_model_gets_a_free_slot(fake, sidecar, data, asked, slot):
    fake.script.append(Fault.TRICKLE)
    async with dial(data) as one, dial(data) as other:
        await one.post(CHAT, request_body(Api.CHAT, stream=True, model="m"))
        await until(lambda: fake.ran, "the first one runs")
        await other.post(f"/upstream/m{CHAT}", request_body(Api.CHAT, stream=False, text="Other", **asked))
        await until(lambda: len(fake.ran) == 2 or sidecar.driver.placement.queued, "the other has come")
        for _ in range(len(WORDS) + 3):
            fake.go.release()
        head = await other.head()
        await one.body(await one.head())
    assert fake.collisions == 0
    assert (head.status, head.all("X-Slotkeeper-Slot")) == (200, [slot])


async def test_a_slot_action_on_a_path_with_a_model_waits_for_its_slot(fake, sidecar, data):
    def erased() -> bool:
        return any(heard.path == "/slots/0?action=erase" for heard in fake.heard)

    fake.script.append(Fault.TRICKLE)
    async with dial(data) as one, dial(data) as other:
        await one.post(CHAT, request_body(Api.CHAT, stream=True, model="m"))
        await until(lambda: fake.ran, "the first one runs")
        await other.post("/upstream/m/slots/0?action=erase", {})
        await until(lambda: erased() or sidecar.driver.placement.queued, "the action has come")
        assert not erased()
        for _ in range(len(WORDS) + 3):
            fake.go.release()
        await other.head()
    assert erased()


async def test_an_error_does_not_continue_an_event_that_was_cut(fake, sidecar, data):
    """A router ends a stream normally if its engine dies. Nothing shows that but the missing end."""
    fake.script.append(Fault.CUSTOM)
    fake.custom = STREAM_HEAD + chunk(b'data: {"choices":[{"del') + LAST_CHUNK
    async with dial(data) as wire:
        await wire.post(CHAT, request_body(Api.CHAT, stream=True, model="m", text="Count. " * BRIEF_BYTES))
        stream = await wire.body(await wire.head())
    *_, last = SseSplitter().feed(stream)
    assert "broke off" in orjson.loads(last.data)["error"]["message"]
