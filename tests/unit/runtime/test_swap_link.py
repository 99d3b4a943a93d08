"""A link to llama-swap: nothing of ours is sent to a model that is not loaded, or that a load may unload."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from patience import PATIENCE
from slotkeeper.engine.answers import Health
from slotkeeper.engine.client import EngineAddress
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime import link as link_module
from slotkeeper.runtime import router_link
from slotkeeper.runtime.engines import Engines
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.events import Event, ModelsListed, SwapFailed
from slotkeeper.scheduler.types import EngineId, ModelName
from swap_like import SwapGroup, SwapLike, Swapped, serving
from unit.engine.test_swap_client import Servers

MOMENT = 0.3  # seconds in which a link that looks would have been seen


@dataclass
class FakeServer(Servers):
    """A server of one model: llama-server's /props, or those of another server."""

    slots: asyncio.Event | None = None  # it answers /slots only then

    async def answer(self, request: web.Request) -> web.Response:
        if self.slots and request.path == "/slots":
            self.seen.append(request.path)
            await self.slots.wait()
        return await super().answer(request)


class ProbedLink(EngineLink):
    """A link whose probe only asks for the slots, twice, and reads a file in between."""

    async def _probe(self) -> None:
        self.tokenizer = object()  # type: ignore[assignment]  # never asked
        await self.client.rouse(headers=self.auth)
        await asyncio.sleep(5 * router_link.MOMENT)
        await self.client.rouse(headers=self.auth)


@dataclass
class Scene:
    gateway: SwapLike
    base: str
    servers: dict[str, FakeServer]
    engines: Engines
    events: list[Event] = field(default_factory=list)

    def link(self, model: str) -> EngineLink:
        return self.engines.links[EngineId(f"{self.base}#{model}")]

    def load(self, model: str, *aside: str) -> None:
        self.engines.router_of(self.link(model).engine).load(self.link(model), map(self.link, aside))

    def listed(self) -> dict[str, str]:
        """Return the models of the last listing, and how they are shown."""
        last = next(event for event in reversed(self.events) if isinstance(event, ModelsListed))
        assert last.chooses
        return {view.name: "foreign" if view.foreign else view.status.value for view in last.models}

    async def comes(self, so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not so():
                await asyncio.sleep(0.01)

    async def up(self, model: str) -> EngineLink:
        await self.comes(lambda: self.link(model).up)
        return self.link(model)


@asynccontextmanager
async def scened(
    group: SwapGroup, auth: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Scene]:
    failures: list[BaseException] = []
    async with AsyncExitStack() as stack:
        servers = {name: FakeServer(stack) for name in group.members}
        models = {name: Swapped(start=one.start, stop=one.stop) for name, one in servers.items()}
        gateway = SwapLike(models, groups=(group,), **settings)
        base = await stack.enter_async_context(serving(gateway))
        tasks = Tasks(failures.append)

        def new_link(engine: EngineId, address: EngineAddress, _: Any) -> EngineLink:
            return ProbedLink(engine, address=address, api_key=None)

        front = ProbedLink(EngineId(base), address=EngineAddress.of(base), api_key=None)
        front.auth = auth or {}
        links = {front.engine: front}
        engines = Engines(links, tasks, Metrics(), wait=1, back_by=lambda _: None, new_link=new_link)
        scene = Scene(gateway, base, servers, engines)
        engines.watch(lambda _: None, lambda _: None, scene.events.append)
        await scene.comes(lambda: len(engines.links) == 1 + len(group.members))
        yield scene
        await tasks.close()
        await engines.close()
    assert not failures


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CALM", "EAGER", "AGAIN"):
        monkeypatch.setattr(router_link, name, 0.02)
    for name in ("CALM", "EAGER"):
        monkeypatch.setattr(link_module, name, 0.02)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with scened(SwapGroup(members=("a", "b"))) as made:
        yield made


def calls(scene: Scene) -> Iterable[str]:
    return [path for path in scene.gateway.paths if path.startswith("/upstream/")]


async def test_models_that_are_not_loaded_are_not_asked(scene):
    await asyncio.sleep(MOMENT)
    assert not calls(scene)
    assert scene.listed() == {"a": "unloaded", "b": "unloaded"}
    assert scene.engines.model_of("a") == "a"
    assert scene.link("a").address == EngineAddress(scene.base, ModelName("a"), swaps=True)


async def test_a_model_that_is_up_and_idle_is_not_asked_again(scene):
    scene.load("a")
    link = await scene.up("a")
    await scene.comes(lambda: not link.busy)
    await asyncio.sleep(MOMENT)
    before = list(calls(scene))
    await asyncio.sleep(MOMENT)
    assert calls(scene) == before
    async with link.pulse.answer():  # a request runs: a frozen engine must be noticed
        await scene.comes(lambda: calls(scene) != before)


async def test_a_load_waits_for_calls_to_the_models_that_it_may_unload(scene):
    scene.load("a")
    link = await scene.up("a")
    async with link.pulse.answer():
        scene.load("b", "a")
        await scene.comes(lambda: not link.up)
        await asyncio.sleep(MOMENT)
        assert len(scene.gateway.loads) == 1
    await scene.up("b")
    assert scene.gateway.stops == ["a"]
    assert scene.listed() == {"a": "unloaded", "b": "loaded"}


async def test_a_probe_in_progress_does_not_load_the_model_again(scene):
    """Between two calls of a probe none is in progress; the next one must not be sent."""
    scene.servers["a"].slots = asyncio.Event()
    scene.load("a")
    await scene.comes(lambda: "/slots" in scene.servers["a"].seen)
    scene.load("b", "a")
    await scene.comes(lambda: not scene.link("a").listed)
    scene.servers["a"].slots.set()
    await scene.up("b")
    await asyncio.sleep(MOMENT)
    assert [model for model, _ in scene.gateway.loads] == ["a", "b"]


async def test_a_model_that_stays_is_up_again_after_the_load():
    async with scened(SwapGroup(members=("a", "b"), swap=False)) as scene:
        scene.load("a")
        link = await scene.up("a")
        scene.load("b", "a")
        await scene.up("b")
        await scene.up("a")
        assert link.losses == 1
        assert scene.gateway.stops == []
        assert scene.listed() == {"a": "loaded", "b": "loaded"}


async def test_a_model_that_others_unload_is_lost_and_not_loaded_again(scene):
    """A call of ours at the moment of the stop loads it again (docs/models.md): then it is stopped again."""
    scene.load("a")
    link, loads = await scene.up("a"), 1
    for _ in range(20):
        await scene.gateway._stop("a")
        link.kick()
        await scene.comes(lambda: not link.up or len(scene.gateway.loads) > loads)  # noqa: B023 - awaited
        if len(scene.gateway.loads) == loads:
            break
        loads = len(scene.gateway.loads)
        await scene.up("a")
    assert not link.up
    await asyncio.sleep(MOMENT)
    assert len(scene.gateway.loads) == loads


async def test_a_model_that_cannot_be_loaded_is_broken(scene):
    scene.servers["a"].fails = True
    scene.load("a")
    await scene.comes(lambda: isinstance(scene.events[-1], SwapFailed))
    (event,) = (event for event in scene.events if isinstance(event, SwapFailed))
    assert event.broken


async def test_a_model_of_another_server_is_listed_as_foreign_and_not_asked_again(scene):
    scene.servers["a"].props = {"version": "1"}
    scene.load("a")
    await scene.comes(lambda: scene.listed()["a"] == "foreign")
    assert scene.link("a").health is Health.FOREIGN
    await asyncio.sleep(MOMENT)
    before = list(calls(scene))
    await asyncio.sleep(MOMENT)
    assert calls(scene) == before
    assert not any(isinstance(event, SwapFailed) for event in scene.events)
    scene.load("b", "a")
    await scene.up("b")
    assert scene.listed()["a"] == "unloaded"


async def test_old_versions_are_followed_without_events():
    async with scened(SwapGroup(members=("a", "b")), legacy=True) as scene:
        for model, other in (("a", "b"), ("b", "a"), ("a", "b")):
            scene.load(model, *([other] if scene.link(other).up else []))
            await scene.up(model)
        assert [model for model, _ in scene.gateway.loads] == ["a", "b", "a"]


async def test_models_are_known_by_the_key_of_a_client():
    async with scened(SwapGroup(members=("a",)), api_key="secret", auth={"X-Api-Key": "secret"}) as scene:
        await scene.comes(lambda: "/api/events" in scene.gateway.paths)
        scene.load("a")
        await scene.up("a")


async def test_a_path_names_a_model_whose_name_may_have_slashes():
    async with scened(SwapGroup(members=("lab", "lab/b"))) as scene:
        paths = ("/upstream/lab/b/v1/x", "/upstream/l%61b/v1", "/upstream/lab", "/upstream/x/v1", "/v1/x")
        assert [scene.engines.route_at(path) for path in paths] == [
            ("lab/b", "/v1/x"),
            ("lab", "/v1"),
            ("lab", ""),
            ("", "/upstream/x/v1"),
            ("", "/v1/x"),
        ]


async def test_a_path_without_a_version_is_that_path_at_the_server_of_its_model(scene):
    paths = ("/v/chat/completions", "/v/x", "/v1/chat/completions")
    assert [scene.engines.route_at(path) for path in paths] == [
        ("", "/chat/completions"),
        ("", "/v/x"),
        ("", "/v1/chat/completions"),
    ]


async def test_a_form_names_a_model(scene):
    part = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r\n--x--'
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    found = [scene.engines.model_of_form(headers, part % name) for name in (b"a", b"z")]
    assert found == ["a", ""]
