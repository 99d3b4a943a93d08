"""New slot files from old ones, as lists of pieces.

A file of 8 GB is written once: its bytes are copied, changed and hashed in one pass, by any thread
for it. The first file that a recipe names is its source 0; further ones give checkpoints only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final, TypeAlias

from slotkeeper.engine.slotfile import appendix
from slotkeeper.engine.slotfile.values import SlotFile, SlotFileRecord

CHUNK: Final = 4 << 20  # bytes


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """Bytes of a source."""

    source: int
    offset: int
    length: int


Piece: TypeAlias = bytes | ByteSpan
Recipe: TypeAlias = tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Donor:
    """Another file, and those of its checkpoints that are wanted."""

    source: int  # its number among the recipe's sources, from 1 on
    file: SlotFile
    records: tuple[SlotFileRecord, ...]


def whole(file: SlotFile) -> Recipe:
    return (ByteSpan(0, 0, file.size),)


def keep(file: SlotFile, records: Iterable[SlotFileRecord]) -> Recipe:
    """The file with these of its checkpoints only. Raises ValueError for any other."""
    return graft(file, records, ())


def graft(file: SlotFile, records: Iterable[SlotFileRecord], donors: Iterable[Donor]) -> Recipe:
    """The file with these of its checkpoints and some of other files.

    Raises ValueError for a checkpoint of other tokens than the file's own, which aborts the engine or makes
    it answer wrongly (engine.md T2), and for two at one place.
    """
    chosen = [(record.at, _span(0, file, record)) for record in records]
    for donor in donors:
        chosen += [(record.at, _span_of(donor, file, record)) for record in donor.records]
    places = [at for at, _ in chosen]
    if len(set(places)) < len(places):
        raise ValueError(f"two checkpoints at one place: {sorted(places)}")
    if not chosen:
        return (ByteSpan(0, 0, file.payload_end),)
    spans = (span for _, span in sorted(chosen, key=lambda pair: pair[0]))
    return (ByteSpan(0, 0, file.payload_end), appendix.head(len(chosen)), *spans)


def size_of(recipe: Recipe) -> int:
    """Bytes of the file that a recipe makes."""
    return sum(piece.length if isinstance(piece, ByteSpan) else len(piece) for piece in recipe)


def apply(recipe: Recipe, sources: Sequence[BinaryIO], write: Callable[[bytes], object]) -> None:
    """Carry a recipe out, in chunks. Raises EOFError if a source became shorter."""
    for piece in recipe:
        if isinstance(piece, bytes):
            write(piece)
            continue
        source, left = sources[piece.source], piece.length
        source.seek(piece.offset)
        while left > 0:
            chunk = source.read(min(left, CHUNK))
            if not chunk:
                raise EOFError(f"source {piece.source} ends {left} bytes early")
            write(chunk)
            left -= len(chunk)


def _span(source: int, file: SlotFile, record: SlotFileRecord) -> ByteSpan:
    if record not in file.records:
        raise ValueError(f"no such checkpoint in the file: {record}")
    return ByteSpan(source, record.offset, record.length)


def _span_of(donor: Donor, file: SlotFile, record: SlotFileRecord) -> ByteSpan:
    other = donor.file
    if donor.source < 1:
        raise ValueError("source 0 is the file itself")
    if (other.version, other.layout) != (file.version, file.layout) or not file.layout:
        raise ValueError("the files are not of the same engine")
    if record.at > file.tokens.lcp(other.tokens):
        raise ValueError(f"the files do not share their first {record.at} tokens")
    return _span(donor.source, other, record)
