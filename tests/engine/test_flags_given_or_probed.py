"""`serve` in front of an engine with the flags of `up` is as good as `up`: by the engine's own counter.

The session is the one that cost most when flags were taken for llama-server's defaults: edits, on the build
that thins checkpoints at every task.
"""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.found_flags import ALIKE, Way, measure, ratio
from benchmarks.sessions import SESSIONS

from chaos.raw import until
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import Target, play

pytestmark = pytest.mark.one_in(8)

# How much idle work is done depends on the machine.
NO_PAUSES: dict[str, Any] = {"save_pause": 3600.0, "idle_tokens": 0}


async def test_edits_behind_serve_cost_the_same_tokens_as_behind_up(build):
    row = {
        way.value: await measure(build, Tiny.HYBRID, "edits", way, **NO_PAUSES) for way in (Way.UP, Way.FOUND)
    }
    assert not any(of["failed"] for of in row.values())
    assert row["up"]["tried_out"] == 0
    assert ratio(row, Way.FOUND) <= 1 + ALIKE, row


async def test_a_restarted_sidecar_knows_the_flags_of_an_engine_in_use(build, tmp_path):
    async with lab.tiny_engine(Tiny.HYBRID, build, tmp_path, recipe=lab.up_flags) as engine:
        settings = {**NO_PAUSES, "slot_dir": engine.flags.slot_save_path}
        async with lab.in_front_of(engine.base, **settings) as started:
            async with Target(lab.url_of(started)) as target:
                await play(SESSIONS["append"](), target, session="s")
            (table,) = started.driver.placement.tables.values()
            await until(lambda: len(table.idle) == len(table.states), "what the last answer shows is learned")
            first = dict(table.traits.knowledge)
        async with lab.in_front_of(engine.base, **settings) as again:
            (table,) = again.driver.placement.tables.values()
            assert dict(table.traits.knowledge) == first
            value = again.driver.metrics.registry.get_sample_value
            assert value("slotkeeper_prefill_tokens_total", {"purpose": "probe"}) == 0
