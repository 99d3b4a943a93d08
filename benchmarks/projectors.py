"""Tiny vision projectors with random weights for the tiny text models, and pictures for them.

| kind  | projector      | tokens of a picture                     | text around it                         |
|-------|----------------|-----------------------------------------|----------------------------------------|
| QWEN  | qwen3vl_merger | one for each 32 x 32 pixels, at least 8 | <|vision_start|> ... <|vision_end|>    |
| GEMMA | gemma3         | always 256                              | <start_of_image> ... <end_of_image>    |
| LLAVA | mlp            | always 64                               | none                                   |

All load with every tiny text model. The honest pairs are QWEN with tiny-hybrid (as Qwen3.5: M-RoPE, so that a
picture takes fewer positions than tokens) and GEMMA with tiny-swa; GEMMA with tiny-dense has a plain cache.
The chat templates need no marker: the server puts a text part in place of each image part.

Weights are seeded noise. What reaches the text model leaves its flag dimensions at zero, so that the text
stays well-behaved; another picture, or another seed, gives other logprobs.
"""

from __future__ import annotations

import base64
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFWriter

from slotkeeper.bench.tiny_models import N_FLAGS, D
from slotkeeper.engine import file_canary

WIDTH: Final = 32  # of the vision transformer
FF, HEADS, PATCH = 64, 2, 16


class Projector(StrEnum):
    """Kinds of projectors, by their names in GGUF files."""

    QWEN = "qwen3vl_merger"
    GEMMA = "gemma3"
    LLAVA = "mlp"


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Return a picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width * 3), dtype=np.uint8)
    return file_canary.png(width, height, pixels.tobytes())


def data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def image(picture: bytes) -> dict[str, Any]:
    """Return an image as a part of a chat's message."""
    return {"type": "image_url", "image_url": {"url": data_url(picture)}}


class _Weights:
    """One projector's file under construction."""

    def __init__(self, path: Path, kind: Projector, seed: int) -> None:
        self.writer, self._random = GGUFWriter(str(path), "clip"), np.random.default_rng(seed)
        self.kind, self.side = kind, 32 if kind is Projector.GEMMA else 8
        self.layers = 2 if kind is Projector.LLAVA else 1  # llava reads the last block but one
        writer = self.writer
        writer.add_name(path.stem)
        writer.add_bool("clip.has_vision_encoder", True)
        writer.add_clip_projector_type(kind.value)
        writer.add_vision_projection_dim(D)
        writer.add_vision_image_size(self.side * PATCH)
        writer.add_vision_patch_size(PATCH)
        writer.add_vision_embedding_length(WIDTH)
        writer.add_vision_feed_forward_length(FF)
        writer.add_vision_block_count(self.layers)
        writer.add_vision_head_count(HEADS)
        writer.add_vision_attention_layernorm_eps(1e-6)
        writer.add_vision_image_mean([0.5] * 3)
        writer.add_vision_image_std([0.5] * 3)

    def add(self, name: str, values: Any) -> None:
        self.writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))

    def noise(self, *shape: int, gain: float = 1.0) -> Any:
        return self._random.standard_normal(shape) * (gain / np.sqrt(shape[-1]))

    def linear(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        self.add(f"{name}.weight", self.noise(n_out, n_in, gain=gain))
        self.add(f"{name}.bias", np.zeros(n_out))

    def norm(self, name: str) -> None:
        self.add(f"{name}.weight", np.ones(WIDTH))
        self.add(f"{name}.bias", np.zeros(WIDTH))

    def to_text(self, n_in: int, gain: float) -> Any:
        values = self.noise(D, n_in, gain=gain)
        values[:N_FLAGS] = 0.0
        return values

    def patches(self) -> None:
        """Qwen's embedding is a convolution over two frames, stored as two tensors."""
        frames = 2 if self.kind is Projector.QWEN else 1
        values = self._random.standard_normal((WIDTH, 3, PATCH, PATCH)) * (4 / np.sqrt(3 * PATCH * PATCH))
        for name in ("v.patch_embd.weight", "v.patch_embd.weight.1")[:frames]:
            self.add(name, values)
        self.add("v.patch_embd.bias", np.zeros(WIDTH))
        self.add("v.position_embd.weight", self._random.standard_normal((self.side**2, WIDTH)) * 0.2)

    def block(self, number: int) -> None:
        name = f"v.blk.{number}."
        self.norm(f"{name}ln1")
        self.norm(f"{name}ln2")
        if self.kind is Projector.QWEN:
            self.linear(f"{name}attn_qkv", 3 * WIDTH, WIDTH)
        else:
            for part in ("attn_q", "attn_k", "attn_v"):
                self.linear(f"{name}{part}", WIDTH, WIDTH)
        self.linear(f"{name}attn_out", WIDTH, WIDTH, 0.5)
        self.linear(f"{name}ffn_up", FF, WIDTH)
        self.linear(f"{name}ffn_down", WIDTH, FF, 0.5)

    def end(self) -> None:
        """Add the tensors between the transformer and the text model."""
        self.norm("v.post_ln")
        match self.kind:
            case Projector.QWEN:
                self.writer.add_vision_spatial_merge_size(2)
                self.linear("mm.0", 4 * WIDTH, 4 * WIDTH)
                self.add("mm.2.weight", self.to_text(4 * WIDTH, 2.0))
            case Projector.GEMMA:
                self.writer.add_uint32("clip.vision.projector.scale_factor", 2)
                self.add("mm.input_projection.weight", self.to_text(WIDTH, 1.0).T)
                self.add("mm.soft_emb_norm.weight", np.ones(WIDTH))
                return
            case Projector.LLAVA:
                self.norm("v.pre_ln")
                self.linear("mm.0", D, WIDTH)
                self.add("mm.2.weight", self.to_text(D, 2.0))
        self.add("mm.2.bias", np.zeros(D))

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def projector(kind: Projector, folder: Path, seed: int = 0) -> Path:
    """Write the file of a projector; the same kind and seed always give the same bytes."""
    path = folder / f"tiny-mmproj-{kind}-{seed}.gguf"
    weights = _Weights(path, kind, seed)
    weights.patches()
    for number in range(weights.layers):
        weights.block(number)
    weights.end()
    weights.close()
    return path
