"""The driver: effects are performed, outcomes come back, and nothing of ours holds a request back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from slotkeeper.core.effects import Forward, Report
from slotkeeper.core.events import Arrived, EngineLost, EngineUp, Finished, Gone, Rendered
from slotkeeper.core.observed import SlotView
from slotkeeper.core.placement import Placement
from slotkeeper.core.tokens import Tokens
from slotkeeper.core.types import ClientId, EngineId, Reason, RequestId, SlotId
from slotkeeper.engine.client import EngineError, EngineGoneError
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.driver import Driver
from unit.runtime.stubs import ENGINE, TRAITS, StubLink

PROMPT = Tokens(range(1, 400))


@pytest.fixture
def link() -> StubLink:
    return StubLink()


@pytest.fixture
async def driver(link) -> AsyncIterator[Driver]:
    driver = Driver({ENGINE: link}, Metrics())
    driver.start()
    await settled()
    yield driver
    await driver.close()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def granted(grant: asyncio.Future[Forward]) -> Forward:
    async with asyncio.timeout(5):
        return await grant


def arrival(name: str, **more) -> Arrived:
    return Arrived(at=Driver.now(), request=RequestId(name), client=ClientId("c"), **more)


def admit(driver: Driver, name: str, prompt: Tokens = PROMPT, **more) -> asyncio.Future[Forward]:
    grant = driver.admit(arrival(name, **more))
    driver.post(Rendered(at=driver.now(), request=RequestId(name), prompt=prompt))
    return grant


def finish(driver: Driver, name: str, prompt: Tokens = PROMPT, cached: int = 0) -> None:
    figures = {"prompt_tokens": len(prompt), "cached": cached, "generated": 2}
    driver.post(Finished(at=driver.now(), request=RequestId(name), **figures))


def fallbacks(driver: Driver, reason: str) -> float:
    return driver.metrics.registry.get_sample_value("slotkeeper_fallbacks_total", {"reason": reason}) or 0.0


@pytest.fixture
def broken(monkeypatch):
    """The next event of this kind meets a bug in the core; later ones do not."""

    def breaks(kind: type) -> None:
        real = Placement.on
        armed = [True]

        def on(self, event):
            if armed and isinstance(event, kind):
                armed.clear()
                raise RuntimeError("a bug")
            return real(self, event)

        monkeypatch.setattr(Placement, "on", on)

    return breaks


# -- the usual way -------------------------------------------------------------------------------------


async def test_a_request_gets_a_slot_and_its_end_is_reported(driver):
    reports: list[Report] = []
    driver.reports = reports.append
    forward = await granted(admit(driver, "a"))
    assert forward.engine == ENGINE
    assert forward.slot in (0, 1)
    assert forward.pin
    finish(driver, "a")
    assert [(r.request, r.prompt_tokens, r.cached) for r in reports] == [("a", len(PROMPT), 0)]
    assert driver.placement.pending(RequestId("a")) is None


async def test_two_requests_never_get_one_slot_and_the_third_waits(driver):
    first, second = await granted(admit(driver, "a")), await granted(admit(driver, "b", Tokens([7] * 300)))
    assert {first.slot, second.slot} == {0, 1}
    third = admit(driver, "c", Tokens([8] * 300))
    await settled()
    assert not third.done()
    finish(driver, "a")
    assert (await granted(third)).slot == first.slot


async def test_a_request_that_leaves_the_line_is_never_granted(driver):
    for name in "ab":
        await granted(admit(driver, name))
    waiting = admit(driver, "c")
    driver.post(Gone(at=driver.now(), request=RequestId("c")))
    assert waiting.cancelled()
    finish(driver, "a")
    await settled()
    assert driver.placement.queued == 0


async def test_an_event_caused_by_an_event_is_taken_after_it(driver, link):
    """Effects are performed before the next event is looked at, however deep it was posted."""
    order: list[str] = []
    real = driver.placement.on

    def on(event):
        order.append(type(event).__name__)
        return real(event)

    driver.placement.on = on
    driver.reports = lambda _: driver.post(Gone(at=driver.now(), request=RequestId("nobody")))
    await granted(admit(driver, "a"))
    finish(driver, "a")
    assert order == ["Arrived", "Rendered", "Finished", "Gone"]


async def test_close_ends_all_tasks_and_every_line_to_an_engine(link):
    driver = Driver({ENGINE: link}, Metrics())
    driver.start()
    await settled()
    assert len(driver.tasks) > 0
    await driver.close()
    assert len(driver.tasks) == 0
    assert link.client.closed


# -- plants --------------------------------------------------------------------------------------------


@pytest.fixture
async def steered(driver, link) -> asyncio.Future[Forward]:
    """A request on a route without id_slot, which wants a slot that the engine would not choose."""
    link.client.hold = asyncio.Event()
    filler = Tokens([5] * 40)
    for name, prompt in (("a", PROMPT), ("b", filler)):
        await granted(admit(driver, name, prompt))
    finish(driver, "a")
    finish(driver, "b", filler)
    await settled()
    driver.placement.tables[ENGINE].shadow.engine_choice = lambda *_: None  # never what we want
    grant = admit(driver, "c", PROMPT + Tokens([3] * 50), pinnable=False)
    await settled()
    return grant


async def test_a_plant_comes_before_its_request(driver, link, steered):
    assert link.client.prefills, "nothing was planted"
    assert not steered.done()
    link.client.hold.set()
    forward = await granted(steered)
    assert (forward.slot, forward.reason) == (None, Reason.STEERED)


async def test_a_plant_whose_client_left_is_stopped(driver, link, steered):
    driver.post(Gone(at=driver.now(), request=RequestId("c")))
    await settled()
    assert steered.cancelled()
    assert link.client.cancelled == 1


@pytest.mark.parametrize("error", [EngineError(500, "no"), EngineGoneError("gone"), RuntimeError("a bug")])
async def test_a_plant_that_fails_does_not_hold_its_request_back(driver, link, steered, error):
    del driver.placement.tables[ENGINE].shadow.engine_choice  # it goes where the engine would put it
    link.client.refuse = error
    link.client.hold.set()
    await settled()
    link.client.refuse = None
    forward = await granted(steered)
    assert forward.reason is not Reason.STEERED
    assert fallbacks(driver, "plant") == 1


# -- when something of ours breaks ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Arrived, Rendered, Finished])
async def test_a_bug_in_the_core_lets_everybody_who_waits_through(driver, broken, kind):
    for name in "ab":
        await granted(admit(driver, name))
    waiting = [admit(driver, name) for name in "cd"]
    assert not any(grant.done() for grant in waiting)
    broken(kind)
    if kind is Finished:
        finish(driver, "a")
    else:
        waiting.append(admit(driver, "e"))
    for grant in waiting:
        forward = await granted(grant)
        assert (forward.reason, forward.slot, forward.pin) == (Reason.FAIL_OPEN, None, False)
        assert forward.engine == ENGINE
    assert fallbacks(driver, "placement") == 1


async def test_after_a_bug_the_next_request_is_placed_again(driver, link, broken):
    broken(Arrived)
    assert (await granted(admit(driver, "a"))).reason is Reason.FAIL_OPEN
    await settled()
    forward = await granted(admit(driver, "b"))
    assert forward.reason is not Reason.FAIL_OPEN
    assert forward.slot is not None


async def test_after_a_bug_no_slot_is_given_out_unseen(driver, link, broken):
    """The fresh core knows nothing of what runs: it must look first (engine.md T1)."""
    running = await granted(admit(driver, "a"))
    busy = SlotView(slot=SlotId(running.slot), busy=True, task=1, held=10)
    link.client.views[running.slot] = busy
    broken(Rendered)
    await granted(admit(driver, "b"))
    looks = link.client.looks
    await settled()
    forward = await granted(admit(driver, "c"))
    assert link.client.looks > looks
    assert forward.slot != running.slot


async def test_an_effect_that_cannot_be_performed_does_not_stop_the_others(driver):
    def fails(_: Report) -> None:
        raise RuntimeError("a bug")

    driver.reports = fails
    await granted(admit(driver, "a"))
    finish(driver, "a")
    assert fallbacks(driver, "effect") == 1
    assert (await granted(admit(driver, "b"))).slot is not None


async def test_a_task_that_fails_is_counted(driver):
    async def work() -> None:
        raise RuntimeError("a bug")

    driver.tasks.start(work())
    await settled()
    assert fallbacks(driver, "task") == 1


# -- engines that come and go --------------------------------------------------------------------------


async def test_without_an_engine_the_first_one_speaks_for_itself(driver):
    driver.post(EngineLost(at=driver.now(), engine=ENGINE))
    forward = await granted(admit(driver, "a"))
    assert (forward.engine, forward.slot, forward.reason) == (ENGINE, None, Reason.FAIL_OPEN)


async def test_an_engine_that_comes_back_gives_slots_again(driver):
    driver.post(EngineLost(at=driver.now(), engine=ENGINE))
    driver.post(EngineUp(at=driver.now(), engine=ENGINE, traits=replace(TRAITS, n_slots=1)))
    await settled()
    assert (await granted(admit(driver, "a"))).slot == 0


async def test_slots_that_cannot_be_seen_make_us_look_for_the_engine(driver, link):
    link.client.refuse = EngineGoneError("gone")
    kicks = link.kicks
    driver.observe_soon(ENGINE)
    await settled()
    assert link.kicks > kicks


async def test_whether_an_engine_is_up_is_a_metric():
    up = StubLink()
    metrics = Metrics()
    driver = Driver({ENGINE: up, EngineId("http://other"): StubLink(EngineId("http://other"))}, metrics)
    driver.start()
    await settled()
    for engine in driver.links:
        assert metrics.registry.get_sample_value("slotkeeper_engine_up", {"engine": engine}) == 1
    driver._engine_lost(up)
    assert metrics.registry.get_sample_value("slotkeeper_engine_up", {"engine": ENGINE}) == 0
    await driver.close()
