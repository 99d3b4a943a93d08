"""Real engines for tests: both builds, the tiny models, stock flags.

`engine`: one engine for all tests of a module that ask for the same model and build. Every test that uses
it runs once for each build. The model is named by `parametrize`, else it is tiny-hybrid:

    async def test_something(engine): ...                                    # tiny-hybrid, both builds

    @pytest.mark.parametrize("engine", ["tiny-dense", "tiny-swa"], indirect=True)
    async def test_other(engine): ...                                        # two models, both builds

`engine_factory`: your own engines with special flags, stopped after the test. Take `build`, too, to run
on both builds:

    async def test_third(engine_factory, build):
        engine = engine_factory("tiny-dense", build, args=["-np", "3", "--cache-ram", "0"])

An engine has `.base` (URL), `.build`, `.model` (path), `.flags` (EngineFlags), `.args`, `.process`
(EngineProcess), `.slot_dir`. A module's engine is shared: slots hold what earlier tests left in them, so
start prompts with something of your own, or take a factory engine.

Prices are the first guesses of `Rates` in all tests but those marked `learned_prices`: computing and files
take what they take for a small model on a good machine, whatever they take here.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

import httpx
import pytest

from builds import BUILDS, NEWER
from patience import PATIENCE
from slotkeeper.app import Sidecar, running
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.bench.target import counted
from slotkeeper.engine.child.launch import find_engine, free_port
from slotkeeper.engine.child.process import EngineProcess
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.exchange import exchange
from slotkeeper.scheduler.rates import LEAST_TOKENS, LinearTimes, Rates
from slotkeeper.settings import Settings

# For tests that compare texts. What else is in a batch changes the tiny models' logprobs by up to 0.006, and
# in 300 tokens the two likeliest are once or twice nearly as close as that. With these flags the change is
# at most 0.0002, and 0.00001 for tiny-dense and tiny-hybrid (measured on b11549).
SAME_IN_ANY_BATCH: Final = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    base: str
    build: str
    model: Path
    args: tuple[str, ...]
    flags: EngineFlags
    process: EngineProcess
    slot_dir: Path


class Factory(Protocol):
    def __call__(
        self, model: str = ..., build: str = ..., *, args: Sequence[str] = (), port: int | None = None
    ) -> Engine: ...


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Multiply every test that uses an engine by the builds, and name the default model."""
    if "build" in metafunc.fixturenames:
        metafunc.parametrize("build", BUILDS, indirect=True, scope="module")
    if "engine" in metafunc.fixturenames and not parametrized(metafunc, "engine"):
        metafunc.parametrize("engine", [Tiny.HYBRID.value], indirect=True, scope="module")


def parametrized(metafunc: pytest.Metafunc, name: str) -> bool:
    marks = metafunc.definition.iter_markers("parametrize")
    return any(name in str(mark.args[0]).replace(",", " ").split() for mark in marks)


@pytest.fixture(autouse=True)
def every_answer_has_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the head of an answer wait for the prediction.

    A request that continues in a slot is sent before its tokens are known. They may be known only after the
    engine has answered; then the header is missing.
    """
    monkeypatch.setattr(exchange, "PREDICTION_SECONDS", PATIENCE)
    monkeypatch.setattr(exchange, "PREDICTION_SHARE", inf)


@pytest.fixture(autouse=True)
def guessed_prices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the first guesses of `Rates`: 1,000 tokens of prefill per second, and the files of a good disk.

    The tiny models compute 4,000 to 26,000 tokens per second, and their files take long on a busy disk. By
    the prices learned from that it is often right to compute a prompt again, or on another engine.
    """
    if request.node.get_closest_marker("learned_prices"):
        return
    replied = Rates.replied
    monkeypatch.setattr(Rates, "prefilled", measured_nothing)
    monkeypatch.setattr(Rates, "replied", lambda rates, tokens, _: replied(rates, tokens, 0.0))
    monkeypatch.setattr(LinearTimes, "took", lambda *_: None)


def measured_nothing(rates: Rates, tokens: int, seconds: float | None) -> None:
    """Show the guess as the measured rate of prefill."""
    if seconds and tokens >= LEAST_TOKENS:
        rates.prefill.measured = True


@pytest.fixture(scope="module")
def build(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, build: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    started = start(request.param, build, folder=tmp_path_factory.mktemp("engine"))
    yield started
    started.process.kill()


@pytest.fixture
def engine_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Factory]:
    engines: list[Engine] = []

    def make(
        model: str = Tiny.HYBRID,
        build: str = NEWER,
        *,
        args: Sequence[str] = (),
        port: int | None = None,
    ) -> Engine:
        engines.append(start(model, build, args=args, port=port, folder=tmp_path_factory.mktemp("engine")))
        return engines[-1]

    yield make
    for engine in engines:
        engine.process.kill()


def stock(model: str, folder: Path, port: int) -> list[str]:
    """Return the flags of a user who has read llama-server's manual, not ours."""
    path, slot_dir = build_model(Tiny(model)), folder / "slots"
    slot_dir.mkdir(exist_ok=True)
    return (
        f"-m {path} --host 127.0.0.1 --port {port} -c 131072 -np 2 --slots --metrics --jinja -t 1"
        f" --device none --fit off --slot-save-path {slot_dir}"
    ).split()


def start(
    model: str, build: str, *, args: Sequence[str] = (), port: int | None = None, folder: Path
) -> Engine:
    """Start an engine and wait for it. Of a flag given twice the later one counts, so `args` wins."""
    line = (*stock(model, folder, port or free_port()), *args)
    flags = EngineFlags.parse(line)
    process = EngineProcess(find_engine(build), line, base=flags.base, log=folder / "engine.log")
    process.start()
    try:
        wait_until(lambda: serves(process))
    except BaseException:
        process.kill()
        raise
    return Engine(
        base=flags.base,
        build=build,
        model=flags.model or Path(),
        args=line,
        flags=flags,
        process=process,
        slot_dir=folder / "slots",
    )


def serves(process: EngineProcess) -> bool:
    assert process.returncode is None, f"the engine ended with {process.returncode}:\n{process.tail()}"
    address = urlsplit(process.base)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def evaluated(engine: Engine) -> int:
    """Return the prompt tokens that the engine's counter has counted."""
    return counted(httpx.get(f"{engine.base}/metrics", timeout=PATIENCE).text)


def wait_until(true: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for a condition and block, so that fixtures of any scope can use it.

    In a test, wait asynchronously.
    """
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.05)


@asynccontextmanager
async def probed(settings: Settings) -> AsyncIterator[Sidecar]:
    """Run a sidecar whose engines are probed: earlier requests would fail open on a slow machine."""
    async with running(settings) as sidecar:
        await lab.ready(sidecar)
        yield sidecar


def client_of(sidecar: Sidecar, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """Return a client of the sidecar's data port; it sends these headers."""
    return httpx.AsyncClient(base_url=lab.url_of(sidecar), headers=headers, timeout=PATIENCE)
