"""What we read from a GGUF: the facts about the model, and its vocabulary on demand.

Both readers block (about 0.1 to 0.2 s for a vocabulary of 150,000): call them in a thread.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from slotkeeper.vocab.memory import memory_kind
from slotkeeper.vocab.scan import GgufError, Scan, scan

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from slotkeeper.vocab.scan import Value

__all__ = ["GgufError", "GgufHeader", "GgufVocabulary", "memory_kind", "read_header", "read_vocabulary"]

_TOKENS: Final = "tokenizer.ggml.tokens"
_KINDS: Final = "tokenizer.ggml.token_type"
_MERGES: Final = "tokenizer.ggml.merges"
# Recurrent state by whatever name: Mamba and DeltaNet, RWKV, LFM2's short convolution, Kimi's KDA
_STATE_KEYS: Final = ("ssm.", "wkv.", "shortconv.", "kda.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The facts about a model. 0, "" or None where the file does not say."""

    architecture: str
    name: str
    context_length: int  # tokens the model was trained for
    block_count: int
    head_count: int  # attention heads of the layer that has most; 0 = no attention
    sliding_window: int  # tokens
    has_state: bool  # any key about a recurrent state
    full_attention_interval: int
    nextn_predict_layers: int  # MTP blocks
    tokenizer_model: str
    tokenizer_pre: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool | None
    chat_template: str
    tensor_count: int
    file_bytes: int
    fingerprint: str  # of the file's size and header: the same model, whatever its path
    values: Mapping[str, Value]  # every number, string and short array, by its full key


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """Tokens by id, with GGUF's types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""

    model: str
    pre: str
    name: str
    tokens: list[str]
    kinds: tuple[int, ...]
    merges: list[str]  # "left right"
    bos_id: int | None
    eos_id: int | None
    add_bos: bool | None
    add_eos: bool | None
    chat_template: str


def read_header(path: Path) -> GgufHeader:
    """Read the facts, without the vocabulary. Raises only GgufError."""
    found = scan(path)
    values = found.values
    architecture = _text(values, "general.architecture")

    def own(key: str) -> str:
        return f"{architecture}.{key}"

    return GgufHeader(
        architecture=architecture,
        name=_text(values, "general.name"),
        context_length=_number(values, own("context_length")),
        block_count=_number(values, own("block_count")),
        head_count=_number(values, own("attention.head_count")),
        sliding_window=_number(values, own("attention.sliding_window")),
        has_state=any(key.startswith(tuple(map(own, _STATE_KEYS))) for key in values),
        full_attention_interval=_number(values, own("full_attention_interval")),
        nextn_predict_layers=_number(values, own("nextn_predict_layers")),
        tokenizer_model=_text(values, "tokenizer.ggml.model"),
        tokenizer_pre=_text(values, "tokenizer.ggml.pre"),
        vocab_size=found.lengths.get(_TOKENS, 0),
        bos_id=_id(values, "tokenizer.ggml.bos_token_id"),
        eos_id=_id(values, "tokenizer.ggml.eos_token_id"),
        add_bos=_flag(values, "tokenizer.ggml.add_bos_token"),
        chat_template=_text(values, "tokenizer.chat_template"),
        tensor_count=found.tensor_count,
        file_bytes=found.file_bytes,
        fingerprint=_fingerprint(found),
        values=values,
    )


def read_vocabulary(path: Path) -> GgufVocabulary:
    """Read tokens, types and merges. Raises only GgufError."""
    values = scan(path, wanted=(_TOKENS, _KINDS, _MERGES)).values
    tokens = _strings(values, _TOKENS)
    kinds = values.get(_KINDS, (1,) * len(tokens))
    if not tokens:
        raise GgufError("no tokens in the file")
    if not isinstance(kinds, tuple) or len(kinds) < len(tokens) or not isinstance(kinds[0], int):
        raise GgufError("token types are missing")
    return GgufVocabulary(
        model=_text(values, "tokenizer.ggml.model"),
        pre=_text(values, "tokenizer.ggml.pre"),
        name=_text(values, "general.name"),
        tokens=tokens,
        kinds=tuple(map(int, kinds)),
        merges=_strings(values, _MERGES),
        bos_id=_id(values, "tokenizer.ggml.bos_token_id"),
        eos_id=_id(values, "tokenizer.ggml.eos_token_id"),
        add_bos=_flag(values, "tokenizer.ggml.add_bos_token"),
        add_eos=_flag(values, "tokenizer.ggml.add_eos_token"),
        chat_template=_text(values, "tokenizer.chat_template"),
    )


def _fingerprint(found: Scan) -> str:
    """Without reading tensors: shapes, types and offsets are in the header, their bytes in the size."""
    whole = hashlib.blake2b(f"{found.file_bytes}:{found.digest}".encode(), digest_size=16)
    return whole.hexdigest()


def _text(values: Mapping[str, Value], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else ""


def _number(values: Mapping[str, Value], key: str) -> int:
    """A count that may be given per layer: then the largest."""
    value = values.get(key)
    items = value if isinstance(value, tuple) else (value,)
    return max((item for item in items if isinstance(item, int)), default=0)


def _id(values: Mapping[str, Value], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _flag(values: Mapping[str, Value], key: str) -> bool | None:
    value = values.get(key)
    return value if isinstance(value, bool) else None


def _strings(values: Mapping[str, Value], key: str) -> list[str]:
    value = values.get(key)
    if not isinstance(value, list):
        return []
    try:
        return [item.decode("utf-8") for item in value]
    except UnicodeDecodeError as error:
        raise GgufError(f"{key} is not UTF-8") from error
