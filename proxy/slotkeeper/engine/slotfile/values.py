"""What a slot file says, as values, and a file that is read by offset and trusted in nothing.

Files are several GB: what is not needed is never read, only stepped over by a caller's arithmetic.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO, Final

from slotkeeper.scheduler.types import WIDTH, Tokens

HEADER: Final = 12  # bytes: magic, version, count of the words that follow
BEFORE_IDS: Final = 3  # words: -1, 1, the number of tokens


class Verdict(StrEnum):
    """Why a file must not be given to an engine."""

    FOREIGN = "foreign"  # not a slot file at all
    VERSION = "version"  # a slot file of a version that we do not know
    TOKENS = "tokens"  # its list of tokens contradicts itself, or holds more than text
    TORN = "torn"  # its state does not end where the file ends (engine.md T2)
    APPENDIX = "appendix"  # its checkpoints contradict themselves; a wrong one aborts the engine (T2)


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong, in one line."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One of the engine's memories as it lies in the payload; lengths and offsets in bytes."""

    recurrent: bool  # a recurrent state, else keys and values
    table: int  # where its cell table begins
    cells: int
    stride: int  # of a cell in the table
    end: int
    shape: str  # types, row sizes and flags, but no counts of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFileRecord:
    """One checkpoint in the appendix: the state after the first `at` tokens."""

    at: int
    pos_min: int
    pos_max: int
    offset: int
    length: int  # bytes with its 40 bytes of fields
    draft: bool  # it carries the draft model's state too


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFile:
    """A slot file that was walked to its end.

    `layout` is a digest of everything but the tokens: two files of one engine have the same one, and a
    file of an engine with other flags or another architecture has another. It is empty where the payload's
    structure was not understood, or where it has no tokens. Compare it: a file that was cut exactly
    between two memories is whole in itself, and only its layout tells.
    """

    version: int
    tokens: Tokens
    payload_end: int  # offset of the appendix, or the end of the file
    size: int
    records: tuple[SlotFileRecord, ...]  # in the file's order, which is the engine's own
    caches: tuple[Cache, ...]  # in the file's order; none where the structure was not understood
    layout: str

    def __repr__(self) -> str:
        cuts = f" checkpoints {[record.at for record in self.records]}" if self.records else ""
        return f"<SlotFile v{self.version} {len(self.tokens)} tokens {self.size} bytes{cuts}>"

    @property
    def ids_at(self) -> int:
        """Offset of the first token's id."""
        return HEADER + WIDTH * BEFORE_IDS


# -- a file read by offset, trusted in nothing -----------------------------------------------------------

READS: Final = 100_000  # a real file needs a few hundred; a made one must not keep us longer


class BeyondError(Exception):
    """These bytes would lie behind the end of the file, or behind more parts than any real file has."""


class StrangeError(Exception):
    """These bytes are not what they were taken for."""


class View:
    """A file of a stated size: read by offset, trusted in nothing."""

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
