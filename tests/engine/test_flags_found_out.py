"""Finding out the flags of an engine on both builds, by probing it once."""

from __future__ import annotations

import pytest

from engine.conftest import evaluated
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.engine import canary
from slotkeeper.engine.canary import FEW
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.launch import EngineKind, find_engine
from slotkeeper.engine.traits import Reading, read_traits
from slotkeeper.scheduler.engine_model import Known
from slotkeeper.scheduler.types import SlotId

pytestmark = pytest.mark.alternating

MOST = 250  # tokens that the probes may compute
MOST_WINDOWED = 360  # with a sliding window
SHORT = 150  # without its longest part
EVERY_MEMORY = [Tiny.DENSE, Tiny.SWA, Tiny.HYBRID, Tiny.HYBRID_MTP, Tiny.RECURRENT]
WITH_CHECKPOINTS = [tiny for tiny in EVERY_MEMORY if tiny is not Tiny.DENSE]


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """Wait longer: on a busy machine an engine is slow without having slow flags."""
    monkeypatch.setattr(canary, "PATIENCE", 600.0)


async def look(engine, **more) -> Reading:
    async with EngineClient(engine.base) as client:
        return await read_traits(client, may_compute=True, **more)


def found(reading: Reading) -> dict[str, object]:
    """Return the flags that were found out, by name."""
    knowledge = reading.traits.knowledge
    assert set(knowledge.values()) <= {Known.CANARY}
    return {name: getattr(reading.traits, name) for name in knowledge}


@pytest.mark.parametrize("model", WITH_CHECKPOINTS)
@pytest.mark.parametrize("step", [0, 8192])
async def test_the_probe_finds_whether_checkpoints_outlive_the_next_task(engine_factory, build, model, step):
    args = [] if model is not Tiny.HYBRID_MTP else ["--spec-type", "draft-mtp"]
    reading = await look(engine_factory(model, build, args=[*args, "-cms", str(step)]))
    told = found(reading)
    told.pop("checkpoint_cap", None)
    if build == EngineKind.SKULK:
        assert told == {"checkpoint_min_step": step, "ram_cache": True}
    else:  # they do in any case
        assert told == {"ram_cache": True}


@pytest.mark.parametrize("model", EVERY_MEMORY)
async def test_the_probe_finds_that_an_engine_has_no_ram_cache(engine_factory, build, model):
    reading = await look(engine_factory(model, build, args=["-cram", "0", "-cms", "0"]))
    assert found(reading)["ram_cache"] is False


@pytest.mark.parametrize(("cap", "believed"), [("0", 0), ("3", FEW)])
async def test_the_probe_finds_that_an_engine_keeps_few_checkpoints(engine_factory, build, cap, believed):
    reading = await look(engine_factory(Tiny.HYBRID, build, args=["-ctxcp", cap, "-cms", "0"]))
    assert found(reading)["checkpoint_cap"] == believed


@pytest.mark.parametrize("model", [Tiny.HYBRID, Tiny.RECURRENT, Tiny.SWA])
@pytest.mark.parametrize("cap", [32, 64])
@pytest.mark.parametrize("step", ["0", "8192"])
async def test_the_probe_finds_that_an_engine_keeps_the_advised_number_of_checkpoints(
    engine_factory, build, model, cap, step
):
    if build == EngineKind.SKULK and step != "0":
        pytest.skip("there the list is never full")
    reading = await look(engine_factory(model, build, args=["-cms", step, "-ctxcp", str(cap)]))
    assert found(reading)["checkpoint_cap"] == cap


async def test_the_probe_skips_its_longest_part_on_a_slow_engine(engine_factory, build, monkeypatch):
    """The part that needs many prompts is skipped and proves nothing; the rest is found out."""
    monkeypatch.setattr(canary, "PATIENCE", 0.0)
    engine = engine_factory(Tiny.HYBRID, build, args=["-cms", "0", "-ctxcp", "64"])
    reading = await look(engine)
    told = found(reading)
    assert "checkpoint_cap" not in told
    assert told["ram_cache"] is True
    assert evaluated(engine) < SHORT


@pytest.mark.parametrize(
    "args", [["-np", "1"], ["-np", "-1", "-c", "262144"], ["-sps", "0.9"], ["-sps", "0"]]
)
async def test_the_probe_concludes_nothing_wrong_however_the_engine_chooses_slots(
    engine_factory, build, args
):
    reading = await look(engine_factory(Tiny.HYBRID, build, args=[*args, "-cms", "0"]))
    told = found(reading)
    assert told.get("ram_cache") in {None, True}
    assert told.get("checkpoint_min_step") in ({None, 0} if build == EngineKind.SKULK else {None})
    assert told.get("checkpoint_cap") in {None, 32}


@pytest.mark.parametrize("model", [Tiny.DENSE, Tiny.SWA, Tiny.HYBRID])
async def test_the_probes_cost_is_bounded_and_reported_and_slots_are_empty_afterwards(
    engine_factory, build, model
):
    engine = engine_factory(model, build)
    async with EngineClient(engine.base) as client:
        await read_traits(client, may_compute=True)
        assert 0 < client.computed <= (MOST_WINDOWED if model is Tiny.SWA else MOST)
        assert client.computed == evaluated(engine)
        assert not any(slot.busy or slot.held for slot in await client.slots())


async def test_with_a_slot_folder_the_tokens_of_every_probe_are_counted(engine_factory, build):
    engine = engine_factory(Tiny.HYBRID, build)
    async with EngineClient(engine.base) as client:
        reading = await read_traits(client, may_compute=True, slot_dir=engine.slot_dir)
        assert reading.voice
        assert client.computed == evaluated(engine)


async def test_a_used_engine_is_not_probed_for_flags(engine_factory, build):
    engine = engine_factory(Tiny.HYBRID, build, args=["-cms", "0"])
    async with EngineClient(engine.base) as client:
        await client.prefill(list(range(300, 340)), SlotId(0))
        reading = await read_traits(client, may_compute=True)
    assert (found(reading), evaluated(engine)) == ({}, 40)


async def test_an_engine_with_known_flags_is_not_probed_for_flags(engine_factory, build):
    engine = engine_factory(Tiny.HYBRID, build)
    async with EngineClient(engine.base) as client:
        reading = await read_traits(client, engine.flags, may_compute=True)
    assert set(reading.traits.knowledge.values()) == {Known.FLAGS}
    assert evaluated(engine) == client.computed == 0


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
