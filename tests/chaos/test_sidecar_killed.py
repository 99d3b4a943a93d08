"""A sidecar killed with -9 at any moment, in front of a real engine: no torn file is ever used.

`test_store_killed` does it many times to the store alone.
"""

from __future__ import annotations

import asyncio
import random
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from chaos.lab_snapshots import SOON, Bench, Talk, bench, digest, said, undisturbed
from chaos.raw import dial
from patience import PATIENCE
from recipes import damaged
from slotkeeper.engine.child.launch import free_port
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store.files import ours
from slotkeeper.store.manifest import Flaw, decode, seal_of
from slotkeeper.store.store import Store

pytestmark = pytest.mark.one_in(8)

KILLS = 6  # on each build
MOST = 24  # kills: on a busy machine it takes more until a file is restored
TALKS = 12
TURNS = 4
EARLY = 5  # in one of this many runs the sidecar may be killed before it serves, while it cleans its folder
CLIENTS = 2
LONGEST = 1.5  # seconds from its first answer to the kill: a few turns and their saves
UNFINISHED = 4  # temporary files at one moment: the engine's, its edited copy, a manifest, one spare


@dataclass(slots=True)
class RunningSidecar:
    """One sidecar process, and its log."""

    data: str
    log: Path
    process: Process
    whole: set[SnapshotId]  # complete snapshots at its start

    def lines(self, event: str) -> list[dict[str, Any]]:
        text = self.log.read_bytes()
        complete = text[: text.rfind(b"\n") + 1].splitlines()  # the kill may have cut the last line
        return [line for line in map(orjson.loads, complete) if line["event"] == event]

    def ids(self, event: str) -> set[SnapshotId]:
        return {SnapshotId(line["snapshot"]) for line in self.lines(event)}


@asynccontextmanager
async def running_sidecar(engine: Bench, log: Path) -> AsyncIterator[RunningSidecar]:
    """Run a sidecar; it is killed at the end unless it has ended."""
    data, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    where = ("--upstream", engine.base, "--listen", data, "--admin-listen", admin)
    files = ("--slot-dir", str(engine.slots))
    more = ("--drain-delay", "0")
    command = (sys.executable, "-m", "slotkeeper", "serve", *where, *files, *more)
    whole = whole_in(engine.slots)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stderr=output)
    try:
        yield RunningSidecar(data, log, process, whole)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def serves(sidecar: RunningSidecar) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                async with dial(sidecar.data):
                    return
            except OSError:
                assert sidecar.process.returncode is None, sidecar.log.read_text()
                await asyncio.sleep(0.01)


@dataclass(slots=True)
class Crowd:
    """Clients that send turn after turn, and ignore failures."""

    talks: list[Talk]
    chance: random.Random
    answered: int = 0
    broken: int = 0  # answers that a kill broke off

    async def ask(self, sidecar: RunningSidecar) -> None:
        async with aiohttp.ClientSession(f"http://{sidecar.data}") as client:
            while True:
                talk = self.chance.choice(self.talks)
                turn = talk.turn % TURNS
                try:
                    reply = await said(client, talk.body(turn))
                except aiohttp.ClientError:
                    self.broken += 1
                    return
                assert reply == talk.replies[turn], f"talk {talk.number} differs at turn {turn}"
                talk.turn += 1
                self.answered += 1
                await asyncio.sleep(self.chance.random() * 5 * SOON)  # sometimes long enough for a save


def answered(crowds: list[Crowd]) -> int:
    return sum(crowd.answered for crowd in crowds)


def whole_in(folder: Path) -> set[SnapshotId]:
    """Return the snapshots whose files match their manifests; only the test reads them."""
    found = set()
    for path in folder.glob("*.json"):
        id_ = SnapshotId(path.stem)
        if not ours(path.name):
            continue
        manifest, slot = decode(path.read_bytes(), id_, seal_of(folder).secret), path.with_suffix(".slot")
        assert not isinstance(manifest, Flaw), f"{path.name}: {manifest}"
        if slot.exists() and digest(slot) == manifest.sha256:
            found.add(id_)
    return found


def nothing_is_torn(engine: Bench, sidecar: RunningSidecar) -> None:
    """Check that reported saves are there and complete, and that the sidecar used no other files."""
    saved, dropped = sidecar.ids("snapshot_saved"), sidecar.ids("snapshot_dropped")
    assert (sidecar.whole | saved) - dropped <= whole_in(engine.slots)
    assert sidecar.ids("snapshot_restored") <= sidecar.whole | saved
    for trouble in ("restore_refused", "restored_otherwise", "task_failed", "placement_failed"):
        assert not sidecar.lines(trouble)
    assert len(list(engine.slots.glob("*.tmp"))) <= UNFINISHED
    assert engine.alive


@pytest.mark.parametrize("model", ["tiny-hybrid"])
async def test_a_sidecar_killed_at_any_moment_leaves_no_torn_snapshot(tmp_path: Path, model: str, build: str):
    chance = random.Random(f"{build}")
    saved, restored = set[SnapshotId](), set[SnapshotId]()
    async with bench(model, build, tmp_path / "engine") as engine:
        talks = await undisturbed(engine, TALKS, TURNS)
        crowds = [Crowd(talks[at::CLIENTS], chance) for at in range(CLIENTS)]
        for number in range(MOST):
            if number >= KILLS and restored:
                break
            async with running_sidecar(engine, tmp_path / f"{number}.log") as sidecar:
                if number % EARLY:
                    await serves(sidecar)
                async with asyncio.TaskGroup() as clients:
                    before = answered(crowds)
                    for crowd in crowds:
                        clients.create_task(crowd.ask(sidecar))
                    async with asyncio.timeout(PATIENCE):
                        while number % EARLY and answered(crowds) == before:
                            await asyncio.sleep(0.01)
                    await asyncio.sleep(chance.random() * LONGEST)
                    sidecar.process.kill()
                    await sidecar.process.wait()
            nothing_is_torn(engine, sidecar)
            saved |= sidecar.ids("snapshot_saved")
            restored |= sidecar.ids("snapshot_restored")

        async with running_sidecar(engine, tmp_path / "last.log") as sidecar:  # a last run that ends normally
            await serves(sidecar)
            async with aiohttp.ClientSession(f"http://{sidecar.data}") as client:
                for talk in talks:
                    assert await said(client, talk.body(TURNS - 1)) == talk.replies[TURNS - 1]
            sidecar.process.terminate()
            assert await sidecar.process.wait() == 0
        nothing_is_torn(engine, sidecar)
        saved |= sidecar.ids("snapshot_saved")
        restored |= sidecar.ids("snapshot_restored")
        assert not list(engine.slots.glob("*.tmp"))
    assert answered(crowds) >= sum(number % EARLY > 0 for number in range(KILLS))
    assert all(crowd.broken for crowd in crowds)
    assert saved
    assert restored
    store = Store(engine.slots)
    try:
        found = {kept.id for kept in (await store.open()).kept}
        assert await damaged(store) == {}
        assert found == whole_in(engine.slots)
    finally:
        await store.close()
