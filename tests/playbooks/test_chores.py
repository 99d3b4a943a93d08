"""Idle work in a slot: which files it gets, and how it is restored to where it was."""

from dataclasses import replace

import pytest

from playbooks.playbook import (
    NEW_FILES,
    OLD_FILES,
    TOKEN_BYTES,
    Play,
    arrives,
    closing,
    drops,
    ends,
    engine_lost,
    engine_up,
    filed,
    filled,
    fills,
    follows,
    goes,
    knows,
    leaves,
    one_turn,
    replies,
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
    written,
)
from slotkeeper.scheduler.effects import Prefill, Purpose, Restore
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import Loading, Reason, RequestId, SlotId

USER = 7
TALK = Tokens(range(10_000, 10_600)) + Tokens([USER]) + Tokens(range(20_000, 20_400))
LAST_PROMPT, USER_MESSAGE = TALK.cut(0, 998), TALK.cut(0, 601)
REPLY = Tokens(range(30_000, 30_049))
A, B = (Tokens(range(n, n + 5000)) for n in (100_000, 200_000))
OUTLINE = (b"system", b"hello")


def old(**more):
    """Files carry no checkpoints: every state to return to needs its own file."""
    return Play(**{"user_start": ((USER,),), **OLD_FILES, **more})


def talked(play, *, generated=1):
    """A conversation is in slot 0, and has paused."""
    assert play << arrives("r1", hash_chain=OUTLINE) << knows("r1", TALK) >> goes("r1", slot=0)
    assert play << ends("r1", len(TALK), 0, generated=generated) >> reports("r1") << follows("r1", None)
    play.later(60) << sees()
    return play


def cut_back(play):
    """The end and the last prompt are in files, and the slot is being cut to the user message."""
    assert play >> saves(0) << saved("end") >> fills(0, Purpose.CUT, tokens=LAST_PROMPT)
    assert play << filled() >> saves(0, tokens=LAST_PROMPT)
    assert play << saved("prompt") >> fills(0, Purpose.CUT, tokens=USER_MESSAGE)
    return play


def saved_and_restored(play):
    """Every file is written, and the slot is restored to where it was."""
    assert cut_back(play) << filled() >> saves(0, tokens=USER_MESSAGE) << saved("user") >> restores(0, "end")
    assert play << restored()
    return play


def test_an_old_engine_gets_files_of_the_end_the_last_prompt_and_user_messages_then_a_restore():
    play = saved_and_restored(talked(old()))
    assert play.table.shadow.slots[0].tokens == TALK
    assert play.states == ["idle", "idle"]
    assert play.later(300) << sees()


def test_a_next_turn_that_becomes_known_while_the_slot_is_cut_back_is_computed_once_it_is_restored():
    """On a machine that stood still, idle work is due before the reply has been rendered."""
    play = old(checkpoint_min_step=0)
    assert play << arrives("r1", hash_chain=OUTLINE) << knows("r1", TALK) >> goes("r1", slot=0)
    assert play << ends("r1", len(TALK), 0, generated=1) >> reports("r1")
    play.later(60) << sees()
    assert cut_back(play)
    assert play.placement.holds(RequestId("r1"))
    following = TALK + REPLY
    assert play << follows("r1", following)
    assert play << filled() >> saves(0, tokens=USER_MESSAGE) << saved("user") >> restores(0, "end")
    assert play << restored() >> fills(0, Purpose.NEXT, tokens=following)


def test_boundaries_are_saved_at_the_first_pause_only_if_no_file_has_the_text_before_them():
    play = old()
    assert play << arrives("r1", hash_chain=OUTLINE) << knows("r1", TALK) >> goes("r1", slot=0)
    assert play << ends("r1", len(TALK), 0, generated=1) >> reports("r1") << follows("r1", None)
    play.wakes()
    assert saved_and_restored(play)

    next_turn = arrives("r2", hash_chain=(*OUTLINE, b"a", b"b"))
    assert play << next_turn << knows("r2", TALK + A.cut(0, 500)) >> goes("r2", slot=0)
    assert play << ends("r2", 1501, 1001, generated=1) >> reports("r2") << follows("r2", None)
    play.wakes()
    assert play >> saves(0) << saved("later")
    assert play.states == ["idle", "idle"]
    assert play.later(60) << sees() >> fills(0, Purpose.CUT)


@pytest.mark.parametrize(
    ("chance", "lasting", "cut"), [(0.5, False, True), (0.25, False, False), (0.25, True, True)]
)
def test_a_slot_whose_checkpoints_a_cut_would_lose_is_not_cut_if_predictions_failed(chance, lasting, cut):
    """Its client goes back to the checkpoint of the last user message, as it has done before."""
    play = old(checkpoint_min_step=0) if lasting else old()
    assert play << arrives("r1", hash_chain=OUTLINE) << knows("r1", TALK) >> goes("r1", slot=0)
    assert play << ends("r1", len(TALK), 0) >> reports("r1") << follows("r1", None, chance=chance)
    assert play.later(60) << sees() >> saves(0)
    play << saved("end")
    assert play >> fills(0, Purpose.CUT, tokens=LAST_PROMPT) if cut else play.later(300) << sees()


def test_a_slot_whose_answer_broke_off_is_not_cut_if_that_would_lose_its_checkpoints():
    play = old()
    assert play << arrives("r1", hash_chain=OUTLINE) << knows("r1", TALK) >> goes("r1", slot=0)
    assert play << starts("r1") << leaves("r1", reached=len(TALK), cached=0) >> reports("r1")
    assert play << sees(contents={0: len(TALK) + 20}) << sees(contents={0: len(TALK) + 20})
    assert play.later(60) << sees() >> saves(0)
    assert play << saved("end", TALK + REPLY.cut(0, 20))
    assert play.later(300) << sees()


def test_a_slot_is_not_cut_on_an_engine_without_checkpoints():
    """All tokens before the cut would be computed again."""
    play = talked(old(checkpoint_cap=0))
    assert play >> saves(0) << saved("end")
    assert play.later(300) << sees()


def test_a_reply_that_the_next_turn_may_not_begin_with_is_restored_not_computed_again():
    """It would be computed for nothing: without us the engine would go back to the last prompt."""
    end = TALK + REPLY.cut(0, 20)
    play = old()
    assert play << arrives("r1", hash_chain=OUTLINE) << knows("r1", TALK) >> goes("r1", slot=0)
    assert play << ends("r1", len(TALK), 0, generated=21) >> reports("r1")
    assert play << follows("r1", None, chance=0.5) << snapshots_changed(snapshot("user", USER_MESSAGE))
    assert play.later(60) << sees() >> saves(0) << saved("end", end) >> fills(0, Purpose.CUT)
    assert play << filled() >> saves(0, tokens=LAST_PROMPT) << saved("prompt") >> restores(0, "end")


def test_with_a_draft_model_four_foreign_tokens_are_added_to_a_newer_engines_file():
    play = Play(user_start=((USER,),), speculative=True, **NEW_FILES)
    assert play << arrives("r1") << knows("r1", TALK) >> goes("r1", slot=0)
    assert play << ends("r1", 1001, 0, generated=50) >> reports("r1") << replies("r1", TALK + REPLY)
    first, total = TALK.cut(0, 1), 1050
    marked = TALK + REPLY + first + first + first + first
    assert play.later(60) << sees() >> fills(0, Purpose.DRAFT, tokens=marked)
    assert play << filled(4) >> saves(0, tokens=marked)
    assert play << saved("end", checkpoints=(485, 600, 997, total), draft=True)
    assert play.later(300) << sees()
    assert play << arrives("r2") << knows("r2", TALK + REPLY + A) >> goes("r2", slot=0)
    assert play << ends("r2", total + 5000, total) >> reports("r2", predicted=total)


def test_with_a_draft_model_a_file_is_dropped_once_a_later_one_of_the_same_tokens_has_the_draft_state():
    """The reply's tokens were not known before the first save. Of both files, the plain one is cheaper."""
    play = Play(user_start=((USER,),), speculative=True, **NEW_FILES)
    assert play << arrives("r1") << knows("r1", TALK) >> goes("r1", slot=0)
    assert play << ends("r1", 1001, 0, generated=50) >> reports("r1")
    play.later(60) << sees() >> saves(0)
    first, whole, cuts = TALK.cut(0, 1), TALK + REPLY, (485, 600, 997)
    marked = whole + first + first + first + first
    play << saved("plain", whole, checkpoints=cuts, draft=True)
    assert play >> fills(0, Purpose.DRAFT, tokens=marked)
    assert play << filled(4) >> saves(0, tokens=marked)
    play << saved(
        "marked", size=(len(marked) + 50) * TOKEN_BYTES, checkpoints=(*cuts, len(whole)), draft=True
    )
    assert play >> drops("plain") << engine_lost() << engine_up() << sees()
    assert (
        play << arrives("r2") << knows("r2", whole + A) >> restores(0, "marked") << restored() >> goes("r2")
    )


def test_with_a_draft_model_an_old_engines_slot_is_computed_back_and_keeps_its_conversation():
    play = cut_back(talked(old(speculative=True)))
    assert play << filled() >> saves(0) << saved("user") >> fills(0, Purpose.HOME, tokens=TALK)
    assert play << filled(400)
    assert play.table.shadow.slots[0].hash_chain == OUTLINE
    next_turn = arrives("r2", hash_chain=(*OUTLINE, b"answer", b"more"))
    assert play << next_turn << knows("r2", TALK + A) >> goes("r2", slot=0, reason=Reason.PREFIX)


def test_a_slot_is_not_cut_back_if_no_file_can_restore_it():
    """The file of its end did not fit, so a cut would lose those tokens."""
    play = talked(old(limits=Limits(hot_bytes=1100 * TOKEN_BYTES)))
    play >> saves(0) << saved("end", size=1200 * TOKEN_BYTES)
    assert [type(effect).__name__ for effect in play.effects] == ["Drop"]
    assert play.table.shadow.slots[0].tokens == TALK


def test_a_restore_step_computes_the_few_tokens_that_its_file_lacks():
    play = old()
    assert play << snapshots_changed(snapshot("s1", TALK.cut(0, 990)))
    assert play << arrives("r1") << knows("r1", TALK) >> restores(0, "s1") << restored() >> goes("r1")
    play << ends("r1", len(TALK), 990) << follows("r1", None)
    play.effects.clear()
    assert play.later(60) << sees() >> fills(0, Purpose.CUT, tokens=USER_MESSAGE)
    assert play << filled(601) >> saves(0) << saved("user") >> restores(0, "s1")
    assert play << restored() >> fills(0, Purpose.HOME, tokens=TALK) << filled(11)
    assert play.table.shadow.slots[0].tokens == TALK
    assert play.later(300) << sees()


@pytest.mark.parametrize("trouble", ["save", "budget"])
def test_a_slot_is_restored_if_no_more_files_can_be_saved(trouble):
    limits = Limits(hourly_bytes=1500 * TOKEN_BYTES) if trouble == "budget" else Limits()
    play = talked(old(limits=limits))
    assert play >> saves(0) << saved("end") >> fills(0, Purpose.CUT)
    play << filled()
    if trouble == "save":
        play >> saves(0) << unsaved()
    assert play >> fills(0, Purpose.HOME, tokens=TALK)
    assert play << filled(3)
    assert play.table.shadow.slots[0].tokens == TALK


# -- what a cut may cost ---------------------------------------------------------------------------------


def paused_after_a_document(prompt):
    """An engine that keeps all checkpoints answered this prompt; two files hold its end and its prompt."""
    play = old(checkpoint_min_step=0)
    assert play << arrives("r1", hash_chain=OUTLINE) << knows("r1", prompt) >> goes("r1", slot=0)
    assert play << ends("r1", len(prompt), 0, generated=1) >> reports("r1")
    play.later(60) << sees()
    assert play >> saves(0) << saved("end") >> fills(0, Purpose.CUT)
    assert play << filled() >> saves(0)
    return play << saved("prompt")


def test_a_slot_is_computed_back_so_that_the_next_question_about_a_document_finds_a_checkpoint():
    """Without the checkpoint the whole document would be computed for the next question."""
    document = A.cut(0, 4500)
    play = paused_after_a_document(document + B.cut(0, 500))  # checkpoints at 4484 and 4996
    assert play >> fills(0, Purpose.HOME) << filled(3)
    assert play.later(300) << sees()
    other = document + REPLY.cut(0, 40)
    assert play << arrives("r2") << knows("r2", other) >> goes("r2", slot=0, reason=Reason.PREFIX)
    assert play << ends("r2", len(other), 4484) >> reports("r2", predicted=4484)


def test_a_slot_is_not_cut_back_if_the_lost_checkpoint_is_worth_more_than_the_file():
    """Little is saved before the long message compared with its end, and the restore step is expensive."""
    play = paused_after_a_document(TALK.cut(0, 349) + Tokens([USER]) + A)
    assert play >> fills(0, Purpose.HOME) << filled(3)
    assert play.later(300) << sees()


def test_a_slot_is_not_cut_back_if_the_restore_step_costs_more_than_the_file_saves():
    play = cut_back(talked(old(speculative=True)))
    assert play << filled() >> saves(0) << saved("user") >> fills(0, Purpose.HOME, tokens=TALK) << filled(400)
    more = TALK + Tokens(range(40_000, 40_200)) + Tokens([USER]) + A.cut(0, 600)
    next_turn = arrives("r2", hash_chain=(*OUTLINE, b"answer", b"more"))
    assert play << next_turn << knows("r2", more) >> goes("r2", slot=0)
    assert play << ends("r2", len(more), 1001, generated=1) >> reports("r2") << follows("r2", None)
    assert play.later(60) << sees() >> saves(0) << saved("later") >> fills(0, Purpose.CUT)
    assert play << filled() >> saves(0) << saved("later prompt") >> fills(0, Purpose.HOME, tokens=more)


def test_a_prompt_without_messages_is_not_cut_back_at_the_first_pause():
    play = old()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0)
    assert play << ends("r1", len(A), 0, generated=1) >> reports("r1") << follows("r1", None)
    assert play.wakes() >> saves(0) << saved("end")
    assert play.states == ["idle", "idle"]
    assert play.later(60) << sees() >> fills(0, Purpose.CUT)


# -- a request arrives ---------------------------------------------------------------------------------


def test_a_request_gets_a_slot_as_soon_as_the_engine_has_written_its_file():
    """The file is checked and enters the catalog while the slot runs the next task."""
    play = talked(Play(n_slots=1, **NEW_FILES))
    assert play >> saves(0) << written()
    assert play.states == ["tended"]
    save = play.step.request
    assert play << arrives("r2") << knows("r2", TALK + A) >> goes("r2", slot=0, reason=Reason.PREFIX)
    assert play << filed(save, snapshot("end", TALK))
    assert "end" in play.placement.catalog


def test_a_slot_is_not_saved_twice_while_its_file_is_checked():
    play = talked(Play(**NEW_FILES))
    assert play >> saves(0) << written()
    save = play.step.request
    assert one_turn(play, "r2", A, slot=1)
    assert play << snapshots_changed(snapshot("other", A))
    assert play.later(300) << sees()
    assert play << filed(save, None) << sees()  # it could not be kept


def test_a_reply_that_becomes_known_while_its_slot_is_saved_is_known_there():
    """Otherwise a prefetch would restore that file over the slot, which takes its checkpoints."""
    play = talked(old(), generated=50)
    assert play >> saves(0) << replies("r1", TALK + REPLY)
    assert play.table.shadow.slots[0].tokens == TALK + REPLY


def test_a_file_that_was_checked_after_its_slot_was_wanted_shows_what_the_slot_and_its_copy_hold():
    play = talked(Play(ram_cache=True, **NEW_FILES), generated=50)
    assert play >> saves(0) << written()
    save = play.step.request
    assert play << arrives("r2") << knows("r2", A) >> goes("r2", slot=1)
    assert play << filed(save, snapshot("end", TALK + REPLY))
    assert play.table.shadow.slots[0].tokens == TALK + REPLY
    assert [entry.tokens for entry in play.table.shadow.ram] == [TALK + REPLY]


def test_a_reply_that_becomes_known_after_the_engine_copied_its_slot_is_known_in_the_copy():
    """The engine replaces the copy by a longer one; an unknown end would make us expect both."""
    play = Play(ram_cache=True, **OLD_FILES)
    assert play << arrives("r1") << knows("r1", TALK) >> goes("r1", slot=0)
    assert play << ends("r1", len(TALK), 0, generated=50) >> reports("r1")
    assert play << arrives("r2") << knows("r2", A) >> goes("r2", slot=1)
    assert play << replies("r1", TALK + REPLY)
    assert [entry.tokens for entry in play.table.shadow.ram] == [TALK + REPLY]


def test_idle_work_continues_after_its_file_enters_the_catalog_if_no_request_waits():
    play = talked(old())
    assert play >> saves(0) << written()
    assert play << filed(play.step.request, snapshot("end", TALK)) >> fills(0, Purpose.CUT)


def test_a_request_waits_for_a_slot_that_is_being_saved_rather_than_restore_a_shorter_file():
    """Nothing else runs on that engine until the file is written, so the wait costs nothing."""
    play = talked(Play(memory="dense", **NEW_FILES))
    assert play >> saves(0) << snapshots_changed(snapshot("early", TALK.cut(0, 900)))
    assert play << arrives("r2") << knows("r2", TALK + A)
    assert play << written() >> goes("r2", slot=0, reason=Reason.PREFIX)


def test_a_request_goes_to_another_engine_if_its_engine_is_writing_a_file():
    play = Play(memory="dense", engines=2, **NEW_FILES)
    assert one_turn(play, "r1", A, slot=0)
    play.table.shadow.slots[1] = replace(play.table.shadow.slots[0], tokens=B.cut(0, 300))
    play.table.settled[SlotId(1)] = play.table.shadow.slots[1]
    play.later(60) << sees()
    assert play >> saves(0)
    assert play << arrives("r2") << knows("r2", B.cut(0, 500)) >> goes("r2", engine="e1")


# -- files are removed -----------------------------------------------------------------------------------


def test_saved_contents_are_not_saved_again_if_their_files_are_removed():
    play = old()
    assert play << arrives("r1") << knows("r1", TALK) >> goes("r1", slot=0)
    assert play << ends("r1", len(TALK), 0, generated=1) >> reports("r1")
    assert play << snapshots_changed(snapshot("user", USER_MESSAGE))
    assert play.wakes() >> saves(0) << saved("end") << snapshots_changed(snapshot("prompt", LAST_PROMPT))
    assert play << snapshots_changed(gone=("end", "prompt", "user"))
    assert play.later(300) << sees()


# -- engines that are lost -----------------------------------------------------------------------------

OUTCOMES = {
    "save": [saved("end"), unsaved()],
    "cut": [filled(), filled(None)],
    "home": [restored(), restored(Loading.UNFIT), restored(Loading.REFUSED), restored(Loading.LOST)],
}


def until(play, step):
    """Run the chore up to this step."""
    if step == "save":
        assert play >> saves(0)
    else:
        cut_back(play)
    if step == "home":
        assert play << filled() >> saves(0) << saved("user") >> restores(0, "end")
    return play


@pytest.mark.parametrize(("step", "outcome"), [(s, o) for s, all_ in OUTCOMES.items() for o in all_])
def test_idle_work_ends_when_its_engine_is_lost(step, outcome):
    play = until(talked(old()), step)
    assert play << engine_lost() << engine_up() << sees()
    assert play << outcome
    assert not play.placement._state.chores
    assert play.states == ["idle", "idle"]
    assert play.table.shadow.slots == [None, None]


def test_a_file_that_a_lost_engine_wrote_is_added_to_the_catalog():
    play = until(talked(old()), "save")
    assert play << engine_lost() << engine_up() << sees() << saved("end")
    assert "end" in play.placement.catalog


@pytest.mark.parametrize(("step", "outcome"), [(s, o) for s, all_ in OUTCOMES.items() for o in all_])
def test_idle_work_ends_whatever_its_steps_return(step, outcome):
    play = until(talked(old()), step)
    play << outcome
    for _ in range(20):
        effect = play.effects.popleft() if play.effects else None
        if isinstance(effect, Restore | Prefill):
            play.step = effect
            play << (restored() if isinstance(effect, Restore) else filled())
        elif effect is None:
            play.later(1) << sees()
        elif type(effect).__name__ == "Save":
            play.step = effect
            play << saved(f"s{play.clock}")
    assert not play.effects
    assert not play.placement._state.chores
    assert set(play.states) == {"idle"}


def test_an_answer_to_a_failed_scheduler_is_not_matched_to_a_step_of_its_successor():
    one, other = talked(Play(**NEW_FILES)), Play(**NEW_FILES)
    assert one >> saves(0)
    assert other.later(100).placement is not one.placement
    talked(other)
    other >> saves(0)
    assert one.step.request != other.step.request
    event = saved("late").of(one.step, other.clock)
    assert other << event
    assert other.states[0] == "tended"
    assert SnapshotId("late") in other.placement.catalog


# -- warming -------------------------------------------------------------------------------------------


def test_with_a_draft_model_empty_slots_of_an_old_engine_get_the_latest_conversations():
    play = old(speculative=True)
    early, end = snapshot("early", A.cut(0, 2500)), snapshot("end", A, used=1001.0)
    assert play << snapshots_changed(early, end) >> restores(0, "early")
    assert play << restored() >> fills(0, Purpose.DRAFT, tokens=A) << filled(2500)
    assert play.table.shadow.slots[0].tokens == A
    assert play.later(300) << sees()


def test_a_request_waits_for_one_step_of_warming_and_then_gets_the_slot():
    play = old(speculative=True, n_slots=1)
    assert (
        play
        << snapshots_changed(snapshot("early", A.cut(0, 2500)), snapshot("end", A))
        >> restores(0, "early")
    )
    assert play << arrives("r1") << knows("r1", B)
    assert play << restored() >> goes("r1", slot=0)


def test_no_slot_is_warmed_during_shutdown():
    play = old(speculative=True)
    play << closing()
    assert play << snapshots_changed(snapshot("end", A.cut(0, 2500)))
