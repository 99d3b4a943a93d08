"""Blocking work in a thread, whose waiting caller can be cancelled.

A thread cannot be: its `Halt` is set, and the cancelled one waits until it has put away what it was making.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slotkeeper.store.files import Halt
from slotkeeper.store.trouble import HaltedError

T = TypeVar("T")


class Lane:
    """One thread; its work is done in the order in which it was asked for."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"slotkeeper-{name}")
        self._halts: set[Halt] = set()
        self._closed = False

    async def do(self, work: Callable[[Halt], T]) -> T:
        """Raises what `work` raises, and HaltedError when the lane is closed."""
        if self._closed:
            raise HaltedError
        halt = Halt()
        self._halts.add(halt)
        running = self._pool.submit(work, halt)
        future = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            halt.set()
            if not running.cancel():
                await asyncio.wait([future])
                future.exception()  # retrieved: no caller will ask for it
            raise
        finally:
            self._halts.discard(halt)

    async def close(self) -> None:
        self._closed = True
        for halt in self._halts:
            halt.set()
        await asyncio.to_thread(self._pool.shutdown)
