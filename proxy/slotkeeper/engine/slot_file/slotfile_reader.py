"""Reads a slot file: header, ids, the payload's structure, and the checkpoints after it.

The payload is little endian, one memory after the other (engine.md 2.2):

    attention   u32 streams; for each stream u32 cells and, if there are any:
                the cell table, per cell {i32 pos, u32 1, [i32 x, y, [i32 token]], i32 slot}
                u32 transposed, u32 layers, [version 4: u32 x 2, the rotations of keys and values]
                per layer {i32 type, u64 row, cells x row bytes} for the keys, the same for the values
                transposed values: {i32 type, u32 element, u32 width, cells x element x width bytes}
    recurrent   u32 cells, per cell {i32 pos, u32 0}, u32 0, u32 layers of the model
                per recurrent layer {i32 type, u64 row, cells x row bytes}, first all r, then all s

A dense model has one attention memory, a sliding-window model two (all tokens, then the window), a hybrid one
attention and one recurrent memory. x and y exist for M-RoPE only, the token from version 3 on. No field says
which memory follows, so the reader tries each; a wrong guess fails after a few fields.

The appendix of a version 4 file: "SCKP", u32 1, u32 count, then for each checkpoint i64 tokens, i32 first
and i32 last position, and three times u64 length and that many bytes: the state, the draft model's state,
and a third part that was empty in all files seen.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO, Final

from slotkeeper.engine.slot_file.slotfile import (
    APPENDIX_HEAD,
    APPENDIX_MAGIC,
    APPENDIX_VERSION,
    BEFORE_IDS,
    HEADER,
    BeyondError,
    Cache,
    Damage,
    FileImage,
    HeldTokens,
    Rows,
    SlotFile,
    SlotFileRecord,
    StrangeError,
    Verdict,
    View,
    ids_match,
    images_at,
)
from slotkeeper.scheduler.prompts.tokens import WIDTH, Tokens

MAX_CACHES: Final = 4  # a hybrid over a sliding window has three
MAX_STREAMS: Final = 256  # llama.cpp's LLAMA_MAX_SEQ
MAX_LAYERS: Final = 4096
MAX_TYPES: Final = 64  # ggml has about 40
MAX_WIDTH: Final = 1 << 20  # elements of one token in one layer
STRIDES: Final = (12, 20, 24)  # bytes of a cell: plain, M-RoPE, M-RoPE with its token
WITH_ROTATIONS: Final = 4  # the first version that has these fields
ROW: Final = struct.Struct("<iQ")
COLUMNS: Final = struct.Struct("<iII")
CELL: Final = struct.Struct("<iI")

Layers = list[tuple[int, ...]]  # type and row size of each layer


def walk(view: View, at: int, version: int) -> tuple[Cache, ...] | None:
    """Return the memories from `at` to the end of the file or to its appendix; None if none was understood.

    Raises BeyondError if memories were understood, but they do not end exactly there.
    """
    walker = _Walker(view, version)
    for caches in walker.ways(at, ()):
        return caches
    if walker.understood:
        raise BeyondError
    return None


def layout_of(caches: tuple[Cache, ...]) -> str:
    if not any(cache.cells for cache in caches):
        return ""
    shapes = "\n".join(cache.shape for cache in caches)
    return hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()


class _Walker:
    """Tries every kind of memory at each offset where one could begin."""

    def __init__(self, view: View, version: int) -> None:
        self._view = view
        self._version = version
        self.understood = False  # whether a memory fitted, apart from the end of the file

    def ways(self, at: int, caches: tuple[Cache, ...]) -> Iterator[tuple[Cache, ...]]:
        if caches and self._ended(at):
            yield caches
        elif len(caches) < MAX_CACHES:
            for cache in self._tries(at):
                yield from self.ways(cache.end, (*caches, cache))

    def _tries(self, at: int) -> Iterator[Cache]:
        for stride in STRIDES:
            for valued in (True, False):  # models with latent attention (MLA) keep no values
                if cache := self._fits(at, stride, valued):
                    yield cache
        if cache := self._fits(at):
            yield cache

    def _fits(self, at: int, stride: int = 0, valued: bool = True) -> Cache | None:
        try:
            cache = self._attention(at, stride, valued) if stride else self._recurrent(at)
        except StrangeError:
            return None
        except BeyondError:
            self.understood = True
            return None
        self.understood = True
        return cache

    def _attention(self, at: int, stride: int, valued: bool) -> Cache:
        streams, at = self._view.word(at), at + 4
        if not 1 <= streams <= MAX_STREAMS:
            raise StrangeError
        table, held, shape, rows = at, 0, "", list[Rows]()
        for _ in range(streams):
            cells, at = self._view.word(at), at + 4
            if cells and held:  # a file holds one sequence, and a sequence is in only one stream
                raise StrangeError
            if cells:
                table, held = at, cells
                self._table(table, cells, stride)
                at, shape, rows = self._layers(table + cells * stride, cells, valued)
        return Cache(
            recurrent=False,
            table=table,
            cells=held,
            stride=stride,
            end=at,
            shape=f"attention {streams} {stride} {shape}",
            rows=tuple(rows),
        )

    def _table(self, table: int, cells: int, stride: int) -> None:
        """Check the first and the last cell, which reveal a wrong stride, and that the table is complete."""
        self._view.need(table, stride)
        last = table + (cells - 1) * stride
        for cell in (table, last):
            _, sequences = self._view.fields(CELL, cell)
            if sequences != 1:
                raise StrangeError
        self._view.need(last, stride)

    def _layers(self, at: int, cells: int, valued: bool) -> tuple[int, str, list[Rows]]:
        """Walk over keys and values; return the offset of their end, their shape, and their rows."""
        transposed, layers, at = self._view.word(at), self._view.word(at + 4), at + 8
        if transposed > 1 or layers > MAX_LAYERS:
            raise StrangeError
        rotations: tuple[int, int] | None = None
        if self._version >= WITH_ROTATIONS:
            rotations, at = (self._view.word(at), self._view.word(at + 4)), at + 8
            if max(rotations) > MAX_WIDTH:
                raise StrangeError
        keys, values, rows = Layers(), Layers(), list[Rows]()
        for layer in [keys] * layers + [values] * (layers if valued else 0):
            if transposed and layer is values:
                at = self._columns(at, cells, values)
                continue
            start, at = at + ROW.size, self._row(at, cells, layer)
            rows.append(Rows(start, layer[-1][1]))
        return at, f"{transposed} {rotations} {keys} {values}", [] if transposed else rows

    def _row(self, at: int, cells: int, layers: Layers) -> int:
        kind, row = self._view.fields(ROW, at)
        if not 0 <= kind < MAX_TYPES or row > MAX_WIDTH * 8:
            raise StrangeError
        layers.append((kind, row))
        self._view.need(at + ROW.size, cells * row)
        return at + ROW.size + cells * row

    def _columns(self, at: int, cells: int, layers: Layers) -> int:
        kind, element, width = self._view.fields(COLUMNS, at)
        if not 0 <= kind < MAX_TYPES or element > 8 or width > MAX_WIDTH:
            raise StrangeError
        layers.append((kind, element, width))
        self._view.need(at + COLUMNS.size, cells * element * width)
        return at + COLUMNS.size + cells * element * width

    def _recurrent(self, at: int) -> Cache:
        table = at + 4
        cells = self._view.word(at)
        if cells:
            _, sequences = self._view.fields(CELL, table)
            if sequences:
                raise StrangeError
        at = table + cells * CELL.size
        transposed, layers, at = self._view.word(at), self._view.word(at + 4), at + 8
        if transposed or not 1 <= layers <= MAX_LAYERS:
            raise StrangeError
        rows = Layers()
        at = self._row(at, cells, rows)
        with suppress(StrangeError):  # bytes that are no row belong to the next part
            while len(rows) < 2 * layers and not self._ended(at):
                at = self._row(at, cells, rows)
        # Every recurrent layer has the same shape, and its r and s differ in size. So a file that was cut
        # between two layers is not taken for a file of a smaller model.
        half = len(rows) // 2
        if rows[0] == rows[-1] or rows != rows[:1] * half + rows[-1:] * half:
            raise BeyondError
        shape = f"recurrent {layers} {rows}"
        return Cache(recurrent=True, table=table, cells=cells, stride=CELL.size, end=at, shape=shape)

    def _ended(self, at: int) -> bool:
        return at == self._view.size or (self._version >= WITH_ROTATIONS and begins(self._view, at))


# -- the appendix: checkpoints ---------------------------------------------------------------------------

FIELDS: Final = struct.Struct("<qii")
LENGTH: Final = struct.Struct("<Q")
BLOBS: Final = 3
DRAFT: Final = 1  # index of the draft model's state among the three
MAX_RECORDS: Final = 4096  # --ctx-checkpoints is 32 by default

CHUNK: Final = 4 << 20  # bytes
MAX_HITS: Final = 64  # places that look like the start of an appendix; chance alone makes none


def begins(view: View, at: int) -> bool:
    """Whether the appendix begins at this offset; if the file ends within its magic, the part counts."""
    rest = min(len(APPENDIX_MAGIC), view.size - at)
    return rest > 0 and view.take(at, rest) == APPENDIX_MAGIC[:rest]


def records_at(view: View, at: int, held: HeldTokens) -> tuple[SlotFileRecord, ...]:
    """Return the records of the appendix that begins at `at` and ends with the file.

    Raises StrangeError, whose text says what is wrong, or BeyondError if the file ends first.
    """
    magic, version, count = view.take(at, 4), view.word(at + 4), view.word(at + 8)
    if magic != APPENDIX_MAGIC or version != APPENDIX_VERSION:
        raise StrangeError(f"its version is {version}")
    if count > MAX_RECORDS:
        raise StrangeError(f"a count of {count}")
    at += APPENDIX_HEAD.size
    records: list[SlotFileRecord] = []
    for _ in range(count):
        record = _record(view, at)
        # The state after n tokens ends at position n - 1, if no image is among them. A wrong n aborts the
        # engine later (T2).
        # The list need not ascend: after a window was cut back to a checkpoint, the next one is made a token
        # before it.
        last = held.position(record.at) - 1 if 0 < record.at <= held.count else -1
        fits = 0 <= record.pos_min <= record.pos_max == last
        if not fits or any(other.at == record.at for other in records):
            raise StrangeError(
                f"a checkpoint at {record.at} with positions {record.pos_min} to {record.pos_max}"
            )
        records.append(record)
        at += record.length
    if at != view.size:
        raise StrangeError(f"{view.size - at} bytes are left")
    return tuple(records)


def find(view: View, start: int, held: HeldTokens) -> tuple[int, tuple[SlotFileRecord, ...]]:
    """Return the first complete appendix at or after `start`: its offset and records.

    Without one, return the file's size and no records.
    """
    wanted, hits = APPENDIX_MAGIC + APPENDIX_VERSION.to_bytes(4, "little"), 0
    for chunk in range(start, view.size, CHUNK):
        data = view.take(chunk, min(CHUNK + len(wanted) - 1, view.size - chunk))
        at = data.find(wanted)
        while at >= 0 and hits < MAX_HITS:
            hits += 1
            try:
                return chunk + at, records_at(view, chunk + at, held)
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


# -- the whole file --------------------------------------------------------------------------------------

MAGIC: Final = 0x67677371
VERSIONS: Final = (2, 3, 4)  # b10434, b10793, b11549; none reads another's (engine.md 2.2)
WITH_APPENDIX: Final = 4
AROUND_IDS: Final = BEFORE_IDS + 1  # words; the last one is the count of media after the ids
MAX_TOKENS: Final = 1 << 24  # the longest contexts have 10 million tokens
HEAD: Final = struct.Struct("<IIIiii")


class _DamagedError(Exception):
    def __init__(self, verdict: Verdict, text: str) -> None:
        super().__init__(text)
        self.damage = Damage(verdict, text)


def read(file: BinaryIO, size: int) -> SlotFile | Damage:
    """Return the file's contents, or why it must not be used; raises only the file's own OSError.

    It makes a few hundred small reads, whatever the size: 7 ms for 39 GB with 200,000 tokens. Only if the
    payload's structure is not understood, it reads the rest to find the appendix, at the disk's speed.
    It blocks, so call it in a thread.
    """
    try:
        there = file.seek(0, os.SEEK_END)
        if there != size:
            return Damage(Verdict.TORN, f"{there} bytes where there should be {size}")
        return _read(View(file, size))
    except _DamagedError as error:
        return error.damage
    except BeyondError:
        return Damage(Verdict.TORN, f"the state does not end where the file does, at {size} bytes")


def _read(view: View) -> SlotFile:
    version, words, tokens, images = _header(view)
    start = HEADER + WIDTH * words
    caches = walk(view, start, version)
    end, records = _end(view, version, start, caches, HeldTokens(len(tokens), images))
    return SlotFile(
        version=version,
        tokens=tokens,
        payload_end=end,
        size=view.size,
        records=records,
        caches=caches or (),
        layout=layout_of(caches or ()),
        images=images,
    )


def _header(view: View) -> tuple[int, int, Tokens, tuple[FileImage, ...]]:
    """Return the file's version, the number of words before the payload, the tokens and the images."""
    magic, version, words, mark, kind, count = view.fields(HEAD, 0) if view.size >= HEAD.size else (0,) * 6
    if magic != MAGIC:
        raise _DamagedError(Verdict.FOREIGN, "it does not begin like a slot file")
    if version not in VERSIONS:
        raise _DamagedError(Verdict.VERSION, f"version {version}")
    if (mark, kind) != (-1, 1) or not 0 <= count <= MAX_TOKENS or words < count + AROUND_IDS:
        raise _DamagedError(Verdict.TOKENS, f"{words} words for {count} tokens")
    at = HEADER + WIDTH * BEFORE_IDS
    tokens = Tokens.of(view.take(at, WIDTH * count))
    try:
        images, end = images_at(view, at + WIDTH * count)
    except StrangeError as error:
        raise _DamagedError(Verdict.TOKENS, f"in its images: {error}") from error
    if end != HEADER + WIDTH * words or not ids_match(tokens, images):
        raise _DamagedError(Verdict.TOKENS, "its tokens are not all text or images")
    return version, words, tokens, images


def _end(
    view: View, version: int, start: int, caches: tuple[Cache, ...] | None, held: HeldTokens
) -> tuple[int, tuple[SlotFileRecord, ...]]:
    """Return the offset at which the payload ends, and the checkpoints that follow."""
    if version < WITH_APPENDIX:
        return view.size, ()
    try:
        if caches is None:
            return find(view, start, held)
        end = caches[-1].end
        return end, records_at(view, end, held) if end < view.size else ()
    except StrangeError as error:
        raise _DamagedError(Verdict.APPENDIX, f"in its checkpoints: {error}") from error
