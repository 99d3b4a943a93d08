"""Progress of a running request: by the engine's own figures if it sends them, else by the learned rate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slotkeeper.api.answers.answer import Progress
from slotkeeper.observe.request_record import (
    SPENT_ON,
    Decision,
    Option,
    Record,
    RequestStage,
    Work,
    moment,
    prefilling,
)
from slotkeeper.observe.states import DOING, MOST, Doing, request_text
from slotkeeper.scheduler.types import Reason

PREFILLS = (RequestStage.FORWARD, RequestStage.PREFILL)


def record(reuse: int | None = 1000, rate: float = 100.0) -> Record:
    chosen = Option(reason=Reason.PREFIX, engine="e", slot=0, reuse=reuse, price=0.0)
    return Record(
        request_id="r", route="chat", received=0.0, at=0.0, decision=Decision(chosen=chosen, rate=rate)
    )


def so_far(processed: int, *, reused: int = 1000, seconds: float = 2.0, planted: int = 0) -> Work:
    progress = Progress(total=5000, reused=reused, processed=processed, seconds=seconds)
    return Work(begun=0.0, planted=planted, progress=progress, progress_at=10.0)


def test_progress_of_the_engine_is_shown_unchanged():
    moment = prefilling(record(), so_far(2000), 5000, now=10.0)
    assert (moment.doing, moment.computed, moment.to_compute, moment.percent) == (
        Doing.PREFILL,
        1000,
        4000,
        25,
    )
    assert moment.seconds_left == pytest.approx(6.0)
    assert not moment.estimated


def test_the_remaining_time_decreases_between_two_progress_events():
    assert prefilling(record(), so_far(2000), 5000, now=14.0).seconds_left == pytest.approx(2.0)


def test_an_exceeded_estimate_leaves_no_remaining_time_instead_of_zero():
    assert prefilling(record(), so_far(2000), 5000, now=99.0).seconds_left is None
    moment = prefilling(record(), Work(begun=0.0), 5000, now=10_000.0)
    assert (moment.percent, moment.seconds_left) == (None, None)
    assert request_text(moment) == "prefill, longer than estimated"


def test_a_computed_prompt_waits_for_its_first_token():
    moment = prefilling(record(), so_far(5000), 5000, now=10.0)
    assert (moment.percent, moment.seconds_left) == (MOST, None)
    assert request_text(moment) == "prefill done, first token not sampled yet"


def test_tokens_planted_for_the_request_count_as_computed_and_not_as_reused():
    moment = prefilling(record(), so_far(3000, reused=2500, planted=1500), 5000, now=10.0)
    assert (moment.computed, moment.to_compute) == (2000, 4000)


def test_without_elapsed_prefill_time_there_is_no_remaining_time():
    moment = prefilling(record(), so_far(1000, seconds=0.0), 5000, now=10.0)
    assert (moment.percent, moment.seconds_left) == (0, None)


def test_a_running_plant_shows_its_progress():
    moment = prefilling(record(), Work(begun=0.0, planted=500, planting=500), 5000, now=1.0)
    assert (moment.computed, moment.to_compute, moment.percent, moment.estimated) == (1000, 4000, 25, False)
    assert moment.seconds_left == pytest.approx(30.0)


def test_progress_is_estimated_if_the_engine_reports_none():
    moment = prefilling(record(), Work(begun=0.0), 5000, now=10.0)
    assert (moment.computed, moment.to_compute, moment.percent, moment.estimated) == (1000, 4000, 25, True)
    assert moment.seconds_left == pytest.approx(30.0)


def test_a_rate_that_was_never_measured_gives_no_estimate():
    guessed = record()
    assert guessed.decision is not None
    guessed.decision = replace(guessed.decision, measured=False)
    moment = prefilling(guessed, Work(begun=0.0), 5000, now=1.0)
    assert (moment.percent, moment.seconds_left, moment.to_compute) == (None, None, 4000)
    planting = prefilling(guessed, Work(begun=0.0, planting=1000), 5000, now=1.0)
    assert (planting.percent, planting.seconds_left) == (25, None)


@pytest.mark.parametrize("stage", SPENT_ON)
def test_what_a_request_does_follows_from_its_stage(stage):
    came = record()
    came.doing, came.work = stage, Work(begun=0.0, planting=1000)
    found = moment(came, 5000, now=1.0)
    assert came.stage is not None
    assert found.doing is DOING[came.stage]
    assert (found.percent is not None) == (stage in {RequestStage.PLANT, *PREFILLS})
    assert (found.step is not None) == (found.doing is Doing.PREPARING)


@pytest.mark.parametrize(("prompt", "reuse"), [(None, 10), (500, None)])
def test_without_a_known_prompt_or_reuse_there_is_no_progress(prompt, reuse):
    moment = prefilling(record(reuse), Work(begun=0.0), prompt, now=10.0)
    assert (moment.percent, moment.seconds_left) == (None, None)


def test_an_engine_of_unknown_speed_gives_no_remaining_time():
    moment = prefilling(record(rate=0.0), Work(begun=0.0), 5000, now=10.0)
    assert (moment.percent, moment.seconds_left) == (None, None)
