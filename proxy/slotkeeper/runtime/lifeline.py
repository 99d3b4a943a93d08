"""A connection that says nothing: it ends at once when the engine's process does.

So a restart is seen however quick it was. llama-server itself closes such a connection after five
seconds; that looks the same, and costs a look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from yarl import URL

REFUSED: Final = 0.1  # seconds until it is tried again
SHORT: Final = 1.0  # seconds: what stands before the engine closes it, not the engine
LONGEST: Final = 60.0  # seconds between lines that are always short


async def lifeline(base: str, ended: Callable[[], Awaitable[bool]]) -> None:
    """Runs for ever. After each line `ended` says whether the engine did end."""
    url, pause = URL(base), 0.0
    while True:
        await asyncio.sleep(pause)
        began = time.monotonic()
        try:
            await _until_it_ends(url)
        except OSError:
            pause = REFUSED
            continue
        lasted = time.monotonic() - began
        short = not await ended() and lasted < SHORT
        pause = min(LONGEST, max(SHORT, 2 * pause)) if short else 0.0


async def _until_it_ends(url: URL) -> None:
    """Raises OSError if there is no connection to be had."""
    tls = True if url.scheme == "https" else None
    reader, writer = await asyncio.open_connection(url.host, url.port, ssl=tls)
    try:
        await reader.read()
    except OSError:
        pass  # reset: that is an end too
    finally:
        writer.close()
