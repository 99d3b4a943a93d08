"""Rivals in `slotkeeper bench`: other proxies for the same engine, each started by a command line.

A rival listens on a port of 127.0.0.1. `RECIPES` has the commands of those that were tried.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Final

from slotkeeper.engine.child.launch import EngineBinary, EngineKind, free_port
from slotkeeper.engine.child.process import EngineProcess
from slotkeeper.values import UsageError

START_SECONDS: Final = 60.0  # until it listens
SILENCE_SECONDS: Final = 600.0  # of a rival that answers nothing; the engine itself may take minutes
LOOK_SECONDS: Final = 0.05
PLACES: Final = MappingProxyType(
    {
        "upstream": "the engine's URL",
        "port": "the port of 127.0.0.1 to listen on",
        "slots": "the number of the engine's slots",
        "slot_dir": "its --slot-save-path",
    }
)
NEEDED: Final = ("upstream", "port")  # without these places a command cannot serve


class RivalError(Exception):
    """A rival did not start; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to run one rival, as its own documentation says."""

    command: str  # words with the places of `PLACES`
    engine: tuple[str, ...] = ()  # flags that its engine needs, after those of `slotkeeper up`
    install: str
    note: str


RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        "hearth-llm": Recipe(
            command="hearth serve --upstream {upstream} --port {port} --cache-dir {slot_dir}",
            engine=("--parallel", "1"),  # it uses slot 0 alone, and refuses an engine with more
            install="pip install hearth-llm",
            note="its engine has one slot",
        ),
        "proxycache": Recipe(
            command="env LLAMA_URL={upstream} N_SLOTS={slots} META_DIR={slot_dir}/meta "
            "uvicorn app:app --host 127.0.0.1 --port {port}",
            install="git clone https://github.com/airnsk/proxycache && cd proxycache && "
            "pip install -r requirements.txt",
            note="`slotkeeper bench` runs in this folder",
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another proxy for the same engine."""

    value: str  # its name in reports
    command: tuple[str, ...]  # words with the places of `PLACES`
    engine: tuple[str, ...] = ()  # flags that its engine needs

    @property
    def places(self) -> set[str]:
        """Return the names of the places in the command. Raises ValueError for a brace that stands alone."""
        return {name for word in self.command for _, name, *_ in Formatter().parse(word) if name is not None}


def rival_of(text: str) -> Rival:
    """Return the rival of `NAME` (of a recipe) or `NAME=COMMAND`. Raises UsageError."""
    name, given, command = text.partition("=")
    recipe = RECIPES.get(name)
    if not given and recipe is None:
        raise UsageError(f"--rival {text}: no recipe has this name; give NAME=COMMAND")
    engine = recipe.engine if recipe else ()
    try:
        words = shlex.split(command if given else recipe.command if recipe else "")
        rival = Rival(value=name, command=tuple(words), engine=engine)
        places = rival.places
    except ValueError as error:
        raise UsageError(f"--rival {name}: {error}") from None
    if unknown := sorted(places - PLACES.keys()):
        raise UsageError(f"--rival {name}: unknown {{{unknown[0]}}}; a literal brace is written twice")
    if lacking := [place for place in NEEDED if place not in places]:
        raise UsageError(f"--rival {name}: its command lacks {{{lacking[0]}}}, {PLACES[lacking[0]]}")
    return rival


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A rival that runs."""

    url: str
    pid: int


@asynccontextmanager
async def serving(
    rival: Rival, *, upstream: str, slots: int | None, slot_dir: Path | None, log: Path
) -> AsyncIterator[Serving]:
    """Run a rival in front of the engine at `upstream`, with its output in `log`. Raises RivalError."""
    port = free_port()
    values = {"upstream": upstream, "port": port, "slots": slots, "slot_dir": slot_dir}
    words = tuple(word.format_map(values) for word in rival.command)
    url = f"http://127.0.0.1:{port}"
    # It is started and stopped as an engine is: in a session of its own, and killed if it does not end.
    process = EngineProcess(EngineBinary(kind=EngineKind.LLAMA_SERVER, program=words), (), base=url, log=log)
    try:
        try:
            process.start()
        except OSError as error:
            raise RivalError(f"did not start: {words[0]}: {error.strerror}") from None
        await _listening(process, port)
        yield Serving(url=url, pid=process.pid or 0)
    finally:
        await process.stop()


async def _listening(process: EngineProcess, port: int) -> None:
    try:
        async with asyncio.timeout(START_SECONDS):
            while not await listens(port):
                if (code := process.returncode) is not None:
                    last = process.tail().rpartition("\n")[2]
                    raise RivalError(f"did not start: it ended with {code}: {last or 'it wrote nothing'}")
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise RivalError(f"did not start: it does not listen after {START_SECONDS:g} s") from None


async def listens(port: int) -> bool:
    """Return whether a server listens at this port of 127.0.0.1."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
