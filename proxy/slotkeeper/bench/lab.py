"""A laboratory: a real engine on a tiny model, and a sidecar in front of it, for the length of a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from slotkeeper.app import Sidecar, running
from slotkeeper.config import Settings
from slotkeeper.core.types import EngineId
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.launch import EngineBinary, Kind, free_port
from slotkeeper.engine.process import EngineProcess

LOOK_SECONDS: Final = 0.02
READY_SECONDS: Final = 30.0
ANY_PORT: Final = "127.0.0.1:0"


def stock_flags(
    binary: EngineBinary, model: Path, folder: Path, *, slots: int = 2, context_tokens: int = 65536
) -> list[str]:
    """The flags of a user who read llama-server's manual, not ours. `context_tokens` is that of each slot.

    One thread: the models are so small that a second gains nothing, and on a machine that also does
    something else two threads wait for each other (b11549: a hundred times slower).
    """
    words = (
        f"-m {model} --host 127.0.0.1 --port {free_port()} -c {context_tokens * slots} -np {slots} -t 1"
        f" --jinja --slots --metrics --fit off --slot-save-path {folder}"
    ).split()
    # A user's own build keeps its devices; the packaged ones have none, or a software one.
    return words if binary.kind is Kind.LLAMA_SERVER else [*words, "--device", "none"]


@asynccontextmanager
async def engine(binary: EngineBinary, flags: Sequence[str], log: Path) -> AsyncIterator[EngineProcess]:
    """Raises EngineDiedError when it does not start."""
    process = EngineProcess(binary, flags, base=EngineFlags.parse(flags).base, log=log)
    process.start()
    try:
        await process.wait_ready()
        yield process
    finally:
        await process.stop()


@asynccontextmanager
async def sidecar(base: str, flags: EngineFlags | None = None) -> AsyncIterator[str]:
    """The URL of a sidecar's data port, once it knows the engine at `base`."""
    settings = Settings(
        upstream=(base,), listen=ANY_PORT, admin_listen=ANY_PORT, drain_delay=0, drain_timeout=5
    )
    async with running(settings, {EngineId(base): flags} if flags else None) as started:
        await _ready(started)
        yield f"http://{started.addresses[0]}"


async def _ready(started: Sidecar) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while not all(link.ready for link in started.driver.links.values()):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(LOOK_SECONDS)
