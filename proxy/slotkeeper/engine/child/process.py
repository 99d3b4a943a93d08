"""An engine as a child process: detached from our terminal, its log bounded, stopped reliably, restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from slotkeeper import system
from slotkeeper.engine.answers import Health
from slotkeeper.engine.child.launch import EngineBinary
from slotkeeper.engine.child.xllama import PARENT
from slotkeeper.engine.client import EngineClient

POLL_SECONDS: Final = 0.1
LOG_BYTES: Final = 8 << 20  # a day of an agent's work at the default verbosity
TAIL_BYTES: Final = 4096
# On SIGINT llama-server finishes a running save and closes its sockets. While it loads a model it ignores
# SIGINT until the model is loaded, so the second signal must come before a user takes us for stuck.
STOP_STEPS: Final = ((system.INTERRUPT, 5.0), (signal.SIGTERM, 2.0), (system.KILL, 10.0))

Progress = Callable[[Health, str], None]


class EngineDiedError(RuntimeError):
    """The engine ended while we waited for it."""

    def __init__(self, returncode: int, tail: str) -> None:
        # llama-server logs in a thread; in one of 60 failed starts it ends before that thread begins
        about_log = (
            f"the end of its log:\n{tail}" if tail else "its log is empty; try once more, or start it by hand"
        )
        super().__init__(f"the engine ended with {returncode}; {about_log}")
        self.returncode = returncode
        self.tail = tail


class EngineProcess:
    """One run of one engine. It cannot be restarted: the supervisor makes a new object."""

    def __init__(self, binary: EngineBinary, args: Sequence[str], *, base: str, log: Path) -> None:
        self.base = base
        self.log = log
        self._command = binary.command(args)
        self._env = binary.env | {PARENT: str(os.getpid())}
        self._child: subprocess.Popen[bytes] | None = None
        self._begin = 0  # offset in bytes at which this run's part of the log begins

    def __repr__(self) -> str:
        return f"<EngineProcess {self.base} pid={self.pid} returncode={self.returncode}>"

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    @property
    def returncode(self) -> int | None:
        """Exit status as in `subprocess`: negative for a signal; None while it runs or before the start."""
        return self._child.poll() if self._child else None

    def start(self) -> None:
        """Start the engine; blocks only for the fork. Call from the main thread: `dies_with_us`."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open_log(self.log) as log:
            self._begin = os.fstat(log).st_size
            self._child = subprocess.Popen(  # noqa: S603 - the engine that the user named
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                **system.apart(),  # a terminal's Ctrl-C reaches only us; we stop the engine in order
                **system.dies_with_us(),
            )

    async def wait(self) -> int:
        """Wait until the engine has ended, and keep its log small meanwhile. Returns the exit status."""
        while (code := self.returncode) is None:
            await asyncio.sleep(POLL_SECONDS)
            if trim(self.log):
                self._begin = 0
        return code

    async def wait_ready(self, progress: Progress | None = None) -> None:
        """Wait until the engine serves, without a time limit for loading. Raises EngineDiedError.

        Each poll calls `progress` with the engine's health and the last line of its log.
        """
        async with EngineClient(self.base) as client:
            while True:
                if (code := self.returncode) is not None:
                    raise EngineDiedError(code, self.tail())
                health = await client.health()
                if health in {Health.OK, Health.SLEEPING} or health.routes:
                    return
                if progress:
                    progress(health, self.tail().rpartition("\n")[2])
                await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> int | None:
        """Stop the engine (see `STOP_STEPS`), or kill it if cancelled. Returns the exit status."""
        if self._child is None:
            return None
        try:
            for number, seconds in STOP_STEPS:
                self._send(number)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        return await self.wait()
        finally:
            self.kill()
        return self.returncode

    def kill(self) -> None:
        """Kill the engine and all processes that it started, and reap it."""
        if self._child is None:
            return
        self.end_unasked()
        self._child.wait()

    def end_unasked(self) -> None:
        """Send SIGKILL to the engine and all processes that it started, even if it hangs; do not wait."""
        if self._child is None:
            return
        self._send(system.KILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            system.kill_session(self._child.pid)

    def tail(self) -> str:
        """Return the last lines of this run's log, without the final line end."""
        return tail(self.log, since=self._begin)

    def _send(self, number: int) -> None:
        if self._child and self._child.poll() is None:
            with contextlib.suppress(OSError):  # Windows: none is sent without a console
                self._child.send_signal(number)


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[int]:
    """Yield a descriptor of the log, opened for appending: after `trim` writes go to the file's new end."""
    number = system.open_log(path)
    try:
        yield number
    finally:
        os.close(number)


def trim(path: Path, limit: int = LOG_BYTES) -> bool:
    """If a log that another process appends to exceeds `limit` bytes, move its contents to `NAME.1`.

    Returns whether it did.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > limit:
            path.with_name(path.name + ".1").write_bytes(path.read_bytes())
            os.truncate(path, 0)
            return True
    return False


def tail(path: Path, *, since: int = 0) -> str:
    """Return at most the last TAIL_BYTES of a log, without its first `since` bytes; "" if it is missing."""
    try:
        with path.open("rb") as log:
            log.seek(max(since, path.stat().st_size - TAIL_BYTES))
            return log.read().decode(errors="replace").rstrip()
    except FileNotFoundError:
        return ""


# -- restarts, always on the same port -------------------------------------------------------------------

FIRST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 30.0  # a user who has fixed the cause must not wait longer for the next start
STEADY_SECONDS: Final = 60.0  # an engine that served this long did not die of a failed start


class Backoff:
    """The pause before the next start, in seconds: doubled after each failure, up to a limit."""

    def __init__(
        self, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS, steady: float = STEADY_SECONDS
    ) -> None:
        self._first, self._longest, self._steady = first, longest, steady
        self._next = first

    def after(self, up_seconds: float) -> float:
        """Return the pause in seconds after an engine that served for `up_seconds` has died."""
        if up_seconds >= self._steady:
            self._next = self._first
        pause = self._next
        self._next = min(self._next * 2, self._longest)
        return pause


class Supervisor:
    """Runs engines made by `launch`, one after another.

    It calls `on_up()` when an engine serves, and `on_down(returncode, log_tail)` when the engine has died.
    If an engine dies before the first `on_up`, the user made a mistake (a wrong path, too little memory):
    `run` then raises its EngineDiedError and starts no other.
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
        """Kill the running engine, which does not answer any more; `run` then starts the next one."""
        if self.process is not None:
            self.process.end_unasked()

    async def run(self) -> None:
        """Run engines until cancelled. When this returns or raises, the engine has ended."""
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
