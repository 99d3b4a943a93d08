"""Engines of benchmarks have the flags of `slotkeeper up`, and those that benchmarks need."""

from __future__ import annotations

import pytest

from slotkeeper.bench.lab import up_flags
from slotkeeper.engine.child import launch
from slotkeeper.engine.child.launch import EngineBinary, EngineKind
from slotkeeper.engine.flags import EngineFlags

HELP = "\n".join(
    f"{flag} N  what it does"
    for flag in ("--model", "--port", "--parallel", "--ctx-size", "--slot-save-path", "--ctx-checkpoints")
)


@pytest.mark.parametrize(
    ("kind", "thins_at_every_task"), [(EngineKind.SKULK, True), (EngineKind.XLLAMACPP, False)]
)
def test_a_benchmark_engine_has_the_flags_of_the_up_command(kind, thins_at_every_task, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "output_of", lambda *_: HELP + "\n--checkpoint-min-step N  what it does")
    line = up_flags(EngineBinary(kind=kind, program=()), tmp_path / "m.gguf", tmp_path, context_tokens=4096)
    flags = EngineFlags.parse(line)
    assert (flags.checkpoint_cap, flags.n_parallel, flags.n_ctx) == (64, 2, 8192)
    assert (flags.slot_save_path, flags.model) == (tmp_path, tmp_path / "m.gguf")
    assert ("--checkpoint-min-step" in line, flags.checkpoint_min_step == 0) == (thins_at_every_task,) * 2
    assert line[-2:] == ["--device", "none"]


def test_an_engine_of_the_user_keeps_its_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "output_of", lambda *_: HELP)
    line = up_flags(EngineBinary(kind=EngineKind.LLAMA_SERVER, program=("x",)), tmp_path / "m.gguf", tmp_path)
    assert "--device" not in line
