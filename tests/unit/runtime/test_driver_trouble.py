"""Failures of the sidecar or the engine: no request waits for ever, and no slot is used before it is read."""

from __future__ import annotations

import asyncio
from typing import Any, get_args
from unittest.mock import Mock

import pytest

from slotkeeper.engine.answers import EngineGoneError
from slotkeeper.observe.log import configure
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.driver import RENEWAL_SECONDS, Driver
from slotkeeper.scheduler.effects import Observe, Report
from slotkeeper.scheduler.events import (
    Acted,
    Arrived,
    Closing,
    EngineLost,
    EngineUp,
    Event,
    Finished,
    Gone,
    Observed,
    ObserveFailed,
    Rendered,
    RoomSeen,
    SnapshotsChanged,
)
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.snapshots.budgets import FolderRoom, Limits
from slotkeeper.scheduler.types import EngineId, Reason, RequestId, SlotId, SlotView, Tier
from unit.runtime.stubs import ENGINE, TRAITS, StubLink, admit, fallbacks, finish, granted, settled


@pytest.fixture(autouse=True)
def logged_as_by_serve():
    """By default structlog shows all local variables of a traceback, which takes half a second each time."""
    configure("warning", "console")


@pytest.fixture
def broken(monkeypatch):
    """Make the next event of this kind raise in the scheduler; later ones do not."""

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


# -- failures of the sidecar ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Arrived, Rendered, Finished])
async def test_a_bug_in_the_scheduler_lets_all_waiting_requests_through(driver, broken, kind):
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
        assert (forward.reason, forward.slot) == (Reason.FAIL_OPEN, None)
        assert forward.engine == ENGINE
    assert fallbacks(driver, "placement") == 1


async def test_after_a_bug_the_budgets_still_follow_the_disk(driver, broken):
    room = FolderRoom(total=1000, free=400)
    driver.post(RoomSeen(at=driver.now(), rooms={Tier.HOT: room}))
    broken(Arrived)
    await granted(admit(driver, "a"))
    await settled()
    assert driver.placement.budgets.hot == 100


async def test_after_a_bug_no_slot_is_used_before_the_slots_are_read(driver, link, broken):
    """The new scheduler knows nothing of running tasks: it must read GET /slots first (engine.md T1)."""
    running = await granted(admit(driver, "a"))
    busy = SlotView(slot=SlotId(running.slot), busy=True, task=1, held=10)
    link.client.views[running.slot] = busy
    broken(Rendered)
    await granted(admit(driver, "b"))
    looks = link.client.looks
    await settled()
    forward = await granted(admit(driver, "c"))
    assert link.client.looks > looks
    assert forward.slot == 1 - running.slot


class EndlessError(BaseException):
    """The same bug is met again and again. No handler of the driver catches this."""


@pytest.fixture
def always(monkeypatch):
    """Make all events of these kinds raise in the scheduler from now on. Returns the events that did."""

    def breaks(*kinds: type) -> list[Any]:
        real, met = Placement.on, []

        def on(self, event):
            if not isinstance(event, kinds):
                return real(self, event)
            met.append(event)
            if len(met) > 100:
                raise EndlessError
            raise RuntimeError("a bug")

        monkeypatch.setattr(Placement, "on", on)
        return met

    return breaks


KINDS = get_args(Event)


@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS])
async def test_a_bug_in_every_event_of_a_kind_holds_no_request_back(driver, link, always, kinds, drained):
    met = always(*kinds)
    driver.membership.drain(link, drain=drained)
    driver.post(EngineUp(at=driver.now(), engine=ENGINE, traits=TRAITS))
    driver.post(SnapshotsChanged(at=driver.now()))
    await settled()
    for name in "abcd":
        waiting = admit(driver, name)
        await settled()
        if not waiting.done():  # all slots are taken, or the engine is drained
            assert driver.placement.queued == 1
            driver.post(Gone(at=driver.now(), request=RequestId(name)))
    finish(driver, "a")
    driver.post(ObserveFailed(at=driver.now(), engine=ENGINE))
    await settled()
    assert fallbacks(driver, "placement") == len(met)


async def test_a_bug_in_all_answers_of_the_slots_is_met_about_once_a_second(driver, link, always):
    met = always(Observed)
    driver.post(EngineLost(at=driver.now(), engine=ENGINE))
    driver.post(EngineUp(at=driver.now(), engine=ENGINE, traits=TRAITS))
    await asyncio.sleep(1.5 * RENEWAL_SECONDS)
    assert len(met) in {2, 3}
    assert (await granted(admit(driver, "a"))).reason is Reason.FAIL_OPEN


async def test_what_cannot_be_told_to_a_new_scheduler_is_left_out(driver, link, always):
    """Else a drain would be forgotten for a bug in the catalog."""
    driver.membership.drain(link, drain=True)
    await settled()
    met = always(SnapshotsChanged, Acted)
    driver.post(Acted(at=driver.now(), request=RequestId("a"), left=None))
    await settled()
    assert [type(event) for event in met] == [Acted, SnapshotsChanged]
    assert driver.placement.drained(ENGINE)
    assert driver.placement.tables[ENGINE].up


async def test_after_a_bug_in_its_own_event_an_engine_is_known_all_the_same(driver, broken):
    driver.post(EngineLost(at=driver.now(), engine=ENGINE))
    broken(EngineUp)
    driver.post(EngineUp(at=driver.now(), engine=ENGINE, traits=TRAITS))
    await settled()
    assert (await granted(admit(driver, "a"))).slot is not None


async def test_requests_that_wait_for_a_scheduler_between_two_bugs_are_let_through(driver, link, broken):
    for _ in range(2):  # the second renewal is a second later
        broken(Acted)
        driver.post(Acted(at=driver.now(), request=RequestId("x"), left=None))
        await settled()
    driver.post(EngineUp(at=driver.now(), engine=ENGINE, traits=TRAITS))
    await settled()
    waiting = [admit(driver, name) for name in "abcd"]
    await settled()
    assert not all(grant.done() for grant in waiting)
    reasons = {(await granted(grant)).reason for grant in waiting}
    assert Reason.FAIL_OPEN in reasons


async def test_a_bug_in_the_question_what_is_unsaved_ends_the_wait_for_saves(driver, monkeypatch):
    def unsaved(self, now: float) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Placement, "unsaved", unsaved)
    driver._closing = True
    driver.post(Closing(at=driver.now()))
    assert driver._saved.is_set()
    assert fallbacks(driver, "placement") == 1


async def test_a_bug_in_the_question_whether_to_poll_fails_no_request(driver, monkeypatch):
    monkeypatch.setattr(Placement, "needs_poll", Mock(side_effect=KeyError("slot")))
    driver.announce()
    assert fallbacks(driver, "placement") == 1
    assert (await granted(admit(driver, "a"))).slot is not None


async def test_a_failing_effect_does_not_stop_the_others(driver):
    def fails(_: Report) -> None:
        raise RuntimeError("a bug")

    driver.reports = fails
    await granted(admit(driver, "a"))
    finish(driver, "a")
    assert fallbacks(driver, "effect") == 1
    assert (await granted(admit(driver, "b"))).slot is not None


async def test_a_failed_task_is_counted(driver):
    async def work() -> None:
        raise RuntimeError("a bug")

    driver.tasks.start(work())
    await settled()
    assert fallbacks(driver, "task") == 1


# -- engines that come and go --------------------------------------------------------------------------


async def test_without_an_engine_a_request_fails_open_to_the_first_engine(driver):
    driver.post(EngineLost(at=driver.now(), engine=ENGINE))
    forward = await granted(admit(driver, "a"))
    assert (forward.engine, forward.slot, forward.reason) == (ENGINE, None, Reason.NO_ENGINE)


async def test_a_failed_read_of_the_slots_triggers_a_check_of_the_engine(driver, link):
    link.client.refuse = EngineGoneError("gone")
    kicks = link.kicks
    driver.effect_runner.perform(Observe(engine=ENGINE, delay=0.0))
    await settled()
    assert link.kicks > kicks


async def test_the_metrics_show_whether_an_engine_is_up():
    up = StubLink()
    metrics = Metrics()
    driver = Driver({ENGINE: up, EngineId("http://other"): StubLink(EngineId("http://other"))}, metrics)
    driver.start()
    await settled()
    for engine in driver.links:
        assert metrics.registry.get_sample_value("slotkeeper_engine_up", {"engine": engine}) == 1
    up.up = False
    assert metrics.registry.get_sample_value("slotkeeper_engine_up", {"engine": ENGINE}) == 0
    await driver.close()


# -- an engine that is gone ----------------------------------------------------------------------------

WAIT = Limits().engine_wait


@pytest.mark.parametrize(
    ("lost", "came", "starts", "waits"),
    [
        (0, 0, False, True),
        (WAIT - 1, 0, False, True),  # a request waits its own time, not the rest of the first request's
        (WAIT + 1, 0, False, False),  # the engine is no longer expected back
        (WAIT + 1, 0, True, True),  # unless it can be started again
        (WAIT + 1, WAIT + 1, True, False),  # and even then not for ever
    ],
)
async def test_each_request_waits_its_own_time_for_a_lost_engine_that_may_return(
    driver, link, *, lost, came, starts, waits
):
    """`lost` and `came`: this many seconds ago."""
    link.up, link.returns, link.pulse.frozen = False, True, True
    link.replace = (lambda: None) if starts else None
    now = driver.now()
    driver.post(EngineLost(at=now - lost, engine=ENGINE, returns=True))
    waiting = asyncio.get_running_loop().create_task(driver.engines.awake(now - came))
    await settled()
    assert waiting.done() is not waits
    link.up = True
    driver.post(EngineUp(at=driver.now(), engine=ENGINE, traits=TRAITS))
    driver.engines.changed()
    await waiting
