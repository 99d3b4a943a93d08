"""Engines that other programs manage: started, put to sleep, erased, killed, swapped at other ports.

The programs are stand-ins, made from their sources (`managed.py`); the engines are real. The same script is
played without us (stock) and with us, and nothing may fail with us that does not fail there.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import orjson
import pytest
from benchmarks.routers import NoAnswerError, Talk

from managed import LemonadeLike, Managed, OllamaLike, ServeLike, StudioLike, serving
from patience import PATIENCE
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.engine.answers import Health
from slotkeeper.engine.child.launch import find_engine
from slotkeeper.engine.nearby import NotChosenError, chosen, look
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.slots.table import UNSEEN_FOR
from slotkeeper.scheduler.types import EngineId
from slotkeeper.store.files import MANIFEST

pytestmark = pytest.mark.one_in(8)

MODELS: Final = {"coder": Tiny.HYBRID, "writer": Tiny.DENSE}
KINDS: Final = (LemonadeLike, OllamaLike, StudioLike, ServeLike)
SAVING: Final = (LemonadeLike, StudioLike)  # their engines save slots
MORE: Final = 1.02  # times stock's tokens
PAGE: Final = Path(__file__).parents[2] / "docs" / "managers.md"

Rest = Callable[[], Awaitable[object]]


def stand_in(kind: type[Managed], build: str, folder: Path, command: tuple[str, ...] = ()) -> Managed:
    """Return a manager with the tiny models; `command` is started in place of the engine."""
    (folder / "slots").mkdir(parents=True, mode=0o700)
    binary = find_engine(build)
    models = {name: build_model(tiny) for name, tiny in MODELS.items()}
    return kind(command or tuple(binary.command([])), binary.env, models, folder)


@dataclass
class Played:
    """How a script ended: the requests that failed, and the prompt tokens of all engines."""

    failed: list[str]
    tokens: int = 0


async def play(
    manager: Managed, client: Callable[[], httpx.AsyncClient], rest: Rest, noticed: Rest | None = None
) -> Played:
    """Play the script: a turn after each thing that a manager does to an engine.

    A client's model is loaded by the manager before each turn, as by another request through its own port.
    `noticed` waits until a sidecar knows of that.
    """
    played = Played([])
    coder, writer = Talk("coder", "a"), Talk("writer", "b")

    async def turn(talk: Talk) -> None:
        await manager.load(talk.model)
        if noticed:
            await noticed()
        async with client() as fresh:
            try:
                await talk.turn(fresh)
            except (NoAnswerError, httpx.HTTPError) as error:
                played.failed.append(repr(error))
        await rest()

    await turn(coder)  # start
    await turn(coder)
    await manager.idle()  # erase, or save
    await asyncio.sleep(UNSEEN_FOR)  # managers do that to engines that have been idle for longer
    await turn(coder)
    await manager.unload()  # sleep
    await turn(coder)
    await manager.crashed()  # restart
    await turn(coder)
    await turn(writer)  # swap
    await turn(coder)
    played.tokens = await manager.counted()
    assert played.tokens >= coder.computed + writer.computed, "an engine's counter has lost some"
    return played


def client_of(url: Callable[[], str]) -> Callable[[], httpx.AsyncClient]:
    return lambda: httpx.AsyncClient(base_url=url(), timeout=PATIENCE)


async def nothing() -> None:
    """Stock has nothing to wait for."""


# -- clients connect to us, and we to the manager's engine, wherever it is: --upstream auto ---------------


def only(manager: Managed, folder: Path) -> Path:
    """Return a /proc of nothing but the manager's engine, and of this process as its parent."""
    folder.mkdir(exist_ok=True)
    for link in folder.iterdir():
        link.unlink()
    for pid in filter(None, (manager.process and manager.process.pid, os.getpid())):
        (folder / str(pid)).symlink_to(f"/proc/{pid}")
    return folder


@asynccontextmanager
async def following(manager: Managed, front: str, folder: Path) -> AsyncIterator[Sidecar]:
    """Run a sidecar with `--upstream auto`, on a machine with only this manager."""

    async def search() -> str | None:
        port = int(front.rpartition(":")[2])
        try:
            return chosen(await look(ports=(port,), proc=only(manager, folder / "proc"))).base
        except NotChosenError:
            return None

    base = await search()
    assert base == manager.base
    bugs: list[BaseException] = []
    tasks = Tasks(bugs.append)
    ours: dict[str, Any] = {"slot_dir": folder / "slots", "save_pause": lab.PAUSE_SECONDS, "read_flags": True}
    async with lab.in_front_of(base, **ours) as sidecar:
        tasks.start(sidecar.follow(search))
        try:
            yield sidecar
        finally:
            await tasks.close()
    assert not bugs


async def settled(sidecar: Sidecar, manager: Managed) -> None:
    """Wait until the sidecar has the manager's engine, wherever that is now, and has saved its slots."""
    async with asyncio.timeout(PATIENCE):
        while True:
            link = sidecar.driver.links.get(EngineId(manager.base))
            if link and (link.ready or link.health is Health.SLEEPING):
                break
            await asyncio.sleep(0.02)
    await lab.rested(sidecar)


async def only_at(sidecar: Sidecar, base: str) -> None:
    """Wait until the sidecar has dropped the addresses of all engines that have ended."""
    async with asyncio.timeout(PATIENCE):
        while [*sidecar.driver.links] != [base]:
            await asyncio.sleep(0.02)


async def knows(sidecar: Sidecar, manager: Managed) -> None:
    """Wait until the sidecar knows which process the manager's engine is, and whether it sleeps."""
    async with asyncio.timeout(PATIENCE):
        while True:
            props = orjson.loads((await manager.asked("GET", "/props"))[1])
            link = sidecar.driver.links.get(EngineId(manager.base))
            asleep = link is not None and link.health is Health.SLEEPING
            awake = link is not None and link.ready and link.process == props["media_marker"]
            if asleep if props.get("is_sleeping") else awake:
                return
            await asyncio.sleep(0.02)


async def without_us(kind: type[Managed], build: str, folder: Path) -> Played:
    """Play the script with clients that know where the engine is."""
    stock = stand_in(kind, build, folder)
    async with serving(stock):
        return await play(stock, client_of(lambda: stock.base), nothing)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sidecar_follows_an_engine_that_a_manager_starts_at_other_ports(kind, build, tmp_path):
    without = await without_us(kind, build, tmp_path / "stock")
    manager = stand_in(kind, build, tmp_path / "ours")
    async with serving(manager) as front:
        await manager.load("coder")
        async with following(manager, front, manager.folder) as sidecar:
            ours = await play(
                manager,
                client_of(lambda: lab.url_of(sidecar)),
                rest=lambda: settled(sidecar, manager),
                noticed=lambda: knows(sidecar, manager),
            )
            if kind is not ServeLike:
                assert len(set(manager.bases)) == len(manager.bases) > 3, "starts at other ports were meant"
            await only_at(sidecar, manager.base)
    assert ours.failed == without.failed == []
    assert ours.tokens <= (MORE if kind is OllamaLike else 0.8) * without.tokens, (ours, without)


async def test_requests_wait_while_an_engine_moves(build, tmp_path):
    """Sent before the sidecar has noticed what has happened, they may cost what they cost without it."""
    without = await without_us(LemonadeLike, build, tmp_path / "stock")
    manager = stand_in(LemonadeLike, build, tmp_path / "ours")
    async with serving(manager) as front:
        await manager.load("coder")
        async with following(manager, front, manager.folder) as sidecar:
            ours = await play(
                manager, client_of(lambda: lab.url_of(sidecar)), rest=lambda: settled(sidecar, manager)
            )
    assert ours.failed == without.failed == []
    assert ours.tokens <= MORE * without.tokens, (ours, without)


# -- clients connect to the manager, which starts us in place of llama-server -----------------------------


def wrapper(folder: Path, build: str) -> Path:
    """Write the script of the page, for this build and this checkout, and return its path."""
    (script,) = re.findall(r"```sh\n(#!/bin/sh\n.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    ours = f"{sys.executable} -m slotkeeper up"
    text = re.sub(r"(?m)^engine=.*$", f"engine={build}", script).replace("slotkeeper up", ours)
    assert text.count(ours) == 1
    path = folder / "llama-server-slotkeeper"
    path.write_text(text)
    path.chmod(0o755)
    return path


async def saved(folder: Path, seen: set[str]) -> None:
    """Wait until the sidecar has written another snapshot, and given the manifest that completes it."""
    async with asyncio.timeout(PATIENCE):
        while (
            not (now := {entry.name for entry in os.scandir(folder) if entry.name.endswith(MANIFEST)}) - seen
        ):
            await asyncio.sleep(0.05)
    seen |= now


@pytest.mark.parametrize("kind", SAVING)
async def test_a_manager_that_starts_slotkeeper_up_as_its_llama_server(kind, build, tmp_path, monkeypatch):
    stock = stand_in(kind, build, tmp_path / "stock")
    async with serving(stock) as front:
        without = await play(stock, client_of(lambda: front), nothing)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    manager = stand_in(kind, build, tmp_path / "ours", (str(wrapper(tmp_path, build)),))
    seen: set[str] = set()
    async with serving(manager) as front:
        ours = await play(manager, client_of(lambda: front), lambda: saved(manager.folder / "slots", seen))
    assert ours.failed == without.failed == []
    assert ours.tokens <= 0.8 * without.tokens, (ours, without)
