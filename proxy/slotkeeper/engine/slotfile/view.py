"""A file of a stated size that is read by offset, and trusted in nothing.

Files are several GB: what is not needed is never read, only stepped over by a caller's arithmetic.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, Final

READS: Final = 100_000  # a real file needs a few hundred; a made one must not keep us longer


class BeyondError(Exception):
    """These bytes would lie behind the end of the file, or behind more parts than any real file has."""


class StrangeError(Exception):
    """These bytes are not what they were taken for."""


class View:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self.size = size
        self._file = file
        self._left = READS

    def take(self, at: int, length: int) -> bytes:
        """Raises BeyondError, also where the file is shorter than was said."""
        self.need(at, length)
        self._left -= 1
        if self._left < 0:
            raise BeyondError
        self._file.seek(at)
        taken = self._file.read(length)
        if len(taken) != length:
            raise BeyondError
        return taken

    def need(self, at: int, length: int) -> None:
        if at + length > self.size:
            raise BeyondError

    def fields(self, layout: struct.Struct, at: int) -> tuple[int, ...]:
        return layout.unpack(self.take(at, layout.size))

    def word(self, at: int) -> int:
        return int.from_bytes(self.take(at, 4), "little")
