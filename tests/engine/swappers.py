"""llama-swap with two tiny models: a stand-in with real engines, or the program itself."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from benchmarks.routers import ALIAS, LOOK_SECONDS, MODELS, PROGRAM, Program, Talk, fresh_client, talks

from patience import PATIENCE
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import build as build_model
from slotkeeper.engine.child.launch import find_engine
from swap_like import SwapGroup, SwapLike, Swapped, served_by, serving

ATTEMPTS: Final = 5  # turns, until one is saved before its model is unloaded or sleeps
STAND_IN: Final = "stand-in"
ROUNDS: Final = 3  # turns of each conversation
MORE: Final = 1.05  # times the oracle may be computed
LOGGED: Final = re.compile(r'"[A-Z]+ (/[^ "]*) HTTP')  # the path of a request, in the program's log
TOGETHER: Final = SwapGroup(members=tuple(MODELS), swap=False, exclusive=False)
ALONE: Final = SwapGroup(members=tuple(MODELS))


def wanted(kind: str) -> str:
    """Return this kind, or skip the test if it needs the program and that is not here."""
    if kind == PROGRAM and (os.environ.get("CI") or shutil.which(PROGRAM) is None):
        pytest.skip("the program llama-swap is not on PATH; its stand-in was tested")
    return kind


async def turn_that_reuses(talk: Talk, client: httpx.AsyncClient) -> httpx.Response:
    """Send the next turn, which must compute less than half of what the turns before it have computed."""
    first, talk.computed = talk.computed, 0
    answer = await talk.turn(client)
    assert talk.computed < first / 2, (talk.computed, first)
    return answer


NOTICED_SECONDS: Final = 5.0


async def saved_turn(
    client: httpx.AsyncClient,
    sidecar: Sidecar,
    loaded: Callable[[], Awaitable[bool]],
    ended: Callable[[], Awaitable[None]],
) -> Talk:
    """Return a conversation whose first turn was saved before its model had `ended`: unloaded, or asleep.

    On a busy machine the model can end before the pause in which its state is saved.
    """
    for attempt in range(ATTEMPTS):
        talk = Talk("coder", f"a{attempt}")
        await talk.turn(client)
        await lab.rested(sidecar)
        saved = await loaded()
        await ended()
        await _noticed(sidecar)
        if saved:
            return talk
    pytest.fail(f"in {ATTEMPTS} attempts the model ended before its state was saved")


async def _noticed(sidecar: Sidecar) -> None:
    """Give the sidecar time to learn that the model has ended. One that sleeps stays up."""
    with suppress(TimeoutError):
        async with asyncio.timeout(NOTICED_SECONDS):
            while any(
                table.up for table in sidecar.driver.placement.tables.values() if table.model == "coder"
            ):
                await asyncio.sleep(0.02)


@dataclass(frozen=True)
class Gateway:
    """What answers at `base`, and the folder of the engines' slot files."""

    base: str
    slots: Path
    stand_in: SwapLike | None = None  # None: it is the program
    program: Program | None = None

    def asked(self) -> list[str]:
        """Return the paths of all requests that it has got, or by its log has answered; the oldest first."""
        if self.stand_in:
            return list(self.stand_in.paths)
        assert self.program
        return LOGGED.findall(self.program.log.read_text())

    async def running(self) -> Mapping[str, str]:
        """Return the state of each model that is not stopped. This loads none."""
        async with fresh_client(self.base) as client:
            listed = (await client.get("/running")).json()["running"]
        return {one["model"]: one["state"] for one in listed}

    async def comes_to(self, *models: str) -> None:
        """Wait until exactly these models are ready."""
        async with asyncio.timeout(PATIENCE):
            while await self.running() != dict.fromkeys(models, "ready"):
                await asyncio.sleep(LOOK_SECONDS)


@dataclass
class Commands:
    """How each model's engine is started."""

    build: str
    folder: Path
    models: dict[str, list[str]] = field(default_factory=dict)
    bases: dict[str, str] = field(default_factory=dict)
    proxies: Mapping[str, str] = field(default_factory=dict)  # where its requests go instead, by engine
    hooks: Mapping[str, str] = field(default_factory=dict)  # how it is stopped, by engine

    def add(self, name: str, file: Path, slots: Path) -> None:
        binary = find_engine(self.build)
        flags = lab.stock_flags(binary, file, slots, context_tokens=16384)
        self.models[name] = [*flags, "--cache-ram", "0"]
        self.bases[name] = f"http://127.0.0.1:{flags[flags.index('--port') + 1]}"


@asynccontextmanager
async def gateway(
    kind: str, build: str, folder: Path, *, group: SwapGroup = ALONE, ttl: int = 0, **more: Path | Swapped
) -> AsyncIterator[Gateway]:
    """Run a gateway to the two models, and to `more`, which are files or servers of a test."""
    slots = folder / "slots"
    slots.mkdir()
    commands = Commands(build, folder)
    for name, tiny in MODELS.items():
        commands.add(name, build_model(tiny), slots)
    for name, file in more.items():
        if isinstance(file, Path):
            commands.add(name, file, slots)
    others = {name: server for name, server in more.items() if isinstance(server, Swapped)}
    group = SwapGroup(members=(*group.members, *more), swap=group.swap, exclusive=group.exclusive)
    async with started(kind, commands, group, ttl, others) as there:
        yield there


@asynccontextmanager
async def started(
    kind: str,
    commands: Commands,
    group: SwapGroup = ALONE,
    ttl: int = 0,
    others: Mapping[str, Swapped] | None = None,
) -> AsyncIterator[Gateway]:
    """Run a gateway of this kind."""
    slots = commands.folder / "slots"
    if kind == STAND_IN:
        async with _imitated(commands, group, ttl, others or {}) as (base, stand_in):
            yield Gateway(base, slots, stand_in)
    else:
        async with _program(commands, group, ttl) as program:
            yield Gateway(program.base, slots, program=program)


@asynccontextmanager
async def _imitated(
    commands: Commands, group: SwapGroup, ttl: int, others: Mapping[str, Swapped]
) -> AsyncIterator[tuple[str, SwapLike]]:
    binary = find_engine(commands.build)
    models = {
        name: served_by(
            *(binary, flags, commands.bases[name], commands.folder / f"{name}.log"),
            proxy=commands.proxies.get(commands.bases[name], ""),
            hook=commands.hooks.get(commands.bases[name], ""),
            aliases=(ALIAS,) if name == "coder" else (),
            ttl=ttl,
        )
        for name, flags in commands.models.items()
    }
    stand_in = SwapLike({**models, **others}, groups=(group,))
    async with serving(stand_in) as base:
        yield base, stand_in


@asynccontextmanager
async def _program(commands: Commands, group: SwapGroup, ttl: int) -> AsyncIterator[Program]:
    binary = find_engine(commands.build)
    models = {
        name: {
            "cmd": shlex.join(binary.command(flags)),
            "proxy": commands.proxies.get(commands.bases[name], commands.bases[name]),
            "cmdStop": commands.hooks.get(commands.bases[name], ""),
            "env": [f"{key}={value}" for key, value in binary.settings.items()],
            "aliases": [ALIAS] if name == "coder" else [],
            "ttl": ttl,
        }
        for name, flags in commands.models.items()
    }
    groups = {"all": {"swap": group.swap, "exclusive": group.exclusive, "members": list(group.members)}}
    async with Program.of(commands.folder, {"models": models, "groups": groups}) as program:
        yield program


@asynccontextmanager
async def keeping(there: Gateway, **settings: Any) -> AsyncIterator[tuple[Sidecar, httpx.AsyncClient]]:
    """Run a sidecar in front of the gateway, and a client of it."""
    ours = {"slot_dir": there.slots, "save_pause": lab.PAUSE_SECONDS, **settings}
    async with AsyncExitStack() as stack:
        sidecar = await stack.enter_async_context(lab.in_front_of(there.base, **ours))
        base = lab.url_of(sidecar)
        yield sidecar, await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=PATIENCE))


def computed(found: Sequence[Talk], sidecar: Sidecar | None = None) -> int:
    """Return the tokens by the engine's figures, and those of the sidecar's own prefills."""
    ours = lab.spent(sidecar)
    return sum(talk.computed for talk in found) + ours.plant + ours.idle


async def resident(kind: str, build: str, folder: Path, turns: int) -> int:
    """Return the tokens that the same conversations cost if all models stay loaded, each in its own slot."""
    found = talks()
    async with gateway(kind, build, folder, group=TOGETHER) as there, fresh_client(there.base) as client:
        for _ in range(turns):
            for n, talk in enumerate(found):
                await talk.turn(client, id_slot=n // len(MODELS))
    return computed(found)
