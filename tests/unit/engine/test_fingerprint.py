"""What changes a fingerprint, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotkeeper.engine.fingerprint import (
    OF_PROCESS,
    SAMPLES,
    Identity,
    about_flags,
    about_model,
    adapters_of,
    parts,
    projector_of,
    sampled,
    streams_of,
)
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import EngineTraits

PROPS = {"model_path": "/models/a.gguf", "model_ftype": "Q8_0", "total_slots": 2, "media_marker": "random"}
ENTRY = {"meta": {"n_vocab": 9, "n_params": 5, "n_ctx": 4096}}


def name(line: str = "", *, props=PROPS, entry=ENTRY, adapters=(), streams=2, version=4) -> str:
    identity = Identity(
        model=about_model(None, None, props, entry),
        flags=about_flags(EngineFlags.parse(line.split())),
        adapters=adapters_of(adapters),
        streams=streams,
    )
    return identity.fingerprint(version)


@pytest.mark.parametrize(
    "line",
    [
        "-ctk q8_0",
        "-ctv q8_0",
        "-fa on",
        "--swa-full",
        "--rope-scaling yarn",
        "--rope-scale 2",
        "--rope-freq-base 1000000",
        "--rope-freq-scale 0.5",
        "--yarn-orig-ctx 4096",
        "--yarn-ext-factor 0",
        "--yarn-attn-factor 1",
        "--yarn-beta-slow 1",
        "--yarn-beta-fast 32",
        "--override-kv qwen3.rope.freq_base=float:5",
        "--control-vector v.gguf",
        "--control-vector-layer-range 1 3",
        "--spec-type draft-mtp",
        "-md draft.gguf",
        "-ctkd q8_0",
        "-ctvd q8_0",
    ],
)
def test_a_flag_that_changes_a_state_changes_the_fingerprint(line):
    assert name(line) != name()


@pytest.mark.parametrize(
    "line", ["-b 256 -ub 128", "-c 8192", "-ctxcp 7 -cms 0", "-sps 0.5", "--port 9", "-fa auto"]
)
def test_a_flag_that_does_not_change_a_state_does_not_change_the_fingerprint(line):
    assert name(line) == name()


@pytest.mark.parametrize(
    "other",
    [
        {"props": PROPS | {"model_path": "/models/b.gguf"}},
        {"props": PROPS | {"model_ftype": "Q4_0"}},
        {"entry": {"meta": {"n_vocab": 9, "n_params": 6}}},
        {"streams": 1},
        {"version": 2},
    ],
)
def test_a_changed_report_of_the_engine_changes_the_fingerprint(other):
    assert name(**other) != name()


def test_adapters_do_not_change_the_fingerprint_because_each_state_has_its_own():
    half, whole = ([{"id": 0, "path": "a.gguf", "scale": scale}] for scale in (0.5, 1.0))
    assert name(adapters=half) == name(adapters=whole) == name()


def test_serving_parameters_of_an_unread_model_do_not_change_the_fingerprint():
    served = {"meta": ENTRY["meta"] | {"n_ctx": 8192}}
    assert name(entry=served, props=PROPS | {"media_marker": "other", "total_slots": 3}) == name()


def test_an_engine_of_unknown_flags_has_a_fingerprint_of_its_own():
    model = about_model(None, None, PROPS, ENTRY)
    strange = Identity(model=model, flags=about_flags(None), adapters=[], streams=2)
    assert strange.fingerprint(4) != name()
    assert (
        len(
            {strange.digest, strange.fingerprint(4), strange.fingerprint(4, "a"), strange.fingerprint(4, "b")}
        )
        == 4
    )


def test_a_unified_kv_buffer_is_one_stream():
    assert streams_of(EngineTraits(n_slots=4, unified=True)) == 1
    assert streams_of(EngineTraits(n_slots=4)) == 4


def test_the_digest_of_weights_changes_with_any_change_larger_than_a_sample_step(tmp_path):
    path, size = tmp_path / "weights", 1 << 20
    path.write_bytes(bytes(size))
    before = sampled(path)
    step = size // SAMPLES
    for at in range(0, size, step):
        data = bytearray(size)
        data[at : at + step] = b"\1" * step
        path.write_bytes(data)
        assert sampled(path) != before
    path.write_bytes(bytes(size + 1))
    assert sampled(path) != before


def test_a_small_or_missing_file_has_a_digest_too(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "one").write_bytes(b"1")
    assert len({sampled(tmp_path / "empty"), sampled(tmp_path / "one"), sampled(tmp_path / "none")}) == 3
    assert sampled(tmp_path / "none") == ""


def test_all_parts_of_a_split_model_are_found(tmp_path):
    first = tmp_path / "m-00001-of-00003.gguf"
    assert [part.name for part in parts(first)] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert parts(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]


# -- the projector of images ---------------------------------------------------------------------------

SEES = {"modalities": {"vision": True}, "media_marker": "<__media_" + "a1B2" * 8 + "__>"}


RESTARTED = SEES | {"media_marker": "<__media_" + "c3D4" * 8 + "__>"}


def test_a_projector_is_identified_by_its_file(tmp_path):
    file, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    file.write_bytes(b"weights")
    other.write_bytes(b"WEIGHTS")
    assert projector_of(SEES, file) == projector_of(RESTARTED, file)
    assert projector_of(SEES, file) != projector_of(SEES, other)


@pytest.mark.parametrize("path", [None, Path("/nowhere/a.gguf")])
def test_a_projector_without_a_known_file_is_identified_by_its_process(path):
    assert projector_of(SEES, path) == projector_of(SEES, path)
    assert projector_of(SEES, path) != projector_of(RESTARTED, path)
    assert projector_of(SEES, path).startswith(OF_PROCESS)
    fixed = SEES | {"media_marker": "<__media__>"}  # this identifies no process
    assert projector_of(fixed, path) != projector_of(fixed, path)


@pytest.mark.parametrize(
    "props", [{}, {"modalities": None}, {"modalities": {"vision": False, "audio": True}}]
)
def test_an_engine_without_vision_has_no_projector(props, tmp_path):
    assert projector_of(props, None) == ""


def test_states_with_images_have_a_fingerprint_of_their_own():
    text, image = Tokens([1, 2]), Tokens([1]) + Tokens.image(b"d" * 32, 8)
    sees, blind = EngineTraits(fingerprint="f", projector="p"), EngineTraits(fingerprint="f")
    assert (sees.fingerprint_of(text), sees.fingerprint_of(image)) == ("f", "f-p")
    assert (blind.fingerprint_of(text), blind.fingerprint_of(image)) == ("f", "")
    assert (sees.fingerprints, blind.fingerprints) == (("f", "f-p"), ("f",))
