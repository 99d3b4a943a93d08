"""Background work: tasks with an owner, a thread for large bodies, and noticing that an engine has ended.

There is one thread for large bodies, because it shares the interpreter with the event loop, which then still
gets every second time slice. Functions in the thread only read and make new objects; shared state changes on
the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from yarl import URL


class Tasks:
    """Owns asyncio tasks. Only this class makes tasks: ruff bans asyncio.create_task elsewhere."""

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
        """Cancel the tasks that still run, and wait until they have ended."""
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
    """Runs a function: on the loop (`here`) or in the thread (`Aside`)."""

    async def __call__(self, do: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> T: ...


async def here(do: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> T:
    """Run a function at once on the loop: for work that is quicker than a hand-over to a thread."""
    return do(*args, **more)


class Aside:
    """The thread for large bodies. It starts with the first one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")

    async def __call__(self, do: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: do(*args, **more))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


# -- the end of an engine's process: an idle connection closes with it -----------------------------------

REFUSED: Final = 0.1  # seconds until the next attempt to connect
SHORT: Final = 1.0  # seconds: if the connection closes sooner, a proxy before the engine has closed it
LONGEST: Final = 60.0  # seconds between connections that always close soon


async def lifeline(base: str, ended: Callable[[], Awaitable[bool]]) -> None:
    """Keep an idle connection to an engine, for ever. When it closes, call `ended`, and connect again.

    `ended` returns whether the engine's process has ended.
    """
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
    """Connect, and wait until the connection closes. Raises OSError if connecting fails."""
    tls = True if url.scheme == "https" else None
    reader, writer = await asyncio.open_connection(url.host, url.port, ssl=tls)
    try:
        await reader.read()
    except OSError:
        pass  # a reset closes the connection too
    finally:
        writer.close()
