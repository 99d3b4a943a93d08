"""Linux, macOS and other POSIX systems."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Final

assert sys.platform != "win32"  # noqa: S101 - for the type checker

import fcntl  # noqa: E402
import resource  # noqa: E402

INTERRUPT: Final[int] = signal.SIGINT
KILL: Final[int] = signal.SIGKILL
ENDS: Final = (signal.SIGTERM, signal.SIGINT)
PIPE_BYTES: Final = select.PIPE_BUF
BLOCK_BYTES: Final = 512  # the unit of st_blocks
PR_SET_PDEATHSIG: Final = 1
MOUNTS: Final = Path("/proc/self/mountinfo")
OF_MEMORY: Final = frozenset({"tmpfs", "ramfs"})

# -- files -----------------------------------------------------------------------------------------------


def open_plain(path: Path, flags: int) -> int:
    """Open a file that is no symbolic link; if it is made, for its owner only. Returns the descriptor.

    `flags` as in `os.open`. Other programs that we start do not inherit it, and a FIFO does not make us wait.
    The file can be renamed and removed meanwhile. Raises OSError: ELOOP for a link.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)


def open_log(path: Path) -> int:
    """Open a file, for its owner only, to which another program appends. Returns the descriptor.

    If the file is cut meanwhile, the program's next write goes to its new end.
    """
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def lock(descriptor: int) -> None:
    """Lock a file without waiting. Raises BlockingIOError if another process has locked it.

    The lock ends with the descriptor, and with this process, however it ends. Some network file systems have
    no locks: there it does nothing.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            raise BlockingIOError(error.errno, error.strerror) from error


def make_private(descriptor: int) -> None:
    """Let only the owner of a file read and write it."""
    os.fchmod(descriptor, 0o600)


def give(descriptor: int, owner: os.stat_result) -> None:
    """Give a file to the user and the group to whom something else belongs."""
    ours = os.fstat(descriptor)
    if (owner.st_uid, owner.st_gid) != (ours.st_uid, ours.st_gid):
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def set_modified(descriptor: int, nanoseconds: int) -> None:
    """Set the time at which an open file was modified, in ns since 1970. Raises OSError."""
    os.utime(descriptor, ns=(nanoseconds, nanoseconds))


def read_at(file: FileIO, target: memoryview, at: int) -> int:
    """Read from an offset on, and leave the file's position as it is. Returns the count of bytes."""
    return os.preadv(file.fileno(), [target], at)


def write_at(file: FileIO, data: memoryview, at: int) -> int:
    """Write from an offset on, and leave the file's position as it is. Returns the count of bytes."""
    return os.pwrite(file.fileno(), data, at)


def sync_folder(folder: Path) -> None:
    """Write the folder's names to the disk. Some network file systems refuse: they write at each rename."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def bytes_on_disk(found: os.stat_result) -> int:
    """Return the bytes that a file takes."""
    return found.st_blocks * BLOCK_BYTES


def devices_in_memory() -> set[int]:
    """Return the device numbers of file systems in memory; none where the system does not tell."""
    devices = set()
    with suppress(OSError, ValueError):
        for line in MOUNTS.read_text("utf-8", "replace").splitlines():
            before, _, after = line.partition(" - ")  # optional fields end with a dash
            if after.split(" ", 1)[0] in OF_MEMORY:
                major, minor = map(int, before.split()[2].split(":"))
                devices.add(os.makedev(major, minor))
    return devices


def user() -> int | None:
    """Return the number of the user that this process runs as; None if users have none."""
    return os.geteuid()


# -- limits and streams ----------------------------------------------------------------------------------


def raise_descriptors(wanted: int) -> int:
    """Raise this process's limit of descriptors, to `wanted` if allowed. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return wanted if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # some systems allow less than they report
        return soft
    return most


def takes_text(stream: FileIO, seconds: float) -> bool:
    """Whether a stream takes PIPE_BYTES without a wait for its reader, now or within some seconds."""
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


# -- processes -------------------------------------------------------------------------------------------


def apart() -> dict[str, Any]:
    """Return the arguments of `subprocess.Popen` for a program that a terminal's Ctrl-C does not reach."""
    return {"start_new_session": True}


def dies_with_us() -> dict[str, Any]:
    """Return the arguments of `subprocess.Popen` for a program that Linux kills when we die, in any way.

    The kernel acts on the death of the thread that forked, so only the main thread may start such programs.
    On other systems it can survive us.
    """
    if sys.platform != "linux":
        return {}
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    parent = os.getpid()

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # we died between fork and prctl
            os._exit(1)

    return {"preexec_fn": before_exec}  # one prctl; no lock is taken between fork and exec


def kill_session(pid: int) -> None:
    """Kill all processes in the session of a program that was started `apart`. Raises OSError."""
    os.killpg(pid, signal.SIGKILL)  # the group has the program's number


def watch(parent: int) -> Callable[[], bool]:
    """Return a function that tells whether our parent lives. `parent`: its number, as it told us."""
    return lambda: os.getppid() == parent
