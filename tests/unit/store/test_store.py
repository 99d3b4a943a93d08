"""The life of a snapshot: saved, kept, offered, moved between the tiers, forgotten, found again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slotkeeper.core.snapshots import SnapshotId, Tier
from slotkeeper.core.tokens import Tokens
from slotkeeper.engine.slotfile import SlotFile, patched, repair_window, whole, with_last_token
from slotkeeper.engine.slotfile import keep as keep_records
from slotkeeper.engine.slotfile.recipes import Donor, graft
from slotkeeper.store.files import Halt
from slotkeeper.store.intake import Edit, Saved
from slotkeeper.store.kept import snapshot
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import HaltedError, MissingError, StoreError, TornError, Trouble, UnfitError
from unit.engine.slotfile.built import IDS, WINDOW, slot_file, whole_file
from unit.store.saving import ENGINE, file_of, ids, keep, mode, names_in, offered, opened, times


@pytest.fixture
def hot(tmp_path: Path) -> Path:
    return tmp_path / "hot"


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


async def test_what_was_kept_is_offered_byte_for_byte(hot: Path):
    async with opened(hot) as store:
        kept = await keep(store, hot, file_of(3), seed=3)
        assert kept.tokens == Tokens(ids(3))
        assert kept.manifest.checkpoints == (8, 16)
        assert kept.manifest.draft
        assert kept.manifest.version == 4
        assert kept.manifest.layout == whole_file(file_of(3)).layout
        assert await offered(store, hot, kept.id) == file_of(3)
        assert names_in(hot) == {f"{kept.id}.slot", f"{kept.id}.json"}


async def test_files_are_for_us_alone(hot: Path):
    async with opened(hot) as store:
        kept = await keep(store, hot)
    assert mode(hot) == 0o700
    assert mode(hot / f"{kept.id}.slot") == mode(hot / f"{kept.id}.json") == 0o600


async def test_files_are_dated_back(hot: Path):
    """Where a file system's clock has not ticked since we hashed, a write would leave the same times."""
    async with opened(hot) as store:
        kept = await keep(store, hot)
        written, changed = times(hot / f"{kept.id}.slot")
        assert written < changed - 1e9
        assert await store.offer(kept.id, ENGINE)
        assert times(hot / f"{kept.id}.slot") == (written, changed)  # not hashed again


async def test_a_new_process_finds_everything_that_was_kept(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        a, b, c = [await keep(store, hot) for _ in range(3)]
        await store.demote(b.id)
        await store.copy_cold(c.id)
        await store.used(a.id, paid=True)
        await store.used(a.id, paid=False)
        before = {kept.id: kept for kept in store.listing()}
    later = Store(hot, cold)
    found = await later.open()
    await later.close()
    await later.close()
    assert {kept.id: kept for kept in found.kept} == before
    assert found.notes == ()
    assert before[a.id].use.restores == before[a.id].use.failures == 1
    assert before[b.id].tiers == {Tier.COLD}
    assert before[c.id].tiers == {Tier.HOT, Tier.COLD}


async def test_the_core_gets_its_own_clock(hot: Path):
    async with opened(hot, clock=lambda: 5000.0) as store:
        kept = await keep(store, hot, golden=True)
        core = snapshot(kept, -4900.0)
    assert (core.created, core.used, core.restores) == (100.0, 100.0, 0)
    assert core.golden
    assert not core.repaired
    assert (core.id, core.tokens, core.size) == (kept.id, kept.tokens, kept.manifest.size)
    assert (core.checkpoints, core.draft, core.tier) == ((8, 16), True, Tier.HOT)


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
            await store.keep(name, Saved(fingerprint=ENGINE, tokens=Tokens(ids(1)), written=100))
        assert caught.value.trouble is Trouble.NOT_SHARED
        assert store.trouble is None  # another engine may share it


async def test_only_names_that_were_given_out_are_taken(hot: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.write_bytes(file_of(1))
    async with opened(hot) as store:
        for name in ("../outside", str(outside), "slotkeeper-000000000000-00000000.tmp"):
            saved = Saved(fingerprint=ENGINE, tokens=Tokens(ids(1)), written=len(file_of(1)))
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
    def trim(_: object, files: list[SlotFile]) -> Edit:
        return Edit(recipe=keep_records(files[0], files[0].records[1:]))

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

        def transplant(_: object, files: list[SlotFile]) -> Edit:
            seen.extend(files)
            other = Donor(source=1, file=files[1], records=files[1].records)
            return Edit(recipe=graft(files[0], files[0].records, [other]))

        others = [gone.id, donor.id, SnapshotId("slotkeeper-unknown")]
        kept = await keep(store, hot, file_of(1), seed=1, edit=transplant, others=others)
        assert len(seen) == 2  # those that cannot be used are left out
        assert kept.manifest.checkpoints == (4, 8, 16)
        assert await offered(store, hot, kept.id) == file_of(1, cuts=(4, 8, 16))


async def test_a_repaired_window_is_remembered(hot: Path):
    data = slot_file("swa", 2, IDS)

    def repair(file: object, files: list[SlotFile]) -> Edit:
        patch = repair_window(file, files[0], WINDOW)
        return Edit(recipe=patched(whole(files[0]), patch), repaired=True)

    async with opened(hot) as store:
        kept = await keep(store, hot, data, tokens=Tokens(IDS), edit=repair)
        assert kept.manifest.repaired
        stored = await offered(store, hot, kept.id)
        assert len(stored) == len(data)
        assert stored != data


async def test_an_edit_that_breaks_the_file_is_not_kept(hot: Path):
    async with opened(hot) as store:
        with pytest.raises(TornError):
            await keep(store, hot, edit=lambda _file, _files: Edit(recipe=(b"nonsense",)))
        assert names_in(hot) == set()


async def test_the_last_token_is_the_headers(hot: Path):
    """The trick with the last token changes what the engine believes, so that is what counts."""

    def other_end(_: object, files: list[SlotFile]) -> Edit:
        return Edit(recipe=patched(whole(files[0]), with_last_token(files[0], 7)))

    async with opened(hot) as store:
        kept = await keep(store, hot, file_of(1), seed=1, edit=other_end)
        assert kept.tokens == Tokens((*ids(1)[:-1], 7))


async def test_from_tier_to_tier_and_back(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        kept = await keep(store, hot, file_of(1), seed=1)
        await store.demote(kept.id)
        assert names_in(hot) == set()
        assert names_in(cold) == {f"{kept.id}.slot", f"{kept.id}.json"}
        assert store.sizes() == {Tier.HOT: 0, Tier.COLD: len(file_of(1))}
        assert await offered(store, hot, kept.id) == file_of(1)
        assert names_in(hot) == names_in(cold)
        assert store.sizes() == {Tier.HOT: len(file_of(1)), Tier.COLD: len(file_of(1))}
        await store.demote(kept.id)
        assert names_in(hot) == set()
        await store.forget(kept.id)
        await store.forget(kept.id)
        assert names_in(cold) == set()
        assert store.listing() == []


async def test_a_hot_copy_that_is_damaged_comes_from_the_cold_tier(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        kept = await keep(store, hot, file_of(1), seed=1)
        await store.copy_cold(kept.id)
        (hot / f"{kept.id}.slot").write_bytes(file_of(2))
        assert await offered(store, hot, kept.id) == file_of(1)
        assert f"slotkeeper-quarantine/{kept.id}.slot" in names_in(hot)
        assert store.listing()[0].tiers == {Tier.HOT, Tier.COLD}


async def test_a_missing_file_is_forgotten(hot: Path):
    async with opened(hot) as store:
        kept = await keep(store, hot)
        (hot / f"{kept.id}.slot").unlink()
        with pytest.raises(MissingError):
            await store.offer(kept.id, ENGINE)
        assert store.listing() == []
        assert names_in(hot) == set()
        with pytest.raises(MissingError):
            await store.offer(kept.id, ENGINE)


async def test_another_kind_of_engine_gets_nothing(hot: Path):
    async with opened(hot) as store:
        kept = await keep(store, hot)
        with pytest.raises(UnfitError):
            await store.offer(kept.id, "of another engine")
        assert [kept] == store.listing()
        assert await store.offer(kept.id, ENGINE) == f"{kept.id}.slot"


async def test_verify_finds_damage_in_every_tier(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        good, bad, worse = [await keep(store, hot) for _ in range(3)]
        for kept in (bad, worse):
            await store.copy_cold(kept.id)
        (cold / f"{bad.id}.slot").write_bytes(b"x")
        (cold / f"{worse.id}.slot").unlink()
        (hot / f"{worse.id}.slot").unlink()
        found = await store.verify_all()
        assert {id_: type(error) for id_, error in found.items()} == {
            bad.id: UnfitError,
            worse.id: MissingError,
        }
        assert {kept.id: kept.tiers for kept in store.listing()} == {
            good.id: {Tier.HOT},
            bad.id: {Tier.HOT},
        }


async def test_one_file_is_worked_on_by_one_at_a_time(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        kept = await keep(store, hot, file_of(1), seed=1)
        work = [store.demote(kept.id), store.offer(kept.id, ENGINE), store.copy_cold(kept.id)] * 4
        await asyncio.gather(*work)
        assert await offered(store, hot, kept.id) == file_of(1)
        assert await store.verify_all() == {}


async def test_whoever_is_cancelled_leaves_nothing_behind(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        kept = await keep(store, hot)
        halted = asyncio.Event()
        loop = asyncio.get_running_loop()
        wanted = Halt()

        def edit(_file: object, files: list[SlotFile]) -> Edit:
            loop.call_soon_threadsafe(halted.set)
            wanted.wait(10)
            return Edit(recipe=keep_records(files[0], files[0].records))

        saving = asyncio.gather(keep(store, hot, edit=edit))
        await halted.wait()
        saving.cancel()
        loop.call_later(0.05, wanted.set)
        with pytest.raises(asyncio.CancelledError):
            await saving
        assert store.listing() == [kept]
        assert names_in(hot) == {f"{kept.id}.slot", f"{kept.id}.json"}


async def test_closing_ends_what_is_going_on(hot: Path):
    store = Store(hot)
    await store.open()
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    wanted = Halt()

    def edit(_file: object, _files: list[SlotFile]) -> None:
        loop.call_soon_threadsafe(begun.set)
        wanted.wait(10)

    saving = asyncio.gather(keep(store, hot, edit=edit), return_exceptions=True)
    await begun.wait()
    loop.call_later(0.05, wanted.set)
    await store.close()
    assert [type(result) for result in await saving] == [HaltedError]
    with pytest.raises(HaltedError):
        await store.temporary()
    assert names_in(hot) == set()


async def test_what_the_store_is_doing_can_be_read(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        await keep(store, hot)
        await store.temporary()
        assert repr(store) == "<Store 1 snapshots | 0 MiB hot, 0 MiB cold | 1 being saved | well>"
