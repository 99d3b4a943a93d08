"""A text tokenized in pieces has the ids of the whole, and no piece is tokenized twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.vocab.tokenizer import SegmentCache, SegmentTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

CUTS = {"<|a|>": 1_000_001, "<|b|>": 1_000_002}
PARTS = st.lists(st.sampled_from([*CUTS, "x", "hello", "\n", "é中", "<|"]), max_size=20)


class Letters:
    """One id per character."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(self, pieces: Sequence[str], /) -> list[Tokens]:
        self.seen += pieces
        return [Tokens(map(ord, piece)) for piece in pieces]


def whole(text: str) -> list[int]:
    ids: list[int] = []
    while text:
        head = next((cut for cut in CUTS if text.startswith(cut)), text[0])
        ids.append(CUTS.get(head) or ord(head))
        text = text.removeprefix(head)
    return ids


@given(texts=st.lists(PARTS.map("".join), min_size=1, max_size=5), budget=st.sampled_from([0, 700, 1 << 20]))
async def test_pieces_give_the_token_ids_of_the_whole_text_for_any_cache_contents(
    texts: list[str], budget: int
) -> None:
    tokenizer = SegmentTokenizer(CUTS, Letters(), SegmentCache(budget))
    for text in texts:
        assert (await tokenizer.tokenize(text)).ids() == whole(text)


@given(parts=PARTS)
async def test_no_piece_is_encoded_twice(parts: list[str]) -> None:
    letters = Letters()
    tokenizer = SegmentTokenizer(CUTS, letters, SegmentCache())
    for end in range(len(parts) + 1):
        await tokenizer.tokenize("<|a|>".join(parts[:end]))
    assert len(letters.seen) == len(set(letters.seen))
    assert "" not in letters.seen


async def test_without_cuts_the_text_is_one_piece() -> None:
    letters = Letters()
    assert (await SegmentTokenizer({}, letters, SegmentCache()).tokenize("ab")).ids() == [97, 98]
    assert letters.seen == ["ab"]


def test_the_least_recently_used_piece_is_evicted_first() -> None:
    cache = SegmentCache(1000)
    for piece in ("a", "b", "c"):
        cache.put(piece, Tokens([1]))
    cache.get("a")
    cache.put("d", Tokens([1]))
    assert cache.get("a")
    assert not cache.get("b")
    assert repr(cache) == "<SegmentCache 3 pieces, 0.0 of 0 MiB>"
    cache.clear()
    assert (len(cache), cache.size_bytes) == (0, 0)
