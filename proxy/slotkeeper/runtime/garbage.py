"""Full collections of Python's garbage, while no request runs.

A full collection looks at every object in memory and stops all threads meanwhile: for 0.3 s with the
conversations that a sidecar remembers. It finds next to nothing, because objects without cycles are freed
without it. Python begins one after a number of new objects, that is, while a request is read. So we begin it
ourselves.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final

EVERY: Final = 1.0  # seconds between looks
QUIET: Final = 5  # looks in a row without a request: an agent's next turn often follows within a second
LATEST: Final = 600  # looks after which a collection is no longer put off
DUE: Final = 100  # collections of the younger generations since the last full one: some 700,000 new objects
NEVER: Final = 2**31 - 1


async def collect_when_quiet(serving: Callable[[], bool]) -> None:
    """Make full collections for ever. Python makes none until this is cancelled."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], NEVER)
    quiet = waited = 0
    try:
        while True:
            await asyncio.sleep(EVERY)
            quiet = 0 if serving() else quiet + 1
            waited = waited + 1 if gc.get_count()[2] >= DUE else 0
            if waited and (quiet >= QUIET or waited >= LATEST):
                gc.collect()
    finally:
        gc.set_threshold(*thresholds)
