"""The sentences about a request: one for every value, in plain words, without text of a prompt."""

import re
from itertools import product
from typing import Any

import pytest

from slotkeeper.admin.admin import detail
from slotkeeper.conversation.divergence import CAUSES, NEW_SESSION, Cause
from slotkeeper.conversation.layout import Section
from slotkeeper.conversation.rules.apply import ShownChange
from slotkeeper.conversation.rules.base import Mode, RuleName
from slotkeeper.observe.request_record import (
    MOST_BEHIND,
    Decision,
    Option,
    PromptDivergence,
    QueueWait,
    Record,
    RequestStage,
)
from slotkeeper.observe.sentences import (
    FEW,
    LOST,
    PLACED,
    PLACES,
    POOLED,
    RANKED,
    SPENT_TEXTS,
    STEPS,
    place,
    sentences,
    verdict,
)
from slotkeeper.observe.states import Spent
from slotkeeper.scheduler.effects import PoolAct, Pooled, Purpose, Ranked, SaveMoment
from slotkeeper.scheduler.requests.figures import Loss, Lost
from slotkeeper.scheduler.requests.pending import Wait
from slotkeeper.scheduler.types import EngineId, Priority, PriorityAct, Reason, RequestId
from unit.observe.watched import record

PRIVATE = "xyzzy"


def option(reason: Reason = Reason.PREFIX, slot: int | None = 1, **more) -> Option:
    return Option(
        **{"reason": reason, "engine": "http://e", "slot": slot, "reuse": 900, "price": 100.0, **more}
    )


def divergence(cause: Cause = Cause.DATE, **more) -> PromptDivergence:
    usual: dict[str, Any] = {
        "section": Section.SYSTEM,
        "message": 0,
        "token": 1000,
        "tokens": 800,
        "seconds": 1.25,
        "rule": CAUSES[cause].rule,
        "fixed": False,
    }
    return PromptDivergence(cause=cause, **usual | more)


def answered(**more) -> Record:
    """Return a record: of 2000 prompt tokens 1100 were computed, and 100 of them had to be."""
    usual: dict[str, Any] = {
        "outcome": "ok",
        "prompt_tokens": 2000,
        "cached": 900,
        "predicted": 900,
        "oracle": 100,
    }
    return record(**usual | more)


def said(came: Record, taker: Record | None = None) -> str:
    """Return all sentences, and check that each is one."""
    found = sentences(came, taker)
    for sentence in found:
        assert re.fullmatch(r"[A-Z0-9][ -~]*\.", sentence), sentence
        assert not re.search(r"None|<|>|\{|\}|  |\.\.|\(\)", sentence), sentence
    assert len(set(found)) == len(found)
    return " ".join(found)


# -- every value has words -------------------------------------------------------------------------------


def test_every_value_has_words():
    assert set(PLACES) == set(Section)
    assert set(PLACED) == set(Reason)
    assert set(LOST) == set(Loss)
    assert set(CAUSES) == set(Cause)
    own = {purpose for purpose in Purpose if not purpose.idle}
    assert set(STEPS) == {*own, SaveMoment.PARK, SaveMoment.BOUNDARY, "restore", "erase"}
    for words in (PLACES, PLACED, LOST, STEPS):
        assert len(set(words.values())) == len(words)


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("slot", [None, 3])
def test_every_decision_has_a_sentence(reason, slot):
    decision = Decision(chosen=option(reason, slot), beaten=(option(reason, slot, price=150.0),))
    text = said(answered(decision=decision))
    assert PLACED[reason] in text
    assert ("slot 3" if slot else "the engine's own choice") in text
    assert "50 more tokens" in text


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("tokens", [1, FEW, FEW + 1, 1000])
def test_every_loss_has_a_sentence_and_a_verdict(loss, tokens):
    came = answered(lost=Lost(loss, tokens))
    text = said(came)
    assert (LOST[loss] in text) is (tokens > FEW)
    assert verdict(came) == (f"cache: {loss.value}" if tokens > FEW else "nothing twice")


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("section", [*Section, None])
def test_every_divergence_has_a_sentence_and_a_verdict(cause, section):
    for message, fixed, tokens, reply in product((None, 2), (True, False), (0, 800), (True, False)):
        seen = divergence(cause, section=section, message=message, fixed=fixed, tokens=tokens, reply=reply)
        came = answered(divergence=seen)
        assert CAUSES[cause].what in said(came)
        assert verdict(came) == (f"{place(seen)}: {CAUSES[cause].what}" if tokens else "nothing twice")


# -- sentences -------------------------------------------------------------------------------------------


def test_reused_and_computed_and_necessary_tokens_are_explained():
    text = said(answered(planted=128))
    assert "772 of 2,000 prompt tokens were reused and 1,228 computed, 128 of them by our own" in text
    assert "a perfect cache would have computed 100." in text


def test_a_wrong_prediction_is_explained():
    assert "predicted" not in said(answered())
    assert "The engine reused 900 tokens; 1,000 were predicted." in said(answered(predicted=1000))


def test_a_request_without_repeated_computation_is_explained_as_such():
    assert "Nothing was computed twice." in said(answered(oracle=1100))
    assert "Nothing was computed twice." not in said(answered(lost=Lost(Loss.OVERWRITTEN, 1000)))


def test_unknown_figures_are_not_claimed():
    """Without tokens, the result of a perfect cache is unknown."""
    came = answered(oracle=None, predicted=None)
    assert "twice" not in said(came)
    assert verdict(came) == ""


def test_an_answer_without_a_token_count_is_explained_as_such():
    came = answered(prompt_tokens=None, cached=None, oracle=None)
    assert said(came) == "The engine gave no count of tokens."
    assert verdict(came) == ""


def test_a_running_request_is_explained_by_its_slot_alone():
    came = record(decision=Decision(chosen=option()))
    assert said(came).startswith("It has not ended yet. It went to slot 1 (prefix)")
    assert said(record()) == "It has not ended yet."
    assert verdict(came) == ""


def test_the_steps_of_the_chosen_slot_and_the_next_best_are_named():
    decision = Decision(
        chosen=option(Reason.SNAPSHOT, steps=("park", "restore")),
        beaten=(option(Reason.COLD, steps=("park",)),),
    )
    text = said(answered(decision=decision))
    assert f"It went to slot 1 (snapshot), after {STEPS['park']} and {STEPS['restore']}: " in text
    assert f"The next best was slot 1 (cold), after {STEPS['park']}, " in text


def test_plants_are_counted_and_each_other_step_is_named_once():
    def after(*steps: str) -> str:
        return said(answered(decision=Decision(chosen=option(steps=steps))))

    assert "after planting one: " in after("plant")
    assert "after planting 3 and saving" in after("plant", "boundary", "plant", "boundary", "plant")


@pytest.mark.parametrize("rule", [rule for rule in RuleName if rule in {one.rule for one in CAUSES.values()}])
def test_a_rule_that_would_help_is_named_until_it_is_applied(rule):
    cause = next(cause for cause in Cause if CAUSES[cause].rule is rule)
    assert f"--rules {rule.value}=fix" in said(answered(divergence=divergence(cause)))
    fixed = said(answered(divergence=divergence(cause, fixed=True, tokens=0)))
    assert f"Rule {rule.value} undid that" in fixed
    assert "--rules" not in fixed


def test_no_rule_is_named_if_none_helps():
    assert "--rules" not in said(answered(divergence=divergence(Cause.MESSAGE_EDITED)))
    assert "No rule" in said(answered(divergence=divergence(Cause.TEMPLATE_STRIPS_REASONING, section=None)))


@pytest.mark.parametrize("cause", sorted(NEW_SESSION))
def test_a_new_session_is_not_described_as_a_repetition(cause):
    text = said(answered(divergence=divergence(cause)))
    assert "It is " in text
    assert "again" not in text


def test_messages_are_counted_from_1():
    assert place(divergence(section=Section.USER, message=0)) == "user message (message 1)"
    assert place(divergence(section=Section.TOOLS, message=None)) == "tools"
    assert place(divergence(section=None, message=None)) == "template"


@pytest.mark.parametrize("conversation", [None, 7])
def test_the_request_that_took_the_slot_is_named_if_that_lost_tokens(conversation):
    taker = record("taker-1", conversation=conversation)
    text = said(answered(lost=Lost(Loss.OVERWRITTEN, 1000)), taker)
    assert "taken by request taker-1" in text
    assert ("conversation 7" in text) is (conversation == 7)
    assert "taker-1" not in said(answered(lost=Lost(Loss.CHECKPOINT, 1000)), taker)
    assert "taker-1" not in said(answered(), taker)


# -- verdicts --------------------------------------------------------------------------------------------


def test_a_verdict_names_both_divergence_and_loss():
    came = answered(divergence=divergence(), lost=Lost(Loss.RESTARTED, 200))
    assert verdict(came) == "system text (message 1): a date changed; cache: restarted"


def test_tokens_lost_for_two_reasons_are_counted_once():
    both = {"divergence": divergence(tokens=900), "lost": Lost(Loss.OVERWRITTEN, 1000)}
    assert answered(**both).repeated == 1100  # all that was computed
    assert answered(**both, planted=500).repeated == 1600
    assert answered(divergence=divergence(tokens=300), lost=Lost(Loss.OVERWRITTEN, 200)).repeated == 500


# -- no text of a prompt ---------------------------------------------------------------------------------


def test_no_sentence_contains_text_of_a_prompt():
    change = ShownChange(RuleName.DATE, Mode.OBSERVE, "messages[0].content", PRIVATE, PRIVATE)
    came = answered(
        changes=(change,),
        divergence=divergence(was=(70001, 70002), now=(70001, 70003), lead=1),
        lost=Lost(Loss.OVERWRITTEN, 500),
        decision=Decision(chosen=option(), beaten=(option(),)),
    )
    text = said(came) + verdict(came)
    assert PRIVATE not in text
    assert "7000" not in text.replace(",", "")


# -- a shared KV buffer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("act", PoolAct)
def test_acts_on_a_shared_buffer_are_explained_and_listed(act):
    done = Pooled(request=RequestId("1:r"), engine=EngineId("http://e"), act=act, slot=2, cells=1234)
    came = record(pooled=[done])
    assert POOLED[act].format(cells=1234, slot=2) in sentences(came)
    assert detail(came)["pool"] == [{"act": act.value, "slot": 2, "cells": 1234}]


# -- priorities ------------------------------------------------------------------------------------------


def ranked(act: PriorityAct, **more: Any) -> Ranked:
    other = RequestId("2:other")
    return Ranked(request=RequestId("1:r"), act=act, priority=Priority.LOW, other=other, waited=3.0, **more)


@pytest.mark.parametrize("act", PriorityAct)
def test_acts_because_of_a_priority_are_explained_and_listed(act):
    came = record(ranked=[ranked(act, gain=2.0, loss=0.5)])
    (said,) = (line for line in sentences(came) if line.startswith(RANKED[act][:8]))
    assert "gain 2.00 s, loss 0.50 s" in said
    assert "2:other" not in said
    listed = {"act": act.value, "other": "other", "waited_seconds": 3.0}
    assert detail(came)["priority_acts"] == [{**listed, "gain_seconds": 2.0, "loss_seconds": 0.5}]


def test_equal_acts_in_a_row_are_explained_once():
    came = record(ranked=[ranked(PriorityAct.GAVE_WAY)] * 3 + [ranked(PriorityAct.AGED)])
    (said,) = (line for line in sentences(came) if "paused" in line)
    assert "the last of 3 times" in said


def test_the_priority_header_hides_acts_that_concern_other_namespaces():
    assert record().urgency(namespaced=False) == ""
    came = record(priority=Priority.LOW, ranked=[ranked(PriorityAct.GAVE_WAY)] * 2)
    assert came.urgency(namespaced=False) == "low; gave_way"
    assert came.urgency(namespaced=True) == "low"


# -- the queue -----------------------------------------------------------------------------------------


def test_a_request_that_waited_says_for_what_and_behind_whom_after_its_end():
    came = spent(queue=15.9, prefill=1.0)
    came.seconds = 16.9
    came.queued[Wait.TOKENS] = QueueWait(seconds=0.3)  # part of reading it
    came.queued[Wait.LOOK] = QueueWait(seconds=0.2)
    came.queued[Wait.SLOTS] = QueueWait(seconds=15.7, behind=dict.fromkeys(("a-1", "b-2", "c-3", "d-4")))
    busy = "all slots are busy (a-1, b-2, c-3 and 1 more)"
    assert f"In the queue: {busy}, 15.7 s; GET /slots has to show which slots are free, 200 ms." in sentences(
        came
    )
    assert verdict(came).endswith(f"waited 15.9 s in the queue for a slot: {busy}")
    listed = {"wait": "slots", "text": busy, "seconds": 15.7, "behind": ["a-1", "b-2", "c-3", "d-4"]}
    assert detail(came)["queued"][2] == listed


def test_the_number_of_kept_ids_is_bounded():
    queued = QueueWait()
    for number in range(3 * MOST_BEHIND):
        queued.sees([f"r{number}", "again"])
    assert len(queued.behind) == MOST_BEHIND


# -- time ------------------------------------------------------------------------------------------------


def spent(**seconds: float) -> Record:
    """Return the record of an answered request that spent so many seconds in each stage, in this order."""
    came, at = answered(oracle=1100, first_token=sum(seconds.values())), 1000.0
    for stage, took in seconds.items():
        came.add(RequestStage(stage), at, at + took)
        at += took
    came.doing = None
    return came


def test_what_a_request_waited_for_is_said_longest_first():
    text = said(spent(parse=0.02, queue=11.0, restore=0.3, forward=1.5))
    assert (
        "It waited 12.8 s for its first token: 11.0 s in the queue for a slot, 1.5 s in prefill, "
        "300 ms restoring a snapshot, 20 ms reading it and counting its tokens."
    ) in text


def test_a_long_wait_in_a_full_queue_is_not_just_nothing_twice():
    assert verdict(spent(queue=7.0, forward=1.0)) == "nothing twice; waited 7.0 s in the queue for a slot"
    assert verdict(spent(engine=9.0, forward=1.0)) == "nothing twice; waited 9.0 s until an engine was up"
    assert verdict(spent(queue=0.2, forward=9.0)) == "nothing twice"
    assert set(SPENT_TEXTS) == set(Spent)
