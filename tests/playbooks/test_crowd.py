"""More conversations than slots: before an overwrite, a slot is saved where its conversation continues."""

from typing import Any

import pytest

from playbooks.playbook import (
    NEW_FILES,
    OLD_FILES,
    TOKEN_BYTES,
    Play,
    arrives,
    ends,
    filed,
    filled,
    fills,
    follows,
    goes,
    knows,
    leaves,
    one_turn,
    plants,
    proves,
    reports,
    restored,
    restores,
    saved,
    saves,
    sees,
    snapshot,
    snapshots_changed,
    starts,
    written,
)
from slotkeeper.scheduler import placement
from slotkeeper.scheduler.effects import Purpose, SaveMoment
from slotkeeper.scheduler.events import TimerFired
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.rates import StateSize
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import Reason

A, B, C, D = (Tokens(range(n, n + 3000)) for n in (10_000, 20_000, 30_000, 40_000))
REPLY, OTHER, RESULT = (Tokens(range(n, n + 200)) for n in (50_000, 60_000, 70_000))
CUT = A.cut(0, len(A) - 3)  # one more than the engine's checkpoint before the end


def old(**more):
    """A build whose files carry no checkpoints."""
    return Play(**{"n_slots": 1, "checkpoint_min_step": 0, **OLD_FILES, **more})


def answered(play: Play, request: str = "r1", prompt: Tokens = A, slot: int = 0) -> bool:
    """A request is answered with 200 tokens, of which the slot keeps all but the last."""
    assert play << arrives(request) << knows(request, prompt) >> goes(request, slot=slot)
    return bool(play << ends(request, len(prompt), 0, generated=len(REPLY)) >> reports(request))


# -- files that can only be extended, and an unknown form of the reply -------------------------------------


def test_a_slot_is_cut_to_where_its_next_turn_continues_and_parked_there():
    play = old()
    assert answered(play)
    play << arrives("r2") << knows("r2", B)
    play >> plants("r2", 0, Purpose.BACK, tokens=CUT)
    play << filled(1)
    assert play >> saves(0, SaveMoment.PARK, request="r2", tokens=CUT) << saved("s1") >> goes("r2", slot=0)
    second = play.pending("r2")
    assert second.planted == second.parked == 1  # computed while r2 waited, but not for its prompt
    assert play << ends("r2", len(B), 0) >> reports("r2")

    again = A + OTHER + RESULT  # the reply comes back in another form
    play << arrives("r3") << knows("r3", again)
    play >> plants("r3", 0, Purpose.BACK)
    play << filled(1)
    play >> saves(0, SaveMoment.PARK) << saved("s2") >> restores(0, "s1") << restored()
    assert play >> goes("r3", slot=0, reason=Reason.SNAPSHOT)
    assert play.pending("r3").predicted == len(CUT)


def test_a_slot_is_not_parked_if_a_file_has_the_tokens_where_its_next_turn_continues():
    play = old()
    assert answered(play)
    assert play << snapshots_changed(snapshot("s0", CUT))
    assert play << arrives("r2") << knows("r2", B) >> goes("r2", slot=0)


@pytest.mark.parametrize("lasting", [True, False], ids=["checkpoints last", "any task thins them out"])
def test_a_slot_is_not_cut_back_for_parking_if_its_request_then_finds_less_there(lasting):
    play = old(user_start=((10_500,), (12_000,)), checkpoint_min_step=0 if lasting else 8192)
    assert answered(play)  # checkpoints are at 500, 2000 and near the end
    play << arrives("r2") << knows("r2", A.cut(0, 2001) + B)
    if lasting:
        assert play >> plants("r2", 0, Purpose.BACK, tokens=CUT)
    else:  # 2000 tokens are there; one more is computed, and the shared beginning is saved
        assert play >> plants("r2", 0, Purpose.PLANT, tokens=A.cut(0, 2001))


def test_a_slot_is_parked_uncut_if_its_next_turn_extends_it():
    play = old()
    assert one_turn(play, "r1", A, slot=0)
    assert play << follows("r1", A + RESULT)
    assert play << arrives("r2") << knows("r2", B) >> saves(0, SaveMoment.PARK, tokens=A)


def test_a_slot_is_cut_to_the_checkpoint_before_the_known_divergence_of_its_next_turn():
    play = old(user_start=((10_500,),))
    assert answered(play)  # one checkpoint is at 500, the others near the end
    assert play << follows("r1", A.cut(0, 1000) + OTHER)
    play << arrives("r2") << knows("r2", B)
    assert play >> plants("r2", 0, Purpose.BACK, tokens=A.cut(0, 501))


def test_the_contents_of_a_slot_are_known_if_the_client_leaves_while_it_is_cut_back():
    play = old()
    assert answered(play)
    play << arrives("r2") << knows("r2", B)
    assert play >> plants("r2", 0, Purpose.BACK) << leaves("r2")
    assert play.later(10) << sees(contents={0: len(CUT)})  # the engine has only now ended that task
    assert play.later(9) << TimerFired(at=0.0) >> saves(0, tokens=CUT) << saved("s1")
    assert play << arrives("r3") << knows("r3", A + OTHER) >> goes("r3", slot=0, reason=Reason.PREFIX)


def test_a_request_waits_for_a_file_that_is_being_checked_if_another_file_has_almost_as_much():
    """Waiting takes as long as a restore; the tokens that the other file lacks take longer to compute."""
    play = Play(**{"memory": "dense", **NEW_FILES})
    play.table.shadow.sizes = StateSize(4096)  # bytes a token: a restore is quick
    assert one_turn(play, "r1", A, slot=0)
    assert one_turn(play, "r2", B, slot=1)
    play << arrives("r3") << knows("r3", C) >> saves(0, SaveMoment.PARK)
    assert (
        play
        << written()
        >> goes("r3", slot=0)
        << starts("r3")
        << snapshots_changed(snapshot("early", A.cut(0, len(A) - 150)))
    )
    play << arrives("r4") << knows("r4", A + OTHER)
    assert play.placement.queued == 1
    assert play << filed("r3", snapshot("whole", A)) >> saves(1, SaveMoment.PARK)
    assert play << written() >> restores(1, "whole", request="r4")


@pytest.mark.parametrize(
    ("memory", "until", "waits"),
    [("dense", 2900, True), ("dense", 20, False), ("hybrid", 3000, True), ("hybrid", 2998, False)],
)
def test_a_request_waits_for_a_file_that_is_being_checked_as_far_as_it_can_be_cut(memory, until, waits):
    """A reply often comes back changed, so the next prompt diverges before the end of the state."""
    play = Play(**{"memory": memory, **NEW_FILES, "checkpoint_cap": 0, "n_slots": 1})
    play.table.shadow.sizes = StateSize(4096)  # bytes a token: a restore is quick
    assert one_turn(play, "r1", A, slot=0)
    play << arrives("r2") << knows("r2", B) >> saves(0, SaveMoment.PARK)
    assert play << written() >> goes("r2", slot=0) << ends("r2", len(B)) >> reports("r2")
    play << arrives("r3") << knows("r3", A.cut(0, until) + OTHER)
    assert play.placement.queued == waits


# -- no long pause in a crowd ------------------------------------------------------------------------------


def crowded_engine(**more) -> Play:
    """Three conversations in two slots: the one that was longest away has lost its slot, and was parked."""
    play = Play(**{"memory": "dense", **NEW_FILES, **more})
    assert one_turn(play, "r1", A, slot=0)
    assert one_turn(play, "r2", B, slot=1)
    play << arrives("r3") << knows("r3", C) >> saves(0, SaveMoment.PARK) << written()
    assert play >> goes("r3", slot=0) << filed("r3", snapshot("s1", A))
    assert play << ends("r3", len(C)) >> reports("r3")
    return play


def busy(play: Play) -> Play:
    """A conversation has just lost its slot to another."""
    play.table.crowded_until, play.table.active_at = play.clock + 60, play.clock
    return play


def test_in_a_crowd_a_slot_is_saved_after_a_shorter_pause():
    play = crowded_engine(limits=Limits(pause=2))
    ended, seconds = play.clock, play.table.rates.writing.seconds(len(C) * TOKEN_BYTES)
    while not play.effects:
        play.wakes()
    assert play >> saves(1, SaveMoment.PAUSE, tokens=B) << saved("s2")
    while not play.effects:
        play.wakes()
    assert play >> saves(0, SaveMoment.PAUSE, tokens=C)
    assert play.clock - ended < 4 * seconds


def test_in_a_crowd_a_slow_save_does_not_begin_before_the_configured_pause():
    play = crowded_engine(limits=Limits(pause=0.5))
    ended, seconds = play.clock, play.table.rates.writing.seconds(len(C) * TOKEN_BYTES)
    while not play.effects:
        play.wakes()
    assert play.clock - ended > 15 * seconds


def test_the_next_turn_of_the_same_conversation_does_not_make_a_crowd():
    play = Play(memory="dense", **NEW_FILES)
    first, second = (b"head", b"one"), (b"head", b"one", b"two")
    assert one_turn(play, "r1", A, slot=0, hash_chain=first)
    assert play << arrives("r2", hash_chain=second) >> goes("r2", slot=0, reason=Reason.CONTINUES)
    assert not play.table.crowded(play.clock)


def wakes_after_a_third_conversation(play: Play) -> None:
    """It takes slot 0, whose state is cut back and parked first. Then time passes until idle work."""
    play << arrives("r3") << knows("r3", C) >> plants("r3", 0, Purpose.BACK)
    play << filled(1)
    play >> saves(0, SaveMoment.PARK) << saved("s1")
    assert play >> goes("r3", slot=0) << ends("r3", len(C), generated=len(REPLY)) >> reports("r3")
    while not play.effects:
        play.wakes()


def test_in_a_crowd_a_slot_is_cut_back_before_it_is_saved_and_is_not_restored():
    play = old(n_slots=2, limits=Limits(pause=2))
    assert answered(play)
    assert answered(play, "r2", B, slot=1)
    assert play << follows("r2", None)
    wakes_after_a_third_conversation(play)
    back = B.cut(0, len(B) - 3)
    assert play >> fills(1, Purpose.CUT, tokens=back) << filled(1) >> saves(1, tokens=back)
    play << saved("s2")
    assert play.table.shadow.slots[1].tokens == back


def test_in_a_crowd_a_slot_is_not_cut_back_if_predictions_failed_and_its_checkpoints_would_be_lost():
    play = old(n_slots=2, limits=Limits(pause=2), checkpoint_min_step=8192)
    assert answered(play)
    assert answered(play, "r2", B, slot=1)
    assert play << follows("r2", None, chance=0.25)
    wakes_after_a_third_conversation(play)
    assert play >> saves(1, SaveMoment.PAUSE)


def test_in_a_crowd_no_slot_is_warmed():
    """Another conversation would take the slot at once."""
    play = busy(Play(speculative=True, checkpoint_min_step=0, **OLD_FILES))
    assert play << snapshots_changed(snapshot("early", A.cut(0, 900)), snapshot("end", A, used=1001.0))
    assert play.later(61) << sees() >> restores(0, "early")


def test_in_a_crowd_only_the_reply_is_prefetched():
    play = busy(Play(memory="dense", limits=Limits(pause=0.9), **NEW_FILES))
    assert answered(play)
    assert play << follows("r1", A + OTHER)
    while not play.effects:
        play.wakes()
    assert play >> fills(0, Purpose.NEXT)
    assert play.table.crowded(play.clock)


def test_a_longer_prefetch_is_postponed_until_the_crowd_is_over():
    play = busy(Play(memory="dense", limits=Limits(pause=0.9), **NEW_FILES))
    assert answered(play)
    assert play << follows("r1", A.cut(0, 1000) + OTHER)  # reasoning is left out: most of it diverges
    while not play.effects:
        play.wakes()
    assert play.table.crowded(play.clock)
    assert play >> saves(0) << saved("s1")
    while not play.effects:
        play.wakes()
    assert play >> fills(0, Purpose.NEXT)
    assert not play.table.crowded(play.clock)


def test_in_a_crowd_a_saved_slot_is_not_cut_for_its_boundaries():
    play = old(n_slots=2)
    assert answered(play)
    assert play << snapshots_changed(snapshot("head", A.cut(0, 501)))
    assert play.later(10) << sees() >> saves(0) << saved("s1")
    play.later(70)
    busy(play)
    assert play << sees()
    assert play.later(1.1) << sees() >> fills(0, Purpose.CUT)


@pytest.mark.parametrize("told", [True, False])
def test_in_a_crowd_a_slot_is_not_cut_back_while_its_next_turn_may_become_known(told):
    play = busy(old(n_slots=2, limits=Limits(pause=0.9)))
    assert one_turn(play, "r1", A, slot=0)
    if told:
        play << follows("r1", None)
    while not play.effects:
        play.wakes()
    assert play >> (fills(0, Purpose.CUT, tokens=CUT) if told else saves(0, tokens=A))


# -- a slot that its conversation left ---------------------------------------------------------------------


def test_a_file_with_more_tokens_is_preferred_to_a_slot_with_an_older_turn():
    play = Play(memory="dense", **NEW_FILES)
    hash_chain = tuple(bytes([n]) for n in range(6))
    assert one_turn(play, "r1", A.cut(0, 1000), slot=0, hash_chain=hash_chain[:2])
    assert play << snapshots_changed(snapshot("s1", A.cut(0, 2500)))  # its next turns ran elsewhere
    play << arrives("r2", hash_chain=hash_chain) << knows("r2", A)
    assert play >> restores(0, "s1") << restored() >> goes("r2", slot=0, reason=Reason.SNAPSHOT)


# -- how likely a conversation returns -------------------------------------------------------------------


def test_a_restored_conversation_keeps_its_count_of_turns():
    play = Play(memory="dense", n_slots=1, **NEW_FILES)
    for turn in range(1, 5):
        assert one_turn(play, f"a{turn}", A.cut(0, turn * 700), slot=0, cached=(turn - 1) * 700)
    assert (
        play << arrives("b") << knows("b", B) >> saves(0, SaveMoment.PARK) << saved("s1") >> goes("b", slot=0)
    )
    assert play << ends("b", len(B)) >> reports("b")
    play << arrives("a5") << knows("a5", A) >> saves(0, SaveMoment.PARK) << saved("s2") >> restores(0, "s1")
    play << restored() >> goes("a5", slot=0) << ends("a5", len(A), 2800)
    assert play >> proves("s1", paid=True) >> reports("a5")
    assert play.table.shadow.slots[0].turns == 5


def test_a_long_queue_is_not_decided_again_if_nothing_changed(monkeypatch):
    """Decisions are counted, not time: each event would cost milliseconds, and streams cause many."""
    play = Play(n_slots=2)
    assert play << arrives("r1", id_slot=0) >> goes("r1", slot=0, reason=Reason.CLIENT_CHOSE)
    for number in range(200):
        assert play << arrives(f"w{number}", id_slot=0, rendered=False)
    for _ in range(200 // placement.LOOKAHEAD + 2):  # until every request knows that it must wait
        assert play << starts("r1")
    asked: list[str] = []
    for owner, name in ((placement, "_decide"), (State, "scene")):
        function = getattr(owner, name)

        def noted(*args: Any, name: str = name, function: Any = function) -> Any:
            asked.append(name)
            return function(*args)

        monkeypatch.setattr(owner, name, noted)
    assert play << starts("r1")
    assert asked == ["scene"]
