"""Chats whose client puts context anew into each request, on the real engine: what each way computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.refreshers import REFRESHERS

from engine.test_side_questions import target_of
from slotkeeper.bench.measure import Totals, totals
from slotkeeper.bench.target import play

pytestmark = pytest.mark.one_in(4)

WITH_FIXED = 1.10  # times the least possible, if only changed lines count as new
WITH_OBSERVED = 1.01  # times stock


async def played(name: str, build: str, folder: Path, mode: str | None, *, ideal: bool = False) -> Totals:
    """Play one chat through a sidecar whose rules have this mode, or (None) on the engine itself."""
    async with target_of(build, folder, mode) as target:
        found = totals(await play(REFRESHERS[name](ideal=ideal), target, session=name))
        assert not found.failed
        return found


@pytest.mark.parametrize("name", REFRESHERS)
async def test_with_rules_that_fix_only_changed_lines_are_computed(name, build, tmp_path):
    ideal = await played(name, build, tmp_path, None, ideal=True)
    fixed = await played(name, build, tmp_path, "fix")
    assert fixed.computed <= WITH_FIXED * ideal.oracle


@pytest.mark.parametrize("name", REFRESHERS)
async def test_with_rules_that_observe_no_more_is_computed_than_by_stock(name, build, tmp_path):
    stock = await played(name, build, tmp_path, None)
    observed = await played(name, build, tmp_path, "observe")
    assert observed.computed <= WITH_OBSERVED * stock.computed
