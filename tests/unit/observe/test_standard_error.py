"""Lines that standard error does not take are counted.

With processes: tests/chaos/test_log_not_written.py.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slotkeeper.cli.main import main
from slotkeeper.observe.log import configure, get_logger
from slotkeeper.observe.standard_error import DROPPED, StandardError


def dropped() -> float:
    (family,) = DROPPED.collect()
    return family.samples[0].value


@contextmanager
def piped() -> Iterator[int]:
    """Make standard error a pipe; yield its other end. No fixture, since pytest replaces it between these."""
    (reading, writing), before = os.pipe(), sys.stderr
    with open(writing, "w", encoding="utf-8") as stream:  # noqa: PTH123
        sys.stderr = stream
        try:
            yield reading
        finally:
            sys.stderr = before
            os.close(reading)


def fill(number: int) -> int:
    """Fill a pipe; return how many bytes went into it."""
    os.set_blocking(number, False)
    size = 0
    try:
        while True:
            size += os.write(number, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(number, True)
        return size


def test_a_line_without_room_is_dropped_and_the_next_line_is_whole():
    with piped() as pipe:
        out, before = StandardError(), dropped()
        size = fill(sys.stderr.fileno())
        out.write("lost\n")
        out.write("lost, too\n")
        assert dropped() == before + 2
        assert os.read(pipe, 2 * size) == b"x" * size
        out.write("there\n")
        assert os.read(pipe, 100) == b"there\n"
        assert dropped() == before + 2


def test_text_after_a_torn_line_begins_a_new_line():
    with piped() as pipe:
        out, before = StandardError(), dropped()
        size = fill(sys.stderr.fileno())
        os.read(pipe, 4096)
        out.write("y" * 9000 + "\n")
        assert dropped() == before + 1
        assert os.read(pipe, 2 * size).endswith(b"y" * 4096)
        out.write("there\n")
        assert os.read(pipe, 100) == b"\nthere\n"


def test_a_long_line_is_written_whole():
    with piped() as pipe:
        StandardError().write("y" * 9000 + "\n")
        assert os.read(pipe, 10_000) == b"y" * 9000 + b"\n"


def test_characters_that_the_encoding_lacks_are_escaped():
    with piped() as pipe:
        StandardError().write("\ud800\n")
        assert os.read(pipe, 100) == b"\\ud800\n"


@pytest.mark.parametrize("closed", [False, True])
def test_without_a_stream_all_lines_are_dropped_and_counted(monkeypatch, tmp_path, closed):
    stream = (tmp_path / "log").open("w")
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    before = dropped()
    configure("info", "auto")
    get_logger("x").info("request")
    logging.getLogger("library").addHandler(handler := logging.StreamHandler(StandardError()))
    logging.getLogger("library").warning("said")
    logging.getLogger("library").removeHandler(handler)
    assert dropped() == before + 2


def test_an_error_message_that_cannot_be_written_changes_no_exit_code():
    before = dropped()
    with piped() as pipe:
        fill(sys.stderr.fileno())
        assert main(["health", "--admin", "http://127.0.0.1:1"]) == 1
        assert set(os.read(pipe, 2**20)) == {ord("x")}
    assert dropped() == before + 1
