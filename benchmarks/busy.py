"""Busy loops beside a measurement or a test run. Standard library only: tests/rehearse.py runs it bare."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run this many busy loops inside the block.

    Each has its own session, as in another terminal: Linux divides the processor between sessions, so loops
    of one session would together get no more time than one of them.
    """
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
