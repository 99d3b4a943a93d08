"""Damaged snapshots and real engines: every answer is right, no engine dies, none gets a bad file.

`test_store_corrupted` damages the other hundreds, without engines.
"""

from __future__ import annotations

import random
from pathlib import Path

import aiohttp
import pytest

from chaos.lab_damage import FILES, MANIFESTS, STRANGERS, Damage, Victim, kinds, strangers, swapped
from chaos.lab_snapshots import (
    Talk,
    Witness,
    bench,
    deepest,
    in_front_of,
    known,
    operations,
    turn_and_save,
    undisturbed,
)
from slotkeeper.app import Sidecar
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store.index import Kept

pytestmark = pytest.mark.one_in(8)

WHOLE = 2  # talks with undamaged snapshots
BOTH_MEMORIES = pytest.mark.parametrize("model", ["tiny-hybrid", "tiny-dense"])


def ruin(
    damages: list[Damage],
    talks: list[Talk],
    kept: dict[SnapshotId, Kept],
    slots: Path,
    *,
    files: dict[str, bytes],
    chance: random.Random,
) -> set[SnapshotId]:
    """Damage the deepest snapshot of one talk per kind of damage. Return those that must not be restored."""
    left = [deepest(talk, kept) for talk in chance.sample(talks, len(talks))]
    bad: set[SnapshotId] = set()
    for damage in damages:
        one, other = left.pop(), left[0]
        damage(Victim(slots, one, other, files, chance))
        bad.add(one)
        if damage is swapped:
            bad.add(left.pop(0))
    assert len(left) >= WHOLE
    return bad


async def next_turns_of_all(
    sidecar: Sidecar, client: aiohttp.ClientSession, witness: Witness, talks: list[Talk], bad: set[SnapshotId]
) -> None:
    """Send the next turn of every talk to a fresh engine."""
    found = known(sidecar)
    whole = {deepest(talk, found) for talk in talks if any(map(talk.owns, found.values()))} - bad
    witness.asked.clear()
    for talk in talks:
        await turn_and_save(sidecar, client, talk)
    witness.agrees()
    assert not witness.restored() & bad
    assert witness.restored() >= whole, "undamaged snapshots are restored"


@BOTH_MEMORIES
async def test_no_damaged_file_reaches_an_engine_or_changes_an_answer(tmp_path: Path, model: str, build: str):
    chance = random.Random(f"{model} {build}")
    count = len(FILES) + len(MANIFESTS) + 1 + WHOLE
    async with bench(model, build, tmp_path / "engine") as engine:
        talks = await undisturbed(engine, count, turns=3)
        files = await strangers(model, build, talks[0], tmp_path)
        witness = Witness(engine.slots)
        async with in_front_of(engine, witness) as (sidecar, client):
            await next_turns_of_all(sidecar, client, witness, talks, set())
            kept = known(sidecar)
        engine.kill()
        bad = ruin(FILES + MANIFESTS, talks, kept, engine.slots, files=files, chance=chance)
        await engine.start()

        async with in_front_of(engine, witness) as (sidecar, client):
            await next_turns_of_all(sidecar, client, witness, talks, bad)
            assert engine.alive
            engine.kill()
            bad = ruin(FILES, talks, known(sidecar), engine.slots, files=files, chance=chance)
            await engine.start()
            await next_turns_of_all(sidecar, client, witness, talks, bad)
            assert engine.alive
            assert not bad & known(sidecar).keys(), "the damage was found when the files were needed"
            assert operations(sidecar)["restore", "unfit"] >= len(FILES)


@pytest.mark.parametrize("what", STRANGERS)
async def test_files_of_another_engine_are_neither_restored_nor_removed(
    tmp_path: Path, build: str, what: str
):
    """Engines in the same folder, one after the other, whose flags the sidecar does not know.

    Except b11549: its flag makes the cache a little coarser, which does not change its answers.
    """
    folder, model, flags = tmp_path / "engine", "tiny-hybrid", (what, build) == ("other_flags", "b11549")
    async with bench(model, build, folder) as engine:
        talks = await undisturbed(engine, WHOLE, turns=2)
        witness = Witness(engine.slots)
        async with in_front_of(engine, witness, flags=flags) as (sidecar, client):
            await next_turns_of_all(sidecar, client, witness, talks, set())
            made = set(known(sidecar))
    other_model, other_build, args = kinds(model, build)[what]
    async with bench(other_model, other_build, folder, *args) as other:
        same = await undisturbed(other, WHOLE, turns=1)  # the same questions
        async with in_front_of(other, witness, flags=flags) as (sidecar, client):
            await next_turns_of_all(sidecar, client, witness, same, made)
            assert known(sidecar).keys() > made, "the files of both engines stay"
    async with bench(model, build, folder) as engine:
        async with in_front_of(engine, witness, flags=flags) as (sidecar, client):
            await next_turns_of_all(sidecar, client, witness, talks, known(sidecar).keys() - made)
            assert witness.restored()
