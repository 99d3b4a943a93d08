"""Two alternating chats with one system prompt: on stock, they overwrite each other's slot."""

from __future__ import annotations

import pytest
from benchmarks.sessions import SESSIONS

from compatibility import Feature
from slotkeeper.bench import lab
from slotkeeper.bench.measure import Totals, later, totals
from slotkeeper.bench.target import Target, play

pytestmark = pytest.mark.one_in(8)

MODELS = ["tiny-dense", "tiny-hybrid"]


async def interleaved(base: str) -> Totals:
    """Return the session's totals without its first request."""
    async with Target(base) as target:
        samples = await play(SESSIONS["interleaved"](), target, session="interleaved")
    assert [sample.failure for sample in samples if sample.failure] == []
    assert all(sample.exact for sample in samples)
    return totals(later(samples))


@pytest.mark.shows(Feature.CROWD)
@pytest.mark.parametrize("flags", [True, False], ids=["flags", "as serve"])
@pytest.mark.parametrize("model", MODELS)
async def test_through_the_sidecar_the_engine_computes_little_more_than_the_oracle(
    engine_factory, build, model, flags
):
    engine = engine_factory(model, build, args=["-t", "1"])
    async with lab.sidecar(engine.base, engine.flags if flags else None) as url:
        found = await interleaved(url)
    assert found.oracle > 0
    assert found.computed <= 1.10 * found.oracle
