"""Clients that disconnect, stall or send garbage: the engine learns it at once, and nothing accumulates."""

import asyncio
from itertools import product

import pytest

from chaos.conftest import quiet
from chaos.fake_answers import PATHS, WORDS, request_body
from chaos.fake_engine import FLOOD_BYTES, Fault
from chaos.raw import dial, until
from slotkeeper.api.head import Api

CHAT = PATHS[Api.CHAT]


async def test_a_client_that_leaves_during_prefill_ends_the_engines_request(fake, sidecar, data):
    for times, (api, stream) in enumerate(product(PATHS, (True, False)), 1):
        fake.script.append(Fault.HANG)
        async with dial(data) as wire:
            await wire.post(PATHS[api], request_body(api, stream=stream))
            await until(lambda: len(fake.ran) == times, "the engine has it")  # noqa: B023 - awaited
        await until(lambda: fake.left == times, "the engine sees that the client left")  # noqa: B023 - awaited
        await until(lambda: quiet(sidecar, fake), "the slot is free again")


@pytest.mark.parametrize("half", [True, False], ids=["half closes", "closes"])
@pytest.mark.parametrize("begun", [False, True], ids=["in prefill", "in the stream"])
async def test_a_client_that_half_closes_its_connection_counts_as_gone(fake, sidecar, data, begun, half):
    """It could still read, but looks like a lost client; no common client does this."""
    fake.script.append(Fault.TRICKLE)
    async with dial(data) as wire:
        await wire.post(CHAT, request_body(Api.CHAT, stream=True))
        await until(lambda: fake.ran, "the engine has it")
        if begun:
            fake.go.release()
            await wire.head()
            assert b"one" in await anext(wire.chunks())
        if half:
            wire.writer.write_eof()
            rest, _ = await wire.rest()
            assert b"[DONE]" not in rest
    await until(lambda: fake.left, "the engine sees that the client left")
    await until(lambda: quiet(sidecar, fake), "the slot is free again")


async def test_a_queued_request_whose_client_leaves_never_reaches_the_engine(fake, sidecar, data):
    fake.script.extend([Fault.TRICKLE, Fault.TRICKLE])
    async with dial(data) as first, dial(data) as second, dial(data) as third:
        for number, wire in enumerate((first, second)):
            await wire.post(CHAT, request_body(Api.CHAT, stream=True, text=f"{number} is first"))
        await until(lambda: len(fake.ran) == 2)
        await third.post(CHAT, request_body(Api.CHAT, stream=True, text="third"))
        await until(lambda: sidecar.driver.placement.queued == 1)
        third.leave()
        await until(lambda: sidecar.driver.placement.queued == 0)
        for _ in range(2 * (len(WORDS) + 2)):
            fake.go.release()
        for wire in (first, second):
            assert b"[DONE]" in await wire.body(await wire.head())
    await until(lambda: quiet(sidecar, fake))
    assert len(fake.ran) == 2
    assert not sidecar.driver._grants


async def test_chunks_are_forwarded_without_buffering(fake, data):
    """No buffering: the fake engine sends the second event only after the first has arrived at the client."""
    fake.script.append(Fault.TRICKLE)
    async with dial(data) as wire:
        await wire.post(CHAT, request_body(Api.CHAT, stream=True))
        chunks = None
        for word in WORDS:
            fake.go.release()
            if chunks is None:
                await wire.head()
                chunks = wire.chunks()
            assert word.encode() in await anext(chunks)


async def test_a_stalled_client_stops_the_engine(fake, sidecar, data):
    fake.script.append(Fault.FLOOD)
    async with dial(data, window=4096) as wire:
        await wire.post(CHAT, request_body(Api.CHAT, stream=True))
        await wire.head()
        await until(lambda: fake.sent > 0)
        sent = -1
        while fake.sent != sent:
            sent = fake.sent
            await asyncio.sleep(0.3)
        assert sent < FLOOD_BYTES / 8, (
            "the sidecar does not read what its client does not: only socket buffers are full"
        )
        pieces = wire.chunks()
        while fake.sent == sent:
            await anext(pieces)  # reading starts the stream again
    await until(lambda: quiet(sidecar, fake))


async def test_a_client_that_leaves_during_its_upload_leaves_no_request(fake, sidecar, data):
    async with dial(data) as wire:
        await wire.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{{".encode())
        await asyncio.sleep(0.05)
    await until(lambda: quiet(sidecar, fake))
    assert not fake.ran


async def test_two_requests_with_the_same_id_are_both_served(fake, data):
    same = {"X-Request-Id": "twin"}
    async with dial(data) as first, dial(data) as second:
        for wire in (first, second):
            await wire.post(CHAT, request_body(Api.CHAT, stream=True), same)
        for wire in (first, second):
            head = await wire.head()
            assert head["X-Request-Id"] == "twin"
            assert b"[DONE]" in await wire.body(head)
    assert [heard.header("X-Request-Id") for heard in fake.ran] == [["twin"], ["twin"]]


async def test_a_client_that_leaves_during_a_plant_frees_the_slot(fake, sidecar, data):
    """/v1/messages: the prompt is first planted in the slot that the engine will choose."""
    steer = request_body(Api.MESSAGES, stream=True, text="a long story " * 40)
    async with dial(data) as wire:  # one slot now has contents that must not be overwritten
        await wire.post(CHAT, request_body(Api.CHAT, stream=True, text="a long story " * 30))
        await wire.body(await wire.head())
    fake.script.append(Fault.HANG)
    async with dial(data) as wire:
        await wire.post(PATHS[Api.MESSAGES], steer)
        await until(lambda: len(fake.ran) == 2)
    await until(lambda: fake.left, "the engine sees that the client left")
    await until(lambda: quiet(sidecar, fake))
