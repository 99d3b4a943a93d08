"""What becomes of a state that an engine has saved: torn files, edits, checkpoints of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotkeeper.engine.slotfile import SlotFile, patched, repair_window, whole, with_last_token
from slotkeeper.engine.slotfile import keep as keep_records
from slotkeeper.engine.slotfile.recipes import Donor, graft
from slotkeeper.scheduler.snapshots import SnapshotId
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.store.intake import SavedFile, SlotFileEdit
from slotkeeper.store.trouble import StoreError, TornError, Trouble
from unit.engine.slotfile.built import IDS, WINDOW, slot_file
from unit.store.saving import ENGINE, file_of, ids, keep, names_in, offered, opened


@pytest.fixture
def hot(tmp_path: Path) -> Path:
    return tmp_path / "hot"


@pytest.mark.parametrize("change", ["short", "long", "cut", "other", "empty", "layout"])
async def test_a_torn_save_is_not_kept(hot: Path, change: str):
    data = file_of(1)
    facts = {
        "short": {"written": len(data) + 1},
        "long": {"written": len(data) - 1},
        "cut": {"data": data[:-3], "written": len(data) - 3},
        "other": {"tokens": Tokens(ids(2))},
        "empty": {"data": b"", "written": 0},
        "layout": {"layout": "of another engine"},
    }[change]
    async with opened(hot) as store:
        with pytest.raises(TornError):
            await keep(store, hot, **({"data": data, "seed": 1} | facts))
        assert store.listing() == []
        assert names_in(hot) == set()
        assert store.trouble is None


@pytest.mark.parametrize("known", [12, 20, 30])
async def test_the_header_says_what_is_held(hot: Path, known: int):
    """What we believe to be in the slot may be shorter or longer than what the engine saved."""
    async with opened(hot) as store:
        kept = await keep(store, hot, file_of(1), seed=1, tokens=Tokens(ids(1, known)))
        assert kept.tokens == Tokens(ids(1))


async def test_a_file_that_never_appeared_is_a_folder_that_is_not_shared(hot: Path):
    async with opened(hot) as store:
        name = await store.temporary()
        with pytest.raises(StoreError, match="--slot-save-path") as caught:
            await store.keep(name, SavedFile(fingerprint=ENGINE, tokens=Tokens(ids(1)), written=100))
        assert caught.value.trouble is Trouble.NOT_SHARED
        assert store.trouble is None  # another engine may share it


async def test_only_names_that_were_given_out_are_taken(hot: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.write_bytes(file_of(1))
    async with opened(hot) as store:
        for name in ("../outside", str(outside), "slotkeeper-000000000000-00000000.tmp"):
            saved = SavedFile(fingerprint=ENGINE, tokens=Tokens(ids(1)), written=len(file_of(1)))
            with pytest.raises(ValueError, match="gave out"):
                await store.keep(name, saved)
            with pytest.raises(ValueError, match="gave out"):
                await store.discard(name)
    assert outside.exists()


async def test_a_discarded_save_leaves_nothing(hot: Path):
    async with opened(hot) as store:
        name = await store.temporary()
        (hot / name).write_bytes(b"part")
        await store.discard(name)
        assert names_in(hot) == set()


async def test_an_edit_is_carried_out_on_the_way(hot: Path):
    def trim(_: object, files: list[SlotFile]) -> SlotFileEdit:
        return SlotFileEdit(recipe=keep_records(files[0], files[0].records[1:]))

    async with opened(hot) as store:
        kept = await keep(store, hot, file_of(1), seed=1, edit=trim)
        assert kept.manifest.checkpoints == (16,)
        assert await offered(store, hot, kept.id) == file_of(1, cuts=(16,))
        assert names_in(hot) == {f"{kept.id}.slot", f"{kept.id}.json"}


async def test_an_editor_that_changes_nothing_keeps_the_file(hot: Path):
    async with opened(hot) as store:
        kept = await keep(store, hot, file_of(1), seed=1, edit=lambda _file, _files: None)
        assert await offered(store, hot, kept.id) == file_of(1)


async def test_checkpoints_of_another_snapshot_are_grafted(hot: Path):
    async with opened(hot) as store:
        donor = await keep(store, hot, file_of(1, cuts=(4,)), seed=1)
        gone = await keep(store, hot, file_of(1, cuts=(5,)), seed=1)
        (hot / f"{gone.id}.slot").unlink()
        seen = []

        def transplant(_: object, files: list[SlotFile]) -> SlotFileEdit:
            seen.extend(files)
            other = Donor(source=1, file=files[1], records=files[1].records)
            return SlotFileEdit(recipe=graft(files[0], files[0].records, [other]))

        others = [gone.id, donor.id, SnapshotId("slotkeeper-unknown")]
        kept = await keep(store, hot, file_of(1), seed=1, edit=transplant, others=others)
        assert len(seen) == 2  # those that cannot be used are left out
        assert kept.manifest.checkpoints == (4, 8, 16)
        assert await offered(store, hot, kept.id) == file_of(1, cuts=(4, 8, 16))


async def test_a_repaired_window_is_remembered(hot: Path):
    data = slot_file("swa", 2, IDS)

    def repair(file: object, files: list[SlotFile]) -> SlotFileEdit:
        patch = repair_window(file, files[0], WINDOW)
        return SlotFileEdit(recipe=patched(whole(files[0]), patch), repaired=True)

    async with opened(hot) as store:
        kept = await keep(store, hot, data, tokens=Tokens(IDS), edit=repair)
        assert kept.manifest.repaired
        stored = await offered(store, hot, kept.id)
        assert len(stored) == len(data)
        assert stored != data


async def test_an_edit_that_breaks_the_file_is_not_kept(hot: Path):
    async with opened(hot) as store:
        with pytest.raises(TornError):
            await keep(store, hot, edit=lambda _file, _files: SlotFileEdit(recipe=(b"nonsense",)))
        assert names_in(hot) == set()


async def test_the_last_token_is_the_headers(hot: Path):
    """The trick with the last token changes what the engine believes, so that is what counts."""

    def other_end(_: object, files: list[SlotFile]) -> SlotFileEdit:
        return SlotFileEdit(recipe=patched(whole(files[0]), with_last_token(files[0], 7)))

    async with opened(hot) as store:
        kept = await keep(store, hot, file_of(1), seed=1, edit=other_end)
        assert kept.tokens == Tokens((*ids(1)[:-1], 7))
