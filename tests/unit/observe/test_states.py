"""What users see of engines and requests: one state at a time, and one text for each state."""

from __future__ import annotations

from itertools import product

import pytest

from slotkeeper.engine.answers import Health
from slotkeeper.observe.request_record import RequestStage
from slotkeeper.observe.states import (
    DOING,
    ENGINE_TEXTS,
    SERVICE_TEXTS,
    SPENT_NAMES,
    STEP_TEXTS,
    UNKNOWN_TEXTS,
    WAIT_TEXTS,
    Doing,
    EngineSigns,
    EngineState,
    Moment,
    Service,
    Spent,
    engine_state,
    request_text,
    service,
    service_text,
    stages_text,
    unknown_text,
)
from slotkeeper.scheduler.requests.figures import Sums, Unknown
from slotkeeper.scheduler.requests.pending import Wait
from slotkeeper.scheduler.types import Priority


def test_every_state_has_its_own_text():
    assert set(ENGINE_TEXTS) == set(EngineState)
    assert set(SERVICE_TEXTS) == set(Service)
    assert set(WAIT_TEXTS) == set(Wait)
    assert set(STEP_TEXTS) == {
        RequestStage.SAVE,
        RequestStage.RESTORE,
        RequestStage.ERASE,
        RequestStage.PLANT,
    }
    assert (set(SPENT_NAMES), set(DOING)) == (set(Spent), set(Spent))
    assert set(DOING.values()) == set(Doing)
    assert set(UNKNOWN_TEXTS) == set(Unknown)
    for texts in (ENGINE_TEXTS, SERVICE_TEXTS, WAIT_TEXTS, STEP_TEXTS, SPENT_NAMES, UNKNOWN_TEXTS):
        assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize(
    ("signs", "state"),
    [
        ({"health": Health.OK, "up": True}, EngineState.UP),
        ({"health": Health.ROUTER, "up": False}, EngineState.UP),
        ({"health": Health.SILENT, "up": True}, EngineState.SILENT),
        ({"health": Health.OK, "up": False}, EngineState.PROBING),
        ({"health": Health.OK, "up": False, "refusal": 401}, EngineState.KEY_REFUSED),
        ({"health": Health.OK, "up": False, "refusal": 501}, EngineState.NO_SLOTS),
        ({"health": Health.OK, "up": False, "refusal": 404}, EngineState.UNPROBED),
        ({"health": Health.LOADING, "up": False, "expected": True}, EngineState.LOADING),
        ({"health": Health.SLEEPING, "up": False}, EngineState.SLEEPING),
        ({"health": Health.SLEEPING, "up": False, "draining": True}, EngineState.DRAINING),
        ({"health": Health.DOWN, "up": False}, EngineState.DOWN),
        ({"health": Health.DOWN, "up": False, "expected": True}, EngineState.AWAITED),
        ({"health": Health.SILENT, "up": False, "frozen": True}, EngineState.FROZEN),
        ({"health": Health.SILENT, "up": False, "frozen": True, "expected": True}, EngineState.AWAITED),
        ({"health": Health.SILENT, "up": False}, EngineState.DOWN),
        ({"health": Health.FOREIGN, "up": False}, EngineState.FOREIGN),
        ({"health": Health.LOOP, "up": False}, EngineState.LOOP),
        ({"health": Health.UNLOADED, "up": False}, EngineState.UNLOADED),
        ({"health": Health.OK, "up": True, "failing": True}, EngineState.FAILING),
        ({"health": Health.OK, "up": True, "failing": True, "draining": True}, EngineState.DRAINING),
        ({"health": Health.DOWN, "up": False, "draining": True}, EngineState.DOWN),
        ({"health": Health.DOWN, "up": False, "drained": True}, EngineState.DRAINED),
    ],
)
def test_the_state_of_an_engine(signs, state):
    assert engine_state(EngineSigns(**signs)) is state


def test_one_engine_that_can_place_decides_what_happens_to_requests():
    for state in EngineState:
        assert service([state, EngineState.UP], waits=False) is Service.PLACED


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("state", [EngineState.DOWN, EngineState.LOADING, EngineState.FROZEN])
def test_requests_fail_only_if_none_waits(state, waits):
    found = service([state], waits=waits)
    assert found is (Service.WAITS if waits else Service.FAILS)
    assert ("fail" in service_text(found, 60.0)) is not waits


def test_the_time_of_a_wait_is_named():
    assert "for up to 60.0 s (--engine-wait)" in service_text(Service.WAITS, 60.0)


def test_a_queued_request_says_for_what_and_whom_it_waits():
    moment = Moment(doing=Doing.QUEUED, place=2, wait=Wait.SLOTS, behind=("a-1", "a-2", "a-3", "a-4"))
    assert request_text(moment) == "queued, place 2: all slots are busy (a-1, a-2, a-3 and 1 more)"
    moment = Moment(doing=Doing.QUEUED, place=1, priority=Priority.LOW)
    assert request_text(moment) == "queued (low), place 1"


def test_a_plant_shows_how_much_of_the_prompt_is_computed():
    moment = Moment(doing=Doing.PREPARING, step="plant", computed=420, to_compute=1000, seconds_left=12.3)
    assert request_text(moment) == "computing up to a boundary 42 %, 12.3 s left"


def test_stages_are_named_the_longest_first_and_the_answer_last():
    spent = {Spent.READ: 0.001, Spent.QUEUE: 2.0, Spent.PREFILL: 3.5, Spent.ANSWER: 60.0}
    assert stages_text(spent) == "prefill 3.5 s, queue 2.0 s, answer 60.0 s"
    assert stages_text({Spent.READ: 0.001}) == ""


def test_what_is_unknown_has_a_number_and_each_reason():
    sums = Sums(requests=5)
    assert unknown_text(sums) == ""
    sums.leave_out(Unknown.NO_SLOTS, 10, requests=2)
    sums.leave_out(Unknown.NO_TOKENS, 10)
    assert unknown_text(sums) == (
        "unknown for 3 of 5 requests: the engine has no --slots, their tokens could not be found"
    )


def test_every_moment_has_a_text():
    for doing, wait, step in product(Doing, [None, *Wait], [None, *STEP_TEXTS]):
        moment = Moment(doing=doing, wait=wait, step=step)
        assert request_text(moment)
        assert moment.shown()["text"] == request_text(moment)
