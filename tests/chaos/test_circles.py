"""Sidecars whose upstreams lead back to them: a request is refused and not sent in circles."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import product

import httpx
import orjson
import pytest

from chaos.conftest import ready, settings
from chaos.fake_answers import PATHS, request_body
from chaos.fake_engine import FakeEngine
from chaos.raw import dial, until
from patience import PATIENCE
from slotkeeper.api import head as names
from slotkeeper.api.head import Api
from slotkeeper.app import Sidecar, running
from slotkeeper.engine.answers import Health
from slotkeeper.engine.child.launch import free_port
from slotkeeper.exchange.forwarding import MOST_HEADERS


def health(sidecar: Sidecar) -> Health:
    (link,) = sidecar.driver.links.values()
    return link.health


@pytest.fixture
async def circle() -> AsyncIterator[tuple[Sidecar, Sidecar]]:
    """Start two sidecars that point at each other and have detected it."""
    ports = [free_port(), free_port()]
    one, other = (
        settings(f"http://127.0.0.1:{there}", drain_timeout=1.0).model_copy(
            update={"listen": f"127.0.0.1:{here}"}
        )
        for here, there in (ports, reversed(ports))
    )
    async with running(one) as first, running(other) as second:
        await until(lambda: {health(first), health(second)} == {Health.LOOP}, "both notice the circle")
        yield first, second


async def test_a_request_in_a_circle_gets_508_in_the_shape_of_its_api_and_readyz_says_why(circle):
    data, admin = (f"http://{address}" for address in circle[0].addresses)
    async with httpx.AsyncClient(base_url=data, timeout=PATIENCE) as client:
        for api, stream in product((Api.CHAT, Api.MESSAGES, Api.RESPONSES, Api.COMPLETION), (False, True)):
            answer = await client.post(PATHS[api], json=request_body(api, stream=stream))
            assert answer.status_code == 508, api
            assert answer.headers["Content-Type"].startswith("application/json")
            error = answer.json()["error"]
            assert "--upstream leads back to it" in error["message"]
            if api is Api.MESSAGES:
                assert (answer.json()["type"], error["type"]) == ("error", "api_error")
            else:
                assert (error["code"], error["type"]) == (508, "server_error"), api
        for answer in [await client.get("/health"), await client.get("/"), await client.post("/tokenize")]:
            assert answer.status_code == 508
        ready = await client.get(f"{admin}/readyz")
    assert ready.status_code == 503
    assert "leads back to this sidecar" in ready.text


async def test_a_request_without_room_for_a_header_of_ours_goes_in_no_circle(circle):
    """The headers of such a request do not say which sidecars it has passed."""
    body = orjson.dumps(request_body(Api.CHAT, stream=False))
    own = {"Host": "x", "Content-Length": str(len(body))}
    own |= {f"X-Own-{n}": "v" for n in range(MOST_HEADERS - len(own))}
    head = "".join(f"{name}: {value}\r\n" for name, value in own.items())
    for path in (PATHS[Api.CHAT], "/tokenize"):
        async with dial(circle[0].addresses[0]) as wire:
            await wire.send(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            assert (await wire.head()).status == 508, path


async def test_a_sidecar_serves_again_after_the_circle_is_opened():
    """A second sidecar has the address of the first one's engine, until the engine is back."""
    port = free_port()
    upstream = f"http://127.0.0.1:{port}"
    async with running(settings(upstream, drain_timeout=1.0)) as first:
        back = settings(f"http://{first.addresses[0]}", drain_timeout=1.0)
        async with running(back.model_copy(update={"listen": f"127.0.0.1:{port}"})):
            await until(lambda: health(first) is Health.LOOP, "the circle is noticed")
        engine = FakeEngine()
        engine.port = port
        async with engine:
            await ready(first)
            async with httpx.AsyncClient(base_url=f"http://{first.addresses[0]}", timeout=PATIENCE) as client:
                assert (
                    await client.post(PATHS[Api.CHAT], json=request_body(Api.CHAT, stream=False))
                ).status_code == 200


async def test_a_chain_of_sidecars_is_not_a_circle(fake: FakeEngine):
    """The client's own Via header is passed on."""
    async with running(settings(fake.base, drain_timeout=1.0)) as near:
        await ready(near)
        async with running(settings(f"http://{near.addresses[0]}", drain_timeout=1.0)) as far:
            await ready(far)
            async with httpx.AsyncClient(base_url=f"http://{far.addresses[0]}", timeout=PATIENCE) as client:
                body = orjson.dumps(request_body(Api.CHAT, stream=False))
                headers = [(names.HOPS, "elsewhere"), (names.HOPS, "a, b")]
                assert (await client.post(PATHS[Api.CHAT], content=body, headers=headers)).status_code == 200
    (hops,) = fake.ran[-1].header(names.HOPS)
    assert hops.split(", ")[:3] == ["elsewhere", "a", "b"]
    assert len(set(hops.split(", "))) == 5
