"""The dashboard in Chromium, with a real engine and a sidecar that has something to show."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from dashboard.reading import Reader, admin_of, reading
from dashboard.traffic import talk, talk_with_a_clock
from patience import PATIENCE
from programs import program
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.lab import Restartable
from slotkeeper.bench.models import Tiny
from slotkeeper.engine.child.launch import EngineKind

FLAGS: Final = (
    "--no-sandbox",  # a container has no sandbox, and the page is our own
    "--disable-dev-shm-usage",  # a container's /dev/shm is small: with several browsers a page would crash
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as driver:
        chromium = await driver.chromium.launch(
            executable_path=program("chromium"), args=list(FLAGS), timeout=PATIENCE * 1000
        )
        yield chromium
        await chromium.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Restartable]:
    folder = tmp_path_factory.mktemp("dashboard")
    async with lab.tiny_engine(Tiny.HYBRID, EngineKind.XLLAMACPP, folder) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def busy(engine: Restartable) -> AsyncIterator[Sidecar]:
    """Run a sidecar that has served conversations, one of them with a rewrite, and has saved snapshots."""
    async with lab.keeping(engine, why_text=True) as sidecar:
        base = lab.url_of(sidecar)
        await talk(base, "fix-importer", 3)
        await talk_with_a_clock(base, 3)
        await talk(base, "review-parser", 2)
        await lab.rested(sidecar)
        yield sidecar


@pytest_asyncio.fixture(loop_scope="session")
async def reader(browser: Browser, busy: Sidecar) -> AsyncIterator[Reader]:
    """Open a page. It must not log an error or a warning, and must ask no other host for anything."""
    async with reading(browser, admin_of(busy)) as one:
        yield one
        assert one.complaints == []
        assert [url for url in one.asked if not url.startswith(f"{one.base}/")] == []
