"""A model file under construction: its vocabulary, its metadata, its seeded noise, its building blocks.

The merges were trained once on parts of the Python standard library. They are data (`merges.txt`, one pair a
line), so that the files are the same on every machine. The order of calls decides the order of the random
numbers, and so the file's hash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from gguf import GGUFWriter

from slotkeeper.vocab.bpe import byte_alphabet

N_VOCAB: Final = 3072
CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The two tokens with white space let the weights tell "<think>\n" from "assistant\n"; the text that clients
# see is the same as Qwen3's.
USER_DEFINED: Final = (
    "<think>", "</think>", "<think>\n", "\n</think>\n\n",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
_UNRANKED: Final = 1 << 30


class TokenKind(IntEnum):
    """The type of a token, with GGUF's numbers."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


def chat_template() -> str:
    """Return the chat template: ChatML with Qwen3's rules.

    It supports these `chat_template_kwargs`: enable_thinking=false (an empty think block in the generation
    prompt, as Qwen3.5), preserve_thinking=true (reasoning is kept in every turn, as Qwen3.6), plain=true
    (no think block at all: history renders exactly as it was generated).
    """
    return files(__package__).joinpath("chat.jinja").read_text("utf-8").rstrip("\n")


def _merges() -> list[tuple[str, str]]:
    lines = files(__package__).joinpath("merges.txt").read_text("utf-8").splitlines()
    return [(left, right) for left, right in (line.split(" ") for line in lines)]


class Vocabulary:
    """Tokens, their types and their merges, in the order of their ids."""

    def __init__(self) -> None:
        self.merges: list[tuple[str, str]] = _merges()
        self._rank = {pair: rank for rank, pair in enumerate(self.merges)}
        # dict.fromkeys: two merges may make the same token, which must have one id
        self.tokens: list[str] = list(dict.fromkeys([*byte_alphabet(), *(a + b for a, b in self.merges)]))
        self.kinds: list[int] = [TokenKind.NORMAL] * len(self.tokens)
        self._extend(CONTROL, TokenKind.CONTROL)
        self._extend(USER_DEFINED, TokenKind.USER_DEFINED)
        self._extend([f"<|reserved_{n}|>" for n in range(len(self.tokens), N_VOCAB)], TokenKind.UNUSED)
        self.id: dict[str, int] = {token: number for number, token in enumerate(self.tokens)}

    def _extend(self, tokens: tuple[str, ...] | list[str], kind: TokenKind) -> None:
        self.tokens.extend(tokens)
        self.kinds.extend([kind] * len(tokens))

    def words(self, pattern: str) -> list[int]:
        """Return the ids of normal tokens that match the pattern and that BPE makes of exactly their text.

        Only these tokenize to the same ids when a client sends the text back.
        """
        matches = re.compile(pattern).fullmatch
        return [
            number
            for number, token in enumerate(self.tokens)
            if self.kinds[number] == TokenKind.NORMAL and matches(token) and self._encode(token) == [token]
        ]

    def _encode(self, symbols: str) -> list[str]:
        parts = list(symbols)
        while len(parts) > 1:
            ranks = [self._rank.get(pair, _UNRANKED) for pair in pairwise(parts)]
            best = ranks.index(min(ranks))
            if ranks[best] == _UNRANKED:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return parts


# -- metadata, noise, building blocks --------------------------------------------------------------------

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]
    Tensors = Mapping[str, Array]

N_CTX_TRAIN: Final = 262144
D: Final = 64  # embedding width
FF: Final = 128
EPS: Final = 1e-6
# The first dimensions of the residual stream are flags (see `tiny_models`). Layers read them and never write
# them, so the noise cannot spoil the output.
N_FLAGS: Final = 9


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of a model: its KV cache takes 4 * key_value * width bytes for a token and layer."""

    query: int
    key_value: int
    width: int


TINY_HEADS: Final = Heads(query=2, key_value=1, width=32)


class Sheet:
    """Writes one GGUF file. Every tensor is float32; `seed` decides all noise."""

    def __init__(
        self, path: Path, *, arch: str, name: str, layers: int, seed: int, heads: Heads = TINY_HEADS
    ) -> None:
        self.heads = heads
        self.vocab = Vocabulary()
        self.random = np.random.default_rng(seed)
        self.gguf = GGUFWriter(str(path), arch)
        self.gguf.add_name(name)
        self.gguf.add_context_length(N_CTX_TRAIN)
        self.gguf.add_embedding_length(D)
        self.gguf.add_block_count(layers)
        self.gguf.add_layer_norm_rms_eps(EPS)
        self._describe_vocabulary()

    def _describe_vocabulary(self) -> None:
        vocab, gguf = self.vocab, self.gguf
        gguf.add_tokenizer_model("gpt2")
        gguf.add_tokenizer_pre("qwen2")
        gguf.add_token_list(vocab.tokens)
        gguf.add_token_types(vocab.kinds)
        gguf.add_token_merges([f"{left} {right}" for left, right in vocab.merges])
        gguf.add_bos_token_id(vocab.id["<|endoftext|>"])
        gguf.add_eos_token_id(vocab.id["<|im_end|>"])
        gguf.add_pad_token_id(vocab.id["<|endoftext|>"])
        gguf.add_add_bos_token(False)
        gguf.add_chat_template(chat_template())

    def describe_attention(self, *, rope_dim: int | None = None) -> None:
        gguf, heads = self.gguf, self.heads
        gguf.add_feed_forward_length(FF)
        gguf.add_head_count(heads.query)
        gguf.add_head_count_kv(heads.key_value)
        gguf.add_key_length(heads.width)
        gguf.add_value_length(heads.width)
        gguf.add_rope_dimension_count(rope_dim or heads.width)
        gguf.add_rope_freq_base(1e6)

    def describe_state(self, *, conv: int, inner: int, state: int, ranks: int, groups: int) -> None:
        gguf = self.gguf
        gguf.add_ssm_conv_kernel(conv)
        gguf.add_ssm_inner_size(inner)
        gguf.add_ssm_state_size(state)
        gguf.add_ssm_time_step_rank(ranks)
        gguf.add_ssm_group_count(groups)

    def put(self, name: str, values: ArrayLike) -> None:
        self.gguf.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))

    def put_layer(self, layer: int, tensors: Tensors) -> None:
        for name, values in tensors.items():
            self.put(f"blk.{layer}.{name}", values)

    def finish(self) -> None:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()

    def noise(self, n_out: int, n_in: int, gain: float = 1.0) -> Array:
        return self.random.standard_normal((n_out, n_in)) * float(gain / np.sqrt(n_in))

    def rows(self) -> Array:
        """Return noise with one row per token; the flags of every row are zero."""
        rows = self.random.standard_normal((N_VOCAB, D))
        rows[:, :N_FLAGS] = 0.0
        return rows

    def to_residual(self, n_in: int, gain: float) -> Array:
        """Return a projection to the residual stream that does not change the flags."""
        matrix = self.noise(D, n_in, gain)
        matrix[:N_FLAGS] = 0.0
        return matrix

    def attention(self, gain: float, *, gated: bool = False) -> dict[str, Array]:
        """Return sharp attention (q and k norms of 2.5): the output depends on the whole context."""
        query, key_value = (n * self.heads.width for n in (self.heads.query, self.heads.key_value))
        return {
            "attn_norm.weight": np.ones(D),
            "attn_q.weight": self.noise(query * (2 if gated else 1), D),
            "attn_k.weight": self.noise(key_value, D),
            "attn_v.weight": self.noise(key_value, D),
            "attn_output.weight": self.to_residual(query, gain),
            "attn_q_norm.weight": np.full(self.heads.width, 2.5),
            "attn_k_norm.weight": np.full(self.heads.width, 2.5),
        }

    def feed_forward(self, gain: float) -> dict[str, Array]:
        return {
            "ffn_gate.weight": self.noise(FF, D),
            "ffn_up.weight": self.noise(FF, D),
            "ffn_down.weight": self.to_residual(FF, gain),
        }


def slow_decay(heads: int) -> tuple[Array, Array]:
    """Return (A, dt_bias) with which the heads forget over about 30 to 10,000 tokens."""
    tau = np.geomspace(30.0, 10000.0, heads)
    return -np.ones(heads), np.log(np.expm1(1.0 / tau))  # softplus(dt_bias) = 1 / tau
