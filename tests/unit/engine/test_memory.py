"""The memory kind is the one that llama.cpp gives the model, or unknown."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from slotkeeper.bench.models import Tiny, build
from slotkeeper.engine.traits import memory_kind
from slotkeeper.scheduler.engine_model import Memory
from slotkeeper.vocab.gguf import GgufHeader, read_header


@pytest.mark.parametrize(
    ("tiny", "kind"),
    [
        (Tiny.DENSE, (Memory.DENSE, 0)),
        (Tiny.SWA, (Memory.SWA, 256)),
        (Tiny.HYBRID, (Memory.HYBRID, 0)),
        (Tiny.HYBRID_MTP, (Memory.HYBRID, 0)),
        (Tiny.RECURRENT, (Memory.RECURRENT, 0)),
    ],
)
def test_each_tiny_model_has_the_memory_kind_for_which_it_was_built(
    tiny: Tiny, kind: tuple[Memory, int]
) -> None:
    assert memory_kind(read_header(build(tiny))) == kind


@cache
def plain() -> GgufHeader:
    return replace(read_header(build(Tiny.DENSE)), architecture="llama", head_count=32, values={})


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({}, (Memory.DENSE, 0)),
        ({"sliding_window": 4096}, (Memory.UNKNOWN, 4096)),
        ({"architecture": "phi3", "sliding_window": 2048}, (Memory.DENSE, 0)),
        ({"architecture": "gemma2"}, (Memory.SWA, 4096)),
        ({"architecture": "gemma3"}, (Memory.DENSE, 0)),
        ({"architecture": "gpt-oss", "sliding_window": 128}, (Memory.SWA, 128)),
        ({"architecture": "exaone4", "block_count": 64}, (Memory.SWA, 4096)),
        ({"architecture": "exaone4", "block_count": 30}, (Memory.DENSE, 0)),
        ({"architecture": "llama4"}, (Memory.SWA, 8192)),
        ({"architecture": "llama4", "values": {"llama4.attention.chunk_size": 0}}, (Memory.DENSE, 0)),
        ({"architecture": "jamba", "has_state": True}, (Memory.HYBRID, 0)),
        ({"architecture": "lfm2", "sliding_window": 512}, (Memory.HYBRID, 512)),
        ({"architecture": "rwkv7", "head_count": 0}, (Memory.RECURRENT, 0)),
        ({"architecture": "new", "has_state": True}, (Memory.HYBRID, 0)),
        ({"architecture": "new", "has_state": True, "head_count": 0}, (Memory.RECURRENT, 0)),
        ({"architecture": "new", "full_attention_interval": 4}, (Memory.UNKNOWN, 0)),
        ({"architecture": "new", "values": {"new.attention.indexer.top_k": 4}}, (Memory.UNKNOWN, 0)),
        ({"architecture": ""}, (Memory.UNKNOWN, 0)),
        ({"head_count": 0}, (Memory.UNKNOWN, 0)),
    ],
    ids=str,
)
def test_an_unrecognised_model_has_an_unknown_memory_kind(
    facts: dict[str, Any], kind: tuple[Memory, int]
) -> None:
    assert memory_kind(replace(plain(), **facts)) == kind
