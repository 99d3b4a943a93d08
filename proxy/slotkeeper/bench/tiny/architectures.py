"""The five tiny models, one per kind of memory (engine.md 12). Each function writes one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slotkeeper.bench.tiny.speech import speak
from slotkeeper.bench.tiny.weights import HEAD_DIM, N_FLAGS, D, Sheet, slow_decay

if TYPE_CHECKING:
    from pathlib import Path

    from slotkeeper.bench.tiny.weights import Array

CONV = 4  # width of the short convolution before a recurrent layer


def dense(path: Path) -> None:
    """qwen3: a plain KV cache in four layers."""
    sheet = Sheet(path, arch="qwen3", name="tiny-dense", layers=4, seed=1)
    sheet.describe_attention()
    speak(sheet)
    for layer in range(4):
        sheet.put_layer(
            layer, {**sheet.attention(0.9), "ffn_norm.weight": np.ones(D), **sheet.feed_forward(0.5)}
        )
    sheet.finish()


def swa(path: Path) -> None:
    """gemma3: a window of 256 tokens in five layers, full attention in the sixth."""
    sheet = Sheet(path, arch="gemma3", name="tiny-swa", layers=6, seed=2)
    sheet.describe_attention()
    sheet.gguf.add_sliding_window(256)
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


def hybrid(path: Path) -> None:
    """qwen35: Gated DeltaNet state in three layers, full attention in the fourth."""
    _qwen35(path, name="tiny-hybrid", mtp=False)


def hybrid_mtp(path: Path) -> None:
    """The same and one MTP (nextn) block, for `--spec-type draft-mtp`."""
    _qwen35(path, name="tiny-hybrid-mtp", mtp=True)


def _qwen35(path: Path, *, name: str, mtp: bool) -> None:
    k_heads, v_heads, state = 2, 4, 32
    sheet = Sheet(path, arch="qwen35", name=name, layers=4 + mtp, seed=3)
    sheet.describe_attention(rope_dim=HEAD_DIM // 2)
    sheet.gguf.add_rope_dimension_sections([3, 3, 2, 0])
    sheet.describe_state(conv=CONV, inner=v_heads * state, state=state, ranks=v_heads, groups=k_heads)
    sheet.gguf.add_full_attention_interval(4)
    if mtp:
        sheet.gguf.add_nextn_predict_layers(1)
    speak(sheet)
    for layer in range(3):
        sheet.put_layer(layer, _delta_net(sheet, k_heads, v_heads, state, quiet=mtp))
    last = {
        **sheet.attention(1.6, gated=True),
        "post_attention_norm.weight": np.ones(D),
        **sheet.feed_forward(0.3),
    }
    sheet.put_layer(3, last)
    if mtp:
        sheet.put_layer(4, {**last, **_nextn()})
    sheet.finish()


def _delta_net(sheet: Sheet, k_heads: int, v_heads: int, state: int, *, quiet: bool) -> dict[str, Array]:
    """A recurrent layer; `quiet` where an MTP block follows, which cannot see this layer's state."""
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
    """What makes a copy of the last layer an MTP block.

    It takes the token and ignores the hidden state, so it drafts well as long as its own KV cache is
    whole, and worse when it is not.
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
