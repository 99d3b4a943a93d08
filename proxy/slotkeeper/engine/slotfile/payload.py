"""The engine's state in a slot file, walked from memory to memory without reading what they hold.

Little endian, one memory after the other (engine.md 2.2):

    attention   u32 streams; for each stream u32 cells and, if there are any:
                the cell table, per cell {i32 pos, u32 1, [i32 x, y, [i32 token]], i32 slot}
                u32 transposed, u32 layers, [version 4: u32 x 2, the rotations of keys and values]
                per layer {i32 type, u64 row, cells x row bytes} for the keys, the same for the values
                transposed values: {i32 type, u32 element, u32 width, cells x element x width bytes}
    recurrent   u32 cells, per cell {i32 pos, u32 0}, u32 0, u32 layers of the model
                per recurrent layer {i32 type, u64 row, cells x row bytes}, first all r, then all s

A dense model has one attention memory, a sliding window two (the whole, then the window), a hybrid one
attention and one recurrent memory. x and y are there for M-RoPE, the token on version 4 only.
Nothing says which of these follows, so each is tried where it could stand; what does not fit is soon seen.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from slotkeeper.engine.slotfile.appendix import begins
from slotkeeper.engine.slotfile.values import Cache
from slotkeeper.engine.slotfile.view import BeyondError, StrangeError, View

MAX_CACHES: Final = 4  # a hybrid over a sliding window has three
MAX_STREAMS: Final = 256  # llama.cpp's LLAMA_MAX_SEQ
MAX_LAYERS: Final = 4096
MAX_TYPES: Final = 64  # ggml has about 40
MAX_WIDTH: Final = 1 << 20  # elements of one token in one layer
STRIDES: Final = (12, 20, 24)  # bytes of a cell: plain, M-RoPE, M-RoPE with its token
WITH_ROTATIONS: Final = 4  # the first version that states them
ROW: Final = struct.Struct("<iQ")
COLUMNS: Final = struct.Struct("<iII")
CELL: Final = struct.Struct("<iI")

Layers = list[tuple[int, ...]]  # type and row size of each


def walk(view: View, at: int, version: int) -> tuple[Cache, ...] | None:
    """The memories from `at` up to the end of the file or its appendix; none if not one was understood.

    Raises BeyondError if they do not end there, or would only do so behind the end of the file.
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
    """Tries, at each place, every memory that could begin there."""

    def __init__(self, view: View, version: int) -> None:
        self._view = view
        self._version = version
        self.understood = False  # something fitted, but for the end of the file

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
        table, held, shape = at, 0, ""
        for _ in range(streams):
            cells, at = self._view.word(at), at + 4
            if cells and held:  # a file holds one sequence, and a sequence is in one stream
                raise StrangeError
            if cells:
                table, held = at, cells
                self._table(table, cells, stride)
                at, shape = self._layers(table + cells * stride, cells, valued)
        shape = f"attention {streams} {stride} {shape}"
        return Cache(recurrent=False, table=table, cells=held, stride=stride, end=at, shape=shape)

    def _table(self, table: int, cells: int, stride: int) -> None:
        """The first and the last cell, which tell the stride; all of it must be there."""
        self._view.need(table, stride)
        last = table + (cells - 1) * stride
        for cell in (table, last):
            _, sequences = self._view.fields(CELL, cell)
            if sequences != 1:
                raise StrangeError
        self._view.need(last, stride)

    def _layers(self, at: int, cells: int, valued: bool) -> tuple[int, str]:
        """Keys and values; where they end, and their shape."""
        transposed, layers, at = self._view.word(at), self._view.word(at + 4), at + 8
        if transposed > 1 or layers > MAX_LAYERS:
            raise StrangeError
        rotations: tuple[int, int] | None = None
        if self._version >= WITH_ROTATIONS:
            rotations, at = (self._view.word(at), self._view.word(at + 4)), at + 8
            if max(rotations) > MAX_WIDTH:
                raise StrangeError
        keys, values = Layers(), Layers()
        for _ in range(layers):
            at = self._row(at, cells, keys)
        for _ in range(layers if valued else 0):
            at = self._columns(at, cells, values) if transposed else self._row(at, cells, values)
        return at, f"{transposed} {rotations} {keys} {values}"

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
        with suppress(StrangeError):  # what is no row belongs to something else
            while len(rows) < 2 * layers and not self._ended(at):
                at = self._row(at, cells, rows)
        # Every recurrent layer has the same shape, and r and s, which are never of one size: so a file that
        # was cut between two layers is not taken for one of a smaller model.
        half = len(rows) // 2
        if rows[0] == rows[-1] or rows != rows[:1] * half + rows[-1:] * half:
            raise BeyondError
        shape = f"recurrent {layers} {rows}"
        return Cache(recurrent=True, table=table, cells=cells, stride=CELL.size, end=at, shape=shape)

    def _ended(self, at: int) -> bool:
        return at == self._view.size or (self._version >= WITH_ROTATIONS and begins(self._view, at))
