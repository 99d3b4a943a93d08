"""The hourly budget of writes."""

from math import inf

import pytest

from slotkeeper.scheduler.snapshots.budgets import HourlyBudget


def test_the_budget_of_an_hour_may_be_spent_at_once_and_then_refills():
    budget = HourlyBudget(3600, left=3600, at=0.0)
    assert budget.spend(3600, 0.0)
    assert not budget.spend(1, 0.5)
    assert budget.spend(100, 100.5)


@pytest.mark.parametrize(("size", "seconds"), [(0, 0.0), (3600, 3600.0), (3601, inf), (100, 100.0)])
def test_the_hourly_budget_says_how_long_a_write_must_wait(size, seconds):
    budget = HourlyBudget(3600, left=0.0, at=50.0)
    assert budget.wait(size, 50.0) == seconds


def test_without_a_budget_no_write_is_allowed():
    assert HourlyBudget(0, left=0.0, at=0.0).wait(1, 10_000.0) == inf
