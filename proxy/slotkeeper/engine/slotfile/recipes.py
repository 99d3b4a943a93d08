"""New slot files from old ones, as lists of pieces and patches of four bytes.

A file of 8 GB is written once: its bytes are copied, changed and hashed in one pass, by any thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO, Final, TypeAlias

from slotkeeper.engine.slotfile import reading
from slotkeeper.engine.slotfile.values import Cache, SlotFile, SlotFileRecord


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
    return (payload, reading.head(len(spans)), *spans) if spans else (payload,)


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
