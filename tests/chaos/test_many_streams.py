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
from slotkeeper.exchange.credentials import digest_of
from slotkeeper.scheduler.effects import Effect, Forward
from slotkeeper.scheduler.events import Arrived, Event, Rendered
from slotkeeper.scheduler.state import PASSES
from slotkeeper.scheduler.types import ClientId, RequestId

STREAMS, LEAVERS, SLOTS = 200, 50, 4
SMALL = ["-np", str(SLOTS), "-c", "65536", "-t", "1"]
CROWD = 100  # requests of one client
LONG_TOKENS = 15_000  # an answer that lasts until many of the crowd wait
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


async def hold(client: aiohttp.ClientSession, number: int, released: asyncio.Event) -> None:
    """Keep a slot until `released`, then disconnect."""
    async with client.post(CHAT, json={**body(number, LONG_TOKENS), "ignore_eos": True}):
        await released.wait()


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


class Order:
    """The order in which the sidecar sends requests to its slots, as its scheduler decides it."""

    def __init__(self, sidecar: Sidecar, client: ClientId) -> None:
        self.before = 0  # requests in the queue when the client's request arrived
        self.overtaken = 0  # requests sent while the client's request waited with its tokens known
        self.waits = self.sent = False
        self._client, self._request = client, RequestId("")
        self._placement = placement = sidecar.driver.placement
        self._on, placement.on = placement.on, self.on  # type: ignore[method-assign]

    def on(self, event: Event) -> list[Effect]:
        if isinstance(event, Arrived) and event.client == self._client:
            self._request, self.before = event.request, self._placement.queued
        effects = self._on(event)
        sent = [effect.request for effect in effects if isinstance(effect, Forward)]
        if self.waits:
            self.overtaken += sum(1 for request in sent if request != self._request)
        if isinstance(event, Rendered) and event.request == self._request:
            self.waits = True
        if self._request in sent:
            self.waits, self.sent = False, True
        return effects


async def test_one_clients_request_is_not_stuck_behind_a_hundred_of_another_client(crowd):
    """Checked by the scheduler's order, not by the clock: the newcomer is next after one round of the slots.

    While prompts of others begin, PASSES requests may overtake it, since it would be computed in their batch.

    The clients have two addresses: keys do not tell clients apart if the engine verifies none.
    """
    url = f"http://{crowd.addresses[0]}"
    many = aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0))
    one = aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(local_addr=("127.0.0.2", 0)))
    placement, order, released = crowd.driver.placement, Order(crowd, NEWCOMER), asyncio.Event()
    async with many, one, asyncio.TaskGroup() as group:
        for number in range(SLOTS):
            group.create_task(hold(many, number, released))
        await until(lambda: not any(table.idle for table in placement.tables.values()))
        for number in range(SLOTS, CROWD):
            group.create_task(stay(many, number))
        await until(lambda: placement.queued >= CROWD // 2)
        newcomer = group.create_task(stay(one, 1000))
        await until(lambda: order.before)
        released.set()
        await newcomer
    assert order.before > 2 * SLOTS
    assert order.sent
    assert order.overtaken <= PASSES + 2 * SLOTS
