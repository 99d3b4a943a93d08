"""Copies to and from the engine's RAM prompt cache stop all slots: large states stay where they are."""

from dataclasses import replace

import pytest

from playbooks.playbook import (
    NEW_FILES,
    Play,
    arrives,
    ends,
    goes,
    knows,
    one_turn,
    planted,
    plants,
    reports,
    sees,
    starts,
)
from slotkeeper.scheduler.effects import Purpose
from slotkeeper.scheduler.prompts.tokens import Boundary, BoundaryKind, Tokens
from slotkeeper.scheduler.rates import LinearTimes
from slotkeeper.scheduler.slots.engine_model import FLAGS, HALF_LIFE, Known
from slotkeeper.scheduler.types import Reason

DOCUMENT = Tokens(range(50_000, 52_000))
FIRST, SECOND, THIRD = (DOCUMENT + Tokens(range(n, n + 200)) for n in (10_000, 20_000, 30_000))
HEAD, OTHER = Tokens(range(60_000, 61_000)), Tokens(range(70_000, 71_000))
AT_HEAD = Boundary(len(HEAD), BoundaryKind.HEAD)
LARGE = 1 << 20  # bytes of a token's state


def with_two_questions(token_bytes: int) -> Play:
    """Both slots hold the document and a question about it; that in slot 0 was asked last."""
    play = Play(ram_cache=True, memory="dense", token_bytes=token_bytes)
    play.table.rates.prefilled(1000, 1.0)
    assert one_turn(play, "r1", FIRST, slot=0)
    asked = play.table.shadow.slots[0]
    assert asked is not None
    play.table.shadow.slots[1] = replace(asked, tokens=SECOND, used=asked.used - 60.0)
    play.table.shadow.ram.append(replace(asked, tokens=SECOND))
    return play


def test_a_question_stays_in_the_slot_whose_state_the_engine_would_otherwise_copy():
    play = with_two_questions(LARGE)
    assert play << arrives("r3") << knows("r3", THIRD) >> goes("r3", slot=0, reason=Reason.PREFIX)


def test_a_small_state_is_copied_so_that_the_question_before_is_kept():
    play = with_two_questions(1024)
    assert play << arrives("r3") << knows("r3", THIRD) >> goes("r3", slot=1, reason=Reason.PREFIX)


def test_a_state_that_is_dear_to_copy_is_not_loaded_into_another_slot():
    large, small = (Play(ram_cache=True, memory="dense", token_bytes=size) for size in (LARGE, 1024))
    for play in (large, small):
        play.table.rates.prefilled(1000, 1.0)
        assert one_turn(play, "r1", FIRST, slot=0)
    assert large << arrives("r2") << knows("r2", SECOND) >> goes("r2", slot=0, reason=Reason.PREFIX)
    assert small << arrives("r2") << knows("r2", SECOND) >> plants("r2", 1, Purpose.TOUCH)


def test_a_large_state_is_not_copied_for_few_tokens_before_the_engine_has_shown_how_fast_it_copies():
    unknown, measured = (Play(ram_cache=True, memory="dense") for _ in range(2))
    measured.table.rates.copied(100_000_000, 0.01)
    for play in (unknown, measured):
        assert one_turn(play, "r1", FIRST, slot=0)
        assert play.later(HALF_LIFE) << sees()
    assert unknown << arrives("r2") << knows("r2", SECOND) >> goes("r2", slot=0, reason=Reason.PREFIX)
    assert measured << arrives("r2") << knows("r2", SECOND) >> plants("r2", 1, Purpose.TOUCH)


def slow_copies(play: Play, *, told_early: bool) -> Play:
    """The engine takes two seconds to copy a state of 64 MB, so its first bytes come that late."""
    for number in range(4):
        request, prompt = f"s{number}", Tokens(range(100_000 + 5000 * number, 101_000 + 5000 * number))
        assert play << arrives(request) << knows(request, prompt) >> goes(request)
        began = replace(starts(request), before_prefill=told_early)
        assert play.later(2.0) << began << ends(request, len(prompt)) >> reports(request)
        play.later(60.0) << sees()
    return play


@pytest.mark.parametrize("told_early", [True, False])
def test_the_time_of_a_copy_is_learned_from_answers_that_begin_before_the_prefill(told_early):
    play = slow_copies(Play(ram_cache=True, memory="dense"), told_early=told_early)
    assert (play.table.rates.copying.seconds(64_000_000) > 1.0) == told_early


@pytest.mark.parametrize("computes", [False, True])
def test_a_copy_beside_another_request_is_measured_unless_that_computes_its_prompt(computes):
    play = Play(ram_cache=True, memory="dense", n_slots=3)
    play.table.rates.prefilled(1000, 1.0)
    assert play << arrives("r1") << knows("r1", Tokens(range(9000))) >> goes("r1") << starts("r1")
    play.later(0.0 if computes else 60.0)
    assert one_turn(play, "r2", FIRST, slot=1)
    assert play << arrives("r3") << knows("r3", Tokens(range(100_000, 101_000))) >> goes("r3", slot=2)
    assert play.later(2.0) << replace(starts("r3"), before_prefill=True)
    assert play.table.rates.copying.measured != computes


@pytest.mark.parametrize("beside", ["", "begins", "all the time"])
def test_the_time_of_a_copy_is_learned_from_our_own_prefills_that_run_alone(beside):
    """Before the touch the engine copies the 2,200 tokens of slot 0: 36 MB in two seconds."""
    play = Play(ram_cache=True, memory="dense", n_slots=3, token_bytes=16 * 1024)
    if beside:
        assert play << arrives("r0") << knows("r0", OTHER) >> goes("r0", slot=0) << starts("r0")
    assert one_turn(play, "r1", FIRST, slot=1 if beside else 0)
    assert play << arrives("r2") << knows("r2", SECOND) >> plants("r2", 2 if beside else 1, Purpose.TOUCH)
    if beside == "begins":  # the other request was running when the touch began
        assert play << ends("r0", len(OTHER)) >> reports("r0")
    play << planted("r2", copied_seconds=2.0)
    assert play.table.rates.copying.measured != bool(beside)


# -- what is overwritten -------------------------------------------------------------------------------

ASKED = DOCUMENT + Tokens(range(10_000, 10_600))
EDITED = DOCUMENT + Tokens(range(20_000, 20_600))


def asked_in_slot_0() -> Play:
    """Of two turns, the last has 600 tokens; at 10 GB/s, to copy all 2,600 and back costs 208."""
    play = Play(ram_cache=True, memory="dense", token_bytes=400_000)
    assert one_turn(play, "r1", DOCUMENT, slot=0, hash_chain=(b"h", b"u1"))
    assert one_turn(play, "r2", ASKED, slot=0, cached=2000, hash_chain=(b"h", b"u1", b"u2"))
    return play


def test_an_edited_message_overwrites_what_it_replaces():
    play = asked_in_slot_0()
    play.later(10.0)
    edit = arrives("r3", hash_chain=(b"h", b"u1", b"u2 anew"))
    assert play << edit << knows("r3", EDITED) << sees() >> goes("r3", slot=0, reason=Reason.PREFIX)


@pytest.mark.parametrize(("copied_in_a_second", "touches"), [(1e10, True), (None, False)])
def test_a_sub_agent_that_comes_at_once_overwrites_another_one_only_where_copies_are_slow(
    copied_in_a_second, touches
):
    """They count as slow until one was measured: through Vulkan they take as long as to compute the state."""
    play = asked_in_slot_0()
    if copied_in_a_second:
        play.table.rates.copying = LinearTimes(copied_in_a_second)
    other = arrives("r3", hash_chain=(b"h", b"u1", b"another task"))
    play << other << knows("r3", EDITED)
    assert play >> (plants("r3", 1, Purpose.TOUCH) if touches else goes("r3", slot=0, reason=Reason.PREFIX))


def test_a_state_that_a_running_plant_replaces_is_loaded_from_its_copy():
    """The engine copies the slot before it computes the plant, and launches later tasks after that."""
    play = Play(ram_cache=True, token_bytes=1024, eager_thinning=False)
    assert play << arrives("b1") << knows("b1", OTHER) >> goes("b1", slot=0)
    assert play << starts("b1")
    assert one_turn(play, "a1", FIRST, slot=1)
    play << arrives("c1") << knows("c1", HEAD + OTHER, AT_HEAD)
    assert play >> plants("c1", 1, Purpose.PLANT)
    play << arrives("a2") << knows("a2", FIRST + SECOND)
    assert play << ends("b1", len(OTHER)) >> reports("b1") >> goes("a2", slot=0, reason=Reason.RAM_CACHE)
    assert [entry.request for entry in play.table.shadow.ram] == ["b1"]  # a1's left the cache
    assert play << planted("c1", len(HEAD)) >> goes("c1", slot=1)
    assert [entry.request for entry in play.table.shadow.ram] == ["b1"]  # and was not copied once more


def test_a_state_of_which_the_ram_cache_keeps_many_is_not_saved_for_a_cold_prompt():
    """To save it would take 33 ms. The model's header tells its size before any file does."""
    seen = dict.fromkeys(FLAGS, Known.FLAGS)
    play = Play(n_slots=1, ram_cache=True, token_bytes=16 * 1024, knowledge=seen, **NEW_FILES)
    assert one_turn(play, "a1", FIRST.cut(0, 1000), slot=0)
    assert play << arrives("b1") << knows("b1", OTHER) >> goes("b1", slot=0, reason=Reason.COLD)
