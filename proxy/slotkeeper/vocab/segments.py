"""Never tokenize twice: texts are cut at special tokens, and every piece is remembered.

At a cut nothing on the left changes the tokens on the right, so the n-th turn of a conversation costs
a look at its old pieces and the tokenization of its new ones.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

from slotkeeper.scheduler.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

CACHE_BYTES: Final = 64 << 20  # about 10 million tokens of text and ids: many days of one user's turns
_OVERHEAD: Final = 300  # bytes of an entry besides text and ids: measured for CPython 3.11, rounded up


class Encode(Protocol):
    """Tokenizes pieces, each alone, in the order given."""

    async def __call__(self, pieces: Sequence[str], /) -> list[Tokens]: ...


class SegmentCache:
    """Pieces of text and their tokens; the longest unused go first when the bytes run out."""

    def __init__(self, budget: int = CACHE_BYTES) -> None:
        self._budget = budget
        self._entries: OrderedDict[str, Tokens] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<SegmentCache {len(self)} pieces, {self.size_bytes / 2**20:.1f} of {self._budget >> 20} MiB>"

    def get(self, piece: str) -> Tokens | None:
        tokens = self._entries.get(piece)
        if tokens is not None:
            self._entries.move_to_end(piece)
        return tokens

    def put(self, piece: str, tokens: Tokens) -> None:
        size = _size(piece, tokens)
        if piece in self._entries or size > self._budget:
            return
        self._entries[piece] = tokens
        self.size_bytes += size
        while self.size_bytes > self._budget:
            self.size_bytes -= _size(*self._entries.popitem(last=False))

    def clear(self) -> None:
        self._entries.clear()
        self.size_bytes = 0


def _size(piece: str, tokens: Tokens) -> int:
    # four bytes a character is the most that CPython takes; usually it is one
    width = 1 if piece.isascii() else 4
    return width * len(piece) + len(tokens.packed) + _OVERHEAD


class SegmentTokenizer:
    """Tokenizes texts piece by piece. `cuts` are special tokens at which it is safe to cut, with ids."""

    def __init__(self, cuts: Mapping[str, int], encode: Encode, cache: SegmentCache) -> None:
        self._cuts = {text: Tokens([number]).packed for text, number in cuts.items()}
        ordered = sorted(cuts, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None
        self._encode = encode
        self.cache = cache

    def split(self, text: str) -> list[str]:
        """Text and cuts in turn, beginning and ending with (perhaps empty) text."""
        return self._pattern.split(text) if self._pattern else [text]

    async def tokenize(self, text: str) -> Tokens:
        """Return the ids of the text, without BOS or EOS."""
        pieces = self.split(text)
        # all that this text needs is held here: another text may push it out of the cache meanwhile
        known: dict[str, bytes] = {"": b""}
        missing: list[str] = []
        for piece in pieces[::2]:
            if piece in known:
                continue
            tokens = self.cache.get(piece)
            if tokens is None:
                missing.append(piece)
            known[piece] = tokens.packed if tokens else b""
        if missing:
            for piece, tokens in zip(missing, await self._encode(missing), strict=True):
                known[piece] = tokens.packed
                self.cache.put(piece, tokens)
        return Tokens.of(b"".join(self._weave(pieces, known)))

    def _weave(self, pieces: list[str], known: Mapping[str, bytes]) -> list[bytes]:
        woven = [b""] * len(pieces)
        woven[::2] = [known[piece] for piece in pieces[::2]]
        woven[1::2] = [self._cuts[cut] for cut in pieces[1::2]]
        return woven
