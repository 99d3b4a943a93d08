"""Two tiers with real engines: states without room move to the cold tier, and return when they are needed."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from chaos.lab_snapshots import (
    Bench,
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
from slotkeeper.scheduler.types import Tier
from slotkeeper.store.files import RUN_FOLDER

pytestmark = pytest.mark.one_in(8)

MODEL = "tiny-dense"  # one file for each talk, on both builds
TALKS = 8
LEAD = 500  # characters of a system prompt: too short for a separate file
STATE = 450_000  # bytes: the size that a talk reaches here; its first turn has two thirds of that
HOT = 2 * STATE


@asynccontextmanager
async def two_tiers(
    engine: Bench, cold: Path, witness: Witness | None = None, *, states: int = TALKS
) -> AsyncIterator[tuple[Sidecar, aiohttp.ClientSession]]:
    """Run a sidecar with room for two states in the hot tier, and for this many in the cold tier."""
    room: dict[str, Any] = {"hot_bytes": HOT, "cold_dir": cold, "cold_bytes": states * STATE}
    async with in_front_of(engine, witness, **room) as both:
        yield both


def used(folder: Path) -> int:
    """Return the bytes of states in a folder, whole or in runs."""
    states = (*folder.glob("*.slot"), *folder.glob("*.runs"), *folder.glob(f"{RUN_FOLDER}/*"))
    return sum(path.stat().st_size for path in states)


def tiers_of(sidecar: Sidecar, talk: Talk) -> frozenset[Tier]:
    found = known(sidecar)
    return found[deepest(talk, found)].tiers


async def test_states_without_room_move_to_the_cold_tier_and_are_restored_from_it(tmp_path: Path, build: str):
    cold = tmp_path / "cold"
    async with bench(MODEL, build, tmp_path / "engine") as engine:
        talks = await undisturbed(engine, TALKS, turns=2, lead=LEAD)
        witness = Witness(engine.slots)
        async with two_tiers(engine, cold, witness) as (sidecar, client):
            for talk in talks:
                await turn_and_save(sidecar, client, talk)
            assert len(known(sidecar)) == TALKS, "nothing is lost"
            frozen = [talk for talk in talks if tiers_of(sidecar, talk) == {Tier.COLD}]
            assert len(frozen) >= TALKS / 2
            await engine.restart()
            for talk in frozen:
                state = deepest(talk, known(sidecar))
                await turn_and_save(sidecar, client, talk)
                assert state in witness.restored()
            assert operations(sidecar)["demote", "ok"] >= len(frozen)
        witness.agrees()
        assert engine.alive


async def test_the_budgets_of_both_tiers_are_kept(tmp_path: Path, build: str):
    """The budgets also hold after a state has returned, and for states of an earlier sidecar."""
    cold = tmp_path / "cold"
    async with bench(MODEL, build, tmp_path / "engine") as engine:
        talks = await undisturbed(engine, TALKS, turns=3, lead=LEAD)
        for _ in range(3):
            async with two_tiers(engine, cold, states=3) as (sidecar, client):
                for talk in talks:
                    await turn_and_save(sidecar, client, talk)
                    assert used(engine.slots) <= HOT
                    assert used(cold) <= 3 * STATE
                assert used(cold) > STATE, "the cold tier is in use"
            await engine.restart()


async def test_states_of_a_lost_cold_tier_are_computed_again_without_errors(tmp_path: Path, build: str):
    """Its states are computed again, and no client sees an error."""
    cold = tmp_path / "cold"
    async with bench(MODEL, build, tmp_path / "engine") as engine:
        talks = await undisturbed(engine, TALKS, turns=2, lead=LEAD)
        witness = Witness(engine.slots)
        async with two_tiers(engine, cold, witness) as (sidecar, client):
            for talk in talks:
                await turn_and_save(sidecar, client, talk)
            assert used(cold) > 0
            shutil.rmtree(cold)
            await engine.restart()
            for talk in talks:
                await turn_and_save(sidecar, client, talk)
                assert used(engine.slots) <= HOT
            assert operations(sidecar)["restore", "unfit"] > 0
        witness.agrees()
