"""Recordings: how much is kept, who can read it, and what happens when it cannot be written."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import threading
import time

import pytest

from slotkeeper.bench.replay import read
from slotkeeper.observe import recording
from slotkeeper.observe.recording import PARTS, RotatingFiles, TooSlowError
from unit.observe.room import BODY, BUDGET, recorded, write


async def test_recordings_are_private_to_their_owner(room):
    await recorded(room)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (room.folder, *room.files)]
    assert modes == [0o700, 0o600]


async def test_an_existing_folder_keeps_its_mode(room):
    room.folder.mkdir(parents=True, mode=0o750)
    await recorded(room)
    assert stat.S_IMODE(room.folder.stat().st_mode) == 0o750


async def test_the_oldest_recordings_are_removed_to_stay_within_the_budget(room):
    budget = 200 * len(BODY)
    for run in range(3):
        recorder = room.recorder(budget)
        for number in range(200):
            write(recorder, at=run * 1000 + number)
        await recorder.close()
        assert room.size <= budget
    assert room.failed == []
    times = [entry.at for entry in room.entries]
    assert times == sorted(times), "names sort by time"
    assert times[-1] == 2199.0
    assert times[0] > 1000.0
    assert len(room.files) <= PARTS + 2


async def test_a_request_over_the_size_of_a_file_gets_its_own_file_and_one_over_the_budget_is_dropped(room):
    budget = 64 * len(BODY)
    recorder = room.recorder(budget)
    for size in (1, budget // 2, budget):
        write(recorder, b'{"a":"%s"}' % (b"x" * size))
    await recorder.close()
    assert [len((entry.body or {})["a"]) for entry in room.entries] == [1, budget // 2]
    assert len(room.failed) == 1
    assert room.size <= budget


async def test_files_of_others_are_not_counted_and_not_removed(room):
    room.folder.mkdir(parents=True)
    others = room.folder / "mine.jsonl"
    others.write_bytes(b"x" * BUDGET)
    await recorded(room)
    assert others.stat().st_size == BUDGET


# -- when it cannot be written -------------------------------------------------------------------------


async def test_an_unusable_folder_fails_no_request_and_is_logged_once(room, capsys):
    room.folder.parent.mkdir()
    room.folder.write_text("a file")
    recorder = room.recorder()
    for _ in range(5):
        write(recorder)
    await recorder.close()
    assert [type(error) for error in room.failed] == [FileExistsError] * 5
    assert "".join(capsys.readouterr()).count("not_recorded") == 1


async def test_a_folder_that_disappears_is_created_again(room):
    recorder = room.recorder()
    write(recorder)
    while not (room.folder.exists() and room.size):
        await asyncio.sleep(0.01)
    for path in room.files:
        path.unlink()
    room.folder.rmdir()
    write(recorder)
    await recorder.close()
    assert room.failed == []
    assert len(room.entries) == 1


def test_a_part_of_a_line_on_a_full_disk_is_removed(tmp_path, monkeypatch):
    files, real = RotatingFiles(tmp_path, "r", BUDGET), os.write
    files.append(b"one\n")
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:2]))
    with pytest.raises(OSError, match="No space left"):
        files.append(b"two\n")
    monkeypatch.undo()
    files.append(b"three\n")
    files.close()
    assert b"".join(path.read_bytes() for path in tmp_path.iterdir()) == b"one\nthree\n"


KILLED = """
import sys
from pathlib import Path
from slotkeeper.observe.recording import Recorder
recorder = Recorder(Path(sys.argv[1]), 1 << 30, print)
while True:
    body = b'{"a":"%s"}' % (b"x" * 50_000)
    recorder.write(path="/v1/messages", headers={}, body=body, client="c", session=1, at=0)
"""


def test_after_a_kill_only_the_last_line_can_be_torn(room):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(room.folder)], stdout=subprocess.DEVNULL)
    try:
        while not room.folder.exists() or room.size < 5_000_000:
            assert child.poll() is None
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    (path,) = room.files
    trace = read(path)
    assert len(trace.entries) > 50
    lines = path.read_bytes().splitlines()
    assert [problem.split(":")[1] for problem in trace.problems] in ([], [str(len(lines))])


@pytest.mark.parametrize("body", [BODY, b""])
async def test_a_slow_disk_delays_no_request_and_uses_bounded_memory(room, monkeypatch, body):
    monkeypatch.setattr(recording, "WAITING_BYTES", 3 * recording.REQUEST_BYTES)
    free, real = threading.Event(), RotatingFiles.append

    def slow(files: RotatingFiles, line: bytes) -> None:
        free.wait()
        real(files, line)

    monkeypatch.setattr(RotatingFiles, "append", slow)
    recorder = room.recorder()
    for _ in range(30):
        write(recorder, body)
    assert [type(error) for error in room.failed] == [TooSlowError] * 27
    free.set()
    await recorder.close()
    assert len(room.entries) == 3


async def test_a_bug_in_recording_is_counted_and_the_next_request_is_recorded(room):
    recorder = room.recorder()
    write(recorder, path=None)
    write(recorder)
    await recorder.close()
    assert [type(error) for error in room.failed] == [AttributeError]
    assert len(room.entries) == 1
