"""What the probe of an engine finds and costs, on both builds, with readable and unreadable flags."""

from __future__ import annotations

import pytest

from builds import OLDER
from compatibility import Feature
from engine.conftest import evaluated
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.engine.canary import GROWN, LAST, TOKENS
from slotkeeper.engine.child.launch import find_engine
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.traits import Reading, read_traits
from slotkeeper.scheduler.slots.engine_model import TAIL, EngineTraits, Known
from slotkeeper.scheduler.types import SlotId

EVERY_MEMORY = [Tiny.DENSE, Tiny.SWA, Tiny.HYBRID, Tiny.HYBRID_MTP, Tiny.RECURRENT]
GROWN_BY = GROWN[1] - GROWN[0]
# Tokens of a trial with a sliding window, whose prompts go back to a checkpoint each time; others cost less
TRIAL = 3 * (GROWN_BY + TAIL + 1) + LAST - TOKENS + TAIL + 1
WITH_CHECKPOINTS = [tiny for tiny in EVERY_MEMORY if tiny is not Tiny.DENSE]


async def look(engine, **more) -> Reading:
    async with EngineClient(engine.base) as client:
        return await read_traits(client, may_compute=True, **more)


def found(reading: Reading) -> dict[str, object]:
    """Return the flags that were found out, by name."""
    knowledge = reading.traits.knowledge
    assert set(knowledge.values()) <= {Known.CANARY}
    return {name: getattr(reading.traits, name) for name in knowledge}


@pytest.mark.shows(Feature.FLAGS)
@pytest.mark.parametrize(
    ("model", "files"),
    [(tiny, tiny is not Tiny.SWA) for tiny in WITH_CHECKPOINTS] + [(Tiny.HYBRID, False)],
    ids=lambda value: {True: "slot folder", False: "no slot folder"}.get(value, value),
)
@pytest.mark.parametrize("flags", ["", "-ctxcp 0", "-cms 0", "-cms 16"])
async def test_the_probe_finds_whether_an_engine_makes_and_drops_checkpoints(
    engine_factory, build, model, files, flags
):
    """Its cost is reported, and slots are empty afterwards."""
    engine = engine_factory(model, build, args=flags.split())
    async with EngineClient(engine.base) as client:
        folder = engine.slot_dir if files else None
        reading = await read_traits(client, may_compute=True, slot_dir=folder)
        assert client.computed == evaluated(engine)
        assert not any(slot.busy or slot.held for slot in await client.slots())
    if flags == "-ctxcp 0":
        assert (found(reading), client.computed) == ({"checkpoint_cap": 0}, TOKENS)
    elif build == OLDER:
        dropped = EngineTraits().checkpoint_min_step
        assert found(reading) == {"checkpoint_min_step": 0 if flags == "-cms 0" else dropped}
        assert TOKENS < client.computed <= TOKENS + TRIAL
    else:
        assert (found(reading), client.computed) == ({}, TOKENS)


async def test_a_request_that_arrives_ends_the_trial_of_checkpoints(engine_factory, build):
    engine, asked = engine_factory(Tiny.HYBRID, build, args=["-cms", "0"]), 0

    def arrives_at_the_third_question() -> bool:
        nonlocal asked
        asked += 1
        return asked >= 3

    reading = await look(engine, slot_dir=engine.slot_dir, hurried=arrives_at_the_third_question)
    assert found(reading) == {}
    assert evaluated(engine) <= TOKENS + 2 * GROWN_BY
    async with EngineClient(engine.base) as client:
        assert not any(slot.busy or slot.held for slot in await client.slots())


@pytest.mark.parametrize("read", [True, False], ids=["read", "given"])
@pytest.mark.parametrize("files", [True, False], ids=["slot folder", "no slot folder"])
async def test_an_engine_whose_flags_are_known_computes_nothing_for_the_probe(
    engine_factory, build, read, files
):
    engine = engine_factory(Tiny.HYBRID, build)
    given = None if read else engine.flags
    folder = engine.slot_dir if files else None
    async with EngineClient(engine.base) as client:
        reading = await read_traits(client, given, may_compute=True, may_read=read, slot_dir=folder)
    assert set(reading.traits.knowledge.values()) == {Known.FLAGS}
    assert reading.traits.snapshots is files
    assert reading.voice == "", "it is not asked for logprobs"
    assert evaluated(engine) == client.computed == 0


async def test_a_dense_model_is_tried_only_for_slot_files(engine_factory, build):
    engine = engine_factory(Tiny.DENSE, build)
    await look(engine)
    assert evaluated(engine) == 0
    assert (await look(engine, slot_dir=engine.slot_dir)).voice
    assert evaluated(engine) == TOKENS


async def test_a_probe_that_a_request_waits_for_leaves_out_what_no_wrong_answer_depends_on(
    engine_factory, build
):
    engine = engine_factory(Tiny.HYBRID, build)
    assert found(await look(engine, hurried=lambda: True)) == {}
    assert evaluated(engine) == 0
    hurried = await look(engine, slot_dir=engine.slot_dir, hurried=lambda: True)
    assert hurried.voice, "which files fit depends on it"


async def test_a_second_start_on_the_same_process_computes_nothing(engine_factory, build):
    engine = engine_factory(Tiny.HYBRID, build)
    first = await look(engine, slot_dir=engine.slot_dir)
    before = evaluated(engine)
    again = await look(engine, slot_dir=engine.slot_dir)
    assert again.traits.fingerprint == first.traits.fingerprint
    assert evaluated(engine) == before


async def test_a_used_engine_is_not_probed_for_flags(engine_factory, build):
    engine = engine_factory(Tiny.HYBRID, build, args=["-cms", "0"])
    async with EngineClient(engine.base) as client:
        await client.prefill(list(range(300, 340)), SlotId(0))
        reading = await read_traits(client, may_compute=True)
    assert (found(reading), evaluated(engine)) == ({}, 40)


async def test_tokens_that_the_probe_leaves_in_slots_are_known_if_slots_cannot_be_erased(build, tmp_path):
    binary = find_engine(build)
    words = lab.stock_flags(binary, build_model(Tiny.HYBRID), tmp_path)
    at = words.index("--slot-save-path")
    del words[at : at + 2]
    async with lab.engine(binary, words, tmp_path / "engine.log") as engine:
        async with EngineClient(engine.base) as client:
            reading = await read_traits(client, may_compute=True)
            assert {slot.slot: slot.held for slot in await client.slots() if slot.held} == dict(reading.left)
        assert reading.left
    async with (
        lab.engine(binary, words, tmp_path / "engine.log") as engine,
        lab.in_front_of(engine.base) as started,
    ):
        (link,) = started.driver.links.values()
        assert link.fresh, "the slots hold tokens of the probe, so no other client uses this engine"
