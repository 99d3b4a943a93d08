"""Which kind of memory llama.cpp gives a model, from its architecture and its metadata.

The lists are those of llama.cpp (`llm_arch_is_recurrent`, `llm_arch_is_hybrid`, and where `swa_type`
is set). What we do not know is UNKNOWN, which is treated as hybrid, the careful choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from slotkeeper.scheduler.engine_model import Memory

if TYPE_CHECKING:
    from slotkeeper.vocab.gguf import GgufHeader

RECURRENT: Final = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
HYBRID: Final = frozenset(
    {
        "falcon-h1", "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "nemotron_h",
        "nemotron_h_moe", "plamo2", "qwen35", "qwen35moe", "qwen3next",
    }
)  # fmt: skip
# Sliding window where the file gives one; with the window that llama.cpp takes where it does not
SLIDING: Final = frozenset(
    {
        "afmoe", "cohere2", "cohere2moe", "exaone-moe", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt-oss",
        "mimo2", "olmo2", "olmo3", "plamo3", "smallthinker", "step35",
    }
)  # fmt: skip
DEFAULT_WINDOW: Final = {"gemma2": 4096, "llama4": 8192, "smallthinker": 4096}
IGNORES_WINDOW: Final = frozenset({"phi3", "phimoe"})  # "Phi SWA is currently disabled"
EXAONE4_LAYERS: Final = 64  # only the 32B slides; llama.cpp tells it by its number of layers


def memory_kind(header: GgufHeader) -> tuple[Memory, int]:
    """Return the memory kind and the window in tokens (0 where nothing slides).

    1 recurrent by name; 2 hybrid by name, or a state key (with attention: hybrid, without: recurrent);
    3 a window, by name; 4 a window that we cannot place: unknown; 5 dense.
    """
    name, window = header.architecture, header.sliding_window
    if name in RECURRENT:  # (1)
        return Memory.RECURRENT, 0
    if name in HYBRID:  # (2)
        return Memory.HYBRID, window
    if header.has_state:
        return (Memory.HYBRID, window) if header.head_count else (Memory.RECURRENT, 0)
    if name == "llama4":  # (3) chunked: the window is the chunk
        window = _llama4_chunk(header)
        return (Memory.SWA, window) if window else (Memory.DENSE, 0)
    if name == "exaone4":
        slides = header.block_count == EXAONE4_LAYERS
        return (Memory.SWA, window or 4096) if slides else _without_name(header, window)
    if name in SLIDING:
        window = window or DEFAULT_WINDOW.get(name, 0)
        return (Memory.SWA, window) if window else (Memory.DENSE, 0)
    if name in IGNORES_WINDOW:
        return Memory.DENSE, 0
    return _without_name(header, window)


def _without_name(header: GgufHeader, window: int) -> tuple[Memory, int]:
    if window or not header.architecture or not header.head_count:  # (4)
        return Memory.UNKNOWN, window
    if header.full_attention_interval or _has_indexer(header):
        return Memory.UNKNOWN, 0
    return Memory.DENSE, 0  # (5)


def _llama4_chunk(header: GgufHeader) -> int:
    value = header.values.get("llama4.attention.chunk_size", DEFAULT_WINDOW["llama4"])
    return value if isinstance(value, int) else 0


def _has_indexer(header: GgufHeader) -> bool:
    """Sparse attention keeps a second cache for its indexer; how that can be cut was not measured."""
    return any(".attention.indexer." in key for key in header.values)
