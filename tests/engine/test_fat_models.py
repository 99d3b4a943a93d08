"""Fat models on a real engine: the memory of the tiny ones, with states and checkpoints that weigh much."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotkeeper.bench import lab
from slotkeeper.bench.models import Fat
from slotkeeper.bench.texts import prose
from slotkeeper.engine.child.launch import EngineKind
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.file_canary import inspected
from slotkeeper.engine.slotfile import SlotFile
from slotkeeper.engine.traits import read_traits
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory
from slotkeeper.scheduler.types import SlotId

LENGTHS = (24, 48)  # tokens of two prompts, of which the second continues the first
FULL = SlotId(0)


async def saved(model: Fat, folder: Path) -> tuple[EngineTraits, list[SlotFile]]:
    """Return the traits of an engine, and the files of a slot after each of the prompts."""
    files = []
    async with (
        lab.tiny_engine(model, EngineKind.XLLAMACPP, folder, context_tokens=512) as engine,
        EngineClient(engine.base) as client,
    ):
        traits = (await read_traits(client, engine.flags)).traits
        ids = await client.tokenize(prose(800), add_special=False, parse_special=False)
        for length in LENGTHS:
            await client.prefill(ids[:length], FULL)
            written = (await client.save(FULL, str(length))).written
            files.append(inspected(folder / "slots" / str(length), written))
    return traits, files


def token_bytes(files: list[SlotFile]) -> float:
    first, second = (file.payload_end for file in files)
    return (second - first) / (LENGTHS[1] - LENGTHS[0])


async def test_the_window_of_the_fat_sliding_model_weighs_96_kib_a_token(tmp_path):
    traits, files = await saved(Fat.SWA, tmp_path)
    assert (traits.memory, traits.n_swa) == (Memory.SWA, 1024)
    assert token_bytes(files) == traits.token_bytes == pytest.approx(96 * 1024, rel=0.01)
    assert files[1].records
    for checkpoint in files[1].records:  # the window, which five of six layers have
        assert checkpoint.length == pytest.approx(80 * 1024 * checkpoint.at, rel=0.01)


async def test_a_checkpoint_of_the_fat_model_with_drafts_weighs_25_mib(tmp_path):
    traits, files = await saved(Fat.HYBRID_MTP, tmp_path)
    assert (traits.memory, traits.speculative) == (Memory.HYBRID, True)
    assert token_bytes(files) == traits.token_bytes == pytest.approx(16 * 1024, rel=0.01)
    assert files[1].records
    for checkpoint in files[1].records:
        assert checkpoint.draft
        assert checkpoint.length == pytest.approx(25.1 * 2**20, rel=0.01)
