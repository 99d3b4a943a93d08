"""Recordings: what is written, how much of it, who can read it, and what happens when it cannot be."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from multidict import CIMultiDict

from slotkeeper.bench.trace import Entry, read
from slotkeeper.observe import recording
from slotkeeper.observe.recording import Recorder, TooSlowError, harmless, product
from slotkeeper.observe.rotating import PARTS, RotatingFiles
from slotkeeper.wire import identity

BUDGET = 1 << 20
BODY = b'{"messages":[{"role":"user","content":"hi"}]}'
SECRETS = {
    "Authorization": "Bearer sk-1",
    "X-Api-Key": "sk-2",
    "Cookie": "sid=sk-3",
    "Proxy-Authorization": "Basic sk-4",
    "Anthropic-Api-Key": "sk-5",
    "OpenAI-Session-Token": "sk-6",
    "X-Whatever": "sk-7",
    "X-Session-Id": "sk-2",  # a client that names its session by its key
    "Traceparent": "00-sk-8",
}


class Room:
    """A folder that is recorded to, and what went wrong there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed: list[BaseException] = []

    def recorder(self, budget: int = BUDGET) -> Recorder:
        return Recorder(self.folder, budget, self.failed.append)

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("requests-*.jsonl"))

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    @property
    def entries(self) -> list[Entry]:
        return [entry for path in self.files if path.stat().st_size for entry in read(path).entries]


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path / "made" / "traces")


def write(recorder: Recorder, body: bytes = BODY, **more: Any) -> None:
    what: dict[str, Any] = {
        "path": "/v1/chat/completions",
        "headers": CIMultiDict({"User-Agent": "pi/0.73 (linux)"}),
        "client": "d1ge57",
        "session": "s",
        "at": 12.5,
    }
    recorder.write(**(what | more), body=body)


async def recorded(room: Room, body: bytes = BODY, **more: Any) -> Entry:
    recorder = room.recorder()
    write(recorder, body, **more)
    await recorder.close()
    assert room.failed == []
    return room.entries[-1]


# -- what is written -----------------------------------------------------------------------------------


async def test_a_request_is_read_back_as_it_came(room):
    entry = await recorded(room)
    assert (entry.at, entry.client, entry.session, entry.method) == (12.5, "pi", "s", "POST")
    assert entry.path == "/v1/chat/completions"
    assert entry.body == orjson.loads(BODY)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"a": "two\nlines", "b": [1e-05, "\u00e9"]}, indent=2).replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + BODY + b"\n\n",
        b'{"a":1,"a":2,"big":123456789012345678901234567890}',
    ],
)
async def test_a_body_is_kept_on_one_line_as_it_was_written(room, body):
    entry = await recorded(room, body)
    assert entry.body == orjson.loads(body.removeprefix(b"\xef\xbb\xbf"))
    (path,) = room.files
    assert path.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("body", [b"", b"[1]", b"hello", b"\x1f\x8b\x08{}", b"null"])
async def test_a_body_that_is_no_json_object_is_left_out(room, body):
    assert (await recorded(room, body)).body is None


async def test_a_body_that_only_looks_like_one_costs_its_own_line(room):
    recorder = room.recorder()
    for body in (BODY, b'{"a": \n', b'{"a": \n oops }', BODY):
        write(recorder, body)
    await recorder.close()
    (path,) = room.files
    trace = read(path)
    assert [entry.body is None for entry in trace.entries] == [False, True, False]
    assert len(trace.problems) == 1


async def test_no_credential_is_written(room):
    headers = CIMultiDict(SECRETS | {"User-Agent": "codex_cli_rs/0.50", "Anthropic-Version": "2023-06-01"})
    entry = await recorded(room, headers=headers, path="/v1/messages?beta=true&key=sk-9")
    assert dict(entry.headers) == {"user-agent": "codex_cli_rs/0.50", "anthropic-version": "2023-06-01"}
    assert entry.path == "/v1/messages"
    assert b"sk-" not in room.files[0].read_bytes()


def test_all_that_names_a_conversation_is_written():
    given = dict.fromkeys(identity.HEADERS, "mine")
    assert dict(harmless(given)) == given


async def test_a_header_that_is_no_text_is_written_all_the_same(room):
    entry = await recorded(room, headers={"User-Agent": "pi/1 \udcff"}, session="a\udcff")
    assert entry.headers["user-agent"] == "pi/1 ?"
    assert entry.session == "a?"


@pytest.mark.parametrize(
    ("user_agent", "name"),
    [("claude-cli/2.0 (external, cli)", "claude-cli"), ("OpenAI/JS 5.1", "OpenAI"), ("", ""), ("(x)", "")],
)
def test_a_client_is_known_by_its_program(user_agent, name):
    assert product(user_agent) == name


async def test_who_does_not_say_its_program_is_known_by_its_digest(room):
    assert (await recorded(room, headers={})).client == "d1ge57"


async def test_numbers_of_conversations_are_not_those_of_another_run(room):
    first, second = [(await recorded(room, session=1)).session for _ in range(2)]
    assert first != second
    assert first.endswith("-1")
    assert second.endswith("-1")


# -- how much of it, and for whom ----------------------------------------------------------------------


async def test_only_its_owner_may_read_it(room):
    await recorded(room)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (room.folder, *room.files)]
    assert modes == [0o700, 0o600]


async def test_a_folder_that_was_there_keeps_its_mode(room):
    room.folder.mkdir(parents=True, mode=0o750)
    await recorded(room)
    assert stat.S_IMODE(room.folder.stat().st_mode) == 0o750


async def test_the_oldest_goes_first_and_the_budget_holds(room):
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


async def test_what_is_larger_than_a_file_has_one_of_its_own_and_what_is_larger_than_all_is_not_kept(room):
    budget = 64 * len(BODY)
    recorder = room.recorder(budget)
    for size in (1, budget // 2, budget):
        write(recorder, b'{"a":"%s"}' % (b"x" * size))
    await recorder.close()
    assert [len((entry.body or {})["a"]) for entry in room.entries] == [1, budget // 2]
    assert len(room.failed) == 1
    assert room.size <= budget


async def test_files_of_others_do_not_count_and_do_not_go(room):
    room.folder.mkdir(parents=True)
    others = room.folder / "mine.jsonl"
    others.write_bytes(b"x" * BUDGET)
    await recorded(room)
    assert others.stat().st_size == BUDGET


# -- when it cannot be written -------------------------------------------------------------------------


async def test_a_folder_that_cannot_be_used_fails_no_request_and_is_told(room, capsys):
    room.folder.parent.mkdir()
    room.folder.write_text("a file")
    recorder = room.recorder()
    for _ in range(5):
        write(recorder)
    await recorder.close()
    assert [type(error) for error in room.failed] == [FileExistsError] * 5
    assert "".join(capsys.readouterr()).count("not_recorded") == 1


async def test_a_folder_that_goes_away_is_made_again(room):
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


@pytest.fixture
def tiny_disk(tmp_path: Path):
    """64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)  # noqa: S607


async def test_a_full_disk_leaves_whole_lines_and_is_used_again_when_there_is_room(tiny_disk):
    room, ballast = Room(tiny_disk), tiny_disk / "ballast"
    ballast.write_bytes(b"x" * (32 << 10))
    recorder = room.recorder()
    for _ in range(100):
        write(recorder, b'{"a":"%s"}' % (b"x" * 1000))
    while not room.failed:
        await asyncio.sleep(0.01)
    ballast.unlink()
    await asyncio.sleep(0.05)
    write(recorder, b'{"last":true}')
    await recorder.close()
    (path,) = room.files
    trace = read(path)
    assert trace.problems == ()
    assert trace.entries[-1].body == {"last": True}
    assert 10 < len(trace.entries) < 100


def test_a_part_of_a_line_that_a_full_disk_took_is_taken_back(tmp_path, monkeypatch):
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


def test_after_a_violent_death_only_the_last_line_can_be_torn(room):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(room.folder)], stdout=subprocess.DEVNULL)
    try:
        while not room.folder.exists() or room.size < 5_000_000:
            assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    (path,) = room.files
    trace = read(path)
    assert len(trace.entries) > 50
    lines = path.read_bytes().splitlines()
    assert [problem.split(":")[1] for problem in trace.problems] in ([], [str(len(lines))])


async def test_a_slow_disk_holds_nothing_up_and_fills_no_memory(room, monkeypatch):
    monkeypatch.setattr(recording, "WAITING_BYTES", 3 * len(BODY))
    free, real = threading.Event(), RotatingFiles.append

    def slow(files: RotatingFiles, line: bytes) -> None:
        free.wait()
        real(files, line)

    monkeypatch.setattr(RotatingFiles, "append", slow)
    recorder = room.recorder()
    for _ in range(10):
        write(recorder)
    assert [type(error) for error in room.failed] == [TooSlowError] * 7
    free.set()
    await recorder.close()
    assert len(room.entries) == 3


async def test_a_bug_of_ours_is_counted_and_the_next_request_is_written(room):
    recorder = room.recorder()
    write(recorder, path=None)
    write(recorder)
    await recorder.close()
    assert [type(error) for error in room.failed] == [AttributeError]
    assert len(room.entries) == 1
