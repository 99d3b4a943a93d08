"""What the store does with a state that an engine has saved: torn files, edits."""

from __future__ import annotations

import errno
import itertools
import os
from hashlib import sha256
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes import made, whole
from slotkeeper.engine.slotfile import ByteSpan, Piece, Recipe, SlotFile, patched, repair_window
from slotkeeper.runtime.slot_files import Editing
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory
from slotkeeper.store.files import Halt, Passed
from slotkeeper.store.files import edit as edit_in_place
from slotkeeper.store.folders.snapshot_folder import GIVEN_UP
from slotkeeper.store.intake import SlotFileEdit
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import StoreError, TornError, Trouble, UnfitError
from unit.engine.slotfiles import IDS, WINDOW, slot_file
from unit.store.saving import SAVED, file_of, ids, keep, names_in, offered, opened
from unit.store.test_folders import refusing


@pytest.mark.parametrize("change", ["short", "long", "cut", "other", "empty", "layout"])
async def test_a_torn_save_is_not_kept(hot: Path, change: str):
    data = file_of(1)
    cases: dict[str, dict[str, Any]] = {
        "short": {"written": len(data) + 1},
        "long": {"written": len(data) - 1},
        "cut": {"data": data[:-3], "written": len(data) - 3},
        "other": {"tokens": Tokens(ids(2))},
        "empty": {"data": b"", "written": 0},
        "layout": {"layout": "of another engine"},
    }
    async with opened(hot) as store:
        with pytest.raises(TornError):
            await keep(store, hot, **{"data": data, "seed": 1, **cases[change]})
        assert store.listing() == []
        assert names_in(hot) == set()
        assert store.trouble is None


@pytest.mark.parametrize("known", [12, 20, 30])
async def test_the_tokens_of_a_snapshot_are_those_of_the_file_header(hot: Path, known: int):
    """The scheduler's model of the slot may be shorter or longer than what the engine saved."""
    async with opened(hot) as store:
        kept = await keep(store, hot, file_of(1), seed=1, tokens=Tokens(ids(1, known)))
        assert kept.tokens == Tokens(ids(1))


async def test_a_saved_file_that_does_not_appear_means_that_the_folder_is_not_shared(hot: Path):
    async with opened(hot) as store:
        name = await store.temporary()
        with pytest.raises(StoreError, match="--slot-save-path") as caught:
            await store.keep(name, SAVED)
        assert caught.value.trouble is Trouble.NOT_SHARED
        assert store.trouble is None  # another engine may share it


async def test_only_temporary_names_that_the_store_gave_out_are_accepted(hot: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.write_bytes(file_of(1))
    async with opened(hot) as store:
        for name in ("../outside", str(outside), "slotkeeper-000000000000-00000000.tmp"):
            with pytest.raises(ValueError, match="gave out"):
                await store.keep(name, SAVED)
            with pytest.raises(ValueError, match="gave out"):
                await store.discard(name)
    assert outside.exists()


async def test_a_discarded_save_leaves_nothing(hot: Path):
    async with opened(hot) as store:
        name = await store.temporary()
        (hot / name).write_bytes(b"part")
        await store.discard(name)
        assert names_in(hot) == set()


async def test_an_edit_writes_only_bytes_that_change_or_move(hot: Path, monkeypatch: pytest.MonkeyPatch):
    """The engine's file may have gigabytes."""
    written, real = [0], os.pwrite

    def counted(handle: int, data: bytes, at: int) -> int:
        written[0] += len(data)
        return real(handle, data, at)

    data, without = file_of(1, cuts=(4, 8, 16)), file_of(1, cuts=(8, 16))
    monkeypatch.setattr(os, "pwrite", counted)
    async with opened(hot) as store:
        edit = Editing(EngineTraits(memory=Memory.HYBRID), (), (4,))
        kept = await keep(store, hot, data, seed=1, edit=edit)
        assert await offered(store, hot, kept.id) == without
    payload = len(file_of(1, cuts=()))
    assert written[0] == len(without) - payload


SOURCE = bytes(range(100))


@given(
    st.lists(st.integers(0, 100), max_size=8, unique=True).map(sorted),
    st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=4),
)
def test_a_file_that_is_edited_in_place_is_the_one_of_the_recipe(ends: list[int], gaps: list[int | None]):
    """Of the stretches between `ends`, every second is left out; new bytes fill a part of it."""
    recipe: list[Piece] = []
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        if number % 2 == 0:
            recipe.append(ByteSpan(start, end - start))
        elif gaps and (more := gaps[number % len(gaps)]) is not None:
            recipe.append(b"new"[: min(more, end - start)])
    with TemporaryFile(buffering=0) as file:
        file.write(SOURCE)
        passed = edit_in_place(file, tuple(recipe), Halt())
        file.seek(0)
        found = file.read()
    assert found == made(tuple(recipe), SOURCE)
    assert passed == Passed(size=len(found), sha256=sha256(found).hexdigest())


@pytest.mark.parametrize("recipe", [(b"x", ByteSpan(0, 9)), (ByteSpan(5, 9), ByteSpan(0, 5))])
def test_no_byte_moves_towards_the_end_of_the_file(recipe: Recipe):
    with TemporaryFile(buffering=0) as file:
        file.write(SOURCE)
        with pytest.raises(ValueError, match="would move"):
            edit_in_place(file, recipe, Halt())


@pytest.mark.parametrize(
    ("cuts", "stale", "kept"),
    [
        ((16, 8), (), (8,)),  # the engine takes the last suitable one, never the first
        ((4, 16, 8, 12), (), (4, 8, 12)),
        ((8, 9, 16), (9,), (8, 16)),
        ((8, 16), (), (8, 16)),
    ],
)
async def test_stale_and_misplaced_checkpoints_are_left_out(hot: Path, cuts, stale, kept):
    """After a cut the engine's list need not ascend, and a surviving checkpoint must not be used (T11)."""
    async with opened(hot) as store:
        edit = Editing(EngineTraits(memory=Memory.HYBRID), (), stale)
        found = await keep(store, hot, file_of(1, cuts=cuts), seed=1, edit=edit)
        assert found.manifest.checkpoints == kept
        assert edit.written == cuts
    store = Store(hot)
    assert found.id in {one.id for one in (await store.open()).kept}
    await store.close()


async def test_a_state_that_could_not_be_restored_is_not_kept(hot: Path):
    async with opened(hot) as store:
        with pytest.raises(UnfitError, match="impossible"):
            await keep(store, hot, file_of(1, cuts=(16, 8)), seed=1)
        assert not [name for name in names_in(hot) if name.endswith((".slot", ".json"))]


async def test_a_repaired_window_is_recorded_in_the_manifest(hot: Path):
    data = slot_file("swa", 2, IDS)

    def repair(file: FileIO, found: SlotFile) -> SlotFileEdit:
        patch = repair_window(file, found, WINDOW)
        return SlotFileEdit(recipe=patched(whole(found), patch), repaired=True)

    async with opened(hot) as store:
        kept = await keep(store, hot, data, tokens=Tokens(IDS), edit=repair)
        assert kept.manifest.repaired
        stored = await offered(store, hot, kept.id)
        assert len(stored) == len(data)
        assert stored != data


async def test_a_state_that_an_edit_damages_is_not_kept(hot: Path):
    async with opened(hot) as store:
        with pytest.raises(TornError):
            await keep(store, hot, edit=lambda _file, _found: SlotFileEdit(recipe=(b"nonsense",)))
        assert names_in(hot) == set()


async def test_a_file_that_an_engine_writes_after_its_save_was_given_up_is_removed_later(hot: Path):
    """The engine was frozen, and continues."""
    async with opened(hot) as store:
        late, other, never = [await store.temporary() for _ in range(3)]
        await store.discard(late)
        await store.discard(never)
        (hot / late).write_bytes(b"a whole state")
        (hot / other).write_bytes(b"half a state")
        kept = await keep(store, hot)
        assert names_in(hot) == {other, f"{kept.id}.slot", f"{kept.id}.json"}
        (hot / never).write_bytes(b"a whole state")
        await store.temporary()
        assert never not in names_in(hot)


async def test_a_late_file_that_cannot_be_removed_stops_no_save(hot: Path):
    async with opened(hot) as store:
        late = await store.temporary()
        await store.discard(late)
        (hot / late).write_bytes(b"a whole state")
        with refusing("unlink", late, errno.EPERM):
            await store.temporary()
        assert store.trouble is None
        await store.temporary()
        assert names_in(hot) == set()


async def test_only_the_newest_names_of_saves_that_were_given_up_are_remembered(hot: Path):
    async with opened(hot) as store:
        names = [await store.temporary() for _ in range(GIVEN_UP + 1)]
        for name in names:
            await store.discard(name)
        for name in names:
            (hot / name).write_bytes(b"a whole state")
        await store.temporary()
        assert names_in(hot) == {names[0]}
