"""An engine that reports impossible reuse: neither its slot nor the file is used again."""

from __future__ import annotations

import pytest

from playbooks.playbook import (
    NEW_FILES,
    Expected,
    Play,
    acts,
    arrives,
    drops,
    ends,
    engine_up,
    erased,
    erases,
    goes,
    knows,
    one_turn,
    reports,
    restored,
    restores,
    sees,
    snapshot,
    snapshots_changed,
    starts,
    unpinned,
)
from slotkeeper.scheduler.effects import Poison, Poisoned
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.types import Reason

A = Tokens(range(1000))
B = Tokens(range(5000, 6000))


def poisoned(why: Poison, cached: int, possible: int) -> Expected:
    return Expected(Poisoned, {"why": why, "cached": cached, "possible": possible})


def test_reuse_of_more_tokens_than_any_earlier_prompt_shares_is_impossible():
    play = Play(memory="dense", **NEW_FILES)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0, reason=Reason.COLD)
    assert play << ends("r1", 1000, 400) >> poisoned(Poison.UNHEARD, 400, 0) >> reports("r1") >> erases(0)
    assert play.states == ["tended", "idle"], "no request gets the slot before it is empty"
    assert play << erased()
    assert play.table.shadow.slots[0] is None


@pytest.mark.parametrize("there", [0, 1])
def test_a_slot_is_not_erased_while_the_engine_may_put_a_task_there(there):
    play = Play(memory="dense", **NEW_FILES)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << starts("r1")
    assert play << arrives("r2", bypass=True, rendered=False) >> unpinned("r2", Reason.BYPASS)
    assert play << ends("r1", 1000, 400) >> poisoned(Poison.UNHEARD, 400, 0) >> reports("r1")
    play << sees(there)
    if there == 1:
        assert play >> erases(0) << erased()
    else:
        assert play << ends("r2", 40, slot=0) >> reports("r2"), "the slot holds what this task left"


def test_reuse_of_another_conversations_tokens_is_impossible():
    """The engine had these tokens once, but not in this slot."""
    play = Play(memory="dense", n_slots=1)
    assert one_turn(play, "r1", A, slot=0)
    assert one_turn(play, "r2", B, slot=0)
    assert play << arrives("r3") << knows("r3", A) >> goes("r3", slot=0)
    assert play << ends("r3", 1000, 900) >> poisoned(Poison.FOREIGN, 900, 0) >> reports("r3")
    assert play.table.shadow.slots[0] is None, (
        "without slot files the slot cannot be emptied, but its contents are not used"
    )


def test_a_file_that_led_to_impossible_reuse_is_dropped():
    play = Play(memory="dense", **NEW_FILES)
    assert (
        play
        << snapshots_changed(snapshot("s1", A))
        << arrives("r1")
        << knows("r1", A + B)
        >> restores(0, "s1")
    )
    assert play << restored() >> goes("r1", slot=0, reason=Reason.SNAPSHOT)
    play << ends("r1", 2000, 1900)
    assert play >> poisoned(Poison.UNHEARD, 1900, 1000) >> drops("s1") >> reports("r1") >> erases(0)


@pytest.mark.parametrize(
    "happened",
    [
        [engine_up(fresh=False), sees()],  # other clients used it before
        [sees(1), sees()],  # other clients use it now
    ],
)
def test_unexpected_reuse_is_accepted_from_an_engine_that_others_use(happened):
    play = Play(memory="dense", **NEW_FILES)
    for event in happened:
        play << event
    play.later(1000)
    play << arrives("r1") << knows("r1", A) << sees()
    assert play >> goes("r1") << ends("r1", 1000, 400) >> reports("r1")


def test_a_reply_with_unknown_tokens_may_be_reused():
    play = Play(memory="dense", n_slots=1)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1")
    assert play << ends("r1", 1000, 0, generated=300) >> reports("r1")
    assert play << arrives("r2") << knows("r2", A + B) >> goes("r2")
    assert play << ends("r2", 2000, 1299) >> reports("r2")


def test_a_slot_that_a_client_restored_may_hold_any_tokens():
    play = Play(memory="dense", n_slots=1, **NEW_FILES)
    assert play << arrives("a", rendered=False, id_slot=0, action=True) >> goes("a", slot=0)
    assert play << acts("a", left=10)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1") << ends("r1", 1000, 900) >> reports("r1")


def test_a_slot_that_a_client_chose_may_be_loaded_from_the_ram_cache():
    """What the slot held before is not known: it may have more in common with the prompt than the entry."""
    play = Play(memory="dense", ram_cache=True, **NEW_FILES)
    assert one_turn(play, "r1", A, slot=0)
    assert play << arrives("r2", rendered=False, id_slot=1) >> goes("r2", slot=1, reason=Reason.CLIENT_CHOSE)
    assert play << arrives("r3", id_slot=1) << knows("r3", A.cut(0, 600) + B.cut(0, 400))
    assert play << ends("r2", 1000) >> reports("r2") >> goes("r3", slot=1)
    assert play << ends("r3", 1000, 900) >> reports("r3")
