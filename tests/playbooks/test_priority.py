"""Priorities: the order of service, giving way after a batch, and refusal at a deadline."""

from itertools import pairwise
from typing import Any, TypeVar

import pytest

from playbooks.playbook import (
    NEW_FILES,
    Expected,
    Play,
    arrives,
    ends,
    filled,
    goes,
    knows,
    planted,
    plants,
    ranked,
    reports,
    restored,
    restores,
    saved,
    saves,
    starts,
)
from slotkeeper.scheduler.effects import Effect, Forward, Prefill, Purpose, Ranked, SaveMoment
from slotkeeper.scheduler.policies.priority import AGES_AFTER
from slotkeeper.scheduler.prompts.tokens import Boundary, BoundaryKind, Tokens
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.state import HINT_MARGIN, Outputs
from slotkeeper.scheduler.types import NO_HINTS, Priority, PriorityAct, Reason, RequestHints, SaidBy

E = TypeVar("E", bound=Effect)
BATCH, TAIL = 2048, 4
LONG = Tokens(range(100_000, 110_000))
ENDS = (1808, 3856, 5904, 7952)  # of the pieces; the last batch is sent with the request itself
A, B, C, D = (Tokens(range(n, n + 400)) for n in (10_000, 20_000, 30_000, 40_000))
CALM = Limits(pause=1000.0, idle_tokens=0)  # no idle work in between
LOW, HIGH = (RequestHints(priority=p, said_by=SaidBy.HEADER) for p in (Priority.LOW, Priority.HIGH))
SIDE = RequestHints(priority=Priority.LOW, said_by=SaidBy.SIDE_REQUEST)


def one_slot(**traits: Any) -> Play:
    return Play(limits=CALM, **{"n_slots": 1, "memory": "dense", **traits})


def asks(play: Play, request: str, prompt: Tokens, hints: RequestHints | None = None, **more: Any) -> Play:
    """A request arrives and its tokens are known."""
    return play << arrives(request, hints=hints or NO_HINTS, **more) << knows(request, prompt)


def following(play: Play, kind: type[E]) -> E:
    """Return the next effect, which must be of this kind."""
    effect = play.effects.popleft()
    assert isinstance(effect, kind)
    return effect


def waiting(play: Play, *requests: tuple[str, RequestHints | None]) -> None:
    """Occupy the only slot and queue these requests in order."""
    assert asks(play, "busy", A) >> goes("busy")
    for at, (request, hints) in enumerate(requests):
        assert asks(play, request, (B, C, D)[at], hints)


def piece(request: str, end: int, slot: int = 0) -> Expected:
    """Expect a prefill of the first `end` tokens of LONG."""
    return plants(request, slot, Purpose.PIECE, tokens=LONG.cut(0, end))


# -- order of service ------------------------------------------------------------------------------------


def test_a_more_urgent_request_is_served_before_earlier_ones():
    play = one_slot()
    waiting(play, ("low", LOW), ("normal", None), ("high", HIGH))
    assert (
        play
        << ends("busy", 400)
        >> reports("busy")
        >> ranked("high", PriorityAct.WENT_FIRST, other="low")
        >> goes("high", priority=Priority.HIGH)
    )
    assert (
        play
        << ends("high", 400)
        >> reports("high")
        >> ranked("normal", PriorityAct.WENT_FIRST, other="low")
        >> goes("normal")
    )
    assert play << ends("normal", 400) >> reports("normal") >> goes("low", priority=Priority.LOW)


def test_the_queue_is_shown_in_the_order_of_service():
    play = one_slot()
    waiting(play, ("low", LOW), ("normal", None), ("high", HIGH))
    assert list(play.placement.line) == ["high", "normal", "low"]


def test_a_side_request_waits_only_for_a_request_that_wants_its_slot():
    play = one_slot()
    assert asks(play, "title", B, SIDE) >> goes("title", reason=Reason.COLD)
    waits, comes = ("other title", SIDE), ("question", None)
    assert asks(play, waits[0], C, SIDE)
    assert asks(play, comes[0], D)
    assert (
        play
        << ends("title", 400)
        >> reports("title")
        >> ranked("question", PriorityAct.WENT_FIRST)
        >> goes("question")
    )


def test_a_priority_without_service_for_a_minute_is_served_next():
    play = one_slot()
    waiting(play, ("low", LOW), ("high", HIGH))
    play.later(AGES_AFTER)
    assert play << ends("busy", 400) >> reports("busy") >> ranked("low", PriorityAct.AGED) >> goes("low")


def test_only_one_request_of_an_aged_priority_is_served_early():
    play = one_slot()
    waiting(play, ("low", LOW), ("other low", LOW), ("high", HIGH))
    play.later(AGES_AFTER)
    assert play << ends("busy", 400) >> reports("busy") >> ranked("low", PriorityAct.AGED) >> goes("low")
    assert (
        play << ends("low", 400) >> reports("low") >> ranked("high", PriorityAct.WENT_FIRST) >> goes("high")
    )


# -- prefill in pieces -----------------------------------------------------------------------------------


def test_a_long_low_request_is_computed_in_batches_and_no_token_twice():
    play = one_slot()
    assert asks(play, "low", LONG, LOW) >> piece("low", ENDS[0])
    for before, end in pairwise((0, *ENDS)):
        play << filled(end - before)
        assert end == ENDS[-1] or play >> piece("low", ENDS[ENDS.index(end) + 1])
    assert play >> goes("low", reason=Reason.COLD)


def test_a_plant_of_a_low_request_is_divided_and_the_rest_is_part_of_the_last_batch():
    """The model has checkpoints and the prompt has a long system text."""
    play = one_slot(memory="hybrid", eager_thinning=False, checkpoint_min_step=0)
    play << arrives("low", hints=LOW) << knows("low", LONG, Boundary(9500, BoundaryKind.HEAD))
    found, purposes = [], set()
    while isinstance(play.effects[0], Prefill):
        step = play.step = following(play, Prefill)
        found.append(len(step.tokens))
        purposes.add(step.purpose)
        play << filled(found[-1] - sum(found[-2:-1]))
    assert purposes == {Purpose.PLANT, Purpose.PIECE}
    cuts = [0, *found, len(LONG)]
    assert max(b - a for a, b in pairwise(cuts)) <= BATCH
    assert len(LONG) - found[-2] <= BATCH


@pytest.mark.parametrize("hints", [None, HIGH, SIDE])
def test_a_long_request_is_not_divided_unless_its_client_marks_it_as_low(hints: RequestHints | None):
    assert asks(one_slot(), "long", LONG, hints) >> goes("long")


@pytest.mark.parametrize("more", [{"uncached": True}, {"lora": ((0, 1.0),)}, {"id_slot": 0}, {"copies": 2}])
def test_a_low_request_that_the_sidecars_prefills_cannot_help_is_not_divided(more: dict[str, Any]):
    play = Play(limits=CALM, memory="dense")
    asks(play, "low", LONG, LOW, **more)
    assert isinstance(play.effects[0], Forward)


def test_a_piece_makes_a_checkpoint_at_the_start_of_the_last_user_message():
    opener = Tokens([7, 8])
    prompt = LONG.cut(0, 3000) + opener + LONG.cut(3002)
    play = one_slot(memory="hybrid", user_start=((7, 8),))
    asks(play, "low", prompt, LOW)
    found = []
    while isinstance(play.effects[0], Prefill):
        step = following(play, Prefill)
        found.append(len(step.tokens))
        play.step = step
        play << filled(found[-1] - sum(found[-2:-1]))
    assert 3000 + TAIL in found
    assert found == sorted(found)
    assert found[-1] == len(prompt) - BATCH


def test_a_low_request_is_not_placed_by_its_messages_alone():
    play = one_slot()
    assert asks(play, "r1", A, hash_chain=(b"a", b"b")) >> goes("r1")
    assert play << ends("r1", 400) >> reports("r1")
    assert play << arrives("low", hash_chain=(b"a", b"b", b"c"), hints=LOW)
    assert play << knows("low", A + LONG) >> plants("low", 0, Purpose.PIECE)


# -- giving way ------------------------------------------------------------------------------------------


def begun(play: Play) -> None:
    """Begin a long request of low priority; its first batch is being computed."""
    assert asks(play, "low", LONG, LOW) >> piece("low", ENDS[0])


def test_a_low_request_gives_way_after_a_batch_and_continues_from_there():
    play = one_slot(ram_cache=True)
    begun(play)
    assert asks(play, "short", A)
    given = play << filled(ENDS[0]) >> ranked("low", PriorityAct.GAVE_WAY, other="short", engine="e0")
    assert given >> ranked("short", PriorityAct.WENT_FIRST) >> goes("short", slot=0)
    play << ends("short", 400) >> reports("short")
    assert play >> plants("low", 0, Purpose.PIECE, tokens=LONG.cut(0, ENDS[1]))


def test_giving_way_reports_gain_and_loss_and_the_loss_is_smaller():
    play = one_slot(ram_cache=True)
    begun(play)
    assert asks(play, "short", A)
    play << filled(ENDS[0])
    weighed = following(play, Ranked)
    assert weighed.loss is not None
    assert weighed.gain is not None
    assert 0 < weighed.loss < weighed.gain


def test_a_low_request_does_not_give_way_if_the_loss_exceeds_the_gain():
    """Half of the prompt is computed, and neither a file nor a RAM cache holds that state."""
    play = one_slot()
    begun(play)
    play << filled(ENDS[0]) >> piece("low", ENDS[1]) << filled(BATCH) >> piece("low", ENDS[2])
    assert asks(play, "short", A)
    assert play << filled(BATCH) >> ranked("low", PriorityAct.KEPT_ON, other="short") >> piece("low", ENDS[3])


def test_a_state_is_saved_before_giving_way_if_a_file_is_cheaper():
    play = one_slot(**NEW_FILES)
    begun(play)
    play << filled(ENDS[0]) >> piece("low", ENDS[1])
    assert asks(play, "short", A)
    play << filled(BATCH) >> ranked("low", PriorityAct.GAVE_WAY) >> ranked("short", PriorityAct.WENT_FIRST)
    assert play >> saves(0, SaveMoment.PARK)
    assert play << saved("half") >> goes("short")
    play << ends("short", 400) >> reports("short") >> saves(0, SaveMoment.PARK)
    assert play << saved("short's") >> restores(0, "half")
    assert play << restored() >> piece("low", ENDS[2])


def test_a_low_request_keeps_its_slot_and_waits_for_an_urgent_one_in_another_slot():
    play = Play(limits=CALM, memory="dense")
    begun(play)
    assert asks(play, "short", A) >> goes("short", slot=1)
    assert (
        play
        << filled(ENDS[0])
        >> ranked("low", PriorityAct.GAVE_WAY, other="short")
        >> ranked("low", PriorityAct.STOOD_BACK, other="short")
    )
    assert play << starts("short")
    play << ends("short", 400) >> reports("short")
    assert play >> piece("low", ENDS[1])


def test_a_low_request_that_gave_way_before_its_last_batch_does_not_continue_at_once():
    play = Play(limits=CALM, memory="dense")
    begun(play)
    for before, end in pairwise((0, *ENDS[:-1])):
        play << filled(end - before) >> piece("low", ENDS[ENDS.index(end) + 1])
    assert asks(play, "short", A) >> goes("short", slot=1)
    play << filled(BATCH) >> ranked("low", PriorityAct.GAVE_WAY) >> ranked("low", PriorityAct.STOOD_BACK)
    assert play << starts("short")
    play << ends("short", 400) >> reports("short")
    assert play >> goes("low", slot=0)


def test_a_low_request_does_not_begin_while_a_more_urgent_one_runs():
    play = Play(limits=CALM, memory="dense")
    assert asks(play, "short", A) >> goes("short")
    assert asks(play, "low", LONG, LOW) >> ranked("low", PriorityAct.STOOD_BACK, other="short")
    assert play << ends("short", 400) >> reports("short") >> piece("low", ENDS[0], slot=1)


def test_a_low_request_does_not_continue_while_the_tokens_of_an_urgent_one_are_counted():
    play = one_slot(ram_cache=True)
    begun(play)
    assert play << arrives("short")
    assert (
        play
        << filled(ENDS[0])
        >> ranked("low", PriorityAct.GAVE_WAY)
        >> ranked("low", PriorityAct.STOOD_BACK)
    )
    assert play << knows("short", A) >> ranked("short", PriorityAct.WENT_FIRST) >> goes("short")


def test_an_aged_request_begins_beside_a_more_urgent_one_and_does_not_give_way():
    play = Play(limits=CALM, memory="dense")
    assert asks(play, "short", A) >> goes("short") << starts("short")
    assert asks(play, "low", LONG, LOW) >> ranked("low", PriorityAct.STOOD_BACK)
    play.later(AGES_AFTER - 1)
    assert play.wakes() >> ranked("low", PriorityAct.AGED) >> piece("low", ENDS[0], slot=1)
    assert asks(play, "other", B)  # an aged request does not give way
    assert play << filled(ENDS[0]) >> piece("low", ENDS[1], slot=1)


def test_a_request_whose_piece_fails_is_sent_whole():
    play = one_slot()
    begun(play)
    assert play << planted("low", None)
    assert play.pending("low").plain


def test_all_tokens_of_all_pieces_are_reported_as_computed():
    play = one_slot()
    assert asks(play, "low", LONG, LOW) >> piece("low", ENDS[0])
    for before, end in pairwise((0, *ENDS)):
        play << filled(end - before)
        if end != ENDS[-1]:
            play.step = following(play, Prefill)
    following(play, Forward)
    assert play << ends("low", len(LONG), ENDS[-1]) >> reports("low", usage__computed=len(LONG))


# -- deadlines -------------------------------------------------------------------------------------------


def by(play: Play, seconds: float) -> RequestHints:
    return RequestHints(start_by=play.clock + seconds)


def test_a_request_that_cannot_begin_in_time_is_refused():
    play = one_slot()
    assert asks(play, "busy", A) >> goes("busy")
    assert asks(play, "late", B, by(play, 5.0))
    assert play.wakes() >> ranked("late", PriorityAct.EXPIRED)
    assert "late" not in play.placement.line
    assert play << ends("busy", 400) >> reports("busy")


def test_a_refusal_has_the_seconds_until_a_slot_is_free():
    play = one_slot()
    assert asks(play, "busy", A) >> goes("busy")
    assert asks(play, "late", B, by(play, 1.0))
    play.wakes()
    assert following(play, Ranked).retry_after >= 1


def test_a_deadline_of_zero_still_allows_counting_the_tokens():
    play = one_slot()
    assert play << arrives("r1", hints=by(play, 0.0))
    assert play << knows("r1", A) >> goes("r1")


def test_a_request_that_gave_way_is_not_refused_at_its_deadline():
    play = one_slot(ram_cache=True)
    hints = RequestHints(priority=Priority.LOW, said_by=SaidBy.HEADER, start_by=play.clock + 1.0)
    assert asks(play, "low", LONG, hints) >> piece("low", ENDS[0])
    assert asks(play, "short", A)
    play << filled(ENDS[0]) >> ranked("low", PriorityAct.GAVE_WAY) >> ranked("short", PriorityAct.WENT_FIRST)
    assert play >> goes("short")
    play.later(10.0)
    assert play << ends("short", 400) >> reports("short") >> piece("low", ENDS[1])


# -- expected answers ------------------------------------------------------------------------------------


def test_an_expected_answer_length_replaces_the_learned_one():
    told = RequestHints(output=100)
    assert Outputs().expected(arrives("r1", hints=told), 10_000) == HINT_MARGIN * 100
    assert Outputs().expected(arrives("r1", answer_limit=50, hints=told), 10_000) == 50
    assert Outputs().expected(arrives("r1", outgrown=True, hints=told), 10_000) == 10_000
