"""Clients that do not read their answers delay no other client, whether the answers fit a buffer or not."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import orjson
import pytest

from chaos.conftest import ready, settings
from chaos.fake_answers import PATHS, looks_whole, request_body
from chaos.fake_engine import FLOOD_BYTES, FakeEngine, Fault
from chaos.raw import Wire, dial, until
from slotkeeper.api.head import Api
from slotkeeper.app import Sidecar, running
from slotkeeper.exchange import bodies

CHAT, COMPLETION = PATHS[Api.CHAT], PATHS[Api.COMPLETION]
SLOTS = 2
TWO_SLOTS = ["-np", str(SLOTS), "-c", "32768", "-t", "1"]
FOR_EVER = 1000.0
SAID_TO_STALL = {"prompt": "the keeper lights", "stream": True, "ignore_eos": True, "temperature": 0}
# 10 kB a token: more than socket buffers hold
VERBOSE = {**SAID_TO_STALL, "n_probs": 100, "n_predict": 12000}
SHORT = {"prompt": "the ships come home", "n_predict": 4, "temperature": 0}

impatient = partial(settings, write_timeout=0.5, read_ahead_bytes=2**18, drain_timeout=1.0)


def cut(sidecar) -> float:
    name, labels = "slotkeeper_connections_cut_total", {"reason": "stalled"}
    return sidecar.metrics.registry.get_sample_value(name, labels) or 0


async def answered(address: str, body: object) -> bytes:
    async with dial(address) as wire:
        await wire.post(COMPLETION, body)
        head = await wire.head()
        assert head.status == 200
        return await wire.body(head)


async def test_stalled_readers_on_all_slots_are_cut_off_and_another_client_is_served(engine_factory, build):
    """Checked by the order of events: another client's answer follows as soon as one of them was cut off."""
    engine = engine_factory("tiny-dense", build, args=TWO_SLOTS)
    async with running(impatient(engine.base)) as sidecar, AsyncExitStack() as stack:
        await ready(sidecar)
        (table,) = sidecar.driver.placement.tables.values()
        for _ in range(SLOTS):
            wire = await stack.enter_async_context(dial(sidecar.addresses[0], window=4096))
            await wire.post(COMPLETION, VERBOSE)
            await wire.head()
        # On a busy machine the first reader may be cut off before the second one has its slot.
        await until(lambda: not table.idle or cut(sidecar), "both slots were taken")
        said = orjson.loads(await answered(sidecar.addresses[0], SHORT))
        assert said["tokens_predicted"] == 4
        assert cut(sidecar) >= 1, "a slot was free because a reader that stalled was cut off"
        await until(lambda: cut(sidecar) == SLOTS)
        await until(lambda: len(table.idle) == SLOTS, "both slots are free")
        await until(lambda: "0 requests" in repr(sidecar.driver.placement), "no request of them is left")


async def test_a_slot_is_free_when_the_engine_has_finished_although_its_client_does_not_read(
    engine_factory, build
):
    """Answers that fit the buffer: no client is cut off, and one that reads late gets its whole answer."""
    engine = engine_factory("tiny-dense", build, args=TWO_SLOTS)
    body = {**SAID_TO_STALL, "n_probs": 100, "n_predict": 400}  # 4 MB
    roomy = settings(engine.base, write_timeout=FOR_EVER, read_ahead_bytes=2**26, drain_timeout=1.0)
    async with running(roomy) as sidecar, AsyncExitStack() as stack:
        await ready(sidecar)
        (table,) = sidecar.driver.placement.tables.values()
        readers = []
        for _ in range(SLOTS):
            wire = await stack.enter_async_context(dial(sidecar.addresses[0], window=4096))
            await wire.post(COMPLETION, body)
            readers.append((wire, await wire.head()))
        await answered(sidecar.addresses[0], SHORT)
        await until(lambda: len(table.idle) == SLOTS, "both slots are free, and no client has read a byte")
        assert cut(sidecar) == 0
        for wire, head in readers:
            stream = await wire.body(head)
            assert b'"stop":true' in stream
            assert stream.count(b"data: ") >= 400
        await until(lambda: sidecar._ahead.free == 256 * 2**20, "all room was given back")


@pytest.mark.parametrize("room", [2**18, 2**26], ids=["a full buffer", "a buffer with room"])
async def test_a_reader_that_stalls_is_cut_off_sooner_while_another_request_waits(
    engine_factory, build, monkeypatch, room
):
    """Without a queue it has an hour, and keeps its slot; with one it must read, however large its buffer."""
    monkeypatch.setattr(bodies, "CROWDED_SECONDS", 0.5)
    engine = engine_factory("tiny-dense", build, args=["-np", "1", "-c", "32768", "-t", "1"])
    slow = settings(engine.base, write_timeout=3600, read_ahead_bytes=room, drain_timeout=1.0)
    async with running(slow) as sidecar, dial(sidecar.addresses[0], window=4096) as wire:
        await ready(sidecar)
        await wire.post(COMPLETION, {**VERBOSE, "n_predict": 30000})
        await wire.head()
        request = await only_request(sidecar)
        await until(lambda: unread(request) > 0, "the client's own buffers are full")
        await asyncio.sleep(2 * bodies.CROWDED_SECONDS)
        assert cut(sidecar) == 0, "no other request waits"
        said = orjson.loads(await answered(sidecar.addresses[0], SHORT))
        assert said["tokens_predicted"] == 4
        assert cut(sidecar) == 1


async def test_a_reader_that_reads_slowly_is_not_cut_off_while_another_request_waits(
    engine_factory, build, monkeypatch
):
    monkeypatch.setattr(bodies, "CROWDED_SECONDS", 2.0)
    engine = engine_factory("tiny-dense", build, args=["-np", "1", "-c", "32768", "-t", "1"])
    slow = settings(engine.base, write_timeout=3600, read_ahead_bytes=2**18, drain_timeout=1.0)

    async def read_slowly(wire: Wire) -> int:
        size = 0
        async for chunk in wire.chunks():
            size += len(chunk)
            if size < 2**21:
                await asyncio.sleep(0.001)
        return size

    async with running(slow) as sidecar, dial(sidecar.addresses[0], window=4096) as wire:
        await ready(sidecar)
        await wire.post(COMPLETION, {**VERBOSE, "n_predict": 1500})
        assert (await wire.head()).status == 200
        size, _ = await asyncio.gather(read_slowly(wire), answered(sidecar.addresses[0], SHORT))
        assert size > 2**22
        assert cut(sidecar) == 0


async def only_request(sidecar: Sidecar) -> Any:
    handlers: list[Any] = list(sidecar._connections[0]._open)
    (request,) = [one._current_request for one in handlers if one._current_request is not None]
    return request


def unread(request: Any) -> int:
    return request.transport.get_write_buffer_size() if request.transport else 0


async def test_the_bytes_read_ahead_for_all_answers_are_bounded(fake):
    """An answer without room is not read from the engine, so that the engine waits."""
    fake.script.extend([Fault.FLOOD] * 2)
    small = settings(fake.base, read_ahead_bytes=2**26, read_ahead_total=2**24, write_timeout=FOR_EVER)
    async with running(small) as sidecar, dial(sidecar.addresses[0], window=4096) as one:
        await ready(sidecar)
        async with dial(sidecar.addresses[0], window=4096) as other:
            for wire in (one, other):
                await wire.post(CHAT, request_body(Api.CHAT, stream=True))
            await until(lambda: sidecar._ahead.free == 0, "the room is taken")
            sent = -1
            while fake.sent != sent:
                sent = fake.sent
                await asyncio.sleep(0.3)
            assert sent < FLOOD_BYTES / 8, "the sidecar stops reading from the engine"
        await until(lambda: sidecar._ahead.free > 0, "a client that left frees its bytes")


async def test_a_reader_that_continues_in_time_gets_its_whole_answer(fake, sidecar, data):
    async with dial(data, window=4096) as wire:
        await wire.post(CHAT, request_body(Api.CHAT, stream=True))
        head = await wire.head()
        await until(lambda: "0 requests" in repr(sidecar.driver.placement), "the slot is free")
        assert looks_whole(Api.CHAT, await wire.body(head))


async def test_a_stalled_reader_on_a_route_without_a_slot_is_cut_off_too():
    async with FakeEngine() as fake, running(impatient(fake.base)) as sidecar:
        await ready(sidecar)
        fake.control.extra["/props-flood"] = "x" * 2**26
        async with dial(sidecar.addresses[0], window=4096) as wire:
            await wire.send(b"GET /props-flood HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: cut(sidecar) == 1)
            assert (await wire.rest())[1], "by a reset: half an answer must not look whole"
