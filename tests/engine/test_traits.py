"""The properties that the sidecar reads from real engines, compared with their flags."""

from __future__ import annotations

import pytest

from builds import OLDER
from slotkeeper.bench.models import Tiny
from slotkeeper.engine.answers import EngineError, Why
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.findings import SaveSupport, probe
from slotkeeper.engine.traits import read_traits
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import Memory

KINDS = {
    Tiny.DENSE: (Memory.DENSE, 0),
    Tiny.SWA: (Memory.SWA, 256),
    Tiny.HYBRID: (Memory.HYBRID, 0),
    Tiny.HYBRID_MTP: (Memory.HYBRID, 0),
    Tiny.RECURRENT: (Memory.RECURRENT, 0),
}


@pytest.mark.parametrize("engine", [str(tiny) for tiny in Tiny], indirect=True)
async def test_memory_slots_and_build_are_read_from_an_engine_started_by_others(engine):
    async with EngineClient(engine.base) as client:
        reading = await read_traits(client)
        opener = await client.tokenize("<|im_start|>user", add_special=False, parse_special=True)
    traits = reading.traits
    assert (traits.memory, traits.n_swa) == KINDS[Tiny(engine.model.stem)]
    assert (traits.n_slots, traits.n_ctx) == (2, 65536)
    assert traits.eager_thinning is (engine.build == OLDER)
    assert traits.user_start == (tuple(opener),)
    assert traits.markers.user == (Tokens(opener),)
    assert traits.markers.tool
    assert traits.markers.reply
    assert not traits.unified
    assert reading.model_path == engine.model
    assert any("started by others" in note for note in reading.notes)


async def test_known_flags_replace_read_values(engine_factory, build):
    args = ["-ctxcp", "7", "-cms", "3", "-sps", "0.5", "--spec-type", "draft-mtp"]
    engine = engine_factory("tiny-hybrid-mtp", build, args=args)
    async with EngineClient(engine.base) as client:
        strange = (await read_traits(client)).traits
        known = (await read_traits(client, engine.flags)).traits
    assert strange.speculative
    assert strange.checkpoint_cap == 32
    assert known.speculative
    assert (known.checkpoint_cap, known.checkpoint_min_step, known.similarity) == (7, 3, 0.5)


async def test_a_probe_finds_routes_that_are_switched_off(engine_factory, build):
    engine = engine_factory(build=build, args=["--no-slots"])
    async with EngineClient(engine.base) as client:
        asked = await probe(client)
    assert (asked.slots_ok, asked.metrics_ok, asked.slot_save) == (False, True, SaveSupport.YES)


async def test_problems_with_slot_files_are_noted_without_an_error(engine_factory, build, monkeypatch):
    engine = engine_factory(build=build, args=["--no-slots"])
    async with EngineClient(engine.base) as client:
        hidden = await read_traits(client, slot_dir=engine.slot_dir)

        async def refuse(*_, **__):
            raise EngineError(404, "File Not Found")

        monkeypatch.setattr(client, "lora_adapters", refuse)
        uncertain = await read_traits(client, slot_dir=engine.slot_dir)
    assert (hidden.no_files.why, uncertain.no_files.why) == (Why.REFUSED, Why.UNCERTAIN)
    for reading in (hidden, uncertain):
        assert not reading.traits.snapshots
        assert str(reading.no_files) in reading.notes[-1]


async def test_without_a_slot_folder_no_slot_is_saved_and_no_logprobs_are_read(engine):
    async with EngineClient(engine.base) as client:
        reading = await read_traits(client, may_compute=True)
    assert not reading.traits.snapshots
    assert (reading.files, reading.no_files, reading.voice) == (None, None, "")
    assert not list(engine.slot_dir.iterdir())
