"""Divides a slot file into parts that stay the same while its state grows.

The keys and values of a token do not change when others follow it. But a file has them layer by layer, so the
file of a state that grew by one token differs nearly everywhere. A part is a run: the rows that all layers of
one memory have for up to 128 positions. A run ends where a multiple of 128 begins, so the window of a
sliding-window model has the same runs as before, less those that it has left. Each recurrent state and each
checkpoint is a part. What remains is the frame: header, ids, cell tables, the heads of layers. It has the
slot's number, and some 20 bytes for each token. Where parts should have a least or a largest size
(`PartSizes`), runs are longer or shorter, large parts are cut, and small remains stay in the frame.

Everything here is exact: parts and frame together are the file, byte for byte, whatever the order of its
cells. Another order, or a wrong guess about its structure, only makes parts that no other state has.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import BinaryIO, Final

from slotkeeper.engine.slot_file.slotfile import ByteSpan, Cache, Recipe, Rows, SlotFile
from slotkeeper.scheduler.prompts.tokens import WIDTH

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
