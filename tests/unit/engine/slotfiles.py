"""Slot files made in memory, as described in engine.md 2.2: a few hundred bytes each."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from io import BytesIO

from slotkeeper.engine.slotfile import Damage, SlotFile
from slotkeeper.engine.slotfile_reader import read

WINDOW = 8  # tokens
IDS = tuple(range(100, 120))
KINDS = ("dense", "transposed", "latent", "swa", "hybrid", "recurrent")


def header(ids: Sequence[int], version: int) -> bytes:
    words = (-1, 1, len(ids), *ids, 0)
    return struct.pack(f"<III{len(words)}i", 0x67677371, version, len(words), *words)


def attention(
    positions: Sequence[int],
    version: int,
    *,
    extra: int = 0,  # words that M-RoPE adds to a cell
    streams: int = 2,
    slot: int = 0,
    transposed: bool = False,
    values: bool = True,
    row: int = 16,
) -> bytes:
    made = bytearray(struct.pack("<I", streams))  # of a long prompt it has megabytes
    for stream in range(streams):
        cells = positions if stream == min(slot, streams - 1) else ()
        made += struct.pack("<I", len(cells))
        if not cells:
            continue
        for position in cells:
            made += struct.pack("<iI", position, 1) + bytes([9] * 4 * extra) + struct.pack("<i", slot)
        made += struct.pack("<II", transposed, 2) + struct.pack("<II", 0, 0) * (version == 4)
        keys = [struct.pack("<iQ", 1, row) + content(len(cells) * row) for _ in range(2)]
        head = struct.pack("<iII", 1, 2, row // 2) if transposed else struct.pack("<iQ", 1, row)
        made += b"".join(keys) + (head + content(len(cells) * row)) * (2 * values)
    return bytes(made)


def recurrent(position: int) -> bytes:
    made = struct.pack("<IiIII", 1, position, 0, 0, 4)
    for row in (24, 24, 24, 40, 40, 40):
        made += struct.pack("<iQ", 0, row) + content(row)
    return made


def content(length: int) -> bytes:
    """Return bytes that cannot be mistaken for other fields."""
    return bytes(itertools.islice(itertools.cycle(b"\xde\xad\xbe\xef"), length))


def payload(kind: str, n: int, version: int, slot: int = 0) -> bytes:
    every = range(n)
    extra = 2 if version == 2 else 3
    return {
        "dense": lambda: attention(every, version, slot=slot),
        "transposed": lambda: attention(every, version, slot=slot, transposed=True),
        "latent": lambda: attention(every, version, slot=slot, values=False),
        "swa": lambda: attention(every, version, slot=slot) + attention(every[-WINDOW:], version, slot=slot),
        "hybrid": lambda: attention(every, version, slot=slot, extra=extra) + recurrent(n - 1),
        "recurrent": lambda: recurrent(n - 1),
    }[kind]()


def record(at: int, *, first: int | None = None, draft: bytes = b"", state: bytes | None = None) -> bytes:
    blobs = (content(at) if state is None else state, draft, b"")
    sized = b"".join(struct.pack("<Q", len(blob)) + blob for blob in blobs)
    return struct.pack("<qii", at, at - 1 if first is None else first, at - 1) + sized


def appendix(records: Iterable[bytes]) -> bytes:
    listed = list(records)
    return struct.pack("<4sII", b"SCKP", 1, len(listed)) + b"".join(listed)


def slot_file(
    kind: str, version: int = 4, ids: Sequence[int] = IDS, *, cuts: Sequence[int] = (), slot: int = 0
) -> bytes:
    made = header(ids, version) + payload(kind, len(ids), version, slot)
    return made + (appendix(record(at, draft=b"draft") for at in cuts) if cuts else b"")


def verdict_on(data: bytes) -> SlotFile | Damage:
    return read(BytesIO(data), len(data))


def whole_file(data: bytes) -> SlotFile:
    found = verdict_on(data)
    assert isinstance(found, SlotFile), found
    return found
