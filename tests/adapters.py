"""Two tiny LoRA adapters for a tiny model, from a recipe: random low-rank changes of every key and value.

    LORA = [tiny_adapter(Tiny.DENSE, folder, seed) for seed in (1, 2)]

They change keys and values, so that a state that one adapter made is wrong for another, and answers show it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGUFWriter

from slotkeeper.bench.models import Tiny
from slotkeeper.bench.tiny_models import TINY_HEADS, D

RANK: Final = 4
LOUD: Final = 2.0  # of the change, beside weights of about 1: answers differ within a few words
ARCHITECTURE: Final = {Tiny.DENSE: "qwen3", Tiny.HYBRID: "qwen35"}
ATTENTION: Final = {Tiny.DENSE: (0, 1, 2, 3), Tiny.HYBRID: (3,)}  # layers with keys and values


def tiny_adapter(tiny: Tiny, folder: Path, seed: int) -> Path:
    """Write an adapter for this model into the folder; another seed makes another one."""
    path = folder / f"{tiny}-lora-{seed}.gguf"
    random = np.random.default_rng(seed)
    gguf = GGUFWriter(str(path), ARCHITECTURE[tiny])
    gguf.add_type("adapter")
    gguf.add_string("adapter.type", "lora")
    gguf.add_float32("adapter.lora.alpha", float(RANK))
    for layer in ATTENTION[tiny]:
        for name in ("attn_k", "attn_v"):
            down = random.standard_normal((RANK, D)) / np.sqrt(D)
            up = random.standard_normal((TINY_HEADS.key_value * TINY_HEADS.width, RANK)) * (
                LOUD / np.sqrt(RANK)
            )
            gguf.add_tensor(f"blk.{layer}.{name}.weight.lora_a", np.ascontiguousarray(down, dtype=np.float32))
            gguf.add_tensor(f"blk.{layer}.{name}.weight.lora_b", np.ascontiguousarray(up, dtype=np.float32))
    gguf.write_header_to_file()
    gguf.write_kv_data_to_file()
    gguf.write_tensors_to_file()
    gguf.close()
    return path
