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
from slotkeeper.scheduler.events import Erased, Planted, Restored, Saved, TimerFired
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import Snapshot, SnapshotId
from slotkeeper.scheduler.snapshots.budgets import GIB, Budgets
from slotkeeper.scheduler.types import Loading, Place, RequestId, SlotId
from unit.runtime.stubs import ENGINE, TRAITS, StubLink, settled

OWNER, PLACE = RequestId("r"), Place(ENGINE, SlotId(0))
FILE = Snapshot(id=SnapshotId("s"), fingerprint="f", tokens=Tokens(range(300)), size=1)


class Scene:
    """A runner of effects in front of a stub of an engine, and what it said."""

    def __init__(self, snapshots: Any = None) -> None:
        self.said: list[Any] = []
        self.progress: list[tuple[RequestId, int]] = []
        self.link, self.metrics, self.tasks = StubLink(), Metrics(), Tasks(self.said.append)
        engines = Engines({ENGINE: self.link}, self.tasks, self.metrics, wait=0.0, back_by=lambda _: None)
        self.runner = EffectRunner(
            engines,
            self.metrics,
            self.tasks,
            self.said.append,
            snapshots,
            lost=lambda _: None,
            progress=lambda *computed: self.progress.append(computed),
        )

    def counted(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"slotkeeper_{name}_total", labels)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def prefill(tokens: Tokens = FILE.tokens, purpose: Purpose = Purpose.NEXT) -> Prefill:
    return Prefill(request=OWNER, place=PLACE, tokens=tokens, purpose=purpose)


@pytest.mark.parametrize(
    ("step", "answer"),
    [
        (Save(request=OWNER, place=PLACE, moment=SaveMoment.PARK, tokens=FILE.tokens, size=1), Saved),
        (Restore(request=OWNER, place=PLACE, snapshot=FILE), Restored),
        (Erase(request=OWNER, place=PLACE), Erased),
    ],
)
async def test_a_bug_in_a_step_still_gives_the_step_an_outcome(step, answer):
    scene = Scene(Mock(**dict.fromkeys(("save", "restore", "erase"), Mock(side_effect=KeyError("n_saved")))))
    await scene.runner._tend(step)
    (event,) = scene.said
    assert isinstance(event, answer)
    assert event.request == OWNER
    assert not getattr(event, "ok", False)
    assert getattr(event, "snapshot", None) is None
    assert getattr(event, "outcome", Loading.LOST) is Loading.LOST
    assert scene.counted("fallbacks", reason="files") == 1


async def test_a_stopped_prefill_has_one_outcome_and_its_computed_tokens_are_counted(scene):
    scene.link.client.hold, scene.link.client.first_batch = asyncio.Event(), 128
    scene.runner.perform(prefill())
    await settled()
    scene.runner.perform(Stop(request=OWNER))
    await settled()
    scene.runner.perform(Stop(request=OWNER))  # too late: the prefill has its outcome
    (event,) = scene.said
    assert isinstance(event, Planted)
    assert event.stopped
    assert event.computed is None
    assert scene.link.client.cancelled == 1
    assert scene.counted("prefill_tokens", purpose="idle") == 128


async def test_a_prefill_is_reported_while_it_goes_on_and_counted_as_a_whole_and_only_once(scene):
    scene.link.client.first_batch = 128
    scene.runner.perform(prefill(purpose=Purpose.PLANT))
    await settled()
    (event,) = scene.said
    assert isinstance(event, Planted)
    assert event.computed == len(FILE.tokens)
    assert scene.progress == [(OWNER, 128), (OWNER, len(FILE.tokens))]
    scene.metrics.forgotten(OWNER)  # its request is over
    scene.metrics.forgotten(OWNER)
    assert scene.counted("prefill_tokens", purpose="plant") == len(FILE.tokens)


async def test_a_timer_replaced_by_an_earlier_one_is_cancelled(scene):
    """Otherwise each pause of a busy day would leave a task that sleeps for a minute."""
    for delay in (3600.0, 60.0, 0.01):
        scene.runner.perform(SetTimer(delay=delay))
    async with asyncio.timeout(PATIENCE):
        while not scene.said:
            await asyncio.sleep(0.005)
    await settled()
    assert [type(event) for event in scene.said] == [TimerFired]
    assert len(scene.tasks) == 0


async def test_a_plant_with_a_forgotten_image_is_not_sent_to_the_engine(scene):
    await scene.runner._plant(prefill(Tokens([1, 2]) + Tokens.image(b"d" * 32, 8) + Tokens([3, 4])))
    (event,) = scene.said
    assert isinstance(event, Planted)
    assert (event.computed, event.unsent) == (None, True)
    assert scene.link.client.prefills == []


@pytest.mark.parametrize(("tokens", "counted"), [(TRAITS.n_ctx, 0), (TRAITS.n_ctx - 1, 1)])
async def test_a_plant_that_does_not_fit_into_a_slot_is_the_clients_fault(scene, tokens, counted):
    """The engine refuses its request too, which is on a route without id_slot."""
    scene.link.client.refuse = EngineError(400, "the request exceeds the available context size")
    with capture_logs() as logs:
        await scene.runner._plant(prefill(Tokens([1] * tokens), Purpose.STEER))
    assert [event.computed for event in scene.said] == [None]
    assert scene.counted("fallbacks", reason="plant") == counted
    assert [line["event"] for line in logs] == ["plant_failed" if counted else "plant_too_long"]


def test_the_cold_folder_learns_its_budget():
    """It may keep what no state needs any more only within that."""
    snapshots = Mock()
    Scene(snapshots).runner.note(Budgeted(budgets=Budgets(hot=GIB, cold=3, hourly=7)))
    snapshots.store.limit_cold.assert_called_once_with(3)


@pytest.mark.parametrize(("hot", "warned"), [(GIB, True), (2 * GIB, False)])
def test_budgets_are_logged_and_a_warning_says_what_to_set_if_few_snapshots_fit(scene, hot, warned):
    with capture_logs() as logs:
        scene.runner.note(Budgeted(budgets=Budgets(hot=hot, cold=0, hourly=7, largest=GIB)))
    first, *more = logs
    assert (first["event"], first["hot_bytes"], first["hourly_bytes"]) == ("snapshot_budgets", hot, 7)
    assert [line["event"] for line in more] == ["few_snapshots_fit"] * warned
    assert all("--hot-bytes 2GiB" in line["advice"] for line in more)
