"""The ways that benchmarks compare: an engine directly, behind nginx and a bare proxy, and the sidecar.

The sidecar has its own engine with the same flags, because requests past it would change its slots without
its knowledge. Only one of the two engines works at any time. A relay that reads the clock can be put in front
of each.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from benchmarks.bare_proxy import bare_proxy
from benchmarks.figures import console
from benchmarks.nginx import MISSING, find, nginx
from benchmarks.raw import Relay, relay
from slotkeeper.bench import consumption, lab
from slotkeeper.bench.lab import served
from slotkeeper.bench.models import Tiny, build
from slotkeeper.engine.child.launch import EngineKind, find_engine, skulk

N = TypeVar("N", int, float)

DIRECT: Final = "direct"
OURS: Final = "slotkeeper"
BARE: Final = "aiohttp alone"
QUIET: Final = ("--log-level", "warning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to an engine."""

    name: str
    url: str
    relay: Relay | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine in its own process, perhaps behind a relay."""

    url: str  # by which to reach it
    relay: Relay | None
    base: str  # its own URL, past the relay
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    ways: Mapping[str, Way]
    sidecar_pid: int
    engines: Mapping[str, Engine]  # DIRECT: that of all ways without a sidecar; OURS: that of the sidecar


@asynccontextmanager
async def stage(
    *, slots: int, context_tokens: int, relays: bool, yardstick: bool = True
) -> AsyncIterator[Stage]:
    """Provide all ways while the block runs. `yardstick`: also those without a sidecar."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotkeeper-bench-")))
        ways: dict[str, Way] = {}
        engines: dict[str, Engine] = {}
        if yardstick:
            engines[DIRECT] = engine = await engine_for(
                stack, folder / "passed", slots, context_tokens, relays
            )
            base, spy = engine.url, engine.relay
            ways[DIRECT] = Way(name=DIRECT, url=base, relay=spy)
            if program := find():
                server = await stack.enter_async_context(nginx(program, base.removeprefix("http://"), folder))
                ways["nginx"] = Way(name="nginx", url=server.plain, relay=spy)
                ways["nginx keepalive"] = Way(name="nginx keepalive", url=server.kept, relay=spy)
            else:
                console.print(f"[yellow]{MISSING}[/yellow]")
            bare = await stack.enter_async_context(bare_proxy(base))
            ways[BARE] = Way(name=BARE, url=bare, relay=spy)
        engines[OURS] = ours = await engine_for(stack, folder / "ours", slots, context_tokens, relays)
        sidecar = await stack.enter_async_context(served(ours.url, QUIET))
        ways[OURS] = Way(name=OURS, url=sidecar.url, relay=ours.relay)
        yield Stage(ways=ways, sidecar_pid=sidecar.pid, engines=engines)


async def engine_for(
    stack: AsyncExitStack, folder: Path, slots: int, context_tokens: int, relayed: bool
) -> Engine:
    """Run an engine, behind a relay if it is `relayed`."""
    folder.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    # The stock binary if it exists: it runs its own code, where a library runs in a Python process.
    binary = skulk() or find_engine(EngineKind.XLLAMACPP)
    flags = lab.stock_flags(binary, build(Tiny.DENSE), folder, slots=slots, context_tokens=context_tokens)
    process = await stack.enter_async_context(lab.engine(binary, flags, folder / "engine.log"))
    if process.pid is None:
        raise AssertionError("an engine that serves has a process")
    spy = await stack.enter_async_context(relay(process.base)) if relayed else None
    return Engine(url=spy.base if spy else process.base, relay=spy, base=process.base, pid=process.pid)


def peak_memory_bytes(pid: int) -> int:
    """Return the most memory that a process has had so far. Raises ProcessLookupError if it has ended."""
    return _known(consumption.peak_memory_bytes(pid), pid)


def written_bytes(pid: int) -> int:
    """Return the bytes that a process has written to files so far, also to those in memory."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def processor_seconds(pid: int) -> float:
    """Return the seconds that a process has run. Raises ProcessLookupError if it has ended."""
    return _known(consumption.processor_seconds(pid), pid)


def _known(value: N | None, pid: int) -> N:
    if value is None:
        raise ProcessLookupError(f"process {pid} tells nothing")
    return value
