"""Plants before a request: where, in which order, and what waits for them."""

from itertools import pairwise
from typing import Any

import pytest

from playbooks.playbook import (
    NEW_FILES,
    OLD_FILES,
    TOKEN_BYTES,
    Play,
    arrives,
    ends,
    filed,
    goes,
    knows,
    leaves,
    one_turn,
    planted,
    plants,
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
    unsaved,
    written,
)
from slotkeeper.scheduler.effects import Prefill, Purpose, SaveMoment
from slotkeeper.scheduler.prompts.planting import places
from slotkeeper.scheduler.prompts.prompt_tree import Branch
from slotkeeper.scheduler.prompts.tokens import Boundary, BoundaryKind, Tokens
from slotkeeper.scheduler.rates import LinearTimes
from slotkeeper.scheduler.requests.pending import Structure
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import NO_ROUTER, Reason, SlotId

HEAD, OTHER_HEAD = (Tokens(range(n, n + 1000)) for n in (10_000, 20_000))
ASKS = [Tokens(range(n, n + 1000)) for n in (30_000, 40_000, 50_000, 60_000)]
PROMPTS = [HEAD + ask for ask in ASKS]
BRANCH = HEAD.cut(0, 1000) + ASKS[1].cut(0, 4)  # the engine keeps a checkpoint four tokens before an end
AT_HEAD = Boundary(1000, BoundaryKind.HEAD)
LATER_BUILD: dict[str, Any] = {"eager_thinning": False}


def with_quick_disk(**engine: Any) -> Play:
    """A new head is then saved at once, although no other prompt is known to begin with it."""
    play = Play(**engine)
    play.table.rates.writing = LinearTimes(1e12)
    return play


def test_a_checkpoint_is_planted_where_two_prompts_diverge_for_the_third():
    play = Play(n_slots=1, **LATER_BUILD)
    assert one_turn(play, "r1", PROMPTS[0], slot=0)
    play << arrives("r2") << knows("r2", PROMPTS[1])
    assert play >> plants("r2", 0, Purpose.PLANT, tokens=BRANCH)
    assert play << planted("r2", len(BRANCH)) >> goes("r2", slot=0, reason=Reason.COLD)
    assert play << ends("r2", 2000, len(BRANCH)) >> reports("r2", usage__planted=len(BRANCH), oracle=1000)

    assert play << arrives("r3") << knows("r3", PROMPTS[2]) >> goes("r3", slot=0, reason=Reason.PREFIX)
    assert play << ends("r3", 2000, 1000) >> reports("r3", predicted=1000, usage__planted=0, oracle=1000)


def plants_a_new_head(**engine: Any) -> Play:
    """The head has been computed for r1; the next step would save it."""
    play = Play(n_slots=2, **engine)
    play << arrives("r1") << knows("r1", PROMPTS[0], AT_HEAD) >> plants("r1", 0, Purpose.PLANT)
    return play


def test_before_the_first_measurement_a_large_model_counts_as_slow():
    """At 1,000 tokens a second, 524 could be computed while the file is written, and half of 1,000 saved."""
    assert plants_a_new_head(memory="dense", token_bytes=256 * 1024, **NEW_FILES)


@pytest.mark.parametrize("engine", [{"memory": "dense"}, LATER_BUILD])
def test_nobody_waits_for_the_file_of_a_new_head_that_a_later_file_will_contain(engine):
    """To save it takes 1.3 s, and a prompt before the next pause would save 1,000 tokens: one second."""
    play = plants_a_new_head(**engine, **NEW_FILES)
    play.table.rates.writing = LinearTimes(5e7)
    assert play << planted("r1", 1000) >> goes("r1", slot=0)


def test_a_new_head_is_saved_if_the_file_is_written_quickly():
    """In 131 ms, of which one prompt in five would save a second."""
    play = plants_a_new_head(memory="dense", **NEW_FILES)
    assert play << planted("r1", 1000) >> saves(0, SaveMoment.BOUNDARY)


def test_a_new_head_is_not_saved_if_that_would_stop_another_request_as_well():
    play = Play(n_slots=2, memory="dense", **NEW_FILES)
    assert play << arrives("r0") << knows("r0", ASKS[3]) >> goes("r0", slot=0)
    play << starts("r0") << arrives("r1") << knows("r1", PROMPTS[0], AT_HEAD)
    assert play >> plants("r1", 1, Purpose.PLANT) << planted("r1", 1000) >> goes("r1", slot=1)


def test_nothing_is_saved_at_a_beginning_that_another_slot_has_too():
    """That slot will be saved when its conversation pauses; until then prompts continue from either slot."""
    play = plants_a_new_head(memory="dense", **NEW_FILES)
    play.table.rates.writing = LinearTimes(5e7)
    assert play << planted("r1", 1000) >> goes("r1", slot=0) << starts("r1")
    play.table.rates.writing = LinearTimes(1e12)
    assert play << arrives("r2") << knows("r2", PROMPTS[1], AT_HEAD) >> goes("r2", slot=1)


def test_a_new_head_that_another_request_waits_for_is_saved_if_that_is_quicker_than_to_compute_it():
    play = plants_a_new_head(memory="dense", **NEW_FILES)
    play.table.rates.writing = LinearTimes(5e8)
    play << arrives("r2") << knows("r2", PROMPTS[1], AT_HEAD)
    assert play << planted("r1", 1000) >> saves(0, SaveMoment.BOUNDARY)
    play = plants_a_new_head(memory="dense", **NEW_FILES)
    play.table.rates.writing = LinearTimes(5e7)
    play << arrives("r2") << knows("r2", PROMPTS[1], AT_HEAD)
    assert play << planted("r1", 1000) >> goes("r1", slot=0)


def test_a_new_head_is_saved_if_no_later_file_can_be_cut_there():
    play = plants_a_new_head(**OLD_FILES, eager_thinning=True)
    play.table.rates.writing = LinearTimes(5e7)
    assert play << planted("r1", 1000) >> saves(0, SaveMoment.BOUNDARY)


@pytest.mark.parametrize(
    ("second", "ways", "shared"), [(600, 2, False), (600, 3, True), (1000, 2, True), (None, 2, True)]
)
def test_an_edit_in_the_middle_of_a_conversation_is_no_beginning_that_others_share(second, ways, shared):
    """Its slot can be cut there. In the first turn, or where several prompts diverge, others begin so too."""
    found = (Boundary(500, BoundaryKind.HEAD), Boundary(second or 1500, BoundaryKind.USER))
    structure = Structure(
        boundaries=found if second else (), branches=(Branch(at=1000, ways=ways, passed=1, used=0.0),)
    )
    assert {
        place.shared for place in places(structure, PROMPTS[0]) if place.at == 1000 and place.chance > 0.1
    } == {shared}


def test_nothing_is_planted_for_a_prompt_that_the_engine_will_refuse():
    """The engine would compute as much as fits, over the slot's contents."""
    play = Play(n_slots=1, n_ctx=2000, **LATER_BUILD)
    assert one_turn(play, "r1", PROMPTS[0].cut(0, 1900), slot=0)
    assert play << arrives("r2") << knows("r2", PROMPTS[1]) >> goes("r2", slot=0)


def test_no_checkpoint_is_planted_if_the_next_task_would_thin_it_out():
    play = Play(n_slots=1, eager_thinning=True)
    assert one_turn(play, "r1", PROMPTS[0], slot=0)
    assert one_turn(play, "r2", PROMPTS[1], slot=0)


def test_an_engine_that_thins_checkpoints_gets_a_file_instead():
    play = Play(n_slots=1, eager_thinning=True, **OLD_FILES)
    play << arrives("r1") << knows("r1", PROMPTS[0], AT_HEAD)
    play >> plants("r1", 0, Purpose.PLANT, tokens=HEAD) << planted("r1", 1000)
    assert play >> saves(0, SaveMoment.BOUNDARY, tokens=HEAD) << saved("head") >> goes("r1", slot=0)
    assert play << ends("r1", 2000, 1000) >> reports("r1")

    play << arrives("r2") << knows("r2", PROMPTS[1], AT_HEAD)
    play >> plants("r2", 0, Purpose.BACK) << planted("r2") >> saves(0, SaveMoment.PARK) << saved("first")
    assert play >> restores(0, "head") << restored() >> goes("r2", slot=0, reason=Reason.SNAPSHOT)


@pytest.mark.parametrize(("files", "begins"), [(OLD_FILES, 2000), (NEW_FILES, 2001)])
def test_a_file_that_can_only_be_extended_ends_before_the_earliest_divergence(files, begins):
    """Two questions begin with the same word, a third does not."""
    document = Tokens(range(10_000, 12_000))
    play = Play(n_slots=1, eager_thinning=True, **files)
    for asked in ([7, 8], [9]):
        play.placement._state.tree(NO_ROUTER).add(document + Tokens(asked) + ASKS[0])
    play << arrives("r1") << knows("r1", document + Tokens([7]) + ASKS[1])
    play >> plants("r1", 0, Purpose.PLANT)
    assert isinstance(play.step, Prefill)
    assert len(play.step.tokens) == begins
    assert play << planted("r1", begins) >> saves(0, SaveMoment.BOUNDARY)


def test_a_long_unknown_head_gets_checkpoints_at_even_distances():
    head = Tokens(range(10_000, 14_500))
    play = Play(n_slots=1, **{**LATER_BUILD, "checkpoint_min_step": 0})
    play << arrives("r1") << knows("r1", head + ASKS[0], Boundary(len(head), BoundaryKind.HEAD))
    for done, at in pairwise((0, 1028, 2052, 3076, 4100, 4504)):
        play >> plants("r1", 0, Purpose.PLANT, tokens=(head + ASKS[0]).cut(0, at))
        play << planted("r1", at - done)
    assert play >> goes("r1", slot=0) << ends("r1", 5500, 4504) >> reports("r1")

    agent = head.cut(0, 3500) + Tokens(range(20_000, 21_000)) + ASKS[1]  # its tools differ from there on
    play << arrives("r2") << knows("r2", agent, Boundary(4500, BoundaryKind.HEAD))
    play >> plants("r2", 0, Purpose.PLANT, tokens=agent.cut(0, 3504)) << planted("r2", 3504 - 3072)
    assert play >> goes("r2", slot=0, reason=Reason.PREFIX)


@pytest.mark.parametrize(("writes_quickly", "first_plant"), [(True, 1028), (False, 4504)])
def test_nothing_is_planted_before_the_first_checkpoint_of_a_thinning_engine_without_a_file(
    writes_quickly, first_plant
):
    """The head's plant leaves one at 3,984 tokens. When the list is full, the first one stays."""
    head = Tokens(range(10_000, 14_500))
    play = Play(n_slots=1, **{**LATER_BUILD, "checkpoint_min_step": 8192}, **NEW_FILES)
    play.table.rates.writing = LinearTimes(1e9 if writes_quickly else 1e7)
    play << arrives("r1") << knows("r1", head + ASKS[0], Boundary(len(head), BoundaryKind.HEAD))
    assert play >> plants("r1", 0, Purpose.PLANT, tokens=(head + ASKS[0]).cut(0, first_plant))


def test_a_head_whose_end_changes_is_not_saved_at_its_end():
    clock = HEAD.cut(0, 900) + OTHER_HEAD.cut(0, 100)
    play = Play(n_slots=1, eager_thinning=True, **OLD_FILES)
    assert play << snapshots_changed(snapshot("until the clock", HEAD.cut(0, 900)))
    play.placement._state.tree(NO_ROUTER).add(PROMPTS[0])
    assert play << arrives("r1") << knows("r1", clock + ASKS[1], AT_HEAD) >> restores(0, "until the clock")
    assert play << restored() >> goes("r1", slot=0)


def test_a_request_with_the_same_beginning_waits_for_the_file_that_is_being_saved():
    play = Play(**NEW_FILES, **LATER_BUILD)
    assert play << arrives("r1") << knows("r1", PROMPTS[0], AT_HEAD) >> plants("r1", 0, Purpose.PLANT)
    assert play << arrives("r2") << knows("r2", PROMPTS[1], AT_HEAD)
    (
        play << arrives("r3", client="bert") << knows("r3", OTHER_HEAD + ASKS[2])
    )  # another head: it does not wait
    assert play >> goes("r3", slot=1)
    assert play << ends("r3", 2000, 0) >> reports("r3")
    assert play.placement.queued == 1
    assert play << planted("r1", 1004) >> saves(0, SaveMoment.BOUNDARY)
    assert play << saved("head", checkpoints=(488, 1000)) >> goes("r1", slot=0)
    assert play << starts("r1") >> saves(1, SaveMoment.PARK)
    assert (
        play
        << saved("bert")
        >> restores(1, "head")
        << restored()
        >> goes("r2", slot=1, reason=Reason.SNAPSHOT)
    )


@pytest.mark.parametrize("end", ["left", "failed"])
def test_a_request_that_waits_for_a_file_continues_if_the_file_is_not_written(end):
    play = Play(**NEW_FILES, **LATER_BUILD)
    assert play << arrives("r1") << knows("r1", PROMPTS[0], AT_HEAD) >> plants("r1", 0, Purpose.PLANT)
    assert play << arrives("r2") << knows("r2", PROMPTS[1], AT_HEAD)
    if end == "left":
        assert play << leaves("r1") >> plants("r2", 1, Purpose.PLANT)
    else:
        assert play << planted("r1", 1004) >> saves(0, SaveMoment.BOUNDARY)
        assert play << unsaved() >> goes("r1", slot=0) << starts("r1") >> plants("r2", 1, Purpose.PLANT)


def test_the_most_valuable_places_are_planted_and_those_close_to_them_left_out():
    length = 40_000
    prompt = Tokens(range(length))
    users = [Boundary(at, BoundaryKind.USER) for at in (9000, 9100, 9200, 20_000, 20_050, 30_000, 38_000)]
    play = Play(n_slots=1, checkpoint_cap=8, **LATER_BUILD)  # a quarter of them for one request
    play << arrives("r1") << knows("r1", prompt, *users)
    assert play >> plants("r1", 0, Purpose.PLANT, tokens=prompt.cut(0, 9004))
    assert play << planted("r1") >> plants("r1", 0, Purpose.PLANT, tokens=prompt.cut(0, 20_004))
    assert play << planted("r1") >> goes("r1", slot=0)


def test_a_checkpoint_is_planted_before_a_request_is_steered():
    play = Play(n_slots=1, **LATER_BUILD)
    assert one_turn(play, "r1", PROMPTS[0], slot=0)
    play << arrives("r2", pinnable=False) << knows("r2", PROMPTS[1])
    play >> plants("r2", 0, Purpose.PLANT, tokens=BRANCH) << planted("r2", len(BRANCH))
    play >> plants("r2", 0, Purpose.STEER, tokens=PROMPTS[1].cut(0, 1996)) << planted("r2", 992)
    assert play >> unpinned("r2", Reason.STEERED) << sees(0)
    assert play << ends("r2", 2000, 1996) >> reports("r2", usage__planted=len(BRANCH) + 992)


def test_with_a_draft_model_foreign_tokens_give_the_file_a_usable_draft_state():
    play = with_quick_disk(n_slots=1, speculative=True, **NEW_FILES, **LATER_BUILD)
    first = HEAD.cut(0, 1)
    foreign = HEAD + first + first + first + first
    play << arrives("r1") << knows("r1", PROMPTS[0], AT_HEAD)
    play >> plants("r1", 0, Purpose.PLANT, tokens=foreign) << planted("r1", 1004)
    assert (
        play >> saves(0, SaveMoment.BOUNDARY) << saved("head", checkpoints=(488, 1000)) >> goes("r1", slot=0)
    )
    assert play << ends("r1", 2000, 1000) >> reports("r1", predicted=1000)


def test_the_bytes_of_a_file_are_spent_from_the_budget_of_the_hour():
    play = Play(n_slots=1, limits=Limits(hourly_bytes=900 * TOKEN_BYTES), **OLD_FILES)
    assert play << arrives("r1") << knows("r1", PROMPTS[0], AT_HEAD) >> goes("r1", slot=0)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_request_continues_once_its_file_is_written_and_others_wait_for_the_catalog(is_kept):
    play = Play(**NEW_FILES, **LATER_BUILD)
    assert play << arrives("r1") << knows("r1", PROMPTS[0], AT_HEAD) >> plants("r1", 0, Purpose.PLANT)
    assert play << arrives("r2") << knows("r2", PROMPTS[1], AT_HEAD)
    assert play << planted("r1", 1004) >> saves(0, SaveMoment.BOUNDARY)
    assert play << written() >> goes("r1", slot=0) << starts("r1")
    assert play.placement.queued == 1
    assert play.placement.unsaved(play.clock)
    if is_kept:
        kept = snapshot("head", HEAD + ASKS[0].cut(0, 4), checkpoints=(488, 1000))
        assert play << filed("r1", kept) >> restores(1, "head")
        assert play << restored() >> goes("r2", slot=1, reason=Reason.SNAPSHOT)
    else:
        assert play << filed("r1", None) >> plants("r2", 1, Purpose.PLANT)
        assert play << planted("r2", 1004) >> goes("r2", slot=1)  # without a file: saves fail for a while


def boundaries_of(prompt, question=30):
    """One long message whose last line, and one 300 tokens before the end, begin at a token."""
    places = [
        (1000, BoundaryKind.HEAD),
        (len(prompt) - 300, BoundaryKind.LINE),
        (len(prompt) - question, BoundaryKind.QUESTION),
    ]
    return [Boundary(at, kind) for at, kind in places]


def test_a_checkpoint_before_the_last_line_of_a_long_message_serves_the_next_question():
    document = HEAD + Tokens(range(30_000, 36_000))
    first, second = (document + Tokens(range(n, n + 30)) for n in (80_000, 90_000))
    play = Play(n_slots=1, checkpoint_cap=64, **LATER_BUILD)
    play.placement._state.tree(NO_ROUTER).add(HEAD + ASKS[1])  # so a state at its end saves nothing
    play << arrives("r1") << knows("r1", first, *boundaries_of(first))
    play >> plants("r1", 0, Purpose.PLANT, tokens=first.cut(0, 1004)) << planted("r1", 1004)
    play >> plants("r1", 0, Purpose.PLANT, tokens=first.cut(0, 7004)) << planted("r1", 6000)
    assert play >> goes("r1", slot=0) << ends("r1", 7030, 7004) >> reports("r1", usage__planted=7004)
    assert play << arrives("r2") << knows("r2", second, *boundaries_of(second)) >> goes("r2", slot=0)
    assert play << ends("r2", 7030, 7000) >> reports("r2", predicted=7000, usage__planted=0, oracle=30)


def test_with_large_batches_a_long_message_gets_a_second_checkpoint_further_back():
    prompt = Tokens(range(8000))
    play = Play(n_slots=1, checkpoint_cap=64, n_ubatch=2048, **LATER_BUILD)
    play << arrives("r1") << knows("r1", prompt, *boundaries_of(prompt)[1:])
    # the engine's own checkpoint
    play >> plants("r1", 0, Purpose.PLANT, tokens=prompt.cut(0, 5952)) << planted("r1")
    play >> plants("r1", 0, Purpose.PLANT, tokens=prompt.cut(0, 7704)) << planted("r1")
    play >> plants("r1", 0, Purpose.PLANT, tokens=prompt.cut(0, 7974)) << planted("r1")
    assert play >> goes("r1", slot=0)


def held_checkpoints(play):
    return [checkpoint.at for checkpoint in play.table.shadow.slots[0].checkpoints]


@pytest.mark.parametrize("build", [{**NEW_FILES, **LATER_BUILD}, {**OLD_FILES, "eager_thinning": True}])
def test_a_plant_does_not_prevent_the_requests_own_checkpoint(build):
    """One ubatch before its end; the head ends after that, where a file is worth it."""
    prompt, head = PROMPTS[0].cut(0, 870), Boundary(612, BoundaryKind.HEAD)
    play = with_quick_disk(n_slots=1, **build)
    play << arrives("r1") << knows("r1", prompt, head)
    play >> plants("r1", 0, Purpose.PLANT, tokens=prompt.cut(0, 358)) << planted("r1", 358)
    play >> plants("r1", 0, Purpose.PLANT) << planted("r1", 612 - 358)
    play >> saves(0, SaveMoment.BOUNDARY) << saved("head")
    if play.effects and isinstance(play.effects[0], Prefill):
        play >> plants("r1", 0, Purpose.PLANT) << planted("r1")
    assert play >> goes("r1", slot=0) << ends("r1", 870, 616) >> reports("r1")
    assert held_checkpoints(play)[0] == 354
    nearly = prompt.cut(0, 500) + ASKS[1]
    assert play.table.shadow.plan_reuse(SlotId(0), nearly).reuse >= 354


def test_an_engine_that_thins_gets_no_file_before_the_only_checkpoint_that_it_would_keep():
    """It would keep one before the file's end instead, and every later prompt would go back to that."""
    prompt = HEAD + ASKS[0] + ASKS[1] + ASKS[2]
    play = Play(n_slots=1, eager_thinning=True, user_start=((ASKS[1][0],),), **OLD_FILES)
    assert play << arrives("r1") << knows("r1", prompt, AT_HEAD) >> goes("r1", slot=0)


def test_a_checkpoint_and_a_file_that_nearly_coincide_cost_no_token_twice():
    head = Tokens(range(10_000, 14_098))
    prompt = head + ASKS[0]
    play = with_quick_disk(n_slots=1, checkpoint_cap=64, **NEW_FILES, **LATER_BUILD)
    play << arrives("r1") << knows("r1", prompt, Boundary(len(head), BoundaryKind.HEAD))
    ends_at = []
    while isinstance(play.effects[0], Prefill):
        ends_at.append(len(play.effects[0].tokens))
        play >> plants("r1", 0, Purpose.PLANT) << planted("r1")
    assert ends_at == sorted(set(ends_at))
    assert play >> saves(0, SaveMoment.BOUNDARY)


@pytest.mark.parametrize(
    "engine",
    [
        {"memory": "dense"},
        {"eager_thinning": True},  # the next task would thin it out
        {"checkpoint_cap": 5},  # an older checkpoint would be dropped for it
    ],
)
def test_no_checkpoint_before_the_last_line_if_it_would_not_last_or_would_evict_another(engine):
    prompt = Tokens(range(8000))
    play = Play(n_slots=1, **{**LATER_BUILD, **engine})
    play << arrives("r1") << knows("r1", prompt, *boundaries_of(prompt)[1:])
    assert play >> goes("r1", slot=0)


def test_no_checkpoint_before_the_last_line_if_the_engine_keeps_one_near_enough():
    """With small batches the engine leaves a checkpoint 68 tokens before the end."""
    prompt = Tokens(range(8000))
    play = Play(n_slots=1, checkpoint_cap=64, n_ubatch=64, **LATER_BUILD)
    play << arrives("r1") << knows("r1", prompt, Boundary(7970, BoundaryKind.QUESTION))
    assert play >> goes("r1", slot=0)
