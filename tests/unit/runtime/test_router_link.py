"""A link to a router that the test controls: swaps that fail, and models that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from patience import PATIENCE
from slotkeeper.engine.answers import EngineError, EngineGoneError, Health
from slotkeeper.engine.routers.router_client import Listing, ModelEntry, RouterClient
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime import router_link
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.router_link import RouterLink
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.events import Event, ModelsListed, SwapFailed
from slotkeeper.scheduler.policies.router import ModelStatus
from slotkeeper.scheduler.types import EngineId, ModelName
from unit.runtime.stubs import StubLink

BASE = EngineId("http://router")
CODER = EngineId("http://router#coder")
MODELS = (ModelEntry(name=ModelName("coder"), aliases=("gpt",), port=0), ModelEntry(name=ModelName("writer")))


class FakeRouter(RouterClient):
    """A router whose models, loads and unloads the test sets."""

    def __init__(self) -> None:
        super().__init__(BASE)
        self.models = {entry.name: entry for entry in MODELS}
        self.trouble: Exception | None = None  # raised by any call
        self.tells = False
        self.cut = asyncio.Event()
        self.looks = 0
        self.loads: Callable[[ModelName], None] = lambda model: self.becomes(model, ModelStatus.LOADED)
        self.unloads: Callable[[ModelName], None] = lambda model: self.becomes(model, ModelStatus.UNLOADED)

    def becomes(self, model: str, status: ModelStatus, port: int = 1) -> None:
        name = ModelName(model)
        self.models[name] = replace(self.models[name], status=status, port=port)

    async def listing(self, **_: Any) -> Listing:
        self.looks += 1
        if self.trouble:
            raise self.trouble
        return Listing(models=tuple(self.models.values()), most=1)

    async def load(self, model: ModelName, **_: Any) -> None:
        self.loads(model)

    async def unload(self, model: ModelName, **_: Any) -> None:
        self.unloads(model)

    async def events(self, changed: Callable[[], object], **_: Any) -> None:
        """Open a stream that `cut` ends. With `tells`, it reports every change."""
        self.told = self.tells
        changed()
        await self.cut.wait()
        self.cut.clear()
        self.told = False
        self.ends += 1


class Line(StubLink):
    """A link to a model; it is up as soon as the router has it, unless the test says otherwise."""

    probes = True

    def __init__(self, engine: EngineId) -> None:
        super().__init__(engine)
        self.up = self.listed = False

    def kick(self) -> None:
        super().kick()
        self.up = self.listed and self.probes


@dataclass
class Scene:
    router: RouterLink
    fake: FakeRouter
    metrics: Metrics
    said: list[Event] = field(default_factory=list)
    lines: dict[EngineId, Line] = field(default_factory=dict)

    async def comes(self, so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not so():
                await asyncio.sleep(0.01)

    async def listed(self) -> Line:
        await self.comes(lambda: CODER in self.lines)
        return self.lines[CODER]

    async def loading(self) -> Line:
        """Begin a load that goes on until the test ends it."""
        line = await self.listed()
        self.fake.loads = lambda model: self.fake.becomes(model, ModelStatus.LOADING)
        self.router.load(line)
        await self.comes(lambda: line.listed)
        return line

    async def loaded(self) -> Line:
        line = await self.listed()
        self.router.load(line)
        await self.comes(lambda: line.up)
        return line

    async def failed(self) -> SwapFailed:
        await self.comes(lambda: isinstance(self.said[-1], SwapFailed))
        event = self.said[-1]
        assert isinstance(event, SwapFailed)
        return event


@pytest.fixture
async def scene(monkeypatch) -> AsyncIterator[Scene]:
    for name in ("CALM", "EAGER", "PROBED", "AGAIN"):
        monkeypatch.setattr(router_link, name, 0.02)
    # Longer: a load that is accepted just before this process loses the processor is not abandoned.
    monkeypatch.setattr(router_link, "BEGINS", 0.5)
    failures: list[BaseException] = []
    tasks, metrics = Tasks(failures.append), Metrics()
    made: list[Scene] = []

    def added(engine: EngineId, _: ModelEntry) -> Line:
        made[0].lines[engine] = Line(engine)
        return made[0].lines[engine]

    def removed(line: EngineLink) -> None:
        del made[0].lines[line.engine]

    def post(event: Event) -> None:
        made[0].said.append(event)

    front = StubLink(BASE)
    fake = FakeRouter()
    link = RouterLink(
        front,
        client=fake,
        tasks=tasks,
        metrics=metrics,
        post=post,
        added=added,
        removed=removed,
        lost=lambda _: None,
    )
    made.append(Scene(link, fake, metrics))
    tasks.start(link.watch())
    yield made[0]
    await tasks.close()
    await link.close()
    assert not failures


async def test_each_model_has_a_link_and_is_found_by_its_names(scene):
    await scene.listed()
    assert list(scene.lines) == [CODER, "http://router#writer"]
    assert [scene.router.model_of(name) for name in ("coder", "gpt", "zzz")] == ["coder", "coder", None]
    (event,) = scene.said
    assert isinstance(event, ModelsListed)
    assert (event.router, event.most) == (BASE, 1)


async def test_an_unchanged_listing_is_not_posted_again(scene):
    await scene.listed()
    await asyncio.sleep(0.1)
    assert len(scene.said) == 1


async def test_a_model_that_is_no_longer_listed_loses_its_link(scene):
    await scene.listed()
    del scene.fake.models[ModelName("coder")]
    await scene.comes(lambda: CODER not in scene.lines)


async def test_a_new_port_means_another_process(scene):
    line = await scene.listed()
    scene.fake.becomes("coder", ModelStatus.LOADED, port=1)
    await scene.comes(lambda: line.kicks == 1)
    scene.fake.becomes("coder", ModelStatus.LOADED, port=2)
    await scene.comes(lambda: line.kicks == 2)


async def test_a_load_ends_when_the_link_of_the_model_is_up(scene):
    await scene.loaded()
    await scene.comes(lambda: counted(scene, "ok") == 1)
    assert not any(isinstance(event, SwapFailed) for event in scene.said)


@pytest.mark.parametrize("refusal", [EngineError(500, "model limit reached"), EngineGoneError("gone")])
async def test_a_refused_load_may_be_tried_again(scene, refusal):
    line = await scene.listed()
    scene.fake.loads = raising(refusal)
    scene.router.load(line)
    assert not (await scene.failed()).broken


async def test_a_model_that_is_already_running_counts_as_loaded(scene):
    line = await scene.listed()

    def runs(model: ModelName) -> None:
        scene.fake.becomes(model, ModelStatus.LOADED)
        raise EngineError(400, "model is already running")

    scene.fake.loads = runs
    scene.router.load(line)
    await scene.comes(lambda: line.up)


async def test_a_process_that_ends_during_its_load_makes_the_model_broken(scene):
    await scene.loading()
    scene.fake.becomes("coder", ModelStatus.UNLOADED)
    assert (await scene.failed()).broken
    assert counted(scene, "failed") == 1


async def test_a_process_that_ends_before_it_was_probed_makes_the_model_broken(scene, monkeypatch):
    """The scheduler waits for the result of a load, and begins no other one before."""
    monkeypatch.setattr(router_link, "PROBED", PATIENCE)
    line = await scene.listed()
    line.probes = False
    scene.router.load(line)
    await scene.comes(lambda: line.listed)
    scene.fake.becomes("coder", ModelStatus.UNLOADED)
    assert (await scene.failed()).broken
    assert (counted(scene, "ok"), counted(scene, "failed")) == (0, 1)


async def test_a_load_that_never_begins_is_abandoned(scene):
    line = await scene.listed()
    scene.fake.loads = lambda _: None
    scene.router.load(line)
    assert (await scene.failed()).broken


async def test_a_load_that_a_busy_router_accepts_late_is_not_abandoned(scene, monkeypatch):
    """It answers neither the load nor looks at its listing meanwhile."""
    line, answers, listing = await scene.listed(), asyncio.Event(), scene.fake.listing

    async def listed(**more: Any) -> Listing:
        seen = await listing(**more)
        await answers.wait()
        return seen

    async def accepts(model: ModelName, **_: Any) -> None:
        monkeypatch.setattr(scene.fake, "listing", listed)
        await asyncio.sleep(0.1)
        scene.fake.becomes(model, ModelStatus.LOADING)
        monkeypatch.setattr(router_link, "BEGINS", 0.0)
        asyncio.get_running_loop().call_later(0.1, answers.set)

    monkeypatch.setattr(scene.fake, "load", accepts)
    scene.router.load(line)
    await answers.wait()
    await asyncio.sleep(0.1)
    scene.fake.becomes("coder", ModelStatus.LOADED)
    await scene.comes(lambda: line.up)
    assert not any(isinstance(event, SwapFailed) for event in scene.said)


@pytest.mark.parametrize("loaded_by_us", [True, False], ids=["loaded by us", "loaded by others"])
async def test_a_model_that_cannot_be_probed_is_not_waited_for(scene, loaded_by_us):
    line = await scene.listed()
    line.probes = False
    if loaded_by_us:
        scene.router.load(line)
    else:
        scene.fake.becomes("coder", ModelStatus.LOADED)
    assert (await scene.failed()).broken


async def test_a_router_lost_during_a_load_does_not_make_the_model_broken(scene):
    await scene.loading()
    scene.fake.trouble = EngineGoneError("gone")
    assert not (await scene.failed()).broken


async def test_a_router_restarted_between_two_looks_does_not_make_the_model_broken(scene):
    """Its stream of events has ended, and the new process has not loaded the model."""
    await scene.loading()
    scene.fake.cut.set()
    await scene.comes(lambda: scene.fake.ends == 1)
    scene.fake.becomes("coder", ModelStatus.UNLOADED)
    assert not (await scene.failed()).broken


async def test_time_without_the_router_does_not_count_as_time_of_a_probe(scene, monkeypatch):
    line = await scene.listed()
    line.probes = False
    monkeypatch.setattr(router_link, "PROBED", 0.5)
    scene.fake.becomes("coder", ModelStatus.LOADED)
    await scene.comes(lambda: line.listed)
    scene.fake.trouble = EngineGoneError("gone")
    await asyncio.sleep(0.6)
    scene.fake.trouble = None
    await scene.comes(lambda: line.listed)
    line.probes = True
    line.kick()
    await asyncio.sleep(0.1)
    assert not any(isinstance(event, SwapFailed) for event in scene.said)


async def test_while_events_report_every_change_the_listing_is_read_only_at_an_event(scene):
    await scene.listed()
    scene.router.front.health = Health.SWAPPER
    scene.fake.tells = True
    scene.fake.cut.set()  # the next stream tells
    await scene.comes(lambda: scene.router.front.told)
    await asyncio.sleep(0.1)
    before = scene.fake.looks
    await asyncio.sleep(0.2)  # ten looks without such a stream
    assert scene.fake.looks == before
    scene.fake.tells = False
    kicks = scene.router.front.kicks
    scene.fake.cut.set()
    await scene.comes(lambda: scene.fake.looks > before + 5)
    assert not scene.router.front.told
    assert scene.router.front.kicks > kicks


async def test_an_unload_waits_for_all_running_answers(scene):
    line = await scene.loaded()
    unloaded: list[ModelName] = []
    scene.fake.unloads = unloaded.append
    async with line.pulse.answer():
        scene.router.unload(line)
        await asyncio.sleep(0.1)
        assert not line.up
        assert not unloaded
    await scene.comes(lambda: unloaded == ["coder"])
    assert not line.listed  # the listing still says that it is loaded
    scene.fake.becomes("coder", ModelStatus.UNLOADED)
    await scene.comes(lambda: not scene.router._unloading)


@pytest.mark.parametrize("error", [EngineError(500, "no"), EngineGoneError("gone"), ValueError("a bug")])
async def test_a_model_whose_unload_is_refused_continues_to_serve(scene, error):
    line = await scene.loaded()
    scene.fake.unloads = raising(error)
    scene.router.unload(line)
    assert not (await scene.failed()).broken
    await scene.comes(lambda: line.up)


async def test_the_models_of_a_lost_router_are_lost_and_come_back_with_it(scene):
    line = await scene.listed()
    scene.fake.becomes("coder", ModelStatus.LOADED)
    await scene.comes(lambda: line.up)
    scene.fake.trouble = EngineGoneError("gone")
    await scene.comes(lambda: not line.up)
    last = scene.said[-1]
    assert isinstance(last, ModelsListed)
    assert last.models == ()
    assert scene.router.model_of("gpt") == "coder"
    scene.fake.trouble = None
    await scene.comes(lambda: line.up)
    last = scene.said[-1]
    assert isinstance(last, ModelsListed)
    assert len(last.models) == 2


async def test_a_server_that_is_no_longer_a_router_has_no_models(scene):
    await scene.listed()
    scene.fake.trouble = EngineError(200, "no router", foreign=True)
    await scene.comes(lambda: not scene.lines)


async def test_a_refused_listing_keeps_the_known_models(scene):
    await scene.listed()
    scene.fake.trouble = EngineError(401, "Invalid API Key")
    await asyncio.sleep(0.1)
    assert scene.lines


def raising(error: Exception) -> Callable[[ModelName], None]:
    def call(_: ModelName) -> None:
        raise error

    return call


def counted(scene: Scene, outcome: str) -> float:
    labels = {"model": "coder", "outcome": outcome}
    return scene.metrics.registry.get_sample_value("slotkeeper_model_loads_total", labels) or 0
