"""A fake engine with a sidecar in front of it, and the real engines of `tests/engine`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from chaos.fake_engine import FakeEngine
from chaos.raw import until
from engine.conftest import build, engine, engine_factory, pytest_generate_tests
from patience import PATIENCE
from slotkeeper.app import Sidecar, running
from slotkeeper.bench import lab
from slotkeeper.observe.log import configure
from slotkeeper.settings import Settings

__all__ = ["build", "engine", "engine_factory", "pytest_generate_tests"]


@pytest.fixture(autouse=True)
def _log() -> None:
    """Configure logging as the commands do. structlog's own format of an exception takes seconds."""
    configure("info", "console")


def settings(*upstream: str, **more: Any) -> Settings:
    """Return settings with free ports, without prefetching, and without a probe that computes.

    A prefetch begins a quarter of a second after an answer. On a busy machine that is between two requests of
    a test: an engine then runs more than its clients sent, and the prefetch meets the fault for the next one.
    """
    ours: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "admin_listen": "127.0.0.1:0",
        "idle_tokens": 0,
        "probe": False,
        "engine_wait": PATIENCE,
    }
    return lab.settings_of(upstream=upstream, **(ours | more))


async def ready(sidecar: Sidecar) -> None:
    """Wait until every engine has been probed."""
    await until(lambda: all(link.ready for link in sidecar.driver.links.values()), "the engines are up")


def quiet(sidecar: Sidecar, fake: FakeEngine) -> bool:
    """Whether no request runs or waits, in the sidecar and in the engine."""
    placement = sidecar.driver.placement
    table = placement.tables[fake.base]
    at_rest = not placement.queued and len(table.idle) == len(table.states)
    return at_rest and "0 requests" in repr(placement) and not any(fake.control.slots)


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


@pytest.fixture
async def sidecar(fake: FakeEngine) -> AsyncIterator[Sidecar]:
    async with running(settings(fake.base, drain_timeout=1.0)) as sidecar:
        await ready(sidecar)
        yield sidecar


@pytest.fixture
def data(sidecar: Sidecar) -> str:
    """Return host:port of the data port."""
    return sidecar.addresses[0]
