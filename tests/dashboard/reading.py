"""A reader of the dashboard: one page of a Chromium, the errors that it logged, the URLs that it fetched."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from playwright.async_api import Browser, ConsoleMessage, Page, ViewportSize, expect

from patience import PATIENCE
from slotkeeper.app import Sidecar

PICTURES: Final = os.environ.get("ARTIFACTS")  # the folder for pictures; none are taken without it
DESK: Final[ViewportSize] = {"width": 1360, "height": 1000}
PHONE: Final[ViewportSize] = {"width": 375, "height": 812}
NEWEST: Final = "#requests tr:first-child th a"
CLOCK: Final = '#requests tr:has-text("clock") th a'  # requests of a client that rewrites its prompt

expect.set_options(timeout=PATIENCE * 1000)


@dataclass
class Reader:
    page: Page
    base: str  # of the admin port
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE * 1000)
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def _heard(self, message: ConsoleMessage) -> None:
        """Record errors and warnings. Violations of the Content-Security-Policy are among them."""
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    @property
    def connection(self) -> Any:
        return self.page.locator("#connection")

    async def open(self, fragment: str = "") -> None:
        await self.page.goto(self.base + "/" + fragment)
        await expect(self.connection).to_have_attribute("data-state", "live")
        await expect(self.page.locator("#tree .prompt").first).to_be_attached()

    async def explain(self, link: str) -> None:
        """Follow a link to a request's explanation, and wait until it is shown."""
        await self.page.locator(link).first.click()
        await expect(self.page.locator("#why .sentences li").first).to_be_visible()

    async def document(self, path: str) -> Any:
        return await self.page.evaluate("async (path) => (await fetch(path)).json()", path)

    async def until(self, script: str, about: Any = None) -> None:
        """Wait until `script` is true. Playwright's own wait evaluates text: the page forbids that."""
        async with asyncio.timeout(PATIENCE):
            while not await self.page.evaluate(script, about):
                await asyncio.sleep(0.05)

    async def shoot(self, name: str, **options: Any) -> None:
        if PICTURES:
            await self.page.screenshot(path=Path(PICTURES) / f"{name}.png", **options)


def admin_of(sidecar: Sidecar) -> str:
    return f"http://{sidecar.addresses[1]}"


@asynccontextmanager
async def reading(browser: Browser, base: str, **how: Any) -> AsyncIterator[Reader]:
    """Open the dashboard in a fresh browser context. `how` has options of Playwright's contexts."""
    context = await browser.new_context(**{"viewport": DESK, **how})
    try:
        yield Reader(await context.new_page(), base)
    finally:
        await context.close()
