"""Each command that the first pages show, pasted in their order by a user who has nothing but a checkout."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest

from builds import NEWER
from clients.agents import AGENTS_BY_NAME, DOCUMENTED_URL
from clients.agents import PAGE as AGENTS_PAGE
from commands.process import shown, terminal
from engine.conftest import wait_until
from engine.under_up import CHAT
from image.test_compose_runs import LAB
from pages import ROOT, blocks, commands
from patience import PATIENCE
from programs import program
from slotkeeper import __version__
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.engine.child.launch import find_engine, free_port

PAGES: Final = ("README.md", "docs/quickstart.md", AGENTS_PAGE)
ENGINE_PORT, DATA_PORT, ADMIN_PORT = "8081", "8080", "9090"  # as in the pages; free ones replace them
PORT: Final = re.compile(rf"\b({ENGINE_PORT}|{DATA_PORT}|{ADMIN_PORT})\b")
# Beginning of a command -> the port of the server that it starts, which runs until another one needs it.
SERVERS: Final = {"llama-server": ENGINE_PORT, "slotkeeper serve": DATA_PORT, "slotkeeper up": DATA_PORT}
TOP: Final = "slotkeeper top"  # needs a terminal, and Ctrl-C
# Beginning of a command that ends by itself -> what its output has.
SHOWS: Final = {
    "pip install": "",
    "mkdir": "",
    "slotkeeper --version": re.escape(__version__),
    "slotkeeper doctor": r"Findings|what to do",
    "slotkeeper why": r"\d+ +cold|nothing twice",
    "slotkeeper why last": r"\d+ of \d+ prompt tokens were reused and \d+ computed",
    "curl": r"(?i)^x-slotkeeper-slot: [01]\s*$",
}


class Elsewhere(NamedTuple):
    """What runs a command that is not run here: a file, and a text in it."""

    file: str
    text: str
    why: str


UNITS: Final = Elsewhere(
    "tests/deploy/test_systemd.py", "def test_the_quick_start_installs_every_file", "root"
)
AGENTS: Final = Elsewhere(
    "tests/clients/agents.py", "*CLINE_SETUP", "agents are installed by `make test-clients`"
)
ELSEWHERE: Final = {
    "make demo": Elsewhere(".ci/run", "step 5 make demo", "installs an engine, for minutes"),
    "slotkeeper bench": Elsewhere(
        "tests/engine/test_bench.py", "def test_four_ways_and_a_rival_on_a_model", "10 minutes"
    ),
    "pipx install": Elsewhere(
        "tests/commands/test_install.py", '"docs/quickstart.md"', "another way to install"
    ),
    "useradd": UNITS,
    "install": UNITS,
    "editor": UNITS,
    "systemctl": UNITS,
    "pi": AGENTS,
    "cline": AGENTS,
}


def known(line: str) -> str:
    """Return the beginning of a command that the tables above have. Raises ValueError."""
    words = f"{line} "
    names = [name for name in (*SERVERS, TOP, *SHOWS, *ELSEWHERE) if words.startswith(f"{name} ")]
    return max(names, key=len)


def without_prompt(page: str) -> list[str]:
    return [command[2:] for command in commands(page)]


class Newcomer:
    """A user with an empty home, a checkout and a model in it, and only these programs on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.home, self.checkout, self.programs = folder / "home", folder / "slotkeeper", folder / "bin"
        self.home.mkdir()
        self.programs.mkdir()
        self.ports = {port: str(free_port()) for port in (ENGINE_PORT, DATA_PORT, ADMIN_PORT)}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.seconds: list[tuple[str, float]] = []

    @property
    def env(self) -> dict[str, str]:
        """Return all variables: those of a login, this machine's package index, and the ports by default."""
        index = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        path = f"{self.home}/venv/bin:{self.programs}:/usr/bin:/bin"
        ours = {"LISTEN": DATA_PORT, "ADMIN_LISTEN": ADMIN_PORT}
        places = {f"SLOTKEEPER_{name}": f"127.0.0.1:{self.ports[port]}" for name, port in ours.items()}
        return {**index, **places, "HOME": str(self.home), "PATH": path, "TERM": "xterm"}

    def prepare(self) -> None:
        """Copy the files that git would commit, make the environment and put programs on the PATH."""
        listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
        for name in filter(lambda name: (ROOT / name).is_file(), names):
            (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)
        (self.checkout / "model.gguf").symlink_to(build_model(Tiny.HYBRID))
        (self.programs / "curl").symlink_to(program("curl"))
        (script := self.programs / "llama-server").write_text(llama_server(), "utf-8")
        script.chmod(0o755)
        subprocess.run([sys.executable, "-m", "venv", self.home / "venv"], check=True)

    def paste(self, line: str) -> None:
        """Run a command, or start a server; it must show or serve what it promises."""
        began, name = time.monotonic(), known(line)
        words = PORT.sub(lambda port: self.ports[port[0]], line)
        if name in SERVERS:
            self.start(name, words)
        elif name == TOP:
            self.watch(words)
        else:
            done = subprocess.run(["/bin/sh", "-c", words], timeout=5 * PATIENCE, check=False, **self.piped())
            assert done.returncode == 0, f"{line}\n{done.stdout}"
            assert re.search(SHOWS[name], done.stdout, re.MULTILINE), f"{line}\n{done.stdout}"
        self.seconds.append((line, time.monotonic() - began))

    def piped(self) -> Mapping[str, Any]:
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return {"cwd": self.checkout, "env": self.env, "stdin": subprocess.DEVNULL, **both}

    def start(self, name: str, words: str) -> None:
        self.interrupt(port := SERVERS[name])
        log = (self.home / f"{port}.log").open("wb")
        with log:
            self.running[port] = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {words}"],
                start_new_session=True,  # else Ctrl-C would be ours, too
                **{**self.piped(), "stdout": log, "stderr": log, "text": False},
            )
        wait_until(lambda: self.serves(port, "/health" if port == ENGINE_PORT else "/readyz"))
        if port == DATA_PORT:
            url = f"http://127.0.0.1:{self.ports[port]}/v1/chat/completions"
            answer = httpx.post(url, json=CHAT, timeout=PATIENCE, trust_env=False)
            assert answer.headers["X-Slotkeeper-Slot"] in {"0", "1"}, answer.text

    def serves(self, port: str, path: str) -> bool:
        process = self.running[port]
        log = (self.home / f"{port}.log").read_text("utf-8")
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}\n{log}"
        asked = self.ports[ADMIN_PORT if path == "/readyz" else port]
        with suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{asked}{path}", timeout=5, trust_env=False).is_success
        return False

    def interrupt(self, port: str) -> None:
        """Press Ctrl-C in the terminal of the server at this port, if there is one."""
        if process := self.running.pop(port, None):
            os.killpg(process.pid, signal.SIGINT)
            try:
                code = process.wait(PATIENCE)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            assert code == 0, (self.home / f"{port}.log").read_text("utf-8")

    def watch(self, words: str) -> None:
        """Look at one screen, and press Ctrl-C."""
        how = {"cwd": self.checkout, "env": self.env}
        with terminal("/bin/sh", "-c", f"exec {words}", **how) as (process, screen):
            shown(screen, f"slotkeeper {__version__}", "hit rate")
            process.send_signal(signal.SIGINT)
            with suppress(OSError):  # EIO: it has ended
                while os.read(screen, 65536):
                    pass
            assert process.wait(PATIENCE) == 0


def llama_server() -> str:
    """Return a script that runs the newer build as the program `llama-server`.

    It answers --help and --version, which the server of the package xllamacpp does not. The tiny model needs
    no second thread and no device.
    """
    engine = find_engine(NEWER)
    flags = shlex.quote("\n".join(sorted(engine.known)))
    cases = f"--help) echo {flags}; exit;;\n--version) echo 'version: {engine.build}'; exit;;"
    return f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\nexec {shlex.join((*engine.program, *LAB))} "$@"\n'


@contextmanager
def newcomer(folder: Path) -> Iterator[Newcomer]:
    made = Newcomer(folder)
    made.prepare()
    try:
        yield made
        for port in (DATA_PORT, ENGINE_PORT):
            made.interrupt(port)
    finally:
        for process in made.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("page", PAGES)
def test_each_command_of_a_page_is_run_here_or_by_a_named_test(page):
    for line in without_prompt(page):
        if named := ELSEWHERE.get(known(line)):
            assert named.text in (ROOT / named.file).read_text("utf-8"), line


def test_the_tables_have_only_commands_of_the_pages():
    used = {known(line) for page in PAGES for line in without_prompt(page)}
    assert used == {*SERVERS, TOP, *SHOWS, *ELSEWHERE}


def test_each_settings_block_is_the_file_that_the_tests_of_agents_use():
    used = {
        path: text for agent in AGENTS_BY_NAME.values() for path, text in agent.files(DOCUMENTED_URL).items()
    }
    for language, parsed in (("json", json.loads), ("toml", tomllib.loads)):
        for block in blocks(AGENTS_PAGE, language):
            assert parsed(block.text).items() <= parsed(used[block.path]).items(), block.heading


def test_the_page_names_the_versions_of_agents_that_the_tests_use():
    text = (ROOT / AGENTS_PAGE).read_text("utf-8")
    tested = json.loads((ROOT / "tests/clients/package.json").read_text("utf-8"))["dependencies"]
    assert [item for item in tested.items() if f"({item[1]})" not in text] == []


@pytest.mark.remaining
@pytest.mark.timeout(1800)  # it installs packages from an index
def test_the_commands_of_the_pages_run_in_a_fresh_environment(tmp_path):
    """Page after page, as a user reads them, so that agents.md finds the engine of the quick start."""
    with newcomer(tmp_path) as user:
        for page in PAGES:
            for line in without_prompt(page):
                if known(line) not in ELSEWHERE:
                    user.paste(line)
    for line, seconds in user.seconds:
        sys.stdout.write(f"{seconds:6.1f} s  {line}\n")
