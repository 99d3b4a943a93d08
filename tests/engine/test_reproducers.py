"""The scripts of docs/reproducers show on real engines what docs/llama-cpp-maintainers.md says.

A script whose fault is mended in a newer build fails here: then the page and engine.md must say so.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Final

import orjson
import pytest

from containers import ROOT
from patience import PATIENCE
from programs import program
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.engine.child.launch import find_engine, free_port

SCRIPTS: Final = ROOT / "docs" / "reproducers"
PAGE: Final = ROOT / "docs" / "llama-cpp-maintainers.md"
ONE_THREAD: Final = ("-t", "1", "--fit", "off")  # as other tests: engines share the processors

Ran = subprocess.CompletedProcess[str]


def run(script: str, build: str, model: Tiny) -> Ran:
    """Run a script as its first lines say, with an engine of this build; it starts at most three servers."""
    program("curl")
    engine = find_engine(build)
    env = {
        **engine.env,
        "LLAMA_SERVER": shlex.join(engine.command(ONE_THREAD)),
        "MODEL": str(build_model(model)),
        "PORT": str(free_port()),
    }
    return subprocess.run(
        [program("sh"), SCRIPTS / script],
        env=env,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
        check=False,
    )


def shown(ran: Ran) -> str:
    """Return the output of a script that showed its fault."""
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("model", [Tiny.DENSE, Tiny.HYBRID])
def test_a_request_pinned_to_a_busy_slot_changes_the_running_answer(build, model):
    assert "the answer changed" in shown(run("busy-slot.sh", build, model))


@pytest.mark.parametrize("model", [Tiny.DENSE, Tiny.SWA, Tiny.HYBRID])
def test_a_slot_file_without_its_last_byte_ends_the_server(build, model):
    assert "GGML_ASSERT(nread <= state_size)" in shown(run("cut-file.sh", build, model))


@pytest.mark.parametrize("model", [Tiny.DENSE, Tiny.SWA, Tiny.HYBRID])
def test_a_failed_save_destroys_the_good_file_and_may_be_answered_with_200(build, model):
    *_, answer, size = shown(run("save-not-atomic.sh", build, model)).splitlines()
    document, status = answer.rsplit(" ", 1)
    assert status == "200"
    assert orjson.loads(document)["n_written"] > int(re.findall(r"\d+", size)[0])


def test_a_restored_slot_is_cut_where_its_window_is_missing(build):
    said = shown(run("restored-window.sh", build, Tiny.SWA))
    assert re.findall(r"\w+ (\d+) -", said) == ["899", "899", "0"], said


def test_bodies_and_paths_are_read_as_the_page_says(build):
    said = shown(run("bodies.sh", build, Tiny.DENSE))
    table = re.findall(r"^\| (.+) \| ((?:slot )?\d+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [tuple(line.split(": ")) for line in said.splitlines()] == table


def test_every_script_is_named_in_the_page_and_can_be_read_by_a_shell():
    page = PAGE.read_text("utf-8")
    for script in SCRIPTS.iterdir():
        assert f"`{script.name}`" in page
        subprocess.run([program("sh"), "-n", script], check=True)
