"""Which snapshots are evicted: what each saves, on every kind of memory, and which never go first."""

from dataclasses import replace

import pytest

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import (
    HALF_LIFE,
    Checkpoint,
    EngineTraits,
    Memory,
    SlotContents,
    Snapshot,
    SnapshotId,
)
from slotkeeper.scheduler.snapshots.catalog import PrefixOrder, PrefixTree, cuts
from slotkeeper.scheduler.snapshots.retention import BATCH, evict

DENSE = EngineTraits(memory=Memory.DENSE)
HYBRID = EngineTraits(memory=Memory.HYBRID)
SWA = EngineTraits(memory=Memory.SWA, n_swa=256)
LINE = Tokens(range(10_000))
OTHER = Tokens(range(50_000, 60_000))
NOW = 1000.0


def state(name, tokens, **facts):
    facts.setdefault("size", 100)
    return Snapshot(id=SnapshotId(name), fingerprint="f", tokens=tokens, **facts)


def on_line(*ends, **facts):
    return [state(f"s{end}", LINE.cut(0, end), created=float(n), **facts) for n, end in enumerate(ends)]


def evicted_ids(snapshots, room, traits=HYBRID, **facts):
    return evict(snapshots, room, traits=traits, now=NOW, **facts)


def test_nothing_is_evicted_while_there_is_room():
    assert evicted_ids(on_line(1000, 2000), 200) == []
    assert evicted_ids([], 0) == []


def test_one_byte_above_the_budget_evicts_a_snapshot():
    assert evicted_ids(on_line(1000, 2000), 199) == ["s1000"]


@pytest.mark.parametrize(("count", "more"), [(BATCH - 1, 0), (BATCH, 1), (4 * BATCH, 4)])
def test_of_many_files_some_more_are_evicted_so_that_the_next_ones_have_room(count, more):
    """The value of all files is computed for each eviction: 30 ms for 4,096 of them."""
    files = [state(f"s{n}", LINE.cut(10 * n)) for n in range(count)]
    assert len(evicted_ids(files, 100 * count - 1)) == 1 + more
    assert evicted_ids(files, 100 * count) == []
    golden = [replace(file, golden=True) for file in files]
    assert len(evicted_ids(golden, 100 * count - 1)) == 1


def test_the_snapshot_with_a_near_neighbour_is_evicted_and_not_the_oldest():
    assert evicted_ids(on_line(2000, 4000, 5990, 6000, 8000), 400) in (["s5990"], ["s6000"])


def test_kept_snapshots_are_spread_over_the_conversation():
    line = on_line(*range(500, 10_001, 500))
    kept = {len(s.tokens) for s in line} - {int(name[1:]) for name in evicted_ids(line, 500)}
    assert max(kept) == 10_000
    gaps = [high - low for low, high in zip([0, *sorted(kept)], sorted(kept), strict=False)]
    assert max(gaps) <= 3500


def test_on_dense_memory_a_prefix_of_another_snapshot_saves_nothing():
    assert evicted_ids(on_line(2000, 4000, 9000), 100, DENSE) == ["s2000", "s4000"]
    assert evicted_ids([*on_line(2000, 4000, 9000), state("other", OTHER)], 200, DENSE) == ["s2000", "s4000"]


def test_a_snapshot_with_the_same_checkpoints_makes_the_boundary_snapshot_redundant():
    boundary, whole = on_line(3000, 9000)
    carried = replace(whole, checkpoints=(3000,))
    rest = state("other", OTHER.cut(0, 500))
    assert evicted_ids([boundary, carried, rest], 200) == ["s3000"]
    older_build = replace(HYBRID, files_carry=False)
    assert evicted_ids([boundary, carried, rest], 200, older_build) == ["other"]


def test_a_large_snapshot_must_save_more():
    large, small = state("large", LINE, size=1000, restores=9), state("small", OTHER, size=10)
    assert evicted_ids([large, small], 1009) == ["large"]


def test_a_small_snapshot_is_kept_if_evicting_a_large_one_makes_enough_room():
    worthless = state("tiny", LINE.cut(0, 10), size=10)
    large = state("large", LINE.cut(0, 5000), size=100_000)
    valuable = state("dear", OTHER, size=100)
    assert evicted_ids([worthless, large, valuable], 1000) == ["large"]


def test_a_conversation_unused_for_long_is_evicted_before_the_present_one():
    old, new = on_line(4000, 8000), [replace(state("new", OTHER), used=NOW)]
    long_ago = [replace(s, created=NOW - 20 * HALF_LIFE) for s in old]
    assert evicted_ids([*long_ago, *new], 200) == ["s4000"]
    assert evicted_ids([*long_ago, *new], 100) == ["s4000", "s8000"]


def test_an_early_boundary_does_not_age_while_its_conversation_is_used():
    early = state("early", LINE.cut(0, 4000), created=0.0)
    late = [state(f"l{end}", LINE.cut(0, end), created=NOW + end) for end in (8900, 8950, 9000)]
    dropped = evict([early, *late], 200, traits=HYBRID, now=NOW + 9000)
    assert "early" not in dropped
    assert len(dropped) == 2


def test_an_abandoned_branch_is_evicted_before_the_continued_one():
    left = state("left", LINE.cut(0, 5000) + OTHER.cut(0, 2000), created=1.0)
    went_on = state("went on", LINE.cut(0, 5300), created=2.0)
    assert evicted_ids([left, went_on], 100) == ["left"]


def test_steps_back_are_likelier_on_the_continued_branch():
    left = LINE.cut(0, 5000) + OTHER
    files = [
        state("left 7000", left.cut(0, 7000), created=1.0),
        state("left 9000", left.cut(0, 9000), created=1.0),
        state("went on 8000", LINE.cut(0, 8000), created=2.0),  # less is lost without this one
        state("went on 9000", LINE.cut(0, 9000), created=2.0),
    ]
    assert evicted_ids(files, 200) == ["left 9000", "left 7000"]


def test_on_dense_memory_a_divergence_along_a_branch_reuses_half_of_it_on_average():
    left = state("left", LINE.cut(0, 5000) + OTHER.cut(0, 5000), created=1.0)
    went_on = state("went on", LINE, created=2.0)
    # Of the left branch: a step back in one of two, half of its 5000 tokens, and half as likely as on
    # the other one, is 625; a next turn adds 60. Of the short one: 300 times 3.5.
    short = state("short", Tokens(range(70_000, 70_300)), created=2.0)
    assert evicted_ids([left, went_on, short], 200, DENSE) == ["left"]


def test_of_two_equal_snapshots_the_restored_one_is_kept():
    one, other = state("a", LINE), state("b", OTHER)
    assert evicted_ids([one, replace(other, restores=3)], 100) == ["a"]
    assert evicted_ids([replace(one, restores=3), other], 100) == ["b"]


def test_a_window_that_cannot_be_extended_is_evicted_first():
    torn, mended = state("torn", LINE), state("mended", OTHER.cut(0, 300), repaired=True, size=10_000)
    assert evicted_ids([torn, mended], 10_000, SWA) == ["torn"]


@pytest.mark.parametrize("traits", [DENSE, HYBRID])
def test_a_golden_prefix_is_evicted_last_and_before_it_the_last_file_of_a_live_conversation(traits):
    golden = state("golden", LINE.cut(0, 10), golden=True, size=1000)
    last_file = state("mine", OTHER.cut(0, 4000))
    dear = state("dear", Tokens(range(70_000, 80_000)), used=NOW)
    live = [SlotContents(tokens=OTHER, used=NOW)]
    assert evicted_ids([golden, last_file, dear], 0, traits, live=live) == ["dear", "mine", "golden"]
    assert evicted_ids([golden, last_file, dear], 0, traits)[-1] == "golden"


def test_the_deepest_snapshot_of_a_live_conversation_is_evicted_last():
    files = on_line(2000, 4000, 9000)
    live = [SlotContents(tokens=LINE, used=NOW)]
    assert evicted_ids(files, 100, live=live)[-1] != "s9000"
    assert len(evicted_ids(files, 100, live=live)) == 2


def test_a_snapshot_of_another_conversation_is_not_protected_for_a_shared_system_prompt():
    theirs = state("theirs", LINE.cut(0, 100) + OTHER)
    dear = state("dear", Tokens(range(70_000, 80_000)), used=NOW)
    live = [SlotContents(tokens=LINE, used=NOW)]
    assert evicted_ids([theirs, dear], 100, DENSE, live=live) == ["theirs"]


def test_a_slot_replaces_a_snapshot_only_as_far_as_a_file_of_the_slot_would():
    boundary = state("boundary", LINE.cut(0, 5000))
    deeper = state("deeper", LINE.cut(0, 9900))
    rest = state("other", OTHER.cut(0, 1000))
    live = [SlotContents(tokens=LINE, checkpoints=(Checkpoint(5000, 1),), used=NOW)]
    assert evicted_ids([boundary, deeper, rest], 200, live=live) == ["boundary"]
    older_build = replace(HYBRID, files_carry=False)
    assert evicted_ids([boundary, deeper, rest], 200, older_build, live=live) == ["other"]


def test_a_slot_with_an_unknown_end_has_no_cut_at_its_end():
    assert cuts(SlotContents(tokens=LINE, opaque=7), HYBRID) == ()
    assert cuts(SlotContents(tokens=LINE, opaque=7), DENSE) == (10_000,)


def test_only_as_many_checkpoints_count_as_the_engine_keeps():
    carried = state("s", LINE, checkpoints=(1000, 2000, 3000))
    assert cuts(carried, replace(HYBRID, checkpoint_cap=2)) == (2000, 3000, 10_000)
    assert cuts(carried, replace(SWA, checkpoint_cap=2)) == (1999, 2999)


def test_an_updated_order_equals_a_newly_built_one():
    snapshots = [*on_line(2000, 4000, 9000), state("other", OTHER), state("twin", OTHER)]
    kept = PrefixOrder()
    for snapshot in snapshots:
        kept.put(snapshot)
    kept.put(replace(snapshots[1], restores=5))
    kept.drop(snapshots[0])
    kept.drop(snapshots[0])
    made = PrefixOrder([replace(snapshots[1], restores=5), *snapshots[2:]])
    assert (kept.states, kept.common) == (made.states, made.common)
    assert repr(kept) == "<PrefixOrder 4 states>"


def test_the_repr_of_a_node_shows_its_end_and_its_demand():
    tree = PrefixTree(PrefixOrder(on_line(2000)), HYBRID)
    assert repr(tree.ends[0]) == "<Node 2000 served 1 demand 0>"
