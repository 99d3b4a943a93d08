"""Lines in the files of a folder that keeps to a budget: the oldest files go first.

Blocking, and for one thread. The files are of mode 0600, their names sort by time, and a file is never
written to by two processes: what a crash tore is the last line of its file.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

PARTS: Final = 16  # files that a budget is for: so much of a recording goes at once
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class RotatingFiles:
    """`PREFIX-TIME.jsonl` in one folder, which is made, of mode 0700, if it is not there."""

    def __init__(self, folder: Path, prefix: str, budget_bytes: int) -> None:
        self._folder = folder
        self._prefix = prefix
        self._budget = budget_bytes
        self._part = budget_bytes // PARTS
        self._file: int | None = None
        self._size = 0  # of that file

    def __repr__(self) -> str:
        return f"<RotatingFiles {self._folder}/{self._prefix}-*, {self._budget} bytes>"

    def append(self, line: bytes) -> None:
        """Write a line, whole or not at all. Raises OSError: EFBIG for one above the budget."""
        if len(line) > self._budget:
            raise OSError(errno.EFBIG, f"{len(line)} bytes are more than the budget of {self._budget}")
        file = self._file
        if file is None or self._size + len(line) > self._part or not os.fstat(file).st_nlink:
            file = self._begin(len(line))
        try:
            written = os.write(file, line)
        except OSError:
            os.ftruncate(file, self._size)
            raise
        if written < len(line):  # a disk that has just become full takes a part
            os.ftruncate(file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self, size: int) -> int:
        """A new file, for which there is room: as much as a file may have, or `size` if that is more."""
        self.close()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room(max(size, self._part))
        self._file = os.open(self._folder / f"{self._prefix}-{moment(time.time_ns())}.jsonl", _CREATE, 0o600)
        self._size = 0
        return self._file

    def _make_room(self, size: int) -> None:
        there = dict(self._sizes())
        total = sum(there.values())
        for path in sorted(there):
            if total + size <= self._budget:
                return
            path.unlink(missing_ok=True)
            total -= there[path]

    def _sizes(self) -> Iterator[tuple[Path, int]]:
        for path in self._folder.glob(f"{self._prefix}-*.jsonl"):
            with suppress(FileNotFoundError):
                yield path, path.lstat().st_size


def moment(nanoseconds: int) -> str:
    """A time since the epoch as a part of a name that sorts: 20261121T084035-123456789."""
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(seconds))}-{rest:09}"
