"""What llama-swap reports on its models, and how a call names one. It is imitated by `SwapLike`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from patience import PATIENCE
from slotkeeper.engine.answers import EngineError, EngineGoneError, Health
from slotkeeper.engine.client import EngineAddress, EngineClient, running_in
from slotkeeper.engine.routers.router_client import ModelEntry
from slotkeeper.engine.routers.swap_client import LONGEST, SwapClient, flags_in
from slotkeeper.scheduler.policies.router import ModelStatus
from slotkeeper.scheduler.types import ModelName, SlotId
from swap_like import SwapGroup, SwapLike, Swapped, answering, serving

CODER, WRITER = ModelName("coder"), ModelName("lab/writer")
CMD = "env A=1 /bin/llama-server-b1 -m /models/a.gguf --port 5800 -np 2 \\\n --slot-save-path '/my slots'"
PROPS = {"total_slots": 2, "media_marker": "m", "build_info": "b1"}
BASE = "http://swap"


@dataclass
class Servers:
    """Servers of models, which `hold` and fail as the test says."""

    stack: AsyncExitStack
    props: Any = field(default_factory=lambda: dict(PROPS))
    hold: asyncio.Event | None = None
    fails: bool = False
    drops: int = 0  # requests that it does not answer
    seen: list[str] = field(default_factory=list)

    async def start(self) -> str:
        if self.hold:
            await self.hold.wait()
        if self.fails:
            raise RuntimeError("upstream command exited prematurely")
        return await answering(self.stack, self.answer)

    async def stop(self) -> None:
        """The server stays until the test ends."""

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append(request.raw_path)
        if self.drops and request.transport:
            self.drops -= 1
            request.transport.abort()
        if request.path == "/tokenize":
            return web.json_response({"tokens": [1]})
        if request.path == "/props":
            return web.json_response(self.props, status=404 if "detail" in self.props else 200)
        return web.json_response({"status": "ok"})


@dataclass
class Scene:
    gateway: SwapLike
    base: str
    servers: Servers
    client: SwapClient

    def model(self, name: str) -> EngineClient:
        return EngineClient(EngineAddress(self.base, ModelName(name), swaps=True))

    async def entry(self, name: str) -> ModelEntry:
        return next(entry for entry in (await self.client.listing()).models if entry.name == name)


Make = Callable[..., Awaitable[Scene]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    async with asyncio.timeout(PATIENCE), AsyncExitStack() as stack:

        async def start(*, key: str = "", ours: str | None = None, **settings: Any) -> Scene:
            servers = Servers(stack)
            models: dict[str, Swapped] = {
                CODER: Swapped(start=servers.start, stop=servers.stop, cmd=CMD, aliases=("gpt",)),
                WRITER: Swapped(start=servers.start, stop=servers.stop, unlisted=True),
            }
            gateway = SwapLike(models, api_key=key, **settings)
            base = await stack.enter_async_context(serving(gateway))
            client = await stack.enter_async_context(SwapClient(base, api_key=ours))
            return Scene(gateway, base, servers, client)

        yield start


@asynccontextmanager
async def heard(scene: Scene) -> AsyncIterator[asyncio.Event]:
    """Listen to events in this block, which begins after the first one."""
    event = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(scene.client.events(event.set))
        await event.wait()
        event.clear()
        yield event
        task.cancel()


# -- recognition -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("key", ["", "secret"])
async def test_llama_swap_is_recognised_without_its_key(make, legacy, key):
    scene = await make(legacy=legacy, key=key)
    async with EngineClient(scene.base) as client:
        assert await client.health() is Health.SWAPPER
    assert scene.gateway.loads == []


async def test_its_key_is_sent(make):
    assert len((await (await make(key="secret", ours="secret")).client.listing()).models) == 1
    with pytest.raises(EngineError, match="401"):
        await (await make(key="secret")).client.listing()


@pytest.mark.parametrize("said", [{}, [], {"running": {}}, {"running": None}, "running", None])
def test_another_answer_is_not_that_of_llama_swap(said):
    assert running_in(said) is None


async def test_a_server_that_is_not_llama_swap_is_foreign_to_its_client():
    async def other(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/{path:.*}", other)
    async with TestServer(app) as server, SwapClient(str(server.make_url(""))) as client:
        with pytest.raises(EngineError) as refusal:
            await client.listing()
        assert refusal.value.foreign


# -- the listing -----------------------------------------------------------------------------------------


async def test_models_are_unloaded_until_they_run(make):
    scene = await make()
    assert (await scene.entry(CODER)).status is ModelStatus.UNLOADED
    await scene.client.load(CODER)
    entry = await scene.entry(CODER)
    assert (entry.status, entry.port) == (ModelStatus.LOADED, 1)
    assert entry.flags
    assert (entry.flags.n_parallel, str(entry.flags.slot_save_path)) == (2, "/my slots")
    assert [path for _, path in scene.gateway.loads] == ["/upstream/coder/health"]


@pytest.mark.parametrize(
    ("legacy", "status"),
    [(False, ModelStatus.LOADING), (True, ModelStatus.UNLOADED)],
    ids=["", "old versions do not list it"],
)
async def test_a_model_that_starts_or_stops_is_not_loaded(make, legacy, status):
    scene = await make(legacy=legacy)
    scene.servers.hold = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        load = group.create_task(scene.client.load(CODER))
        while not scene.gateway.loads:
            await asyncio.sleep(0.01)
        assert (await scene.entry(CODER)).status is status
        assert not load.done()
        scene.servers.hold.set()
    assert (await scene.entry(CODER)).status is ModelStatus.LOADED


async def test_a_model_that_cannot_be_loaded_stays_unloaded(make):
    scene = await make()
    scene.servers.fails = True
    await scene.client.load(CODER)
    assert (await scene.entry(CODER)).status is ModelStatus.UNLOADED


async def test_a_load_that_another_client_ends_can_be_tried_again(make):
    scene = await make()
    scene.servers.hold = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(_refusal(scene.client.load(CODER)))
        while scene.gateway.state(CODER) != "starting":
            await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as session:
            unloading = group.create_task(_posted(session, f"{scene.base}/api/models/unload/{CODER}"))
            while not any("unload" in path for path in scene.gateway.paths):
                await asyncio.sleep(0.01)
            scene.servers.fails = True
            scene.servers.hold.set()
            await unloading
    assert "model unloaded" in loading.result().message


async def _refusal(asked: Awaitable[None]) -> EngineError:
    with pytest.raises(EngineError) as refused:
        await asked
    return refused.value


async def _posted(session: aiohttp.ClientSession, url: str) -> None:
    async with session.post(url) as answer:
        assert answer.status == 200


async def test_while_it_reports_events_only_states_are_asked_for(make):
    scene = await make()
    async with heard(scene):
        del scene.gateway.paths[:]
        names = [entry.name for entry in (await scene.client.listing()).models]
        assert (names, scene.gateway.paths) == ([CODER, WRITER], ["/running"])
    del scene.gateway.paths[:]
    await scene.client.listing()
    assert scene.gateway.paths == ["/running", "/v1/models"]
    assert scene.client.ends == 1


async def test_a_gateway_that_is_gone_cannot_load():
    async with SwapClient("http://127.0.0.1:9") as client:
        with pytest.raises(EngineGoneError):
            await client.load(CODER)


async def test_another_start_means_another_process(make):
    scene = await make(groups=(SwapGroup(members=(CODER, WRITER)),))
    for _ in range(2):
        await scene.client.load(CODER)
        first = (await scene.entry(CODER)).port
        await scene.client.load(WRITER)
        assert (await scene.entry(CODER)).port == 0
    assert first == 2


async def test_events_tell_aliases_unlisted_models_and_each_start(make):
    scene = await make()
    assert [entry.name for entry in (await scene.client.listing()).models] == [CODER]
    async with heard(scene) as event:
        assert [entry.name for entry in (await scene.client.listing()).models] == [CODER, WRITER]
        assert (await scene.entry(CODER)).aliases == ("gpt",)
        for _ in range(2):  # without any listing in between
            await scene.client.load(CODER)
            await scene.client.load(WRITER)
        await scene.client.load(CODER)
        await event.wait()
        while (await scene.entry(CODER)).port != 3:
            await asyncio.sleep(0.01)


async def test_a_listed_alias_is_no_model_as_soon_as_that_is_known(make):
    """Events tell; of an old version only the load of an alias does."""
    scene = await make(lists_aliases=True)
    async with heard(scene):
        assert [entry.name for entry in (await scene.client.listing()).models] == [CODER, WRITER]
    old = await make(lists_aliases=True, legacy=True)
    assert [entry.name for entry in (await old.client.listing()).models] == [CODER, "gpt"]
    await old.client.load(ModelName("gpt"))
    assert [entry.name for entry in (await old.client.listing()).models] == [CODER]


async def test_old_versions_have_no_events(make):
    scene = await make(legacy=True)
    with pytest.raises(EngineError):
        await scene.client.events(lambda: None)


@pytest.mark.parametrize(
    ("about", "aliases"),
    [
        ({"type": "model", "aliases": ["y"]}, [("y",)]),
        ({"peerID": "other"}, []),
        *(({"type": kind}, []) for kind in ("alias", "peer", "profile", "selector")),
    ],
    ids=str,
)
async def test_the_newest_versions_list_aliases_of_a_model_and_entries_that_are_none(about, aliases):
    entry = {"id": "x", "meta": {"llamaswap": about}}
    assert [one.aliases for one in await listing_of(entry)] == aliases


async def listing_of(*entries: dict[str, Any]) -> tuple[ModelEntry, ...]:
    async def running(_: web.Request) -> web.Response:
        return web.json_response({"running": []})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": list(entries)})

    app = web.Application()
    app.router.add_get("/running", running)
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server, SwapClient(str(server.make_url(""))) as client:
        return (await client.listing()).models


async def test_events_that_are_too_long_or_not_understood_are_left_out():
    said = b'{"type":"modelStatus","data":"[{\\"id\\":\\"x\\",\\"state\\":\\"ready\\"}]"}'
    odd = (b"[]", b"no JSON", b'{"type":"modelStatus"}', b'{"type":"modelStatus","data":"[1]"}')

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for data in (b"x" * (2 * LONGEST), *odd, said):
            await response.write(b"event:message\ndata:" + data + b"\n\n")
        return response

    app = web.Application()
    app.router.add_get("/api/events", events)
    calls = 0

    def changed() -> None:
        nonlocal calls
        calls += 1

    async with TestServer(app) as server, SwapClient(str(server.make_url(""))) as client:
        await client.events(changed)
    assert calls == 1


@pytest.mark.parametrize(
    ("command", "slots"),
    [
        ("llama-server -np 3", 3),
        ("# comment\n/opt/llama-server -np 3 # more\n", 3),
        ("docker run --name llama-server -p 1:2 image -np 3", None),
        ("vllm serve x", None),
        ("llama-server -np 'three", None),
        ("llama-server -np three", None),
        ("", None),
    ],
)
def test_flags_are_read_in_a_command_of_llama_server(command, slots):
    flags = flags_in(command)
    assert (flags.n_parallel if flags else None) == slots


# -- one of its models -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/completion?x=1", "/completion?x=1"),
        ("/upstream/coder/ui", "/upstream/coder/ui"),
        ("/tokenize?x=1", "/upstream/lab/writer%201/tokenize?x=1"),
    ],
)
def test_a_request_goes_by_its_own_route_if_llama_swap_has_it(target, sent):
    address = EngineAddress(BASE, ModelName("lab/writer 1"), swaps=True)
    assert address.passed_on(target, held=True) == sent
    assert address.passed_on(target, held=False) == sent


def test_a_control_call_goes_to_the_models_own_server_and_names_no_model():
    address = EngineAddress(BASE, CODER, swaps=True)
    assert address.url("GET", "/slots") == f"{BASE}/upstream/coder/slots"
    assert address.body("POST", {"a": 1}) == {"a": 1}
    assert address.engine == f"{BASE}#coder"


@pytest.mark.parametrize("legacy", [False, True])
async def test_the_health_of_an_unloaded_model_is_asked_without_loading_it(make, legacy):
    scene = await make(legacy=legacy)
    async with scene.model(CODER) as client:
        assert await client.health() is Health.UNLOADED
    assert scene.gateway.loads == []


async def test_a_loaded_model_is_asked_itself(make):
    scene = await make()
    await scene.client.load(WRITER)
    async with scene.model(WRITER) as client:
        assert await client.health() is Health.OK
        assert await client.props() == PROPS
    assert "/props" in scene.servers.seen


@pytest.mark.parametrize("props", [{"detail": "Not Found"}, {"version": "1"}])
async def test_a_model_of_another_server_is_foreign(make, props):
    scene = await make()
    scene.servers.props = props
    await scene.client.load(CODER)
    async with scene.model(CODER) as client:
        assert await client.health() is Health.FOREIGN


async def test_a_call_that_the_models_server_did_not_answer_is_sent_again_unless_it_is_a_task(make):
    """llama-swap answers 502 if its connection, which it had kept, is closed by the server."""
    scene = await make()
    await scene.client.load(CODER)
    async with scene.model(CODER) as model:
        scene.servers.drops = 1
        assert await model.tokenize("text", add_special=True, parse_special=True) == [1]
        scene.servers.drops, scene.servers.seen = 1, []
        with pytest.raises(EngineGoneError, match="no answer"):
            await model.save(SlotId(0), "file")
        assert len(scene.servers.seen) == 1


async def test_a_barred_model_gets_no_call(make):
    scene = await make()
    async with scene.model(CODER) as client:
        client.bar(barred=True)
        with pytest.raises(EngineGoneError):
            await client.slots()
        assert await client.health() is Health.UNLOADED
        assert scene.gateway.loads == []
        client.bar(barred=False)
        await client.props()
    assert [model for model, _ in scene.gateway.loads] == [CODER]
