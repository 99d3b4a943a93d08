"""Slots that share one KV buffer: a request is sent only if its cells fit (8 in `placement`)."""

from types import MappingProxyType
from typing import Any

import pytest

from playbooks.playbook import (
    NEW_FILES,
    Play,
    acts,
    arrives,
    ends,
    erased,
    erases,
    filled,
    fills,
    goes,
    knows,
    lacks_cells,
    learns,
    leaves,
    planted,
    pooled,
    reports,
    restored,
    restores,
    saved,
    saves,
    sees,
    starts,
    unsaved,
)
from slotkeeper.scheduler.effects import PoolAct, Purpose
from slotkeeper.scheduler.policies.kv_pool import in_use
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import Known
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.state import LEARNED_FROM, LEAST_OUTPUT, MARGIN, PASSES, UNKNOWN_OUTPUT, Outputs

READ = MappingProxyType({"unified": Known.FLAGS})
A, B, C, D, E = (Tokens(range(n, n + 1000)) for n in (10_000, 20_000, 30_000, 40_000, 50_000))
MORE = Tokens(range(100))
CALM = Limits(pause=1000.0, idle_tokens=0)  # no idle work in between


def pool(n_ctx: int = 4096, **traits: Any) -> Play:
    """Four slots over one buffer; the engine keeps no copies."""
    known: dict[str, Any] = {"n_slots": 4, "memory": "dense", "n_ctx": n_ctx, "unified": True}
    return Play(limits=CALM, **known | {"knowledge": READ} | traits)


def asks(play: Play, request: str, prompt: Tokens, answer_limit: int | None = 100, **more: Any) -> Play:
    """A request arrives, and its tokens are known."""
    return play << arrives(request, answer_limit=answer_limit, **more) << knows(request, prompt)


def held(play: Play, *prompts: Tokens) -> Play:
    """Each of these was answered in its own slot, and is idle there."""
    for number, prompt in enumerate(prompts):
        answered(play, f"held{number}", prompt, slot=number)
    return play


def answered(play: Play, request: str, prompt: Tokens, *, slot: int) -> None:
    assert asks(play, request, prompt, 1) >> goes(request, slot=slot) << starts(request)
    assert play << ends(request, len(prompt)) >> reports(request)


# -- what fits -------------------------------------------------------------------------------------------


def test_two_requests_run_at_once_if_their_prompts_and_answers_exactly_fill_the_buffer():
    play = pool(2198)
    assert asks(play, "r1", A) >> goes("r1") << starts("r1")
    assert asks(play, "r2", B) >> goes("r2")


def test_with_one_cell_too_few_the_second_request_waits_for_the_first():
    play = pool(2197)
    assert asks(play, "r1", A) >> goes("r1") << starts("r1")
    assert asks(play, "r2", B) >> pooled("r2", PoolAct.WAITED, cells=1)
    assert play << ends("r1", 1000, generated=50) >> reports("r1") >> goes("r2")


@pytest.mark.parametrize(
    "traits",
    [
        {"unified": False},
        {"knowledge": {}},  # only likely: each of four slots has the model's whole context
        {"memory": "recurrent"},  # one cell per sequence
        {"n_slots": 1, "knowledge": READ},
    ],
)
def test_requests_do_not_wait_for_cells_if_the_engines_slots_share_no_buffer(traits):
    play = pool(1200, **traits)
    assert asks(play, "r1", A) >> goes("r1") << starts("r1")
    if play.traits.n_slots > 1:
        assert asks(play, "r2", B) >> goes("r2")


def test_a_request_that_may_need_the_whole_buffer_runs_alone():
    play = pool(1500)
    assert asks(play, "r1", A, 5000) >> goes("r1") << starts("r1")
    assert asks(play, "r2", MORE, 1) >> pooled("r2", PoolAct.WAITED)
    assert play << ends("r1", 1000, generated=100) >> reports("r1") >> goes("r2")


def test_a_request_whose_client_left_keeps_its_cells_until_its_slot_is_free():
    play = pool(2197)
    assert asks(play, "r1", A) >> goes("r1") << starts("r1") << leaves("r1")
    assert asks(play, "r2", B) >> pooled("r2", PoolAct.WAITED)
    assert play << sees(contents={0: 0}) >> goes("r2")


def test_what_a_request_was_promised_no_longer_counts_once_its_slot_is_free():
    play = pool(8000)
    assert asks(play, "r1", A, answer_limit=2000) >> goes("r1", slot=0) << starts("r1") << leaves("r1")
    assert play.later(60) << sees(contents={0: len(A)})
    assert play << sees(0)  # a task of another client
    assert in_use(play.placement._state, play.table) == 2000  # a quarter of the buffer


def test_the_cells_in_use_are_reported():
    play = held(pool(4096), A)
    assert asks(play, "r1", B, 100) >> goes("r1")
    assert play.placement.pool_of(play.table) == {"cells": 4096, "taken": 1000 + 1099}
    assert Play(memory="dense").placement.pool_of(Play(memory="dense").table) is None


def test_a_clients_own_slot_action_needs_no_cells():
    play = held(pool(2100), A, B)
    assert play << arrives("r1", id_slot=0, action=True, rendered=False) >> goes("r1") << acts("r1", 0)


# -- making room -----------------------------------------------------------------------------------------


def test_without_slot_files_the_cheapest_idle_slot_is_emptied_by_a_prefill_of_one_token():
    play = held(pool(2500), A, B)
    assert (
        asks(play, "r1", C)
        >> pooled("r1", PoolAct.WAITED)
        >> pooled("r1", PoolAct.ERASED, slot=0)
        >> fills(0, Purpose.EMPTY)
    )
    assert play << filled() >> goes("r1")


def test_the_token_left_in_an_emptied_slot_does_not_make_a_request_wait():
    play = held(pool(2500), A, B)
    asks(play, "r1", C, 5000) >> pooled("r1", PoolAct.WAITED)
    play.effects.clear()
    for chore in list(play.placement._state.chores):
        play << planted(chore)
    assert play >> goes("r1")


def test_with_slot_files_the_victim_is_saved_and_then_erased():
    play = held(pool(2500, **NEW_FILES), A, B)
    assert asks(play, "r1", C) >> pooled("r1", PoolAct.WAITED) >> saves(0)
    assert play << saved("s0") >> pooled("r1", PoolAct.PARKED, slot=0) >> erases(0)
    assert play << erased() >> goes("r1")


def test_a_parked_slot_is_restored_once_there_are_free_cells():
    play = held(pool(2500, **NEW_FILES), A, B)
    assert asks(play, "r1", C) >> pooled("r1", PoolAct.WAITED) >> saves(0)
    assert play << saved("s0") >> pooled("r1", PoolAct.PARKED) >> erases(0) << erased() >> goes("r1", slot=0)
    assert play << starts("r1") << ends("r1", 1000) >> reports("r1")
    assert asks(play, "r2", A + MORE) >> pooled("r2", PoolAct.WAITED) >> saves(1)
    assert play << saved("s1") >> pooled("r2", PoolAct.PARKED, slot=1) >> erases(1)
    assert play << erased() >> restores(1, "s0") << restored() >> goes("r2", slot=1)


def test_a_victim_whose_save_fails_is_erased_all_the_same():
    play = held(pool(2500, **NEW_FILES), A, B)
    assert asks(play, "r1", C) >> pooled("r1", PoolAct.WAITED) >> saves(0)
    assert play << unsaved() >> pooled("r1", PoolAct.ERASED, slot=0) >> erases(0) << erased() >> goes("r1")


def test_one_large_victim_is_preferred_to_several_small_ones():
    play = held(pool(3400), MORE, A, B)
    asks(play, "r1", C, 500) >> pooled("r1", PoolAct.WAITED)
    assert play >> pooled("r1", PoolAct.ERASED, slot=1) >> fills(1, Purpose.EMPTY) << filled() >> goes("r1")


def test_no_second_victim_is_chosen_while_the_first_is_emptied():
    play = held(pool(3500), A, B, C)
    assert (
        asks(play, "r1", D)
        >> pooled("r1", PoolAct.WAITED)
        >> pooled("r1", PoolAct.ERASED)
        >> fills(0, Purpose.EMPTY)
    )
    assert play << arrives("r2", brief=True, rendered=False, size=100, answer_limit=10) >> goes("r2", slot=3)
    assert play << starts("r2") << filled() >> goes("r1")


def test_if_no_slot_can_be_emptied_the_request_is_sent_and_the_engines_purge_is_modelled():
    play = held(pool(2500), A, B)
    play.table.no_touch_until = play.clock + 60
    assert asks(play, "r1", C) >> goes("r1", slot=2) << starts("r1")
    play << ends("r1", 1000, generated=100)
    assert play >> pooled("r1", PoolAct.PURGED, slot=0) >> reports("r1")


def test_a_failed_prefill_of_one_token_is_not_retried_at_once():
    play = held(pool(2500), A, B)
    assert (
        asks(play, "r1", C)
        >> pooled("r1", PoolAct.WAITED)
        >> pooled("r1", PoolAct.ERASED)
        >> fills(0, Purpose.EMPTY)
    )
    assert play << filled(None) >> goes("r1", slot=2)


# -- which request waits -----------------------------------------------------------------------------------


def test_small_requests_overtake_a_large_one_a_limited_number_of_times():
    play = pool(2200)
    assert asks(play, "r0", A, 200) >> goes("r0", slot=0) << starts("r0")
    assert asks(play, "big", B, 200, client="ben") >> pooled("big", PoolAct.WAITED)
    for number in range(PASSES):
        name, prompt = f"s{number}", Tokens(range(60_000 + 100 * number, 60_100 + 100 * number))
        asks(play, name, prompt, 10)
        play >> goes(name)
        assert play << starts(name) << ends(name, 100) >> reports(name)
        play.table.shadow.slots[1:] = [None] * 3
    assert asks(play, "late", MORE, 10)  # this one would fit
    assert play.placement.queued == 2
    play << ends("r0", 1000, generated=1) >> reports("r0") >> goes("big") << starts("big")
    assert play >> pooled("late", PoolAct.WAITED) >> pooled("late", PoolAct.ERASED) >> fills(0, Purpose.EMPTY)


def test_a_request_waits_for_its_tokens_if_it_may_not_fit():
    play = held(pool(2300), A)
    assert asks(play, "r1", B, 101) >> goes("r1", slot=1) << starts("r1")
    assert play << arrives("r2", hash_chain=(b"t", b"1", b"2"), size=4000, answer_limit=10)
    assert play.placement.queued == 1
    assert play << knows("r2", MORE) >> goes("r2")


# -- how long answers are --------------------------------------------------------------------------------


def expected(outputs: Outputs, **more: Any) -> int:
    return outputs.expected(arrives("r", kind="k", **more), 50_000)


def test_an_answer_is_expected_to_reach_the_clients_limit():
    assert expected(Outputs(), answer_limit=300) == 300
    assert expected(Outputs(), answer_limit=80_000) == 50_000
    assert expected(Outputs()) == UNKNOWN_OUTPUT


def test_learned_answer_lengths_replace_a_high_limit():
    outputs = Outputs()
    for _ in range(LEARNED_FROM):
        outputs.add("k", 500)
    assert expected(outputs, answer_limit=32_000) == MARGIN * 500
    assert expected(outputs, answer_limit=300) == 300
    assert expected(outputs) == MARGIN * 500


def test_an_expected_answer_has_a_minimum_length():
    outputs = Outputs()
    for _ in range(LEARNED_FROM):
        outputs.add("k", 2)
    assert expected(outputs, answer_limit=32_000) == LEAST_OUTPUT


def test_a_request_that_outgrew_its_cells_reserves_its_whole_limit():
    outputs = Outputs()
    for _ in range(LEARNED_FROM):
        outputs.add("k", 2)
    assert expected(outputs, answer_limit=32_000, outgrown=True) == 32_000
    assert expected(outputs, outgrown=True) == 50_000


# -- what the engine does on its own -----------------------------------------------------------------------


def test_the_lowest_idle_slots_are_purged_if_an_answer_outgrows_the_buffer():
    play = held(pool(4096), A, B)
    assert asks(play, "r1", C, None) >> goes("r1", slot=2) << starts("r1")
    play << ends("r1", 1000, generated=1200)
    assert play >> pooled("r1", PoolAct.PURGED, slot=0, cells=1000) >> reports("r1")
    assert [contents is None for contents in play.table.shadow.slots] == [True, False, False, True]


def test_a_request_that_fails_for_lack_of_cells_shows_that_the_slots_share_a_buffer():
    play = pool(4096, knowledge={}, unified=False)
    assert asks(play, "r1", A, None) >> goes("r1", slot=0) << starts("r1")
    play << lacks_cells("r1", again=True)
    assert play >> pooled("r1", PoolAct.RETRIED) >> learns("unified", True, Known.FAILED)
    assert in_use(play.placement._state, play.table) == 1000 + UNKNOWN_OUTPUT - 1


def test_after_a_failure_for_lack_of_cells_all_idle_slots_are_empty():
    play = held(pool(4096), A, B)
    assert asks(play, "r1", C, None) >> goes("r1", slot=2) << starts("r1")
    play << lacks_cells("r1")
    assert (
        play
        >> pooled("r1", PoolAct.FAILED)
        >> pooled("r1", PoolAct.PURGED, slot=0)
        >> pooled("r1", PoolAct.PURGED, slot=1)
    )


def test_a_flag_from_the_command_line_is_not_replaced_by_a_failure():
    play = pool(4096, unified=False)
    assert asks(play, "r1", A, None) >> goes("r1", slot=0) << starts("r1")
    assert play << lacks_cells("r1") >> pooled("r1", PoolAct.FAILED)
    assert not play.table.traits.unified


def test_slots_that_hold_more_tokens_than_one_buffer_do_not_share_it():
    play = pool(1500, knowledge={})
    play << arrives("r1") << sees(contents={0: 1000, 1: 1000})
    assert play >> learns("unified", False, Known.HELD)


# -- where each task wipes the idle slots ----------------------------------------------------------------


def test_with_a_ram_cache_no_request_is_sent_while_another_has_not_begun():
    play = pool(4096, ram_cache=True)
    assert asks(play, "r1", A) >> goes("r1", slot=0)
    assert asks(play, "r2", B)
    assert play.placement.queued == 1
    assert play << starts("r1") >> goes("r2")


def test_with_a_ram_cache_idle_slots_take_no_cells_from_a_request():
    play = held(pool(2200, ram_cache=True), A, B)
    assert asks(play, "r1", C, 1000) >> goes("r1")
