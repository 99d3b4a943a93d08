"""The units: systemd accepts them, and their arguments, variables and times fit Slotkeeper and the engine."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

from containers import ROOT
from slotkeeper.cli.main import OF_SIDECARS, add_all_settings, parsers
from slotkeeper.engine.child.launch import SLOTS
from slotkeeper.engine.child.process import STOP_STEPS
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.environment import PREFIX
from slotkeeper.settings import Settings, load

UNITS: Final = ROOT / "deploy" / "systemd"
SIDECARS: Final = ("slotkeeper.service", "slotkeeper-up.service")
ENGINE: Final = "llama-server.service"
MOST_EXPOSED: Final = 30  # tenths of the score of `systemd-analyze security`: 0 is best, 100 worst
ANALYZE: Final = shutil.which("systemd-analyze") or ""
SYSTEMD: Final = pytest.mark.skipif(not ANALYZE, reason="systemd-analyze is not installed here")


def unit(name: str) -> dict[str, list[str]]:
    """Return what a unit sets: name -> its values, in the order of the lines."""
    lines = re.sub(r"\\\n\s*", "", (UNITS / name).read_text("utf-8")).splitlines()
    found: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        key, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found[key].append(value)
    return found


def variables(name: str) -> dict[str, str]:
    """Return the variables of a file for EnvironmentFile=, also those that are commented out."""
    found = re.findall(r"^(?:# )?([A-Z_]+)=(.*)$", (UNITS / name).read_text("utf-8"), re.MULTILINE)
    return dict(found)


def environment(name: str) -> dict[str, str]:
    """Return the variables that a unit gives its process."""
    ours = dict(word.split("=", 1) for line in unit(name)["Environment"] for word in line.split())
    for path in unit(name)["EnvironmentFile"]:
        ours |= variables(Path(path).name)
    return ours


def command(name: str) -> list[str]:
    """Return the words of ExecStart= as systemd makes them: ${X} is one word, $X as many as it has."""
    (line,) = unit(name)["ExecStart"]
    given = environment(name)
    words: list[str] = []
    for word in shlex.split(line):
        if word.startswith("$") and not word.startswith("${"):
            words += given[word[1:]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: given[found[1]], word))
    return words


@SYSTEMD
@pytest.mark.parametrize("name", [*SIDECARS, ENGINE])
def test_systemd_accepts_each_unit(name, tmp_path):
    for path in UNITS.glob("*.service"):  # the programs are not installed here
        text = re.sub(r"=/\S+/(slotkeeper|llama-server) ", "=/bin/true ", path.read_text("utf-8"))
        (tmp_path / path.name).write_text(text, "utf-8")
    done = subprocess.run(
        [ANALYZE, "verify", "--man=no", tmp_path / name],
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if str(tmp_path) in line or line.startswith(name)]
    assert (done.returncode, ours) == (0, [])


@SYSTEMD
@pytest.mark.parametrize("name", SIDECARS)
def test_the_sidecars_units_are_hardened(name):
    limits = ["--offline=yes", f"--threshold={MOST_EXPOSED}"]
    done = subprocess.run(
        [ANALYZE, "security", "--no-pager", *limits, UNITS / name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SIDECARS)
def test_the_command_of_each_sidecar_is_accepted(name):
    parser, commands = parsers()
    for one in OF_SIDECARS:
        add_all_settings(one, commands[one])
    own = " ".join(command(name)[1:]).partition(" -- ")[0].split()
    args = parser.parse_args(own)
    assert args.command == ("up" if "up" in name else "serve")


@pytest.mark.parametrize("name", SIDECARS)
def test_the_variables_are_settings_with_right_values(name, monkeypatch):
    given = {key: value for key, value in environment(name).items() if key.startswith(PREFIX)}
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    settings = load({}, None).settings
    assert {key.removeprefix(PREFIX).lower() for key in given} <= set(Settings.model_fields)
    assert str(settings.slot_dir) == "/var/lib/slotkeeper/slots"


def test_the_engine_of_the_sidecar_is_the_one_beside_it():
    flags = EngineFlags.parse(command(ENGINE)[1:])
    given = environment("slotkeeper.service")
    assert flags.base == given["SLOTKEEPER_UPSTREAM"]
    assert str(flags.slot_save_path) == given["SLOTKEEPER_SLOT_DIR"]
    assert flags.n_parallel == SLOTS
    assert str(flags.model) == variables("engine.env")["MODEL"]


def test_all_units_share_one_user_and_one_private_folder():
    for key in ("User", "StateDirectory", "StateDirectoryMode", "UMask"):
        assert len({tuple(unit(name)[key]) for name in (*SIDECARS, ENGINE)}) == 1, key


@pytest.mark.parametrize("name", SIDECARS)
def test_a_stop_leaves_time_to_drain_and_save(name):
    fields = Settings.model_fields
    steps = [float(fields[step].default) for step in ("drain_delay", "drain_timeout", "save_timeout")]
    steps += [seconds for _, seconds in STOP_STEPS] if "up" in name else []
    (longest,) = unit(name)["TimeoutStopSec"]
    assert float(longest) > sum(steps)
    assert unit(name)["KillSignal"] == ["SIGTERM"]
    assert unit(name)["KillMode"] == ["mixed"], "else the engine is ended before its slots are saved"


def test_the_engine_outlives_the_sidecar_that_saves_its_slots():
    after = unit("slotkeeper.service")["After"][0].split()
    assert ENGINE in after, "what starts later stops earlier"
    assert "Requires" not in unit("slotkeeper.service")


def test_the_quick_start_installs_every_file():
    text = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    assert [path.name for path in UNITS.iterdir() if path.name not in text] == []
