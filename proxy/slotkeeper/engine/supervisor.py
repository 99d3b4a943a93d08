"""Keeping one engine alive: start it again when it dies, more slowly each time, always on the same port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from slotkeeper.engine.process import EngineDiedError, EngineProcess, Progress

FIRST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 30.0  # a user who repairs something must not wait longer than that to see it
STEADY_SECONDS: Final = 60.0  # an engine that ran this long did not die of its start


class Backoff:
    """How long to wait before the next start."""

    def __init__(
        self, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS, steady: float = STEADY_SECONDS
    ) -> None:
        self._first, self._longest, self._steady = first, longest, steady
        self._next = first

    def after(self, up_seconds: float) -> float:
        """The pause after an engine that served for `up_seconds` has died."""
        if up_seconds >= self._steady:
            self._next = self._first
        pause = self._next
        self._next = min(self._next * 2, self._longest)
        return pause


class Supervisor:
    """Runs engines made by `launch`, one after another.

    `on_up()` is called when one serves, `on_down(returncode, log_tail)` when it has died. An engine that
    dies before the very first `on_up` is the user's mistake (a wrong path, too little memory) and not
    started again: `run` raises its EngineDiedError.
    """

    def __init__(
        self,
        launch: Callable[[], EngineProcess],
        *,
        on_up: Callable[[], None],
        on_down: Callable[[int, str], None],
        progress: Progress | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self._launch = launch
        self._on_up, self._on_down, self._progress = on_up, on_down, progress
        self._backoff = backoff or Backoff()
        self.process: EngineProcess | None = None
        self.starts = 0

    def __repr__(self) -> str:
        return f"<Supervisor starts={self.starts} {self.process}>"

    def replace(self) -> None:
        """End the engine that runs now, which does not answer any more: the next one is started."""
        if self.process is not None:
            self.process.end_unasked()

    async def run(self) -> None:
        """Until cancelled; the engine has ended when this has."""
        served = False
        while True:
            up_seconds = 0.0
            self.starts += 1
            self.process = process = self._launch()
            process.start()
            try:
                await process.wait_ready(self._progress)
                since = asyncio.get_running_loop().time()
                served = True
                self._on_up()
                code, tail = await process.wait(), process.tail()
                up_seconds = asyncio.get_running_loop().time() - since
            except EngineDiedError as died:
                if not served:
                    raise
                code, tail = died.returncode, died.tail
            finally:
                await process.stop()
            self._on_down(code, tail)
            await asyncio.sleep(self._backoff.after(up_seconds))
