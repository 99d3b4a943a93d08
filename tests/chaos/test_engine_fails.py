"""An engine that fails: half an answer never looks complete, and no request runs twice."""

import asyncio
from itertools import product

import aiohttp
import orjson
import pytest

from chaos.conftest import settings
from chaos.fake_answers import PATHS, answer_body, answer_events, looks_whole, request_body
from chaos.fake_engine import Fault
from chaos.fake_http import LAST_CHUNK, STREAM_HEAD, chunk
from chaos.raw import dial, until
from slotkeeper.api.errors import UpstreamFault, sse
from slotkeeper.api.head import Api
from slotkeeper.app import running
from slotkeeper.engine.child.launch import free_port

CHAT = PATHS[Api.CHAT]


def message(api: Api, body: bytes) -> str:
    """Return the text of an error in the API's own shape; KeyError for another shape."""
    doc = orjson.loads(body)
    if api is Api.MESSAGES:
        assert doc["type"] == "error"
        assert set(doc["error"]) == {"type", "message"}
    else:
        assert set(doc["error"]) == {"code", "message", "type", "param"}
    return doc["error"]["message"]


@pytest.mark.parametrize("fault", [Fault.DIE_IN_STREAM, Fault.CUT_A_CHUNK])
async def test_a_stream_that_breaks_off_ends_with_an_error_event_and_no_last_chunk(fake, data, fault):
    for number, api in enumerate(PATHS, 1):
        fake.script.append(fault)
        async with dial(data) as wire:
            await wire.post(PATHS[api], request_body(api, stream=True))
            assert (await wire.head()).status == 200
            stream = await wire.cut()
        assert not looks_whole(api, stream)
        assert message(api, stream.rpartition(b"data: ")[2]) if api is not Api.RESPONSES else True
        assert stream.endswith(b"\n\n")
        assert b"broke off" in stream
        assert len(fake.ran) == number


UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def framed(events: list[bytes], *, chunked: bool) -> bytes:
    """Return an answer whose framing says that it is complete."""
    return (
        STREAM_HEAD + b"".join(map(chunk, events)) + LAST_CHUNK
        if chunked
        else UNTIL_CLOSED + b"".join(events)
    )


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_stream_without_its_last_event_is_cut_although_the_engine_ended_it_cleanly(
    fake, data, chunked
):
    for api, left_out in product(PATHS, (1, 3)):
        fake.custom = framed(answer_events(api, 3, 0)[:-left_out], chunked=chunked)
        fake.script.append(Fault.CUSTOM_AND_END)
        async with dial(data) as wire:
            await wire.post(PATHS[api], request_body(api, stream=True))
            assert (await wire.head()).status == 200
            stream = await wire.cut()
        assert b"one" in stream
        assert b"its last event is missing" in stream
        assert not looks_whole(api, stream)


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_whole_stream_and_one_that_ends_with_an_error_end_cleanly(fake, data, chunked):
    for api, fails in product(PATHS, (False, True)):
        sent = answer_events(api, 3, 0)
        if fails:
            sent = [*sent[:2], sse(UpstreamFault("Compute error."), api)]
        fake.custom = framed(sent, chunked=chunked)
        fake.script.append(Fault.CUSTOM_AND_END)
        async with dial(data) as wire:
            await wire.post(PATHS[api], request_body(api, stream=True))
            assert await wire.body(await wire.head()) == b"".join(sent)


async def test_half_a_body_that_only_the_end_of_the_connection_ends_is_cut(fake, data):
    start = UNTIL_CLOSED.replace(b"text/event-stream", b"application/json")
    for api, half in product(PATHS, (True, False)):
        body = answer_body(api, 3, 0)
        fake.custom = start + (body[: len(body) // 2] if half else body)
        fake.script.append(Fault.CUSTOM_AND_END)
        async with dial(data) as wire:
            await wire.post(PATHS[api], request_body(api, stream=False))
            head = await wire.head()
            assert await wire.cut() if half else await wire.body(head) == body


@pytest.mark.parametrize("fault", [Fault.DIE_IN_BODY, Fault.DIE_IN_CHUNKS])
async def test_a_body_that_breaks_off_closes_the_clients_connection(fake, data, fault):
    for number, api in enumerate(PATHS, 1):
        fake.script.append(fault)
        async with dial(data) as wire:
            await wire.post(PATHS[api], request_body(api, stream=False))
            head = await wire.head()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await wire.body(head)
        assert len(fake.ran) == number


@pytest.mark.parametrize("fault", [Fault.DIE_IN_CHUNKS, Fault.DIE_IN_STREAM])
async def test_an_http_1_0_client_sees_that_an_answer_broke_off(fake, data, fault):
    """In HTTP/1.0 the end of the connection ends a body, so only a reset shows that it is incomplete."""
    fake.script.append(fault)
    body = orjson.dumps(request_body(Api.CHAT, stream=fault is Fault.DIE_IN_STREAM))
    async with dial(data) as wire:
        head = f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        await wire.send(head + body)
        assert (await wire.head()).status == 200
        _, reset = await wire.rest()
    assert reset


async def test_an_engine_that_dies_before_its_head_gives_502_in_the_shape_of_the_api(fake, data):
    for number, api in enumerate(PATHS, 1):
        fake.script.append(Fault.DIE_BEFORE_HEAD)
        async with dial(data) as wire:
            await wire.post(PATHS[api], request_body(api, stream=True))
            head = await wire.head()
            body = await wire.body(head)
        assert head.status == 502
        assert int(head["Retry-After"]) > 0
        assert head["Content-Type"].startswith("application/json")
        assert "closed the connection" in message(api, body)
        assert len(fake.ran) == number, "the request may have run, so it must not be sent again"


async def test_an_engine_that_is_down_gives_503_in_the_shape_of_the_api():
    async with running(settings(f"http://127.0.0.1:{free_port()}")) as lonely:
        for api in PATHS:
            async with dial(lonely.addresses[0]) as wire:
                await wire.post(PATHS[api], request_body(api, stream=True))
                head = await wire.head()
                body = await wire.body(head)
            assert head.status == 503
            assert int(head["Retry-After"]) > 0
            assert "does not accept connections" in message(api, body)


async def test_the_503_of_a_loading_engine_is_forwarded(fake, data):
    fake.script.append(Fault.LOADING)
    async with dial(data) as wire:
        await wire.post(CHAT, request_body(Api.CHAT, stream=True))
        head = await wire.head()
        assert head.status == 503
        assert b"so the script says" in await wire.body(head)


async def test_requests_do_not_fail_if_the_engine_closes_idle_connections(fake, sidecar, data):
    """llama-server may close kept connections at any time: no POST fails by that, and none runs twice."""
    body = request_body(Api.CHAT, stream=False)
    async with aiohttp.ClientSession(f"http://{data}") as client:
        for _ in range(20):
            async with client.post(CHAT, json=body) as answer:
                assert answer.status == 200
            fake.close_idle()
            async with client.post("/tokenize", json={"content": "x"}) as answer:
                assert answer.status == 200
            fake.close_idle()
    assert len(fake.ran) == 20
    assert sidecar.driver.placement.tables[fake.base].up


async def test_after_every_fault_all_slots_are_idle_again(fake, sidecar, data):
    async with aiohttp.ClientSession(f"http://{data}") as client:
        for fault in Fault:
            if fault in {Fault.HANG, Fault.TRICKLE, Fault.FLOOD, Fault.CUSTOM}:
                continue  # these wait for the test
            fake.script.append(fault)
            body = request_body(Api.CHAT, stream="stream" in fault or "chunk" in fault)
            try:
                async with client.post(CHAT, json=body) as answer:
                    await answer.read()
            except aiohttp.ClientError:
                pass
    table = sidecar.driver.placement.tables[fake.base]
    await until(lambda: len(table.idle) == 2, f"all slots are idle: {table}")
    assert fake.collisions == 0
