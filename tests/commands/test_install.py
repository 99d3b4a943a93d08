"""The lines that install it, as the pages show them, in an empty environment of each Python that is here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from slotkeeper import __version__

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = ("README.md", "docs/quickstart.md", "docs/tracing.md", "docs/shared-store.md")
# Without comments and other ways to do the same.
INSTALLS: Final = {
    page: re.findall(r"^\$ (pipx? install [^#\n]*?) *(?:#.*)?$", (ROOT / page).read_text(), re.MULTILINE)
    for page in PAGES
}
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")

pytestmark = pytest.mark.remaining


def run(line: str, path: Path, home: Path) -> str:
    """Run a line as a user in a checkout, with the programs of `path` first. Returns its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    places = {"PATH": f"{path}:/usr/bin:/bin", "PIPX_HOME": f"{home}/x", "PIPX_BIN_DIR": f"{home}/b"}
    done = subprocess.run(
        ["/bin/sh", "-ec", line], cwd=ROOT, env=kept | places, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def found(version: str) -> str | None:
    """Return a Python of this version that runs."""
    program = sys.executable if sys.version.startswith(f"{version}.") else shutil.which(f"python{version}")
    works = program and subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0
    return program if works else None


def test_each_page_has_its_line():
    assert all(len(lines) == 1 for lines in INSTALLS.values()), INSTALLS


@pytest.mark.parametrize("version", PYTHONS)
def test_the_lines_of_the_pages_install_it_in_an_empty_environment(version, tmp_path):
    if (python := found(version)) is None:
        pytest.skip(f"no python{version} here")
    programs = tmp_path / "venv" / "bin"
    subprocess.run([python, "-m", "venv", programs.parent], check=True)
    for page, (line,) in INSTALLS.items():
        if line.startswith("pipx"):
            run("pip install --quiet pipx", programs, tmp_path)
        run(line, programs, tmp_path)
        folder = tmp_path / "b" if line.startswith("pipx") else programs
        assert run(f"{folder}/slotkeeper --version", programs, tmp_path).split()[-1] == __version__, page
        assert "complete " in run(f"{folder}/slotkeeper completion bash", programs, tmp_path), page
    assert "Beside a running llama-server" in run(
        f"{tmp_path}/b/slotkeeper docs quickstart", programs, tmp_path
    )
