"""What the journal records of requests that fail, are sent again, or leave."""

import pytest

from playbooks.playbook import (
    NEW_FILES,
    arrives,
    ends,
    engine_lost,
    goes,
    knows,
    leaves,
    reports,
    restored,
    restores,
    sees,
    snapshot,
    snapshots_changed,
    starts,
    unpinned,
)
from slotkeeper.observe.request_record import RequestStage
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.pending import Wait
from slotkeeper.scheduler.slots.table import LINGER
from slotkeeper.scheduler.types import EngineId, Reason, RequestId
from unit.observe.watched import WatchedPlay, stages, without_gaps

A, X = (Tokens(range(n, n + 2000)) for n in (10_000, 70_000))


@pytest.fixture
def play() -> WatchedPlay:
    return WatchedPlay(memory="dense")


# -- failures ----------------------------------------------------------------------------------------------


def test_a_request_without_an_engine_fails_open_and_is_not_followed_further():
    play = WatchedPlay()
    assert play << engine_lost()
    came = play.comes("r1")
    assert play >> unpinned("r1", Reason.NO_ENGINE)
    assert play << knows("r1", A) << ends("r1", 2000, 0) >> reports("r1", usage__computed=2000)
    assert came.decision.chosen.reason is Reason.NO_ENGINE
    assert stages(came) == [
        RequestStage.ENGINE,
        RequestStage.FORWARD,
        RequestStage.PREFILL,
        RequestStage.GENERATE,
    ]
    assert repr(play.journal) == "<Journal 1 requests, 0 under way>"


def test_a_request_that_fails_open_is_recorded_as_such_whatever_was_decided_before():
    """The scheduler fails while a file is being restored, and is replaced."""
    play = WatchedPlay(n_slots=1, **NEW_FILES)
    assert play << snapshots_changed(snapshot("a", A, checkpoints=(1484, 1996)))
    came = play.comes("r1")
    assert play << knows("r1", A + X) >> restores(0, "a")
    through = Forward(request=RequestId("r1"), engine=EngineId("e0"), slot=None, reason=Reason.NO_ENGINE)
    play.journal.saw(arrives("r2"), [through], play.clock + 1, play.clock + 1, lambda _: None)
    assert came.decision.chosen.reason is Reason.NO_ENGINE
    assert stages(came) == [RequestStage.QUEUE, RequestStage.DECIDE, RequestStage.RESTORE]
    play.later(2)
    play.journal.saw(ends("r1"), [], play.clock, play.clock, lambda _: None)
    assert repr(play.journal) == "<Journal 1 requests, 0 under way>"


@pytest.mark.parametrize("then", ["known", "unknown"])
def test_a_request_whose_tokens_come_after_its_answer_is_followed_until_its_report(play, then):
    came = play.comes("r1", brief=True)
    assert play >> goes("r1", reason=Reason.BRIEF) << ends("r1", 40, 0)
    assert came.oracle is None
    assert play << knows("r1", A.cut(0, 40) if then == "known" else None) >> reports("r1")
    assert came.oracle == (40 if then == "known" else None)
    assert repr(play.journal) == "<Journal 1 requests, 0 under way>"


# -- clients that leave ------------------------------------------------------------------------------------


def test_a_request_that_leaves_the_queue_has_a_span_for_its_wait(play):
    play.fills_both_slots(A, X)
    third = play.comes("r3")
    assert play << knows("r3", A + X)
    assert play.later(3) << leaves("r3")
    assert stages(third) == [RequestStage.QUEUE]
    assert third.spans[0].end > 3
    assert third.queued[Wait.SLOTS].seconds > 3
    assert third.decision is None


def test_a_request_that_leaves_during_a_step_has_a_span_for_the_step():
    play = WatchedPlay(n_slots=1, **NEW_FILES)
    assert play << snapshots_changed(snapshot("a", A, checkpoints=(1484, 1996)))
    came = play.comes("r1")
    assert play << knows("r1", A + X) >> restores(0, "a")
    assert play.later(3) << leaves("r1")
    assert stages(came) == [RequestStage.QUEUE, RequestStage.DECIDE, RequestStage.RESTORE]
    before = list(came.spans)
    assert play << restored()
    assert came.spans == before


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_that_leaves_during_its_prefill_has_no_generation_span(play, begun):
    came = play.comes("r1")
    assert play << knows("r1", A) >> goes("r1")
    if begun:
        assert play << starts("r1")
    assert play.later(3) << leaves("r1")
    waited = max(came.spans, key=lambda span: span.end - span.begin)
    assert waited.stage is (RequestStage.PREFILL if begun else RequestStage.FORWARD)
    assert without_gaps(came)
    assert repr(play.journal) == "<Journal 1 requests, 0 under way>"


def test_a_request_that_leaves_during_its_answer_has_prefill_and_generation_spans(play):
    came = play.comes("r1")
    assert play << knows("r1", A) >> goes("r1") << starts("r1")
    came.first_token = play.clock + 1 - came.at
    assert play.later(3) << leaves("r1")
    spans = {span.stage: span.end - span.begin for span in came.spans}
    assert spans[RequestStage.PREFILL] == pytest.approx(1)
    assert spans[RequestStage.GENERATE] > 1.9


def test_a_request_that_is_sent_again_continues_its_record(play):
    came = play.comes("r1")
    assert play << knows("r1", A) >> goes("r1", slot=0) << leaves("r1")
    assert play.later(LINGER) << sees()
    play.journal.follow(RequestId("again"), came)
    assert play << arrives("again", id_slot=1) << knows("again", A) >> goes("again", slot=1)
    assert play << ends("again", 2000, 0) >> reports("again")
    assert (came.slot, came.oracle) == (1, 2000)
    assert came.decision.chosen.reason is Reason.CLIENT_CHOSE
    assert stages(came).count(RequestStage.DECIDE) == 2
