"""When a slot is saved: at a pause, before it is overwritten, at shutdown; and when it is not."""

import pytest

from playbooks.playbook import (
    NEW_FILES,
    TOKEN_BYTES,
    Play,
    arrives,
    closing,
    drops,
    ends,
    goes,
    knows,
    leaves,
    one_turn,
    reports,
    restored,
    restores,
    saved,
    saves,
    sees,
    snapshot,
    snapshots_changed,
    starts,
    unsaved,
)
from slotkeeper.scheduler.effects import Save, SaveMoment
from slotkeeper.scheduler.events import TimerFired
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.rates import LinearTimes
from slotkeeper.scheduler.requests.lifecycle import SAVES_REST
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import Reason

A, B, C = (Tokens(range(n, n + 1000)) for n in (10_000, 20_000, 30_000))
LONG = Tokens(range(100_000, 110_000))


def dense(**more):
    return Play(**{"memory": "dense", **NEW_FILES, **more})


# -- at a pause ----------------------------------------------------------------------------------------


def test_a_paused_conversation_is_saved_once():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert play.wakes() >> saves(0, tokens=A, size=1000 * TOKEN_BYTES)
    assert play << saved("s1")
    assert play.later(300) << sees()
    assert not play.alarms
    assert not play.placement.unsaved(play.clock)


def test_a_slots_checkpoints_are_those_that_the_engine_wrote_not_those_kept_in_the_file():
    play = Play(**NEW_FILES)
    assert one_turn(play, "r1", A, slot=0)
    assert play.wakes() >> saves(0)
    assert play << saved("s1", checkpoints=(300, 996), written=(484, 996))  # one was left out, one was added
    assert [checkpoint.at for checkpoint in play.table.shadow.slots[0].checkpoints] == [484, 996]


@pytest.mark.parametrize(("length", "worth_it"), [(255, False), (256, True)])
def test_a_short_conversation_is_not_saved(length, worth_it):
    play = dense()
    assert one_turn(play, "r1", LONG.cut(0, length), slot=0)
    play.later(300) << sees()
    assert [type(effect) for effect in play.effects] == [Save] * worth_it


@pytest.mark.parametrize(("new", "worth_it"), [(31, False), (32, True)])
def test_a_few_new_tokens_are_not_saved(new, worth_it):
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert play.wakes() >> saves(0) << saved("s1")
    assert one_turn(play, "r2", A + B.cut(0, new), slot=0, cached=1000)
    play.later(300) << sees()
    assert [type(effect) for effect in play.effects] == [Save] * worth_it


def test_while_other_slots_are_busy_a_conversation_is_saved_after_two_minutes():
    play = dense()
    play.table.rates.writing = LinearTimes(1e12)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << starts("r1")
    assert one_turn(play, "r2", B, slot=1)
    assert play.later(110) << sees(0)
    assert play.later(15) << sees(0) >> saves(1)


def test_no_slot_is_saved_while_a_request_waits():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert play << arrives("r2")
    assert play.later(300) << sees()
    assert play << knows("r2", A + B) >> goes("r2", slot=0)


def tool_loop(play: Play, requests: int, pause: float, prompt: Tokens = B) -> None:
    """Another client whose next request always comes after such a pause."""
    for number in range(requests):
        assert one_turn(play.later(pause), f"loop{number}", prompt + C.cut(0, 10 * number), slot=1)


def test_a_slow_save_does_not_begin_in_the_short_rests_of_another_client():
    """It takes two seconds. The conversation has paused for a minute, but the tool loop returns after 2 s."""
    play = dense()
    play.table.rates.writing = LinearTimes(1e12, call_seconds=2.0)
    assert one_turn(play, "r1", A, slot=0)
    tool_loop(play, 40, 2.0)
    assert not (play.later(1.9) << TimerFired(at=0.0)).effects
    assert play.later(60) << TimerFired(at=0.0) >> saves(0)


def test_a_save_begins_sooner_if_clients_usually_return_just_when_it_is_due():
    """It takes two seconds and would begin after 40, but each request comes after 41."""
    play = dense()
    play.table.rates.writing = LinearTimes(1e12, call_seconds=2.0)
    play.table.rates.rests.extend([41.0] * 15)
    assert one_turn(play, "r1", A, slot=0)
    assert play.wakes() >> saves(0)
    assert 5 <= play.clock - play.table.active_at <= 41 / 1.5


@pytest.mark.parametrize(
    ("save_seconds", "tokens", "paused"), [(0.03, 1000, 120), (0.5, 1000, 1800), (0.5, 4000, 450)]
)
def test_beside_an_answer_a_slot_is_saved_when_its_loss_would_cost_more_than_the_stop(
    save_seconds, tokens, paused
):
    """The engine computes 1,000 tokens a second. A state is assumed to be lost once in an hour."""
    play = dense()
    play.table.rates.writing = LinearTimes(1e12, call_seconds=save_seconds)
    play << arrives("stream") << knows("stream", B) >> goes("stream", slot=0)
    play << starts("stream")
    assert one_turn(play, "r1", Tokens(range(50_000, 50_000 + tokens)), slot=1)
    assert play.later(paused - 1) << sees()
    assert play.later(2) << sees() >> saves(1)


def test_after_a_failed_save_the_engine_gets_no_other_save_for_a_minute():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert one_turn(play, "r2", B, slot=1)
    assert play.later(10) << sees() >> saves(0) << unsaved()
    failed = play.clock
    while not play.effects:  # the timer fires for it, although nothing else happens
        play.wakes()
    assert play >> saves(1) << saved("s2")
    assert SAVES_REST <= play.clock - failed < SAVES_REST + 1
    assert play.later(300) << sees()  # slot 0 has no new tokens


def test_a_save_that_failed_for_its_own_reason_does_not_delay_other_saves():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert one_turn(play, "r2", B, slot=1)
    assert play.later(10) << sees() >> saves(0) << unsaved(lasting=False) >> saves(1) << saved("s2")


def test_a_timer_fires_when_the_budget_of_the_hour_allows_the_next_save():
    play = dense(n_slots=1, limits=Limits(hourly_bytes=1500 * TOKEN_BYTES))
    assert one_turn(play, "r1", A, slot=0)
    assert play.wakes() >> saves(0) << saved("s1")
    assert one_turn(play, "r2", B, slot=0)
    begun = play.clock
    while not play.effects:
        play.wakes()
    assert play >> saves(0)
    assert 1100 < play.clock - begun < 1210


def test_a_state_that_does_not_fit_in_the_folder_is_not_saved():
    play = dense(limits=Limits(hot_bytes=900 * TOKEN_BYTES))
    assert one_turn(play, "r1", A, slot=0)
    assert play.later(300) << sees()
    assert play << closing()
    assert not play.placement.unsaved(play.clock)


def test_a_file_that_is_dropped_at_once_does_not_stop_later_saves():
    """It is worth least only because much longer ones exist: that does not apply to the next one."""
    play = dense(limits=Limits(hot_bytes=10_300 * TOKEN_BYTES))
    assert play << snapshots_changed(snapshot("s0", LONG, golden=True))
    assert one_turn(play, "r1", A.cut(0, 300), slot=0)
    assert play.later(60) << sees() >> saves(0) << saved("s1", size=301 * TOKEN_BYTES) >> drops("s1")
    assert one_turn(play, "r2", B.cut(0, 300), slot=1)
    assert play.later(60) << sees() >> saves(1)


def test_files_that_cannot_be_extended_stop_saving_for_an_hour():
    play = Play(memory="swa", n_swa=512, **{**NEW_FILES, "files_carry": False})
    assert one_turn(play, "r1", A, slot=0)
    assert play.later(60) << sees() >> saves(0) << saved("s1", repaired=False) >> drops("s1")
    assert one_turn(play, "r2", B, slot=1)
    assert play.later(3000) << sees()
    assert play.later(700) << sees() >> saves(1)


# -- before it is overwritten ----------------------------------------------------------------------------


def test_a_long_conversation_is_parked_before_another_takes_its_slot():
    play = dense(n_slots=1)
    for turn in range(1, 6):
        assert one_turn(play, f"r{turn}", LONG.cut(0, turn * 2000), slot=0, cached=(turn - 1) * 2000)
    assert play << arrives("r9") << knows("r9", A) >> saves(0, SaveMoment.PARK, request="r9", tokens=LONG)
    assert play << saved("s1") >> goes("r9", slot=0, reason=Reason.COLD)
    assert play << ends("r9", 1000) >> reports("r9", usage__planted=0)
    play << arrives("r10") << knows("r10", LONG + A) >> saves(0, SaveMoment.PARK) << saved("s2")
    assert play >> restores(0, "s1") << restored() >> goes("r10", slot=0, reason=Reason.SNAPSHOT)


@pytest.mark.parametrize("kept", ["in a file", "in the RAM cache", "nowhere"])
def test_a_slot_is_not_parked_if_its_contents_are_kept_elsewhere(kept):
    play = dense(n_slots=1, ram_cache=kept == "in the RAM cache")
    for turn in range(1, 6):
        assert one_turn(play, f"r{turn}", LONG.cut(0, turn * 2000), slot=0, cached=(turn - 1) * 2000)
    if kept == "in a file":
        assert play << snapshots_changed(snapshot("s0", LONG))
    play << arrives("r9") << knows("r9", A)
    assert [hasattr(effect, "moment") for effect in play.effects] == [kept == "nowhere"]


def test_the_file_and_the_slot_are_kept_if_the_client_leaves_during_the_save():
    play = dense(n_slots=1)
    for turn in range(1, 6):
        assert one_turn(play, f"r{turn}", LONG.cut(0, turn * 2000), slot=0, cached=(turn - 1) * 2000)
    assert play << arrives("r9") << knows("r9", A) >> saves(0, SaveMoment.PARK)
    assert play << leaves("r9") << saved("s1")
    assert "s1" in play.placement.catalog
    assert play.later(1) << sees(contents={0: 10_000})
    assert play << arrives("r10") << knows("r10", LONG + A) >> goes("r10", slot=0, reason=Reason.PREFIX)


# -- at shutdown -----------------------------------------------------------------------------------------


def test_shutdown_saves_all_valuable_slots_at_once():
    play = dense(n_slots=3, limits=Limits(hourly_bytes=0))
    assert one_turn(play, "r1", A, slot=0)
    assert one_turn(play, "r2", B, slot=1)
    assert one_turn(play, "r3", C.cut(0, 100), slot=2)
    assert play << closing() >> saves(0)
    assert play.placement.unsaved(play.clock)
    assert play << saved("s1") >> saves(1)
    assert play << saved("s2")
    assert not play.placement.unsaved(play.clock)


def test_shutdown_does_not_wait_for_an_engine_that_cannot_save():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert one_turn(play, "r2", B, slot=1)
    assert play << closing() >> saves(0) << unsaved()
    assert not play.placement.unsaved(play.clock)
