"""Containers without a container runtime: what an orchestrator's file would start, as processes here.

The arguments, the environment and the health check are those of the file. `Here` replaces only what must
differ: folders, ports, and names of other containers.

    here = Here(paths={"/slots": tmp_path}, ports={8080: free_port()}, hosts={"engine", "0.0.0.0"})
    with started(Container(command=("slotkeeper", "serve"), env={...}), here, tmp_path / "log") as process:
        process.becomes_healthy(("slotkeeper", "health"))
        assert process.ended(within=30) == 0
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from patience import PATIENCE

ROOT: Final = Path(__file__).resolve().parents[1]
LOOK_SECONDS: Final = 0.1
LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What runs in one container: the entrypoint with its arguments, and all of its environment."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The places on this machine of things that have other names in a container.

    Args:
        paths: folders and files, by their path in the container.
        ports: by their number in the container; give every container of a test the same mapping.
        hosts: names and addresses that mean some container of this test: all are on loopback here.
        programs: what runs instead of the first word of a command; `slotkeeper` is known.
    """

    paths: Mapping[str, Path] = field(default_factory=dict)
    ports: Mapping[int, int] = field(default_factory=dict)
    hosts: Collection[str] = ()
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def text(self, text: str) -> str:
        """Translate an argument or a value: `http://engine:8081`, `/slots/x`, `8081`, `--path=/slots`."""
        if text.startswith("--") and "=" in text:
            flag, _, value = text.partition("=")
            return f"{flag}={self.text(value)}"
        if text.isdecimal() and int(text) in self.ports:
            return str(self.ports[int(text)])
        if text in self.hosts:
            return LOOPBACK
        for path in sorted(self.paths, key=len, reverse=True):  # the longest match is the most specific
            if text == path or text.startswith(f"{path}/"):
                return f"{self.paths[path]}{text[len(path) :]}"
        names = "|".join(re.escape(host) for host in (LOOPBACK, "localhost", *self.hosts))
        return re.sub(rf"(?<![\w.-])({names}):(\d+)\b", self._address, text)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a container's command as a command of this machine."""
        program = {"slotkeeper": (sys.executable, "-m", "slotkeeper"), **self.programs}
        first, *rest = words
        return [*program.get(first, (first,)), *map(self.text, rest)]

    def env(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return exactly the container's variables, and of this process only PATH."""
        return {name: self.text(value) for name, value in env.items()} | {"PATH": os.environ["PATH"]}

    def _address(self, found: re.Match[str]) -> str:
        port = int(found[2])
        return f"{LOOPBACK}:{self.ports.get(port, port)}"


class Process:
    """One container as a process, its output in a file."""

    def __init__(self, container: Container, here: Here, log: Path) -> None:
        self._env, self._here, self._log = here.env(container.env), here, log
        with log.open("wb") as out:
            self._child = subprocess.Popen(
                here.command(container.command), env=self._env, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", errors="replace")

    def runs(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as a health check is run: with its environment."""
        command = self._here.command(words)
        return subprocess.run(
            command, env=self._env, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    def becomes_healthy(self, check: Sequence[str], within: float = PATIENCE) -> None:
        """Wait until the health check `check` passes. Fails when the process ends first."""
        deadline = time.monotonic() + within
        while (done := self.runs(check)).returncode:
            assert self._child.poll() is None, f"it ended:\n{self.log}"
            assert time.monotonic() < deadline, f"not healthy: {done.stdout}{done.stderr}\n{self.log}"
            time.sleep(LOOK_SECONDS)

    def tell(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def ended(self, *, within: float) -> int:
        """Return the exit code after the process has ended. Raises subprocess.TimeoutExpired."""
        return self._child.wait(timeout=within)

    def stopped(self, *, within: float) -> int:
        """Stop it as an orchestrator does: SIGTERM, and `within` seconds of grace."""
        self.tell(signal.SIGTERM)
        return self.ended(within=within)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


@contextmanager
def started(container: Container, here: Here, log: Path) -> Iterator[Process]:
    """Run a container as a process; it is killed at the end of the block unless it has ended."""
    process = Process(container, here, log)
    try:
        yield process
    finally:
        process.kill()
