"""LoRA adapters: no request uses a state of another set, and one set works as without adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from playbooks.playbook import (
    ENGINE,
    NEW_FILES,
    Expected,
    Play,
    arrives,
    drops,
    ends,
    engine_up,
    erased,
    erases,
    filled,
    goes,
    knows,
    plants,
    renders,
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
)
from slotkeeper.scheduler.effects import AskAdapters, Purpose, SaveMoment
from slotkeeper.scheduler.events import AdaptersChange, AdaptersSeen
from slotkeeper.scheduler.policies.adapters import Adapter, set_of, space_of
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.figures import Loss, Lost
from slotkeeper.scheduler.slots.table import ADAPTERS_STALE
from slotkeeper.scheduler.types import EngineId, Reason

A, B = (Tokens(range(n, n + 2000)) for n in (10_000, 20_000))
MORE = Tokens(range(100))
NONE = (Adapter("aa", 0.0), Adapter("bb", 0.0))
ONE, TWO = ((0, 1.0),), ((1, 1.0),)
SETS = {scales: set_of(NONE, scales) for scales in (None, ONE, TWO)}


def play(**more: Any) -> Play:
    known: dict[str, Any] = {"memory": "dense", "n_slots": 1, "adapters": NONE, "slot_files": True}
    return Play(**known | more)


def turn(at: Play, request: str, prompt: Tokens, lora: Any = None, *, cached: int = 0, **wanted: Any) -> bool:
    """Play a request that is sent without steps and answered."""
    assert at << arrives(request, lora=lora) << knows(request, prompt) >> goes(request, **wanted)
    return bool(at << ends(request, len(prompt), cached) >> reports(request, predicted=cached))


def within(prompt: Tokens, lora: Any = None) -> Tokens:
    return prompt.within(space_of("", SETS[lora]))


def seen(*scales: float, asked: float = 0.0, **more: Any) -> AdaptersSeen:
    adapters = tuple(replace(one, scale=scale) for one, scale in zip(NONE, scales, strict=True))
    return AdaptersSeen(at=0.0, asked=asked, engine=EngineId(ENGINE), adapters=adapters, **more)


def change() -> AdaptersChange:
    return AdaptersChange(at=0.0, engine=EngineId(ENGINE))


def asks_adapters() -> Expected:
    return Expected(AskAdapters, {"engine": ENGINE})


# -- the states that a request may use -------------------------------------------------------------------


def test_the_engine_empties_a_slot_if_a_request_names_other_adapters():
    at = play()
    assert turn(at, "r1", A)
    assert turn(at, "r2", A + MORE, ONE, slot=0, reason=Reason.COLD)
    assert turn(at, "r3", A + MORE + MORE, ONE, cached=2100, slot=0, reason=Reason.PREFIX)


def test_a_slot_of_another_set_is_erased_if_a_request_names_no_adapters():
    at = play()
    assert turn(at, "r1", A)
    assert turn(at, "r2", A, ONE)
    assert at << arrives("r3") << knows("r3", A + MORE) >> erases(0)
    assert at << erased() >> goes("r3", slot=0, reason=Reason.COLD, strict=True, isolated=True)
    assert at << ends("r3", 2100, 0) >> reports("r3", predicted=0)


@pytest.mark.parametrize(("lora", "cached", "certain"), [(ONE, 0, True), (None, 0, False), (ONE, 100, False)])
def test_what_ran_before_its_engine_was_known_is_found_if_it_used_only_its_own_adapters(
    lora, cached, certain
):
    at = play(up=False)
    at << arrives("r1", lora=lora, unplaced=Reason.NOT_PROBED)
    assert at >> goes("r1", slot=None, reason=Reason.NOT_PROBED) << knows("r1", None)
    at << ends("r1", 2000, cached) >> reports("r1") << engine_up(fresh=False)
    if certain:
        assert at >> renders("r1") << sees(contents={0: 2000}) << knows("r1", A)
        assert turn(at, "r2", A + MORE, ONE, cached=2000, slot=0, reason=Reason.PREFIX)
    else:
        at << sees(contents={0: 2000}) << arrives("r2", lora=lora) << knows("r2", A + MORE)
        assert at >> erases(0) << erased() >> goes("r2", slot=0, reason=Reason.COLD)


def test_without_a_slot_folder_a_request_that_could_reuse_another_set_is_uncached():
    at = play(slot_files=False)
    assert turn(at, "r1", A)
    assert turn(at, "r2", A, ONE)
    assert at << arrives("r3") << knows("r3", A + MORE) >> goes("r3", slot=0, strict=True, isolated=False)


def test_a_request_prefers_a_slot_of_its_own_set():
    at = play(n_slots=2)
    assert turn(at, "r1", A, slot=0)
    assert turn(at, "r2", A, ONE, slot=1)
    for number in range(3, 7):
        lora, slot = ((ONE, 1), (None, 0))[number % 2]
        prompt = A + Tokens(range(10 * number))
        cached = 2000 if number < 5 else 2000 + 10 * (number - 2)  # the set's turn before
        assert turn(at, f"r{number}", prompt, lora, cached=cached, slot=slot, reason=Reason.PREFIX)


def test_an_engine_without_adapters_ignores_the_adapters_of_a_request():
    at = play(adapters=())
    assert turn(at, "r1", A)
    assert turn(at, "r2", A + MORE, ONE, cached=2000, reason=Reason.PREFIX, strict=False)


def test_the_ram_cache_is_not_used_if_it_may_hold_states_of_two_sets():
    at = play(ram_cache=True)
    assert turn(at, "r1", A)
    assert turn(at, "r2", B, ONE, slot=0)
    assert at << arrives("r3") << knows("r3", A) >> erases(0) << erased() >> goes("r3", reason=Reason.COLD)


def test_a_slot_that_a_client_chooses_is_erased_if_it_has_another_set():
    at = play(n_slots=2)
    assert turn(at, "r1", A, ONE, slot=0)
    at << arrives("r2", id_slot=0) << knows("r2", A)
    assert at >> erases(0) << erased() >> goes("r2", slot=0, reason=Reason.CLIENT_CHOSE)


def test_a_bypass_has_no_effect_once_there_are_two_sets():
    at = play()
    assert turn(at, "r1", A)
    assert at << arrives("r2", bypass=True) >> unpinned("r2", Reason.BYPASS, strict=False)
    assert at << sees(0) << ends("r2", 2000, 0, slot=0) << sees() << knows("r2", A) >> reports("r2")
    assert turn(at, "r3", A, ONE)
    assert at << arrives("r4", bypass=True) << knows("r4", A) >> erases(0) << erased() >> goes("r4", slot=0)


def test_a_slot_that_a_direct_client_used_is_erased():
    at = play(n_slots=2)
    assert turn(at, "r1", A, ONE, slot=0)
    at.table.look_again = True
    assert at << knows("r1", None) << sees(0) << sees()
    assert at << arrives("r2", lora=ONE) << knows("r2", A) >> erases(0)


# -- files and plants ------------------------------------------------------------------------------------


def test_a_plant_has_the_adapters_of_its_request():
    at = play(memory="hybrid", **NEW_FILES)
    head = Tokens(range(30_000, 31_000))
    assert turn(at, "r1", head + A, ONE, slot=0)
    at << arrives("r2", lora=ONE) << knows("r2", head + B)
    at >> saves(0, SaveMoment.PARK) << saved("s1")
    assert at >> plants("r2", 0, Purpose.PLANT, lora=((0, 1.0), (1, 0.0)))


def test_a_slot_gets_the_adapters_of_a_file_before_the_file_is_restored():
    at = play(**NEW_FILES)
    assert at << snapshots_changed(snapshot("s1", within(A, ONE)), snapshot("s2", within(A)))
    at << arrives("r1", lora=ONE) << knows("r1", A + MORE)
    assert at >> plants("r1", 0, Purpose.TOUCH, lora=((0, 1.0), (1, 0.0)))
    assert at << filled() >> restores(0, "s1") << restored() >> goes("r1", reason=Reason.SNAPSHOT)
    assert at << ends("r1", 2100, 2000) >> Expected(object, {}) >> reports("r1", predicted=2000)


# -- the scales change while the engine runs -------------------------------------------------------------


def test_no_request_begins_during_a_change_and_later_requests_use_the_new_set():
    at = play()
    assert turn(at, "r1", A)
    assert at << change() << arrives("r2") << knows("r2", A + MORE)
    assert at << seen(1.0, 0.0, asked=at.clock, announced=True, exact=True) >> erases(0)
    assert at << erased() >> goes("r2", reason=Reason.COLD)
    assert at << ends("r2", 2100, 0) >> reports("r2", lost=Lost(Loss.ADAPTERS, 2000))
    assert turn(at, "r3", A + MORE + MORE, cached=2100, reason=Reason.PREFIX)


def test_a_slot_is_prepared_again_if_the_adapters_changed_in_between():
    at = play(memory="hybrid", **NEW_FILES)
    assert turn(at, "r1", A)
    at << arrives("r2", pinnable=False) << knows("r2", B)
    at >> saves(0, SaveMoment.PARK) << change() << saved("s1")
    assert at >> plants("r2", 0, Purpose.STEER) << filled()
    at << seen(1.0, 0.0, asked=at.clock, announced=True, exact=True)
    at >> erases(0) << erased()  # the engine would choose it as readily as the prepared slot
    assert at >> erases(0) << erased() >> plants("r2", 0, Purpose.STEER)
    assert at << filled() >> unpinned("r2", Reason.STEERED, strict=True, isolated=True)


def test_states_of_the_old_set_are_reused_when_its_scales_are_set_again():
    at = play(n_slots=2)
    assert turn(at, "r1", A, slot=0)
    at << change() << seen(1.0, 0.0, asked=at.clock, announced=True, exact=True)
    assert at << arrives("r2") << knows("r2", A) >> erases(1) << erased() >> goes("r2", slot=1)
    assert at << ends("r2", 2000, 0) >> reports("r2")
    at << change() << seen(0.0, 0.0, asked=at.clock, announced=True, exact=True)
    assert turn(at, "r3", A + MORE, cached=2000, slot=0, reason=Reason.PREFIX)


def test_a_request_that_names_the_new_scales_shares_the_states_of_the_new_set():
    at = play()
    at << change() << seen(1.0, 0.0, asked=at.clock, announced=True, exact=True)
    assert at << arrives("r1") << knows("r1", A) >> erases(0) << erased() >> goes("r1")
    assert at << ends("r1", 2000, 0) >> reports("r1")
    assert turn(at, "r2", A + MORE, ONE, cached=2000, reason=Reason.PREFIX)


def test_the_engine_is_asked_for_its_adapters_before_new_work_if_its_answer_is_old():
    at = play()
    assert turn(at, "r1", A)
    at.later(2 * ADAPTERS_STALE)
    assert at << arrives("r2") << knows("r2", A + MORE) >> asks_adapters()
    assert at << seen(0.0, 0.0, asked=at.clock) >> goes("r2", reason=Reason.PREFIX)


def test_an_unannounced_change_discards_states_made_since_the_last_check():
    at = play(**NEW_FILES)
    assert turn(at, "r1", A)
    assert at << snapshots_changed(snapshot("s1", within(A), created=at.clock, used=at.clock))
    at.later(2 * ADAPTERS_STALE)
    assert at << arrives("r2") << knows("r2", A + MORE) >> asks_adapters()
    assert at << seen(1.0, 0.0, asked=at.clock) >> drops("s1") >> erases(0)
    assert at << erased() >> goes("r2", reason=Reason.COLD)


def test_an_unannounced_change_keeps_states_made_before_the_last_check():
    at = play(n_slots=2)
    assert turn(at, "r1", A, slot=0)
    at.later(ADAPTERS_STALE / 2)
    at << seen(0.0, 0.0, asked=at.clock)
    at.later(2 * ADAPTERS_STALE)
    assert at << arrives("r2") << knows("r2", A) >> asks_adapters()
    assert at << seen(1.0, 0.0, asked=at.clock) >> erases(1) << erased() >> goes("r2", slot=1)
    assert at << ends("r2", 2000, 0) >> reports("r2")
    at << change() << seen(0.0, 0.0, asked=at.clock, announced=True, exact=True)
    assert turn(at, "r3", A + MORE, cached=2000, slot=0)


def test_a_request_that_ran_during_an_unannounced_change_leaves_unknown_tokens():
    at = play()
    assert at << arrives("r1") << knows("r1", A) >> goes("r1") << starts("r1")
    at << seen(1.0, 0.0, asked=at.clock)
    assert at << ends("r1", 2000, 0) >> reports("r1")
    contents = at.table.shadow.slots[0]
    assert contents is not None
    assert (len(contents.tokens), contents.opaque) == (0, 2000)


def test_a_file_that_was_saved_during_an_unannounced_change_is_dropped():
    at = play(**NEW_FILES)
    assert turn(at, "r1", A)
    at.later(60.0).wakes()
    assert at >> asks_adapters() << seen(0.0, 0.0, asked=at.clock) >> saves(0)
    at << seen(1.0, 0.0, asked=at.clock) << saved("s1")
    assert at >> drops("s1")


def test_an_answer_that_was_requested_before_the_change_is_ignored():
    at = play()
    at << change() << seen(1.0, 0.0, asked=at.clock, announced=True, exact=True)
    at << seen(0.0, 0.0, asked=at.clock - 1.0)
    assert at.table.traits.adapters[0].scale == 1.0


def test_a_request_does_not_wait_for_an_engine_that_does_not_report_its_adapters():
    at = play()
    at.later(2 * ADAPTERS_STALE)
    assert at << arrives("r1") << knows("r1", A) >> asks_adapters()
    silent = AdaptersSeen(at=0.0, asked=at.clock, engine=EngineId(ENGINE), adapters=None)
    assert at << silent >> goes("r1")


def test_a_restarted_engine_holds_states_of_one_set_only():
    at = play()
    assert turn(at, "r1", A)
    assert turn(at, "r2", A, ONE)
    assert at << engine_up() << sees()
    assert not at.table.shadow.mixed
    assert turn(at, "r3", A, slot=0, strict=False)


@pytest.mark.parametrize("fresh", [True, False])
def test_an_engine_that_was_in_use_may_hold_states_of_any_set(fresh):
    at = play(up=False)
    assert at << engine_up(fresh=fresh) << sees()
    assert at.table.shadow.mixed is not fresh
