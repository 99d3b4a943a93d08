"""Results of the probe of engines' slot files, on both builds; the probe leaves no state and no file."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.projectors import Projector, projector

from builds import NEWER, OLDER
from engine.conftest import SAME_IN_ANY_BATCH, evaluated
from patience import PATIENCE
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.engine import fingerprint
from slotkeeper.engine.answers import NoFilesError, Why
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.file_canary import ProbeResult, probe_files
from slotkeeper.engine.traits import Reading, read_traits
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory
from slotkeeper.scheduler.types import SlotId

VERSIONS = {OLDER: 2, NEWER: 4}
HYBRID = EngineTraits(n_slots=2, memory=Memory.HYBRID)
NAME = "some engine"
EVERY_MEMORY = [Tiny.DENSE, Tiny.SWA, Tiny.HYBRID, Tiny.HYBRID_MTP, Tiny.RECURRENT]


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Return a folder with room for 64 KiB."""
    mount = shutil.which("mount")
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        not mount
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=64k", "none", folder], check=False).returncode
    ):
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run([shutil.which("umount"), folder], check=True)


async def look(engine, **more):
    async with EngineClient(engine.base) as client:
        return await read_traits(client, slot_dir=engine.slot_dir, **more)


async def probe(engine, traits=HYBRID, **more) -> ProbeResult:
    async with EngineClient(engine.base) as client:
        return await probe_files(client, engine.slot_dir, traits, NAME, **more)


async def prefill(engine, slot: int, length: int) -> None:
    async with EngineClient(engine.base) as client:
        ids = await client.tokenize("word " * length, add_special=False, parse_special=False)
        await client.prefill(ids[:length], SlotId(slot))


def states(engine) -> list[tuple]:
    """Return of every slot whether it is busy, and its tokens."""
    slots = httpx.get(f"{engine.base}/slots", timeout=PATIENCE).json()
    return [(slot["is_processing"], slot.get("n_prompt_tokens") or 0) for slot in slots]


@pytest.mark.parametrize("model", EVERY_MEMORY)
async def test_the_probe_finds_all_properties_of_the_files_of_an_unused_engine(engine_factory, build, model):
    engine = engine_factory(model, build)
    reading = await look(engine, may_compute=True)
    carries = build == NEWER and model is not Tiny.DENSE
    assert reading.no_files is None
    assert reading.traits.snapshots
    assert (reading.traits.state_version, reading.traits.files_carry) == (VERSIONS[build], carries)
    assert states(engine) == [(False, 0)] * 2
    assert [path.name for path in engine.slot_dir.iterdir()] == [fingerprint.FILE]


@pytest.mark.parametrize(("args", "model"), [(["--swa-full"], Tiny.SWA), (["-ctxcp", "0"], Tiny.HYBRID)])
async def test_an_engine_that_makes_no_checkpoints_writes_none_to_its_files(
    engine_factory, build, args, model
):
    reading = await look(engine_factory(model, build, args=args), may_compute=True)
    assert reading.traits.files_carry is False


async def test_the_probe_does_not_change_a_used_engine_and_finds_its_checkpoints(engine_factory, build):
    engine = engine_factory(Tiny.HYBRID, build)
    await prefill(engine, 0, 40)
    await prefill(engine, 1, 30)
    before = states(engine)
    found = await probe(engine)
    assert (found.state_version, evaluated(engine)) == (VERSIONS[build], 40 + 30)
    assert found.files_carry is (build == NEWER)
    assert found.layout
    assert states(engine) == before == [(False, 40), (False, 30)]
    assert not list(engine.slot_dir.iterdir())


@pytest.mark.parametrize(
    ("kind", "closed"), [(Projector.QWEN, True), (Projector.GEMMA, True), (Projector.LLAVA, False)]
)
async def test_the_probe_finds_whether_text_follows_images_if_files_have_no_checkpoints(
    build, kind, closed, tmp_path
):
    path, only_extends = projector(kind, tmp_path), build == OLDER
    async with (
        lab.tiny_engine(Tiny.HYBRID, build, tmp_path, "--mmproj", str(path)) as engine,
        EngineClient(engine.base) as client,
    ):

        async def read(**more: Any) -> Reading:
            return await read_traits(client, engine.flags, slot_dir=engine.flags.slot_save_path, **more)

        reading = await read(may_compute=True)
        assert reading.files.images_closed is (closed if only_extends else None)
        assert not any(view.held for view in await client.slots())
        await client.prefill(list(range(40)), SlotId(0))
        computed = client.computed
        assert (await read(may_compute=True)).files.images_closed is None, "an engine in use is not tried"
        known = await read(may_compute=True, known=reading.files)
        assert known.files.images_closed is reading.files.images_closed
        assert client.computed == computed


async def test_the_probe_is_refused_if_all_slots_of_the_engine_are_busy(engine_factory, build):
    engine = engine_factory(Tiny.HYBRID, build, args=["-np", "1"])
    body = {"prompt": "Count.", "n_predict": 60000, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        async with http.stream("POST", f"{engine.base}/completion", json=body) as answer:
            chunks = answer.aiter_raw()  # kept, because closing it closes the answer
            await anext(chunks)
            with pytest.raises(NoFilesError) as refused:
                await probe(engine)
            assert refused.value.why is Why.BUSY


async def test_the_probe_does_not_change_an_answer_that_begins_at_the_same_time(engine_factory, build):
    """An unpinned prompt takes another slot, or waits."""
    engine = engine_factory(Tiny.HYBRID, build, args=SAME_IN_ANY_BATCH)
    body = {"prompt": "Once upon a time", "n_predict": 120, "temperature": 0, "ignore_eos": True}

    async def text() -> str:
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            return (await http.post(f"{engine.base}/completion", json=body)).json()["content"]

    alone = await text()
    for slot in (0, 1):
        async with EngineClient(engine.base) as client:
            await client.erase(SlotId(slot))
    beside, found = await asyncio.gather(text(), probe(engine))
    assert beside == alone
    assert found.state_version == VERSIONS[build]


async def test_a_full_folder_turns_snapshots_off_without_an_error(engine_factory, build, small_disk):
    engine = engine_factory(Tiny.HYBRID, build, args=["--slot-save-path", str(small_disk)])
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    async with EngineClient(engine.base) as client:
        reading = await read_traits(client, slot_dir=small_disk)
    assert reading.no_files.why is Why.CUT, "the engine answers 200 though the file was not written"
    assert not reading.traits.snapshots
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]
