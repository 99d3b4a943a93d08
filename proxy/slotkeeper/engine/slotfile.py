"""Slot files: what one says, as values, and edits of one without reading its payload.

`slotfile_reader.read` never raises for any bytes: a file is a SlotFile, or Damage with a verdict.
Edits are recipes, lists of pieces and patches of four bytes. A file of 8 GB is written once: its bytes are
copied, changed and hashed in one pass, by any thread. What is not needed is never read, only stepped over.
Nothing here knows about events, logs or folders: a caller gives an open file, and may do so in a thread.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO, Final, TypeAlias

from slotkeeper.scheduler.types import WIDTH, Tokens

HEADER: Final = 12  # bytes: magic, version, count of the words that follow
BEFORE_IDS: Final = 3  # words: -1, 1, the number of tokens
APPENDIX_MAGIC: Final = b"SCKP"
APPENDIX_VERSION: Final = 1
APPENDIX_HEAD: Final = struct.Struct("<4sII")


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


# -- new slot files from old ones ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """Bytes of the old file."""

    offset: int
    length: int


Piece: TypeAlias = bytes | ByteSpan
Recipe: TypeAlias = tuple[Piece, ...]


def keep(file: SlotFile, records: Iterable[SlotFileRecord]) -> Recipe:
    """The file with these of its checkpoints only, by their places. Raises ValueError for any other."""
    spans = [_span(file, record) for record in sorted(records, key=lambda record: record.at)]
    payload = ByteSpan(0, file.payload_end)
    return (payload, _appendix_head(len(spans)), *spans) if spans else (payload,)


def _appendix_head(count: int) -> bytes:
    return APPENDIX_HEAD.pack(APPENDIX_MAGIC, APPENDIX_VERSION, count)


def size_of(recipe: Recipe) -> int:
    """Bytes of the file that a recipe makes."""
    return sum(piece.length if isinstance(piece, ByteSpan) else len(piece) for piece in recipe)


def _span(file: SlotFile, record: SlotFileRecord) -> ByteSpan:
    if record not in file.records:
        raise ValueError(f"no such checkpoint in the file: {record}")
    return ByteSpan(record.offset, record.length)


# -- a change of four bytes: a restored sliding window that can be extended ------------------------------

PLAIN_CELL: Final = 12  # bytes: i32 position, u32 1, i32 slot
WORDS: Final = PLAIN_CELL // 4
WINDOWED: Final = 2  # attention memories of a sliding-window model: the whole, then the window


@dataclass(frozen=True, slots=True)
class Patch:
    """Other bytes at an offset of the old file."""

    offset: int
    data: bytes


def patched(recipe: Recipe, *patches: Patch) -> Recipe:
    """The recipe with other bytes where they come from the old file.

    Raises ValueError where a patch does not lie within one span of it.
    """
    pieces = list(recipe)
    for patch in patches:
        index, span = _place(pieces, patch)
        end = patch.offset + len(patch.data)
        before = ByteSpan(span.offset, patch.offset - span.offset)
        behind = ByteSpan(end, span.offset + span.length - end)
        pieces[index : index + 1] = [part for part in (before, patch.data, behind) if size_of((part,))]
    return tuple(pieces)


def repair_window(opened: BinaryIO, file: SlotFile, n_swa: int) -> Patch | None:
    """What makes a restored sliding window extendable (engine.md T4); None where it cannot or need not be.

    The file holds the window's positions N - n_swa to N - 1, and the engine wants one more. The cell of the
    first one is outside the window of every later query, so its position may as well be one less: then an
    exact extension reuses all N tokens, and anything else is computed again as before.
    Only a table that is in every cell what it should be is touched. Only for engines without --swa-full:
    under it the patched file would be cut inside the window, see T9. OSError may pass.
    """
    n_tokens = len(file.tokens)
    window = _window(file)
    if window is None or not 0 < window.cells == n_swa < n_tokens:
        return None
    opened.seek(window.table)
    table = opened.read(window.cells * PLAIN_CELL)
    if len(table) != window.cells * PLAIN_CELL:
        return None
    words = array("i", table)
    positions, sequences, slots = words[0::WORDS], words[1::WORDS], words[2::WORDS]
    first = n_tokens - n_swa
    if set(sequences) != {1} or len(set(slots)) != 1 or sorted(positions) != list(range(first, n_tokens)):
        return None
    cell = window.table + PLAIN_CELL * positions.index(first)
    return Patch(cell, (first - 1).to_bytes(4, "little"))


def _window(file: SlotFile) -> Cache | None:
    """The window's memory, if the file has the memories of a sliding-window model and no others."""
    if len(file.caches) != WINDOWED or any(cache.recurrent for cache in file.caches):
        return None
    full, window = file.caches
    return window if full.cells == len(file.tokens) and window.stride == PLAIN_CELL else None


def _place(pieces: list[Piece], patch: Patch) -> tuple[int, ByteSpan]:
    """The span that the patch lies in, and its index."""
    for index, piece in enumerate(pieces):
        if isinstance(piece, ByteSpan):
            behind = piece.offset + piece.length - patch.offset - len(patch.data)
            if patch.offset >= piece.offset and behind >= 0:
                return index, piece
    raise ValueError(f"the recipe does not copy the {len(patch.data)} bytes at {patch.offset}")


# -- which checkpoints are worth their bytes -------------------------------------------------------------

LARGE: Final = 64 << 20  # bytes of checkpoints, from which on they are chosen
NEWEST: Final = 2  # checkpoints: where the next turn begins, and the last prompt's end
NEAR: Final = 16  # tokens: so close to another, a checkpoint does the same


def current(records: Sequence[SlotFileRecord]) -> list[SlotFileRecord]:
    """Those that the engine would take: it looks from the end of its list. Their places ascend.

    After a cut a later one may stand before another that has outlived it (T11).
    """
    found: list[SlotFileRecord] = []
    for record in reversed(records):
        if not found or record.at < found[-1].at:
            found.append(record)
    return found[::-1]


def worth_keeping(
    file: SlotFile, places: Collection[int], stale: Collection[int] = ()
) -> list[SlotFileRecord]:
    """All current ones, where they are small; else the first, the newest, and those where prompts part."""
    records = [record for record in current(file.records) if record.at not in stale]
    if sum(record.length for record in records) < LARGE:
        return records
    wanted = {*_nearest(records, places).values(), *_newest(records), *records[:1]}
    return [record for record in records if record in wanted]


def _nearest(records: Sequence[SlotFileRecord], places: Collection[int]) -> dict[int, SlotFileRecord]:
    """The last checkpoint before each place, for those that have one close to it."""
    ordered = sorted(records, key=lambda record: record.at)
    found = {}
    for place in places:
        index = bisect_right(ordered, place, key=lambda record: record.at)
        if index and place - ordered[index - 1].at <= NEAR:
            found[place] = ordered[index - 1]
    return found


def _newest(records: Sequence[SlotFileRecord]) -> list[SlotFileRecord]:
    """The last ones, but of several that are close together only one."""
    found: list[SlotFileRecord] = []
    for record in reversed(records):
        if len(found) < NEWEST and all(abs(record.at - other.at) > NEAR for other in found):
            found.append(record)
    return found
