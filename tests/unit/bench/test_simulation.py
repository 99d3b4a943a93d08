"""The simulator: invariants of every fleet, and every request is served. tests/frozen has its figures."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.simulator.load import Synthetic
from benchmarks.simulator.simulation import (
    ONE_SIDECAR,
    WAYS,
    Files,
    FleetShape,
    Simulated,
    Simulation,
    shapes_of,
)
from benchmarks.simulator.timed_engine import EngineRates

from slotkeeper.scheduler.slots.engine_model import Memory

LOAD = Synthetic(
    conversations=8, turns=4, system_tokens=600, first_tokens=300, turn_tokens=150, reply_tokens=40, pause=4.0
)


def simulated(load: Synthetic = LOAD, **shape: Any) -> Simulated:
    words: dict[str, Any] = {"engines": 2, "way": ONE_SIDECAR, **shape}
    return Simulation(load.load(), FleetShape(**words)).run()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("files", list(Files))
def test_every_request_is_served_and_counted(way, files):
    found = simulated(way=way, files=files)
    sums = found.sums
    assert sums.requests == len(found.first) == sum(found.requests) == 8 * 4
    assert sums.reused + sums.computed == sums.prompt_tokens
    assert sums.client + sums.plant >= sums.computed
    # The hit rate exceeds that of one large cache only by what was computed while a request waited.
    assert 0 < sums.hit_rate <= found.large_cache + 0.02 < 1
    assert sums.waited >= 1
    assert min(found.first) > 0


@pytest.mark.parametrize("memory", [Memory.SWA, Memory.HYBRID, Memory.RECURRENT])
def test_other_memory_kinds_serve_every_request(memory):
    found = simulated(memory=memory, way="cache-aware", files=Files.SHARED)
    assert found.sums.requests == 8 * 4
    assert found.sums.hit_rate > 0.5


def test_another_seed_gives_another_load():
    assert simulated().shown() != simulated(Synthetic(conversations=8, turns=4, seed=2)).shown()


def test_enough_slots_on_one_engine_lose_almost_nothing():
    """With a slot for each conversation, only prefixes that two requests compute at once are repeated."""
    found = simulated(engines=1, slots=8)
    assert found.sums.hit_rate == pytest.approx(found.large_cache, abs=0.08)


def test_without_files_too_few_slots_lower_the_hit_rate():
    crowded = simulated(engines=1, slots=1, files=Files.NONE)
    kept = simulated(engines=1, slots=1, files=Files.LOCAL)
    assert crowded.moved.saved == crowded.moved.restored == 0
    assert kept.moved.restored > 0
    assert crowded.sums.hit_rate < kept.sums.hit_rate


def test_a_shared_store_raises_the_hit_rate_of_round_robin():
    local, shared = (simulated(engines=4, way="round-robin", files=f) for f in (Files.LOCAL, Files.SHARED))
    assert shared.moved.fetched > 0 == local.moved.fetched
    assert shared.sums.hit_rate > local.sums.hit_rate


def test_a_slow_engine_makes_requests_wait():
    quick, slow = (simulated(rates=EngineRates(prefill=rate)) for rate in (4000.0, 400.0))
    assert sum(slow.first) > 2 * sum(quick.first)


def test_one_engine_needs_no_routing():
    shapes = shapes_of([1, 2], WAYS, [Files.LOCAL, Files.SHARED])
    assert [(s.way, s.files) for s in shapes if s.engines == 1] == [(ONE_SIDECAR, Files.LOCAL)]
    assert len([s for s in shapes if s.engines == 2]) == len(WAYS) * 2
