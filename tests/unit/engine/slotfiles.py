"""Slot files made in memory, as described in engine.md 2.2: a few hundred bytes each."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import shake_128
from io import BytesIO

from slotkeeper.engine.slotfile import (
    AS_THEY_ARE,
    Damage,
    Division,
    PartSizes,
    Recipe,
    SlotFile,
    divided,
    read,
)

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
    seed: int = 0,
) -> bytes:
    """`seed`: each row has other bytes, which depend on it, the layer and the position."""
    made = bytearray(struct.pack("<I", streams))  # of a long prompt it has megabytes
    for stream in range(streams):
        cells = positions if stream == min(slot, streams - 1) else ()
        made += struct.pack("<I", len(cells))
        if not cells:
            continue
        for position in cells:
            made += struct.pack("<iI", position, 1) + bytes([9] * 4 * extra) + struct.pack("<i", slot)
        made += struct.pack("<II", transposed, 2) + struct.pack("<II", 0, 0) * (version == 4)
        head = struct.pack("<iII", 1, 2, row // 2) if transposed else struct.pack("<iQ", 1, row)
        for layer, before in enumerate([struct.pack("<iQ", 1, row)] * 2 + [head] * (2 * values)):
            made += before + (rows(cells, row, layer, seed) if seed else content(len(cells) * row))
    return bytes(made)


def rows(cells: Sequence[int], row: int, layer: int, seed: int) -> bytes:
    return b"".join(shake_128(f"{seed} {layer} {position}".encode()).digest(row) for position in cells)


def recurrent(position: int) -> bytes:
    made = struct.pack("<IiIII", 1, position, 0, 0, 4)
    for row in (24, 24, 24, 40, 40, 40):
        made += struct.pack("<iQ", 0, row) + content(row)
    return made


def content(length: int) -> bytes:
    """Return bytes that cannot be mistaken for other fields."""
    return bytes(itertools.islice(itertools.cycle(b"\xde\xad\xbe\xef"), length))


def payload(
    kind: str, n: int, version: int, slot: int = 0, *, seed: int = 0, window: Sequence[int] = ()
) -> bytes:
    every = range(n)
    extra = 2 if version == 2 else 3
    made = partial(attention, version=version, slot=slot, seed=seed)
    return {
        "dense": lambda: made(every),
        "transposed": lambda: made(every, transposed=True),
        "latent": lambda: made(every, values=False),
        "swa": lambda: made(every) + made(window or every[-WINDOW:]),
        "hybrid": lambda: made(every, extra=extra) + recurrent(n - 1),
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
    kind: str,
    version: int = 4,
    ids: Sequence[int] = IDS,
    *,
    cuts: Sequence[int] = (),
    slot: int = 0,
    seed: int = 0,
    window: Sequence[int] = (),
) -> bytes:
    """`window`: the positions of a sliding window's cells, in their order."""
    made = header(ids, version) + payload(kind, len(ids), version, slot, seed=seed, window=window)
    return made + (appendix(record(at, draft=b"draft") for at in cuts) if cuts else b"")


def verdict_on(data: bytes) -> SlotFile | Damage:
    return read(BytesIO(data), len(data))


def whole_file(data: bytes) -> SlotFile:
    found = verdict_on(data)
    assert isinstance(found, SlotFile), found
    return found


def division_of(data: bytes, sizes: PartSizes = AS_THEY_ARE) -> Division:
    found = divided(BytesIO(data), whole_file(data), sizes)
    assert found is not None
    return found


def picked(data: bytes, recipe: Recipe) -> bytes:
    return b"".join(p if isinstance(p, bytes) else data[p.offset : p.offset + p.length] for p in recipe)


def parts_of(data: bytes, sizes: PartSizes = AS_THEY_ARE) -> list[bytes]:
    return [picked(data, recipe) for recipe in division_of(data, sizes).parts()]


def joined(data: bytes, sizes: PartSizes = AS_THEY_ARE) -> bytes:
    """Divide a file, and return what its parts and its frame make together."""
    division, parts = division_of(data, sizes), parts_of(data, sizes)
    frame, made = picked(data, division.frame), bytearray()
    while len(made) < division.size:
        place = division.find(len(made))
        source = frame if place.part is None else parts[place.part]
        made += source[place.at : place.at + place.length]
        assert place.length > 0
    return bytes(made)
