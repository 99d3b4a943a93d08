"""A slot folder that cannot be used: every request is still answered, and snapshots come back."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from chaos.lab_folders import FULL, READ_ONLY, REMOVED, Trouble, call
from chaos.lab_snapshots import (
    SOON,
    Bench,
    Talk,
    bench,
    in_front_of,
    in_slot,
    known,
    operations,
    settled,
    take_turn,
    turn_and_save,
    undisturbed,
)
from chaos.raw import until
from patience import PATIENCE
from slotkeeper.app import Sidecar
from slotkeeper.runtime import link, slot_files
from slotkeeper.scheduler.requests import lifecycle
from slotkeeper.store import files
from slotkeeper.store.folders import snapshot_folder

pytestmark = pytest.mark.one_in(8)

MODEL = "tiny-dense"
TALKS = 4
TURNS = 3
Log = Sequence[MutableMapping[str, Any]]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once what would be retried after half a minute."""
    monkeypatch.setattr("slotkeeper.store.trouble.RETRY_SECONDS", SOON)
    monkeypatch.setattr(slot_files, "RETRY", SOON)
    monkeypatch.setattr(lifecycle, "SAVES_REST", SOON)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system for the engine's saves."""
    folder = tmp_path / "engine" / "slots"
    folder.mkdir(parents=True)
    call("mount", "-t", "tmpfs", "-o", f"size={2 * snapshot_folder.RESERVE}", "slotkeeper-test", str(folder))
    yield folder
    while folder.is_mount():
        call("umount", "--lazy", str(folder))


def troubles(log: Log) -> list[str]:
    return [line["trouble"] for line in log if line["event"] == "no_snapshots"]


async def comes_back(sidecar: Sidecar, client: aiohttp.ClientSession, talks: Sequence[Talk]) -> None:
    """Send turns until one is saved again."""
    saved = operations(sidecar)["save", "ok"]
    for talk in talks:
        await take_turn(client, talk)
        await settled(sidecar)
    await until(lambda: operations(sidecar)["save", "ok"] > saved, "it is saved again")


async def endures(engine: Bench, folder: Path, trouble: Trouble) -> None:
    talks = await undisturbed(engine, TALKS, TURNS)
    async with in_front_of(engine) as (sidecar, client):
        for talk in talks[:2]:
            await turn_and_save(sidecar, client, talk)
        assert operations(sidecar)["save", "ok"] >= 2
        with capture_logs() as log:
            trouble.comes(folder)
            for talk in talks:
                await take_turn(client, talk)
                await settled(sidecar)
        assert operations(sidecar)["save", trouble.outcome] > 0
        assert any(trouble.said in str(line.get("error")) for line in log)
        trouble.goes(folder)
        await asyncio.sleep(2 * SOON)  # until the next attempt
        await comes_back(sidecar, client, talks)
        assert engine.alive


async def test_requests_are_answered_and_saves_resume_after_a_full_disk(mounted: Path, build: str):
    async with bench(MODEL, build, mounted.parent) as engine:
        await endures(engine, mounted, FULL)


async def test_requests_are_answered_and_saves_resume_after_a_read_only_disk(mounted: Path, build: str):
    async with bench(MODEL, build, mounted.parent) as engine:
        await endures(engine, mounted, READ_ONLY)


async def test_requests_are_answered_and_saves_resume_after_the_folder_was_removed(
    tmp_path: Path, build: str
):
    async with bench(MODEL, build, tmp_path / "engine") as engine:
        await endures(engine, engine.slots, REMOVED)


async def test_snapshots_are_offered_again_after_their_folder_was_missing(
    tmp_path: Path, build: str, monkeypatch: pytest.MonkeyPatch
):
    """The folder is missing for a while, as with a network file system.

    The store does not retry before it is back: it would create the folder, and save there.
    """
    async with bench(MODEL, build, tmp_path / "engine", "--cache-ram", "0") as engine:
        talks = await undisturbed(engine, TALKS, TURNS)
        async with in_front_of(engine) as (sidecar, client):
            for talk in talks:
                await turn_and_save(sidecar, client, talk)
            here = known(sidecar).keys()
            catalog_of = sidecar.driver.placement.catalog
            monkeypatch.setattr("slotkeeper.store.trouble.RETRY_SECONDS", math.inf)
            engine.slots.rename(tmp_path / "elsewhere")
            evicted = next(talk for talk in talks if not in_slot(sidecar, talk))
            await take_turn(client, evicted)
            # its own; then those that share a beginning with it
            assert operations(sidecar)["restore", "unfit"] >= 1
            assert {snapshot.id for snapshot in catalog_of} < here
            assert not engine.slots.exists()
            (tmp_path / "elsewhere").rename(engine.slots)
            monkeypatch.setattr("slotkeeper.store.trouble.RETRY_SECONDS", SOON)
            await asyncio.sleep(2 * SOON)  # until the next attempt
            await comes_back(sidecar, client, talks)
            await until(lambda: {snapshot.id for snapshot in catalog_of} >= here, "all are offered")


async def test_a_folder_that_appears_after_the_start_is_used(
    tmp_path: Path, build: str, monkeypatch: pytest.MonkeyPatch
):
    """A file is in its place when the sidecar starts."""
    monkeypatch.setattr(link, "FILES_RETRY", 1.0)  # seconds
    way = tmp_path / "way"
    way.write_text("not a folder")
    async with bench(MODEL, build, tmp_path / "engine") as engine:
        talks = await undisturbed(engine, TALKS, TURNS)
        with capture_logs() as log:
            async with in_front_of(engine, slot_dir=way / "slots") as (sidecar, client):
                for talk in talks:
                    await take_turn(client, talk)
                    await settled(sidecar)
                (tmp_path / "link").symlink_to(engine.folder)
                (tmp_path / "link").rename(way)  # at once: an attempt in between would make a folder there
                await until(lambda: sidecar.driver.snapshots.ready, "the folder is open")
                await engine.restart()
                await comes_back(sidecar, client, talks)
        assert troubles(log) == ["missing_folder"]


async def test_a_folder_is_used_after_another_sidecar_has_released_it(tmp_path: Path, build: str):
    """As in a rolling update: the old sidecar has not ended yet."""
    async with bench(MODEL, build, tmp_path / "engine") as engine:
        talks = await undisturbed(engine, TALKS, TURNS)
        async with in_front_of(engine, save_pause=3600) as (old, _):
            with capture_logs() as log:
                async with in_front_of(engine) as (sidecar, client):
                    for talk in talks:
                        await take_turn(client, talk)
                        await settled(sidecar)
                    await old.close()
                    await until(lambda: sidecar.driver.snapshots.ready, "the folder is open")
                    await comes_back(sidecar, client, talks)
        assert troubles(log) == ["in_use"]


async def test_a_slow_folder_delays_only_the_request_that_restores_from_it(
    tmp_path: Path, build: str, monkeypatch: pytest.MonkeyPatch
):
    hashed, gate = files.hash_bytes, threading.Event()

    def slowly(file: FileIO, halt: files.Halt) -> files.Passed:
        assert gate.wait(PATIENCE)
        return hashed(file, halt)

    async with bench(MODEL, build, tmp_path / "engine") as engine:
        talks = await undisturbed(engine, TALKS, TURNS)
        async with in_front_of(engine) as (sidecar, client):
            for talk in talks[:2]:
                await turn_and_save(sidecar, client, talk)
            await engine.restart()
        async with in_front_of(engine) as (sidecar, client):  # this sidecar has not hashed them yet
            monkeypatch.setattr(files, "hash_bytes", slowly)
            async with asyncio.TaskGroup() as group:
                slow = group.create_task(take_turn(client, talks[0]))
                for talk in talks[2:]:
                    await take_turn(client, talk)
                assert not slow.done(), "it waits for its file"
                gate.set()
            assert operations(sidecar)["restore", "ok"] >= 1, "it was not computed instead"
