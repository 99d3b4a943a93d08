"""Chunks of media in a sequence of token ids: where an image stands, and what stands there in its place.

An image takes as many places of a prompt as the engine counts for it, with the text that the engine puts
around it. Our sequences have negative numbers there, made from the digest of the image and its length. So
all that compares sequences works on them unchanged, and two images never look alike. The engine reuses an
image whole or not at all, so a common prefix never ends inside a chunk. These numbers never go to the engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import shake_256
from typing import Final

_BITS: Final = 0x3FFFFFFF  # so that none is -1, which stands for "no token"
_LEAST: Final = -(2**31)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One image in a sequence."""

    start: int  # tokens before it; negative where the sequence begins inside it
    length: int  # tokens
    digest: bytes  # of the image's bytes

    @property
    def end(self) -> int:
        return self.start + self.length


def packed(digest: bytes, length: int) -> bytes:
    """Return what stands in place of an image: the numbers of another image, or of another length, differ."""
    drawn = array("i", shake_256(digest + length.to_bytes(4, "little")).digest(length * array("i").itemsize))
    return array("i", (_LEAST + (number & _BITS) for number in drawn)).tobytes()


def moved(chunks: Sequence[Chunk], by: int) -> tuple[Chunk, ...]:
    return tuple(replace(chunk, start=chunk.start + by) for chunk in chunks)


def between(chunks: Sequence[Chunk], start: int, end: int) -> tuple[Chunk, ...]:
    """Return the chunks of the part of a sequence from `start` up to `end`, also those that it cuts."""
    return moved([chunk for chunk in chunks if chunk.start < end and chunk.end > start], -start)


def outside(chunks: Sequence[Chunk], at: int) -> int:
    """Return the last place up to `at` that is not inside a chunk."""
    return next((max(0, chunk.start) for chunk in chunks if chunk.start < at < chunk.end), at)


def prompt_end(chunks: Sequence[Chunk], at: int) -> int:
    """Return the last place up to `at` at which a prompt of ours may end.

    It must not end inside an image, which cannot be cut, nor right behind one: an engine whose projector
    puts no text there then aborts (engine.md 15).
    """
    for chunk in reversed(chunks):
        if chunk.start < at <= chunk.end:
            at = max(0, chunk.start)
    return at


def texts(chunks: Sequence[Chunk], length: int) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of each text of a sequence: before, between and behind the chunks."""
    at = 0
    for chunk in chunks:
        yield at, chunk.start
        at = chunk.end
    yield at, length
