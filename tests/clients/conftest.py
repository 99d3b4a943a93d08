"""Clients as users install them, and two legs for each: a real engine, and one behind a sidecar.

`make test-clients` installs the clients. What a test measures is printed at the end, and written to
`clients.json` in the folder ARTIFACTS, if that is set; `python -m benchmarks.publish` makes a table of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import pytest
from benchmarks.figures import documented

from clients import open_webui
from engine.conftest import SAME_IN_ANY_BATCH, every_answer_has_its_prediction, guessed_prices
from patience import PATIENCE
from programs import program
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.engine.client import EngineClient

__all__ = ["every_answer_has_its_prediction", "guessed_prices"]

ROOT: Final = Path(__file__).resolve().parents[2]
VENV: Final = ROOT / "build" / "venv" / "clients" / "bin"  # with Node.js
SDKS: Final = Path(__file__).with_name("sdks.py")
LIBRARIES: Final = ("openai", "anthropic", "langchain-openai", "litellm")
AIDER: Final = ROOT / "build" / "venv" / "aider" / "bin"
AGENTS: Final = ROOT / "build" / "clients" / "node_modules" / ".bin"
PACKAGES: Final = AGENTS.parent
ARTIFACTS: Final = os.environ.get("ARTIFACTS")
CONTEXT_TOKENS: Final = 65536  # of a slot
# With them both legs give the same texts, so their next prompts are the same.
FLAGS: Final = (*SAME_IN_ANY_BATCH, "--seed", "7")
ROW: Final = "client"  # the property of a test's report that has its row


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one client did on one build of the engine."""

    client: str
    version: str
    build: str
    case: str
    errors_ours: int = 0
    errors_stock: int = 0
    tokens_ours: int | None = None
    tokens_stock: int | None = None
    idle_tokens: int = 0  # of ours: those that nobody waited for

    def __str__(self) -> str:
        text = f"{self.client} {self.version} on {self.build}: {self.case}: errors {self.errors_ours}"
        text += f" (stock {self.errors_stock})"
        if self.tokens_ours is not None and self.tokens_stock:
            share = self.tokens_ours / self.tokens_stock
            text += f"; tokens {self.tokens_ours} / {self.tokens_stock} = {share:.4f}"
            text += f", idle {self.idle_tokens}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A server that clients use, and the engine that serves it."""

    url: str
    engine: lab.Restartable
    sidecar: Sidecar | None = None

    async def evaluated(self) -> int:
        """Return the tokens evaluated so far, by the engine's counter, when all idle work is done."""
        if self.sidecar is not None:
            await lab.rested(self.sidecar)
        return await lab.evaluated(self.engine.base)

    async def restarted(self) -> None:
        """Kill the engine and start it again."""
        if self.sidecar is None:
            await self.engine.restart()
        else:
            await lab.restarted(self.engine, self.sidecar)

    async def idle(self) -> bool:
        """Return whether no slot of the engine computes."""
        return not await self.busy()

    async def busy(self) -> int:
        """Return the number of the engine's slots that compute."""
        async with EngineClient(self.engine.base) as client:
            return sum(slot.busy for slot in await client.slots())


@asynccontextmanager
async def stock_leg(build: str, folder: Path, *flags: str) -> AsyncIterator[Leg]:
    folder.mkdir()  # noqa: ASYNC240 - a local disk
    async with lab.tiny_engine(
        Tiny.HYBRID, build, folder, *FLAGS, *flags, context_tokens=CONTEXT_TOKENS
    ) as engine:
        yield Leg(url=engine.base, engine=engine)


@asynccontextmanager
async def our_leg(build: str, folder: Path, *flags: str, **settings: Any) -> AsyncIterator[Leg]:
    async with stock_leg(build, folder, *flags) as behind, lab.keeping(behind.engine, **settings) as sidecar:
        yield Leg(url=lab.url_of(sidecar), engine=behind.engine, sidecar=sidecar)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A program that has ended."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"ended with {self.code}\n{self.out[-2000:]}\n{self.err[-2000:]}"


def environment(home: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a user who has nothing but the clients, in a home of their own."""
    path = os.pathsep.join((str(VENV), str(AGENTS), os.environ.get("PATH", os.defpath)))
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    # LiteLLM has a list of prices with it, and would else ask for a newer one.
    fixed = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "TERM": "dumb", "NO_COLOR": "1"}
    return {**kept, **fixed, "HOME": str(home), "PATH": path, **more}


def _heeds_ctrl_c() -> None:
    """Undo what a child of a shell's background job inherits: such a job ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@asynccontextmanager
async def begun(
    words: Sequence[str],
    home: Path,
    more: Mapping[str, str] | None = None,
    *,
    cwd: Path | None = None,
    output: int = asyncio.subprocess.PIPE,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a program in a session of its own, and kill what is left of it at the end."""
    process = await asyncio.create_subprocess_exec(
        *words,
        env=environment(home, more or {}),
        cwd=cwd or home,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_heeds_ctrl_c,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, 9)
        await process.wait()


async def end(process: asyncio.subprocess.Process) -> Ended:
    """Wait until a program ends. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE):
        out, err = await process.communicate()
    return Ended(code=process.returncode or 0, out=out.decode(), err=err.decode())


async def ran(words: Sequence[str], home: Path, more: Mapping[str, str] | None = None, **how: Any) -> Ended:
    """Run a program to its end. Raises TimeoutError."""
    async with begun(words, home, more, **how) as process:
        return await end(process)


def line(name: str, leg: Leg) -> list[str]:
    """Return the command line that uses a library (see sdks.py)."""
    return [program(str(VENV / "python")), str(SDKS), name, leg.url]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return the home of a client's user."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return a function that adds a row to the table; the reports of the tests carry them."""

    def add(client: str, leg: Leg, **more: Any) -> None:
        row = Row(client=client, version=version(client), build=f"b{leg.engine.flags.build}", **more)
        record_property(ROW, asdict(row))

    return add


def version(client: str) -> str:
    """Return the version of a package from PyPI or npm, or of the one whose requests are sent instead."""
    if client == "open-webui":
        return open_webui.VERSION
    paths = [str(path) for venv in (VENV, AIDER) for path in venv.parent.glob("lib/python*/site-packages")]
    if found := next(iter(distributions(name=client, path=paths)), None):
        return found.version
    return str(json.loads((PACKAGES / client / "package.json").read_bytes())["version"])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    noted = [value for report in reports for name, value in report.user_properties if name == ROW]
    rows = sorted((Row(**value) for value in noted), key=lambda row: (row.client, row.case, row.build))
    for row in rows:
        terminalreporter.write_line(str(row))
    if rows and ARTIFACTS:
        Path(ARTIFACTS).mkdir(parents=True, exist_ok=True)
        found = documented("clients", [asdict(row) for row in rows])
        Path(ARTIFACTS, "clients.json").write_text(json.dumps(found, indent=1) + "\n")
