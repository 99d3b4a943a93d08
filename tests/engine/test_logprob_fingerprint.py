"""Engines that others started are recognised by their logprobs, and only by these if flags cannot be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from builds import needs_b10434
from slotkeeper.bench.models import Tiny
from slotkeeper.engine.child.launch import EngineKind
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.traits import Reading, read_traits
from slotkeeper.scheduler.types import SlotId


@pytest.fixture
def look(engine_factory, tmp_path):
    """Probe an engine that others have just started; all of them share one folder."""
    slots = tmp_path / "slots"
    slots.mkdir()

    async def start(model: str, build: str, *args: str, used: bool = False, stay: bool = False) -> Reading:
        engine = engine_factory(model, build, args=[*args, "--slot-save-path", str(slots)])
        async with EngineClient(engine.base) as client:
            if used:
                await client.prefill(range(5, 50), SlotId(0))
            reading = await read(client, slots)
            if stay:
                assert not any(slot.held for slot in await client.slots())
                await client.prefill(range(5, 50), SlotId(0))
                again = await read(client, slots)
                assert again.traits.fingerprint == reading.traits.fingerprint, (
                    "one process has one logprob fingerprint"
                )
        engine.process.kill()
        return reading

    return start


async def read(client: EngineClient, slots: Path) -> Reading:
    return await read_traits(client, slot_dir=slots, may_compute=True)


@pytest.mark.parametrize("model", [Tiny.DENSE, Tiny.SWA, Tiny.HYBRID, Tiny.HYBRID_MTP, Tiny.RECURRENT])
async def test_an_engine_restarted_with_the_same_model_has_the_same_logprob_fingerprint(look, build, model):
    first = await look(model, build, stay=True)
    again = await look(model, build, "-t", "2", "-c", "16384")
    assert first.voice
    assert (again.voice, again.traits.fingerprint) == (first.voice, first.traits.fingerprint)


# Only this build's program knows these flags.
@needs_b10434
@pytest.mark.parametrize("model", [Tiny.DENSE, Tiny.SWA, Tiny.HYBRID, Tiny.HYBRID_MTP])
@pytest.mark.parametrize("flags", ["--rope-freq-base 500000", "--rope-freq-scale 0.9"])
async def test_another_rope_setting_gives_another_logprob_fingerprint(look, model, flags):
    first = await look(model, EngineKind.SKULK)
    other = await look(model, EngineKind.SKULK, *flags.split())
    assert other.voice != first.voice
    assert other.traits.fingerprint != first.traits.fingerprint
    assert (await look(model, EngineKind.SKULK)).traits.fingerprint == first.traits.fingerprint
    assert (
        await look(model, EngineKind.SKULK, *flags.split())
    ).traits.fingerprint == other.traits.fingerprint


async def test_a_used_engine_gets_the_logprob_fingerprint_of_the_last_start_of_its_model(look, build):
    assert (await look(Tiny.HYBRID, build, used=True)).voice == ""
    first = await look(Tiny.HYBRID, build)
    assert (await look(Tiny.HYBRID, build, used=True)).voice == first.voice
    assert (await look(Tiny.DENSE, build, used=True)).voice == "", "that is another engine"
