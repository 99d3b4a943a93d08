"""Every measured list of checkpoints, compared with the model."""

import pytest

from slotkeeper.scheduler.slots.engine_model import (
    Checkpoint,
    EngineTraits,
    Memory,
    after_prefill,
    keeps_checkpoints,
    newest_usable,
    survivors,
    window_cells,
)

OLD = {"eager_thinning": True}  # b10434
NEW = {"eager_thinning": False}  # b11549


def traits(**changes):
    return EngineTraits(**({"memory": Memory.HYBRID, **changes}))


def places(checkpoints):
    return [c.at for c in checkpoints]


def prefill(engine, *steps, user_starts=()):
    """Run steps, each of which extends the one before, as one task. A step is its end, or (reuse, end)."""
    kept: tuple[Checkpoint, ...] = ()
    contents = 0
    for task, step in enumerate(steps, start=1):
        reuse, end = step if isinstance(step, tuple) else (contents, step)
        starts = [at for at in user_starts if at < end]
        kept = after_prefill(kept, reuse=reuse, end=end, user_starts=starts, task=task, traits=engine)
        contents = end
    return kept


@pytest.mark.parametrize("build", [OLD, NEW], ids=["b10434", "b11549"])
@pytest.mark.parametrize("boundary", [700, 2000, 3000, 5000])
def test_a_prefill_four_tokens_past_a_boundary_leaves_a_checkpoint_there(build, boundary):
    assert places(prefill(traits(**build), boundary + 4)) == [boundary - 512, boundary]


# Lists as measured; engine.md section 3 has the rules: (name, traits, steps, user starts, list)
MEASURED = [
    (
        "four steps, all survive",
        {**NEW},
        [704, 2004, 3004, 6270],
        [],
        [188, 700, 1488, 2000, 2488, 3000, 5754, 6266],
    ),
    ("raw prompt", {**NEW}, [6270], [], [5754, 6266]),
    ("chat of two user messages", {**NEW}, [5428], [1821, 4138], [1821, 4138, 4912, 5424]),
    ("chat of three, the middle is too close", {**NEW}, [6270], [1821, 4138, 6208], [1821, 5754, 6208, 6266]),
    (
        "chat of three, min step 0",
        {**NEW, "checkpoint_min_step": 0},
        [6270],
        [1821, 4138, 6208],
        [1821, 4138, 5754, 6208, 6266],
    ),
    (
        "message_delimiters on the older build, min step 0",
        {**OLD, "checkpoint_min_step": 0},
        [6270],
        [1821, 4138, 6208],
        [1821, 4138, 5754, 6208, 6266],
    ),
    ("responses, one user message", {**NEW}, [3437], [1854], [1854, 2921, 3433]),
    ("N = 3000 at once", {**NEW}, [3000], [], [2484, 2996]),
    ("system only", {**NEW}, [1854], [], [1338, 1850]),
    ("system only, then the chat", {**NEW}, [1854, 5428], [1854], [1338, 1850, 1854, 4912, 5424]),
    ("short suffix re-arms the point of reuse", {**NEW}, [3000, 3040], [], [2484, 2996, 3000, 3036]),
    ("long suffix does not", {**NEW}, [3000, 3900], [], [2484, 2996, 3384, 3896]),
    ("seven steps, cap 3", {**NEW, "checkpoint_cap": 3}, range(600, 4201, 600), [], [84, 3684, 4196]),
    (
        "seven steps, cap 3, min step 0",
        {**NEW, "checkpoint_cap": 3, "checkpoint_min_step": 0},
        range(600, 4201, 600),
        [],
        [3596, 3684, 4196],
    ),
    (
        "seven steps, cap 5, min step 1000",
        {**NEW, "checkpoint_cap": 5, "checkpoint_min_step": 1000},
        range(600, 4201, 600),
        [],
        [1196, 2396, 3596, 3684, 4196],
    ),
    (
        "ten steps, cap 8",
        {**NEW, "checkpoint_cap": 8},
        range(600, 6001, 600),
        [],
        [84, 4284, 4796, 4884, 5396, 5484, 5996],
    ),
    (
        "ten steps, cap 8, min step 0",
        {**NEW, "checkpoint_cap": 8, "checkpoint_min_step": 0},
        range(600, 6001, 600),
        [],
        [3684, 4196, 4284, 4796, 4884, 5396, 5484, 5996],
    ),
    (
        "the older build keeps the first and the last task's",
        {**OLD},
        [704, 2004, 6270],
        [],
        [188, 5754, 6266],
    ),
    (
        "the older build, cap 3, min step 0: dropped in order",
        {**OLD, "checkpoint_cap": 3, "checkpoint_min_step": 0},
        [600, 1200],
        [],
        [596, 684, 1196],
    ),
    ("ub 128 cuts nearer to the end", {**NEW, "n_ubatch": 128}, [3000], [], [2868, 2996]),
]


@pytest.mark.parametrize(
    ("changes", "steps", "user_starts", "expected"),
    [case[1:] for case in MEASURED],
    ids=[case[0] for case in MEASURED],
)
def test_the_model_makes_the_checkpoints_that_were_measured(changes, steps, user_starts, expected):
    assert places(prefill(traits(**changes), *steps, user_starts=user_starts)) == expected


def test_seven_tasks_keep_fourteen_checkpoints_on_the_newest_build():
    assert len(prefill(traits(**NEW), *range(600, 4201, 600))) == 14


@pytest.mark.parametrize(
    ("changes", "reuse"),
    [({**OLD}, 188), ({**OLD, "checkpoint_min_step": 0}, 700), ({**NEW}, 700)],
    ids=["b10434", "b10434 -cms 0", "b11549"],
)
def test_t7_a_planted_checkpoint_survives_the_next_task_only_without_eager_thinning(changes, reuse):
    engine = traits(**changes)
    planted_then_used = prefill(engine, 704, 6270)
    assert newest_usable(planted_then_used, 700, engine) == reuse


def test_a_checkpoint_at_the_same_place_is_replaced_on_the_newest_build():
    engine = traits(**NEW)
    twice = prefill(engine, 3000, (2996, 3000))
    assert places(twice) == [2484, 2996]
    assert twice[-1].task == 2


# engine.md 2.6: a file of N = 3000 tokens with its checkpoints; the prompt diverges at `common`
@pytest.mark.parametrize(
    ("common", "hybrid", "swa"),
    [
        (2999, 2996, 2995),
        (2996, 2996, 2995),
        (2995, 2484, 2995),
        (2900, 2484, 2483),
        (2400, 0, 0),
        (100, 0, 0),
    ],
)
def test_the_newest_usable_checkpoint_is_the_measured_one(common, hybrid, swa):
    kept = (Checkpoint(2484, 1), Checkpoint(2996, 1))
    assert newest_usable(kept, common, traits()) == hybrid
    assert newest_usable(kept, common, traits(memory=Memory.SWA, n_swa=256)) == swa


def test_cutting_back_drops_later_checkpoints():
    kept = tuple(Checkpoint(at, 1) for at in (700, 2000, 3000))
    assert places(survivors(kept, 2000, traits())) == [700, 2000]
    assert places(survivors(kept, 1998, traits())) == [700]
    assert places(survivors(kept, 0, traits())) == []


def test_a_checkpoint_one_token_behind_a_cut_is_left_but_stale():
    kept = tuple(Checkpoint(at, 1) for at in (700, 2000, 3000))
    left = survivors(kept, 1999, traits())
    assert [(c.at, c.stale) for c in left] == [(700, False), (2000, True)]
    assert newest_usable(left, 2500, traits()) == 0  # the engine takes it
    assert newest_usable(left, 1999, traits()) == 700
    window = traits(memory=Memory.SWA, n_swa=256)
    assert not any(c.stale for c in survivors(kept, 1999, window))  # its last token is computed again


def test_a_newer_build_replaces_a_checkpoint_at_the_same_token_wherever_it_is_in_the_list():
    kept = (Checkpoint(300, 1), Checkpoint(301, 2))
    again = after_prefill(kept, reuse=300, end=304, user_starts=(), task=3, traits=traits(**NEW))
    assert [(c.at, c.stale) for c in again] == [(301, True), (300, False)]


def test_swa_keeps_the_checkpoint_that_it_restored():
    kept = (Checkpoint(2484, 1), Checkpoint(2996, 1))
    engine = traits(memory=Memory.SWA, n_swa=256)
    assert places(survivors(kept, newest_usable(kept, 2999, engine), engine)) == [2484, 2996]


def test_the_last_suitable_checkpoint_of_the_list_is_used_and_not_the_farthest():
    engine = traits(memory=Memory.SWA, n_swa=256)
    kept = (Checkpoint(50, 1), Checkpoint(49, 2), Checkpoint(101, 2))  # in the order of the engine
    assert newest_usable(kept, 57, engine) == 48


def test_a_checkpoint_whose_window_begins_too_late_is_skipped():
    engine = traits(memory=Memory.SWA, n_swa=256)
    kept = (Checkpoint(1495, 1, first=1236), Checkpoint(1609, 2, first=1240))
    assert newest_usable(kept, 1608, engine) == 1608
    assert newest_usable((*kept[:1], Checkpoint(1495, 2, first=1240)), 1496, engine) == 1494
    assert newest_usable((Checkpoint(1495, 2, first=1240),), 1496, engine) == 0
    assert newest_usable((Checkpoint(101, 1, first=0),), 100, engine) == 100


@pytest.mark.parametrize(
    ("n_swa", "n_ubatch", "cells"), [(256, 128, 512), (256, 256, 512), (512, 512, 1024), (128, 512, 768)]
)
def test_a_sliding_window_layer_has_the_measured_number_of_cells(n_swa, n_ubatch, cells):
    assert window_cells(traits(memory=Memory.SWA, n_swa=n_swa, n_ubatch=n_ubatch)) == cells


def test_checkpoints_of_a_sliding_window_record_where_the_window_began():
    engine = traits(memory=Memory.SWA, n_swa=256, n_ubatch=128)
    fresh = after_prefill((), reuse=0, end=1427, user_starts=(), task=1, traits=engine)
    assert [(c.at, c.first) for c in fresh] == [(1295, 783), (1423, 911)]  # as logged by both builds
    bare = after_prefill(fresh, reuse=1422, end=1450, user_starts=(), task=2, traits=engine, first=1167)
    assert [(c.at, c.first) for c in bare[-2:]] == [(1422, 1167), (1446, 1167)]


@pytest.mark.parametrize(
    "engine",
    [
        traits(memory=Memory.DENSE),
        traits(memory=Memory.SWA, n_swa=256, swa_full=True),
        traits(checkpoint_cap=0),
    ],
    ids=["dense", "swa-full", "cap 0"],
)
def test_some_engines_keep_no_checkpoints(engine):
    assert not keeps_checkpoints(engine)
    assert prefill(engine, 3000) == ()


@pytest.mark.parametrize("memory", [Memory.HYBRID, Memory.RECURRENT, Memory.SWA, Memory.UNKNOWN])
def test_all_other_memory_kinds_keep_checkpoints(memory):
    assert keeps_checkpoints(traits(memory=memory))
