"""The quick cases of `benchmarks/cases.py`: tokens beside stock, on fresh engines in one run."""

from __future__ import annotations

import pytest
from benchmarks.cases import CASES, keeps, measure

pytestmark = pytest.mark.one_in(8)

QUICK = (
    "recap",
    "memories fixed",
    "no checkpoints",
    "interrupted",
    "three chats",
    "erased",
    "wrapper",
    "common head",
    "sweep",
)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in QUICK], ids=lambda case: case.name)
async def test_a_case_of_a_public_report_costs_no_more_than_its_limit(build, case):
    """Plants, idle work and the probe are included, as in the limit."""
    stock, failed = await measure(case, build, ours=False)
    ours, failed_too = await measure(case, build, ours=True, rested=True)
    assert not failed
    assert not failed_too
    assert keeps(case, build, stock, ours), (stock, ours, case.limit)
