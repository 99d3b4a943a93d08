"""Each kind of loss: the events that cause it, and the report that names it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playbooks.playbook import (
    NEW_FILES,
    Play,
    arrives,
    ends,
    engine_lost,
    engine_up,
    filled,
    goes,
    knows,
    leaves,
    one_turn,
    plants,
    replies,
    reports,
    sees,
    starts,
    unpinned,
    unsaved,
)
from slotkeeper.scheduler.effects import Forward, Prefill, Purpose, Report, Save
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.figures import Loss, Lost
from slotkeeper.scheduler.types import Reason

HEAD = Tokens(range(1000))
ASKS = [Tokens(range(n, n + 1000)) for n in (30_000, 40_000, 50_000, 60_000)]
A, B, C, D = (HEAD + ask for ask in ASKS)
X, Y = (Tokens(range(n, n + 2000)) for n in (70_000, 80_000))
MORE = Tokens(range(90_000, 90_100))


def dense(**more):
    return Play(**({"memory": "dense"} | more))


# -- each loss -----------------------------------------------------------------------------------------


def test_an_overwritten_slot_is_reported_as_overwritten():
    play = dense(n_slots=1)
    assert one_turn(play, "r1", A, slot=0)
    assert one_turn(play, "r2", X, slot=0)
    assert play << arrives("r3") << knows("r3", A) >> goes("r3", slot=0, reason=Reason.COLD)
    assert play << ends("r3", 2000, 0) >> reports("r3", oracle=1, lost=Lost(Loss.OVERWRITTEN, 1999))


def test_a_restarted_engine_is_reported_as_restarted():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert play << engine_lost() << engine_up() << sees()
    assert play << arrives("r2") << knows("r2", A) >> goes("r2", slot=0, reason=Reason.COLD)
    assert play << ends("r2", 2000, 0) >> reports("r2", lost=Lost(Loss.RESTARTED, 1999))
    assert one_turn(play, "r3", X, slot=1)
    assert one_turn(play, "r4", Y, slot=0)  # computed since then, so the number of slots is the reason
    assert play << arrives("r5") << knows("r5", A) >> goes("r5", slot=1, reason=Reason.COLD)
    assert play << ends("r5", 2000, 0) >> reports("r5", lost=Lost(Loss.OVERWRITTEN, 1999))


def test_a_missing_checkpoint_is_reported_as_checkpoint():
    play = Play(n_slots=1)
    assert one_turn(play, "r1", A, slot=0)
    assert play << arrives("r2") << knows("r2", A.cut(0, 1400)) >> goes("r2", slot=0)
    # Checkpoints are at 1484 and 1996.
    assert play << ends("r2", 1400, 0) >> reports("r2", predicted=0, lost=Lost(Loss.CHECKPOINT, 1399))


def test_a_missing_checkpoint_is_reported_though_one_was_planted_for_the_request():
    """The slot held the shared beginning; a plant for a request was computed for that request."""
    play = Play(n_slots=1, eager_thinning=False)
    assert one_turn(play, "r1", A, slot=0)
    assert play << arrives("r2") << knows("r2", B) >> plants("r2", 0, Purpose.PLANT)
    assert play << filled(1004) >> goes("r2", slot=0)
    assert (
        play << ends("r2", 2000, 1004) >> reports("r2", usage__planted=1004, lost=Lost(Loss.CHECKPOINT, 1000))
    )


def test_reuse_below_the_prediction_is_reported_as_mispredicted():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert play << arrives("r2") << knows("r2", A + MORE) >> goes("r2", slot=0)
    assert play << ends("r2", 2100, 0) >> reports("r2", predicted=2000, lost=Lost(Loss.MISPREDICTED, 2000))


@pytest.mark.parametrize("slot", [1, -1])
def test_a_client_chosen_slot_is_reported_as_unplaced(slot):
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    play << arrives("r2", id_slot=slot) >> goes("r2", slot=1, reason=Reason.CLIENT_CHOSE)
    assert play << knows("r2", A) << ends("r2", 2000, 0) >> reports("r2", lost=Lost(Loss.UNPLACED, 1999))


def test_a_request_that_was_placed_before_its_tokens_were_known_is_reported_as_unplaced():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert play << arrives("r2", brief=True) >> goes("r2", slot=1, reason=Reason.BRIEF)
    play << ends("r2", 500, 0) << knows("r2", A.cut(0, 500))
    assert play >> reports("r2", oracle=1, lost=Lost(Loss.UNPLACED, 499))


def test_an_unexpected_slot_choice_of_the_engine_is_reported_as_unplaced():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    play << arrives("r2", pinnable=False) << knows("r2", A + MORE)
    assert play >> unpinned("r2", Reason.ENGINE_CHOSE) << starts("r2") << sees(1)
    assert play << ends("r2", 2100, 0) >> reports("r2", slot=1, lost=Lost(Loss.UNPLACED, 2000))


def test_a_bypass_is_reported_as_bypassed():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert play << arrives("r2", bypass=True) >> unpinned("r2", Reason.BYPASS) << knows("r2", A) << sees(1)
    assert play << ends("r2", 2000, 0) >> reports("r2", lost=Lost(Loss.BYPASSED, 1999))


def test_a_request_that_disables_the_cache_is_reported_as_bypassed():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert play << arrives("r2", uncached=True) << knows("r2", A) >> goes("r2", slot=0)
    assert play << ends("r2", 2000, 0) >> reports("r2", predicted=0, lost=Lost(Loss.BYPASSED, 1999))


# -- during the steps of a request ---------------------------------------------------------------------


def test_tokens_that_a_cancelled_request_did_not_reach_are_not_lost():
    play = dense(n_slots=1)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << starts("r1") << leaves("r1")
    assert play << arrives("r2") << knows("r2", A) << sees(contents={0: 800}) >> goes("r2", slot=0)
    assert play << ends("r2", 2000, 800) >> reports("r2", oracle=1200, lost=None)


def test_a_sampled_reply_counts_as_computed_before():
    play = dense(n_slots=1)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0)
    assert play << ends("r1", 2000, 0, generated=101) >> reports("r1") << replies("r1", A + MORE)
    assert one_turn(play, "r2", X, slot=0)
    assert play << arrives("r3") << knows("r3", A + MORE + MORE) >> goes("r3", slot=0)
    assert play << ends("r3", 2200, 0) >> reports("r3", oracle=100, lost=Lost(Loss.OVERWRITTEN, 2100))


# -- the figures -----------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B, C, D, X, Y, HEAD, A + MORE, B + MORE]),
            st.sampled_from([{}, {"bypass": True}, {"id_slot": 0}, {"uncached": True}, {"brief": True}]),
            st.integers(min_value=0, max_value=100),  # cached tokens in percent of the prediction
        ),
        max_size=8,
    ),
    st.sampled_from(["dense", "hybrid"]),
)
def test_lost_tokens_and_the_oracle_add_up_to_the_computed_tokens(turns, memory):
    play = Play(memory=memory, eager_thinning=False, **NEW_FILES)
    for n, (prompt, asked, percent) in enumerate(turns):
        report = served(play, f"r{n}", prompt, percent, **asked)
        computed = report.usage.work
        assert 1 <= report.oracle <= computed
        assert (report.lost.tokens if report.lost else 0) == computed - report.oracle


def served(play: Play, request: str, prompt: Tokens, percent: int, **asked: Any) -> Report:
    """Answer a request: its plants succeed, its saves fail, `percent` of the predicted tokens are cached."""
    play << arrives(request, **asked) << knows(request, prompt)
    while not isinstance(step := play.effects.popleft(), Forward):
        assert isinstance(step, Prefill | Save)
        play.step = step
        play << (unsaved() if isinstance(step, Save) else filled(len(step.tokens)))
    cached = (play.pending(step.request).predicted or 0) * percent // 100
    play << ends(request, len(prompt), cached, slot=step.slot or 0) << sees()
    report = play.effects.popleft()
    assert isinstance(report, Report)
    return report
