r"""The five tiny models, one per kind of memory (engine.md 12), and their output: well-behaved nonsense.

A plainly random model emits token sequences that BPE would have merged, so the text a client sends
back tokenizes differently and every chat diverges inside the assistant message (engine.md 12).
Greedy output here is whole " word" tokens, driven by a small state machine:
"<think>\n" -> reasoning words -> "\n</think>\n\n" -> answer words -> <|im_end|>. If a grammar
forbids <|im_end|> (tool_choice "required"), <tool_call> follows instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from slotkeeper.bench.tiny_weights import N_FLAGS, TINY_HEADS, D, Heads, Sheet, slow_decay
from slotkeeper.vocab.bpe import byte_alphabet

if TYPE_CHECKING:
    from pathlib import Path

    from slotkeeper.bench.tiny_weights import Array, Vocabulary

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
