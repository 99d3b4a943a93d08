"""Writers, collectors and removals at once in a simulated store: every part that a head names is there.

Each request is one step. A seed decides who takes the next step, and how much time passes before it, so that
writes and rounds of garbage collection take anything from no time to longer than they may.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from slotkeeper.engine.slotfile import RUN
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.store.files import Halt, Lane
from slotkeeper.store.folders.snapshot_folder import SnapshotFolder
from slotkeeper.store.index import Kept
from slotkeeper.store.shared_store import part_objects, shared
from slotkeeper.store.shared_store.object_names import part_path, parts_in
from slotkeeper.store.shared_store.objects import Objects, ObjectSeen
from slotkeeper.store.shared_store.part_objects import FRESH
from slotkeeper.store.shared_store.shared import SharedStore, StoreCollector, parts_named
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import MissingError, SnapshotError, StoreError
from unit.engine.slotfiles import slot_file
from unit.store.saving import keep, opened
from unit.store.sharing import ALL_IN_PARTS

SEEDS: Final = 8
STEPS: Final = 4000  # requests of all actors together
STAYS: Final = 0.85  # the chance that the same actor takes the next step
PAUSES: Final = (0.0,) * 90 + (1.0,) * 30 + (300.0,) * 2 + (600.0,)  # seconds before a step
LONGEST_REQUEST: Final = FRESH / 2  # seconds; real ones fail after far less


class World:
    """The objects and the clock, and who waits for a step."""

    def __init__(self, seed: int) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.now = 1e6
        self.counts = Counter[str]()
        self.secrets = random.Random(seed)  # of names, on which the order of removals depends
        self._chance = random.Random(seed)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._since: dict[str, float] = {}  # when each actor began its last request

    async def turn(self, actor: str) -> None:
        self._waiting[actor] = asyncio.get_running_loop().create_future()
        self._since[actor] = self.now
        await self._waiting[actor]

    async def run(self, actors: dict[str, Coroutine[Any, Any, None]]) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(actor) for name, actor in actors.items()}
            last = ""
            for _ in range(STEPS):
                while len(self._waiting) < len(tasks):
                    await asyncio.sleep(0)
                if last not in self._waiting or self._chance.random() > STAYS:
                    last = self._chance.choice(sorted(self._waiting))
                pause = self._chance.choice(PAUSES)
                oldest = min(self._since, key=self._since.__getitem__)
                if self.now + pause - self._since[oldest] > LONGEST_REQUEST:
                    last, pause = oldest, 0.0
                self.now += pause
                self._waiting.pop(last).set_result(None)
                await asyncio.sleep(0)
                self.check()
            for task in tasks.values():
                task.cancel()

    def check(self) -> None:
        for path, (data, _) in self.objects.items():
            if path.startswith("heads/"):
                lost = [
                    part for part in parts_in(parts_named(data) or b"") if part_path(part) not in self.objects
                ]
                assert not lost, f"{path} names parts that are gone, after {dict(self.counts)}"

    def choice(self, things: Sequence[Kept]) -> Kept:
        return self._chance.choice(things)


class Simulated:
    """The requests of one actor to the objects of a world."""

    url = "simulated"
    up = True

    def __init__(self, world: World, actor: str) -> None:
        self._world, self._actor = world, actor

    async def create(self, path: str, data: bytes) -> bool:
        await self._world.turn(self._actor)
        if path in self._world.objects:
            return False
        self._world.objects[path] = data, self._world.now
        self._world.counts[path.partition("/")[0] + (" again" if path[-2] == "-" else "")] += 1
        return True

    async def mark(self, path: str) -> None:
        await self._world.turn(self._actor)
        self._world.objects[path] = b"", self._world.now

    async def read(self, path: str, most: int) -> bytes:
        await self._world.turn(self._actor)
        if path not in self._world.objects or len(self._world.objects[path][0]) > most:
            raise MissingError(path)
        return self._world.objects[path][0]

    async def size(self, path: str) -> int | None:
        await self._world.turn(self._actor)
        return len(self._world.objects[path][0]) if path in self._world.objects else None

    async def listing(self, folder: str, *, existing: bool = False) -> AsyncIterator[ObjectSeen]:
        await self._world.turn(self._actor)
        for path, (data, changed) in list(self._world.objects.items()):
            if path.startswith(folder + "/"):
                yield ObjectSeen(path, len(data), changed)

    async def remove(self, path: str) -> None:
        await self._world.turn(self._actor)
        if self._world.objects.pop(path, None):
            self._world.counts[f"{path.partition('/')[0]} removed"] += 1


async def states_in(hot: Path) -> tuple[list[Kept], SnapshotFolder]:
    """Return states of three conversations, which begin alike, and their folder."""
    async with opened(hot) as store:
        kept = [await kept_state(store, hot, n, seed) for n in (2, 3, 4) for seed in (1, 2)]
        kept.append(await kept_state(store, hot, 2, 1, slot=1))
        return kept, store._tiers.hot


async def kept_state(store: Store, hot: Path, runs: int, seed: int, slot: int = 0) -> Kept:
    n = runs * RUN + 5 + slot
    data = slot_file("dense", 4, range(n), seed=seed, slot=slot)
    return await keep(store, hot, data, tokens=Tokens(range(n)).within(f"{seed}"))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], None]:
    """Return a function that makes a world's clock ours; requests follow each other, and no threads run."""

    async def do(_: Lane, work: Callable[[Halt], Any]) -> Any:
        return work(Halt())

    def of(world: World) -> None:
        clock = SimpleNamespace(monotonic=lambda: world.now, time=lambda: world.now)
        names = SimpleNamespace(
            token_bytes=world.secrets.randbytes, token_hex=lambda n: world.secrets.randbytes(n).hex()
        )
        for module in (part_objects, shared, shared):
            monkeypatch.setattr(module, "time", clock)
            monkeypatch.setattr(module, "secrets", names, raising=False)
            monkeypatch.setattr(module, "LOOKS", 1, raising=False)
        monkeypatch.setattr(shared, "CHEAP", 0)
        monkeypatch.setattr(Lane, "do", do)
        monkeypatch.setattr(Lane, "finish", lambda _, work: work())

    return of


async def test_no_part_that_a_head_names_is_ever_removed(tmp_path: Path, at_once):
    kept, hot = await states_in(tmp_path / "hot")
    total = Counter[str]()
    for seed in range(SEEDS):
        world = World(seed)
        at_once(world)

        def sidecar(name: str, world: World = world) -> SharedStore:
            return SharedStore(cast(Objects, Simulated(world, name)), sizes=ALL_IN_PARTS)

        async def write(name: str, world: World = world, sidecar: Any = sidecar) -> None:
            own = sidecar(name)
            while True:
                with suppress(StoreError):
                    await own.take(world.choice(kept), hot)
                    world.counts["taken"] += 1

        async def remove(name: str, world: World = world, sidecar: Any = sidecar) -> None:
            own = sidecar(name)
            while True:
                with suppress(SnapshotError):
                    await own.remove(world.choice(kept))

        async def collect(name: str, sidecar: Any = sidecar) -> None:
            own = StoreCollector(sidecar(name), 10 * RUN * 64)
            while True:
                await own.collect()

        writers = {name: write(name) for name in ("one", "two")}
        collectors = {name: collect(name) for name in ("first", "second")}
        await world.run({**writers, **collectors, "third": remove("third")})
        total += world.counts
    assert total["taken"] > 10 * SEEDS
    for happened in ("doomed", "parts removed", "doomed removed", "parts again"):
        assert total[happened] > SEEDS
