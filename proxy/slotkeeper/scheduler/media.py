"""Chunks of media in a sequence of token ids: the place of each image, and the numbers that represent it.

An image takes as many tokens of a prompt as the engine counts for it, with the text that the engine puts
around it. In our sequences negative numbers represent them, made from the image's digest and its length. So
code that compares sequences works unchanged, and two images never compare equal. The engine reuses a whole
image or none of it, so a common prefix never ends inside a chunk. These numbers are never sent to the engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import shake_256
from typing import Final

_BITS: Final = 0x3FFFFFFF  # keeps the numbers below -1, which means "no token"
_LEAST: Final = -(2**31)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One image in a sequence."""

    start: int  # tokens before the image; negative if the sequence begins inside it
    length: int  # tokens
    digest: bytes  # of the image's bytes

    @property
    def end(self) -> int:
        return self.start + self.length


def packed(digest: bytes, length: int) -> bytes:
    """Return the packed numbers that represent an image; another digest or length gives other numbers."""
    drawn = array("i", shake_256(digest + length.to_bytes(4, "little")).digest(length * array("i").itemsize))
    return array("i", (_LEAST + (number & _BITS) for number in drawn)).tobytes()


def moved(chunks: Sequence[Chunk], by: int) -> tuple[Chunk, ...]:
    return tuple(replace(chunk, start=chunk.start + by) for chunk in chunks)


def between(chunks: Sequence[Chunk], start: int, end: int) -> tuple[Chunk, ...]:
    """Return the chunks of a sequence's part from `start` to `end`, including chunks that the part cuts."""
    return moved([chunk for chunk in chunks if chunk.start < end and chunk.end > start], -start)


def outside(chunks: Sequence[Chunk], at: int) -> int:
    """Return the last index up to `at` that is not inside a chunk."""
    return next((max(0, chunk.start) for chunk in chunks if chunk.start < at < chunk.end), at)


def prompt_end(chunks: Sequence[Chunk], at: int) -> int:
    """Return the last index up to `at` at which one of our own prompts may end.

    A prompt must not end inside an image, which cannot be cut, nor right behind one: an engine whose
    projector puts no text there then aborts (engine.md 15).
    """
    for chunk in reversed(chunks):
        if chunk.start < at <= chunk.end:
            at = max(0, chunk.start)
    return at


def texts(chunks: Sequence[Chunk], length: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each text in a sequence: before, between and behind the chunks."""
    at = 0
    for chunk in chunks:
        yield at, chunk.start
        at = chunk.end
    yield at, length
