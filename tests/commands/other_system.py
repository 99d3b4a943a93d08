"""Run as on another system: `python other_system.py win32|darwin imports`, or a command of slotkeeper.

Modules and functions that the other system lacks are gone here too, and so is /proc. What Windows has instead
is imitated with what this system has. Third-party packages are loaded before: they are not what is tested.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import importlib
import os
import pkgutil
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NoReturn

import slotkeeper

POSIX_MODULES: Final = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty", "uvloop"}
LACKS: Final[dict[str, dict[Any, tuple[str, ...]]]] = {
    "darwin": {
        os: ("sched_getaffinity", "posix_fadvise", "posix_fallocate", "pidfd_open"),
        errno: ("EUCLEAN",),
    },
    "win32": {
        os: (
            "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "chown", "fchmod", "fchown", "fork",
            "getegid", "geteuid", "getgid", "getpgid", "getuid", "killpg", "makedev", "pread", "preadv",
            "pwrite",
            "sched_getaffinity", "setsid", "statvfs",
        ),
        errno: ("EUCLEAN",),
        select: ("PIPE_BUF", "poll"),
        signal: ("SIGHUP", "SIGKILL", "SIGUSR2"),
    },
}  # fmt: skip
MODULES: Final = {"darwin": set[str](), "win32": POSIX_MODULES}


class Missing:
    """Finds no module that the system lacks."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: object) -> None:
        if name in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def no_proc(event: str, words: tuple[Any, ...]) -> None:
    """An audit hook: files in /proc do not exist."""
    path = words[0] if event in {"open", "os.listdir", "os.scandir"} and words else ""
    if isinstance(path, str | os.PathLike) and os.fspath(path).startswith("/proc"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))


def ours() -> Iterator[str]:
    """Yield the names of our modules."""
    for found in pkgutil.walk_packages(slotkeeper.__path__, "slotkeeper."):
        if found.name not in {"slotkeeper.__main__", "slotkeeper.system.posix", "slotkeeper.system.windows"}:
            yield found.name


def imitate_windows(put: Callable[[Any, str, Any], None] = setattr) -> dict[str, ModuleType]:
    """Return modules that only Windows has, and `put` in place what it has elsewhere.

    A handle is a descriptor here.
    """
    dispositions = {1: os.O_CREAT | os.O_EXCL, 3: 0, 4: os.O_CREAT}
    access = {1: os.O_RDONLY, 2: os.O_WRONLY, 3: os.O_RDWR}
    flock, exclusive, utime, append = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB, os.utime, os.O_APPEND

    def create_file(path: str, wanted: int, share: int, _: int, made: int, *__: int) -> int:
        assert share == 7, "a file that we have open could not be renamed"
        flags = access.get(wanted & 3) or os.O_WRONLY | append
        return os.open(path, flags | dispositions[made], 0o600)

    def locking(descriptor: int, mode: int, count: int) -> None:
        assert (mode, count) == (2, 1)
        flock(descriptor, exclusive)

    def set_file_time(handle: Any, _: None, __: None, moment: Any) -> bool:
        nanoseconds = (moment._obj.value - 116_444_736_000_000_000) * 100
        utime(handle.value, ns=(nanoseconds, nanoseconds))
        return True

    def ended(*_: object) -> NoReturn:
        raise NotImplementedError

    modules: dict[str, dict[str, Any]] = {
        "_winapi": {
            "GENERIC_READ": 1, "GENERIC_WRITE": 2, "SYNCHRONIZE": 4, "WAIT_TIMEOUT": 258,
            "CreateFile": create_file, "OpenProcess": ended, "WaitForSingleObject": ended,
        },
        "msvcrt": {
            "LK_NBLCK": 2, "locking": locking, "get_osfhandle": int,
            "open_osfhandle": lambda handle, _: handle,
        },
    }  # fmt: skip
    put(ctypes, "windll", SimpleNamespace(kernel32=SimpleNamespace(SetFileTime=set_file_time)))
    put(signal, "SIGBREAK", signal.SIGUSR1)
    put(signal, "CTRL_BREAK_EVENT", signal.SIGINT)
    put(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200)
    for name in ("add_signal_handler", "remove_signal_handler"):  # as in Windows's loop
        put(asyncio.SelectorEventLoop, name, ended)
    statvfs, usage = os.statvfs, type(shutil.disk_usage("."))

    def disk_usage(path: Path) -> Any:
        found = statvfs(path)
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return usage(total, total - free, free)

    put(shutil, "disk_usage", disk_usage)
    return {name: _module(name, content) for name, content in modules.items()}


def _module(name: str, content: dict[str, Any]) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    return made


def become(system: str) -> None:
    """Make this process as one of the other system."""
    for name in ours():  # loads what they need of other packages
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "slotkeeper"]:
        del sys.modules[name]
    if system == "win32":
        sys.modules.update(imitate_windows())
    for name in MODULES[system]:
        sys.modules.pop(name, None)
    for module, names in LACKS[system].items():
        for name in names:
            with suppress(AttributeError):
                delattr(module, name)
    sys.meta_path.insert(0, Missing(MODULES[system]))
    sys.addaudithook(no_proc)
    sys.platform = system


def main() -> int:
    become(sys.argv[1])
    if sys.argv[2:] == ["imports"]:
        sys.stdout.writelines(f"{importlib.import_module(name).__name__}\n" for name in ours())
        return 0
    sys.argv = ["slotkeeper", *sys.argv[2:]]
    return int(importlib.import_module("slotkeeper.cli.main").main())


if __name__ == "__main__":
    sys.exit(main())
