"""What the journal records of real placements."""

from dataclasses import replace

import pytest

from playbooks.playbook import (
    NEW_FILES,
    STEP,
    arrives,
    ends,
    engine_lost,
    engine_up,
    erased,
    erases,
    filled,
    goes,
    knows,
    lists,
    loads,
    plants,
    proves,
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
)
from slotkeeper.observe.request_record import Record, RequestStage
from slotkeeper.observe.states import Spent
from slotkeeper.scheduler.effects import Purpose, SaveMoment
from slotkeeper.scheduler.prompts.tokens import Boundary, BoundaryKind, Tokens
from slotkeeper.scheduler.rates import LinearTimes
from slotkeeper.scheduler.requests.figures import Loss, Lost
from slotkeeper.scheduler.requests.pending import Wait
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.scheduler.types import Loading, Reason, RequestId
from unit.observe.watched import WatchedPlay, record, stages, without_gaps

HEAD = Tokens(range(10_000, 11_000))
ASKS = [Tokens(range(n, n + 1000)) for n in (30_000, 40_000)]
A, B = (HEAD + ask for ask in ASKS)
X = Tokens(range(70_000, 72_000))
Y = Tokens(range(80_000, 82_000))
MORE = Tokens(range(100))
AT_HEAD = Boundary(1000, BoundaryKind.HEAD)


@pytest.fixture
def play() -> WatchedPlay:
    return WatchedPlay(memory="dense")


# -- the stages of a request -----------------------------------------------------------------------------


def test_a_record_has_a_span_for_each_stage_of_a_request(play):
    came = play.comes("r1")
    assert play << knows("r1", A) >> goes("r1", slot=0)
    came.first_token = play.clock + 0.02 - came.at
    assert play << starts("r1")
    assert play.later(1) << ends("r1", 2000, 0, generated=7) >> reports("r1")
    assert stages(came) == [
        RequestStage.QUEUE,
        RequestStage.DECIDE,
        RequestStage.FORWARD,
        RequestStage.PREFILL,
        RequestStage.GENERATE,
    ]
    assert without_gaps(came)
    assert came.spans[-1].tokens == 7
    assert came.spans[-1].end > 1
    assert (came.engine, came.slot) == ("e0", 0)


def test_the_figures_of_the_engine_are_recorded(play):
    first = play.comes("r1")
    assert play << knows("r1", A) >> goes("r1") << ends("r1", 2000, 0, prefill_seconds=2.0) >> reports("r1")
    assert (first.predicted, first.oracle, first.usage.planted, first.lost) == (0, 2000, 0, None)
    again = play.comes("r2", id_slot=1)
    assert play >> goes("r2", slot=1) << knows("r2", A)
    assert play << ends("r2", 2000, 0) >> reports("r2")
    assert (again.predicted, again.oracle, again.lost) == (0, 1, Lost(Loss.UNPLACED, 1999))
    third = play.comes("r3")
    assert play << knows("r3", A) >> goes("r3") << ends("r3", 2000, 1999) >> reports("r3")
    assert third.saved_seconds == pytest.approx(1.999)


def test_prefill_and_generation_are_separated_by_the_engine_figure_if_all_came_at_once(play):
    came = play.comes("r1")
    assert play << knows("r1", A) >> goes("r1")
    assert play.later(4) << starts("r1") << ends("r1", 2000, 0, prefill_seconds=3.0) >> reports("r1")
    spans = {span.stage: span.end - span.begin for span in came.spans}
    assert spans[RequestStage.PREFILL] == pytest.approx(3.0)
    assert 0.9 < spans[RequestStage.GENERATE] < 1.1
    assert without_gaps(came)


def test_an_impossible_prefill_time_does_not_extend_beyond_the_end(play):
    came = play.comes("r1")
    assert play << knows("r1", A) >> goes("r1")
    assert play << starts("r1") << ends("r1", 2000, 0, prefill_seconds=1e9) >> reports("r1")
    assert max(span.end for span in came.spans) == pytest.approx(play.clock - came.at)
    assert without_gaps(came)


def test_a_request_that_was_read_at_once_was_read_all_the_same(play):
    came = record("r1", at=play.clock + STEP - 0.001)  # it arrives after one step
    play.journal.arrived(came)
    play.journal.follow(RequestId("r1"), came)
    _ = play << arrives("r1")
    assert [(span.stage, span.begin) for span in came.spans] == [(RequestStage.PARSE, 0.0)]


def test_what_a_request_waited_for_and_behind_whom_is_known_after_its_end(play):
    play.fills_both_slots(A, X)
    third = play.comes("r3")
    assert play << knows("r3", B)
    fourth = play.comes("r4")
    assert play << knows("r4", Y)
    assert third.spans == []
    assert (stage_of(third), stage_of(fourth)) == (Spent.QUEUE, Spent.QUEUE)
    assert spent_of(third, play.clock + 9)[Spent.QUEUE] == pytest.approx(9, abs=0.1), "its wait so far"
    assert play.later(5) << ends("r1", 2000, 0) >> reports("r1") >> goes("r3", slot=0)
    assert play << starts("r3")
    assert play.later(3) << ends("r2", 2000, 0) >> reports("r2") >> goes("r4", slot=1)
    assert play << ends("r3", 2000, 0) >> reports("r3")
    queue = next(span for span in third.spans if span.stage is RequestStage.QUEUE)
    assert queue.end - queue.begin > 5
    waited = third.queued[Wait.SLOTS]
    assert (5 < waited.seconds < 5.5, [*waited.behind]) == (True, ["r1", "r2"])
    waited = fourth.queued[Wait.SLOTS]
    assert 8 < waited.seconds < 8.5
    assert [*waited.behind] == ["r1", "r2", "r3"], "r3 took the slot of r1 before it"


# -- the least that it can have waited -------------------------------------------------------------------


def answered(play: WatchedPlay, number: int, *, tokens: int = 0) -> Record:
    """Return the record of a request with a new prompt, whose prefill takes 0.5 s and 1 ms a token."""
    request, tokens = f"r{number}", tokens or 200 * number
    came = play.comes(request)
    assert play << knows(request, Tokens(range(number * 10_000, number * 10_000 + tokens))) >> goes(request)
    came.first_token = 5.0
    took = 0.5 + 0.001 * tokens
    assert play << starts(request) << ends(request, tokens, prefill_seconds=took) >> reports(request)
    return came


def test_the_least_wait_is_known_once_prefills_have_told_the_engines_speed(play):
    compared = []
    play.journal.compares = lambda waited, least: compared.append((waited, least))
    records = [answered(play, number) for number in range(1, 8)]
    assert [one.least_seconds for one in records[:5]] == [None] * 5
    assert records[6].least_seconds == pytest.approx(0.5 + 1.4, rel=0.02)
    assert compared == [(5.0, one.least_seconds) for one in records[5:]]


def test_a_prefill_beside_another_request_does_not_tell_the_engines_speed(play):
    other = play.comes("other")
    assert play << knows("other", X) >> goes("other") << starts("other")
    assert all(answered(play, number).least_seconds is None for number in range(1, 9))
    assert play << ends("other", 2000, 0, prefill_seconds=9.0) >> reports("other")
    assert other.least_seconds is None
    alone = [answered(play, number, tokens=200 * (number - 8)) for number in range(9, 15)]
    assert [one.least_seconds is None for one in alone] == [True] * 5 + [False]


# -- on what its time was spent --------------------------------------------------------------------------


def stage_of(came: Record) -> Spent | None:
    return came.stage


def spent_of(came, now=None):
    """Return the seconds of each stage, and check that together they are the whole time."""
    end = max((span.end for span in came.spans), default=0.0) + came.at if now is None else now
    seconds = came.spent(end)
    assert sum(seconds.values()) == pytest.approx(end - came.at, abs=1e-6)
    return seconds


def with_quick_disk(n_slots: int) -> WatchedPlay:
    """A new head is saved at once, although no other prompt is known to begin with it."""
    play = WatchedPlay(n_slots=n_slots, eager_thinning=False, **NEW_FILES)
    play.table.rates.writing = LinearTimes(1e12)
    return play


def test_a_restore_is_a_stage_of_its_own_and_the_present_stage_counts_while_it_runs():
    play = WatchedPlay(n_slots=1, **NEW_FILES)
    assert play << snapshots_changed(snapshot("a", A, checkpoints=(1484, 1996)))
    came = play.comes("r1")
    assert play << knows("r1", A + X) >> restores(0, "a")
    assert stage_of(came) is Spent.RESTORE
    assert spent_of(came, play.clock + 3)[Spent.RESTORE] == pytest.approx(3, abs=0.1)
    assert play.later(4) << restored() >> goes("r1", reason=Reason.SNAPSHOT)
    assert stage_of(came) is Spent.PREFILL
    assert spent_of(came, play.clock + 5)[Spent.PREFILL] == pytest.approx(5, abs=0.1)
    came.first_token = play.clock + 5 - came.at
    assert stage_of(came) is Spent.ANSWER
    seconds = spent_of(came, play.clock + 8)
    assert seconds[Spent.RESTORE] == pytest.approx(4, abs=0.1)
    assert (seconds[Spent.PREFILL], seconds[Spent.ANSWER]) == pytest.approx((5, 3), abs=0.1)


def test_finding_the_tokens_of_a_prompt_is_no_wait_for_a_slot(play):
    came = play.comes("r1")
    play.later(2)
    came.add(RequestStage.RENDER, came.at, play.clock)
    assert play << knows("r1", A) >> goes("r1", slot=0)
    seconds = spent_of(came)
    assert seconds[Spent.READ] == pytest.approx(2, abs=0.1)
    assert seconds[Spent.QUEUE] < 0.1


def test_waiting_for_a_model_that_its_router_loads_is_no_wait_for_a_slot():
    play = WatchedPlay(memory="dense", up=False, **NEW_FILES)
    assert play << lists(most=1)
    came = play.comes("r1", model="a")
    assert play >> loads("a")
    assert stage_of(came) is Spent.SWAP
    assert play.later(30) << lists("a")
    assert play << engine_up("a", model="a") << sees(engine="a")
    assert stage_of(came) is Spent.QUEUE
    assert play << knows("r1", A) >> goes("r1", engine="a", slot=0)
    seconds = spent_of(came)
    assert seconds[Spent.SWAP] == pytest.approx(30, abs=0.1)
    assert seconds[Spent.QUEUE] < 0.1


def test_waiting_for_an_engine_that_is_lost_is_no_wait_for_a_slot():
    play = WatchedPlay(n_slots=1, memory="dense")
    play.comes("r1")
    assert play << knows("r1", A) >> goes("r1")
    came = play.comes("r2")
    assert play << knows("r2", X)
    assert play.later(3) << replace(engine_lost(), returns=True)
    assert play.later(20) << engine_up()
    seconds = spent_of(came, play.clock)
    assert (seconds[Spent.QUEUE], seconds[Spent.ENGINE]) == pytest.approx((3, 20), abs=0.1)


# -- steps -----------------------------------------------------------------------------------------------


def test_a_plant_and_a_save_are_spans_of_their_own_and_no_wait_in_the_queue():
    play = with_quick_disk(n_slots=2)
    came = play.comes("r1")
    assert play << knows("r1", A, AT_HEAD) >> plants("r1", 0, Purpose.PLANT)
    assert play.later(40) << filled(1004) >> saves(0, SaveMoment.BOUNDARY)
    assert play.later(7) << saved("head", checkpoints=(488, 1000)) >> goes("r1", slot=0)
    assert play.later(20) << ends("r1", 2000, 1000, prefill_seconds=15.0) >> reports("r1")
    taken = [RequestStage.QUEUE, RequestStage.DECIDE, RequestStage.PLANT, RequestStage.SAVE]
    assert stages(came) == [*taken, RequestStage.FORWARD, RequestStage.PREFILL, RequestStage.GENERATE]
    assert without_gaps(came)
    spans = {span.stage: span for span in came.spans}
    assert (spans[RequestStage.PLANT].tokens, spans[RequestStage.PLANT].note) == (1004, "plant")
    assert (spans[RequestStage.SAVE].tokens, spans[RequestStage.SAVE].note) == (1004, "boundary")
    assert came.decision.chosen.steps == ("plant", "boundary")
    assert came.usage.planted == 1004
    seconds = spent_of(came)
    assert seconds.pop(Spent.QUEUE) < 0.1
    expected = {Spent.PREPARE: 47, Spent.PREFILL: 15, Spent.ANSWER: 5}
    assert seconds == pytest.approx(expected, abs=0.1)


def test_a_record_shows_the_parked_slot_and_the_restored_snapshot_which_have_owners():
    """A snapshot belongs to the conversation in the slot, or to the first one that restores it."""
    play = WatchedPlay(n_slots=1, **NEW_FILES)
    lay = play.comes("r0")
    assert play << snapshots_changed(snapshot("a", A, checkpoints=(1484, 1996)))
    assert play << knows("r0", X) >> goes("r0") << ends("r0", 2000, 0) >> reports("r0")
    came = play.comes("r1")
    assert play << knows("r1", A + X) >> saves(0, SaveMoment.PARK)
    assert play.journal.owners.of(SnapshotId("x")) is None
    assert play << saved("x") >> restores(0, "a") << restored() >> goes("r1", reason=Reason.SNAPSHOT)
    assert stages(came) == [RequestStage.QUEUE, RequestStage.DECIDE, RequestStage.SAVE, RequestStage.RESTORE]
    assert without_gaps(came)
    assert (came.spans[-1].tokens, came.spans[-1].note) == (2000, "a")
    assert came.decision.chosen.steps == ("park", "restore")
    assert (came.decision.held, came.decision.common) == (2000, 2000)
    assert play.journal.owners.of(SnapshotId("x")) is lay.name
    assert play.journal.owners.of(SnapshotId("a")) is came.name


def test_a_record_of_a_running_prefill_has_its_start_and_its_planted_tokens():
    play = WatchedPlay(n_slots=1, eager_thinning=False)
    came = play.comes("r1")
    assert play << knows("r1", A, AT_HEAD) >> plants("r1", 0, Purpose.PLANT)
    began = came.work.begun
    play.journal.planting(RequestId("r1"), 300)
    play.journal.planting(RequestId("nobody"), 300)
    assert (came.work.planted, came.work.planting) == (0, 300)
    assert play.later(2) << filled(1004) >> goes("r1", reason=Reason.COLD)
    assert (came.work.begun, came.work.planting) == (began, 0)
    assert came.work.planted == 1004
    assert list(play.journal.running()) == [came]


def test_a_record_shows_that_the_slot_was_erased_first():
    window = {"n_swa": 512, "swa_full": True, "n_slots": 1, "state_version": 2, "files_carry": False}
    play = WatchedPlay(memory="swa", **NEW_FILES | window)
    long, other = (Tokens(range(n, n + 5000)) for n in (10_000, 30_000))
    assert play << snapshots_changed(snapshot("s1", long))
    play.comes("r1")
    assert play << knows("r1", long + MORE) >> restores(0, "s1") << restored() >> goes("r1")
    assert play << ends("r1", 5100, 5000) >> proves("s1", paid=True) >> reports("r1")
    came = play.comes("r2")
    assert play << knows("r2", long.cut(0, 4800) + other) >> erases(0)
    play << erased() >> plants("r2", 0, Purpose.PLANT)
    erasing = next(span for span in came.spans if span.stage is RequestStage.ERASE)
    assert (erasing.tokens, erasing.note) == (None, "")
    assert came.decision.chosen.steps[0] == "erase"


def test_a_request_whose_step_failed_is_placed_again_and_both_decisions_are_recorded():
    play = WatchedPlay(n_slots=1, **NEW_FILES)
    assert play << snapshots_changed(snapshot("a", A, checkpoints=(1484, 1996)))
    came = play.comes("r1")
    assert play << knows("r1", A + X) >> restores(0, "a")
    first = came.decision.chosen
    assert first.reason is Reason.SNAPSHOT
    assert play.later(2) << restored(Loading.REFUSED) >> goes("r1", reason=Reason.COLD)
    assert came.decision.chosen.reason is Reason.COLD
    assert came.decision.chosen.steps == ()
    again = [RequestStage.QUEUE, RequestStage.DECIDE]
    assert stages(came) == [*again, RequestStage.RESTORE, *again]
    assert without_gaps(came)


def test_a_failed_save_does_not_change_the_decision():
    play = with_quick_disk(n_slots=1)
    came = play.comes("r1")
    assert play << knows("r1", A, AT_HEAD) >> plants("r1", 0, Purpose.PLANT)
    assert play << filled(1004) >> saves(0, SaveMoment.BOUNDARY) << unsaved() >> goes("r1", slot=0)
    assert stages(came).count(RequestStage.DECIDE) == 1


# -- decisions -------------------------------------------------------------------------------------------


def test_a_decision_records_the_chosen_slot_and_its_alternatives(play):
    play.comes("r1")
    assert play << knows("r1", A) >> goes("r1", slot=0) << ends("r1", 2000, 0) >> reports("r1")
    came = play.comes("r2")
    assert play << knows("r2", B) >> goes("r2", slot=0)
    decision = came.decision
    assert (decision.chosen.reason, decision.chosen.slot, decision.chosen.reuse) == (Reason.PREFIX, 0, 1000)
    assert [option.slot for option in decision.beaten[:2]].count(1)
    prices = [decision.chosen.price, *(option.price for option in decision.beaten)]
    assert prices == sorted(prices)
    assert (decision.held, decision.common) == (2000, 1000)
    assert decision.rate > 0


def test_a_request_placed_by_its_messages_gets_its_common_prefix_when_it_is_tokenized(play):
    mine, next_turn = (b"h", b"u1"), (b"h", b"u1", b"a1", b"u2")
    play.comes("r1", hash_chain=mine)
    assert play << knows("r1", A) >> goes("r1") << ends("r1", 2000, 0) >> reports("r1")
    came = play.comes("r2", hash_chain=next_turn)
    assert play >> goes("r2", slot=0, reason=Reason.CONTINUES)
    assert (came.decision.chosen.reason, came.decision.common) == (Reason.CONTINUES, None)
    assert play << knows("r2", A + X)
    assert came.decision.common == 2000


def test_a_slot_that_is_observed_later_is_recorded_with_the_report(play):
    came = play.comes("r1", bypass=True)
    assert play >> unpinned("r1", Reason.BYPASS) << sees(1)
    assert came.slot is None
    assert play << knows("r1", A) << ends("r1", 2000, 0) >> reports("r1", slot=1)
    assert (came.slot, came.decision.chosen.reason) == (1, Reason.BYPASS)
