"""The driver: effects are run, and their outcomes come back as events."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.driver import MOMENT, Driver
from slotkeeper.scheduler.effects import Forward, Report
from slotkeeper.scheduler.events import Gone
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.figures import Usage
from slotkeeper.scheduler.types import Reason, RequestId, SlotId, SlotView
from unit.runtime.stubs import ENGINE, PROMPT, admit, fallbacks, finish, granted, settled

# -- placement -----------------------------------------------------------------------------------------


async def test_a_request_gets_a_slot_and_its_end_is_reported(driver):
    reports: list[Report] = []
    driver.reports = reports.append
    forward = await granted(admit(driver, "a"))
    assert forward.engine == ENGINE
    assert forward.slot in (0, 1)
    finish(driver, "a")
    assert [(r.request, r.usage) for r in reports] == [("a", Usage(prompt=len(PROMPT), cached=0))]
    assert driver.placement.pending(RequestId("a")) is None


async def test_an_idle_moment_begins_when_no_request_is_served_and_the_slot_is_unchanged(driver, link):
    held = [len(PROMPT) + 1, 301]
    link.client.views = [SlotView(slot=SlotId(n), busy=False, task=n, held=held[n]) for n in (0, 1)]
    await granted(admit(driver, "a"))
    finish(driver, "a")
    await granted(admit(driver, "b", Tokens([7] * 300)))
    with pytest.raises(TimeoutError):  # another request is served
        async with asyncio.timeout(3 * MOMENT):
            await driver.idle_moment(RequestId("a"))
    finish(driver, "b", Tokens([7] * 300))
    assert await driver.idle_moment(RequestId("a"))
    assert not await driver.idle_moment(RequestId("nobody"))


async def test_the_context_of_a_slot_is_the_smallest_known(driver, link):
    assert driver.context(None) == driver.context("any model") == 4096
    link.traits = replace(link.traits, unified=True)
    assert driver.context(None) == 2048  # its share of a unified buffer
    link.traits = None
    assert driver.context(None) == 0


async def test_a_request_that_leaves_the_queue_is_never_granted(driver):
    for name in "ab":
        await granted(admit(driver, name))
    waiting = admit(driver, "c")
    driver.post(Gone(at=driver.now(), request=RequestId("c")))
    assert waiting.cancelled()
    finish(driver, "a")
    await settled()
    assert driver.placement.queued == 0


async def test_an_event_caused_by_an_event_is_handled_after_it(driver, link):
    """Effects are run before the next event is taken, however deeply it was posted."""
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


async def test_close_ends_all_tasks_and_engine_connections(link):
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
    """Return a request on a route without id_slot that needs a slot that the engine would not choose."""
    link.client.hold = asyncio.Event()
    filler = Tokens([5] * 40)
    for name, prompt in (("a", PROMPT), ("b", filler)):
        await granted(admit(driver, name, prompt))
    finish(driver, "a")
    finish(driver, "b", filler)
    await settled()
    driver.placement.tables[ENGINE].shadow.engine_choice = lambda *_: None  # never the slot that we want
    grant = admit(driver, "c", PROMPT + Tokens([3] * 50), pinnable=False)
    await settled()
    return grant


async def test_a_plant_is_sent_before_its_request(driver, link, steered):
    assert link.client.prefills, "nothing was planted"
    assert not steered.done()
    link.client.hold.set()
    forward = await granted(steered)
    assert (forward.slot, forward.reason) == (None, Reason.STEERED)


async def test_a_plant_is_stopped_when_its_client_leaves(driver, link, steered):
    driver.post(Gone(at=driver.now(), request=RequestId("c")))
    await settled()
    assert steered.cancelled()
    assert link.client.cancelled == 1


@pytest.mark.parametrize("error", [EngineError(500, "no"), EngineGoneError("gone"), RuntimeError("a bug")])
async def test_a_failed_plant_does_not_hold_its_request_back(driver, link, steered, error):
    del driver.placement.tables[ENGINE].shadow.engine_choice  # as the engine chooses
    link.client.refuse = error
    link.client.hold.set()
    await settled()
    link.client.refuse = None
    forward = await granted(steered)
    assert forward.reason is not Reason.STEERED
    assert fallbacks(driver, "plant") == 1
