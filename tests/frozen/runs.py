"""The scripts that are recorded: playbooks, walks of the placement machine, simulated fleets and sessions.

A run has parts, which are recorded alone: the playbooks of one file, twenty walks, one fleet with each
kind of memory. `OFTEN` are the runs that the tests repeat; the others take two minutes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
from benchmarks import profiles, simulated_engines
from benchmarks.engine_profiles import PROFILES, EngineProfile
from benchmarks.going_back import edits_after
from benchmarks.profile_work import WORK
from benchmarks.profiles import LIMITS, play, sidecar
from benchmarks.simulator.load import LoadProfile, SimulatedTurn, Synthetic
from benchmarks.simulator.simulation import ONE_SIDECAR, Files, FleetShape, Simulation
from benchmarks.simulator.virtual_clock import VirtualClock

from frozen.recorder import Recording, recorded
from properties.test_any_swaps import PAIRS, World
from properties.test_kv_pool import SharedBufferMachine
from properties.test_placement_machine import (
    KINDS,
    NamespacesMachine,
    PlacementMachine,
    SharedEnginesMachine,
)
from properties.test_priority import PriorityMachine
from slotkeeper.scheduler.prompts.tokens import Boundary, BoundaryKind
from slotkeeper.scheduler.slots.engine_model import Memory
from slotkeeper.scheduler.snapshots.budgets import GIB
from slotkeeper.scheduler.types import EngineId

Parts = Iterator[tuple[str, Recording]]
PLAYBOOKS: Final = Path(__file__).parents[1] / "playbooks"


class PlaybookError(Exception):
    """A playbook fails, so its recording would say nothing."""


class Watch:
    """A plugin of pytest that records each test."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Recording]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with recorded() as recording:
            yield
        self.found.setdefault(f"playbook/{item.path.stem.removeprefix('test_')}", {})[item.name] = recording


def playbooks() -> Mapping[str, Mapping[str, Recording]]:
    """Run all playbooks in this process, which must not be a test. Raises PlaybookError."""
    watch = Watch()
    # Plain assertions: another recording has imported modules that pytest would rewrite.
    alone = ("--assert=plain", "-pno:randomly", "-pno:xdist", "-pno:cov", "-pno:cacheprovider")
    with redirect_stdout(StringIO()) as said:
        ended = pytest.main(["-q", *alone, str(PLAYBOOKS)], plugins=[watch])
    if ended:
        raise PlaybookError(said.getvalue())
    return watch.found


# -- walks of the placement machine ----------------------------------------------------------------------


class UnmeasuredBufferMachine(SharedBufferMachine):
    """A shared buffer whose cells are not compared with what was admitted.

    That holds for requests that were all rendered when the last one was admitted, and a walk meets others.
    """

    def sure(self, _: EngineId) -> bool:
        return False


MACHINES: Final[Mapping[str, type[PlacementMachine]]] = {
    "alone": PlacementMachine,
    "foreign-tasks": SharedEnginesMachine,
    "namespaces": NamespacesMachine,
    "shared-buffer": UnmeasuredBufferMachine,
    "priorities": PriorityMachine,
}
WALKS: Final = 400  # of each machine
WALKS_IN_A_RUN: Final = 20
STEPS: Final = 40
PAUSES: Final = (0.001, 0.06, 0.5, 70.0)  # seconds


def walks(machine: type[PlacementMachine], seeds: range) -> Parts:
    for seed in seeds:
        with recorded() as recording:
            walk(machine(), random.Random(seed))
        yield f"seed {seed}", recording


def walk(world: PlacementMachine, chance: random.Random) -> None:
    """Take random steps, and let everything end. The seed alone decides, so no library may change them."""
    world.build(
        slots=[chance.randint(1, 3) for _ in range(chance.randint(1, 2))],
        ram=chance.random() < 0.5,
        files=chance.choice([0, 2, 4]),
        memory=chance.choice([Memory.DENSE, Memory.HYBRID]),
    )
    for _ in range(STEPS):
        chance.choice([*steps(world, chance)])()
    world.teardown()


def steps(world: PlacementMachine, chance: random.Random) -> Iterator[Callable[[], None]]:
    """Yield the rules of the machine that are possible now; the common ones several times."""
    which, either = chance.randrange(1000), chance.random() < 0.5
    choices = [chance.randrange(1000) for _ in range(chance.randint(1, 12))]
    asks = partial(
        world.arrive,
        choices=choices[:3],
        who=(chance.choice("abc"), chance.randint(1, 4)),
        kind=chance.choice(KINDS),
        turn=chance.randint(1, 4),
        renders=either,
    )
    yield from (asks,) * 3
    yield from (partial(world.anything_happens, choices=choices),) * 3
    yield partial(world.wait, seconds=chance.choice(PAUSES))
    yield partial(world.engine_dies, which=which % 8, returns=either)
    if world.alive:
        yield partial(world.client_leaves, which=which)
    if world.unrendered:
        yield world.cannot_render
    if world.looks:
        yield world.look_fails
    if world.actions:
        yield partial(world.an_action_fails, trouble=1 + which % 2)
    if world.files:
        yield partial(world.a_file_is_lost, which=which, seen=either)
    if not all(world.up.values()):
        yield world.engine_returns
    if len(world.engines) > 1:
        yield partial(world.drain_or_undrain, which=which)
        yield partial(world.a_request_fails, which=which, broken=either)
    if isinstance(world, SharedEnginesMachine):
        yield partial(
            world.foreign_task,
            which=which,
            wanted=chance.choice([None, 0, 1]),
            length=chance.randint(1, 90),
        )


def swaps(seeds: range) -> Parts:
    """Walks of a router's models, of which it keeps one, two, or those that it chooses."""
    for seed in seeds:
        chance = random.Random(seed)
        with recorded() as recording:
            World(chance, most=seed % 3, stay=frozenset(chance.sample(PAIRS, seed % 4))).run()
        yield f"seed {seed}", recording


# -- the simulator ---------------------------------------------------------------------------------------

ENGINES: Final = (1, 4, 8)
SLOTS: Final = 2
SMALL_FOLDER_BYTES: Final = 2 * GIB  # so little that files are dropped
GOERS_BACK: Final = 3
AGENTS: Final[Mapping[str, Any]] = {
    "turns": 3,
    "systems": 2,
    "system_tokens": 1500,
    "first_tokens": 600,
    "turn_tokens": 300,
    "reply_tokens": 60,
    "begin_within": 10.0,
    "pause": 4.0,
}


def fleet(profile: EngineProfile, engines: int, **shape: Any) -> Parts:
    """Two agents more than there are slots."""
    for memory in Memory:
        load = Synthetic(conversations=SLOTS * engines + 2, **AGENTS).load()
        made = FleetShape(
            **{"way": ONE_SIDECAR, **shape}, engines=engines, slots=SLOTS, memory=memory, rates=profile.rates
        )
        with recorded() as recording:
            Simulation(load, made).run()
        yield memory.value, recording


def session(profile: EngineProfile, work: str, folder_bytes: int | None = LIMITS.hot_bytes) -> Parts:
    clock, limits = VirtualClock(), replace(profiles.LIMITS, hot_bytes=folder_bytes)
    with recorded() as recording, patch.object(profiles, "LIMITS", limits):
        served, _ = sidecar(profile, clock)
        (engine,) = served.engines.values()
        play(served, engine, WORK[work](1), clock)
    yield "seed 1", recording


def going_back(profile: EngineProfile, *, chats: int, returns: float) -> Parts:
    """Users who go back to earlier turns, with a folder that holds a part of their states."""
    for seed in range(GOERS_BACK):
        made = edits_after(random.Random(seed), chats=chats, returns=returns)
        turns = [
            SimulatedTurn(
                prompt=request.prompt,
                reply=request.end.cut(len(request.prompt)),
                at=request.at,
                boundaries=(Boundary(request.boundary, BoundaryKind.USER),),
            )
            for request in made
        ]
        load = LoadProfile(about="", conversations={"client": partial(iter, turns)})
        for memory in (Memory.DENSE, Memory.HYBRID):
            shape = FleetShape(
                way=ONE_SIDECAR,
                engines=1,
                slots=1,
                memory=memory,
                rates=profile.rates,
                hot_bytes=SMALL_FOLDER_BYTES,
            )
            with recorded() as recording:
                Simulation(load, shape).run()
            yield f"seed {seed}, {memory.value}", recording


def fast_and_slow(*, files: bool) -> Parts:
    work = simulated_engines.Work(agents=8, turns=4, think=0.2)
    with recorded() as recording:
        simulated_engines.waits(3, None, work, files=files, seed=1)
    yield "seed 1", recording


# -- all of them -----------------------------------------------------------------------------------------

Run = Callable[[], Parts]


def _walks() -> Iterator[tuple[str, Run]]:
    kinds: dict[str, Callable[[range], Parts]] = {
        **{name: partial(walks, machine) for name, machine in MACHINES.items()},
        "swaps": swaps,
    }
    for name, kind in kinds.items():
        for first in range(0, WALKS, WALKS_IN_A_RUN):
            yield f"machine/{name}/{first}", partial(kind, range(first, first + WALKS_IN_A_RUN))


def _fleets() -> Iterator[tuple[str, Run]]:
    for profile in PROFILES:
        for engines in ENGINES:
            yield f"fleet/{profile.name}/{engines}", partial(fleet, profile, engines)
    for engines in ENGINES[:2]:
        small = partial(fleet, PROFILES[0], engines, hot_bytes=SMALL_FOLDER_BYTES)
        yield f"fleet/small-folder/{engines}", small
    for chats in (1, 2):
        yield f"fleet/going-back/{chats}", partial(going_back, PROFILES[0], chats=chats, returns=0.25)
    for files in (Files.NONE, Files.SHARED):
        gateway = partial(fleet, PROFILES[0], 4, way="consistent-hash", files=files)
        yield f"fleet/gateway/files-{files.value}", gateway
    for saved in (True, False):
        yield f"fleet/fast-and-slow/files-{'local' if saved else 'none'}", partial(fast_and_slow, files=saved)


def _sessions() -> Iterator[tuple[str, Run]]:
    for profile in PROFILES:
        for work in WORK:
            yield f"session/{profile.name}/{work}", partial(session, profile, work)
    for work in WORK:
        small = partial(session, PROFILES[0], work, SMALL_FOLDER_BYTES)
        yield f"session/small-folder/{work}", small


RUNS: Final[Mapping[str, Run]] = {**dict(_walks()), **dict(_fleets()), **dict(_sessions())}
# The first walks of each machine, fleets of one profile, sessions on one profile of each kind of memory.
SELDOM_FLEETS: Final = (
    *(f"fleet/{profile.name}/" for profile in PROFILES[1:]),
    f"fleet/{PROFILES[0].name}/{ENGINES[-1]}",
    "fleet/going-back/1",
)
SESSIONS_OFTEN: Final = ("session/apu-27b/", "session/apu-120b-moe/", "session/card-14b/", "session/small")
OFTEN: Final = tuple(
    name
    for name in RUNS
    if (name.startswith("machine/") and name.endswith("/0"))
    or (name.startswith("fleet/") and not name.startswith(SELDOM_FLEETS))
    or name.startswith(SESSIONS_OFTEN)
)
