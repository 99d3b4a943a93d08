"""Every pattern that `vocab.bpe` allows splits texts as the engine's own splitter does, on both builds.

A trained vocabulary hides a wrong split in rare scripts: nothing would have been merged there anyway. In
this one every two bytes are a token, so a split one byte off changes the ids.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gguf import GGUFWriter

from slotkeeper.vocab.bpe import PATTERNS, LocalVocab, byte_alphabet
from slotkeeper.vocab.gguf import read_vocabulary
from slotkeeper.vocab.selfcheck import samples

WIDTH = 32
ONE_OF_EACH = ["llama-bpe", "glm4", "qwen2", "qwen35", "gpt-2"]


def all_pairs(path: Path, pre: str) -> Path:
    """The smallest qwen3 with 256 bytes and 65,536 pairs of bytes, merged in a random order."""
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


def unicode_texts() -> list[str]:
    """Runs from one small stretch of Unicode at a time, so that letters, marks and numbers meet."""
    chance = random.Random(2)
    made = []
    for _ in range(600):
        start = chance.choice([chance.randrange(0x20, 0x3000), chance.randrange(0x20, 0x1F900)])
        near = [chr(start + n) for n in range(120) if not 0xD800 <= start + n <= 0xDFFF]
        common = list(" \n\t\r aZ5'’sST.<-_") + ["\r\n", "  ", "'ll", "'RE", "\u0301", "٣", "\u3000"]
        made.append("".join(chance.choices(near + common * 8, k=40)))
    return made


def test_each_pattern_is_represented() -> None:
    assert {PATTERNS[pre] for pre in ONE_OF_EACH} == set(PATTERNS.values())


@pytest.mark.parametrize("pre", ONE_OF_EACH)
async def test_texts_are_split_where_the_engine_splits_them(
    engine_factory: Any, build: str, pre: str, tmp_path: Path
) -> None:
    path = all_pairs(tmp_path / "pairs.gguf", pre)
    local = LocalVocab(read_vocabulary(path))
    engine = engine_factory("tiny-dense", build, args=["-m", str(path), "-c", "4096"])
    async with httpx.AsyncClient(base_url=engine.base, timeout=60) as http:
        separator = local.special_ids["<|im_end|>"]
        texts = [*samples(["<|im_end|>"]), *unicode_texts()]
        wrong = []
        for text in texts:
            answer = await http.post("/tokenize", json={"content": text})
            if answer.json()["tokens"] != local.tokenize(text).ids():
                wrong.append(text)
    assert separator not in local.tokenize("plain").ids()
    assert wrong == []
