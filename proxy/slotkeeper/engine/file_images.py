"""Images in slot files: their places among the tokens, and the engine's names for them.

After the ids of the tokens, which are -1 at images, a file has u32 count, then `count` u32 (tokens before
each image), then for each image u32 length and that many bytes, then zeros up to a whole word. Those bytes
are u64 version, u32 1, u64 0, u8 1, u32 width and height in tokens, u32 kind of positions, u32 0, from
version 2 on u32 frames, u64 length of the name, the name, sizes in pixels. It has no pixels or embeddings.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from slotkeeper.engine.slotfile import FileImage, StrangeError, View
from slotkeeper.scheduler.tokens import WIDTH, Tokens

HEAD: Final = struct.Struct("<QIQBIIII")
MOST: Final = 4096  # images in one file
LONGEST: Final = 1024  # bytes of one image's entry; 137 were seen
LARGEST: Final = 1 << 16  # tokens of one image
PLAIN, M_ROPE = 0, 1  # kinds of positions
VERSIONS: Final = (1, 2)  # b10434, b11549


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
    if count > MOST:
        raise StrangeError(f"a count of {count}")
    starts = [view.word(at + WIDTH * number) for number in range(count)]
    at += WIDTH * count
    images = []
    for start in starts:
        length, at = view.word(at), at + WIDTH
        if not HEAD.size < length <= LONGEST:
            raise StrangeError(f"one of {length} bytes")
        images.append(_image(view.take(at, length), start))
        at += length
    return tuple(images), -(-at // WIDTH) * WIDTH


def _image(data: bytes, start: int) -> FileImage:
    version, kind, _, shown, width, height, positions, _ = HEAD.unpack_from(data)
    at = HEAD.size + (WIDTH if version > 1 else 0)
    size = int.from_bytes(data[at : at + 8], "little")
    name = data[at + 8 : at + 8 + size]
    known = version in VERSIONS and (kind, shown) == (1, 1) and positions in {PLAIN, M_ROPE}
    if not known or len(name) != size or not name.isalnum() or not 0 < width * height < LARGEST:
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
