"""Slot files: read, as values, edited without reading the payload, and divided into parts.

`read` never raises for any bytes: it returns a SlotFile, or Damage with a verdict.
An edit is a recipe: a list of pieces of the old file and of new bytes. One pass, in any thread, carries it
out in place, or copies, and hashes the bytes. Bytes that are not needed are skipped, never read.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, groupby
from typing import BinaryIO, Final, TypeAlias

from slotkeeper.scheduler.prompts.tokens import EMPTY, WIDTH, Chunk, Tokens

HEADER: Final = 12  # bytes: magic, version, count of the words that follow
BEFORE_IDS: Final = 3  # words: -1, 1, the number of tokens
FNV_DIGITS: Final = 20  # of a hash of 64 bits, by which older builds name images
APPENDIX_MAGIC: Final = b"SCKP"
APPENDIX_VERSION: Final = 1
APPENDIX_HEAD: Final = struct.Struct("<4sII")


class Verdict(StrEnum):
    """Why a file must not be given to an engine."""

    FOREIGN = "foreign"  # not a slot file
    VERSION = "version"  # a slot file of an unknown version
    TOKENS = "tokens"  # the list of tokens is inconsistent, or holds media that we do not know
    TORN = "torn"  # the state does not end where the file ends (engine.md T2)
    APPENDIX = "appendix"  # the checkpoints are inconsistent; a wrong one aborts the engine (T2)


@dataclass(frozen=True, slots=True)
class Damage:
    """Why a file cannot be used: a verdict, and one line of text."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a layer's keys or values are: `width` bytes for each cell, one after the other."""

    offset: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The place of one of the engine's memories in the payload; lengths and offsets in bytes."""

    recurrent: bool  # a recurrent state, else keys and values
    table: int  # offset of its cell table
    cells: int
    stride: int  # length of one cell in the table
    end: int
    shape: str  # types, row sizes and flags, but no counts of tokens
    rows: tuple[Rows, ...] = ()  # of attention; empty if values are transposed


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFileRecord:
    """One checkpoint in the appendix: the state after the first `at` tokens."""

    at: int
    pos_min: int
    pos_max: int
    offset: int
    length: int  # bytes, including 40 bytes of fields
    draft: bool  # whether it holds the draft model's state too


@dataclass(frozen=True, slots=True, kw_only=True)
class FileImage:
    """One image in a slot file. The file has neither its pixels nor what was made of them."""

    start: int  # tokens before it
    length: int  # tokens, without the text that the engine puts around it
    positions: int  # the number of positions that it takes: with M-RoPE fewer than tokens
    name: str  # the engine's name for it: a hash of the image's bytes

    def within(self, chunk: Chunk) -> bool:
        return chunk.start <= self.start and self.start + self.length <= chunk.end

    def may_be(self, digest: bytes) -> bool:
        """Whether the engine gave this name to the image with this SHA-256; older builds hash otherwise."""
        return self.name == digest.hex() or (self.name.isdecimal() and len(self.name) <= FNV_DIGITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFile:
    """A slot file that was read to its end.

    `layout` is a digest of the payload's structure without its counts of tokens. All files of one engine have
    the same layout; other flags or another architecture give another. It is empty if the structure was not
    understood, or if the file has no tokens. Compare it: a file that was cut exactly between two memories is
    consistent, and only its layout shows the damage.
    """

    version: int
    tokens: Tokens
    payload_end: int  # offset of the appendix, or the end of the file
    size: int
    records: tuple[SlotFileRecord, ...]  # in the file's order, which is the order of the engine's list
    caches: tuple[Cache, ...]  # in the file's order; empty if the structure was not understood
    layout: str
    images: tuple[FileImage, ...] = ()  # ascending; `tokens` are -1 there

    def __repr__(self) -> str:
        cuts = f" checkpoints {[record.at for record in self.records]}" if self.records else ""
        return f"<SlotFile v{self.version} {len(self.tokens)} tokens {self.size} bytes{cuts}>"


def tokens_with_images(file: SlotFile, chunks: Sequence[Chunk]) -> Tokens | None:
    """Return the file's tokens with these images; None if the file has others, or has them elsewhere.

    A chunk of ours includes the text that the engine puts around an image. In the file these are tokens of
    text beside the image.
    """
    tokens, at, seen = EMPTY, 0, 0
    for chunk in chunks:
        if chunk.start >= len(file.tokens):
            break
        inside = [image for image in file.images if image.within(chunk)]
        if not inside or chunk.end > len(file.tokens) or not all(i.may_be(chunk.digest) for i in inside):
            return None
        tokens += file.tokens.cut(at, chunk.start) + Tokens.image(chunk.digest, chunk.length)
        at, seen = chunk.end, seen + len(inside)
    return tokens + file.tokens.cut(at) if seen == len(file.images) else None


# -- an untrusted file, read by offset -------------------------------------------------------------------

READS: Final = 100_000  # a real file needs a few hundred; a forged one must not keep us longer


class BeyondError(Exception):
    """A read would go past the end of the file, or exceed the number of reads of any real file."""


class StrangeError(Exception):
    """The bytes do not have the structure that was tried."""


class View:
    """Reads an untrusted file of a stated size by offset."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.size = size
        self._file = file
        self._left = READS

    def take(self, at: int, length: int) -> bytes:
        """Return the bytes at an offset. Raises BeyondError, also if the file is shorter than stated."""
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


# -- images: their places among the tokens, and the names that the engine gives them --------------------
# After the ids of the tokens, which are -1 at images, a file has u32 count, then `count` u32 (tokens before
# each image), then for each image u32 length and that many bytes, then zeros up to a whole word. Those bytes
# are u64 version, u32 1, u64 0, u8 1, u32 width and height in tokens, u32 kind of positions, u32 0, u32
# frames in one token (2 with Qwen), u64 length of the name, the name, and sizes in pixels, which take four
# bytes more in version 2. It has no pixels or embeddings.

IMAGE_HEAD: Final = struct.Struct("<QIQBIIIIIQ")
MOST_IMAGES: Final = 4096  # images in one file
LONGEST_ENTRY: Final = 1024  # bytes of one image's entry; 137 were seen
LARGEST_IMAGE: Final = 1 << 16  # tokens of one image
PLAIN_POSITIONS, M_ROPE = 0, 1  # kinds of positions
IMAGE_VERSIONS: Final = (1, 2)  # b10434, b11549


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """The number of tokens in a file, and the images among them."""

    count: int
    images: tuple[FileImage, ...] = ()

    def position(self, at: int) -> int:
        """Return the position of the token at index `at`; -1 inside an image, where no checkpoint can be."""
        saved = 0
        for image in self.images:
            if image.start < at < image.start + image.length:
                return -1
            saved += image.length - image.positions if image.start < at else 0
        return at - saved


def images_at(view: View, at: int) -> tuple[tuple[FileImage, ...], int]:
    """Return the images in the list at this offset, and the offset of its end.

    Raises StrangeError, whose text names the invalid value, or BeyondError if the file ends first.
    """
    count, at = view.word(at), at + WIDTH
    if count > MOST_IMAGES:
        raise StrangeError(f"a count of {count}")
    starts = [view.word(at + WIDTH * number) for number in range(count)]
    at += WIDTH * count
    images = []
    for start in starts:
        length, at = view.word(at), at + WIDTH
        if not IMAGE_HEAD.size < length <= LONGEST_ENTRY:
            raise StrangeError(f"one of {length} bytes")
        images.append(_image(view.take(at, length), start))
        at += length
    return tuple(images), -(-at // WIDTH) * WIDTH


def _image(data: bytes, start: int) -> FileImage:
    version, kind, _, shown, width, height, positions, _, _, size = IMAGE_HEAD.unpack_from(data)
    name = data[IMAGE_HEAD.size : IMAGE_HEAD.size + size]
    known = version in IMAGE_VERSIONS and (kind, shown) == (1, 1) and positions in {PLAIN_POSITIONS, M_ROPE}
    if not known or len(name) != size or not name.isalnum() or not 0 < width * height < LARGEST_IMAGE:
        raise StrangeError(f"one of kind {kind}, version {version}")
    length = width * height
    taken = max(width, height) if positions == M_ROPE else length
    return FileImage(start=start, length=length, positions=taken, name=name.decode("ascii"))


def ids_match(tokens: Tokens, images: Sequence[FileImage]) -> bool:
    """Whether the ids in these images are -1 and all other ids are those of text."""
    at, hidden = 0, Tokens([-1]).packed
    for image in images:
        end = image.start + image.length
        if image.start < at or tokens.cut(image.start, end).packed != hidden * image.length:
            return False
        if min(tokens.cut(at, image.start), default=0) < 0:
            return False
        at = end
    return min(tokens.cut(at), default=0) >= 0


# -- new slot files from old ones ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """A range of bytes of the old file."""

    offset: int
    length: int


Piece: TypeAlias = bytes | ByteSpan
Recipe: TypeAlias = tuple[Piece, ...]


def keep(file: SlotFile, records: Iterable[SlotFileRecord]) -> Recipe:
    """Return the recipe of the file with only these checkpoints, in the order of their tokens.

    Raises ValueError for a checkpoint that is not in the file.
    """
    spans = [_span(file, record) for record in sorted(records, key=lambda record: record.at)]
    payload = ByteSpan(0, file.payload_end)
    head = APPENDIX_HEAD.pack(APPENDIX_MAGIC, APPENDIX_VERSION, len(spans))
    return (payload, head, *spans) if spans else (payload,)


def size_of(recipe: Recipe) -> int:
    """Return the size in bytes of the file that a recipe makes."""
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
    """Replacement bytes for an offset of the old file."""

    offset: int
    data: bytes


def patched(recipe: Recipe, *patches: Patch) -> Recipe:
    """Return the recipe with the patches applied to the spans of the old file.

    Raises ValueError if a patch is not inside one span.
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
    """Return the patch that makes a restored sliding window extendable (engine.md T4); None if none fits.

    The file holds the window's positions N - n_swa to N - 1, and the engine requires one position before
    them. The first cell is outside the window of every later query, so its position may be lowered by one.
    An exact extension then reuses all N tokens; any other prompt is computed again as before.
    Only a table whose every cell is as expected is patched. Only for engines without --swa-full: with it
    the engine would cut the patched file inside the window, see T9. May raise OSError.
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
    """Return the window's memory if the file has exactly the memories of a sliding-window model."""
    if len(file.caches) != WINDOWED or any(cache.recurrent for cache in file.caches):
        return None
    full, window = file.caches
    return window if full.cells == len(file.tokens) and window.stride == PLAIN_CELL else None


def _place(pieces: list[Piece], patch: Patch) -> tuple[int, ByteSpan]:
    """Return the span that contains the patch, and its index in the recipe. Raises ValueError."""
    for index, piece in enumerate(pieces):
        if isinstance(piece, ByteSpan):
            behind = piece.offset + piece.length - patch.offset - len(patch.data)
            if patch.offset >= piece.offset and behind >= 0:
                return index, piece
    raise ValueError(f"the recipe does not copy the {len(patch.data)} bytes at {patch.offset}")


# -- reading --------------------------------------------------------------------------------------------

# Reads a slot file: header, ids, the payload's structure, and the checkpoints after it.
#
# The payload is little endian, one memory after the other (engine.md 2.2):
#
#     attention   u32 streams; for each stream u32 cells and, if there are any:
#                 the cell table, per cell {i32 pos, u32 1, [i32 x, y, [i32 token]], i32 slot}
#                 u32 transposed, u32 layers, [version 4: u32 x 2, the rotations of keys and values]
#                 per layer {i32 type, u64 row, cells x row bytes} for the keys, the same for the values
#                 transposed values: {i32 type, u32 element, u32 width, cells x element x width bytes}
#     recurrent   u32 cells, per cell {i32 pos, u32 0}, u32 0, u32 layers of the model
#                 per recurrent layer {i32 type, u64 row, cells x row bytes}, first all r, then all s
#
# A dense model has one attention memory, a sliding-window model two (all tokens, then the window), a hybrid
# one attention and one recurrent memory. x and y exist for M-RoPE only, the token from version 3 on. No
# field says which memory follows, so the reader tries each; a wrong guess fails after a few fields.
#
# The appendix of a version 4 file: "SCKP", u32 1, u32 count, then for each checkpoint i64 tokens, i32 first
# and i32 last position, and three times u64 length and that many bytes: the state, the draft model's state,
# and a third part that was empty in all files seen.


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


# -- runs: the parts that states have in common ---------------------------------------------------------

# Divides a slot file into parts that stay the same while its state grows.
#
# The keys and values of a token do not change when others follow it. But a file has them layer by layer, so
# the file of a state that grew by one token differs nearly everywhere. A part is a run: the rows that all
# layers of one memory have for up to 128 positions. A run ends where a multiple of 128 begins, so the
# window of a sliding-window model has the same runs as before, less those that it has left. Each recurrent
# state and each checkpoint is a part. What remains is the frame: header, ids, cell tables, the heads of
# layers. It has the slot's number, and some 20 bytes for each token. Where parts should have a least or a
# largest size (`PartSizes`), runs are longer or shorter, large parts are cut, and small remains stay in the
# frame.
#
# Everything here is exact: parts and frame together are the file, byte for byte, whatever the order of its
# cells. Another order, or a wrong guess about its structure, only makes parts that no other state has.


# Positions in one run. A save writes the last, unfinished run again: half a run on average. So a turn of 450
# tokens writes 1.14 times its own bytes; with runs of 1,024 tokens it would be 2.1 times. At 64 KiB a token a
# run has 8 MiB. Shorter ones would be read in slices of less than 100 kB, slower than a whole file.
RUN: Final = 128
FRAYED: Final = 2  # times as many runs as there would be in order: cells are taken as they come


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSizes:
    """The bytes that a part should have: at its beginning and end a state may have smaller ones."""

    least: int = 0
    most: int = sys.maxsize

    def positions(self, width: int) -> int:
        """Return the positions in a run of cells with so many bytes: the same for all states of a model."""
        run = RUN
        while run * width < self.least:
            run *= 2
        while run > 1 and run * width > self.most:
            run //= 2
        return run


AS_THEY_ARE: Final = PartSizes()


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of several layers that are divided at the same cells: `counts` cells to each part."""

    rows: tuple[Rows, ...]
    counts: tuple[int, ...]

    @property
    def width(self) -> int:
        """The bytes of one cell in all layers."""
        return sum(rows.width for rows in self.rows)

    def without_small(self, least: int) -> Band:
        """Return it without a first and a last part of less than `least` bytes."""
        counts, width = self.counts, self.width
        first = 1 if counts and counts[0] * width < least else 0
        last = len(counts) - (len(counts) > first and counts[-1] * width < least)
        skipped = sum(counts[:first])
        rows = tuple(Rows(r.offset + r.width * skipped, r.width) for r in self.rows)
        return Band(rows, counts[first:last])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a byte of the file is: at an offset of a part, or of the frame if `part` is None.

    `length` bytes from there on follow each other in the file too.
    """

    part: int | None
    at: int
    length: int


class Division:
    """How a file of `size` bytes is divided."""

    def __init__(self, size: int, bands: Sequence[Band]) -> None:
        self.size = size
        self.bands = tuple(bands)
        # Each band's first part, and its cells before each of its parts.
        self._first = [0, *accumulate(len(band.counts) for band in self.bands)]
        self._cells = [[0, *accumulate(band.counts)] for band in self.bands]
        found = [
            (rows.offset, rows.width * cells[-1], number, before)
            for number, (band, cells) in enumerate(zip(self.bands, self._cells, strict=True))
            for rows, before in zip(
                band.rows, accumulate((r.width for r in band.rows), initial=0), strict=False
            )
        ]
        self._regions = sorted(region for region in found if region[1])
        self._starts = [region[0] for region in self._regions]
        ends = [0, *(offset + length for offset, length, _, _ in self._regions)]
        self._gaps = [
            ByteSpan(end, start - end) for end, start in zip(ends, [*self._starts, size], strict=True)
        ]
        self._framed = [0, *accumulate(gap.length for gap in self._gaps)]

    def __repr__(self) -> str:
        return f"<Division of {self.size} bytes | {self._first[-1]} parts | frame {self._framed[-1]} bytes>"

    @property
    def frame(self) -> Recipe:
        """The spans of the file that make up the frame."""
        return tuple(gap for gap in self._gaps if gap.length)

    @property
    def sizes(self) -> list[int]:
        """The bytes of each part."""
        return [count * band.width for band in self.bands for count in band.counts]

    def parts(self) -> Iterator[Recipe]:
        """Yield the spans of the file that make up each part."""
        return map(self.part, range(self._first[-1]))

    def part(self, number: int) -> Recipe:
        """Return the spans of the file that make up one part. `number` must be below the count of parts."""
        band = bisect_right(self._first, number) - 1
        cells, inside = self._cells[band], number - self._first[band]
        start, end = cells[inside], cells[inside + 1]
        return tuple(
            ByteSpan(rows.offset + rows.width * start, rows.width * (end - start))
            for rows in self.bands[band].rows
        )

    def find(self, offset: int) -> Place:
        """Return where the byte at an offset of the file is. The offset must be below `size`."""
        index = bisect_right(self._starts, offset)
        gap = self._gaps[index]
        if offset >= gap.offset:
            inside = offset - gap.offset
            return Place(None, self._framed[index] + inside, gap.length - inside)
        start, length, number, before = self._regions[index - 1]
        cells = self._cells[number]
        width = length // cells[-1]
        inside = offset - start
        part = bisect_right(cells, inside // width) - 1
        first, count = cells[part], cells[part + 1] - cells[part]
        at = before * count + inside - first * width
        return Place(self._first[number] + part, at, (first + count) * width - inside)


def divided(opened: BinaryIO, file: SlotFile, sizes: PartSizes = AS_THEY_ARE) -> Division | None:
    """Return how to divide a slot file; None if it has to stay whole.

    It does if its structure was not understood, if its values are transposed, so that each token's are
    scattered over the file, and if its tokens do not fill a run. May raise OSError.
    """
    if not file.caches or len(file.tokens) <= RUN:
        return None
    bands = list[Band]()
    for cache in file.caches:
        if cache.recurrent:
            start = cache.table - WIDTH
            bands.append(_solid(start, cache.end - start, sizes.most))
        elif cache.cells:
            if not cache.rows:
                return None
            positions = sizes.positions(sum(rows.width for rows in cache.rows))
            bands.append(Band(cache.rows, _runs(opened, cache, positions)))
    bands += (_solid(record.offset, record.length, sizes.most) for record in file.records)
    large = (band.without_small(sizes.least) for band in bands)
    return Division(file.size, [band for band in large if band.counts])


def _solid(offset: int, length: int, most: int) -> Band:
    """Return a band of one part, or of several that have `most` bytes except the last."""
    if length <= most:
        return Band((Rows(offset, length),), (1,))
    whole, rest = divmod(length, most)
    return Band((Rows(offset, 1),), (*[most] * whole, *[rest] * bool(rest)))


def _runs(opened: BinaryIO, cache: Cache, positions: int) -> tuple[int, ...]:
    """Return the cells of each run, in the order of the file. A ring may begin in the middle of one."""
    opened.seek(cache.table)
    table = array("i", opened.read(cache.cells * cache.stride))
    blocks = (position // positions for position in table[:: cache.stride // WIDTH])
    counts = tuple(sum(1 for _ in cells) for _, cells in groupby(blocks))
    whole, rest = divmod(cache.cells, positions)
    if len(counts) > FRAYED * (whole + 2):
        return (*[positions] * whole, *[rest] * bool(rest))
    return counts
