"""The engine's command line: the sidecar parses the flags that it writes, and adds no flag twice."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from slotkeeper.engine.child.launch import private_folder, recommended
from slotkeeper.engine.flags import BY_NAME, OPTIONS, EngineFlags, FlagError
from slotkeeper.scheduler.slots.engine_model import EngineTraits

ALL = frozenset(BY_NAME) | {"--no-webui"}


def test_every_option_is_a_field_and_every_field_an_option():
    assert {field.name for field in fields(EngineFlags)} == {*OPTIONS, "build"}


@pytest.mark.parametrize(("name", "entry"), BY_NAME.items())
def test_every_spelling_of_a_flag_means_the_same(name, entry):
    key, option = entry
    words = ["7"] * option.words
    line, value = (
        ([name, *words], option.read(" ".join(words))) if option.read else ([name], name not in option.off)
    )
    assert getattr(EngineFlags.parse(line), key) == value


def test_recommended_flags_are_parsed_back_to_the_intended_values(tmp_path):
    line = recommended(ALL, port=8090, slot_dir=tmp_path, slots=3, context_tokens=1000, eager_thinning=True)
    flags = EngineFlags.parse(line)
    assert (flags.port, flags.n_parallel, flags.n_ctx) == (8090, 3, 3000)
    assert (flags.slots, flags.metrics, flags.slot_save_path) == (True, True, tmp_path)
    assert (flags.checkpoint_cap, flags.checkpoint_min_step, flags.cache_ram) == (64, 0, 8192)
    assert not flags.auto_slots
    assert "--no-webui" not in line, "llama-server's own web UI stays where its users know it"


@pytest.mark.parametrize("user", [["-np", "5"], ["--parallel", "5"]])
def test_a_flag_that_the_user_gave_is_not_added_again(user, tmp_path):
    line = recommended(ALL, user, port=1, slot_dir=tmp_path)
    assert "--parallel" not in line
    assert EngineFlags.parse([*line, *user]).n_parallel == 5


def test_a_flag_that_the_build_does_not_know_is_not_added(tmp_path):
    line = recommended(ALL - {"--ctx-checkpoints"}, port=1, slot_dir=tmp_path)
    assert "--ctx-checkpoints" not in line
    assert "64" not in line


def test_builds_without_eager_thinning_keep_their_checkpoint_spacing(tmp_path):
    assert "--checkpoint-min-step" not in recommended(ALL, port=1, slot_dir=tmp_path)


def test_the_recommended_context_does_not_exceed_the_training_context(tmp_path):
    line = recommended(ALL, port=1, slot_dir=tmp_path, slots=2, trained_tokens=4096)
    assert EngineFlags.parse(line).n_ctx == 8192


def test_a_unified_buffer_with_a_limit_for_each_slot_has_the_size_of_the_context_flag():
    line = ["-np", "4", "-kvu", "-c", "2048", "--kv-unified-per-slot", "1024"]
    assert EngineFlags.parse(line).traits_into(EngineTraits()).pool_cells == 2048
    assert EngineFlags.parse(line[:5]).traits_into(EngineTraits()).pool_cells == 0


def test_slots_without_a_number_are_automatic_and_use_a_unified_buffer():
    assert EngineFlags.parse([]).traits_into(EngineTraits()).unified
    assert EngineFlags.parse(["-np", "-1"]).traits_into(EngineTraits()).unified
    assert not EngineFlags.parse(["-np", "1"]).traits_into(EngineTraits()).unified
    assert EngineFlags.parse(["-np", "1", "-kvu"]).traits_into(EngineTraits()).unified


def test_flags_set_the_traits_of_the_engine():
    line = "-np 2 -cram 0 -sps 0.5 -ctxcp 7 -cms 0 -b 256 --ubatch-size 512 --swa_full --spec-type draft-mtp"
    traits = EngineFlags.parse(line.split()).traits_into(EngineTraits(n_slots=9))
    assert traits == EngineTraits(
        n_slots=9,
        ram_cache=False,
        ram_bytes=0,
        idle_copy=False,
        similarity=0.5,
        checkpoint_cap=7,
        checkpoint_min_step=0,
        n_batch=256,
        n_ubatch=256,
        swa_full=True,
        speculative=True,
    )


def test_repeated_flags_add_up():
    flags = EngineFlags.parse(
        ["--control-vector", "a,b", "--override-kv", "x=int:1", "--control-vector-scaled", "c:2"]
    )
    assert flags.control_vectors == ("a", "b", "c:2")
    assert flags.override_kv == ("x=int:1",)


def test_a_flag_with_two_values_takes_both():
    assert EngineFlags.parse(["--control-vector-layer-range", "3", "7", "-np", "2"]) == EngineFlags(
        control_layers="3 7", n_parallel=2
    )
    with pytest.raises(FlagError, match="layer-range"):
        EngineFlags.parse(["--control-vector-layer-range", "3"])


def test_the_command_line_wins_over_the_environment():
    environ = {"LLAMA_ARG_N_PARALLEL": "3", "LLAMA_ARG_KV_UNIFIED": "1", "LLAMA_ARG_PORT": "9"}
    flags = EngineFlags.parse(["-np", "2", "-no-kvu"], environ)
    assert (flags.n_parallel, flags.unified, flags.port) == (2, False, 9)


@pytest.mark.parametrize("line", [["-np"], ["-np", "two"]])
def test_a_flag_without_a_readable_value_is_an_error_that_names_it(line):
    with pytest.raises(FlagError, match="-np"):
        EngineFlags.parse(line)


@pytest.mark.parametrize(
    ("line", "base"),
    [
        ([], "http://127.0.0.1:8080"),
        (["--host", "0.0.0.0", "--port", "1"], "http://127.0.0.1:1"),  # noqa: S104 - not bound
        (["--host", "::1"], "http://[::1]:8080"),
        (["--api-prefix", "/llm/"], "http://127.0.0.1:8080/llm"),
    ],
)
def test_the_base_url_is_where_the_engine_listens(line, base):
    assert EngineFlags.parse(line).base == base


def test_api_keys_are_not_shown_by_repr(tmp_path: Path):
    flags = EngineFlags.parse(["--api-key", "sesame,two"])
    assert flags.api_keys == ("sesame", "two")
    assert "sesame" not in repr(flags)


def test_the_slot_folder_is_private_to_its_user(tmp_path):
    (tmp_path / "slots").mkdir(mode=0o755)
    assert private_folder(tmp_path / "slots").stat().st_mode & 0o777 == 0o700


def test_with_separate_namespaces_the_ram_cache_is_off_unless_the_user_sets_one(tmp_path):
    line = recommended(ALL, port=1, slot_dir=tmp_path, namespaces=True)
    assert EngineFlags.parse(line).cache_ram == 0
    assert "--cache-ram" not in recommended(
        ALL, ["--cache-ram", "64"], port=1, slot_dir=tmp_path, namespaces=True
    )
    assert "--cache-ram" not in recommended(ALL, port=1, slot_dir=tmp_path)
