"""Two engines with the same flags: one is used directly, one through the sidecar."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaos.conftest import _log, data, fake, ready, settings, sidecar
from engine.conftest import Engine, build, engine_factory, pytest_generate_tests, start
from slotkeeper.app import Sidecar, running

__all__ = ["_log", "build", "data", "engine_factory", "fake", "pytest_generate_tests", "sidecar"]

# Without the RAM cache every erased slot computes the whole prompt.
ALIKE = ("-c", "4096", "--cache-ram", "0", "-t", "1")


@dataclass(frozen=True, slots=True)
class Pair:
    direct: Engine
    behind: Engine


def pair_of(build: str, folder: Callable[[], Path], *args: str) -> Iterator[Pair]:
    with ExitStack() as stack:
        engines = []
        for _ in ("direct", "behind"):
            engine = start("tiny-dense", build, args=(*ALIKE, *args), folder=folder())
            stack.callback(engine.process.kill)
            engines.append(engine)
        yield Pair(*engines)


@pytest.fixture
def pair(build: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Start fresh engines for each test: GET /slots and HEAD /metrics show earlier tasks of each slot."""
    yield from pair_of(build, lambda: tmp_path_factory.mktemp("engine"))


@pytest.fixture
def locked_pair(build: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from pair_of(build, lambda: tmp_path_factory.mktemp("engine"), "--api-key", "k")


@pytest.fixture
async def before(pair: Pair) -> AsyncIterator[Sidecar]:
    """Run the sidecar in front of the second engine."""
    async with running(settings(pair.behind.base, drain_timeout=1.0)) as sidecar:
        await ready(sidecar)
        yield sidecar
