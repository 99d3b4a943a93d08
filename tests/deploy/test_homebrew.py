"""The Homebrew formula: made of the versions and hashes of the lock file, and Ruby that Homebrew can read."""

from __future__ import annotations

import hashlib
import re
import subprocess
from typing import Any, Final

import pytest

from containers import ROOT
from programs import program
from scripts import loaded

FOLDER: Final = ROOT / "deploy" / "homebrew"
LOCKED: Final = (ROOT / "requirements" / "image.lock").read_text("utf-8")


written: Final = loaded(FOLDER / "formula.py")


def package(name: str, **more: Any) -> dict[str, Any]:
    """Return an entry of pylock.toml with the version and one of the hashes that image.lock has."""
    found = re.search(rf"^{name}==(\S+)[^\n]*\n +--hash=sha256:(\w+)", LOCKED, re.MULTILINE)
    assert found, name
    source = {"url": f"https://example.org/{name}.tar.gz", "hashes": {"sha256": found[2]}}
    return {"name": name, "version": found[1], "sdist": source, **more}


def as_toml(packages: list[dict[str, Any]]) -> str:
    lines = ['lock-version = "1.0"']
    for one in packages:
        lines += ["[[packages]]", f'name = "{one["name"]}"', f'version = "{one["version"]}"']
        lines += [f'marker = "{one["marker"]}"'] if "marker" in one else []
        source = one["sdist"]
        lines += [
            f'sdist = {{ url = "{source["url"]}", hashes = {{ sha256 = "{source["hashes"]["sha256"]}" }} }}'
        ]
    return "\n".join(lines)


@pytest.fixture
def formula(tmp_path, capsys):
    archive, pylock = tmp_path / "slotkeeper.tar.gz", tmp_path / "pylock.toml"
    archive.write_bytes(b"source")
    uvloop = package(
        "uvloop", marker="platform_python_implementation == 'CPython' and sys_platform != 'win32'"
    )
    pylock.write_text(as_toml([package("aiohttp"), uvloop]), "utf-8")
    words = ["--pylock", pylock, "--source", archive, "--homepage", "https://example.org"]
    assert written.main([*map(str, words), "--url", "https://example.org/slotkeeper.tar.gz"]) == 0
    return capsys.readouterr().out


def test_the_formula_has_the_archive_and_each_dependency_with_its_hash(formula):
    assert re.findall(r'^  url "(.*)"\n  sha256 "(.*)"', formula, re.MULTILINE) == [
        ("https://example.org/slotkeeper.tar.gz", hashlib.sha256(b"source").hexdigest())
    ]
    found = re.findall(r'resource "(.*)" do\n    url ".*"\n    sha256 "(.*)"', formula)
    assert found == [(name, package(name)["sdist"]["hashes"]["sha256"]) for name in ("aiohttp", "uvloop")]
    assert "{{" not in formula


def test_the_formula_is_ruby(formula, tmp_path):
    path = tmp_path / "slotkeeper.rb"
    path.write_text(formula, "utf-8")
    done = subprocess.run([program("ruby"), "-wc", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sdist": None}, "no source archive"),
        ({"version": "0.0.1"}, "not the one of image.lock"),
        ({"sdist": {"url": "x", "hashes": {"sha256": "0" * 64}}}, "not the one of image.lock"),
    ],
)
def test_a_dependency_that_is_not_locked_or_cannot_be_built_is_refused(change, message):
    with pytest.raises(written.FormulaError, match=message):
        list(written.resources([package("aiohttp") | change], LOCKED))


def test_packages_for_other_systems_are_left_out():
    windows = package("aiohttp", marker="sys_platform == 'win32'")
    old = package("aiohttp", marker="python_full_version < '3.12'")
    assert list(written.resources([windows, old], LOCKED)) == []


def test_a_placeholder_without_a_value_is_refused():
    with pytest.raises(written.FormulaError, match="url"):
        written.formula({"homepage": "x"})
