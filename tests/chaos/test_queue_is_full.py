"""The queue is bounded, and one client cannot take all of it."""

from __future__ import annotations

from contextlib import AsyncExitStack

import orjson
import pytest

from chaos.conftest import ready, settings
from chaos.fake_answers import PATHS, request_body
from chaos.fake_engine import Fault
from chaos.raw import dial, until
from slotkeeper.api.head import Api
from slotkeeper.app import running

CHAT = PATHS[Api.CHAT]


@pytest.mark.parametrize(
    ("limits", "reason", "said"),
    [
        ({"max_waiting": 3}, "all", "too many requests wait"),
        ({"max_waiting_per_client": 3}, "client", "too many of your requests wait"),
    ],
)
async def test_a_request_that_finds_the_queue_full_gets_429_with_retry_after(fake, limits, reason, said):
    fake.script.extend([Fault.HANG] * 2)
    async with (
        running(settings(fake.base, drain_timeout=1.0, **limits)) as sidecar,
        AsyncExitStack() as stack,
    ):
        await ready(sidecar)
        address, driver = sidecar.addresses[0], sidecar.driver
        for number in range(5):
            wire = await stack.enter_async_context(dial(address))
            await wire.post(CHAT, request_body(Api.CHAT, stream=False, text=f"{number}"))
            await until(lambda: len(fake.ran) + driver.placement.queued == number + 1, "it runs or waits")  # noqa: B023
        async with dial(address) as late, dial(address, source="127.0.0.9") as other:
            await late.post(CHAT, request_body(Api.CHAT, stream=False))
            head = await late.head()
            assert head.status == 429
            assert int(head["Retry-After"]) > 0
            assert said in orjson.loads(await late.body(head))["error"]["message"]
            assert driver.placement.queued == 3
            await other.post(CHAT, request_body(Api.CHAT, stream=False))
            if reason == "all":
                assert (await other.head()).status == 429
            else:
                await until(lambda: driver.placement.queued == 4, "another client is queued")
        counted = sidecar.metrics.registry.get_sample_value(
            "slotkeeper_crowded_requests_total", {"reason": reason}
        )
        assert counted == (2 if reason == "all" else 1)
