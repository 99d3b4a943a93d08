"""Reading large bodies beside the event loop, one at a time.

One thread only: it shares the interpreter with the loop, which then still has every second slice of its time.
What runs there reads and makes new things. What changes anything that others see is done on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Runner(Protocol):
    """Where a function runs."""

    async def __call__(self, do: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> T: ...


async def here(do: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> T:
    """At once, on the loop: for what is quicker done than handed over."""
    return do(*args, **more)


class Aside:
    """The thread. It begins with the first large body."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")

    async def __call__(self, do: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: do(*args, **more))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
