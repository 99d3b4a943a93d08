"""Steps: each has an outcome whatever fails, and computed tokens are counted."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from patience import PATIENCE
from slotkeeper.engine.answers import EngineError
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.driver import EffectRunner
from slotkeeper.runtime.engines import Engines
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.effects import (
    Budgeted,
    Erase,
    Prefill,
    Purpose,
    Restore,
    Save,
    SaveMoment,
    SetTimer,
    Stop,
)
from slotkeeper.scheduler.events import Erased, Event, Planted, Restored, Saved, TimerFired
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.slot_contents import Snapshot, SnapshotId
from slotkeeper.scheduler.snapshots.budgets import GIB, Budgets
from slotkeeper.scheduler.types import Loading, Place, RequestId, SlotId
from unit.runtime.stubs import ENGINE, TRAITS, StubLink, settled

OWNER, PLACE = RequestId("r"), Place(ENGINE, SlotId(0))
FILE = Snapshot(id=SnapshotId("s"), fingerprint="f", tokens=Tokens(range(300)), size=1)


class Broken:
    """Snapshots that raise in every step."""

    async def save(self, *_: object) -> Event:
        raise KeyError("n_saved")

    restore = erase = save


def engines(link: StubLink) -> Engines:
    return Engines({ENGINE: link}, Tasks(print), Metrics(), wait=0.0, back_by=lambda _: None)


@pytest.mark.parametrize(
    ("step", "answer"),
    [
        (Save(request=OWNER, place=PLACE, moment=SaveMoment.PARK, tokens=FILE.tokens, size=1), Saved),
        (Restore(request=OWNER, place=PLACE, snapshot=FILE), Restored),
        (Erase(request=OWNER, place=PLACE), Erased),
    ],
)
async def test_a_bug_in_a_step_still_gives_the_step_an_outcome(step, answer):
    said: list[Event | BaseException] = []
    tasks, metrics = Tasks(said.append), Metrics()
    broken: Any = Broken()
    effect_runner = EffectRunner(
        engines(StubLink()), metrics, tasks, said.append, broken, lost=lambda _: None
    )
    await effect_runner._tend(step)
    (event,) = said
    assert isinstance(event, answer)
    assert event.request == OWNER
    assert not getattr(event, "ok", False)
    assert getattr(event, "snapshot", None) is None
    assert getattr(event, "outcome", Loading.LOST) is Loading.LOST
    assert metrics.registry.get_sample_value("slotkeeper_fallbacks_total", {"reason": "files"}) == 1


async def test_a_stopped_prefill_has_one_outcome_and_its_computed_tokens_are_counted():
    said: list[Event | BaseException] = []
    tasks, metrics, link = Tasks(said.append), Metrics(), StubLink()
    link.client.hold, link.client.first_batch = asyncio.Event(), 128
    effect_runner = EffectRunner(engines(link), metrics, tasks, said.append, None, lost=lambda _: None)
    effect_runner.perform(Prefill(request=OWNER, place=PLACE, tokens=FILE.tokens, purpose=Purpose.NEXT))
    await settled()
    effect_runner.perform(Stop(request=OWNER))
    await settled()
    effect_runner.perform(Stop(request=OWNER))  # too late: the prefill has its outcome
    (event,) = said
    assert isinstance(event, Planted)
    assert event.stopped
    assert event.computed is None
    assert link.client.cancelled == 1
    counted = metrics.registry.get_sample_value("slotkeeper_prefill_tokens_total", {"purpose": "idle"})
    assert counted == 128


async def test_a_prefill_is_counted_as_a_whole_and_only_once():
    said: list[Event | BaseException] = []
    tasks, metrics, link = Tasks(said.append), Metrics(), StubLink()
    link.client.first_batch = 128
    effect_runner = EffectRunner(engines(link), metrics, tasks, said.append, None, lost=lambda _: None)
    effect_runner.perform(Prefill(request=OWNER, place=PLACE, tokens=FILE.tokens, purpose=Purpose.PLANT))
    await settled()
    (event,) = said
    assert isinstance(event, Planted)
    assert event.computed == len(FILE.tokens)
    metrics.forgotten(OWNER)  # its request is over
    metrics.forgotten(OWNER)
    counted = metrics.registry.get_sample_value("slotkeeper_prefill_tokens_total", {"purpose": "plant"})
    assert counted == len(FILE.tokens)


async def test_the_progress_of_a_prefill_is_reported():
    said, heard = list[Event | BaseException](), list[tuple[RequestId, int]]()
    tasks, link = Tasks(said.append), StubLink()
    link.client.first_batch = 128

    def progress(request: RequestId, computed: int) -> None:
        heard.append((request, computed))

    effect_runner = EffectRunner(
        engines(link), Metrics(), tasks, said.append, None, lost=lambda _: None, progress=progress
    )
    effect_runner.perform(Prefill(request=OWNER, place=PLACE, tokens=FILE.tokens, purpose=Purpose.PLANT))
    await settled()
    assert heard == [(OWNER, 128), (OWNER, len(FILE.tokens))]


async def test_a_timer_replaced_by_an_earlier_one_is_cancelled():
    """Otherwise each pause of a busy day would leave a task that sleeps for a minute."""
    said: list[Event | BaseException] = []
    tasks = Tasks(said.append)
    effect_runner = EffectRunner(
        engines(StubLink()), Metrics(), tasks, said.append, None, lost=lambda _: None
    )
    for delay in (3600.0, 60.0, 0.01):
        effect_runner.perform(SetTimer(delay=delay))
    async with asyncio.timeout(PATIENCE):
        while not said:
            await asyncio.sleep(0.005)
    await settled()
    assert [type(event) for event in said] == [TimerFired]
    assert len(tasks) == 0


async def test_a_plant_with_a_forgotten_image_is_not_sent_to_the_engine():
    said: list[Event | BaseException] = []
    link = StubLink()
    runner = EffectRunner(
        engines(link), Metrics(), Tasks(said.append), said.append, None, lost=lambda _: None
    )
    tokens = Tokens([1, 2]) + Tokens.image(b"d" * 32, 8) + Tokens([3, 4])
    await runner._plant(Prefill(request=OWNER, place=PLACE, tokens=tokens, purpose=Purpose.NEXT))
    (event,) = said
    assert isinstance(event, Planted)
    assert (event.computed, event.unsent) == (None, True)
    assert link.client.prefills == []


@pytest.mark.parametrize(("tokens", "counted"), [(TRAITS.n_ctx, 0), (TRAITS.n_ctx - 1, 1)])
async def test_a_plant_that_does_not_fit_into_a_slot_is_the_clients_fault(tokens, counted):
    """The engine refuses its request too, which is on a route without id_slot."""
    said: list[Any] = []
    link, metrics = StubLink(), Metrics()
    link.client.refuse = EngineError(400, "the request exceeds the available context size")
    runner = EffectRunner(engines(link), metrics, Tasks(said.append), said.append, None, lost=lambda _: None)
    plant = Prefill(request=OWNER, place=PLACE, tokens=Tokens([1] * tokens), purpose=Purpose.STEER)
    with capture_logs() as logs:
        await runner._plant(plant)
    assert [event.computed for event in said] == [None]
    assert metrics.registry.get_sample_value("slotkeeper_fallbacks_total", {"reason": "plant"}) == counted
    assert [line["event"] for line in logs] == ["plant_failed" if counted else "plant_too_long"]


def test_the_cold_folder_learns_its_budget():
    """It may keep what no state needs any more only within that."""
    snapshots = Mock()
    runner = EffectRunner(engines(StubLink()), Metrics(), Tasks(print), print, snapshots, lost=print)
    runner.note(Budgeted(budgets=Budgets(hot=GIB, cold=3, hourly=7)))
    snapshots.store.limit_cold.assert_called_once_with(3)


@pytest.mark.parametrize(("hot", "warned"), [(GIB, True), (2 * GIB, False)])
def test_budgets_are_logged_and_a_warning_says_what_to_set_if_few_snapshots_fit(hot, warned):
    runner = EffectRunner(engines(StubLink()), Metrics(), Tasks(print), print, None, lost=print)
    with capture_logs() as logs:
        runner.note(Budgeted(budgets=Budgets(hot=hot, cold=0, hourly=7, largest=GIB)))
    first, *more = logs
    assert (first["event"], first["hot_bytes"], first["hourly_bytes"]) == ("snapshot_budgets", hot, 7)
    assert [line["event"] for line in more] == ["few_snapshots_fit"] * warned
    assert all("--hot-bytes 2GiB" in line["advice"] for line in more)
