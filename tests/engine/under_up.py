"""A running `slotkeeper up`, seen from outside."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from patience import PATIENCE

QUIET = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
CHAT = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8}


class Up:
    """One running `slotkeeper up`, seen from outside: its ports, its log, its engine's process."""

    def __init__(self, words: list[str], log: Path, environ: dict[str, str]) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environ)

    def lines(self, event: str) -> list[dict[str, Any]]:
        found = []
        for line in self.log.read_text("utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                said = json.loads(line)
                if said.get("event") == event:
                    found.append(said)
        return found

    def url(self, port: str = "data") -> str:
        return f"http://{self.lines('listening')[0][port]}"

    @property
    def engine(self) -> int | None:
        """Return the process id of the running engine.

        Until it runs the engine's program it is a copy of `up`, which waits for that: if a test stopped it
        then, `up` would do nothing more.
        """
        with suppress(psutil.NoSuchProcess):
            up = psutil.Process(self.process.pid)
            alive = [child for child in up.children() if is_alive(child.pid)]
            return next((child.pid for child in alive if child.cmdline() != up.cmdline()), None)
        return None

    def ready(self) -> bool:
        """Wait until it accepts requests, and knows enough of its engine to place them."""
        assert self.process.poll() is None, f"it ended:\n{self.log.read_text('utf-8')}"
        if not self.lines("listening") or not self.lines("engine_up"):
            return False
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url('admin')}/readyz", timeout=PATIENCE).status_code == 200
        return False

    def chat(self, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url()}/v1/chat/completions", json=CHAT | more, timeout=PATIENCE)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
