"""Slot files: their contents as values, and edits that do not read the payload.

`slotfile_reader.read` never raises for any bytes: it returns a SlotFile, or Damage with a verdict.
An edit is a recipe: a list of pieces of the old file and of new bytes. One pass, in any thread, carries it
out in place, or copies, and hashes the bytes. Bytes that are not needed are skipped, never read.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
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
