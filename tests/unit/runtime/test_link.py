"""The watch over an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

import pytest

from chaos.raw import until
from patience import PATIENCE
from slotkeeper.engine.answers import EngineError, EngineFrozenError, Health
from slotkeeper.engine.client import EngineAddress, EngineClient
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime import link as link_module
from slotkeeper.runtime.engines import Engines
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.types import EngineId

if TYPE_CHECKING:
    from slotkeeper.vocab.tokenizer import Tokenizer

NO_ENGINE = EngineId("http://127.0.0.1:9")


class HealthStub(EngineClient):
    """An engine whose health the test sets."""

    def __init__(self) -> None:
        self.said = Health.OK
        self.asked = 0
        self.woken = asyncio.Event()
        self.marker: str | None = "one"
        self.seconds: list[float] = []  # the limit of each look

    @property
    def busy(self) -> bool:
        return False

    async def health(self, *, seconds: float = 0.0, **_: object) -> Health:
        self.asked += 1
        self.seconds.append(seconds)
        return self.said

    async def rouse(self, **_: object) -> None:
        await self.woken.wait()


def link_to_nobody(**settings: Any) -> EngineLink:
    return EngineLink(NO_ENGINE, address=EngineAddress.of(NO_ENGINE), api_key=None, **settings)


@pytest.mark.parametrize(
    ("health", "frozen_after", "lost"),
    [
        (Health.SILENT, 60.0, False),  # a busy machine
        (Health.SILENT, 0.0, True),  # it was silent for too long
        (Health.DOWN, 60.0, True),  # refused, or the connection broke
        (Health.UNASKED, 0.0, False),  # our own want is not the engine's
    ],
)
async def test_an_engine_that_answers_slowly_is_not_lost(health, frozen_after, lost, monkeypatch):
    link, gone = link_to_nobody(frozen_after=frozen_after), list[EngineLink]()
    engine = HealthStub()
    await link.client.close()
    monkeypatch.setattr(link, "client", engine)
    link.up, link.process = True, "one"
    watch = asyncio.get_running_loop().create_task(link.watch(lambda _: None, gone.append))
    async with asyncio.timeout(PATIENCE):
        while engine.asked < 1:
            await asyncio.sleep(0)
        engine.said, before = health, engine.asked
        while engine.asked < before + 3:
            link.kick()
            await asyncio.sleep(0)
    watch.cancel()
    await asyncio.wait([watch], timeout=PATIENCE)
    assert bool(gone) is lost
    assert link.up is not lost
    assert link.pulse.frozen is (lost and health is Health.SILENT)


async def lost_links(link: EngineLink, *said: Health) -> list[EngineLink]:
    """Return the links that were reported as lost, after polls with these results."""
    gone: list[EngineLink] = []
    engine = link.client = HealthStub()
    for engine.said in said:
        await link._look(lambda _: None, gone.append)
    return gone


def silent_for_long() -> EngineLink:
    link = link_to_nobody(frozen_after=60.0)
    link.up, link.process = True, "one"
    link.pulse.answered_at = time.monotonic() - 61.0
    return link


async def test_a_probe_goes_on_while_its_engine_cannot_be_asked_for_its_health(monkeypatch):
    link, engine, gone = link_to_nobody(frozen_after=0.02), HealthStub(), list[EngineLink]()
    await link.client.close()
    engine.said = Health.UNASKED

    async def probe() -> None:
        while engine.asked < 3:
            await asyncio.sleep(0)

    monkeypatch.setattr(link, "client", engine)
    monkeypatch.setattr(link, "_probe", probe)
    async with asyncio.timeout(PATIENCE):
        assert await link._watched_probe(gone.append) is None
    assert gone == []


async def test_one_unanswered_poll_does_not_make_an_engine_frozen():
    assert not await lost_links(silent_for_long(), Health.SILENT)
    assert not await lost_links(silent_for_long(), Health.SILENT, Health.OK, Health.SILENT)
    assert await lost_links(silent_for_long(), Health.SILENT, Health.SILENT)


async def test_an_engine_that_still_sends_answers_is_not_frozen():
    link = silent_for_long()
    link.pulse.answered()  # a token, or the progress of a prefill
    assert not await lost_links(link, Health.SILENT, Health.SILENT)


async def test_a_frozen_engine_is_replaced_once_if_that_is_possible():
    link, replaced = silent_for_long(), []
    link.replace = lambda: replaced.append(link)
    assert await lost_links(link, *[Health.SILENT] * 4) == [link]
    assert replaced == [link]
    assert link.returns


async def test_calls_to_a_frozen_engine_are_cancelled_and_new_calls_are_refused():
    link, waits = silent_for_long(), asyncio.Event()

    async def call() -> None:
        async with link.pulse.answer():
            waits.set()
            await asyncio.Event().wait()

    under_way = asyncio.get_running_loop().create_task(call())
    await waits.wait()
    await lost_links(link, Health.SILENT, Health.SILENT)
    for broken_off in (under_way, call()):
        with pytest.raises(EngineFrozenError):
            await broken_off
    link.pulse.frozen = False
    with pytest.raises(TimeoutError, match="its own"):
        async with link.pulse.answer():
            raise TimeoutError("its own")


@pytest.mark.parametrize("turns", range(6))
async def test_a_watch_that_is_cancelled_while_it_is_woken_ends(turns):
    """This happens at the end of a sidecar whose last answer broke off."""
    link = link_to_nobody()
    watch = asyncio.get_running_loop().create_task(link.watch(lambda _: None, lambda _: None))
    await asyncio.sleep(0.05)  # the watch waits for the next poll
    link.kick()
    for _ in range(turns):  # turns of the event loop, between the wake-up and the cancellation
        await asyncio.sleep(0)
    watch.cancel()
    ended, _ = await asyncio.wait([watch], timeout=PATIENCE)
    watch.cancel()
    await link.client.close()
    assert ended


class Loading:
    """Engines of one link, whose health the test sets, and a request that waits for it."""

    def __init__(self) -> None:
        self.link, self.stub = link_to_nobody(), HealthStub()
        self.link.client, self.stub.said = self.stub, Health.LOADING
        self.link._probe = self._probe  # type: ignore[method-assign]
        self.refused: EngineError | None = None
        self.tasks = Tasks(print)
        self.engines = Engines(
            {NO_ENGINE: self.link}, self.tasks, Metrics(), wait=PATIENCE, back_by=lambda _: None
        )

    async def _probe(self) -> None:
        if self.refused:
            raise self.refused
        self.link.tokenizer = cast("Tokenizer", object())

    async def looks(self, number: int) -> None:
        enough = self.stub.asked + number
        while self.stub.asked < enough:
            self.link.kick()
            await asyncio.sleep(0)


@pytest.fixture
async def loading() -> AsyncIterator[Loading]:
    scene = Loading()
    scene.tasks.start(scene.link.watch(lambda _: scene.engines.changed(), lambda _: None))
    scene.link.changed = scene.engines.changed
    async with asyncio.timeout(PATIENCE):
        yield scene
    await scene.tasks.close()


@pytest.mark.parametrize("refused", [None, EngineError(501, "no slots")])
async def test_a_request_waits_for_an_engine_that_loads_its_model(loading, refused):
    loading.refused = refused
    waits = asyncio.get_running_loop().create_task(loading.engines.awake(time.monotonic()))
    await loading.looks(4)
    assert loading.engines.expects()
    assert not waits.done()
    loading.stub.said = Health.OK
    await waits
    assert loading.link.ready is (refused is None)


async def test_a_request_waits_until_an_engine_that_was_never_probed_has_woken(loading):
    loading.stub.said = Health.SLEEPING
    await loading.looks(1)
    loading.engines.rouse()
    waits = asyncio.get_running_loop().create_task(loading.engines.awake(time.monotonic()))
    await loading.looks(4)
    assert not waits.done()
    loading.stub.said = Health.OK
    loading.stub.woken.set()
    await waits
    assert loading.link.ready


async def test_a_request_does_not_wait_for_an_engine_that_ended_while_it_loaded(loading):
    waits = asyncio.get_running_loop().create_task(loading.engines.awake(time.monotonic()))
    await loading.looks(4)
    assert not waits.done()
    loading.stub.said = Health.DOWN
    await waits
    assert not loading.engines.expects()


@pytest.fixture
async def idle(monkeypatch) -> AsyncIterator[Loading]:
    """An engine that had no request for long."""
    monkeypatch.setattr(link_module, "CALM", 0.001)
    monkeypatch.setattr(link_module, "IDLE", 10 * PATIENCE)
    scene = Loading()
    scene.stub.said = Health.OK
    scene.tasks.start(scene.link.watch(lambda _: None, lambda _: None))
    scene.link._used_at -= link_module.IDLE_AFTER
    async with asyncio.timeout(PATIENCE):
        await until(lambda: scene.link._idle and scene.link.ready)
        await asyncio.sleep(0.05)
        assert scene.stub.asked <= 2
        yield scene
    await scene.tasks.close()


async def test_a_request_to_an_idle_engine_waits_for_one_look_and_then_it_is_watched_closely(idle):
    asked = idle.stub.asked
    await idle.engines.awake(time.monotonic())
    assert idle.stub.asked == asked + 1
    assert not idle.link.doubtful
    await until(lambda: idle.stub.asked > asked + 10)


async def test_a_request_wakes_an_engine_that_has_fallen_asleep_since_the_last_look(idle):
    idle.stub.said = Health.SLEEPING
    awake = asyncio.get_running_loop().create_task(idle.engines.awake(time.monotonic()))
    await until(lambda: not idle.link.up)
    idle.engines.rouse()
    idle.stub.said = Health.OK
    idle.stub.woken.set()
    await awake
    assert idle.link.ready


async def test_a_request_waits_only_once_for_an_idle_engine_that_does_not_answer(idle):
    """Another engine may serve it."""
    idle.stub.said = Health.SILENT
    await idle.engines.awake(time.monotonic())
    assert not idle.link.doubtful
    assert idle.link.up
    assert idle.stub.seconds[-1] == link_module.CALM


async def test_an_engine_that_sleeps_is_asked_nothing(idle):
    idle.stub.said = Health.SLEEPING
    idle.link.kick()
    await until(lambda: not idle.link.up)
    asked = idle.stub.asked
    await asyncio.sleep(0.05)
    assert idle.stub.asked == asked


async def test_another_marker_tells_another_process_and_none_tells_nothing(idle):
    idle.stub.marker = None
    await idle.looks(2)
    assert (idle.link.losses, idle.link.process) == (0, "one")
    idle.stub.marker = "two"
    await idle.looks(2)
    assert (idle.link.losses, idle.link.process) == (1, "two")
