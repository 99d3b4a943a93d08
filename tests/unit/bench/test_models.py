"""The tiny models are the same bytes everywhere, and a broken file is made again."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from slotkeeper.bench import models
from slotkeeper.bench.models import MODELS, SHA256, MissingExtraError, Model, Tiny, build

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_byte_identical_to_the_measured_one(model: Model, tmp_path: Path) -> None:
    path = build(model, tmp_path)
    assert path == tmp_path / f"{model}.gguf"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[model]


def test_a_second_build_reuses_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(Tiny.RECURRENT, tmp_path)
    monkeypatch.setattr(models, "_recipe", lambda _: pytest.fail("built again"))
    assert build(Tiny.RECURRENT, tmp_path) == first


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    path = build(Tiny.DENSE, tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    build(Tiny.DENSE, tmp_path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[Tiny.DENSE]


def test_a_failed_build_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path) -> None:
        path.write_bytes(b"GGUF")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "_recipe", lambda _: half)
    with pytest.raises(OSError, match="No space"):
        build(Tiny.DENSE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_in_the_xdg_folder_or_elsewhere_if_that_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / "slotkeeper" / "models"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not models.cache_folder().is_relative_to(tmp_path / "file")


def test_without_the_extra_the_error_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith("slotkeeper.bench.tiny")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'slotkeeper\[demo\]'"):
        build(Tiny.DENSE, tmp_path)


def test_importing_the_module_needs_neither_numpy_nor_gguf() -> None:
    program = "import sys, slotkeeper.bench.models; sys.exit(bool({'numpy', 'gguf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_command_prints_one_path_for_each_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert models.main(["--out", str(tmp_path), "tiny-swa", "tiny-dense"]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "tiny-swa.gguf"),
        str(tmp_path / "tiny-dense.gguf"),
    ]
