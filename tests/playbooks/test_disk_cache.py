"""An engine that keeps prompts on disk itself: the sidecar saves only what the engine does not."""

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
from slotkeeper.scheduler.budgets import Limits
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
    """Return the effects of a long pause after a turn."""
    assert one_turn(at, "r1", A, slot=0)
    at.later(60.0).wakes()
    return list(at.effects)


def test_a_paused_conversation_is_not_saved_if_the_engine_has_a_disk_cache():
    assert paused(play()) == []


@pytest.mark.parametrize(
    "more",
    [
        OFF,
        {"speculative": True, "knowledge": {}},  # the engine's own files have no draft state
        {"limits": Limits(shared_bytes=0)},  # the files are for other machines too
        {"ram_cache": False},  # the engine writes nothing to disk
    ],
)
def test_a_slot_is_saved_if_the_engines_disk_cache_does_not_keep_its_state(more):
    assert [type(effect) for effect in paused(play(**more))] == [Save] or more.get("speculative")


def test_a_slot_of_a_namespace_is_saved_because_the_disk_cache_is_not_used_for_it():
    at = play()
    at << arrives("r1", namespace="anna") << knows("r1", A)
    at >> erases(0) << erased() >> goes("r1") << ends("r1", 3000, 0)
    assert at >> reports("r1")
    at.later(60.0).wakes()
    assert at >> saves(0)


def test_a_slot_is_not_parked_if_the_engine_saves_it_before_the_overwrite():
    at = play()
    assert one_turn(at, "r1", A, slot=0)
    assert at << arrives("r2") << knows("r2", B) >> goes("r2", slot=0)


def test_a_slot_is_parked_if_the_engine_has_no_disk_cache():
    at = play(**OFF, ram_cache=False)
    assert one_turn(at, "r1", A, slot=0)
    assert at << arrives("r2") << knows("r2", B) >> saves(0, SaveMoment.PARK)


def test_a_slot_is_parked_if_the_engine_would_not_save_it_before_the_overwrite():
    """It keeps half of the slot, so it saves nothing before it overwrites the rest."""
    at = play()
    assert one_turn(at, "r1", HEAD + A, slot=0)
    assert at << arrives("r2") << knows("r2", HEAD + B) >> saves(0, SaveMoment.PARK)


def test_a_shared_prefix_is_saved_despite_the_engines_disk_cache():
    """The engine evicts by age, and may load any other entry: a golden prefix is ours."""
    at = play(memory="hybrid", n_slots=2)
    assert one_turn(at, "r1", HEAD + A, slot=0)
    at << arrives("r2") << knows("r2", HEAD + B)
    assert at >> plants("r2", 1, Purpose.PLANT) << filled() >> saves(1, SaveMoment.BOUNDARY)


def test_shutdown_saves_only_the_slots_that_the_disk_cache_lacks():
    at = play(n_slots=2)
    assert one_turn(at, "r1", A, slot=0)
    assert one_turn(at, "r2", B, slot=1)  # when r2 began, the engine copied the first slot
    at.later(60.0).wakes()
    assert not at.effects
    assert at << closing() >> saves(1, tokens=B) << saved("s1")


def test_entries_of_the_disk_cache_are_expected_after_a_restart():
    at = play(n_slots=2)
    assert one_turn(at, "r1", A, slot=0)
    assert one_turn(at, "r2", B, slot=1)
    assert at << engine_lost() << engine_up() << sees()
    assert [len(entry.tokens) for entry in at.table.shadow.ram] == [3000]
    assert at << arrives("r3") << knows("r3", A + MORE) >> unpinned("r3", Reason.ENGINE_CHOSE)
    assert at << sees(0) << ends("r3", 3100, 3000) >> reports("r3", predicted=3000)


def test_a_stock_engines_ram_cache_is_empty_after_a_restart():
    at = play(n_slots=2, **OFF)
    assert one_turn(at, "r1", A, slot=0)
    assert one_turn(at, "r2", B, slot=1)
    assert at << engine_lost() << engine_up() << sees()
    assert not at.table.shadow.ram


def test_reuse_from_a_disk_cache_that_is_older_than_the_sidecar_is_not_called_impossible():
    at = play()
    assert at << arrives("r1") << knows("r1", A) >> goes("r1", slot=0)
    assert at << ends("r1", 3000, 2990) >> reports("r1", predicted=0)


@pytest.mark.parametrize(("traits", "left"), [({}, 2), (OFF, 1)])
def test_a_loaded_entry_stays_in_a_disk_cache_and_leaves_a_ram_cache(traits, left):
    at = play(n_slots=1, **traits, slot_files=False)
    assert one_turn(at, "r1", A, slot=0)
    assert one_turn(at, "r2", B, slot=0)
    assert at << arrives("r3") << knows("r3", A + MORE) >> goes("r3", reason=Reason.RAM_CACHE)
    assert len(at.table.shadow.ram) == left
