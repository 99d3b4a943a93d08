"""Special tokens are found where llama.cpp finds them: longest first, over the whole text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from slotkeeper.vocab.tokenizer import SpecialSplitter, entangled, independent

TOKENS = st.lists(st.text("ab<\n", min_size=1, max_size=5), min_size=0, max_size=6, unique=True)


def as_llama_cpp(text: str, ids: dict[str, int]) -> list[str | int]:
    """`tokenizer_st_partition`, word for word: each special in turn is cut out of what is still text."""
    parts: list[str | int] = [text] if text else []
    for token in sorted(ids, key=lambda token: -len(token.encode())):
        done: list[str | int] = []
        for part in parts:
            if isinstance(part, int):
                done.append(part)
                continue
            for index, piece in enumerate(part.split(token)):
                done += [ids[token]] if index else []
                done += [piece] if piece else []
        parts = done
    return parts


def one_per_length(tokens: list[str]) -> dict[str, int]:
    """Between overlapping specials of one length, the order is the sort's own: not defined, not tested."""
    return {token: number for number, token in enumerate({len(token): token for token in tokens}.values())}


@given(text=st.text("ab<\n", max_size=60), tokens=TOKENS)
@example(text="<think>\n</think>\n\nx", tokens=["<think>", "</think>", "<think>\n", "\n</think>\n\n"])
@example(text="aabab<", tokens=["aab", "abab", "b<"])
@example(text="aaa<", tokens=["aa"])
def test_special_tokens_are_split_as_in_llama_cpp(text: str, tokens: list[str]) -> None:
    ids = one_per_length(tokens)
    assert SpecialSplitter(ids).split(text) == as_llama_cpp(text, ids)


@given(text=st.text("ab<\n", max_size=60), tokens=TOKENS)
def test_the_parts_spell_the_text_and_none_is_empty(text: str, tokens: list[str]) -> None:
    ids = {token: number for number, token in enumerate(tokens)}
    parts = SpecialSplitter(ids).split(text)
    assert "".join(part if isinstance(part, str) else tokens[part] for part in parts) == text
    assert "" not in parts


@given(text=st.text("ab<\n", max_size=60), tokens=TOKENS)
def test_cutting_first_at_independent_tokens_does_not_change_the_result(text: str, tokens: list[str]) -> None:
    ids = one_per_length(tokens)
    whole = SpecialSplitter(ids).split(text)
    cuts = {token: ids[token] for token in independent(ids, ids)}
    twice: list[str | int] = []
    for part in SpecialSplitter(cuts).split(text):
        twice += SpecialSplitter(ids).split(part) if isinstance(part, str) else [part]
    assert twice == whole


def test_a_token_inside_a_longer_one_is_not_a_cut() -> None:
    assert independent(["<think>", "<|im_end|>"], ["<think>", "<think>\n", "<|im_end|>"]) == ["<|im_end|>"]


def test_only_tokens_that_a_longer_match_can_overlap_are_entangled() -> None:
    assert entangled(["<think>\n", "\n</think>", "<|im_end|>", "think"]) == {"<think>\n"}
