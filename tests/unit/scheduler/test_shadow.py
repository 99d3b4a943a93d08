"""The RAM prompt cache (engine.md section 4, T6), and the slot that the engine chooses (engine.md 1.2)."""

import pytest

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import (
    RAM_ENTRIES,
    Checkpoint,
    EngineTraits,
    Memory,
    SlotContents,
    Snapshot,
    SnapshotId,
)
from slotkeeper.scheduler.slots.shadow import EngineShadow, Source

A = Tokens(range(1000))
C = Tokens(range(5000, 6500))
E = Tokens(range(9000, 9100))


def state(tokens, **more):
    return SlotContents(tokens=tokens, **more)


def shadow(*slots, ram=(), **traits):
    engine = EngineShadow(EngineTraits(**({"memory": Memory.DENSE, "n_slots": len(slots), **traits})))
    engine.slots = [state(tokens) if tokens is not None else None for tokens in slots]
    engine.ram = [state(tokens) for tokens in ram]
    return engine


def in_ram(engine):
    return [contents.tokens for contents in engine.ram]


# -- pinned: what section 4 says of it ---------------------------------------------------------------


def test_a_slot_that_would_keep_less_than_half_is_saved_and_the_best_entry_is_loaded():
    engine = shadow(C, ram=[A])
    reuse_plan = engine.plan_reuse(0, A + E)
    assert (reuse_plan.reuse, reuse_plan.source, reuse_plan.parked) == (1000, Source.RAM, True)
    engine.launch(reuse_plan, [])
    assert engine.slots[0].tokens == A
    assert in_ram(engine) == [C]  # the loaded entry has left


@pytest.mark.parametrize(
    ("kept", "parks"), [(480, True), (499, True), (500, False), (501, False), (520, False)]
)
def test_a_slot_is_saved_if_less_than_half_of_it_would_be_kept(kept, parks):
    assert shadow(A).plan_reuse(0, A.cut(0, kept) + E).parked is parks


@pytest.mark.parametrize(("kept", "loads"), [(250, True), (249, False)])
def test_an_entry_is_loaded_only_if_a_quarter_of_it_would_be_kept(kept, loads):
    reuse_plan = shadow(C, ram=[A]).plan_reuse(0, A.cut(0, kept) + E)
    assert (reuse_plan.source is Source.RAM) is loads


def test_t6_an_empty_slot_loads_nothing_when_pinned():
    reuse_plan = shadow(None, ram=[A]).plan_reuse(0, A + E)
    assert (reuse_plan.reuse, reuse_plan.source, reuse_plan.parked) == (0, Source.NOTHING, False)


def test_t6_an_empty_slot_loads_when_the_engine_chose_it_by_age():
    reuse_plan = shadow(None, ram=[A]).plan_reuse(0, A + E, evict=True)
    assert (reuse_plan.reuse, reuse_plan.source, reuse_plan.parked) == (1000, Source.RAM, False)


@pytest.mark.parametrize("off", [{"similarity": 0.0}, {"ram_cache": False}], ids=["-sps 0", "-cram 0"])
def test_without_similarity_or_cache_a_pinned_task_does_not_use_the_prompt_cache(off):
    reuse_plan = shadow(C, ram=[A], **off).plan_reuse(0, A + E)
    assert (reuse_plan.source, reuse_plan.parked) == (Source.NOTHING, False)


def test_an_entry_must_be_better_than_the_slot_in_both_shares():
    mine = A.cut(0, 400) + C.cut(0, 600)  # keeps 40 %: looks for better
    assert shadow(mine, ram=[A.cut(0, 300) + C]).plan_reuse(0, A + E).source is Source.SLOT
    assert shadow(mine, ram=[A.cut(0, 700)]).plan_reuse(0, A + E).source is Source.RAM


# -- files -----------------------------------------------------------------------------------------------


def snapshot(tokens, checkpoints=()):
    return Snapshot(id=SnapshotId("f"), fingerprint="", tokens=tokens, size=1, checkpoints=checkpoints)


def test_a_restored_state_is_replaced_by_a_better_entry():
    engine = shadow(None, ram=[A], memory=Memory.HYBRID)
    mine = A.cut(0, 400) + C.cut(0, 600)
    assert engine.plan_reuse_restored(0, A + E, snapshot(mine)).source is Source.RAM


def test_an_erased_slot_is_empty_and_nothing_is_saved():
    engine = shadow(A)
    engine.erase(0)
    assert engine.slots == [None]
    assert in_ram(engine) == []


# -- copies made by tasks ------------------------------------------------------------------------------


def test_t6_unified_slots_are_emptied_by_a_task_in_another_slot():
    engine = shadow(A, C, None, unified=True)
    engine.launch(engine.plan_reuse(2, E), [0, 1])
    assert in_ram(engine) == [A, C]
    assert engine.slots[:2] == [None, None]


@pytest.mark.parametrize("off", [{"idle_copy": False}, {"ram_cache": False}])
def test_without_idle_copies_a_launch_copies_nothing(off):
    engine = shadow(A, None, unified=True, **off)
    engine.launch(engine.plan_reuse(1, E), [0])
    assert in_ram(engine) == []
    assert engine.slots[0].tokens == A


def test_a_contained_state_is_not_copied_and_a_longer_one_replaces_it():
    engine = shadow(A.cut(0, 500), None, ram=[A])
    engine.launch(engine.plan_reuse(1, E), [0])
    assert in_ram(engine) == [A]
    engine.slots[0] = state(A + E)
    engine.launch(engine.plan_reuse(1, E), [0])
    assert in_ram(engine) == [A + E]


def test_a_state_with_an_unknown_end_is_not_treated_as_part_of_a_longer_one():
    engine = shadow(A + E, None)
    engine.ram = [state(A, opaque=3)]
    engine.launch(engine.plan_reuse(1, E), [0])
    assert in_ram(engine) == [A, A + E]


@pytest.mark.parametrize(("cached", "known"), [(1003, True), (1000, False)])
def test_a_prompt_that_goes_on_from_an_unknown_end_shows_what_the_copy_of_that_end_holds(cached, known):
    """Only then the engine replaces that copy by the longer state."""
    engine = shadow(None)
    engine.slots[0] = state(A, opaque=3, request="r1")
    engine.ram = [state(A, opaque=3, request="r1")]
    finish(engine, prompt=A + E, prompt_tokens=len(A + E), cached=cached)
    assert in_ram(engine) == [(A + E).cut(0, 1003) if known else A]


def test_the_same_state_is_not_copied_again_but_its_token_ids_are_learned():
    engine = shadow(A, None, memory=Memory.HYBRID)
    engine.ram = [state(A.cut(0, 997), opaque=3, checkpoints=(Checkpoint(993, 1),))]
    engine.launch(engine.plan_reuse(1, E), [0])
    assert [(h.tokens, len(h.checkpoints)) for h in engine.ram] == [(A, 1)]


def test_the_prompt_cache_is_bounded_and_drops_the_oldest_entry():
    engine = shadow(None, None)
    for n in range(RAM_ENTRIES + 5):
        engine.slots[0] = state(Tokens([n, n, n]))
        engine.launch(engine.plan_reuse(1, E), [0])
    assert len(engine.ram) == RAM_ENTRIES
    assert in_ram(engine)[0] == Tokens([5, 5, 5])


def test_a_touch_copies_the_idle_slots_and_makes_a_load_into_a_pinned_slot_possible():
    engine = shadow(A, None)
    assert engine.plan_reuse(1, A + E).reuse == 0
    touched = engine.look_touched(1, A + E, [0, 1])
    assert (touched.reuse, touched.source, touched.touched) == (1000, Source.RAM, True)
    engine.touch(1, [0])
    real = engine.plan_reuse(1, A + E)
    assert (real.reuse, real.source) == (touched.reuse, touched.source)
    assert engine.slots[0].tokens == A  # the copy is shared, not taken


def test_a_touch_does_not_count_on_an_entry_that_it_replaces_itself():
    """The saved state contains the entry and cannot be cut: there is nothing to load."""
    engine = shadow(A, None, memory=Memory.HYBRID)
    engine.ram = [state(A.cut(0, 300), checkpoints=(Checkpoint(296, 1),))]
    prompt = A.cut(0, 300) + E
    assert [engine.look_touched(slot, prompt, [0, 1]).reuse for slot in (0, 1)] == [0, 0]
    engine.touch(0, [1])
    assert engine.plan_reuse(0, prompt).reuse == 0
    assert in_ram(engine) == [A]


def test_the_engine_chooses_the_most_similar_idle_slot_and_the_first_of_equals():
    assert shadow(C, A, A).engine_choice(A + E, [0, 1, 2]).slot == 1
    assert shadow(C, A, A).engine_choice(A + E, [0, 2]).slot == 2


def test_below_the_similarity_the_least_recently_used_slot_is_chosen_with_save_and_load():
    engine = shadow(C, C, ram=[A])
    engine.slots = [state(C, used=5.0), state(C, used=3.0)]
    reuse_plan = engine.engine_choice(A + E, [0, 1])
    assert (reuse_plan.slot, reuse_plan.source, reuse_plan.parked) == (1, Source.RAM, True)


# -- the end of a task ---------------------------------------------------------------------------------


def finish(engine, slot=0, **changes):
    figures = {
        "prompt": A, "prompt_tokens": 1000, "cached": 0, "generated": 40, "user_starts": (),
        "hash_chain": (b"s", b"1"), "request": None, "now": 7.0, **changes,
    }  # fmt: skip
    return engine.finish(slot, **figures)


def test_turns_count_only_when_most_of_the_state_was_continued():
    engine = shadow(None)
    assert finish(engine).turns == 1
    assert finish(engine, prompt=A + C, prompt_tokens=2500, cached=1039).turns == 2
    assert finish(engine, prompt=A.cut(0, 300) + E, prompt_tokens=400, cached=300).turns == 1


def test_a_live_window_has_slack_and_its_copy_has_none():
    engine = shadow(None, None, memory=Memory.SWA, n_swa=256)
    assert finish(engine, prompt=C, prompt_tokens=1500, generated=0).slack == 512
    engine.launch(engine.plan_reuse(1, E), [0])
    assert engine.ram[0].slack == 0


def test_the_floor_of_a_copied_state_stays_while_it_is_extended():
    engine = shadow(None, memory=Memory.SWA, n_swa=256, swa_full=True)
    engine.restore(0, snapshot(C), 1.0)
    assert finish(engine, prompt=C + E, prompt_tokens=1600, cached=1500).floor == 1499
    assert finish(engine, prompt=E, prompt_tokens=100, cached=0).floor == 0


# -- learning --------------------------------------------------------------------------------------------


def test_empty_slots_of_a_unified_engine_are_in_its_prompt_cache():
    engine = shadow(A, C)
    engine.assume_unified([0])
    assert engine.traits.unified
    assert engine.slots[0] is None
    assert in_ram(engine) == [A]


def test_contents_kept_elsewhere_are_found():
    engine = shadow(A, A + E, None, ram=[C])
    assert engine.elsewhere(state(A), 0)
    assert not engine.elsewhere(state(A + E), 1)
    assert engine.elsewhere(state(C.cut(0, 10)), 2)


def test_the_repr_shows_slots_and_cache():
    assert repr(shadow(A, None, ram=[C])) == "<EngineShadow dense slots [1000 -] ram [1500]>"


# -- the limit of the RAM cache ------------------------------------------------------------------------


def test_the_oldest_entries_leave_a_ram_cache_that_is_full_but_the_last_one_stays():
    engine = shadow(A, C, E, ram_bytes=2_000_000)
    engine.sizes.saw(tokens=1000, checkpoints=0, size=1_000_000)
    for slot in (0, 1):
        engine.moved(slot)
    assert in_ram(engine) == [C]  # 1.0 and 1.5 MB together exceed 2 MB
    engine.moved(2)
    assert in_ram(engine) == [C, E]
    assert not engine.exceeds_ram(state(C))
    assert engine.exceeds_ram(state(C + A))
    whole = shadow(C + A, ram_bytes=2_000_000)
    whole.sizes.saw(tokens=1000, checkpoints=0, size=1_000_000)
    whole.moved(0)
    assert in_ram(whole) == [C + A]  # one entry stays, whatever its size


@pytest.mark.parametrize(("room", "source"), [(2_600_000, Source.RAM), (2_400_000, Source.NOTHING)])
def test_an_entry_that_the_slots_own_copy_drives_out_is_not_loaded(room, source):
    """Three chats in turn, each restored from its file: 1,321 tokens were computed in a cache of 1 MiB."""
    engine = shadow(C, ram=[A], ram_bytes=room)
    engine.sizes.saw(tokens=1000, checkpoints=0, size=1_000_000)
    reuse_plan = engine.plan_reuse(0, A + E)
    assert reuse_plan.source is source
    engine.launch(reuse_plan, [])
    assert in_ram(engine) == [C]


@pytest.mark.parametrize("traits", [{"ram_bytes": 0}, {"ram_bytes": 1}])
def test_without_a_limit_or_a_known_size_no_entry_is_believed_to_leave(traits):
    engine = shadow(A, C, **traits)
    if not traits["ram_bytes"]:
        engine.sizes.saw(tokens=1000, checkpoints=0, size=1_000_000)
    for slot in (0, 1):
        engine.moved(slot)
    assert in_ram(engine) == [A, C]


def test_checkpoints_count_in_the_size_of_an_entry():
    engine = shadow(A, ram_bytes=10_000)
    engine.sizes.saw(tokens=1000, checkpoints=1, size=1000 * 2 + 2 * 3000)
    engine.sizes.saw(tokens=200, checkpoints=3, size=200 * 2 + 4 * 3000)
    marks = tuple(Checkpoint(at, 1) for at in (100, 200))
    assert engine.size_of(state(A)) == pytest.approx(5_000, rel=0.01)
    assert engine.size_of(state(A, checkpoints=marks)) == pytest.approx(11_000, rel=0.01)
