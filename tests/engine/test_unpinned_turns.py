"""Requests on routes without id_slot get their turn, though pinned requests never pause.

A stock engine would put a request without a slot into any that is free, so it is sent only when no pinned one
is on its way to a slot (T1). With more conversations than slots one always is: restored, or just sent.
"""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from engine.dialects import PATHS
from patience import PATIENCE
from slotkeeper.api.head import Api
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.texts import prose

pytestmark = pytest.mark.one_in(8)

SLOTS = 4
PINNED = 24  # conversations, each of which sends its next request as soon as it has an answer
ASKED = 8
SLACK = 1.25  # times as many as were in the queue: more arrive while it is answered


async def asked(client: aiohttp.ClientSession, api: Api, who: int, time: int) -> None:
    """Return prompts and answers of unequal lengths, so that they do not all begin at once."""
    text = (
        f"Client {who}. {prose(1200 + 300 * (who % 5), who)} Question {time}: {prose(40, 100 * who + time)}"
    )
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1 + (who + time) % 3}
    async with client.post(PATHS[api], json=body | {"temperature": 0}) as answer:
        assert answer.status == 200, await answer.text()


async def test_messages_requests_are_answered_in_turn_under_constant_pinned_load(build, tmp_path):
    answered, overtook = 0, list[int]()

    async def asks_on(client: aiohttp.ClientSession, who: int) -> None:
        nonlocal answered
        for time in range(1_000_000):
            await asked(client, Api.CHAT, who, time)
            answered += 1

    async with (
        lab.tiny_engine(Tiny.HYBRID, build, tmp_path, "-np", str(SLOTS)) as engine,
        lab.keeping(engine) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar), connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        async with asyncio.TaskGroup() as group:
            pins = [group.create_task(asks_on(client, who)) for who in range(PINNED)]
            for time in range(ASKED):
                before = answered
                async with asyncio.timeout(PATIENCE):
                    await asked(client, Api.MESSAGES, PINNED, time)
                overtook.append(answered - before)
            for one in pins:
                one.cancel()
    assert sum(overtook) <= SLACK * PINNED * ASKED, overtook
