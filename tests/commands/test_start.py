"""The greeting on a terminal when the sidecar listens; a log that a program reads does not contain it."""

from __future__ import annotations

import os
import pty
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from commands.process import NOBODY, serving
from patience import PATIENCE
from slotkeeper.cli.starting import greeting


class Screen:
    """A terminal, and the text on it when its last writer has ended."""

    def __init__(self) -> None:
        self._ours, self.end = pty.openpty()

    def close(self) -> None:
        for number in (self._ours, self.end):
            with suppress(OSError):
                os.close(number)

    def text(self) -> str:
        os.close(self.end)
        read = b""
        with suppress(OSError):  # EIO: the other end is closed
            while piece := os.read(self._ours, 65536):
                read += piece
        return read.decode()


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    made.close()


def start_and_end(*words: str, **streams: Any) -> tuple[str, str]:
    """Start and end a sidecar; return HOST:PORT of both ports."""
    with serving("--upstream", NOBODY, "--drain-delay", "0", *words, **streams) as (process, data, admin):
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    return data, admin


def test_a_terminal_shows_the_addresses_for_agents_the_dashboard_and_the_next_command(screen):
    data, admin = start_and_end(stderr=screen.end)
    said = screen.text()
    for line in greeting(data, admin):
        assert line in said
    assert f"http://{data}/v1" in said
    assert f"http://{admin}/" in said
    assert f"slotkeeper why --admin http://{admin}" in said


def test_a_log_in_a_file_is_json_and_the_terminal_shows_the_greeting(screen, tmp_path: Path):
    path = tmp_path / "log"
    with path.open("wb") as log:
        data, admin = start_and_end(stdout=screen.end, stderr=log)
    *said, stops = screen.text().splitlines()
    assert said == greeting(data, admin)
    assert stops.startswith("Stopping: ")
    assert {orjson.loads(line)["event"] for line in path.read_bytes().splitlines()} >= {"listening"}


def test_without_a_terminal_only_the_log_is_written(tmp_path: Path):
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as one, err.open("wb") as other:
        start_and_end(stdout=one, stderr=other)
    assert not out.read_bytes()
    for line in err.read_bytes().splitlines():
        orjson.loads(line)


@pytest.mark.parametrize(
    ("bound", "shown"),
    [
        (
            ("127.0.0.1:8080", "127.0.0.1:9090"),
            ("http://127.0.0.1:8080", "http://127.0.0.1:9090/", "slotkeeper why   ("),
        ),
        (
            ("0.0.0.0:80", "0.0.0.0:9"),
            ("http://127.0.0.1:80", "http://127.0.0.1:9/", "why --admin http://127.0.0.1:9   ("),
        ),
        (
            ("::1:80", "::1:9"),
            ("http://[::1]:80", "http://[::1]:9/", "why --admin http://[::1]:9   ("),
        ),
    ],
)
def test_the_shown_addresses_can_be_opened(bound, shown):
    data, admin = bound
    first, second, third = greeting(data, admin)
    agents, dashboard, why = shown
    assert f"{agents}/v1 or {agents}, " in first
    assert second.endswith(f" {dashboard}")
    assert why in third
