"""Agents that share a slot: who gets it next, and for whom it is kept (`policies.turns`)."""

from __future__ import annotations

from typing import Any

import pytest

from playbooks.playbook import Play, arrives, ends, goes, knows, ranked, reports
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.events import TimerFired
from slotkeeper.scheduler.policies.turns import JITTER, kept_seconds
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.pending import Wait
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import Priority, PriorityAct, Reason, RequestHints, RequestId, SaidBy

ANNA, BERT, CARL = (Tokens(range(start, start + 900)) for start in (1000, 3000, 5000))
SHORT = Tokens(range(7000, 7200))
MORE = Tokens(range(100, 140))
IN_ORDER = Limits(delay_factor=1.0)
SOON = (0.1,) * 8  # seconds that tools took
LOW = RequestHints(priority=Priority.LOW, said_by=SaidBy.HEADER)


def one_slot(*, answer_tokens: float = 15.0, **known: Any) -> Play:
    """Return an engine that computes 1,000 tokens and answers with 50 in a second."""
    play = Play(n_slots=1, memory="dense", **known)
    play.table.rates.reply.mean, play.table.rates.decode.mean = answer_tokens, 50.0
    return play


def chain(name: str, turn: int) -> tuple[bytes, ...]:
    return tuple(f"{name}{message}".encode() for message in range(2 * turn))


def turn(play: Play, name: str, prompt: Tokens, number: int = 1, client: str = "a user", **more: Any) -> Play:
    """Let a turn of a conversation arrive, of the agents of one user."""
    return (
        play
        << arrives(f"{name}{number}", client, hash_chain=chain(name, number), **more)
        << knows(f"{name}{number}", prompt)
    )


def kept_for_anna(*, pauses: tuple[float, ...] = SOON, tools: bool = True, **known: Any) -> Play:
    """Anna's answer asks for tools and ends, while Bert waits for her slot."""
    play = one_slot(**known)
    assert turn(play, "anna", ANNA) >> goes("anna1")
    assert turn(play, "bert", BERT)
    play.paused(*pauses, tools=True)
    play << ends("anna1", 900, calls_tools=tools)
    return play >> reports("anna1")


def waits_for(play: Play, request: str) -> Wait | None:
    waiting = play.placement.waiting(RequestId(request))
    return waiting.wait if waiting else None


# -- the order -------------------------------------------------------------------------------------------


def test_the_request_whose_prompt_takes_the_shortest_time_goes_first():
    play = one_slot()
    assert turn(play, "anna", ANNA) >> goes("anna1")
    assert turn(play, "bert", BERT)
    assert turn(play, "carl", SHORT)
    play << ends("anna1", 900)
    assert play >> reports("anna1") >> goes("carl1") >> ranked("carl1", PriorityAct.CHEAPER, other="bert1")


def test_a_conversation_that_came_back_goes_on_in_its_slot_before_others():
    play = one_slot()
    assert turn(play, "anna", ANNA) >> goes("anna1")
    assert turn(play, "bert", BERT)
    assert turn(play, "anna", ANNA + MORE, 2)  # a request of the same conversation beside its first
    play << ends("anna1", 900)
    play >> reports("anna1") >> goes("anna2", reason=Reason.CONTINUES)
    assert play >> ranked("anna2", PriorityAct.CHEAPER, other="bert1")


def test_equal_prompts_are_served_in_the_order_of_their_arrival():
    play = one_slot()
    assert turn(play, "anna", ANNA) >> goes("anna1")
    assert turn(play, "bert", BERT)
    assert turn(play, "carl", CARL)
    assert play << ends("anna1", 900) >> reports("anna1") >> goes("bert1")


def test_with_a_factor_of_one_the_order_of_arrival_is_kept():
    play = one_slot(limits=IN_ORDER)
    assert turn(play, "anna", ANNA) >> goes("anna1")
    assert turn(play, "bert", BERT)
    assert turn(play, "carl", SHORT)
    assert play << ends("anna1", 900) >> reports("anna1") >> goes("bert1")


def test_between_clients_the_queue_decides():
    play = one_slot()
    assert turn(play, "anna", ANNA) >> goes("anna1")
    assert turn(play, "bert", BERT)
    assert turn(play, "carl", SHORT, client="another user")
    assert play << ends("anna1", 900) >> reports("anna1") >> goes("bert1")


def test_a_slot_is_not_kept_while_another_client_waits():
    play = one_slot()
    assert turn(play, "anna", ANNA) >> goes("anna1")
    assert turn(play, "bert", BERT, client="another user")
    play.paused(*SOON, tools=True)
    play << ends("anna1", 900, calls_tools=True)
    assert play >> reports("anna1") >> goes("bert1")


def test_priority_counts_more_than_cost():
    play = one_slot()
    assert turn(play, "anna", ANNA) >> goes("anna1")
    assert turn(play, "carl", SHORT, hints=LOW)
    assert turn(play, "bert", BERT)
    play << ends("anna1", 900)
    assert play >> reports("anna1") >> ranked("bert1", PriorityAct.WENT_FIRST, other="carl1") >> goes("bert1")


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_a_stream_of_cheaper_requests_delays_none_beyond_its_bound(factor):
    """Bert needs 0.9 s, and each of the short ones 0.2 s with an answer of 0.3 s."""
    play = one_slot(limits=Limits(delay_factor=factor))
    assert turn(play, "anna", ANNA) >> goes("anna1")
    play = turn(play, "bert", BERT)
    came, running, served = play.clock, "anna1", 0
    while play.placement.waiting(RequestId("bert1")):
        other = Tokens(range(10_000 + 300 * served, 10_200 + 300 * served))
        play = turn(play, f"other{served}", other)
        play.later(0.5) << ends(running, 900 if running == "anna1" else 200)
        served += 1
        sent = [effect.request for effect in play.effects if isinstance(effect, Forward)]
        running = sent[-1]
        play.effects.clear()
    assert served > 2  # some passed it
    assert play.pending("bert1").begun_at + 0.9 - came <= factor * (0.5 + 0.9) + 0.1


# -- slots that are kept ---------------------------------------------------------------------------------


def test_a_slot_is_kept_for_a_conversation_whose_tools_usually_return_soon():
    play = kept_for_anna()
    assert play >> ranked("bert1", PriorityAct.SLOT_KEPT, other="anna1")
    assert waits_for(play, "bert1") is Wait.KEPT_SLOT
    came_back = turn(play.later(0.1), "anna", ANNA + MORE, 2)
    assert came_back >> goes("anna2", reason=Reason.CONTINUES) >> ranked("anna2", PriorityAct.CHEAPER)


def test_a_slot_that_was_kept_is_given_away_when_the_usual_time_is_over():
    play = kept_for_anna()
    play >> ranked("bert1", PriorityAct.SLOT_KEPT)
    left = play.clock
    assert play.wakes() >> goes("bert1")
    assert JITTER * 0.1 <= play.clock - left < JITTER * 0.1 + 0.1


def test_a_slot_is_not_kept_after_an_answer_without_tools():
    assert kept_for_anna(tools=False) >> goes("bert1")


def test_a_slot_is_not_kept_if_the_return_takes_longer_than_computing_the_conversation_again():
    assert kept_for_anna(pauses=(5.0,) * 8) >> goes("bert1")


def test_a_slot_is_not_kept_with_a_factor_of_one():
    assert kept_for_anna(limits=IN_ORDER) >> goes("bert1")


def test_a_slot_is_not_kept_while_a_request_has_a_priority():
    play = one_slot()
    assert turn(play, "anna", ANNA) >> goes("anna1")
    assert turn(play, "bert", BERT, hints=LOW)
    play.paused(*SOON, tools=True)
    play << ends("anna1", 900, calls_tools=True)
    assert play >> reports("anna1") >> goes("bert1")


def test_a_slot_is_kept_no_longer_than_the_waiting_requests_bound_allows():
    """Bert's prefill takes 0.9 s. If Anna goes first, he waits for her answer, of 4 s, as well."""
    assert kept_for_anna(answer_tokens=200.0) >> goes("bert1")


def test_a_waiting_request_takes_another_slot_that_is_free():
    play = Play(n_slots=2, memory="dense")
    assert turn(play, "anna", ANNA) >> goes("anna1", slot=0)
    play.paused(*SOON, tools=True)
    assert play << ends("anna1", 900, calls_tools=True) >> reports("anna1")
    assert turn(play, "bert", BERT) >> goes("bert1", slot=1)


def test_a_slot_is_kept_for_a_request_that_arrives_in_the_pause():
    play = one_slot()
    assert turn(play, "anna", ANNA) >> goes("anna1")
    play.paused(*SOON, tools=True)
    assert play << ends("anna1", 900, calls_tools=True) >> reports("anna1")
    play = turn(play.later(0.02), "bert", BERT)
    assert play >> ranked("bert1", PriorityAct.SLOT_KEPT, other="anna1")
    assert play.later(1) << TimerFired(at=0.0) >> goes("bert1")


@pytest.mark.parametrize(
    ("pauses", "elapsed", "back", "kept"),
    [
        ([0.1] * 8, 0.0, 1.0, 0.1),  # it returns, and saves ten times what it costs
        ([0.1] * 8, 0.0, 0.1, 0.0),  # as much as it costs
        ([0.1] * 8, 0.2, 1.0, 0.0),  # it is later than ever
        ([0.1] * 4 + [60.0] * 4, 0.0, 1.0, 0.1),  # it returns at once in half of the cases
        ([0.1] + [60.0] * 7, 0.0, 0.5, 0.0),
        ([0.1] * 4 + [60.0] * 4, 0.2, 10.0, 0.0),  # that half is over
        ([], 0.0, 10.0, 0.0),
    ],
)
def test_a_slot_is_kept_as_long_as_that_saves_more_than_it_costs(pauses, elapsed, back, kept):
    assert kept_seconds(pauses, elapsed, back) == pytest.approx(JITTER * kept)
