"""An idle engine computes the next turn's beginning: when, at what price, and what interrupts it."""

import pytest

from playbooks.playbook import (
    NEW_FILES,
    OLD_FILES,
    Play,
    arrives,
    ends,
    filled,
    fills,
    follows,
    goes,
    knows,
    one_turn,
    reports,
    restored,
    restores,
    saved,
    saves,
    sees,
    snapshot,
    snapshots_changed,
    starts,
    stops,
    unpinned,
    unsaved,
)
from slotkeeper.scheduler.effects import Purpose, SaveMoment
from slotkeeper.scheduler.events import TimerFired
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.table import LINGER
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import Reason

PROMPT = Tokens(range(10_000, 14_000))
REPLY = Tokens(range(20_000, 20_100))  # as the client sends it back
HEADER = Tokens(range(5))
NEXT = PROMPT + REPLY + HEADER
OUTLINE = (b"system", b"hello")
ASKED_AGAIN = (*OUTLINE, b"answer", b"more")
OTHER = Tokens(range(50_000, 51_000))
AHEAD = Purpose.NEXT


def answered(play, following=NEXT, chance=1.0):
    """A turn has ended, its reply differs from the one that will be sent back, and the next turn is known."""
    assert play << arrives("r1", hash_chain=OUTLINE) << knows("r1", PROMPT) >> goes("r1", slot=0)
    assert play << ends("r1", 4000, 0, generated=150) >> reports("r1")
    return play << follows("r1", following, chance=chance)


def test_the_start_of_the_next_turn_is_computed_in_a_pause_and_reused_by_that_turn():
    play = answered(Play())
    assert play.wakes() >> fills(0, AHEAD, tokens=NEXT)
    assert play.states == ["tended", "idle"]
    assert play << filled(109)
    assert play << arrives("r2", hash_chain=ASKED_AGAIN) >> goes("r2", slot=0, reason=Reason.CONTINUES)
    assert play << knows("r2", NEXT + OTHER) << ends("r2", 5105, 4105) >> reports("r2", predicted=4105)


def test_a_slot_is_saved_with_the_prefetched_tokens_because_the_next_prompt_extends_them():
    play = answered(Play(**OLD_FILES))
    assert play.wakes() >> fills(0, AHEAD) << filled(109)
    assert play.wakes() >> saves(0, tokens=NEXT) << saved("next")


def test_a_prefetch_restores_a_file_first_if_the_slot_has_fewer_tokens():
    play = Play(**OLD_FILES)
    early, following = snapshot("early", PROMPT.cut(0, 1400)), PROMPT.cut(0, 1500) + HEADER
    play = answered(play, following)
    assert play << snapshots_changed(early)
    play.wakes() >> restores(0, "early") << restored()
    assert play >> fills(0, AHEAD, tokens=following) << filled(105)
    next_turn = arrives("r2", hash_chain=ASKED_AGAIN)
    assert play << next_turn << knows("r2", following + OTHER) >> goes("r2", slot=0, reason=Reason.PREFIX)


def test_nothing_is_prefetched_while_a_request_runs():
    play = Play()
    assert play << arrives("r2") << knows("r2", OTHER) >> goes("r2", slot=0) << starts("r2")
    assert play << arrives("r1", hash_chain=OUTLINE) << knows("r1", PROMPT) >> goes("r1", slot=1)
    assert play << ends("r1", 4000, 0, generated=150) >> reports("r1") << follows("r1", NEXT)
    assert play.later(5) << sees(0)
    assert play << ends("r2", 1000, 0) >> reports("r2") >> fills(1, AHEAD)


def test_an_idle_token_budget_of_zero_turns_prefetch_off():
    play = answered(Play(limits=Limits(idle_tokens=0)))
    play.later(5) << sees()
    assert play.states == ["idle", "idle"]


def test_nothing_is_prefetched_beyond_the_budget_of_the_hour():
    play = answered(Play(limits=Limits(idle_tokens=150)))
    assert play.wakes() >> fills(0, AHEAD) << filled(109)
    assert play << arrives("r2", hash_chain=ASKED_AGAIN) >> goes("r2", slot=0)
    assert play << knows("r2", NEXT + OTHER) << ends("r2", 5105, 4105, generated=150) >> reports("r2")
    assert play << follows("r2", NEXT + OTHER + REPLY)
    assert play.later(5) << sees()


def test_a_request_waits_for_a_short_prefetch_and_stops_a_long_one():
    play = answered(Play())
    assert play.wakes() >> fills(0, AHEAD)
    # one batch is left, so the prefetch may end
    assert play << arrives("r2") << knows("r2", OTHER) >> goes("r2", slot=1)
    assert play << filled(109)

    far = Tokens(range(60_000, 64_000)) + HEADER
    play = answered(Play(), following=far)
    assert play.wakes() >> fills(0, AHEAD)
    assert play << arrives("r2") >> stops() << knows("r2", OTHER) >> goes("r2", slot=1)
    assert play << filled(None, stopped=True)
    assert play.states == ["draining", "launched"]
    assert play.later(LINGER) << sees(1, contents={0: 2048})
    assert play.table.shadow.slots[0].tokens == far.cut(0, 2048)


# -- a pass through the model takes time, whatever number of tokens it computes -------------------------

TAIL = Tokens(range(20_000, 20_040))
NEVER_WORTH_IT = 1e6  # seconds of a pass: nothing is prefetched


def conversation(pauses, pass_seconds):
    """Play turns of one conversation, each after its pause. The next turn begins with forty more tokens.

    Only the last of them is worth a prefetch.
    """
    play, prompt = Play(), PROMPT
    play.table.rates.prefilling.constant = NEVER_WORTH_IT
    for number, pause in enumerate([0.0, *pauses]):
        request, chain = f"r{number}", tuple(b"%d" % n for n in range(2 * number + 2))
        arrival = arrives(request, hash_chain=chain)
        assert play.later(pause) << arrival << knows(request, prompt) >> goes(request, slot=0)
        cached = len(prompt) - 100 if number else 0
        assert play << ends(request, len(prompt), cached) >> reports(request)
        if number == len(pauses):
            play.table.rates.prefilling.constant = pass_seconds
        assert play << follows(request, prompt + TAIL)
        prompt = prompt + TAIL + Tokens(range(30_000 + 200 * number, 30_100 + 200 * number))
    return play


@pytest.mark.parametrize(
    ("usual_pause", "pass_seconds", "paused", "begins"),
    [
        (0.26, 0.0, 0.25, True),  # a pass costs nothing: at once
        (0.26, 0.1, 0.25, False),  # its client would return during the pass
        (0.26, 0.1, 0.43, True),  # it is later than usual
        (1.5, 0.04, 0.25, True),  # it will return long after the pass
    ],
)
def test_a_short_prefetch_begins_when_its_client_will_probably_not_return_during_the_pass(
    usual_pause, pass_seconds, paused, begins
):
    play = conversation([usual_pause] * 4, pass_seconds)
    assert (play.later(paused) << TimerFired(at=0.0)).states == ["tended" if begins else "idle", "idle"]


def test_while_no_pause_is_known_a_prefetch_begins_after_a_pause_as_long_as_itself():
    play = answered(Play())
    play.table.rates.prefilling.constant = 0.6
    assert (play.later(0.6) << TimerFired(at=0.0)).states == ["idle", "idle"]
    assert play.later(0.2) << TimerFired(at=0.0) >> fills(0, AHEAD)


def test_the_pauses_of_other_clients_count_until_a_conversation_has_its_own():
    play = answered(Play())
    play.table.rates.prefilling.constant = 0.6
    play.paused(*[0.5] * 4)
    assert (play.later(0.7) << TimerFired(at=0.0)).states == ["idle", "idle"]
    assert play.later(0.1) << TimerFired(at=0.0) >> fills(0, AHEAD)


def test_a_prefetch_that_never_pays_leaves_nothing_to_do():
    play = conversation([0.26] * 4, NEVER_WORTH_IT)
    assert (play.later(60) << TimerFired(at=0.0)).states == ["idle", "idle"]
    assert play.table.settled


def test_a_short_prefetch_that_was_put_off_sets_a_timer():
    play = conversation([0.26] * 4, pass_seconds=0.1)
    assert play << TimerFired(at=0.0)
    assert play.wakes() >> fills(0, AHEAD)


def test_a_prefetch_of_more_tokens_than_a_pass_costs_is_not_put_off():
    play = answered(Play())
    play.table.rates.prefilling.constant = 0.05  # it saves 105 tokens, at a millisecond each
    play.paused(*[0.3] * 4, after=OUTLINE)
    assert play.later(Limits().pause) << TimerFired(at=0.0) >> fills(0, AHEAD)


@pytest.mark.parametrize("crowded", [False, True])
def test_a_prefetch_waits_if_the_engine_would_copy_another_slot_before_it(crowded):
    """Unless the next request would have to wait for that copy too: in a crowd, that slot is at work then."""
    play = answered(Play(memory="dense", ram_cache=True, token_bytes=1 << 20))
    assert one_turn(play, "r2", OTHER, slot=1)
    play.table.rates.prefilling.constant = 0.05  # it saves 105 tokens, at a millisecond each
    play.table.rates.copying.took(1 << 30, 0.8)
    play.paused(*[20.0] * 4, after=OUTLINE)
    play.table.rates.rests.extend([0.9] * 8)  # another client comes soon
    play.table.crowded_until = play.clock + 60 if crowded else -1.0
    assert (play.later(0.6) << TimerFired(at=0.0)).states == ["idle" if crowded else "tended", "idle"]


def prefetch_that_a_request_waits_for():
    """Start a prefetch that r2 waits for; a file ends shortly before the tokens that it computes."""
    play = answered(Play(memory="dense", **NEW_FILES))
    assert play.wakes() >> fills(0, AHEAD) << snapshots_changed(snapshot("early", PROMPT.cut(0, 3990)))
    assert play << arrives("r2") << knows("r2", NEXT + OTHER)
    return play


def test_a_request_waits_for_a_short_prefetch_rather_than_restore_a_shorter_file():
    assert prefetch_that_a_request_waits_for() << filled(109) >> goes("r2", slot=0, reason=Reason.PREFIX)


def test_a_request_is_placed_again_if_a_prefetch_takes_too_long():
    play = prefetch_that_a_request_waits_for()
    while not play.effects:
        play.wakes()
    assert play >> restores(1, "early", request="r2")


def test_a_request_that_stopped_a_prefetch_may_run_in_the_same_slot():
    far = Tokens(range(60_000, 64_000)) + HEADER
    play = answered(Play(n_slots=1), following=far)
    assert play.wakes() >> fills(0, AHEAD)
    assert play << arrives("r2") >> stops() << knows("r2", OTHER)
    assert play << filled(None, stopped=True)
    assert play << sees(0)
    assert play.later(LINGER) << sees(contents={0: 2048}) >> goes("r2", slot=0)


def test_no_unpinned_request_is_sent_while_a_stopped_prefetch_may_still_begin():
    far = Tokens(range(60_000, 64_000)) + HEADER
    play = answered(Play(), following=far)
    assert play.wakes() >> fills(0, AHEAD)
    assert play << arrives("r2", pinnable=False, rendered=False) >> stops()
    assert play << filled(None, stopped=True) << sees()  # it may still begin, and slot 0 looks free
    assert play.later(LINGER) << sees() >> unpinned("r2", Reason.UNPINNABLE)


@pytest.mark.parametrize("files", [OLD_FILES, NEW_FILES])
def test_a_prefetch_begins_if_the_next_turn_becomes_known_during_a_save(files):
    play = Play(**files)
    assert play << arrives("r1", hash_chain=OUTLINE) << knows("r1", PROMPT) >> goes("r1", slot=0)
    assert play << ends("r1", 4000, 0, generated=150) >> reports("r1")
    assert play.wakes() >> saves(0) << follows("r1", NEXT)
    assert play << unsaved(lasting=False) >> fills(0, AHEAD, tokens=NEXT)


def test_an_unexpected_turn_restores_a_file_if_the_prefetch_discarded_many_tokens():
    """A tool's result comes where a user's message was expected, for which reasoning is stripped."""
    play = Play(**NEW_FILES, eager_thinning=False)
    play = answered(play, PROMPT.cut(0, 500) + Tokens(range(90_000, 93_000)))
    assert play << snapshots_changed(snapshot("early", PROMPT.cut(0, 3500), checkpoints=(3496,)))
    assert play.wakes() >> fills(0, AHEAD) << filled(3000)
    play << arrives("r2", hash_chain=ASKED_AGAIN) << knows("r2", PROMPT + OTHER)
    assert play >> restores(0, "early") << restored() >> goes("r2", slot=0, reason=Reason.SNAPSHOT)


def test_a_branch_waits_for_the_slot_that_is_prepared_if_its_state_can_be_saved_then():
    play = Play(**{**NEW_FILES, "memory": "dense"})
    talk, branch = Tokens(range(100_000, 108_000)), Tokens(range(20_000, 21_000))
    assert one_turn(play, "r1", talk, slot=0)
    assert play << follows("r1", talk + OTHER)
    assert play.wakes() >> fills(0, AHEAD)
    assert play << arrives("r2") << knows("r2", talk.cut(0, 3000) + branch)
    assert play.states == ["tended", "idle"]  # in the other slot it would be computed whole
    assert play << filled(300) >> saves(0, SaveMoment.PARK, request="r2")
    assert play << saved("s1") >> goes("r2", slot=0)


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.75], ids=["unlikely", "as likely as not", "likely"])
def test_nothing_is_computed_ahead_that_the_next_turn_may_well_not_use(chance):
    """The engine would compute more than without us: a user stops, or another text wraps the question."""
    play = answered(Play(), chance=chance)
    assert play.later(5) << sees()
    assert play.states == ["idle", "idle"]


def test_a_likely_next_turn_is_computed_ahead_if_that_saves_more_than_a_task_costs():
    assert answered(Play(), chance=0.9).wakes() >> fills(0, AHEAD, tokens=NEXT)
    batched = answered(Play(), following=PROMPT + HEADER)  # its few tokens go into the next turn's own batch
    assert batched.later(5) << sees()
    assert batched.states == ["idle", "idle"]


@pytest.mark.parametrize(("chance", "likely"), [(0.5, False), (0.7, False), (0.8, True)])
def test_a_few_tokens_are_computed_for_a_file_if_the_next_turn_will_likely_use_them(chance, likely):
    play = answered(Play(**NEW_FILES), following=PROMPT + HEADER, chance=chance).wakes()
    assert play >> (fills(0, AHEAD) if likely else saves(0))


@pytest.mark.parametrize(
    ("flags", "chance", "likely"),
    [
        ({"checkpoint_min_step": 0}, 0.4, False),
        ({"checkpoint_min_step": 0}, 0.5, True),
        ({"checkpoint_cap": 0}, 0.5, True),
        ({}, 0.5, False),
        ({}, 0.7, False),
        ({}, 0.8, True),
    ],
)
def test_a_file_that_can_only_be_extended_is_prefetched_for_unless_predictions_failed(flags, chance, likely):
    """Where each task takes checkpoints, an even chance is not enough: the next turn may go back to them."""
    play = answered(Play(**OLD_FILES, **flags), chance=chance).wakes()
    assert play >> (fills(0, AHEAD) if likely else saves(0, tokens=PROMPT))
