"""`slotkeeper why`, `top` and `health` beside a real sidecar and a real engine."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
from rich.console import Console

from patience import PATIENCE
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.cli.admin_client import health
from slotkeeper.cli.why import why

STORY = "The lighthouse keeper counts the ships that pass by night. " * 40
SYSTEM = "You are helpful.\n<env>\nToday's date: {}\n</env>\n" + STORY
# As a shell would start it: in its own terminal, so that Ctrl-C reaches it.
IN_TERMINAL = (
    "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "from slotkeeper.cli.main import main; sys.exit(main())"
)
CODES = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")
CTRL_C = b"\x03"


def admin_of(sidecar: Sidecar) -> str:
    return f"http://{sidecar.addresses[1]}"


async def converse(sidecar: Sidecar, *dates: str) -> list[dict]:
    """Send a turn for each date, as an agent with the date in its system prompt. Return the figures."""
    messages, figures = [], []
    async with aiohttp.ClientSession(lab.url_of(sidecar)) as client:
        for number, date in enumerate(dates):
            messages.append({"role": "user", "content": f"How many on day {number}? {STORY}"})
            system = {"role": "system", "content": SYSTEM.format(date)}
            body = {"messages": [system, *messages], "max_tokens": 4, "temperature": 0}
            async with client.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
                document = await answer.json()
            messages.append(document["choices"][0]["message"])
            figures.append(document["timings"])
    return figures


async def told(sidecar: Sidecar, id_: str | None, capsys, **given) -> tuple[int, str]:
    capsys.readouterr()  # the sidecar's own log
    options = {"token": None, "last": 20, "repeated": False, "as_json": False} | given
    out = io.StringIO()
    code = await why(id_, Console(file=out, width=160), admin=admin_of(sidecar), **options)
    return code, out.getvalue() + capsys.readouterr().out


# -- why -----------------------------------------------------------------------------------------------


async def test_why_reports_the_cost_of_a_changed_date_and_the_rule_for_it(build, tmp_path, capsys):
    observing = {"rules": ("all=observe",), "why_text": True}
    async with lab.tiny_engine(Tiny.HYBRID, build, tmp_path) as engine:
        async with lab.in_front_of(engine.base, engine.flags, **observing) as sidecar:
            first, second = await converse(sidecar, "Sat Nov 21 2026", "Sun Nov 22 2026")

            code, out = await told(sidecar, None, capsys, repeated=True)
            assert code == 0
            (line,) = out.splitlines()[1:]
            assert f"{second['prompt_n']:,}" in line.split()
            assert "a date changed" in line

            _, out = await told(sidecar, None, capsys, as_json=True)
            newest, oldest = map(json.loads, out.splitlines())
            assert [newest["computed"], oldest["computed"]] == [second["prompt_n"], first["prompt_n"]]
            assert newest["id"][-8:] in line

            for name in ("last", newest["id"], newest["id"][-6:]):
                code, out = await told(sidecar, name, capsys)
                assert code == 0
                assert newest["id"] in out
            document = json.loads((await told(sidecar, "last", capsys, as_json=True))[1])
            assert out.index("--rules date=fix") < out.index("Time") < out.index("Choice")
            assert all(span["stage"] in out for span in document["timeline"])
            was, now = (re.search(rf"^ *{re.escape(sign)} (.*)$", out, re.MULTILINE)[1] for sign in "-+")
            assert "Nov 21 2026" in was
            assert "Nov 22 2026" in now
            assert "Nov" not in out[out.index("Where it parts") : out.index(was)]
            assert "would have changed messages[0].content" in out

            _, out = await told(sidecar, oldest["id"], capsys)
            assert "Nothing was computed twice." in out


# -- top and health ------------------------------------------------------------------------------------


class Terminal:
    """A command in its own terminal, 80 columns wide, and its output."""

    def __init__(self, master: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.raw = ""
        self._master = master

    @property
    def text(self) -> str:
        return CODES.sub("", self.raw)

    def read(self) -> None:
        """Read all output that is available."""
        with suppress(BlockingIOError):
            while True:
                self.raw += os.read(self._master, 65536).decode(errors="replace")

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    async def shows(self, pattern: str, since: int = 0) -> int:
        """Wait for a text after the first `since` characters; return the number of characters so far."""
        async with asyncio.timeout(PATIENCE):
            while not re.search(pattern, self.text[since:]):
                assert self.process.returncode is None, self.text
                await asyncio.sleep(0.02)
        return len(self.text)


@asynccontextmanager
async def terminal(*words: str) -> AsyncIterator[Terminal]:
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(slave)
    env = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", IN_TERMINAL, *words),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=env | {"TERM": "xterm-256color"},
        start_new_session=True,
    )
    shown = Terminal(master, process)
    loop = asyncio.get_running_loop()
    loop.add_reader(master, shown.read)
    try:
        yield shown
        assert termios.tcgetattr(slave) == before
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        loop.remove_reader(master)
        os.close(slave)
        os.close(master)


async def test_top_redraws_its_screen_and_restores_the_terminal(build, tmp_path):
    async with lab.tiny_engine(Tiny.HYBRID, build, tmp_path) as engine, lab.keeping(engine) as sidecar:
        async with terminal("top", "--admin", admin_of(sidecar), "--every", "0.1") as shown:
            await shown.shows("No request has come yet")
            assert "\x1b[?1049h" in shown.raw
            assert "\x1b[?25l" in shown.raw
            (figures,) = await converse(sidecar, "Sat Nov 21 2026")
            await shown.shows(rf"{figures['prompt_n'] + figures['cache_n']:,}.*nothing twice")
            await lab.rested(sidecar)
            await shown.shows(r"hot +\S+ +[1-9]")
            assert await health(admin=admin_of(sidecar), live=False) == 0

            shown.type(CTRL_C)
            async with asyncio.timeout(PATIENCE):
                assert await shown.process.wait() == 0
            shown.read()
    assert shown.raw.rindex("\x1b[?25h") > shown.raw.rindex("\x1b[?25l")
    assert shown.raw.rindex("\x1b[?1049l") > shown.raw.rindex("\x1b[?1049h")
    assert "Traceback" not in shown.text
