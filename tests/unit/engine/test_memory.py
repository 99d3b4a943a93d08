"""How much memory checkpoints need, and how many `up` and `doctor` advise."""

import re
from collections import deque
from dataclasses import replace
from itertools import product
from math import inf
from types import MappingProxyType, SimpleNamespace

import pytest

from slotkeeper.bench.models import Fat, Tiny, build
from slotkeeper.cli import up
from slotkeeper.engine.child import memory
from slotkeeper.engine.child.launch import EngineKind
from slotkeeper.engine.child.memory import Caches, checkpoint_bytes, free_memory, state_bytes, token_bytes
from slotkeeper.engine.findings import TOO_LITTLE, SaveSupport, Severity, examine
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory
from slotkeeper.settings import Settings
from slotkeeper.vocab.gguf import GgufHeader, read_header

GIB, MIB = 1 << 30, 1 << 20
FREE_GIB = [0.1, 1, 2, 4, 8, 16, 18, 20, 24, 32, 64, 256]
KNOWN = {"--parallel", "--ctx-size", "--ctx-checkpoints", "--cache-ram"}


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
DENSE = replace(QWEN_27B, has_state=False)
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


def most_memory(*, slots, checkpoints, each, slot_bytes, ram_cache_mib):
    """Play an engine (engine.md 4) whose RAM cache is full when each slot, full too, is copied into it."""
    held, entry = slots * checkpoints * each, slot_bytes + each + checkpoints * each
    if ram_cache_mib <= 0:
        return inf if ram_cache_mib else held
    cache, size, most = deque([MIB] * ram_cache_mib), ram_cache_mib * MIB, 0
    for _ in range(3):
        cache.append(entry)
        size += entry
        most = max(most, size)
        while len(cache) > 1 and size > ram_cache_mib * MIB:
            size -= cache.popleft()
    return held + most


@pytest.mark.parametrize(
    "words", ["", "-cram 16384", "-cram -1", "-ctxcp 100", "-np 4 -kvu", "-cram 16384 -ctxcp 100"]
)
def test_what_up_chooses_fits_into_the_free_memory_or_a_warning_says_that_it_may_not(
    words, tmp_path, monkeypatch
):
    words, path, size = words.split(), tmp_path / "model.gguf", 17 * GIB
    with path.open("wb") as file:
        file.truncate(size)  # sparse
    engine = SimpleNamespace(kind=EngineKind.LLAMA_SERVER, known=KNOWN, eager_thinning=False, build=0)
    monkeypatch.setattr(up, "find_engine", lambda _: engine)
    settings, users = Settings(slot_dir=tmp_path / "slots"), {"-cram", "-ctxcp"} & set(words)
    for free_gib, slots, model in product(FREE_GIB, [1, 2, 8], [QWEN_27B, DENSE]):
        monkeypatch.setattr(up, "free_memory", lambda free=free_gib: int(free * GIB))
        monkeypatch.setattr(up, "header_of", lambda _, model=model: model)
        plan = up.launch_plan(settings, path, None, slots=slots, context_tokens=32768, extra=words)
        flags = plan.flags
        full = state_bytes(model, flags.n_ctx)
        most = most_memory(
            slots=flags.n_parallel,
            checkpoints=flags.checkpoint_cap,
            each=checkpoint_bytes(model),
            slot_bytes=full if flags.unified else full // flags.n_parallel,
            ram_cache_mib=flags.cache_ram,
        )
        case = (free_gib, slots, model.has_state, flags.checkpoint_cap, flags.cache_ram, plan.memory_short)
        left = free_gib * GIB - size - full - flags.n_parallel * checkpoint_bytes(model)
        assert bool(plan.memory_short) == (most > left and len(users) < 2), case
        if plan.memory_short and not users:  # even the least is too much
            assert (flags.checkpoint_cap, flags.cache_ram) == (1 if model.has_state else 64, 0), case


def test_enough_memory_leaves_the_defaults_and_too_little_the_least():
    def chosen(free_bytes):
        known = {"slots": 2, "checkpoint_bytes": checkpoint_bytes(QWEN_27B), "slot_bytes": GIB}
        caches = Caches(**known, free_bytes=free_bytes)
        count = caches.affordable_checkpoints
        return count, caches.affordable_ram_cache(count, 8192)

    assert chosen(None) == (64, 8192)
    assert chosen(256 * GIB) == (64, 8192)
    assert chosen(24 * GIB) == (20, 8192)
    assert chosen(8 * GIB) == (6, 4096)
    assert chosen(6 * GIB) == (5, 2726)
    assert chosen(0) == (1, 0)


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


def findings(cap=64, *, slots=2, cram=8192, memory=Memory.HYBRID, routed=False, **known):
    """Return what doctor advises about memory for an engine with these flags."""
    traits = EngineTraits(memory=memory, n_slots=slots, n_ctx=32768, token_bytes=token_bytes(QWEN_27B))
    flags = EngineFlags.parse(["-np", str(slots), "-cram", str(cram), "-ctxcp", str(cap)])
    found = examine(
        flags.traits_into(traits),
        flags,
        {"chat_template": "x"},
        slots_ok=True,
        metrics_ok=True,
        slot_save=SaveSupport.YES,
        routed=routed,
        **known,
    )
    return [one for one in found if one.trap in {"checkpoints", "room", "ram-cache", "one-slot"}]


SIZE = {"checkpoint_bytes": checkpoint_bytes(QWEN_27B)}


def test_doctor_says_in_one_finding_how_much_is_needed_and_what_to_set():
    (said,) = findings(cram=8192, **SIZE, free_bytes=8 * GIB)
    assert said.severity is Severity.WARN
    assert (
        "64 checkpoints of 149.6 MiB in each of 2 slots (18.7 GiB) and a RAM cache of 8192 MiB with a full "
        "slot's copy (23.0 GiB) need up to 41.7 GiB; 8.0 GiB are free"
    ) in said.what
    assert said.do == "Use --ctx-checkpoints 6 and --cache-ram 3300."
    (unlimited,) = findings(4, cram=-1, **SIZE, free_bytes=24 * GIB)
    assert "need up to all memory" in unlimited.what


def test_many_checkpoints_are_no_fault_where_their_size_is_unknown_or_memory_suffices():
    assert not findings(128)
    assert not findings(128, **SIZE, free_bytes=512 * GIB)


@pytest.mark.parametrize("free_gib", FREE_GIB)
@pytest.mark.parametrize("memory", [Memory.HYBRID, Memory.DENSE])
def test_who_follows_doctor_to_the_letter_never_needs_more_memory_than_is_free(free_gib, memory):
    each = 0 if memory is Memory.DENSE else SIZE["checkpoint_bytes"]
    known = {"memory": memory, "checkpoint_bytes": each, "free_bytes": int(free_gib * GIB)}
    for cap, slots, cram, routed in product([0, 1, 4, 32, 64, 200], [1, 2, 8], [0, 1024, 8192, -1], [0, 1]):
        engine = {"cap": cap, "slots": slots, "cram": cram}
        advice = " ".join(one.do for one in findings(**engine, routed=routed, **known))
        for name, flag in {"cap": "--ctx-checkpoints", "slots": "-np", "cram": "--cache-ram"}.items():
            values = set(re.findall(rf"{flag} (\d+)", advice))
            engine[name] = int(*values) if values else engine[name]
        most = most_memory(
            slots=engine["slots"],
            checkpoints=engine["cap"],
            each=each,
            slot_bytes=token_bytes(QWEN_27B) * 32768,
            ram_cache_mib=engine["cram"],
        )
        too_much, case = most > known["free_bytes"], (cap, slots, cram, routed, engine, advice)
        assert (TOO_LITTLE in advice) == too_much, case
        assert not too_much or (engine["cap"], engine["cram"]) == (1, 0), case
        again = "".join(one.do for one in findings(**engine, routed=routed, **known))
        assert again in {"", TOO_LITTLE}, case
