"""The slot table of one engine, and what an answer of GET /slots changes in it."""

import pytest

from slotkeeper.scheduler.events import Observed
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Known, SlotContents
from slotkeeper.scheduler.slots.shadow import EngineShadow
from slotkeeper.scheduler.slots.table import (
    COUNT_SLIP,
    SILENCE,
    STALE,
    EngineTable,
    Maintenance,
    Orphan,
    SlotState,
)
from slotkeeper.scheduler.types import EngineId, RequestId, SlotId, SlotView

E = EngineId("e0")
NOW = 100.0
A, B = Tokens(range(1000)), Tokens(range(5000, 5400))
R1, R2 = RequestId("r1"), RequestId("r2")
IDLE, LAUNCHED, RUNNING, DRAINING, FOREIGN, MAINTENANCE = SlotState


def table(*contents, **traits):
    engine = EngineTable(E, EngineShadow(EngineTraits(n_slots=len(contents), **traits)))
    engine.shadow.slots = [SlotContents(tokens=tokens) if tokens else None for tokens in contents]
    return engine


def observation(*slots, asked=NOW):
    """Return a slot's view: "busy", or the tokens that it holds."""
    views = tuple(
        SlotView(slot=SlotId(n), busy=s == "busy", task=n, held=None if s == "busy" else s or None)
        for n, s in enumerate(slots)
    )
    return Observed(at=asked + 0.001, asked=asked, engine=E, slots=views)


def totals(engine):
    return [contents.total if contents else 0 for contents in engine.shadow.slots]


@pytest.mark.parametrize("after", [IDLE, LAUNCHED])
def test_idle_work_in_a_slot_is_forgotten_when_the_slot_leaves_it(after):
    engine = table(A, B)
    for slot in (SlotId(0), SlotId(1)):
        engine.move(slot, MAINTENANCE, R1, NOW)
        engine.maintenance[slot] = Maintenance(NOW, 0.5, None, stalls=True)
    engine.move(SlotId(0), after, None, NOW)
    assert engine.maintenance.keys() == {1}
    assert engine.stalled(NOW) == 0.5
    engine.reset(engine.traits, NOW)
    assert not engine.maintenance
    assert engine.stalled(NOW) == 0


def test_a_slot_left_while_running_is_free_at_the_next_observation():
    engine = table(None)
    engine.move(SlotId(0), RUNNING, R1, NOW)
    engine.leave(SlotId(0), NOW)
    engine.observed(observation(0, asked=NOW))
    assert engine.states == [IDLE]


# -- counts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "known", "opaque"),
    [
        (1000, 1000, 0),
        (1000 + COUNT_SLIP, 1000, COUNT_SLIP),
        (1000 - COUNT_SLIP, 1000 - COUNT_SLIP, 0),
        (400, 400, 0),  # cut by another client: the beginning is left
        (1500, 0, 1500),  # another client wrote there
    ],
)
def test_the_count_of_the_engine_for_an_idle_slot_is_accepted(count, known, opaque):
    engine = table(A, B)
    engine.observed(observation(count, 400))
    contents = engine.shadow.slots[0]
    assert (len(contents.tokens), contents.opaque) == (known, opaque)
    assert (engine.shared_until > NOW) is (count == 1500)


# -- restarts and unified buffers --------------------------------------------------------------------------


def test_all_slots_empty_means_a_restart():
    engine = table(A, B)
    engine.shadow.ram.append(SlotContents(tokens=A))
    engine.observed(observation(0, 0))
    assert totals(engine) == [0, 0]
    assert engine.shadow.ram == []


def test_a_restart_keeps_requests_that_are_being_sent():
    engine = table(A)
    engine.send(R1, 1, NOW - 1)
    engine.observed(observation(0))
    assert R1 in engine.unsettled


def test_a_slot_emptied_while_another_runs_shows_a_unified_engine():
    engine = table(A, None)
    engine.move(SlotId(1), LAUNCHED, R1, NOW - 1)
    engine.observed(observation(0, "busy"))
    assert engine.traits.unified
    assert [contents.tokens for contents in engine.shadow.ram] == [A]


def test_a_slot_emptied_by_an_ended_task_shows_a_unified_engine():
    engine = table(A, B)
    engine.move(SlotId(0), IDLE, None, NOW - 3)
    engine.move(SlotId(1), LAUNCHED, R1, NOW - 2)
    engine.move(SlotId(1), IDLE, None, NOW - 1)
    engine.observed(observation(0, 400))
    assert engine.traits.unified
    assert not engine.proven


def test_a_slot_that_survives_another_task_shows_that_the_engine_is_not_unified():
    engine = table(A, B)
    engine.move(SlotId(0), IDLE, None, NOW - 3)
    engine.move(SlotId(1), LAUNCHED, R1, NOW - 2)
    engine.move(SlotId(1), IDLE, None, NOW - 1)
    engine.observed(observation(1000, 400))
    assert engine.proven
    engine.observed(observation(0, 400, asked=NOW + 1))  # erased by another client
    assert not engine.traits.unified


@pytest.mark.parametrize(
    ("busy", "idle", "shared"),
    [
        ((670, 685, 694), (0,), True),  # as b11549 shows them, in 2,048 cells: just before they fail together
        ((303,), (0, 900, 956), True),  # and while it looks for the cells of a prompt
        ((), (1000, 1049), False),
        ((5,), (1000, 1048), True),
    ],
)
def test_idle_slots_that_hold_more_than_one_buffer_show_that_none_is_shared(busy, idle, shared):
    engine = table(*(None for _ in (*busy, *idle)), n_ctx=2048)
    engine.learn(engine.traits.learned(Known.FAILED, unified=True))
    views = [(True, held) for held in busy] + [(False, held) for held in idle]
    slots = [SlotView(slot=SlotId(n), busy=b, task=n, held=held) for n, (b, held) in enumerate(views)]
    engine.observed(Observed(at=NOW + 0.001, asked=NOW, engine=E, slots=tuple(slots)))
    assert engine.traits.unified is shared


def test_two_concurrent_tasks_prove_nothing_about_the_buffer():
    engine = table(A, B)
    engine.move(SlotId(0), LAUNCHED, R1, NOW - 4)
    engine.move(SlotId(1), LAUNCHED, R2, NOW - 3)
    engine.move(SlotId(0), IDLE, None, NOW - 2)
    engine.move(SlotId(1), IDLE, None, NOW - 1)
    engine.observed(observation(1000, 400))
    assert not engine.proven


# -- when GET /slots is polled -----------------------------------------------------------------------------


def test_get_slots_is_not_polled_when_nothing_depends_on_it():
    engine = table(A, B)
    assert engine.watch(waiting=False, now=NOW) is None
    engine.move(SlotId(0), LAUNCHED, R1, NOW)
    assert engine.watch(waiting=False, now=NOW) is None
    assert engine.watch(waiting=True, now=NOW) is not None
    engine.move(SlotId(0), RUNNING, R1, NOW)
    assert engine.watch(waiting=True, now=NOW) is None


@pytest.mark.parametrize("change", ["unsettled", "orphans", "draining", "foreign", "look_again", "unseen"])
def test_each_reason_for_an_observation_starts_one_and_only_one(change):
    engine = table(A, B)
    if change == "unsettled":
        engine.send(R1, 1, NOW)
    elif change == "orphans":
        engine.orphans.append(Orphan(R1, 1, NOW))
    elif change in ("draining", "foreign"):
        engine.move(SlotId(0), SlotState(change), None, NOW)
    else:
        setattr(engine, change, True)
    assert engine.watch(waiting=False, now=NOW) is not None
    engine.observing = True
    assert engine.watch(waiting=False, now=NOW) is None
    engine.observing, engine.up = False, False
    assert engine.watch(waiting=False, now=NOW) is None


def test_observations_without_changes_slow_down_and_a_change_speeds_them_up():
    engine = table(None)
    engine.move(SlotId(0), DRAINING, None, NOW - 1)
    first = engine.watch(waiting=False, now=NOW)
    for n in range(30):
        engine.observed(observation("busy", asked=NOW + n))
    slow = engine.watch(waiting=False, now=NOW)
    assert first < slow
    assert slow == SILENCE  # the engine notices that a client left only while it gets no requests
    engine.move(SlotId(0), DRAINING, None, NOW)
    assert engine.watch(waiting=False, now=NOW) == first


def test_a_request_deferred_by_the_engine_does_not_hide_a_lost_client():
    engine = table(None)
    engine.move(SlotId(0), DRAINING, None, NOW - 1)
    engine.send(R1, 1, NOW - 1)
    for n in range(30):
        engine.observed(observation("busy", asked=NOW + n))
    assert engine.watch(waiting=True, now=NOW) == SILENCE


def test_on_a_shared_engine_an_observation_is_valid_for_a_moment_only():
    engine = table(A)
    engine.shared_until = NOW + 60
    engine.observed(observation(1000, asked=NOW))
    assert engine.open_for_pins(NOW + STALE / 2)
    assert not engine.open_for_pins(NOW + 2 * STALE)
    assert engine.watch(waiting=True, now=NOW + 2 * STALE) == 0.0
    assert engine.watch(waiting=False, now=NOW + 2 * STALE) is None
    assert engine.open_for_pins(NOW + 61)


def test_two_misses_in_a_row_end_the_trust_in_the_prompt_cache():
    engine = table(A)
    engine.ram_loaded(hit=False)
    engine.ram_loaded(hit=True)
    engine.ram_loaded(hit=False)
    assert engine.traits.ram_cache
    engine.ram_loaded(hit=False)
    assert not engine.traits.ram_cache
