"""What docs/upgrading.md says of backups: a copied folder works with its secret, and only with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest

from containers import ROOT
from slotkeeper.store import files
from slotkeeper.store.manifest import FORMAT
from unit.store.saving import file_of, keep, offered, opened

PAGE = (ROOT / "docs" / "upgrading.md").read_text("utf-8")


@pytest.fixture
async def copy(hot: Path, tmp_path: Path) -> Path:
    """Return a copy of a folder with three snapshots, made while its sidecar runs and writes another one."""
    async with opened(hot) as store:
        for seed in (1, 2, 3):
            await keep(store, hot, seed=seed)
        (hot / await store.temporary(1000)).write_bytes(b"half")
        shutil.copytree(hot, tmp_path / "copy", copy_function=shutil.copy2)
    return tmp_path / "copy"


@pytest.mark.parametrize("missing", [None, files.INDEX])
async def test_a_copied_folder_offers_its_snapshots_even_without_its_index(copy, missing):
    if missing:
        (copy / missing).unlink()
    async with opened(copy) as store:
        kept = sorted(store.listing(), key=lambda one: one.id)
        found = [await offered(store, copy, one.id) for one in kept]
    assert found == [file_of(seed) for seed in (1, 2, 3)]
    assert not (copy / files.QUARANTINE).exists()


async def test_without_its_secret_every_snapshot_of_a_copy_goes_to_quarantine(copy):
    (copy / files.SEAL).unlink()
    async with opened(copy) as store:
        assert store.listing() == []
    assert len(list((copy / files.QUARANTINE).glob("*.slot"))) == 3


async def test_a_manifest_of_a_later_format_is_left_alone(copy):
    path = next(path for path in copy.glob("slotkeeper-*.json") if "-voices" not in path.name)
    later = orjson.dumps(orjson.loads(path.read_bytes()) | {"format": FORMAT + 1})
    path.write_bytes(later)
    async with opened(copy) as store:
        assert len(store.listing()) == 2
    assert path.read_bytes() == later
    assert path.with_suffix(".slot").exists()


def test_the_page_names_the_files_as_they_are_called():
    assert all(f"`{name}`" in PAGE for name in (files.SEAL, files.INDEX))
