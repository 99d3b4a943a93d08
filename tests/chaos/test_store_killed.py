"""A store killed with -9 at any moment: reported snapshots are there, and nothing else is ever used.

This file is also the program that is killed. It forks, so that each kill does not cost the imports again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from recipes import damaged, whole
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.scheduler.types import Tier
from slotkeeper.store.files import INDEX, RUN_FOLDER
from slotkeeper.store.intake import SavedFile, SlotFileEdit
from slotkeeper.store.store import Store
from unit.engine.slotfiles import slot_file
from unit.store.saving import ENGINE, file_of, ids, names_in, offered

KILLS = 60
LONGEST = 0.03  # seconds that a process lives after its last allowed report: about one more operation
CROWD = 6  # snapshots
LONG = 300  # tokens


def state_of(seed: int) -> bytes:
    """Return a file. Two of three are long enough for parts in the cold folder, which are the same in all."""
    return slot_file("hybrid", 4, ids(seed, LONG), cuts=(8, 16)) if seed % 3 else file_of(seed)


def tokens_of(seed: int) -> Tokens:
    return Tokens(ids(seed, LONG) if seed % 3 else ids(seed))


def say(*words: object) -> None:
    """Print in one write, so that a line is complete or absent."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def fork_processes() -> None:
    """Fork one process after the other; a line with folders and a seed starts one."""
    for line in sys.stdin:
        hot, cold, seed = line.split()
        if not (pid := os.fork()):
            asyncio.run(work_for_ever(Path(hot), Path(cold), random.Random(int(seed))))
        say("started", pid)
        os.waitpid(pid, 0)
        say("ended")


async def work_for_ever(hot: Path, cold: Path, chance: random.Random) -> None:
    store = Store(hot, cold)
    await store.open()
    say("opened")
    while True:
        await save(store, hot, chance)
        known = store.listing()
        snapshot = chance.choice(known).id
        match chance.choice(["offer", "copy", "demote", "used", "verify"]):
            case "offer":
                await store.offer(snapshot, ENGINE)
            case "copy":
                await store.copy_cold(snapshot)
            case "demote":
                await store.demote(snapshot)
            case "used":
                await store.used(snapshot, paid=True)
                say("used", snapshot)
            case "verify":
                await store.verify(snapshot)
        if len(known) > CROWD:
            say("forgetting", known[0].id)
            await store.forget(known[0].id)


async def save(store: Store, hot: Path, chance: random.Random) -> None:
    """Save as an engine does: the file grows under its final name."""
    seed = chance.randrange(1, 1_000_000)
    data = state_of(seed)
    name = await store.temporary()
    for part in (data[:100], data[100:300], data[300:]):
        with (hot / name).open("ab") as file:
            file.write(part)
        await asyncio.sleep(0)
    edit = (lambda _file, found: SlotFileEdit(recipe=whole(found))) if chance.random() < 0.5 else None
    saved = SavedFile(fingerprint=ENGINE, tokens=tokens_of(seed), written=len(data), edit=edit)
    kept = await store.keep(name, saved)
    say("kept", kept.id, seed)


@dataclass(slots=True)
class Reported:
    """The snapshots that the processes reported before they ended."""

    seeds: dict[SnapshotId, int] = field(default_factory=dict)
    proofs: dict[SnapshotId, int] = field(default_factory=dict)
    forgotten: set[SnapshotId] = field(default_factory=set)

    def add_report(self, line: list[str]) -> None:
        match line:
            case ["kept", id_, seed]:
                self.seeds[SnapshotId(id_)] = int(seed)
            case ["used", id_]:
                self.proofs[SnapshotId(id_)] = self.proofs.get(SnapshotId(id_), 0) + 1
            case ["forgetting", id_]:
                self.forgotten.add(SnapshotId(id_))


@dataclass(slots=True)
class ProcessForker:
    process: subprocess.Popen[bytes]

    def run_until_killed(self, hot: Path, cold: Path, chance: random.Random, reported: Reported) -> None:
        """Run one process until it is killed at a random moment."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{hot} {cold} {chance.randrange(1 << 30)}\n".encode())
        self.process.stdin.flush()
        # number of reports before the kill; with none, the process is killed while it opens the store
        pid, lines = 0, chance.randrange(5)
        while not pid or lines:
            line = self.process.stdout.readline().decode().split()
            reported.add_report(line)
            if line[0] == "started":
                pid = int(line[1])
            else:
                lines = max(0, lines - 1)
        time.sleep(chance.random() * LONGEST)
        os.kill(pid, signal.SIGKILL)
        while (line := self.process.stdout.readline().decode().split()) != ["ended"]:
            assert line, "the forking process ended"
            reported.add_report(line)


@contextmanager
def process_forkers() -> Iterator[ProcessForker]:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        try:
            yield ProcessForker(process)
        finally:
            assert process.stdin
            process.stdin.close()


async def agrees(hot: Path, cold: Path, reported: Reported) -> int:
    """Check what a new process finds after a kill; return the number of snapshots."""
    store = Store(hot, cold)
    try:
        found = {kept.id: kept for kept in (await store.open()).kept}
        assert reported.seeds.keys() - reported.forgotten <= found.keys()
        for id_, kept in found.items():
            assert kept.use.restores >= reported.proofs.get(id_, 0)
            if id_ in reported.seeds:
                assert kept.tokens == tokens_of(reported.seeds[id_])
        for tier, folder in ((Tier.HOT, hot), (Tier.COLD, cold)):
            there = {kept.id for kept in found.values() if tier in kept.tiers}
            files = {name for name in names_in(folder) if not name.startswith(RUN_FOLDER)}
            in_runs = {id_ for id_ in there if tier is Tier.COLD and len(found[id_].tokens) == LONG}
            slots = {f"{id_}.{'runs' if id_ in in_runs else 'slot'}" for id_ in there}
            assert files == slots | {f"{id_}.json" for id_ in there}
        assert await damaged(store) == {}
        for id_, kept in found.items():
            assert await offered(store, hot, id_) == state_of(kept.tokens[0] // 1000)
        with closing(sqlite3.connect(hot / INDEX)) as rows:
            assert {id_ for (id_,) in rows.execute("SELECT id FROM snapshots")} == found.keys()
        return len(found)
    finally:
        await store.close()


def test_reported_snapshots_survive_a_kill_at_any_moment(tmp_path: Path):
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    chance, reported, found = random.Random(20261121), Reported(), 0
    with process_forkers() as forker:
        for _ in range(KILLS):
            forker.run_until_killed(hot, cold, chance, reported)
            found = max(found, asyncio.run(agrees(hot, cold, reported)))
    # Most kills hit a process that works, not one that waits.
    assert len(reported.seeds) >= KILLS / 2
    assert reported.proofs
    assert reported.forgotten
    assert found > 1


if __name__ == "__main__":
    fork_processes()
