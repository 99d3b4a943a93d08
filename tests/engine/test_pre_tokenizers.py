"""Every pattern that `vocab.bpe` allows splits texts as the engine's own splitter does, on both builds.

A trained vocabulary hides a wrong split in rare scripts: nothing would have been merged there anyway. In
this one every two bytes are a token, so a split one byte off changes the ids.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gguf import GGUFWriter

from patience import PATIENCE
from slotkeeper.vocab.gguf import read_vocabulary
from slotkeeper.vocab.tokenizer import PATTERNS, LocalVocab, UnsupportedError, byte_alphabet, samples

pytestmark = pytest.mark.one_in(8)

WIDTH = 32
ONE_OF_EACH = ["llama-bpe", "glm4", "qwen2", "qwen35", "gpt-2"]


def all_pairs(path: Path, pre: str) -> Path:
    """Return the smallest qwen3 with 256 bytes and 65,536 pairs of bytes, merged in a random order."""
    alphabet = byte_alphabet()
    pairs = [(left, right) for left in alphabet for right in alphabet]
    random.Random(1).shuffle(pairs)
    tokens = [*alphabet, *(left + right for left, right in pairs), "<|im_end|>"]
    file = GGUFWriter(str(path), "qwen3")
    file.add_context_length(65536)
    file.add_embedding_length(WIDTH)
    file.add_block_count(1)
    file.add_feed_forward_length(WIDTH)
    file.add_head_count(1)
    file.add_head_count_kv(1)
    file.add_key_length(WIDTH)
    file.add_value_length(WIDTH)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(pre)
    file.add_token_list(tokens)
    file.add_token_types([1] * (len(tokens) - 1) + [3])
    file.add_token_merges([f"{left} {right}" for left, right in pairs])
    file.add_bos_token_id(len(tokens) - 1)
    file.add_eos_token_id(len(tokens) - 1)
    square, ones = np.zeros((WIDTH, WIDTH), np.float32), np.ones(WIDTH, np.float32)
    file.add_tensor("token_embd.weight", np.zeros((len(tokens), WIDTH), np.float32))
    file.add_tensor("output_norm.weight", ones)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        file.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
        file.add_tensor(f"blk.0.{name}.weight", ones)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


# No uniform stretch of thousands of ideographs or syllables: its two ends suffice.
DULL = (range(0x3500, 0x4D00), range(0x4F00, 0x9F00), range(0xAD00, 0xD700), range(0x17100, 0x18700))
POINTS = [
    point
    for point in (*range(1, 0xD800), *range(0xF900, 0x1FC00), *range(0xE0000, 0xE0200))
    if not any(point in dull for dull in DULL)
]


def unicode_texts(seed: int) -> Iterator[str]:
    """Return texts from small ranges of Unicode, so that letters, marks and numbers meet."""
    chance = random.Random(seed)
    common = [*" \n\t\r aZ5'sST.<-_", "\r\n", "  ", "'ll", "'RE", "\u0301", "\u2019", "\u0663", "\u3000"]
    for _ in range(3000):
        at = chance.randrange(len(POINTS))
        yield "".join(chance.choices([*map(chr, POINTS[at : at + 120]), *common * 8], k=40))


async def wrongly_split(base: str, local: LocalVocab, texts: Iterable[str]) -> list[str]:
    """Return the texts whose ids differ. Those that the local tokenizer refuses do not count."""
    separator = local.special_ids["<|im_end|>"]
    ours: dict[str, list[int]] = {}
    for text in texts:
        with contextlib.suppress(UnsupportedError):
            ours[text] = local.tokenize(text).ids()
    content = [part for text in ours for part in (separator, text)]
    async with httpx.AsyncClient(base_url=base, timeout=PATIENCE) as http:
        ids = (await http.post("/tokenize", json={"content": content})).json()["tokens"]
    expected = [number for mine in ours.values() for number in (separator, *mine)]
    if ids == expected:
        return []
    starts = [index for index, number in enumerate(ids) if number == separator]
    theirs = [ids[a + 1 : b] for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
    return [text for (text, mine), their in zip(ours.items(), theirs, strict=True) if mine != their]


def test_every_split_pattern_has_a_pre_tokenizer_in_this_test() -> None:
    assert {PATTERNS[pre] for pre in ONE_OF_EACH} == set(PATTERNS.values())


@pytest.mark.parametrize("pre", ONE_OF_EACH)
async def test_texts_are_split_as_the_engine_splits_them(
    engine_factory: Any, build: str, pre: str, tmp_path: Path
) -> None:
    path = all_pairs(tmp_path / "pairs.gguf", pre)
    local = LocalVocab(read_vocabulary(path))
    engine = engine_factory("tiny-dense", build, args=["-m", str(path), "-c", "4096"])
    plain = [text for text in samples([]) if "<|im_end|>" not in text]
    assert await wrongly_split(engine.base, local, [*plain, *unicode_texts(len(pre))]) == []
    if pre == "qwen35":  # the pattern that distinguishes letters, marks and numbers
        every_point = (f"x{chr(p)}x  1{chr(p)}1\n.{chr(p)}. {chr(p)}" for p in POINTS)
        assert await wrongly_split(engine.base, local, every_point) == []


def test_the_local_tokenizer_refuses_three_characters(tmp_path: Path) -> None:
    local = LocalVocab(read_vocabulary(all_pairs(tmp_path / "pairs.gguf", "qwen35")))
    refused = 0
    for point in range(1, 0x3000):
        try:
            local.tokenize(chr(point))
        except UnsupportedError:
            refused += 1
    assert refused == 3
