"""The client of the engine, with answers that a healthy engine rarely gives."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from patience import PATIENCE
from slotkeeper.engine.answers import EngineError, EngineGoneError, EngineUnaskedError, Health
from slotkeeper.engine.client import EngineClient

LOADING = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}


@pytest.fixture
async def serve() -> AsyncIterator:
    """Return a function that makes a server with these routes, and a client for it."""
    async with asyncio.timeout(PATIENCE), AsyncExitStack() as stack:

        async def start(**routes) -> EngineClient:
            app = web.Application()
            for name, handler in routes.items():
                app.router.add_route("*", f"/{name}", handler)
            server = await stack.enter_async_context(TestServer(app))
            return await stack.enter_async_context(EngineClient(str(server.make_url(""))))

        yield start


PAGE = "\n<!doctype html><html><body>Welcome</body></html>"


def answer(body, status: int = 200):
    async def handler(_request: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    return handler


def page(status: int):
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(text=PAGE, status=status, content_type="text/html")

    return handler


@pytest.mark.parametrize(
    ("health", "props", "state"),
    [
        (answer(LOADING, 503), answer(LOADING, 503), Health.LOADING),
        (answer({"status": "ok"}), answer({"is_sleeping": True}), Health.SLEEPING),
        (answer({"status": "ok"}), answer({"is_sleeping": False}), Health.OK),
        (answer({"status": "ok"}), answer({"error": {"message": "Invalid API Key"}}, 401), Health.OK),
        (answer({"status": "ok"}), answer({"version": "1"}), Health.FOREIGN),
        (answer({"status": "ok"}), answer([1]), Health.FOREIGN),
        (answer({"status": "ok"}), answer({"detail": "Not Found"}, 404), Health.FOREIGN),
        (answer({"detail": "Not Found"}, 404), answer({}), Health.FOREIGN),
        (page(200), answer({}), Health.FOREIGN),
        (page(404), answer({}), Health.FOREIGN),
        (page(401), answer({}), Health.OK),  # a proxy in front asks for a password
        (page(503), answer({}), Health.LOADING),
        (answer({"error": {"message": "around"}}, 508), answer({}), Health.LOOP),
    ],
)
async def test_health_combines_the_answers_of_both_routes(serve, health, props, state):
    assert await (await serve(health=health, props=props)).health() is state


@pytest.mark.parametrize(
    ("props", "marker"),
    [
        (answer({"media_marker": "<m>", "is_sleeping": False}), "<m>"),
        (answer({"is_sleeping": False}), "?"),
        (answer({"error": {"message": "Invalid API Key"}}, 401), ""),
        (answer({"error": {"message": "busy"}}, 500), None),
    ],
)
async def test_an_engine_that_served_is_asked_one_thing_which_also_tells_its_process(serve, props, marker):
    client = await serve(props=props)  # there is no /health
    client.marker = "before"
    assert await client.health(served=True) is Health.OK
    assert client.marker == marker


async def test_a_request_on_a_connection_that_the_engine_closed_is_sent_again(serve):
    seen = 0

    async def tokenize(request: web.Request) -> web.Response:
        nonlocal seen
        seen += 1
        if seen == 2:  # as an engine does whose idle timeout passed: it closes without an answer
            request.transport.abort()
        return web.json_response({"tokens": [seen]})

    client = await serve(tokenize=tokenize)
    assert await client.tokenize("a", add_special=True, parse_special=True) == [1]
    assert await client.tokenize("a", add_special=True, parse_special=True) == [3]


async def test_an_engine_that_drops_every_call_is_reported_as_gone(serve):
    async def tokenize(request: web.Request) -> web.Response:
        request.transport.abort()
        return web.Response()

    client = await serve(tokenize=tokenize)
    with pytest.raises(EngineGoneError, match="/tokenize"):
        await client.tokenize("a", add_special=True, parse_special=True)


async def test_a_call_that_changes_a_slot_or_a_file_is_sent_once(serve):
    seen = []

    async def slots(request: web.Request) -> web.Response:
        seen.append(request.query["action"])
        request.transport.abort()
        return web.Response()

    client = await serve(**{"health": answer({}), "props": answer({}), "slots/3": slots})
    await client.health()  # leaves an idle connection, which the engine may have closed
    for act in (client.save(3, "f"), client.restore(3, "f"), client.erase(3)):
        with pytest.raises(EngineGoneError, match="/slots/3"):
            await act
    assert seen == ["save", "restore", "erase"]


async def test_without_a_free_descriptor_nothing_is_said_of_the_engine(serve):
    client = await serve(health=answer({}), props=answer({}))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, allowed[1]))
    try:
        assert await client.health() is Health.UNASKED
        with pytest.raises(EngineUnaskedError):
            await client.props()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b'data: {"error":{"code":500,"message":"Context size has been exceeded."}}\n\n', "Context size"),
        (
            b'data: {"index":0,"prompt_progress":{"total":9,"cache":0,"processed":3,"time_ms":1}}\n\n',
            "progress",
        ),
    ],
)
async def test_a_prefill_that_ends_early_is_an_error(serve, event, error):
    async def completion(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(event)
        return stream

    client = await serve(completion=completion)
    with pytest.raises(EngineError, match=error):
        await client.prefill([1, 2, 3], 0)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (page(200), r"^200: /props: not JSON$"),
        (page(404), r"^404: a page of HTML$"),
        (answer(["no"], 502), r"^502: .*no"),
    ],
    ids=["no JSON", "HTML", "another shape"],
)
async def test_an_error_of_any_shape_raises_an_engine_error_with_its_status(serve, said, error):
    with pytest.raises(EngineError, match=error):
        await (await serve(props=said)).props()
