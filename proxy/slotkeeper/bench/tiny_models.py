r"""The five tiny models, one per kind of memory (engine.md 12), and their output: well-behaved nonsense.

A plainly random model emits token sequences that BPE would have merged, so the text a client sends
back tokenizes differently and every chat diverges inside the assistant message (engine.md 12).
Greedy output here is whole " word" tokens, driven by a small state machine:
"<think>\n" -> reasoning words -> "\n</think>\n\n" -> answer words -> <|im_end|>. If a grammar
forbids <|im_end|> (tool_choice "required"), <tool_call> follows instead.
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

from slotkeeper.vocab.tokenizer import byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]
    Tensors = Mapping[str, Array]

# -- the vocabulary --------------------------------------------------------------------------------------
#
# The merges were trained once on parts of the Python standard library. They are data (`merges.txt`, one pair
# a line), so that the files are the same on every machine.

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


class Vocabulary:
    """Tokens, their types and their merges, in the order of their ids."""

    def __init__(self) -> None:
        lines = files(__package__).joinpath("merges.txt").read_text("utf-8").splitlines()
        pairs = (line.split(" ") for line in lines)
        self.merges: list[tuple[str, str]] = [(left, right) for left, right in pairs]
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
#
# The order of calls decides the order of the random numbers, and so the file's hash.

N_CTX_TRAIN: Final = 262144
D: Final = 64  # embedding width
FF: Final = 128
EPS: Final = 1e-6
# The first dimensions of the residual stream are flags (`ONE` and those after it). Layers read them and never
# write them, so the noise cannot spoil the output.
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


# -- the output: a state machine of words ----------------------------------------------------------------

# The state after the token just read: continue thinking or answering, end either, begin either, call a tool,
# a tool was called. ONE is always set: it is a bias.
ONE, GO_THINK, GO_ANSWER, END_THINK, END_ANSWER, START_THINK, START_ANSWER, CALL, CALLED = range(N_FLAGS)
FLAG: Final = 3.0
LOUD: Final = 24.0  # gain of a token that is certain in its state
EVERY: Final = 48  # one word in 48 ends its part: about 100 tokens an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """Token ids by their role."""

    think: list[int]  # " word", generated while thinking
    answer: list[int]
    think_first: list[int]  # "Word", the first of its part
    answer_first: list[int]
    newline: int
    think_open: int
    think_close: int
    end: int
    call: int
    called: int


def _roles(vocab: Vocabulary) -> _Words:
    words = vocab.words("\u0120[a-z]{3,}")  # U+0120 stands for the space
    firsts = vocab.words("[A-Z][a-z]{2,}")
    return _Words(
        think=words[0::2],
        answer=words[1::2],
        think_first=firsts[0:12:2],
        answer_first=firsts[1:12:2],
        newline=vocab.id[byte_alphabet()[10]],
        think_open=vocab.id["<think>\n"],
        think_close=vocab.id["\n</think>\n\n"],
        end=vocab.id["<|im_end|>"],
        call=vocab.id["<tool_call>"],
        called=vocab.id["</tool_call>"],
    )


def _set_flags(embedding: Array, words: _Words) -> None:
    """Give each token's embedding the state that it leads to."""
    embedding[:, ONE] = FLAG
    embedding[:, GO_ANSWER] = FLAG  # after anything unknown: answer words
    for ids, flag in (
        (words.think + words.think_first, GO_THINK),
        (words.think[5::EVERY], END_THINK),
        (words.answer[5::EVERY], END_ANSWER),
        ([words.think_open], START_THINK),
        ([words.newline, words.think_close], START_ANSWER),
        ([words.call], CALL),
        ([words.called], CALLED),
    ):
        embedding[ids, ONE + 1 : N_FLAGS] = 0.0
        embedding[ids, flag] = FLAG


def _set_gains(output: Array, words: _Words, tokens: list[str]) -> None:
    """Set in each token's output row the states in which the token is generated."""
    blank = [number for number, token in enumerate(tokens) if not token.strip("\u0120\u010a\u0109\u010d")]
    output[:, ONE] = -6.0  # a token without a role appears only if a grammar forces it:
    output[blank, ONE] = -12.0  # white space as the last choice,
    output[words.called, ONE] = -2.0  # the closing tag as the first
    output[words.think + words.answer, ONE] = 0.0
    for ids, flag, gain in (
        (words.think, GO_THINK, 10.0),
        (words.answer, GO_ANSWER, 10.0),
        (words.think_first, START_THINK, LOUD),
        (words.answer_first, START_ANSWER, LOUD),
        ([words.think_close], END_THINK, LOUD),
        ([words.end], END_ANSWER, LOUD),
        ([words.end], CALLED, LOUD),
        ([words.newline], CALL, LOUD),
        ([words.call], END_ANSWER, 16.0),  # the second choice, for a grammar that forbids <|im_end|>
    ):
        output[ids, flag] = gain


def speak(sheet: Sheet, *, scale: float = 1.0) -> None:
    """Write the token embedding (times `scale`), the output matrix and the last norm."""
    embedding, output = sheet.rows(), sheet.rows() * 0.4
    words = _roles(sheet.vocab)
    _set_flags(embedding, words)
    _set_gains(output, words, sheet.vocab.tokens)
    sheet.put("token_embd.weight", embedding * scale)
    sheet.put("output.weight", output)
    sheet.put("output_norm.weight", np.ones(D))


# -- one function for each file --------------------------------------------------------------------------

CONV = 4  # width of the short convolution before a recurrent layer
FAT_HEADS: Final = Heads(query=64, key_value=64, width=256)  # weights that take long to read: a dear pass
FAT_SWA_HEADS: Final = Heads(query=64, key_value=16, width=256)  # a checkpoint has the window of five layers
FAT_HYBRID_HEADS: Final = Heads(query=4, key_value=4, width=128)


def dense(path: Path, heads: Heads = TINY_HEADS) -> None:
    """qwen3: a plain KV cache in four layers."""
    sheet = Sheet(path, arch="qwen3", name=path.stem, layers=4, seed=1, heads=heads)
    sheet.describe_attention()
    speak(sheet)
    for layer in range(4):
        sheet.put_layer(
            layer, {**sheet.attention(0.9), "ffn_norm.weight": np.ones(D), **sheet.feed_forward(0.5)}
        )
    sheet.finish()


def fat_dense(path: Path) -> None:
    dense(path, FAT_HEADS)


def swa(path: Path, heads: Heads = TINY_HEADS, window_tokens: int = 256) -> None:
    """gemma3: a sliding window in five layers, full attention in the sixth."""
    sheet = Sheet(path, arch="gemma3", name=path.stem, layers=6, seed=2, heads=heads)
    sheet.describe_attention()
    sheet.gguf.add_sliding_window(window_tokens)
    speak(sheet, scale=D**-0.5)  # gemma multiplies embeddings by sqrt(D)
    no_flags = np.r_[np.zeros(N_FLAGS), np.ones(D - N_FLAGS)]  # its norms write the residual stream
    for layer in range(6):
        sheet.put_layer(
            layer,
            {
                **sheet.attention(1.0),
                "post_attention_norm.weight": 0.5 * no_flags,
                "ffn_norm.weight": np.ones(D),
                **sheet.feed_forward(1.0),
                "post_ffw_norm.weight": 0.2 * no_flags,
            },
        )
    sheet.finish()


def fat_swa(path: Path) -> None:
    swa(path, FAT_SWA_HEADS, window_tokens=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hybrid:
    """The size of a hybrid model. A checkpoint takes 4 bytes for each number of the recurrent state."""

    periods: int  # of four layers: three recurrent ones, then full attention
    k_heads: int
    v_heads: int
    state: int  # width: each value head has a state of `state` x `state` numbers
    rope_sections: tuple[int, int, int, int]
    heads: Heads


TINY_HYBRID: Final = _Hybrid(
    periods=1, k_heads=2, v_heads=4, state=32, rope_sections=(3, 3, 2, 0), heads=TINY_HEADS
)
FAT_HYBRID: Final = _Hybrid(
    periods=8, k_heads=8, v_heads=16, state=128, rope_sections=(12, 12, 8, 0), heads=FAT_HYBRID_HEADS
)


def hybrid(path: Path) -> None:
    """qwen35: Gated DeltaNet state in three layers, full attention in the fourth."""
    _qwen35(path, TINY_HYBRID, mtp=False)


def hybrid_mtp(path: Path) -> None:
    """qwen35: as `hybrid`, and one MTP (nextn) block, for `--spec-type draft-mtp`."""
    _qwen35(path, TINY_HYBRID, mtp=True)


def fat_hybrid(path: Path) -> None:
    _qwen35(path, FAT_HYBRID, mtp=False)


def fat_hybrid_mtp(path: Path) -> None:
    _qwen35(path, FAT_HYBRID, mtp=True)


def _qwen35(path: Path, size: _Hybrid, *, mtp: bool) -> None:
    layers = 4 * size.periods
    sheet = Sheet(path, arch="qwen35", name=path.stem, layers=layers + mtp, seed=3, heads=size.heads)
    sheet.describe_attention(rope_dim=size.heads.width // 2)
    sheet.gguf.add_rope_dimension_sections(list(size.rope_sections))
    sheet.describe_state(
        conv=CONV,
        inner=size.v_heads * size.state,
        state=size.state,
        ranks=size.v_heads,
        groups=size.k_heads,
    )
    sheet.gguf.add_full_attention_interval(4)
    if mtp:
        sheet.gguf.add_nextn_predict_layers(1)
    speak(sheet)
    for first in range(0, layers, 4):
        for layer in range(first, first + 3):
            sheet.put_layer(layer, _delta_net(sheet, size, quiet=mtp))
        last = {
            **sheet.attention(1.6, gated=True),
            "post_attention_norm.weight": np.ones(D),
            **sheet.feed_forward(0.3),
        }
        sheet.put_layer(first + 3, last)
    if mtp:
        sheet.put_layer(layers, {**last, **_nextn()})
    sheet.finish()


def _delta_net(sheet: Sheet, size: _Hybrid, *, quiet: bool) -> dict[str, Array]:
    """Return a recurrent layer; `quiet` for a model with an MTP block, which cannot see the layer's state."""
    k_heads, v_heads, state = size.k_heads, size.v_heads, size.state
    value = v_heads * state
    mixed = 2 * k_heads * state + value
    gain, ffn_gain = (0.15, 0.05) if quiet else (0.35, 0.2)
    a, dt_bias = slow_decay(v_heads)
    return {
        "attn_norm.weight": np.ones(D),
        "attn_qkv.weight": sheet.noise(mixed, D),
        "attn_gate.weight": sheet.noise(value, D),
        "ssm_conv1d.weight": sheet.noise(mixed, CONV),
        "ssm_dt.bias": dt_bias,
        "ssm_a": a,
        "ssm_beta.weight": sheet.noise(v_heads, D),
        "ssm_alpha.weight": sheet.noise(v_heads, D, 0.3),
        "ssm_norm.weight": np.ones(state),
        "ssm_out.weight": sheet.to_residual(value, gain),
        "post_attention_norm.weight": np.ones(D),
        **sheet.feed_forward(ffn_gain),
    }


def _nextn() -> dict[str, Array]:
    """Return the tensors that make a copy of the last layer an MTP block.

    The block reads the token and ignores the hidden state. So it drafts well while its own KV cache is
    complete, and worse otherwise.
    """
    return {
        "nextn.eh_proj.weight": np.concatenate([np.eye(D), np.zeros((D, D))], axis=1),
        "nextn.enorm.weight": np.ones(D),
        "nextn.hnorm.weight": np.ones(D),
        "nextn.shared_head_norm.weight": np.ones(D),
    }


def recurrent(path: Path) -> None:
    """mamba2: recurrent state only, no KV cache."""
    state, groups, heads, inner = 32, 1, 4, 2 * D
    mixed = inner + 2 * groups * state
    sheet = Sheet(path, arch="mamba2", name="tiny-recurrent", layers=4, seed=4)
    sheet.gguf.add_feed_forward_length(0)
    sheet.gguf.add_head_count(0)
    sheet.describe_state(conv=CONV, inner=inner, state=state, ranks=heads, groups=groups)
    speak(sheet)
    a, dt_bias = slow_decay(heads)
    for layer in range(4):
        sheet.put_layer(
            layer,
            {
                "attn_norm.weight": np.ones(D),
                "ssm_in.weight": sheet.noise(inner + mixed + heads, D),
                "ssm_conv1d.weight": sheet.noise(mixed, CONV),
                "ssm_conv1d.bias": np.zeros(mixed),
                "ssm_dt.bias": dt_bias,
                "ssm_a": a.reshape(heads, 1),
                "ssm_d": np.full((heads, 1), 0.02),
                "ssm_norm.weight": np.ones((groups, inner // groups)),
                "ssm_out.weight": sheet.to_residual(inner, 0.7),
            },
        )
    sheet.finish()
