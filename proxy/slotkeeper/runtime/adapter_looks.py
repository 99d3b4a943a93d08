"""Asks engines for the LoRA adapters in use, and lets clients change them.

`POST /lora-adapters` passes through our data port like any other route. But the engine continues from states
of the old adapters (engine.md T12), so no task of ours may begin there until we know the new ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from slotkeeper.engine.client import EngineError, EngineGoneError
from slotkeeper.observe.log import get_logger
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.adapters import Adapter, set_of, single
from slotkeeper.scheduler.events import AdaptersChange, AdaptersSeen

if TYPE_CHECKING:
    from slotkeeper.runtime.driver import Driver

ON_THEIR_WAY: Final = 10.0  # seconds in which tasks that were sent before the change must begin
PAUSE: Final = 0.01  # seconds between checks of these tasks

log = get_logger(__name__)


async def look(link: EngineLink, *, announced: bool = False, exact: bool = False) -> AdaptersSeen:
    """Ask the engine for its adapters. While it runs only their scales change, never their files."""
    asked, known = time.monotonic(), link.traits.adapters if link.traits else ()
    adapters: tuple[Adapter, ...] | None = None
    try:
        listed = await link.client.lora_adapters(headers=link.auth)
        scales = {int(entry["id"]): single(float(entry["scale"])) for entry in listed}
        adapters = tuple(replace(adapter, scale=scales[at]) for at, adapter in enumerate(known))
    except (EngineError, EngineGoneError, KeyError, TypeError, ValueError) as error:
        log.debug("adapters_unseen", engine=link.engine, error=str(error))
    if adapters and link.traits and adapters != known:
        link.traits = replace(link.traits, adapters=adapters)
        log.info("adapters_changed", engine=link.engine, before=set_of(known), now=set_of(adapters))
    now = time.monotonic()
    return AdaptersSeen(
        at=now, asked=asked, engine=link.engine, adapters=adapters, announced=announced, exact=exact
    )


@asynccontextmanager
async def changing(driver: Driver, link: EngineLink) -> AsyncIterator[None]:
    """Hold back all tasks of ours on the engine while the block changes its adapters."""
    if not (link.traits and link.traits.adapters):
        yield
        return
    driver.post(AdaptersChange(at=driver.now(), engine=link.engine))
    exact = False
    try:
        exact = await _settled(driver, link)
        yield
    finally:
        driver.post(await look(link, announced=True, exact=exact))


async def _settled(driver: Driver, link: EngineLink) -> bool:
    """Wait until all sent tasks have begun, up to `ON_THEIR_WAY`. Return whether they have."""
    until = driver.now() + ON_THEIR_WAY
    while (table := driver.placement.tables.get(link.engine)) and table.on_their_way:
        if driver.now() > until:  # a sent task may begin before or after the change
            return False
        await asyncio.sleep(PAUSE)
    return True
