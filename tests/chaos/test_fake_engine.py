"""Tests of the fake engine, since other tests depend on it."""

import pytest

from chaos.fake_answers import PATHS, looks_whole, request_body
from chaos.fake_engine import Fault
from chaos.raw import dial, until
from slotkeeper.api.head import Api


@pytest.mark.parametrize("api", PATHS)
async def test_a_healthy_answer_is_complete_and_the_request_counted_once(fake, api):
    async with dial(fake.base) as wire:
        await wire.post(PATHS[api], request_body(api, stream=True))
        head = await wire.head()
        assert head.status == 200
        assert looks_whole(api, await wire.body(head))
    assert len(fake.ran) == 1
    assert fake.control.slots == [None, None]


async def test_the_fake_engine_counts_a_pinned_request_to_a_busy_slot(fake):
    fake.script.append(Fault.HANG)
    pinned = request_body(Api.CHAT, stream=False, id_slot=1)
    async with dial(fake.base) as first, dial(fake.base) as second:
        await first.post(PATHS[Api.CHAT], pinned)
        await until(lambda: fake.control.slots[1], "the slot is busy")
        await second.post(PATHS[Api.CHAT], pinned)
        await until(lambda: fake.collisions, "the other request has come")
        first.leave()
        assert (await second.head()).status == 200
    assert fake.collisions == 1
