"""Agents that rewrite their own prompts, on the real engine: the cost, the reports, the fixes."""

from __future__ import annotations

import pytest
from benchmarks.rewriters import REWRITERS, Rewriter

from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.measure import Totals, totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import Target, play
from slotkeeper.conversation.rules.base import RuleName

pytestmark = pytest.mark.one_in(8)

CONTEXT = 16384
WITH_OBSERVED = 1.06  # times the oracle: the first divergence in a long text finds no checkpoint at its place
WITH_FIXED = 0.95  # the oracle counts the requests as the client sent them


async def played(rewriter: Rewriter, build: str, mode: str, folder) -> tuple[Totals, Sidecar]:
    """Return the totals, and the sidecar, which has ended."""
    async with (
        lab.tiny_engine(Tiny.HYBRID, build, folder, context_tokens=CONTEXT, recipe=lab.up_flags) as engine,
        lab.keeping(engine, rules=(f"all={mode}",)) as sidecar,
        Target(lab.url_of(sidecar)) as target,
    ):
        found = await play(rewriter(), target, session=rewriter.rule.value)
        assert [sample.failure for sample in found if sample.failure] == []
        return totals(found), sidecar


def counted(sidecar: Sidecar, name: str, **labels: str) -> float:
    return sidecar.metrics.registry.get_sample_value(f"slotkeeper_{name}_total", labels) or 0.0


@pytest.mark.parametrize("name", REWRITERS, ids=str)
async def test_with_rules_that_fix_a_session_computes_fewer_tokens_than_the_oracle(name, build, tmp_path):
    found, sidecar = await played(REWRITERS[name], build, "fix", tmp_path)
    assert found.computed <= WITH_FIXED * found.oracle
    assert counted(sidecar, "rewrites", rule=name.value, action="fixed") > 0
    assert counted(sidecar, "repeated_tokens", cause=REWRITERS[name].cause.value) == 0


@pytest.mark.parametrize("name", REWRITERS, ids=str)
async def test_with_rules_that_observe_the_cause_is_reported_and_tokens_stay_near_the_oracle(
    name, build, tmp_path
):
    found, sidecar = await played(REWRITERS[name], build, "observe", tmp_path)
    assert found.computed <= WITH_OBSERVED * found.oracle
    assert all(counted(sidecar, "rewrites", rule=rule.value, action="fixed") == 0 for rule in RuleName)
    assert counted(sidecar, "rewrites", rule=name.value, action="observed") > 0
    assert counted(sidecar, "repeated_tokens", cause=REWRITERS[name].cause.value) > 200
