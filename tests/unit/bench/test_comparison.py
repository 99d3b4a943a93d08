"""A fast and a slow engine: one sidecar over both, compared with every static split, in simulated time."""

import pytest
from benchmarks.simulated_engines import compared


@pytest.mark.parametrize("agents", [4, 8])
@pytest.mark.parametrize("think", [0.2, 2.0])
def test_the_first_token_is_as_fast_as_with_the_best_static_split(agents, think):
    """One engine is half as fast; the best split for each load is chosen afterwards."""
    assert compared(2, agents, think=think)["p95_ratio"] <= 1.1
