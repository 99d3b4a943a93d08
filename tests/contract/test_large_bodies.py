"""Bodies at the limit, above it, and bodies so large that they could delay other clients."""

import asyncio
from io import BytesIO

import aiohttp
import orjson
import pytest

from chaos.conftest import settings
from chaos.fake_answers import PATHS, request_body
from chaos.raw import dial, until
from slotkeeper.api.head import Api
from slotkeeper.app import running

CHAT = PATHS[Api.CHAT]
LIMIT = 20_000
ASK = orjson.dumps(request_body(Api.CHAT, stream=False))


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "counted"])
async def test_a_body_above_the_limit_is_refused_in_the_shape_of_the_api(fake, api, chunked):
    async with running(settings(fake.base, max_body_bytes=LIMIT, drain_timeout=1.0)) as small:
        async with dial(small.addresses[0]) as wire:
            framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {50 * LIMIT}"
            await wire.send(f"POST {PATHS[api]} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode())
            piece = b" " * LIMIT
            for _ in range(50):  # a client that reads only after it has sent everything
                await wire.send(b"%x\r\n%s\r\n" % (LIMIT, piece) if chunked else piece)
            await wire.send(b"0\r\n\r\n" if chunked else b"")
            head = await wire.head()
            body = orjson.loads(await wire.body(head))
        assert head.status == 413
        assert str(LIMIT) in body["error"]["message"]
        assert body.get("type") == ("error" if api is Api.MESSAGES else None)
        if api is Api.MESSAGES:
            assert body["error"]["type"] == "request_too_large"
    assert not fake.ran


async def test_a_body_of_exactly_the_limit_is_accepted(fake):
    exact = settings(fake.base, max_body_bytes=len(ASK), drain_timeout=1.0)
    async with running(exact) as small, dial(small.addresses[0]) as wire:
        await wire.post(CHAT, ASK)
        assert (await wire.head()).status == 200


async def test_other_clients_are_served_while_a_large_body_arrives(fake, data):
    """A copy, parse or splice of a few megabytes must not block the loop: each runs in a separate step."""
    text = "word " * 800_000
    large = orjson.dumps(request_body(Api.COMPLETION, stream=False, text=text))
    async with aiohttp.ClientSession(f"http://{data}") as client, asyncio.TaskGroup() as group:
        sent = group.create_task(_post(client, PATHS[Api.COMPLETION], large))
        served = 0
        while not sent.done():
            async with client.post("/tokenize", json={"content": "x"}) as answer:
                assert answer.status == 200
            served += 1
    await until(lambda: fake.ran)
    assert fake.ran[0].body.endswith(large[1:])
    assert served > 3


async def _post(client: aiohttp.ClientSession, path: str, body: bytes) -> None:
    async with client.post(path, data=BytesIO(body)) as answer:
        assert answer.status == 200
