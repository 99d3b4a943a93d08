"""Engines that are lost and come back, renders that fail, answers that come before their tokens."""

from unittest.mock import Mock

import pytest

from playbooks.playbook import (
    Play,
    announced,
    arrives,
    ends,
    engine_lost,
    engine_up,
    goes,
    knows,
    leaves,
    one_turn,
    planted,
    plants,
    reports,
    sees,
    starts,
    unpinned,
)
from slotkeeper.scheduler.effects import Purpose, Report
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.types import EngineId, Reason

A, B, C = (Tokens(range(n, n + 1000)) for n in (10_000, 20_000, 30_000))
MORE = Tokens(range(200))
TALK = (b"system", b"hello")


# -- tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rendered", [True, False], ids=["failed", "not possible"])
def test_a_request_without_tokens_goes_to_the_slot_that_loses_least(rendered):
    play = Play()
    assert one_turn(play, "r1", A, slot=0)
    play << arrives("r2", rendered=rendered)
    if rendered:
        play << knows("r2", None)
    assert play >> goes("r2", slot=1, reason=Reason.UNRENDERED)
    assert play << ends("r2", 400) >> reports("r2", exact=None, predicted=None, oracle=None)


def test_tokens_that_arrive_after_the_answer_give_one_exact_report():
    play = Play()
    first = arrives("r1", hash_chain=TALK)
    assert play << first << knows("r1", A) >> goes("r1", slot=0) << ends("r1", 1000) >> reports("r1")
    assert (
        play
        << arrives("r2", hash_chain=(*TALK, b"answer", b"more"))
        >> goes("r2", slot=0, reason=Reason.CONTINUES)
    )
    assert play << ends("r2", 1200, 1000)
    assert play << knows("r2", A + MORE) >> reports("r2", predicted=1000, exact=True, oracle=200)
    assert play << knows("r2", A + MORE)
    assert play.table.shadow.slots[0].tokens == A + MORE
    assert (play << sees()).rests()


@pytest.mark.parametrize("late", [knows("r1", A), starts("r1"), planted("r1"), ends("r1"), leaves("r1")])
def test_events_of_a_request_whose_client_left_change_nothing(late):
    play = Play()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << starts("r1") << leaves("r1")
    assert play << late
    assert play.states == ["draining", "idle"]
    assert (play << sees(contents={0: 512})).rests()


# -- engines -------------------------------------------------------------------------------------------


def test_without_an_engine_all_requests_go_to_the_first_engine():
    play = Play(engines=2, up=False)
    assert play << arrives("r1") >> unpinned("r1", Reason.NO_ENGINE, engine="e0")
    assert play << arrives("r2", bypass=True) >> unpinned("r2", Reason.BYPASS, engine="e0")
    assert play << knows("r1", A) << ends("r1", 1000) >> reports("r1", reason=Reason.NO_ENGINE)
    assert play << knows("r2", A) << ends("r2", 1000) >> reports("r2", reason=Reason.BYPASS)
    assert not play.placement._state.requests


def test_an_engine_that_other_clients_may_use_is_checked_before_each_pin():
    play = Play(up=False)
    assert play << engine_up(fresh=False) << sees()
    assert play.later(5.0) << arrives("r1") << knows("r1", A)
    assert play << sees() >> goes("r1", slot=0)


def test_a_request_that_was_sent_before_the_engine_was_up_may_be_in_any_slot():
    play = Play(up=False)
    assert play << arrives("r1", rendered=False) >> unpinned("r1", Reason.NO_ENGINE)
    assert play << engine_up() << arrives("r2") << knows("r2", A) << sees()
    assert play.placement.queued == 1
    assert play << sees(1) >> goes("r2", slot=0)
    assert play << ends("r1", 50) >> reports("r1", slot=1, reason=Reason.NO_ENGINE)


def test_after_a_crash_all_slots_are_empty_and_queued_requests_are_sent():
    play = Play(n_slots=1)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << starts("r1")
    assert play << arrives("r2") << engine_lost() >> unpinned("r2", Reason.NO_ENGINE)
    assert play << leaves("r1") << leaves("r2")
    assert (
        play
        << engine_up()
        << sees()
        << arrives("r3")
        << knows("r3", A + MORE)
        >> goes("r3", reason=Reason.COLD)
    )
    assert play << ends("r3", 1200, 0) >> reports("r3", predicted=0)


@pytest.mark.parametrize("end", [leaves("r1"), ends("r1", 1000)], ids=["broken", "finished"])
def test_an_answer_of_a_lost_engine_takes_no_slot_of_the_restarted_engine(end):
    play = Play(n_slots=1)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << starts("r1")
    assert play << engine_lost() << engine_up() << sees()
    play << end << sees() << arrives("r2") << knows("r2", B)
    play.later(1.0) << sees()
    if isinstance(play.effects[0], Report):
        play >> reports("r1")
    assert play >> goes("r2", slot=0)
    assert play.states == ["launched"]
    assert play << ends("r2", 1000) >> reports("r2")


def planting():
    play = Play(ram_cache=True, memory="dense")
    system = Tokens(range(50_000, 52_000))
    assert play << arrives("r1") << knows("r1", system + A) >> goes("r1", slot=0)
    assert play << ends("r1", 3000) >> reports("r1")
    assert play << arrives("r2") << knows("r2", system + B) >> plants("r2", 1, Purpose.TOUCH)
    return play


def test_a_plant_of_a_lost_engine_does_not_reserve_a_slot():
    play = planting()
    assert play << engine_lost() << engine_up() << sees()
    for request in ("r3", "r4"):
        assert play << arrives(request) << knows(request, A) >> goes(request) << starts(request)
    assert play << planted("r2", None)
    assert play.placement.queued == 1
    assert play << ends("r4", 1000) >> reports("r4") >> goes("r2", slot=1)


def test_a_request_fails_open_if_its_engine_is_lost_during_its_plant():
    play = planting()
    assert play << engine_lost() << planted("r2", None) >> unpinned("r2", Reason.NO_ENGINE)


# -- several engines -------------------------------------------------------------------------------------


def test_a_conversation_waits_for_its_engine_rather_than_be_computed_on_another():
    play = Play(engines=2)
    assert (
        play
        << arrives("r1")
        << knows("r1", A)
        >> goes("r1", engine="e0")
        << ends("r1", 1000)
        >> reports("r1")
    )
    # another program uses that engine: each pin needs GET /slots first
    play.table.shared_until = play.clock + 60.0
    assert play.later(5.0) << arrives("r2") << knows("r2", A + MORE)
    assert play << sees() >> goes("r2", engine="e0", slot=0)


def test_a_shared_engine_is_polled_while_the_body_of_a_request_arrives():
    play = Play()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1") << ends("r1", 1000) >> reports("r1")
    assert play.later(5.0) << announced()
    assert not play.looking  # nobody else uses the engine
    play.table.shared_until = play.clock + 60.0
    assert play << announced()
    assert play.looking
    assert play << announced() << sees() << announced()
    assert not play.looking  # what was seen a moment ago is enough
    assert play << arrives("r2") << knows("r2", A + MORE) >> goes("r2", slot=0)


def test_no_request_waits_for_the_contents_of_a_lost_engine():
    play = Play(engines=2)
    assert (
        play
        << arrives("r1")
        << knows("r1", A)
        >> goes("r1", engine="e0")
        << ends("r1", 1000)
        >> reports("r1")
    )
    assert play << engine_lost() << arrives("r2") << knows("r2", A + MORE) >> goes("r2", engine="e1")


# -- cost of decisions, and GET /slots ---------------------------------------------------------------------


def test_a_long_queue_is_not_decided_if_no_slot_is_free(monkeypatch):
    from slotkeeper.scheduler import placement

    play = Play(n_slots=1)
    decide = Mock(wraps=placement._decide)
    monkeypatch.setattr(placement, "_decide", decide)
    for n in range(100):
        play << arrives(f"r{n}", f"client{n}") << knows(f"r{n}", A + Tokens([n]))
    decide.reset_mock()
    play.effects.clear()
    play << ends("r0", 1001)
    assert decide.call_count == 1


def test_a_long_queue_is_not_decided_again_while_nothing_changes(monkeypatch):
    from slotkeeper.scheduler import placement

    play = Play()
    assert play << arrives("r") << knows("r", A) >> goes("r", slot=0) << starts("r") << leaves("r")
    decide = Mock(wraps=placement._decide)
    monkeypatch.setattr(placement, "_decide", decide)
    for n in range(50):  # slot 1 is free, but all of them wait for what slot 0 holds
        assert play << arrives(f"r{n}", f"client{n}") << knows(f"r{n}", A + Tokens([n]))
    assert decide.call_count == 2 * 50  # when it arrived, and when its tokens were known
    assert play << sees(contents={0: 1000}) >> goes("r0", slot=0)
    assert play << starts("r0") >> goes("r1", slot=1)


def test_a_request_behind_many_that_wait_for_a_busy_slot_gets_a_free_slot_soon():
    play = Play()
    assert play << arrives("r") << knows("r", A) >> goes("r", slot=0) << starts("r") << leaves("r")
    assert play << arrives("x") << knows("x", C) >> goes("x", slot=1) << starts("x")
    for n in range(20):  # all of them wait for what slot 0 holds
        assert play << arrives(f"r{n}", f"client{n}") << knows(f"r{n}", A + Tokens([n]))
    assert play << arrives("other", "last") << knows("other", B)
    assert play << ends("x", 1000) >> reports("x")
    assert play.wakes() >> goes("other", slot=1)
    assert not play.alarms


def test_many_requests_that_wait_for_one_model_do_not_delay_a_request_for_another():
    play = Play(engines=2, up=False, n_slots=1)
    for engine, model in (("e0", "a"), ("e1", "b")):
        assert play << engine_up(engine, model=model) << sees(engine=engine)
        assert play << arrives(model, model=model) << knows(model, A) >> goes(model, engine=engine)
    for n in range(20):
        assert play << arrives(f"a{n}", f"client{n}", model="a") << knows(f"a{n}", B)
    assert play << arrives("b2", "last", model="b") << knows("b2", B)
    assert play << ends("b", 1000) >> reports("b") >> goes("b2", engine="e1")


def test_a_bypass_that_waits_for_one_model_does_not_delay_a_request_for_another():
    play = Play(engines=2, up=False, n_slots=2)
    for engine, model in (("e0", "a"), ("e1", "b")):
        assert play << engine_up(engine, model=model) << sees(engine=engine)
    assert play << arrives("b1", model="b") << knows("b1", A) >> goes("b1", engine="e1")
    assert play << arrives("b2", model="b", bypass=True)  # until b1 is seen to have begun
    assert play << arrives("b3", "other", model="b") << knows("b3", B)
    assert play << arrives("a1", "other", model="a") << knows("a1", A) >> goes("a1", engine="e0")
    assert play << starts("b1") >> unpinned("b2", Reason.BYPASS)


def test_the_repr_of_placement_shows_engines_slots_and_queue():
    play = Play()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1")
    expected = "<Placement 1 requests, 0 queued | <e0 up | 0:launched 1:idle | 0 unsettled>>"
    assert repr(play.placement) == expected
    assert repr(Placement(EngineId("e9"))) == "<Placement 0 requests, 0 queued | >"
