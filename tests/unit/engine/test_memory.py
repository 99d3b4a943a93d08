"""How much memory checkpoints need, and how many `up` and `doctor` advise."""

from types import MappingProxyType

import pytest

from slotkeeper.bench.models import Fat, Tiny, build
from slotkeeper.engine.child import memory
from slotkeeper.engine.child.memory import checkpoint_bytes, free_memory, plan_memory, state_bytes
from slotkeeper.engine.findings import SaveSupport, Severity, examine
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory
from slotkeeper.vocab.gguf import GgufHeader, read_header

GIB, MIB = 1 << 30, 1 << 20
NO_FLAGS = EngineFlags.parse([])


def header(architecture="qwen35", blocks=64, *, interval=4, **values):
    named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}
    return GgufHeader(
        architecture=architecture, name="", context_length=262144, block_count=blocks, head_count=24,
        sliding_window=0, has_state=True, full_attention_interval=interval, nextn_predict_layers=0,
        vocab_size=0, chat_template="", fingerprint="", values=MappingProxyType(named),
    )  # fmt: skip


# The model of llama.cpp's pull request 24110, whose log has 149.6 MiB for each checkpoint.
QWEN_27B = header(
    attention__head_count_kv=4, attention__key_length=256, attention__value_length=256,
    ssm__conv_kernel=4, ssm__inner_size=6144, ssm__state_size=128, ssm__group_count=16,
)  # fmt: skip
EVERY_LAYER_BOTH = header(
    "falcon-h1", 10, interval=0, attention__head_count_kv=2,
    ssm__conv_kernel=4, ssm__inner_size=128, ssm__state_size=32, ssm__group_count=1,
)  # fmt: skip
SOME_LAYERS_ATTEND = header(
    "granitehybrid", 4, interval=0, attention__head_count_kv=(0, 0, 2, 0),
    ssm__conv_kernel=4, ssm__inner_size=128, ssm__state_size=32, ssm__group_count=1,
)  # fmt: skip
ONE_LAYER = 4 * (32 * 128 + 3 * (128 + 2 * 32))


def test_a_checkpoint_of_a_real_model_has_the_size_in_its_engines_log():
    assert checkpoint_bytes(QWEN_27B) / MIB == pytest.approx(149.6, abs=0.1)


@pytest.mark.parametrize(("model", "layers"), [(EVERY_LAYER_BOTH, 10), (SOME_LAYERS_ATTEND, 3)])
def test_layers_with_a_recurrent_state_are_counted(model, layers):
    assert checkpoint_bytes(model) == layers * ONE_LAYER


@pytest.mark.parametrize(
    ("model", "mib"),  # as engines log it; with a sliding window one of six layers is counted in vain
    [
        (Tiny.DENSE, 0.0), (Tiny.SWA, 0.159), (Tiny.HYBRID, 0.056), (Tiny.HYBRID_MTP, 0.056),
        (Tiny.RECURRENT, 0.071), (Fat.SWA, 80.0), (Fat.HYBRID, 25.126),
    ],
)  # fmt: skip
def test_a_checkpoint_is_not_underestimated(model, mib):
    assert 0.99 * mib <= checkpoint_bytes(read_header(build(model))) / MIB <= 1.35 * mib


def test_a_full_window_needs_no_checkpoints():
    swa = read_header(build(Tiny.SWA))
    assert checkpoint_bytes(swa, EngineFlags.parse(["--swa-full"])) == 0


@pytest.mark.parametrize("free_gib", [0.1, 2, 8, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("model_gib", [0, 17])
def test_what_up_chooses_fits_into_the_free_memory(free_gib, slots, model_gib):
    free, cells = int(free_gib * GIB), slots * 32768
    plan = plan_memory(
        QWEN_27B, NO_FLAGS, model_bytes=model_gib * GIB, slots=slots, cells=cells, free_bytes=free
    )
    needs = slots * plan.checkpoints * checkpoint_bytes(QWEN_27B)
    needs += MIB * (NO_FLAGS.cache_ram if plan.ram_cache_mib is None else plan.ram_cache_mib)
    left = free - model_gib * GIB - state_bytes(QWEN_27B, cells)
    if left > 0 and plan.checkpoints > 1:
        assert needs <= left
    assert 1 <= plan.checkpoints <= 64
    assert plan.checkpoints == 64 or plan.ram_cache_mib != 0 or left < 2 * GIB


def test_enough_memory_leaves_the_defaults_and_too_little_the_least():
    known = {"model_bytes": 0, "slots": 2, "cells": 0}
    assert plan_memory(QWEN_27B, NO_FLAGS, **known, free_bytes=None) == memory.MemoryPlan(64, None)
    assert plan_memory(QWEN_27B, NO_FLAGS, **known, free_bytes=256 * GIB) == memory.MemoryPlan(64, None)
    assert plan_memory(QWEN_27B, NO_FLAGS, **known, free_bytes=24 * GIB) == memory.MemoryPlan(20, None)
    assert plan_memory(QWEN_27B, NO_FLAGS, **known, free_bytes=8 * GIB) == memory.MemoryPlan(6, 4096)
    assert plan_memory(QWEN_27B, NO_FLAGS, **known, free_bytes=0) == memory.MemoryPlan(1, 0)


def test_a_container_has_what_its_control_group_leaves(tmp_path, monkeypatch):
    for name, text in {
        "INFO": "MemTotal: 9 kB\nMemAvailable: 9000 kB\nMapped: 808 kB\nHugePages_Free: 0\n",
        "max": "6000000",
        "used": "1000000",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "MEMORY_INFO", tmp_path / "INFO")
    monkeypatch.setattr(memory, "GROUP_LIMIT", tmp_path / "missing")
    monkeypatch.setattr(memory, "GROUP_USED", tmp_path / "used")
    assert free_memory() == 8192 * 1024
    monkeypatch.setattr(memory, "GROUP_LIMIT", tmp_path / "max")
    assert free_memory() == 5000000
    (tmp_path / "max").write_text("max")
    assert free_memory() == 8192 * 1024
    monkeypatch.setattr(memory, "MEMORY_INFO", tmp_path / "missing")
    assert free_memory() is None


def findings(cap, **known):
    traits = EngineTraits(memory=Memory.HYBRID, n_slots=2, checkpoint_cap=cap)
    found = examine(
        traits,
        NO_FLAGS,
        {"chat_template": "x"},
        slots_ok=True,
        metrics_ok=True,
        slot_save=SaveSupport.YES,
        **known,
    )
    return [one for one in found if one.trap == "checkpoints"]


def test_doctor_says_how_much_the_checkpoints_need_and_how_many_to_use():
    (said,) = findings(64, checkpoint_bytes=checkpoint_bytes(QWEN_27B), free_bytes=24 * GIB)
    assert (said.severity, "--ctx-checkpoints 20" in said.do) == (Severity.WARN, True)
    assert "149.6 MiB: 64 in each of 2 slots need 18.7 GiB of 24.0 GiB that are free" in said.what


def test_many_checkpoints_are_no_fault_where_their_size_is_unknown_or_memory_suffices():
    assert not findings(128)
    assert not findings(128, checkpoint_bytes=checkpoint_bytes(QWEN_27B), free_bytes=512 * GIB)


def test_following_doctor_ends_its_advice():
    known = {"checkpoint_bytes": checkpoint_bytes(QWEN_27B), "free_bytes": 24 * GIB}
    assert findings(4, **known)[0].do == "Use --ctx-checkpoints 20."
    assert not findings(20, **known)
    assert not findings(6, checkpoint_bytes=known["checkpoint_bytes"], free_bytes=8 * GIB)
