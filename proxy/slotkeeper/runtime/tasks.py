"""Work beside the requests: tasks with an owner, large bodies read in a thread, the end of an engine noticed.

The thread for large bodies is one only: it shares the interpreter with the loop, which then still has every
second slice of its time. What runs there reads and makes new things. What changes anything that others see is
done on the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from yarl import URL


class Tasks:
    """The only place where tasks are made (asyncio.create_task is banned elsewhere)."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._on_error = on_error

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)  # noqa: TID251 - this is the wrapper
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel what is left and wait for it."""
        for task in tuple(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._on_error(error)


# -- large bodies, one at a time in a thread -------------------------------------------------------------

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


# -- the end of an engine's process: a silent connection ends with it ------------------------------------

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
