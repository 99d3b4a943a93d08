"""Fewer requests at work than slots: the other slots keep their contexts (`--max-running`)."""

from __future__ import annotations

from playbooks.playbook import Play, arrives, ends, goes, knows, ranked, reports, sees, starts
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.pending import Wait
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import Priority, PriorityAct, RequestHints, RequestId, SaidBy

ANNA, BERT, CARL = (Tokens(range(start, start + 900)) for start in (1000, 3000, 5000))
LOW, HIGH = (RequestHints(priority=p, said_by=SaidBy.HEADER) for p in (Priority.LOW, Priority.HIGH))
MORE = Tokens(range(100, 140))


def waits_for(play: Play, request: str) -> Wait | None:
    waiting = play.placement.waiting(RequestId(request))
    return waiting.wait if waiting else None


def test_a_request_waits_until_another_has_ended_although_a_slot_is_free_and_both_contexts_stay():
    play = Play(limits=Limits(running=1), n_slots=3)
    assert play << arrives("a1") << knows("a1", ANNA) >> goes("a1", slot=0)
    assert play << arrives("b1") << knows("b1", BERT)
    assert waits_for(play, "b1") is Wait.RUNNING
    assert play << ends("a1", 900, 0) >> reports("a1") >> goes("b1", slot=1)
    assert play << arrives("a2") << knows("a2", ANNA + MORE)
    assert play << ends("b1", 900, 0) >> reports("b1") >> goes("a2", slot=0)
    assert play << ends("a2", 940, 900) >> reports("a2", predicted=900)


def test_the_most_urgent_of_those_that_wait_is_next():
    play = Play(limits=Limits(running=1), n_slots=3)
    assert play << arrives("a1") << knows("a1", ANNA) >> goes("a1", slot=0)
    assert play << arrives("b1", hints=LOW) << knows("b1", BERT)
    assert play << arrives("c1", hints=HIGH) << knows("c1", CARL)
    assert (
        play
        << ends("a1", 900, 0)
        >> reports("a1")
        >> ranked("c1", PriorityAct.WENT_FIRST, other="b1")
        >> goes("c1", slot=1)
    )
    assert waits_for(play, "b1") is Wait.RUNNING


def test_each_engine_has_its_own_limit():
    play = Play(limits=Limits(running=1), engines=2, n_slots=3)
    assert play << arrives("a1") << knows("a1", ANNA) >> goes("a1", engine="e0")
    assert play << arrives("b1") << knows("b1", BERT) >> goes("b1", engine="e1")
    assert play << arrives("c1") << knows("c1", CARL)
    assert waits_for(play, "c1") is Wait.RUNNING


def test_without_a_limit_each_slot_has_one():
    play = Play(n_slots=3)
    assert play << arrives("a1") << knows("a1", ANNA) >> goes("a1", slot=0) << starts("a1") << sees(0)
    assert play << arrives("b1") << knows("b1", BERT) >> goes("b1", slot=1)
