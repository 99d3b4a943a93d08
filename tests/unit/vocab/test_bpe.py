"""The local tokenizer is BPE over the file's own merges, and refuses what it cannot do exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.bench.models import Tiny, build
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.vocab.gguf import GgufVocabulary, read_vocabulary
from slotkeeper.vocab.tokenizer import (
    MAX_BLANKS,
    LocalVocab,
    SegmentCache,
    SegmentTokenizer,
    UnsupportedError,
    byte_alphabet,
    independent,
)


@cache
def tiny() -> GgufVocabulary:
    return read_vocabulary(build(Tiny.DENSE))


@cache
def local() -> LocalVocab:
    return LocalVocab(tiny())


def back_to_text(tokens: Tokens) -> str:
    byte_of = {symbol: byte for byte, symbol in enumerate(byte_alphabet())}
    out = b""
    for number in tokens:
        token = tiny().tokens[number]
        out += token.encode() if token in local().special else bytes(byte_of[symbol] for symbol in token)
    return out.decode()


# Characters newer than the engine's Unicode tables are refused; those that Python knows are older.
KNOWN = st.characters(exclude_categories=["Cs", "Cn"])
TEXTS = st.lists(
    st.one_of(st.text(KNOWN, max_size=12), st.sampled_from([*sorted(local().special), " the", "def f():\n"]))
).map("".join)


@given(text=TEXTS)
def test_the_token_ids_spell_the_text(text: str) -> None:
    assert back_to_text(local().tokenize(text)) == text


@given(text=TEXTS)
async def test_pieces_between_cuts_give_the_token_ids_of_the_whole_text(text: str) -> None:
    async def encode(pieces: object, /) -> list[Tokens]:
        return [local().tokenize(piece) for piece in pieces]  # type: ignore[attr-defined]

    ids = local().special_ids
    cuts = {token: ids[token] for token in independent(ids, ids)}
    assert "<|im_end|>" in cuts
    pieces = SegmentTokenizer(cuts, encode, SegmentCache())
    assert await pieces.tokenize(text) == local().tokenize(text)


def test_merges_are_applied_in_the_order_of_the_file() -> None:
    letters = byte_alphabet()
    vocabulary = replace(
        tiny(), tokens=[*letters, "abc", "bc", "ab"], kinds=(1,) * 259, merges=["b c", "a b", "a bc"]
    )
    assert LocalVocab(vocabulary).tokenize("abc ab").ids() == [256, letters.index("Ġ"), 258]


def test_a_word_without_merges_is_one_token_only_if_the_engine_does_so() -> None:
    letters = byte_alphabet()
    vocabulary = replace(tiny(), tokens=[*letters, "abc"], kinds=(1,) * 257, merges=[])
    assert LocalVocab(vocabulary).tokenize("abc").ids() == [97, 98, 99]
    assert LocalVocab(replace(vocabulary, pre="llama-bpe")).tokenize("abc").ids() == [256]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "llama"},
        {"pre": "deepseek-v3"},
        {"pre": ""},
        {"name": "Phi-3-small"},
        {"merges": ["q q"]},
        {"merges": ["noblank"]},
        {"merges": ["\u4e2d a"]},
        {"tokens": ["a"], "kinds": (1,), "merges": []},
    ],
    ids=str,
)
def test_an_unsupported_vocabulary_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        LocalVocab(replace(tiny(), **change))


def test_a_run_of_blanks_that_would_break_the_encoder_is_refused() -> None:
    with pytest.raises(UnsupportedError):
        local().tokenize("x" + " " * 2_000_000)
    assert len(local().tokenize(" " * (MAX_BLANKS - 1))) > 0
