"""Fingerprints of real engines: the same after a restart, different where a file would not fit."""

from __future__ import annotations

import shutil

import pytest

from builds import NEWER, OLDER, needs_older
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.engine.answers import EngineError
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.traits import read_traits
from slotkeeper.scheduler.types import SlotId


async def fingerprint(engine, *, ours: bool = True, **more) -> str:
    flags = engine.flags if ours else None
    async with EngineClient(engine.base) as client:
        return (await read_traits(client, flags, slot_dir=engine.slot_dir, **more)).traits.fingerprint


@pytest.mark.parametrize("ours", [True, False])
async def test_a_restart_keeps_the_fingerprint(engine_factory, build, ours):
    first = engine_factory(build=build)
    before = await fingerprint(first, ours=ours)
    first.process.kill()
    assert before
    assert await fingerprint(engine_factory(build=build), ours=ours) == before
    used = engine_factory(build=build, args=["-b", "256", "-c", "8192", "-ctxcp", "7"])
    assert await fingerprint(used, ours=ours) == before, "a file fits all of these"


@pytest.mark.parametrize(
    "args",
    [
        ["-ctk", "f32"],  # quantized caches crash b10434 on some processors
        ["-np", "3"],
        ["-kvu"],
        ["-fa", "off"],
    ],
    ids=" ".join,
)
async def test_flags_that_change_the_fingerprint_make_the_engine_refuse_the_file(engine_factory, build, args):
    """Flags that change our fingerprint make the engine itself refuse the file."""
    one, other = engine_factory(Tiny.DENSE, build), engine_factory(Tiny.DENSE, build, args=args)
    assert await fingerprint(one) != await fingerprint(other)
    async with EngineClient(one.base) as client:
        await client.prefill(range(5, 400), SlotId(0))
        await client.save(SlotId(0), "state")
    shutil.copy(one.slot_dir / "state", other.slot_dir)
    async with EngineClient(other.base) as client:
        with pytest.raises(EngineError):
            await client.restore(SlotId(0), "state")


async def test_a_model_of_the_same_shapes_has_another_fingerprint_though_it_accepts_the_file(
    engine_factory, build
):
    one, other = engine_factory(Tiny.HYBRID, build), engine_factory(Tiny.HYBRID_MTP, build)
    async with EngineClient(one.base) as client:
        await client.prefill(range(5, 100), SlotId(0))
        await client.save(SlotId(0), "state")
    shutil.copy(one.slot_dir / "state", other.slot_dir)
    async with EngineClient(other.base) as client:
        assert (await client.restore(SlotId(0), "state")).tokens == 95, "the engine accepts it"
    assert await fingerprint(one) != await fingerprint(other)
    assert await fingerprint(one, ours=False) != await fingerprint(other, ours=False)


async def test_only_the_weights_of_a_model_change_the_fingerprint_not_its_path(
    engine_factory, build, tmp_path
):
    """The other weights have the same shapes."""
    path = shutil.copy(build_model(Tiny.DENSE), tmp_path / "elsewhere.gguf")
    weights = bytearray(build_model(Tiny.DENSE).read_bytes())
    weights[-(1 << 18) :] = bytes(1 << 18)
    (trained := tmp_path / "trained.gguf").write_bytes(weights)
    one = await fingerprint(engine_factory(Tiny.DENSE, build))
    assert await fingerprint(engine_factory(Tiny.DENSE, build, args=["-m", str(path)])) == one
    assert await fingerprint(engine_factory(Tiny.DENSE, build, args=["-m", str(trained)])) != one


@needs_older
async def test_builds_that_cannot_read_each_others_files_have_different_fingerprints(engine_factory):
    assert await fingerprint(engine_factory(build=OLDER)) != await fingerprint(engine_factory(build=NEWER))
