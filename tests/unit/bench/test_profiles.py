"""Workloads on simulated engines of real proportions, beside the stock engine."""

import pytest
from benchmarks.engine_profiles import PROFILES
from benchmarks.profile_work import WORK
from benchmarks.profiles import compared


@pytest.mark.parametrize("work", WORK)
def test_both_legs_serve_the_same_requests_and_the_same_seed_gives_the_same_figures(work):
    once, again = (compared(PROFILES[0], work) for _ in range(2))
    assert once == again
    assert once["requests"] > 10
    assert min(once["stock"], once["ours"]) > 0
