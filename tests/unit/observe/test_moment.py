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


REPORTED, SILENT = so_far(2000), Work(begun=0.0)
PLANTED, PLANTING = so_far(3000, reused=2500, planted=1500), Work(begun=0.0, planted=500, planting=500)


@pytest.mark.parametrize(
    ("work", "now", "shown"),  # shown: tokens computed, percent, seconds left, whether estimated
    [
        pytest.param(REPORTED, 10.0, (1000, 25, 6.0, False), id="reported"),
        pytest.param(REPORTED, 14.0, (1000, 25, 2.0, False), id="less time left, between two reports"),
        pytest.param(REPORTED, 99.0, (1000, 25, None, False), id="longer than estimated"),
        pytest.param(so_far(5000), 10.0, (4000, MOST, None, False), id="all is computed"),
        pytest.param(PLANTED, 10.0, (2000, 50, 8.0, False), id="planted tokens count as computed"),
        pytest.param(so_far(1000, seconds=0.0), 10.0, (0, 0, None, False), id="no time of prefill yet"),
        pytest.param(PLANTING, 1.0, (1000, 25, 30.0, False), id="a plant at work"),
        pytest.param(SILENT, 10.0, (1000, 25, 30.0, True), id="nothing reported"),
        pytest.param(
            SILENT, 10_000.0, (4000, None, None, True), id="nothing reported, longer than estimated"
        ),
    ],
)
def test_progress_is_the_engines_or_else_estimated(work, now, shown):
    moment = prefilling(record(), work, 5000, now=now)
    assert (moment.doing, moment.to_compute) == (Doing.PREFILL, 4000)
    seen = (moment.computed, moment.percent, moment.seconds_left, moment.estimated)
    assert seen == tuple(pytest.approx(one) if isinstance(one, float) else one for one in shown)


@pytest.mark.parametrize(
    ("work", "now", "text"),
    [
        (SILENT, 10_000.0, "prefill, longer than estimated"),
        (so_far(5000), 10.0, "prefill done, first token not sampled yet"),
    ],
)
def test_a_prefill_without_a_remaining_time_says_why(work, now, text):
    assert request_text(prefilling(record(), work, 5000, now=now)) == text


def test_a_rate_that_was_never_measured_gives_no_estimate():
    guessed = record()
    assert guessed.decision is not None
    guessed.decision = replace(guessed.decision, measured=False)
    moment = prefilling(guessed, SILENT, 5000, now=1.0)
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


@pytest.mark.parametrize(
    ("prompt", "known"),
    [(None, {"reuse": 10}), (500, {"reuse": None}), (5000, {"rate": 0.0})],
    ids=["prompt", "reuse", "speed"],
)
def test_without_a_known_prompt_or_reuse_or_speed_there_is_no_progress(prompt, known):
    moment = prefilling(record(**known), SILENT, prompt, now=10.0)
    assert (moment.percent, moment.seconds_left) == (None, None)
