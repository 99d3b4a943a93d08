"""A sidecar killed with -9 in the middle of uploads: no torn upload is used, and no reported upload is lost.

This file is also the program that is killed. It forks, so that 200 kills do not cost 200 times the imports:
obstore and Redis begin their threads in the fork.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from fleet.servers import BUCKET
from slotkeeper.engine.slotfile import PartSizes
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store.shared_store import shared as module
from slotkeeper.store.shared_store.hints import Hints
from slotkeeper.store.shared_store.object_names import IN_PARTS, HeadName, parsed, part_path, parts_in
from slotkeeper.store.shared_store.shared import SharedStore, StoreCollector
from slotkeeper.store.store import Store
from unit.store.saving import ids, offered
from unit.store.sharing import KEY, found, kept_state, sidecar

KILLS: Final = 200
FEW: Final = 12  # number of them with `make test`
LONGEST: Final = 0.06  # seconds that a process lives after its last allowed report: an upload or two
SMALL_PARTS: Final = 4096  # bytes: every larger blob is uploaded by several requests
LENGTHS: Final = (300, 700, 2000)  # tokens
SIZES: Final = PartSizes(least=16 << 10)  # a state of 300 tokens stays whole, the others are kept in parts


def say(*words: object) -> None:
    """Print in one write, so that a line is complete or absent."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def drop_local_copy(store: Store, snapshot: SnapshotId) -> None:
    """Drop the local copy, so that the state is only in the shared store."""
    await store.demote(snapshot)
    await store.unlist(snapshot)


def fork_processes() -> None:
    """Fork one process after the other; a line with a folder, URLs and a seed starts one."""
    for line in sys.stdin:
        hot, url, hints, seed = line.split()
        if not (pid := os.fork()):
            asyncio.run(upload_for_ever(Path(hot), url, hints, random.Random(int(seed))))
        say("started", pid)
        os.waitpid(pid, 0)
        say("ended")


async def upload_for_ever(hot: Path, url: str, hints: str, chance: random.Random) -> None:
    vars(module)["AT_ONCE"] = SMALL_PARTS
    more = {"hints": Hints(hints, url, lambda *_: None)} if hints != "-" else {}
    async with sidecar(hot, url, KEY, sizes=SIZES, **more) as (store, _):
        say("opened")
        while True:
            seed, length = chance.randrange(1, 1_000_000), chance.choice(LENGTHS)
            kept = await kept_state(store, hot, seed, length)
            say("uploading", kept.id)
            await store.copy_cold(kept.id)
            say("kept", kept.id, seed, length, kept.manifest.sha256)
            await drop_local_copy(store, kept.id)


@dataclass(slots=True)
class Uploaded:
    """The states that the processes reported as uploaded before they ended."""

    states: dict[SnapshotId, tuple[int, int, str]] = field(default_factory=dict)

    def add_report(self, line: list[str]) -> None:
        match line:
            case ["kept", id_, seed, length, digest]:
                self.states[SnapshotId(id_)] = int(seed), int(length), digest


@dataclass(slots=True)
class ProcessForker:
    process: subprocess.Popen[bytes]

    def run_until_killed(
        self, hot: Path, url: str, hints: str, chance: random.Random, uploaded: Uploaded
    ) -> None:
        """Run one process until it is killed at a random moment."""
        assert self.process.stdin
        self.process.stdin.write(f"{hot} {url} {hints} {chance.randrange(1 << 30)}\n".encode())
        self.process.stdin.flush()
        pid, lines = 0, chance.randrange(1, 6)  # number of reports before the kill
        while not pid or lines:
            line = self._line()
            assert line != ["ended"], "it ended before it was killed: its error is on stderr"
            uploaded.add_report(line)
            if line[0] == "started":
                pid = int(line[1])
            else:
                lines = max(0, lines - 1)
        time.sleep(chance.random() * LONGEST)
        os.kill(pid, signal.SIGKILL)
        while (line := self._line()) != ["ended"]:
            uploaded.add_report(line)

    def _line(self) -> list[str]:
        assert self.process.stdout
        line = self.process.stdout.readline().decode().split()
        assert line, "the forking process ended"
        return line


@contextmanager
def process_forkers() -> Iterator[ProcessForker]:
    paths = os.pathsep.join((str(Path(__file__).parents[1]), str(Path(__file__).parents[2])))
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}
    ) as process:
        try:
            yield ProcessForker(process)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "case",
    [
        ("s3", FEW),
        ("folder", FEW),
        pytest.param(("s3", KILLS), marks=pytest.mark.fleet),
        pytest.param(("s3 without hints", KILLS), marks=pytest.mark.fleet),
        pytest.param(("folder", KILLS), marks=pytest.mark.fleet),
    ],
    ids=lambda case: f"{case[1]} on {case[0]}",
)
async def test_a_killed_sidecar_leaves_no_torn_upload_and_loses_no_reported_upload(
    case: tuple[str, int], s3: str, redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    where, kills = case
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    hot, reader = tmp_path / "hot", tmp_path / "reader"
    url = str(tmp_path / "shared") if where == "folder" else f"s3://{BUCKET}/{tmp_path.name}"
    chance, uploaded = random.Random(14), Uploaded()
    with process_forkers() as forker:
        for _ in range(kills):
            await asyncio.to_thread(
                forker.run_until_killed, hot, url, redis if where == "s3" else "-", chance, uploaded
            )
    assert len(uploaded.states) > kills / 4
    async with sidecar(reader, url, KEY, sizes=SIZES) as (store, shared):
        for id_, (seed, length, digest) in uploaded.states.items():
            (kept,) = await found(shared, Tokens(ids(seed, length)))
            assert (kept.id, kept.manifest.sha256) == (id_, digest)
            await store.found(kept)
            await offered(store, reader, id_)
            await drop_local_copy(store, id_)
        heads = [seen.path async for seen in shared.objects.listing("heads")]
        blobs = [seen.path async for seen in shared.objects.listing("blobs")]
        assert len(heads) <= len(uploaded.states) + kills, (
            "each process may have uploaded one more state that it did not report"
        )
        whole = [path for path in heads if not path.endswith(IN_PARTS)]
        assert 0 < len(whole) < len(heads)
        collector = StoreCollector(shared, 0, grace=-1.0)
        assert (await collector.collect()).leftovers == len(blobs) - len(whole)
        await collector.collect()
        needed = {path for head in map(parsed, heads) if head for path in await parts_of(shared, head)}
        assert {seen.path async for seen in shared.objects.listing("parts")} == needed
        assert shared.objects.sweep(-1.0) >= 0
        for id_, (seed, length, _) in uploaded.states.items():
            (kept,) = await found(shared, Tokens(ids(seed, length)))
            assert kept.id == id_


async def parts_of(shared: SharedStore, head: HeadName) -> set[str]:
    return set(map(part_path, parts_in(await shared.parts_of(head)))) if head.in_parts else set()


if __name__ == "__main__":
    fork_processes()
