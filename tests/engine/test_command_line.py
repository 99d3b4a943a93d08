"""What the sidecar can read about a local engine from its process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slotkeeper.bench import lab
from slotkeeper.engine.child.launch import free_port
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.flags import flags_behind
from slotkeeper.scheduler.slots.engine_model import Known

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="there is /proc on Linux only")


async def props_of(engine) -> dict:
    async with EngineClient(engine.base) as client:
        return await client.props()


async def test_the_flags_of_a_local_engine_are_read_from_its_process(engine_factory, build):
    args = ["-cms", "0", "-ctxcp", "48", "-ub", "256", "-cram", "0", "--api-key", "hidden"]
    engine = engine_factory(build=build, args=args)
    async with EngineClient(engine.base, api_key="hidden") as client:
        props = await client.props()
    found = flags_behind(engine.base, props)
    assert found == replace(engine.flags, api_keys=())
    assert (found.checkpoint_min_step, found.checkpoint_cap, found.n_ubatch, found.cache_ram) == (
        0,
        48,
        256,
        0,
    )
    assert flags_behind(engine.base.replace("127.0.0.1", "localhost"), props) == found


async def test_a_sidecar_that_reads_the_engines_flags_does_not_probe_for_them(engine_factory, build):
    engine = engine_factory(build=build, args=["-cms", "0", "-ctxcp", "48"])
    async with lab.in_front_of(engine.base, read_flags=True) as started:
        (table,) = started.driver.placement.tables.values()
        assert (table.traits.checkpoint_min_step, table.traits.checkpoint_cap) == (0, 48)
        assert table.traits.known("checkpoint_cap") is Known.FLAGS
        value = started.driver.metrics.registry.get_sample_value
        assert value("slotkeeper_prefill_tokens_total", {"purpose": "probe"}) == 0


async def test_flags_of_a_process_are_ignored_if_they_contradict_the_engines_props(engine):
    props = await props_of(engine)
    assert flags_behind(engine.base, props)
    assert flags_behind(engine.base, {**props, "total_slots": 3}) is None
    assert flags_behind(engine.base, {**props, "model_path": "/models/other.gguf"}) is None


async def test_flags_stay_unknown_if_the_process_cannot_be_seen(engine, tmp_path):
    props = await props_of(engine)
    assert flags_behind(engine.base, props, tmp_path / "none") is None
    assert flags_behind(engine.base, props, tmp_path) is None, (
        "an engine in another container has another /proc"
    )
    assert flags_behind(engine.base.replace("127.0.0.1", "10.0.0.1"), props) is None
    assert flags_behind(engine.base.replace("127.0.0.1", "engine.example"), props) is None
    assert flags_behind(f"http://127.0.0.1:{free_port()}", props) is None
