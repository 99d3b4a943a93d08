"""How large a slot's state will be, from the model's header alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from slotkeeper.engine.flags import EngineFlags
from slotkeeper.vocab.gguf import GgufHeader

# Bytes of 32 values, from ggml's block sizes; a type that is not listed is taken for f16.
BLOCK_BYTES: Final = {
    "f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18,
    "iq4_nl": 18,
}  # fmt: skip
CELL_BYTES: Final = 28  # of a token, beside keys and values: its cell (at most 24) and its id


def state_bytes(header: GgufHeader, n_ctx: int, flags: EngineFlags | None = None) -> int:
    """At most, of a slot that is full: sliding layers are counted in full, recurrent states not at all.

    0 where the header does not say how wide keys and values are.
    """
    kinds = (flags.cache_type_k, flags.cache_type_v) if flags else ("f16", "f16")
    key, value = (BLOCK_BYTES.get(kind, BLOCK_BYTES["f16"]) for kind in kinds)
    wide = header.values.get(f"{header.architecture}.embedding_length")
    each = wide // header.head_count if isinstance(wide, int) and header.head_count else 0
    heads = sum(kv_heads(header))
    width = number(header, "attention.key_length", each) * key
    width += number(header, "attention.value_length", each) * value
    return (heads * width // 32 + CELL_BYTES) * n_ctx if heads and width else 0


def token_bytes(header: GgufHeader, flags: EngineFlags | None = None) -> int:
    """What each further token adds; its cell at least, as with a memory that is recurrent only."""
    return max(CELL_BYTES, state_bytes(header, 1, flags))


def kv_heads(header: GgufHeader) -> Sequence[int]:
    """Of every layer that has attention."""
    given = header.values.get(f"{header.architecture}.attention.head_count_kv", header.head_count)
    if isinstance(given, tuple):
        return [count for count in given if isinstance(count, int)]
    layers = header.block_count - header.nextn_predict_layers
    return [given] * (layers // (header.full_attention_interval or 1)) if isinstance(given, int) else []


def number(header: GgufHeader, key: str, otherwise: int) -> int:
    found = header.values.get(f"{header.architecture}.{key}", otherwise)
    return found if isinstance(found, int) else otherwise
