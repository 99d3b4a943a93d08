"""A driver in front of a stub of an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.driver import Driver
from unit.runtime.stubs import ENGINE, StubLink, settled


@pytest.fixture
def link() -> StubLink:
    return StubLink()


@pytest.fixture
async def driver(link) -> AsyncIterator[Driver]:
    driver = Driver({ENGINE: link}, Metrics())
    driver.start()
    await settled()
    yield driver
    await driver.close()
