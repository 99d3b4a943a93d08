"""Starting, watching and stopping real engines, on both builds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from itertools import chain
from pathlib import Path

import psutil
import pytest

from chaos.raw import until
from containers import ROOT
from patience import PATIENCE
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.cli.main import parsers
from slotkeeper.engine.answers import Health
from slotkeeper.engine.child.launch import (
    EPHEMERAL,
    LOWEST_PORT,
    PROMISED,
    _promised,
    find_engine,
    free_port,
    private_folder,
    recommended,
)
from slotkeeper.engine.child.process import Backoff, EngineDiedError, EngineProcess, Supervisor
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.scheduler.types import SlotId
from slotkeeper.settings import Settings

PARENT = """
import asyncio, json, sys
from pathlib import Path
from slotkeeper.engine.child.launch import find_engine
from slotkeeper.engine.child.process import EngineProcess

async def main():
    build, base, log, *args = json.loads(sys.argv[1])
    process = EngineProcess(find_engine(build), args, base=base, log=Path(log))
    process.start()
    await process.wait_ready()
    print(process.pid, flush=True)
    await process.wait()

asyncio.run(main())
"""


def test_a_free_port_is_outside_the_range_that_the_kernel_hands_out():
    """The engine binds it later: meanwhile the kernel gives other ports to listeners and clients."""
    lowest = int(EPHEMERAL.read_text("ascii").split()[0])
    if lowest < LOWEST_PORT + 200:
        pytest.skip("here the kernel hands out nearly all ports")
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == len(ports)
    assert max(ports) < lowest
    assert len(_promised) == PROMISED


def test_a_port_that_is_taken_is_not_returned_as_free(monkeypatch):
    """Many ports follow the taken one: other processes of a test run have reserved some of them."""
    others = range(20101, 20201)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = chain([taken.getsockname()[1]], others)
        monkeypatch.setattr("slotkeeper.engine.child.launch._reserved_ports", lambda: ports)
        assert free_port() in others


def test_two_processes_never_get_the_same_free_port():
    """Otherwise each would use the engine that started first, and take it for its own."""
    two = [free_port(), free_port()]
    code = f"from slotkeeper.engine.child import launch; launch._reserved_ports = lambda: iter({two})\n"
    drawn = subprocess.run(
        [sys.executable, "-c", f"{code}print(launch.free_port())"], capture_output=True, text=True, check=True
    )
    assert int(drawn.stdout) not in two


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for this signal. Only Linux tells; elsewhere True."""
    if sys.platform != "linux":
        return True
    status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    (caught,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


def alive(pid: int | None) -> bool:
    """Whether the process runs; a zombie does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def args(build, tmp_path) -> list[str]:
    """Return the flags that `up` gives an engine of this build."""
    binary = find_engine(build)
    flags = recommended(
        binary.known,
        port=free_port(),
        slot_dir=private_folder(tmp_path / "slots"),
        eager_thinning=binary.eager_thinning,
    )
    return [*flags, "-m", str(build_model(Tiny.HYBRID)), "-t", "1"]


@pytest.fixture
def launch(build, args, tmp_path):
    """Return a function that starts the same command line; all processes are killed after the test."""
    made: list[EngineProcess] = []

    def make() -> EngineProcess:
        base = EngineFlags.parse(args).base
        made.append(EngineProcess(find_engine(build), args, base=base, log=tmp_path / "log" / "engine.log"))
        return made[-1]

    yield make
    for process in made:
        process.kill()


async def test_an_engine_with_recommended_flags_serves_and_its_process_ends_when_stopped(launch, monkeypatch):
    process = launch()
    process.start()
    seen: list[Health] = []
    await process.wait_ready(lambda health, _line: seen.append(health))
    async with EngineClient(process.base) as client:
        assert await client.health() is Health.OK
        assert len(await client.slots()) == 2
        assert (await client.props())["default_generation_settings"]["n_ctx"] == 32768
        assert "llamacpp:" in await client.metrics()
    assert set(seen) <= {Health.DOWN, Health.LOADING, Health.SILENT}  # silent: this machine is busy
    assert os.getsid(process.pid) == process.pid != os.getsid(0)

    await until(lambda: handles(process.pid, signal.SIGINT))  # it serves a moment before
    # A second signal would end it at once, with another status. How long an orderly end takes is no question.
    monkeypatch.setattr("slotkeeper.engine.child.process.STOP_STEPS", ((signal.SIGINT, PATIENCE),))
    assert await process.stop() == 0
    assert not alive(process.pid)
    async with EngineClient(process.base) as client:
        assert await client.health() is Health.DOWN


async def test_a_wrong_model_is_reported_with_the_end_of_the_log(launch, args):
    args[args.index("-m") + 1] = "/nowhere/absent.gguf"
    for _ in range(5):  # b10434 loses its log, or the end of it, in one of 60 such starts, without us too
        process = launch()
        process.start()
        with pytest.raises(EngineDiedError) as died:
            await process.wait_ready()
        assert died.value.returncode != 0
        if "absent.gguf" in str(died.value):
            break
        assert died.value.tail or "its log is empty" in str(died.value)
    assert "absent.gguf" in str(died.value)


async def test_an_unknown_flag_gives_an_error_that_names_it(launch, args):
    args.append("--no-such-flag")
    process = launch()
    process.start()
    with pytest.raises(EngineDiedError, match="--no-such-flag"):
        await process.wait_ready()


async def test_a_killed_engine_is_restarted_on_the_same_port(launch):
    ups: asyncio.Queue[int | None] = asyncio.Queue()
    downs: list[tuple[int, str]] = []
    supervisor = Supervisor(
        launch,
        on_up=lambda: ups.put_nowait(supervisor.process.pid),
        on_down=lambda code, tail: downs.append((code, tail)),
        backoff=Backoff(first=0.01),
    )
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        running = group.create_task(supervisor.run())
        first = await ups.get()
        base, log = supervisor.process.base, supervisor.process.tail
        await until(lambda: "listening" in log())  # it serves a moment before its log says so
        os.kill(first, signal.SIGKILL)
        second = await ups.get()
        async with EngineClient(base) as client:
            assert await client.health() is Health.OK
        running.cancel()
    assert second != first
    assert [code for code, _ in downs] == [-signal.SIGKILL]
    assert "listening" in downs[0][1]
    assert not alive(first)
    assert not alive(second)


async def test_an_engine_that_never_served_is_not_restarted(launch, args):
    args[args.index("-m") + 1] = "/nowhere/absent.gguf"
    supervisor = Supervisor(launch, on_up=lambda: None, on_down=lambda _code, _tail: None)
    with pytest.raises(EngineDiedError):
        await supervisor.run()
    assert supervisor.starts == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child whose parent was killed")
async def test_an_engine_ends_when_its_parent_process_is_killed(build, args, tmp_path):
    base = EngineFlags.parse(args).base
    told = json.dumps([build, base, str(tmp_path / "engine.log"), *args])
    parent = subprocess.Popen(  # noqa: ASYNC220 - blocks for the fork only
        [sys.executable, "-c", PARENT, told], stdout=subprocess.PIPE, text=True
    )
    engine = 0
    try:
        engine = int(parent.stdout.readline())
        assert alive(engine)
        parent.kill()
        await until(lambda: not alive(engine))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            if engine:
                os.kill(engine, signal.SIGKILL)


async def test_an_engine_stops_promptly_during_a_prefill(launch):
    process = launch()
    process.start()
    await process.wait_ready()
    async with EngineClient(process.base) as client, asyncio.TaskGroup() as group:
        group.create_task(swallow(client.prefill([5] * 30000, SlotId(0))))
        async with asyncio.timeout(PATIENCE):
            while not (await client.slots())[0].busy:
                await asyncio.sleep(0.01)
        assert await process.stop() is not None
    assert not alive(process.pid)


async def swallow(call) -> None:
    with contextlib.suppress(Exception):
        await call


def test_only_the_sidecars_user_can_read_the_log(engine):
    assert Path(engine.process.log).stat().st_mode & 0o077 == 0


def test_the_flags_of_the_page_by_hardware_exist(build):
    """The page names flags of this build's engine, of our commands, and settings."""
    page = (ROOT / "docs" / "hardware.md").read_text("utf-8")
    named = set(re.findall(r"(?<=[ `])--?[a-z][\w-]*", page))
    ours = {word for command in parsers()[1].values() for word in command.format_help().split()}
    settings = {"--" + name.replace("_", "-") for name in Settings.model_fields}
    assert {"--ctx-checkpoints", "--cache-ram"} <= named
    assert named - find_engine(build).known <= {word.strip("[],") for word in ours} | settings
