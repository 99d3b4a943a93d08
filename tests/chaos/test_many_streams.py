"""Two hundred streams on four slots, a quarter of them abandoned: all others get complete answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import aiohttp
import pytest

from chaos.conftest import ready, settings
from chaos.raw import until
from slotkeeper.app import Sidecar, running
from slotkeeper.exchange.door import digest_of
from slotkeeper.scheduler.types import ClientId

pytestmark = pytest.mark.alternating

STREAMS, LEAVERS, SLOTS = 200, 50, 4
SMALL = ["-np", str(SLOTS), "-c", "16384", "-t", "1"]
CROWD = 50  # of a hundred requests: on a busy machine many end before the last one has come
CHAT = "/v1/chat/completions"
NEWCOMER = ClientId(digest_of("127.0.0.2"))


def body(number: int, max_tokens: int = 6) -> dict[str, object]:
    text = f"Story {number % 23} of {number}: " + "the keeper lights the lamp. " * (number % 7 * 12)
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "stream": True, "max_tokens": max_tokens, "temperature": 0}


@pytest.fixture
async def crowd(engine_factory, build) -> AsyncIterator[Sidecar]:
    engine = engine_factory("tiny-hybrid", build, args=SMALL)
    async with running(settings(engine.base, drain_timeout=1.0)) as sidecar:
        await ready(sidecar)
        yield sidecar


async def stay(client: aiohttp.ClientSession, number: int) -> None:
    """Read to the end, which must be clean."""
    async with client.post(CHAT, json=body(number)) as answer:
        assert answer.status == 200
        stream = await answer.read()
    assert stream.endswith(b"data: [DONE]\n\n"), stream[-300:]
    assert b'"error":' not in stream


async def leave(client: aiohttp.ClientSession, number: int, patience: float, words: int) -> None:
    """Disconnect: in the queue or during prefill after `patience` seconds, or after some tokens."""
    try:
        async with asyncio.timeout(patience), client.post(CHAT, json=body(number, 200)) as answer:
            async for _ in answer.content.iter_any():
                words -= 1
                if words <= 0:
                    return
    except TimeoutError:
        pass


async def busy(sidecar: Sidecar) -> bool:
    """Whether any slot of the engine is busy, by GET /slots."""
    (link,) = sidecar.driver.links.values()
    return any(slot.busy for slot in await link.client.slots())


async def at_rest(sidecar: Sidecar, tasks: int) -> None:
    """Wait until nothing is left of any request."""
    placement = sidecar.driver.placement
    (table,) = placement.tables.values()
    await until(lambda: placement.queued == 0, repr(placement))
    await until(lambda: len(table.idle) == SLOTS, repr(placement))
    await until(lambda: "0 requests" in repr(placement), repr(placement))
    await until(lambda: len(sidecar.driver.tasks) <= tasks, "no task is left over")
    assert not sidecar.driver._grants
    assert not sidecar.driver.effect_runner.planting
    assert not await busy(sidecar)


async def test_clients_that_leave_do_not_affect_clients_that_stay(crowd):
    chance, tasks = random.Random(7), len(crowd.driver.tasks)
    leavers = set(chance.sample(range(STREAMS), LEAVERS))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://{crowd.addresses[0]}", connector=connector) as client:
        async with asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                if number in leavers:
                    patience = chance.choice([0.01, 0.1, 0.5, 1.0, 20.0])
                    group.create_task(leave(client, number, patience, chance.randrange(1, 12)))
                else:
                    group.create_task(stay(client, number))
        await at_rest(crowd, tasks)
        await stay(client, STREAMS)  # and requests are still served


async def test_one_clients_request_is_not_stuck_behind_a_hundred_of_another_client(crowd):
    """Checked by the order of ends, not by the clock: the newcomer is next after one round of the slots.

    The clients have two addresses: keys do not tell clients apart if the engine verifies none. Requests that
    end before the newcomer is queued do not count: on a busy machine that takes a while.
    """
    ended: list[str] = []
    url = f"http://{crowd.addresses[0]}"
    many = aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0))
    one = aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(local_addr=("127.0.0.2", 0)))

    async def ends(client: aiohttp.ClientSession, number: int, who: str) -> None:
        await stay(client, number)
        ended.append(who)

    async with many, one, asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(ends(many, number, "many"))
        queue = crowd.driver.placement
        await until(lambda: queue.queued >= CROWD)
        newcomer = group.create_task(ends(one, 1000, "one"))
        await until(lambda: newcomer.done() or queue.waiting_of(NEWCOMER) > 0)
        before = len(ended)
        await newcomer
        overtaken = ended.index("one") - before
    assert overtaken <= 4 * SLOTS, f"{overtaken} of the other client's requests ended first"
