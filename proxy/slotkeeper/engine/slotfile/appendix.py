"""The checkpoints behind the payload of a version 4 file (engine.md 2.2).

"SCKP", u32 1, u32 count, then for each checkpoint i64 tokens, i32 first and i32 last position, and three
times u64 length and that many bytes: the state, the draft model's state, and one that was always empty.
"""

from __future__ import annotations

import struct
from typing import Final

from slotkeeper.engine.slotfile.values import SlotFileRecord
from slotkeeper.engine.slotfile.view import BeyondError, StrangeError, View

MAGIC: Final = b"SCKP"
VERSION: Final = 1
HEAD: Final = struct.Struct("<4sII")
FIELDS: Final = struct.Struct("<qii")
LENGTH: Final = struct.Struct("<Q")
BLOBS: Final = 3
DRAFT: Final = 1  # which of the three is the draft model's
MAX_RECORDS: Final = 4096  # --ctx-checkpoints is 32 unless told otherwise

CHUNK: Final = 4 << 20  # bytes
MAX_HITS: Final = 64  # places that look like the beginning; by chance there is none


def head(count: int) -> bytes:
    return HEAD.pack(MAGIC, VERSION, count)


def begins(view: View, at: int) -> bool:
    """Whether the appendix begins here, or the part of its magic that the file still has."""
    rest = min(len(MAGIC), view.size - at)
    return rest > 0 and view.take(at, rest) == MAGIC[:rest]


def records_at(view: View, at: int, n_tokens: int) -> tuple[SlotFileRecord, ...]:
    """The records of an appendix that begins here and ends with the file.

    Raises StrangeError with what is wrong, BeyondError if the file ends first.
    """
    magic, version, count = view.take(at, 4), view.word(at + 4), view.word(at + 8)
    if magic != MAGIC or version != VERSION:
        raise StrangeError(f"its version is {version}")
    if count > MAX_RECORDS:
        raise StrangeError(f"a count of {count}")
    at += HEAD.size
    records: list[SlotFileRecord] = []
    for _ in range(count):
        record = _record(view, at)
        # The state after n tokens ends at position n - 1. A wrong n aborts the engine later (T2).
        # They need not ascend: a window that was cut back to one makes the next a token before it.
        fits = 0 < record.at <= n_tokens and 0 <= record.pos_min <= record.pos_max == record.at - 1
        if not fits or any(other.at == record.at for other in records):
            raise StrangeError(
                f"a checkpoint at {record.at} with positions {record.pos_min} to {record.pos_max}"
            )
        records.append(record)
        at += record.length
    if at != view.size:
        raise StrangeError(f"{view.size - at} bytes are left")
    return tuple(records)


def find(view: View, start: int, n_tokens: int) -> tuple[int, tuple[SlotFileRecord, ...]]:
    """The first appendix that begins anywhere from `start` on and is whole, else the end of the file."""
    wanted, hits = MAGIC + VERSION.to_bytes(4, "little"), 0
    for chunk in range(start, view.size, CHUNK):
        data = view.take(chunk, min(CHUNK + len(wanted) - 1, view.size - chunk))
        at = data.find(wanted)
        while at >= 0 and hits < MAX_HITS:
            hits += 1
            try:
                return chunk + at, records_at(view, chunk + at, n_tokens)
            except (BeyondError, StrangeError):
                at = data.find(wanted, at + 1)
    return view.size, ()


def _record(view: View, start: int) -> SlotFileRecord:
    tokens, pos_min, pos_max = view.fields(FIELDS, start)
    at, lengths = start + FIELDS.size, list[int]()
    for _ in range(BLOBS):
        (length,) = view.fields(LENGTH, at)
        at += LENGTH.size
        view.need(at, length)
        lengths.append(length)
        at += length
    return SlotFileRecord(
        at=tokens,
        pos_min=pos_min,
        pos_max=pos_max,
        offset=start,
        length=at - start,
        draft=lengths[DRAFT] > 0,
    )
