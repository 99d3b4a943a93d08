"""The quick cases of `benchmarks/cases.py`: tokens beside stock, on fresh engines in one run."""

from __future__ import annotations

import pytest
from benchmarks.cases import AT_MOST, CASES, keeps, measure

pytestmark = pytest.mark.alternating

PROBE_TOKENS = 160  # what the probe of a fresh engine costs at most
QUICK = ("recap", "three chats", "no checkpoints", "erased", "common head", "sweep")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in QUICK], ids=lambda case: case.name)
async def test_a_case_of_a_public_report_costs_no_more_than_its_limit(build, case):
    stock, failed = await measure(case, build, ours=False)
    ours, failed_too = await measure(case, build, ours=True)
    assert not failed
    assert not failed_too
    assert ours <= stock * AT_MOST
    assert keeps(case, build, stock, ours - PROBE_TOKENS), (stock, ours, case.limit)
