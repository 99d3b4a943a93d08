"""When a file is restored for a request, what follows, and what happens if that fails."""

from collections import Counter

import pytest

from playbooks.playbook import (
    NEW_FILES,
    OLD_FILES,
    Play,
    arrives,
    counted,
    drops,
    ends,
    engine_lost,
    engine_up,
    erased,
    erases,
    filed,
    filled,
    fills,
    goes,
    knows,
    leaves,
    one_turn,
    planted,
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
    unpinned,
    written,
)
from slotkeeper.scheduler.effects import Purpose, Restore, SaveMoment
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import Loading, Reason, Tier

A, B, C = (Tokens(range(n, n + 5000)) for n in (10_000, 20_000, 30_000))
MORE = Tokens(range(100))
S1 = snapshot("s1", A, checkpoints=(4484, 4996))


def hybrid(*snapshots, **more):
    play = Play(**{**NEW_FILES, **more})
    assert play << snapshots_changed(*(snapshots or (S1,)))
    return play


def test_a_file_is_restored_if_that_is_cheapest_and_its_reuse_is_recorded():
    play = hybrid()
    assert play << arrives("r1") << knows("r1", A + MORE) >> restores(0, "s1", request="r1")
    assert play << restored() >> goes("r1", slot=0, reason=Reason.SNAPSHOT)
    assert play << ends("r1", 5100, 5000) >> proves("s1", paid=True) >> reports("r1", predicted=5000)
    assert play.placement.catalog.get("s1").restores == 1


def test_a_file_that_saved_few_tokens_is_dropped():
    play = hybrid()
    assert play << arrives("r1") << knows("r1", A + MORE) >> restores(0, "s1") << restored() >> goes("r1")
    assert play << ends("r1", 5100, 2000) >> proves("s1", paid=False) >> drops("s1") >> reports("r1")
    assert not play.placement.catalog


def test_a_file_is_restored_for_a_branch_that_no_slot_can_be_cut_to():
    """The slot has moved on, and its checkpoint at the fork is gone."""
    play = Play(**NEW_FILES)
    assert one_turn(play, "r1", A + B, slot=0)
    assert (
        play
        << snapshots_changed(snapshot("s1", A))
        << arrives("r2")
        << knows("r2", A + C)
        >> restores(1, "s1")
    )
    assert play << restored() >> goes("r2", slot=1)


@pytest.mark.parametrize(
    "useless",
    [
        snapshot("s1", A + B, checkpoints=()),  # it continues differently, and cannot be cut
        snapshot("s1", A, fingerprint="of another model"),
        snapshot("s1", A, size=10**13),  # a read would take hours
        snapshot("s1", A, tier=Tier.COLD, size=2 * 10**9),
    ],
)
def test_a_useless_file_is_not_restored(useless):
    play = hybrid(useless, limits=Limits(hot_bytes=10**15, cold_bytes=10**15))
    assert play << arrives("r1") << knows("r1", A + MORE) >> goes("r1", slot=0, reason=Reason.COLD)


def test_checkpoints_that_a_restore_did_not_bring_back_are_not_expected():
    play = hybrid()
    assert play << arrives("r1") << knows("r1", A.cut(0, 4600) + MORE) >> restores(0, "s1")
    assert play << restored(checkpoints=False) >> goes("r1")
    play << ends("r1", 4700, 0)
    assert play >> proves("s1", paid=False) >> drops("s1") >> reports("r1", predicted=0)


# -- failed restores -------------------------------------------------------------------------------------


def test_a_file_that_the_engine_refuses_is_not_restored_again_and_the_slot_is_empty():
    play = hybrid(n_slots=1)
    assert one_turn(play, "r1", B, slot=0)
    assert play << arrives("r2") << knows("r2", A + MORE) >> saves(0, SaveMoment.PARK)
    assert play << saved("s2") >> restores(0, "s1")
    assert play << restored(Loading.REFUSED) >> goes("r2", slot=0)
    assert play << ends("r2", 5100, 0) >> reports("r2", predicted=0)


def test_an_unanswered_restore_is_not_retried_for_the_same_request():
    play = hybrid()
    assert play << arrives("r1") << knows("r1", A + MORE) >> restores(0, "s1")
    assert play << restored(Loading.LOST) >> goes("r1", slot=1, reason=Reason.COLD)
    assert play.states[0] == "draining"
    assert play.later(1) << sees(1) << ends("r1", 5100) >> reports("r1")
    assert play << arrives("r2") << knows("r2", A + C) >> restores(0, "s1")


def test_a_request_is_sent_to_an_engine_that_never_answers_a_restore():
    play = hybrid(*(snapshot(f"s{n}", A.cut(0, 4000 + n)) for n in range(50)))
    play << arrives("r1") << knows("r1", A + MORE)
    seen = Counter[str]()
    while play.effects and seen.total() < 10:
        effect = play.effects.popleft()
        seen[type(effect).__name__] += 1
        if isinstance(effect, Restore):
            play.step = effect
            play << restored(Loading.LOST) << sees()
    assert seen == {"Restore": 1, "Forward": 1}


@pytest.mark.parametrize("outcome", list(Loading))
def test_a_slot_has_unknown_contents_if_the_client_leaves_during_the_restore(outcome):
    play = hybrid()
    assert play << arrives("r1") << knows("r1", A + MORE) >> restores(0, "s1")
    assert play << leaves("r1") << restored(outcome)
    assert play.states == ["draining", "idle"]
    assert play.later(1) << sees(contents={0: 0})
    assert play.rests()
    assert play << arrives("r2") << knows("r2", A + MORE) >> restores(0, "s1")


def test_reuse_of_a_restored_state_is_possible_if_the_client_left_during_the_restore():
    """The engine restores the file all the same; GET /slots shows nothing of it before a task has run."""
    play = Play(up=False, n_slots=1, **NEW_FILES)
    assert play << engine_up(fresh=True) << sees() << snapshots_changed(S1)
    assert play << arrives("r1") << knows("r1", A + MORE) >> restores(0, "s1")
    assert play << leaves("r1") << restored()
    assert play.later(1) << sees(contents={0: 0})
    other = A.cut(0, 300) + B
    assert one_turn(play, "r2", other, slot=0, cached=300)


@pytest.mark.parametrize("outcome", list(Loading))
def test_a_restore_is_repeated_if_the_engine_restarts_during_it(outcome):
    play = hybrid()
    assert play << arrives("r1") << knows("r1", A + MORE) >> restores(0, "s1")
    assert play << engine_lost() << engine_up() << sees()
    assert play << restored(outcome) >> restores(0, "s1") << restored() >> goes("r1", slot=0)


def test_removed_files_are_not_restored():
    play = hybrid()
    assert play << snapshots_changed(gone=("s1",))
    assert play << arrives("r1") << knows("r1", A + MORE) >> goes("r1", reason=Reason.COLD)


def test_a_file_is_not_evicted_while_it_is_restored():
    """The engine would not find it, and the request would be computed from its start."""
    play = hybrid(limits=Limits(hot_bytes=S1.size * 3 // 2))
    assert one_turn(play, "r1", B, slot=0)
    assert play.wakes() >> saves(0, SaveMoment.PAUSE)
    chore = play.step.request
    assert play << written()
    assert play << arrives("r2") << knows("r2", A + MORE) >> restores(1, "s1")
    assert play << filed(chore, snapshot("s2", B, checkpoints=(4484, 4996)))
    assert play << restored() >> goes("r2", slot=1)
    assert play << ends("r2", 5100, 5000) >> proves("s1", paid=True) >> reports("r2")
    play << snapshots_changed(snapshot("s3", C.cut(0, 300)))
    assert play.placement.catalog.size(Tier.HOT) < S1.size * 3 // 2


def test_room_is_made_when_the_last_files_of_a_folder_are_known():
    play = hybrid(limits=Limits(hot_bytes=S1.size * 3 // 2))
    play << snapshots_changed(snapshot("s2", B, checkpoints=(4484, 4996)), more=True)
    assert {"s1", "s2"} <= {kept.id for kept in play.placement.catalog}, "the best ones may follow"
    play << snapshots_changed(snapshot("s3", C.cut(0, 300)))
    assert play.placement.catalog.size(Tier.HOT) < S1.size * 3 // 2


def test_a_state_in_the_cold_folder_counts_with_what_is_its_own():
    """A state that grew has most of its bytes in common with those before it."""
    play = Play(**NEW_FILES, limits=Limits(hot_bytes=100, cold_bytes=S1.size * 3 // 2))
    moved = play << snapshots_changed(S1, snapshot("s2", A + MORE))
    assert moved >> drops("s2", to_cold=True) >> drops("s1", to_cold=True)
    assert play.placement.catalog.size(Tier.COLD) == 0, "what is new is not known yet"
    assert play << counted(s1=100, s2=S1.size)
    assert play.placement.catalog.size(Tier.COLD) == S1.size + 100
    assert play << counted(s1=S1.size) >> drops("s2")


def test_a_file_is_not_evicted_between_a_save_and_its_restore():
    play = hybrid(limits=Limits(hot_bytes=S1.size * 3 // 2, pause=1000.0), n_slots=1)
    assert one_turn(play, "r1", B, slot=0)
    assert play << arrives("r2") << knows("r2", A + MORE) >> saves(0, SaveMoment.PARK)
    assert play << saved("s2", checkpoints=(4484, 4996)) >> restores(0, "s1")


# -- routes without id_slot, windows ---------------------------------------------------------------------


def test_a_route_without_id_slot_is_steered_to_the_restored_slot():
    play = hybrid(n_slots=3)
    assert one_turn(play, "r1", B, slot=0)
    prompt = A + MORE
    assert play << arrives("r2", pinnable=False) << knows("r2", prompt) >> restores(1, "s1")
    assert play << restored() >> fills(1, Purpose.STEER, request="r2", tokens=prompt.cut(0, 5096))
    assert play << filled(96) >> unpinned("r2", Reason.STEERED)
    assert play << starts("r2") << sees(1)
    assert (
        play << ends("r2", 5100, 5096) >> proves("s1", paid=True) >> reports("r2", slot=1, usage__planted=96)
    )


def test_t9_a_restored_slot_is_erased_if_the_engine_would_cut_it_inside_its_window():
    play = hybrid(
        snapshot("s1", A),
        memory="swa",
        n_swa=512,
        swa_full=True,
        n_slots=1,
        state_version=2,
        files_carry=False,
    )
    assert play << arrives("r1") << knows("r1", A + MORE) >> restores(0, "s1") << restored() >> goes("r1")
    assert play << ends("r1", 5100, 5000) >> proves("s1", paid=True) >> reports("r1")
    assert play << arrives("r2") << knows("r2", A.cut(0, 4800) + C) >> erases(0)
    # Its beginning is computed again, so it can be saved: prompts have diverged after it.
    play << erased() >> plants("r2", 0, Purpose.PLANT, tokens=A.cut(0, 4800)) << planted("r2", 4800)
    assert play >> saves(0, SaveMoment.BOUNDARY) << saved("s2") >> goes("r2", slot=0)
    assert play << ends("r2", 9800, 4800) >> reports("r2", predicted=4800)


@pytest.mark.parametrize("mended", [True, False])
def test_t4_a_window_is_restored_only_if_its_file_was_repaired(mended):
    play = hybrid(snapshot("s1", A, repaired=mended), memory="swa", n_swa=512, **OLD_FILES)
    play << arrives("r1") << knows("r1", A + MORE)
    assert [type(effect) is Restore for effect in play.effects] == [mended]
