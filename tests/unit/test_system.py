"""What the operating system decides: `posix` and `windows` do the same, the latter on imitated system calls.

Commands on imitated systems: tests/commands/test_other_systems.py.
"""

from __future__ import annotations

import ast
import asyncio
import errno
import importlib
import os
import signal
import sys
from io import FileIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from commands.other_system import imitate_windows
from slotkeeper import system
from slotkeeper.system import posix

NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


@pytest.fixture(params=["posix", "windows"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "posix":
        return posix

    def put(owner: Any, name: str, value: Any) -> None:
        monkeypatch.setattr(owner, name, value, raising=False)

    for name, made in imitate_windows(put).items():
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delitem(sys.modules, "slotkeeper.system.windows", raising=False)
    return importlib.import_module("slotkeeper.system.windows")


def heads(name: str) -> dict[str, str]:
    """Return the public functions of a module, each with its arguments and result."""
    tree = ast.parse(Path(posix.__file__).with_name(f"{name}.py").read_text("utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    return {node.name: f"{ast.unparse(node.args)} -> {ast.unparse(node.returns)}" for node in found}


def test_both_modules_have_the_same_functions_and_each_is_offered():
    assert heads("posix") == heads("windows")
    assert heads("posix").keys() <= vars(system).keys()


def test_a_new_file_is_no_existing_one_and_no_link(module, tmp_path):
    path = tmp_path / "new"
    os.close(module.open_plain(path, NEW))
    with pytest.raises(FileExistsError):
        module.open_plain(path, NEW)
    with pytest.raises(FileNotFoundError):
        module.open_plain(tmp_path / "none", os.O_RDONLY)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="link") as caught:
        module.open_plain(tmp_path / "link", os.O_RDONLY)
    assert caught.value.errno == errno.ELOOP


def test_a_file_is_locked_for_one_until_it_is_closed(module, tmp_path):
    path = tmp_path / "lock"
    one, other = (module.open_plain(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    module.lock(one)
    with pytest.raises(BlockingIOError):
        module.lock(other)
    os.close(one)
    module.lock(other)
    os.close(other)


def test_reading_and_writing_at_an_offset_leave_the_position(module, tmp_path):
    with FileIO(module.open_plain(tmp_path / "file", NEW), "r+b") as file:
        file.write(b"0123456789")
        file.seek(2)
        assert module.write_at(file, memoryview(b"ab"), 5) == 2
        read = bytearray(4)
        assert module.read_at(file, memoryview(read), 4) == 4
        assert read == b"4ab7"
        assert file.read() == b"234ab789"


def test_the_time_of_an_open_file_can_be_set(module, tmp_path):
    path, moment = tmp_path / "file", 1_700_000_000_123_456_700  # Windows counts in units of 100 ns
    with FileIO(module.open_plain(path, NEW), "r+b") as file:
        module.make_private(file.fileno())
        module.give(file.fileno(), tmp_path.stat())
        module.set_modified(file.fileno(), moment)
    module.sync_folder(tmp_path)
    assert path.stat().st_mtime_ns == moment


def test_a_log_that_is_cut_goes_on_at_its_new_end(module, tmp_path):
    path = tmp_path / "log"
    number = module.open_log(path)
    os.write(number, b"before")
    os.truncate(path, 0)
    os.write(number, b"after")
    os.close(number)
    assert path.read_bytes() == b"after"


def test_a_signal_calls_also_in_a_loop_without_signal_handlers(module):
    """As in Windows's loop; the one of this system has them."""
    called: list[int] = []

    async def wait() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def call() -> None:
            called.append(1)
            done.set()

        undo = system.on_signal(loop, signal.SIGUSR1, call)
        signal.raise_signal(signal.SIGUSR1)
        await done.wait()
        undo()

    before = signal.getsignal(signal.SIGUSR1)
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(wait())
    assert called == [1]
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(
    ("platform", "state", "cache"),
    [
        ("linux", "home/.local/state", "home/.cache"),
        ("darwin", "home/Library/Application Support", "home/Library/Caches"),
        ("win32", "local", "local"),
    ],
)
def test_each_system_has_its_own_folders_and_a_variable_names_others(
    monkeypatch, tmp_path, platform, state, cache
):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert (system.state_folder(), system.cache_folder()) == (tmp_path / state, tmp_path / cache)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "named"))
    assert system.state_folder() == tmp_path / "named"
