"""Signs of an engine's own disk cache, as forks and open pull requests show them."""

from dataclasses import replace

import pytest

from slotkeeper.engine.disk_cache import Shown, in_command_line, in_log, in_props, shown
from slotkeeper.engine.findings import about_caches
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.scheduler.adapters import Adapter
from slotkeeper.scheduler.engine_model import EngineTraits


@pytest.mark.parametrize(
    "line",
    [
        "--cache-disk /var/cache/prompts",  # issue 20697, pull requests 26408 and 28092
        "--cache-disk /var/cache/prompts --cache-disk-size 500",
        "--cache_disk /var/cache/prompts",
        "--cache-disk 10240 --cache-disk-dir /var/cache/prompts",
        "--cache-ram 1 --cache-disk-dir /var/cache/prompts",
        "--cache-spill-dir /var/cache/prompts",
    ],
)
def test_a_flag_shows_that_the_disk_cache_is_on(line):
    assert in_command_line(line.split(), {})
    assert EngineFlags.parse(line.split()).traits_into(EngineTraits()).disk_cache == "flags"


@pytest.mark.parametrize(
    "line", ["", "--cache-disk 0", "--cache-disk", "--cache-ram 8192", "--cache-reuse 1"]
)
def test_without_a_flag_the_disk_cache_is_off(line):
    assert not in_command_line(line.split(), {})
    assert EngineFlags.parse(line.split()).traits_into(EngineTraits()).disk_cache == ""


def test_an_environment_variable_counts_if_no_flag_contradicts_it():
    environ = {"LLAMA_ARG_CACHE_DISK": "/var/cache/prompts"}
    assert in_command_line([], environ)
    assert not in_command_line(["--cache-disk", "0"], environ)


def test_an_engine_with_a_disk_cache_counts_as_one_with_a_prompt_cache():
    traits = EngineFlags.parse(["--cache-ram", "0", "--cache-disk", "/x"]).traits_into(EngineTraits())
    assert traits.ram_cache
    assert not EngineFlags.parse(["--cache-ram", "0"]).traits_into(EngineTraits()).ram_cache


@pytest.mark.parametrize(
    ("props", "on"),
    [
        ({}, False),
        ({"cache_disk": "/var/cache/prompts"}, True),
        ({"cache_disk": True}, True),
        ({"cache_disk": 10240}, True),
        ({"disk_cache": {"path": "/x", "entries": 3}}, True),
        ({"disk_cache": {"enabled": False}}, False),
        ({"disk_cache": {}}, False),
        ({"cache_disk": ""}, False),
        ({"cache_disk": 0}, False),
        ({"cache_disk": None}, False),
        ({"cache_disk": False}, False),
    ],
)
def test_a_field_of_props_shows_that_the_disk_cache_is_on(props, on):
    assert in_props(props) is on


@pytest.mark.parametrize(
    ("line", "on"),
    [
        ("srv          init: disk prompt cache enabled: dir='/x', budget=10240 MiB", True),
        ("0.00.1 I srv  load_model: disk cache: path='/x', entries=3, total_size=1.00 MiB", True),
        ("srv load: disk prompt cache: 12 entries, 1.0 GiB in /x (limit 48.0 GiB)", True),
        ("srv load: prompt cache is enabled, size limit: 8192 MiB", False),
        ("slot print: the user wrote: disk cache: path of a file", False),
    ],
)
def test_a_line_of_the_log_shows_that_the_disk_cache_is_on(line, on):
    assert in_log(f"build: 1\n{line}\nmain: done\n") is on


def test_the_command_line_is_named_as_evidence_before_props_and_the_log():
    assert shown({"cache_disk": True}, by_flags=True) is Shown.FLAGS
    assert shown({"cache_disk": True}, by_flags=False) is Shown.PROPS
    assert shown({}, by_flags=False, log="srv a: disk cache: path='/x'") is Shown.LOG
    assert shown({}, by_flags=False, log="") is None


def test_doctor_advises_whether_to_use_the_disk_cache():
    plain = EngineTraits(disk_cache="props")

    def advice(traits: EngineTraits) -> str:
        (found,) = (one for one in about_caches(traits, None) if one.trap == "disk-cache")
        return found.do

    assert "keep both" in advice(plain)
    assert "leave the engine's disk cache out" in advice(replace(plain, speculative=True))
    assert "adapters" in advice(replace(plain, adapters=(Adapter("aa", 1.0),)))
    assert not [one for one in about_caches(EngineTraits(), None) if one.trap == "disk-cache"]
