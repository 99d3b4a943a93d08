"""Fewer requests at work than slots, on the real engine: one computes at a time, three contexts are kept."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from engine.test_engine_waits import Chat, asked
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny

pytestmark = pytest.mark.one_in(4)

CLIENTS = 3
TURNS = 3
SLOTS = ("-np", str(CLIENTS))


async def busiest(client: aiohttp.ClientSession) -> int:
    """Look at the engine until cancelled; returns the most slots that were at work at one time."""
    most = 0
    try:
        while True:
            async with client.get("/slots") as slots:
                most = max(most, sum(slot["is_processing"] for slot in await slots.json()))
    except asyncio.CancelledError:
        return most


@pytest.mark.parametrize("limit", [1, 0])
async def test_one_request_runs_at_a_time_and_every_slot_keeps_its_context(build, tmp_path, limit):
    opening = lab.tiny_engine(Tiny.HYBRID, build, tmp_path, *SLOTS, context_tokens=65536)
    async with (
        opening as engine,
        lab.keeping(engine, max_running=limit, idle_tokens=0) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar)) as client,
        aiohttp.ClientSession(engine.base) as direct,
    ):
        looking = asyncio.get_running_loop().create_task(busiest(direct))
        chats = [Chat(f"Client {n}") for n in range(CLIENTS)]
        reused = []
        for _ in range(TURNS):
            answers = await asyncio.gather(
                *(asked(client, chat.asks(max_tokens=256, ignore_eos=True)) for chat in chats)
            )
            for chat, (status, doc) in zip(chats, answers, strict=True):
                assert status == 200
                chat.hears(doc["choices"][0]["message"]["content"])
            reused = [doc["usage"]["prompt_tokens_details"]["cached_tokens"] for _, doc in answers]
        looking.cancel()
        most = await looking
        assert most == 1 if limit else most > 1
        assert min(reused) > 500, "each client's last turn goes on in its own slot"
