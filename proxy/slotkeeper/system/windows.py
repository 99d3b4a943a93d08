"""Windows. It has no modes of files and no numbers of users: the access list of a folder says who may read.

See `posix` for what each function does.
"""
# ruff: noqa: ARG001 - both modules have the same arguments

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, Final

assert sys.platform == "win32"  # noqa: S101 - for the type checker

import _winapi  # noqa: E402
import ctypes  # noqa: E402
import msvcrt  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402

# No Ctrl-C can be sent to one program; Ctrl-Break goes to the group that `apart` makes. llama-server then
# ends at once, in the middle of a save too.
INTERRUPT: Final[int] = signal.CTRL_BREAK_EVENT
KILL: Final[int] = signal.SIGTERM  # os.kill: TerminateProcess
ENDS: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGBREAK,
)  # the last: Ctrl-Break, a window that is closed
PIPE_BYTES: Final = 4096  # Windows promises nothing

SHARE_ALL: Final = 7  # others may read, write, rename and remove the file while we have it open
LINK_ITSELF: Final = 0x00200000  # FILE_FLAG_OPEN_REPARSE_POINT
APPEND: Final = 0x00100084  # SYNCHRONIZE, FILE_READ_ATTRIBUTES, FILE_APPEND_DATA and nothing else
SET_TIMES: Final = 0x00000100  # FILE_WRITE_ATTRIBUTES
CREATE_NEW, OPEN_EXISTING, OPEN_ALWAYS = 1, 3, 4
ACCESS: Final = {
    os.O_RDONLY: _winapi.GENERIC_READ,
    os.O_WRONLY: _winapi.GENERIC_WRITE,
    os.O_RDWR: _winapi.GENERIC_READ | _winapi.GENERIC_WRITE,
}
EPOCH: Final = 116_444_736_000_000_000  # 1970 in the clock of files: units of 100 ns since 1601


def open_plain(path: Path, flags: int) -> int:
    access = ACCESS[flags & (os.O_RDONLY | os.O_WRONLY | os.O_RDWR)] | SET_TIMES
    made = CREATE_NEW if flags & os.O_EXCL else OPEN_ALWAYS if flags & os.O_CREAT else OPEN_EXISTING
    descriptor = _open(path, access, made, flags & os.O_APPEND)
    if path.is_symlink():
        os.close(descriptor)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return descriptor


def open_log(path: Path) -> int:
    return _open(path, APPEND, OPEN_ALWAYS, os.O_APPEND)


def _open(path: Path, access: int, made: int, flags: int) -> int:
    """Open a file as `os.open` cannot: it may be renamed and removed meanwhile."""
    handle = _winapi.CreateFile(str(path), access, SHARE_ALL, 0, made, LINK_ITSELF, 0)
    return msvcrt.open_osfhandle(handle, flags)


def lock(descriptor: int) -> None:
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        raise BlockingIOError(error.errno, error.strerror) from error


def make_private(descriptor: int) -> None:
    """Do nothing: a file has the access list of its folder."""


def give(descriptor: int, owner: os.stat_result) -> None:
    """Do nothing, as above."""


def set_modified(descriptor: int, nanoseconds: int) -> None:
    moment = ctypes.c_uint64(nanoseconds // 100 + EPOCH)
    handle = ctypes.c_void_p(msvcrt.get_osfhandle(descriptor))
    if not ctypes.windll.kernel32.SetFileTime(handle, None, None, ctypes.byref(moment)):
        raise ctypes.WinError()


def read_at(file: FileIO, target: memoryview, at: int) -> int:
    return _at(file, at, file.readinto, target)


def write_at(file: FileIO, data: memoryview, at: int) -> int:
    return _at(file, at, file.write, data)


def _at(file: FileIO, at: int, move: Callable[[memoryview], int], data: memoryview) -> int:
    """Read or write at a place, and leave the file's position as it was."""
    position = file.tell()
    file.seek(at)
    count = move(data)
    file.seek(position)
    return count


def sync_folder(folder: Path) -> None:
    """Do nothing: Windows cannot do it; NTFS logs changes of names."""


def bytes_on_disk(found: os.stat_result) -> int:
    return found.st_size  # Windows does not tell how much it takes


def devices_in_memory() -> set[int]:
    return set()


def user() -> int | None:
    return None


def raise_descriptors(wanted: int) -> int:
    return wanted  # connections have no descriptors


def takes_text(stream: FileIO, seconds: float) -> bool:
    return True  # not known: a reader that is stuck stops the writer


def apart() -> dict[str, Any]:
    return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}


def dies_with_us() -> dict[str, Any]:
    return {}


def kill_session(pid: int) -> None:
    """Do nothing: there are no sessions."""


def watch(parent: int) -> Callable[[], bool]:
    """As in `posix`. The number of a parent does not change when it ends, so it is opened.

    In a virtual environment another program stands between it and us.
    """
    try:
        handle = _winapi.OpenProcess(_winapi.SYNCHRONIZE, False, parent)
    except OSError:  # it has ended
        return lambda: False
    return lambda: _winapi.WaitForSingleObject(handle, 0) == _winapi.WAIT_TIMEOUT
