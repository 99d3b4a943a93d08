"""What the index remembers; without it only the uses are lost."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store.files import INDEX
from slotkeeper.store.index import Index, Use, by_our_clock
from unit.store.saving import keep, offered, opened

A, B = SnapshotId("a"), SnapshotId("b")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / INDEX


def reopened(path: Path, known: dict[SnapshotId, float]) -> dict[SnapshotId, Use]:
    index = Index(path)
    found = index.open(known)
    index.close()
    return found


def test_uses_are_counted_and_survive_the_process(path: Path):
    index = Index(path)
    assert index.open({A: 1.0}) == {A: Use(used=1.0)}
    index.add(B, 2.0)
    index.used(A, 3.0, paid=True)
    index.used(A, 4.0, paid=False)
    index.used(A, 5.0, paid=True)
    index.close()
    assert reopened(path, {A: 1.0, B: 2.0}) == {A: Use(used=5.0, restores=2, failures=1), B: Use(used=2.0)}


def test_the_index_agrees_with_the_files(path: Path):
    index = Index(path)
    index.open({A: 1.0, B: 2.0})
    index.used(A, 3.0, paid=True)
    index.used(B, 3.0, paid=True)
    index.drop([B])
    index.close()
    assert reopened(path, {B: 2.0}) == {B: Use(used=2.0)}
    assert reopened(path, {A: 1.0}) == {A: Use(used=1.0)}


@pytest.mark.parametrize(
    "how",
    [
        "noise",
        "cut",
        "PRAGMA user_version = 99",
        "UPDATE snapshots SET used = 'never'",
        "UPDATE snapshots SET used = 9e999",
        "UPDATE snapshots SET used = -9e999",
        "UPDATE snapshots SET restores = 9e999",
        "UPDATE snapshots SET restores = -1",
        "UPDATE snapshots SET failures = -1",
    ],
)
def test_a_damaged_index_or_one_with_impossible_values_is_created_again(path: Path, how: str):
    """The scheduler divides by the restores and one."""
    index = Index(path)
    index.open({A: 1.0})
    index.used(A, 2.0, paid=True)
    index.close()
    match how:
        case "noise":
            path.write_bytes(b"noise" * 1000)
        case "cut":
            path.write_bytes(path.read_bytes()[:-5000])
        case statement:
            with closing(sqlite3.connect(path)) as rows, rows:
                rows.execute(statement)
    assert reopened(path, {A: 1.0}) == {A: Use(used=1.0)}
    assert reopened(path, {A: 1.0}) == {A: Use(used=1.0)}


async def test_a_snapshot_of_a_clock_that_was_ahead_is_as_old_as_this_process(hot: Path):
    """Its times are in the future: it would count as just used until then, and never be evicted."""
    async with opened(hot, clock=lambda: time.time() + 1e9) as store:
        kept = await keep(store, hot)
        await store.used(kept.id, paid=True)
        before = time.monotonic()
        snapshot = by_our_clock(store.listing()[0])
        assert before <= snapshot.created <= time.monotonic()
        assert before <= snapshot.used <= time.monotonic()
    async with opened(hot, clock=lambda: time.time() - 100.0) as store:
        kept = await keep(store, hot)
        assert by_our_clock(kept).created < time.monotonic() - 99.0


async def test_the_store_continues_without_an_index(tmp_path: Path):
    hot = tmp_path / "hot"
    (hot / INDEX).mkdir(parents=True)
    async with opened(hot) as store:
        assert store.trouble
        assert "not remembered" in str(store.trouble)
        kept = await keep(store, hot)
        await store.used(kept.id, paid=True)
        assert await offered(store, hot, kept.id)
        assert store.listing()[0].use.restores == 1  # as long as this process lives
        (hot / INDEX).rmdir()
        await store.open()
        assert store.trouble is None


def test_only_the_owner_can_read_the_index(tmp_path):
    index = Index(tmp_path / "index.sqlite")
    index.open({})
    index.close()
    assert (tmp_path / "index.sqlite").stat().st_mode & 0o777 == 0o600
