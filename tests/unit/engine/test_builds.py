"""Names of builds: the number if it is known, else a description of the observed facts."""

from __future__ import annotations

import pytest

from slotkeeper.engine import fingerprint
from slotkeeper.engine.child.launch import EngineKind, skulk, xllamacpp

NEW, OLD = {"id": "m", "architecture": {}}, {"id": "m"}


@pytest.mark.parametrize(
    ("reported", "started", "model", "files", "name"),
    [
        ("b11549-7e4c0a9", 0, NEW, 4, "b11549"),
        ("b10434", 0, {}, 0, "b10434"),
        ("b11600-abc", 11549, NEW, 4, "b11600"),
        ("b0-unknown", 11549, NEW, 4, "b11549"),
        ("b1-7e4c0a9", 10434, OLD, 2, "b10434"),
        ("b0-unknown", 0, NEW, 4, "unknown build (checkpoint files)"),
        ("b1-7e4c0a9", 0, OLD, 2, "unknown build (files without checkpoints)"),
        ("b0-unknown", 0, NEW, 0, "unknown build (b11434 or newer)"),
        ("b1-7e4c0a9", 0, OLD, 0, "unknown build (older than b11434)"),
        ("", 0, {"status": {}, "context_length": 4096}, 0, "unknown build (b11434 or newer)"),
        ("", 0, {"status": {}}, 0, "unknown build (older than b11434)"),
        ("", 0, {}, 0, "unknown build"),
    ],
)
def test_a_build_is_never_named_by_a_number_that_is_not_its_own(reported, started, model, files, name):
    assert fingerprint.in_words(reported, started, model, files) == name


@pytest.mark.parametrize(
    ("found", "kind"), [(skulk(), EngineKind.SKULK), (xllamacpp(), EngineKind.XLLAMACPP)]
)
def test_the_version_of_a_package_contains_its_build_number(found, kind):
    """Needs the packages: a newer one shows its own build number, not the one in our text."""
    if found is None:
        pytest.skip("this package is not installed")
    assert found.build > fingerprint.FIRST
    assert f"b{found.build}" == kind.value


def test_a_package_that_is_not_installed_has_no_build():
    assert fingerprint.of_package("slotkeeper-never-was-a-package") is None
