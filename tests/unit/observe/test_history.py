"""Sums since the start, and the last half hour in steps of ten seconds."""

from __future__ import annotations

from dataclasses import fields

import pytest

from slotkeeper.observe.request_record import BUCKET, BUCKETS, History
from slotkeeper.scheduler.requests.figures import Sums

START = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(clock) -> History:
    return History(clock)


def test_at_first_all_sums_are_zero_and_the_history_is_empty(history):
    assert history.totals.shown().pop("unknown") == {}
    assert {value for value in history.totals.shown().values() if value != {}} == {0, None}
    assert list(history.shown()) == []


def test_every_figure_is_added_up(history):
    names = [field.name for field in fields(Sums) if field.name != "unknown"]
    for factor in (1, 10):
        history.add(**{name: factor * n for n, name in enumerate(names, start=1)})
    totals = history.totals.shown()
    assert {name: totals[name] for name in names} == {name: 11 * n for n, name in enumerate(names, start=1)}
    (bucket,) = history.shown()
    assert {name: bucket[name] for name in totals} == totals


def test_steps_begin_at_full_ten_seconds_and_empty_ones_are_left_out(history, clock):
    for seconds in (3.0, 9.9, 10.0, 45.0):
        clock.now = START + seconds
        history.add(requests=1)
    assert [(b["at"] - START, b["requests"]) for b in history.shown()] == [(0, 2), (10, 1), (40, 1)]


def test_buckets_older_than_half_an_hour_are_not_shown_but_still_counted(history, clock):
    history.add(computed=5)
    clock.now += BUCKET * BUCKETS
    assert len(list(history.shown())) == 1
    clock.now += 1
    assert list(history.shown()) == []
    assert history.totals.computed == 5


def test_the_history_keeps_at_most_half_an_hour_of_buckets(history, clock):
    for _ in range(3 * BUCKETS):
        history.add(requests=1)
        clock.now += BUCKET
    shown = list(history.shown())
    assert BUCKETS - 1 <= len(shown) <= BUCKETS
    assert [b["at"] for b in shown] == sorted({b["at"] for b in shown})
    assert history.totals.requests == 3 * BUCKETS


def test_a_clock_that_is_set_back_does_not_mix_up_the_buckets(history, clock):
    history.add(requests=1)
    clock.now -= 3600
    history.add(requests=1)
    clock.now += 3600 + BUCKET
    history.add(requests=1)
    assert [(b["at"] - START, b["requests"]) for b in history.shown()] == [(0, 2), (10, 1)]


def test_seconds_are_rounded_only_when_they_are_shown(history):
    for _ in range(10):
        history.add(reused_seconds=0.00012)
    assert history.totals.shown()["saved_seconds"] == 0.001
    assert history.totals.saved_seconds == pytest.approx(0.0012)


def test_shown_figures_do_not_change_later(history):
    history.add(requests=1)
    shown, totals = list(history.shown()), history.totals.shown()
    history.add(requests=1)
    assert (shown[0]["requests"], totals["requests"]) == (1, 1)
