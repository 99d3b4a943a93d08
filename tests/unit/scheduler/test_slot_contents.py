"""How many tokens of a prompt a state can be reused for: the tables of engine.md 2.6 and 5."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotkeeper.scheduler.prompts.tokens import EMPTY, Tokens
from slotkeeper.scheduler.slots.engine_model import (
    HALF_LIFE,
    Checkpoint,
    EngineTraits,
    Memory,
    SlotContents,
    Snapshot,
    SnapshotId,
    bare,
    continues,
    first_kept,
    restored,
    reuse,
    slack,
    unsafe,
)
from slotkeeper.scheduler.types import RequestId

N = 3000
PROMPT = Tokens(range(N))
LIVE = (Checkpoint(2484, 1), Checkpoint(2996, 1))  # what a prefill of 3000 tokens leaves
OTHER = Tokens([99_999] * 100)

DENSE = EngineTraits(memory=Memory.DENSE)
HYBRID = EngineTraits(memory=Memory.HYBRID)
RECURRENT = EngineTraits(memory=Memory.RECURRENT)
SWA = EngineTraits(memory=Memory.SWA, n_swa=256)
SWA_FULL = EngineTraits(memory=Memory.SWA, n_swa=256, swa_full=True)
KINDS = [DENSE, HYBRID, RECURRENT, SWA, SWA_FULL]


def contents(traits, checkpoints=LIVE, slack=0):
    kept = () if traits.cuttable else checkpoints
    return SlotContents(tokens=PROMPT, checkpoints=kept, slack=slack)


def parts(before):
    """Return a prompt that diverges from the contents this many tokens before their end."""
    return PROMPT.cut(0, N - before) + OTHER


# next prompt, then tokens reused by: dense, hybrid, recurrent, SWA, SWA with --swa-full
RESTORED_WITH_CHECKPOINTS = [
    ("extension by 100", PROMPT + OTHER, [3000, 3000, 3000, 2995, 3000]),
    ("extension by 1", PROMPT + Tokens([5]), [3000, 3000, 3000, 2995, 3000]),
    ("identical", PROMPT, [2999, 2996, 2996, 2995, 2999]),
    ("differs at the last token", parts(1), [2999, 2996, 2996, 2995, 2999]),
    ("differs 4 before", parts(4), [2996, 2996, 2996, 2995, 2996]),
    ("differs 5 before", parts(5), [2995, 2484, 2484, 2995, 2995]),
    ("differs 100 before", parts(100), [2900, 2484, 2484, 2483, 2900]),
    ("differs 600 before", parts(600), [2400, 0, 0, 0, 2400]),
    ("differs 2900 before", parts(2900), [100, 0, 0, 0, 100]),
    ("a prefix of it", PROMPT.cut(0, 2500), [2499, 2484, 2484, 2483, 2499]),
]


@pytest.mark.parametrize(("prompt", "expected"), [row[1:] for row in RESTORED_WITH_CHECKPOINTS],
                         ids=[row[0] for row in RESTORED_WITH_CHECKPOINTS])  # fmt: skip
def test_a_bare_state_with_its_checkpoints_gives_the_measured_reuse(prompt, expected):
    assert [reuse(contents(traits), prompt, traits) for traits in KINDS] == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (PROMPT + OTHER, [3000, 3000, 3000, 0]),
        (PROMPT, [2999, 0, 0, 0]),
        (parts(1), [2999, 0, 0, 0]),
        (parts(100), [2900, 0, 0, 0]),
    ],
    ids=["extension", "identical", "last token", "100 before"],
)
def test_without_checkpoints_only_a_strict_extension_is_reused(prompt, expected):
    kinds = [DENSE, HYBRID, RECURRENT, SWA]
    assert [reuse(contents(traits, checkpoints=()), prompt, traits) for traits in kinds] == expected


# -- restored from a file ------------------------------------------------------------------------------


def file(checkpoints=(), **more):
    return Snapshot(
        id=SnapshotId("f"), fingerprint="", tokens=PROMPT, size=1, checkpoints=checkpoints, **more
    )


@pytest.mark.parametrize(("prompt", "expected"), [row[1:] for row in RESTORED_WITH_CHECKPOINTS],
                         ids=[row[0] for row in RESTORED_WITH_CHECKPOINTS])  # fmt: skip
def test_a_restored_file_with_checkpoints_gives_the_measured_reuse(prompt, expected):
    states = [restored(file((2484, 2996)), traits, now=1.0) for traits in KINDS]
    found = [reuse(contents, prompt, traits) for contents, traits in zip(states, KINDS, strict=True)]
    assert found[:4] == expected[:4]


def test_a_repaired_window_can_be_extended_but_not_cut():
    mended = restored(file(repaired=True), SWA, now=1.0)
    assert reuse(mended, PROMPT + OTHER, SWA) == N
    assert reuse(mended, PROMPT, SWA) == reuse(mended, parts(1), SWA) == 0
    assert reuse(restored(file(), SWA, now=1.0), PROMPT + OTHER, SWA) == 0  # T4


def test_the_last_checkpoints_are_restored_up_to_the_limit_of_the_engine():
    three = file((700, 2484, 2996))
    short = replace(HYBRID, checkpoint_cap=2)
    assert [c.at for c in restored(three, short, now=1.0).checkpoints] == [2484, 2996]
    assert [c.at for c in restored(three, HYBRID, now=1.0).checkpoints] == [700, 2484, 2996]


@pytest.mark.parametrize(
    "traits", [replace(HYBRID, checkpoint_cap=0), replace(HYBRID, files_carry=False), DENSE, SWA_FULL]
)
def test_some_engines_restore_no_checkpoints(traits):
    assert restored(file((2484, 2996)), traits, now=1.0).checkpoints == ()


def test_a_restored_slot_records_its_request_and_time():
    state = restored(file(), HYBRID, request=RequestId("r"), now=5.0)
    assert (state.tokens, state.opaque, state.request, state.used) == (PROMPT, 0, "r", 5.0)


# -- --swa-full: T9 -------------------------------------------------------------------------------------

# tokens before the end at which the next prompt diverges, whether the engine would cut there wrongly
T9 = [(0, False), (1, False), (2, True), (100, True), (255, True), (256, False), (600, False)]


@pytest.mark.parametrize(("before", "wrong"), T9)
def test_t9_a_copied_window_is_never_cut_where_the_engine_would_answer_wrongly(before, wrong):
    copied = restored(file(), SWA_FULL, now=1.0)
    assert unsafe(copied, parts(before), SWA_FULL) is wrong
    assert reuse(copied, parts(before), SWA_FULL) == (N - before if before < 2 else 0)


def test_t9_the_live_slot_can_be_cut_anywhere():
    live = SlotContents(tokens=PROMPT)
    assert not unsafe(live, parts(100), SWA_FULL)
    assert reuse(live, parts(100), SWA_FULL) == N - 100


def test_t9_a_copied_state_within_the_window_can_be_cut():
    short = bare(SlotContents(tokens=PROMPT.cut(0, 256)), SWA_FULL)
    assert reuse(short, PROMPT.cut(0, 100) + OTHER, SWA_FULL) == 100
    assert not unsafe(short, PROMPT.cut(0, 100) + OTHER, SWA_FULL)


# -- the live window --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "first", "expected"),
    [
        (3000, 0, 512),  # 768 cells, of which 256 are the window
        (3000, 2744, 0),  # bare
        (3000, 2743, 1),
        (400, 0, 144),
        (100, 0, 0),
    ],
)
def test_a_window_can_be_cut_back_as_far_as_its_cells_reach(total, first, expected):
    assert slack(total, first, SWA) == expected
    assert slack(total, first, HYBRID) == 0


def test_a_cut_window_keeps_its_first_position_and_one_from_a_checkpoint_has_a_bare_one():
    live = SlotContents(tokens=PROMPT, slack=100, checkpoints=LIVE)
    assert first_kept(live, 2950, SWA) == 3000 - 100 - 256
    assert first_kept(live, 2483, SWA) == 2484 - 256
    assert first_kept(live, 0, SWA) == first_kept(None, 0, SWA) == 0
    assert first_kept(live, 2950, HYBRID) == 0


def test_a_live_window_can_be_cut_back_by_about_one_ubatch():
    gemma = EngineTraits(memory=Memory.SWA, n_swa=512)  # engine.md 5: held 2050, -100 ok, -1050 not
    live = SlotContents(tokens=PROMPT.cut(0, 2050), slack=512)
    assert reuse(live, PROMPT.cut(0, 1950) + OTHER, gemma) == 1950
    assert reuse(live, PROMPT.cut(0, 1000) + OTHER, gemma) == 0


def test_a_prompt_inside_the_window_needs_a_checkpoint():
    live = SlotContents(tokens=PROMPT.cut(0, 400), slack=512, checkpoints=(Checkpoint(396, 1),))
    gemma = EngineTraits(memory=Memory.SWA, n_swa=512)
    assert reuse(live, PROMPT.cut(0, 400) + OTHER, gemma) == 395


def test_tokens_with_unknown_ids_are_never_counted_as_reuse():
    answered = SlotContents(tokens=PROMPT, opaque=39, checkpoints=LIVE)
    assert reuse(answered, PROMPT + OTHER, DENSE) == 3000
    assert reuse(answered, PROMPT + OTHER, HYBRID) == 2996  # thinking stripped: engine.md 2.6


def test_an_empty_slot_gives_no_reuse():
    assert reuse(None, PROMPT, DENSE) == 0
    assert reuse(SlotContents(), PROMPT, DENSE) == 0
    assert reuse(contents(DENSE), Tokens([0]), DENSE) == 0


IDS = st.lists(st.integers(0, 1), max_size=40)


STATES = st.builds(
    SlotContents,
    opaque=st.integers(0, 3),
    slack=st.integers(0, 20),
    checkpoints=st.lists(st.integers(1, 60), max_size=4).map(
        lambda places: tuple(Checkpoint(at, 1) for at in sorted(places))
    ),
)
NARROW = EngineTraits(memory=Memory.SWA, n_swa=4)


@given(st.tuples(IDS, IDS, IDS), STATES, st.sampled_from([*KINDS, NARROW]))
@settings(max_examples=300)
def test_reuse_never_exceeds_the_true_common_prefix(ids, state, traits):
    shared, mine, theirs = ids
    state = replace(state, tokens=Tokens(shared + mine))
    prompt = Tokens(shared + theirs)
    kept = reuse(state, prompt, traits)
    assert 0 <= kept <= state.tokens.lcp(prompt)
    assert kept < max(1, len(prompt))


def test_learning_more_ids_does_not_change_the_length():
    state = SlotContents(tokens=PROMPT, opaque=39)
    known = state.known_as(PROMPT + OTHER)
    assert (known.total, known.opaque, len(known.tokens)) == (3039, 0, 3039)
    assert state.known_as(PROMPT.cut(0, 10)).total == 3039


def test_the_count_of_the_engine_decides_what_is_left():
    state = SlotContents(tokens=PROMPT, opaque=39, checkpoints=LIVE, rough=True)
    cut = state.shrunk(2500)
    assert (cut.total, cut.opaque, cut.checkpoints) == (2500, 0, LIVE[:1])
    assert not cut.rough
    assert state.shrunk(3050).opaque == 50


def test_a_conversation_is_likelier_to_return_if_it_was_used_recently():
    def chance(turns, age):
        return SlotContents(turns=turns, used=1000.0).chance(1000.0 + age)

    assert chance(1, 0) == chance(9, 0) == 1
    assert chance(3, HALF_LIFE) == pytest.approx(chance(3, 0) / 2)
    assert chance(0, 0) == 0
    assert chance(3, -5) == chance(3, 0)


@pytest.mark.parametrize(
    ("hash_chain", "answer"),
    [
        ((b"s", b"1", b"2"), True),
        ((b"s", b"1"), True),  # the same again
        ((b"s",), False),
        ((b"s", b"x", b"2"), False),
        ((), False),
    ],
)
def test_messages_continue_a_state_if_they_begin_with_all_of_its_messages(hash_chain, answer):
    assert continues(hash_chain, SlotContents(tokens=EMPTY, hash_chain=(b"s", b"1"))) is answer


def test_a_state_without_messages_is_not_continued():
    assert not continues((b"s", b"1"), None)
    assert not continues((b"s", b"1"), SlotContents(hash_chain=(b"s",)))
