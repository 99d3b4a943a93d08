"""The real command in its own process: its output, on which stream, and its exit code."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import httpx

from engine.conftest import wait_until
from patience import PATIENCE
from slotkeeper.engine.child.launch import free_port

NOBODY: Final = "http://127.0.0.1:1"  # a port without a server
SLOTKEEPER: Final = (sys.executable, "-m", "slotkeeper")


def environ(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this machine's environment, without settings of the sidecar."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLOTKEEPER_")}
    return {**kept, "COLUMNS": "1000", **(more or {})}


def ended(*words: str, env: Mapping[str, str] | None = None, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return subprocess.run(
        [*SLOTKEEPER, *words],
        env=environ(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        **how,
    )


@contextmanager
def serving(
    *words: str,
    scheme: str = "http",
    data: str | None = None,
    more: Mapping[str, str] | None = None,
    command: Sequence[str] = SLOTKEEPER,
    **how: Any,
) -> Iterator[tuple[subprocess.Popen[Any], str, str]]:
    """Run `slotkeeper serve`; yield the process, HOST:PORT of its data port, and of its admin port.

    `more` are variables of its environment.
    """
    data, admin = data or f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    ports = ("--listen", data, "--admin-listen", admin)
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | how
    with subprocess.Popen([*command, "serve", *ports, *words], env=environ(more), **how) as process:
        try:
            wait_until(lambda: lives(admin, scheme))
            yield process, data, admin
        finally:
            process.kill()


@contextmanager
def terminal(*command: str, **how: Any) -> Iterator[tuple[subprocess.Popen[Any], int]]:
    """Run a command on a terminal of its own; yield the process, and the terminal's descriptor."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **how) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()
            os.close(ours)


def shown(descriptor: int, *words: str) -> str:
    """Read what a terminal shows until it has shown all these words."""
    text, end = "", time.monotonic() + PATIENCE
    while not all(word in text for word in words):
        assert time.monotonic() < end, f"{words} not in {text!r}"
        if select.select([descriptor], [], [], 0.1)[0]:
            text += os.read(descriptor, 65536).decode(errors="replace")
    return text


def lives(admin: str, scheme: str = "http") -> bool:
    try:
        return httpx.get(f"{scheme}://{admin}/livez", timeout=5, verify=False).is_success  # noqa: S501
    except httpx.TransportError:
        return False
