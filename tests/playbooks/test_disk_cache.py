"""An engine that keeps prompts on disk itself: nothing is written twice, and the rest is ours."""

from __future__ import annotations

from typing import Any

import pytest

from playbooks.playbook import (
    NEW_FILES,
    Play,
    arrives,
    closing,
    ends,
    engine_lost,
    engine_up,
    erased,
    erases,
    filled,
    goes,
    knows,
    one_turn,
    plants,
    reports,
    saved,
    saves,
    sees,
    unpinned,
)
from slotkeeper.scheduler.costs import Limits
from slotkeeper.scheduler.effects import Purpose, Save, SaveMoment
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import Reason

A, B, C = (Tokens(range(n, n + 3000)) for n in (10_000, 20_000, 30_000))
HEAD = Tokens(range(50_000, 53_000))
MORE = Tokens(range(100))
OFF = {"disk_cache": ""}


def play(**more: Any) -> Play:
    known = {"memory": "dense", "ram_cache": True, "disk_cache": "flags", **NEW_FILES, "n_slots": 1}
    return Play(**(known | more))


def paused(at: Play) -> list[Any]:
    """What is done in a long pause after a turn, and what is left to be done."""
    assert one_turn(at, "r1", A, slot=0)
    at.later(60.0).wakes()
    return list(at.effects)


def test_a_conversation_that_pauses_is_left_to_it():
    assert paused(play()) == []


@pytest.mark.parametrize(
    "more",
    [
        OFF,
        {"speculative": True, "knowledge": {}},  # the engine's own have no draft state
        {"limits": Limits(shared_bytes=0)},  # for other machines
        {"ram_cache": False},  # nothing goes to its disk
    ],
)
def test_what_it_does_not_keep_is_saved(more):
    assert [type(effect) for effect in paused(play(**more))] == [Save] or more.get("speculative")


def test_in_a_namespace_it_is_of_no_use_so_states_are_saved():
    at = play()
    at << arrives("r1", namespace="anna") << knows("r1", A)
    at >> erases(0) << erased() >> goes("r1") << ends("r1", 3000, 0)
    assert at >> reports("r1")
    at.later(60.0).wakes()
    assert at >> saves(0)


def test_before_a_slot_is_overwritten_the_engine_saves_it():
    at = play()
    assert one_turn(at, "r1", A, slot=0)
    assert at << arrives("r2") << knows("r2", B) >> goes("r2", slot=0)


def test_without_it_that_is_ours():
    at = play(**OFF, ram_cache=False)
    assert one_turn(at, "r1", A, slot=0)
    assert at << arrives("r2") << knows("r2", B) >> saves(0, SaveMoment.PARK)


def test_what_the_engine_would_not_save_is_parked():
    """It keeps half of the slot, so it saves nothing before it overwrites the rest."""
    at = play()
    assert one_turn(at, "r1", HEAD + A, slot=0)
    assert at << arrives("r2") << knows("r2", HEAD + B) >> saves(0, SaveMoment.PARK)


def test_a_beginning_that_several_share_is_saved():
    """The engine evicts by age, and may load any other entry: a golden prefix is ours."""
    at = play(memory="hybrid", n_slots=2)
    assert one_turn(at, "r1", HEAD + A, slot=0)
    at << arrives("r2") << knows("r2", HEAD + B)
    assert at >> plants("r2", 1, Purpose.PLANT) << filled() >> saves(1, SaveMoment.BOUNDARY)


def test_at_the_end_what_it_has_not_got_yet_is_saved():
    at = play(n_slots=2)
    assert one_turn(at, "r1", A, slot=0)
    assert one_turn(at, "r2", B, slot=1)  # as that began the engine copied the first slot
    at.later(60.0).wakes()
    assert not at.effects
    assert at << closing() >> saves(1, tokens=B) << saved("s1")


def test_its_entries_are_expected_after_a_restart():
    at = play(n_slots=2)
    assert one_turn(at, "r1", A, slot=0)
    assert one_turn(at, "r2", B, slot=1)
    assert at << engine_lost() << engine_up() << sees()
    assert [len(entry.tokens) for entry in at.table.shadow.ram] == [3000]
    assert at << arrives("r3") << knows("r3", A + MORE) >> unpinned("r3", Reason.ENGINE_CHOSE)
    assert at << sees(0) << ends("r3", 3100, 3000) >> reports("r3", predicted=3000)


def test_a_stock_engine_has_none_after_a_restart():
    at = play(n_slots=2, **OFF)
    assert one_turn(at, "r1", A, slot=0)
    assert one_turn(at, "r2", B, slot=1)
    assert at << engine_lost() << engine_up() << sees()
    assert not at.table.shadow.ram


def test_what_it_brings_from_before_our_time_is_no_fault_of_its():
    at = play()
    assert at << arrives("r1") << knows("r1", A) >> goes("r1", slot=0)
    assert at << ends("r1", 3000, 2990) >> reports("r1", predicted=0)


@pytest.mark.parametrize(("traits", "left"), [({}, 2), (OFF, 1)])
def test_an_entry_that_was_loaded_stays(traits, left):
    at = play(n_slots=1, **traits, slot_files=False)
    assert one_turn(at, "r1", A, slot=0)
    assert one_turn(at, "r2", B, slot=0)
    assert at << arrives("r3") << knows("r3", A + MORE) >> goes("r3", reason=Reason.RAM_CACHE)
    assert len(at.table.shadow.ram) == left
