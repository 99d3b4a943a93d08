"""The cold folder stores what states have in common once, and offers exactly the bytes that were kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotkeeper.engine.slotfile import RUN
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.scheduler.types import Tier
from slotkeeper.store import files
from slotkeeper.store.folders import joined
from slotkeeper.store.folders.run_folder import RunFolder
from slotkeeper.store.folders.snapshot_folder import RESERVE
from slotkeeper.store.index import Kept, by_our_clock
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import SnapshotError, StoreError
from unit.store.saving import changed, cut, keep, names_in, offered, opened, state

KINDS = ("dense", "latent", "swa", "hybrid", "recurrent", "transposed")


async def kept_cold(
    store: Store, hot: Path, n: int, *, seed: int = 1, space: str = "", slot: int = 0
) -> Kept:
    """Keep a state and move it to the cold folder."""
    tokens = Tokens(range(n)).within(space)
    kept = await keep(store, hot, state(n, seed=seed, slot=slot), tokens=tokens)
    await store.demote(kept.id)
    return kept


def runs_in(cold: Path) -> set[Path]:
    return set((cold / files.RUN_FOLDER).glob("*"))


def size_of(cold: Path) -> int:
    """Return the bytes of all runs and lists."""
    return sum(path.stat().st_size for path in {*runs_in(cold), *cold.glob("*.runs")})


@pytest.mark.parametrize("kind", KINDS)
async def test_a_state_comes_back_byte_for_byte(hot: Path, cold: Path, kind: str):
    data = state(5 * RUN + 9, kind)
    async with opened(hot, cold) as store:
        kept = await keep(store, hot, data, tokens=Tokens(range(5 * RUN + 9)))
        await store.demote(kept.id)
        assert names_in(hot) == set()
        in_parts = kind != "transposed"
        assert (cold / f"{kept.id}.slot").exists() is not in_parts
        assert bool(runs_in(cold)) is in_parts
        await store.verify(kept.id)
    async with opened(hot, cold) as store:
        assert await offered(store, hot, kept.id) == data
        assert names_in(hot) == {f"{kept.id}.slot", f"{kept.id}.json"}


async def test_a_state_with_more_parts_than_open_files_comes_back(
    hot: Path, cold: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(joined, "DESCRIPTORS", 2)
    async with opened(hot, cold) as store:
        kept = await kept_cold(store, hot, 6 * RUN)
        assert await offered(store, hot, kept.id) == state(6 * RUN)


async def test_two_agents_with_one_beginning_share_its_runs_but_two_namespaces_do_not(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        await kept_cold(store, hot, 4 * RUN, space="one")
        alone = len(runs_in(cold))
        await kept_cold(store, hot, 5 * RUN, space="one")
        shared = len(runs_in(cold))
        assert shared == alone + 2, "the run that is new, and another checkpoint"
        await kept_cold(store, hot, 4 * RUN, space="two")
        assert len(runs_in(cold)) == shared + alone


async def test_every_byte_counts_once_for_the_newest_state_that_has_it(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        old = await kept_cold(store, hot, 4 * RUN)
        ((_, counted),) = store.recount()
        assert counted == store.sizes()[Tier.COLD] == size_of(cold)
        new = await kept_cold(store, hot, 5 * RUN)
        counts = dict(store.recount())
        assert sum(counts.values()) == store.sizes()[Tier.COLD] == size_of(cold)
        assert counts[old.id] < counts[new.id] / 2
        assert store.recount() == []
        await store.forget(new.id)
        assert store.recount() == [(old.id, size_of(cold))]
        assert store.sizes()[Tier.COLD] == size_of(cold)
    async with opened(hot, cold) as store:
        (kept,) = store.listing()
        assert kept.cold_bytes == by_our_clock(kept).counts == size_of(cold)


async def test_a_state_that_moves_back_and_forth_is_written_once(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        kept = await kept_cold(store, hot, 4 * RUN)
        before = {path: path.stat().st_ino for path in runs_in(cold)}
        for _ in range(2):
            await store.offer(kept.id, kept.manifest.fingerprint)
            assert store.sizes()[Tier.COLD] == 0
            await store.demote(kept.id)
        assert {path: path.stat().st_ino for path in runs_in(cold)} == before


async def test_leftovers_have_no_more_than_the_room_that_is_left(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        store.limit_cold(2 * len(state(4 * RUN)))
        for seed in range(1, 6):
            kept = await kept_cold(store, hot, 4 * RUN, seed=seed)
            await store.offer(kept.id, kept.manifest.fingerprint)
        assert len(state(4 * RUN)) < size_of(cold) <= 2 * len(state(4 * RUN))


async def test_a_state_that_a_user_removes_leaves_no_run(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        one, two = await kept_cold(store, hot, 4 * RUN), await kept_cold(store, hot, 5 * RUN)
        await store.forget(two.id)
        assert await offered(store, hot, one.id) == state(4 * RUN)
        await store.demote(one.id)
        await store.forget(one.id)
        assert names_in(cold) == set()


async def test_a_leftover_of_a_killed_sidecar_is_used_or_makes_room(hot: Path, cold: Path):
    async with opened(hot, cold) as store:
        kept = await kept_cold(store, hot, 4 * RUN)
    there = {path: path.stat().st_ino for path in runs_in(cold)}
    for suffix in (".runs", ".json"):
        (cold / f"{kept.id}{suffix}").unlink()
    async with opened(hot, cold) as store:
        await kept_cold(store, hot, 4 * RUN)
        assert {path: path.stat().st_ino for path in runs_in(cold)} == there


@pytest.mark.parametrize("damage", [changed, cut, Path.unlink])
@pytest.mark.parametrize("restarted", [False, True])
async def test_states_with_a_damaged_run_are_not_offered_until_it_is_written_again(
    hot: Path, cold: Path, damage, restarted: bool
):
    """The run that all three have in common; the fourth has none of it."""
    async with opened(hot, cold) as store:
        states = [await kept_cold(store, hot, n * RUN) for n in (4, 5, 6)]
        other = await kept_cold(store, hot, 4 * RUN, seed=2)
        assert len(runs_in(cold)) > 8
        damage(common_run(store, cold, states))
        if not restarted:
            await lost(store, states[0].id)
            again = await kept_cold(store, hot, 4 * RUN)
            for kept, n in ((again, 4), (states[1], 5), (states[2], 6)):
                assert await offered(store, hot, kept.id) == state(n * RUN)
            return
    async with opened(hot, cold) as store:
        for kept in states:
            await lost(store, kept.id)
        assert await offered(store, hot, other.id) == state(4 * RUN, seed=2)


async def lost(store: Store, snapshot: SnapshotId) -> None:
    with pytest.raises(SnapshotError):
        await store.offer(snapshot, "0123456789abcdef")
    assert snapshot not in {kept.id for kept in store.listing()}


def common_run(store: Store, cold: Path, states: list[Kept]) -> Path:
    """Return the first run, which all these states have."""
    secret = store.secret
    assert secret
    names = []
    for kept in states:
        parts = joined.decode((cold / f"{kept.id}.runs").read_bytes(), kept.id, secret)
        assert parts
        names.append(parts.names(secret)[0])
    assert len(set(names)) == 1
    return cold / files.RUN_FOLDER / names[0]


async def test_a_damaged_run_is_not_used_for_another_state(hot: Path, cold: Path):
    """It is found when the next state needs it, although it has the right name and size."""
    async with opened(hot, cold) as store:
        kept = await kept_cold(store, hot, 4 * RUN)
        changed(common_run(store, cold, [kept]))
        other = await kept_cold(store, hot, 5 * RUN)
        assert await offered(store, hot, other.id) == state(5 * RUN)
        assert await offered(store, hot, kept.id) == state(4 * RUN), "it was repaired with it"


@pytest.mark.parametrize("damage", [changed, cut, Path.unlink])
async def test_a_damaged_list_loses_only_its_state(hot: Path, cold: Path, damage):
    async with opened(hot, cold) as store:
        one, two = await kept_cold(store, hot, 4 * RUN), await kept_cold(store, hot, 5 * RUN)
        damage(cold / f"{one.id}.runs")
        await lost(store, one.id)
        assert await offered(store, hot, two.id) == state(5 * RUN)


async def test_a_folder_of_runs_that_leads_elsewhere_is_not_used(hot: Path, cold: Path, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with opened(hot, cold) as store:
        (cold / files.RUN_FOLDER).symlink_to(elsewhere)
        kept = await keep(store, hot, state(4 * RUN), tokens=Tokens(range(4 * RUN)))
        with pytest.raises(Exception, match="Cannot copy"):
            await store.demote(kept.id)
        assert [*elsewhere.iterdir()] == []
        assert await offered(store, hot, kept.id) == state(4 * RUN)


async def test_runs_of_states_that_were_not_read_yet_are_never_removed(hot: Path, cold: Path):
    """The folder could not be opened at the start. A copy goes there, and leaves, before it is swept."""
    async with opened(hot, cold) as store:
        old = await kept_cold(store, hot, 4 * RUN)
    store = Store(hot, cold)
    async with opened(cold):
        await store.open()
        store.limit_cold(0)
    new = await kept_cold(store, hot, 5 * RUN)
    await store.forget(new.id)
    assert [kept.id for kept in (await store.look_again()).kept] == [old.id]
    assert await offered(store, hot, old.id) == state(4 * RUN)
    await store.close()


async def test_a_full_disk_costs_leftovers_and_no_state(
    hot: Path, cold: Path, monkeypatch: pytest.MonkeyPatch
):
    async with opened(hot, cold) as store:
        one, two = [await kept_cold(store, hot, 4 * RUN, seed=seed) for seed in (1, 2)]
        await store.offer(one.id, one.manifest.fingerprint)
        taken = size_of(cold)
        room = RESERVE + 2 * RUN * 16 * 4 + taken
        monkeypatch.setattr(RunFolder, "free", lambda _: room - size_of(cold))
        three = await kept_cold(store, hot, 5 * RUN, seed=3)
        assert size_of(cold) < taken + len(state(5 * RUN))
        for kept, n, seed in ((two, 4, 2), (three, 5, 3)):
            assert await offered(store, hot, kept.id) == state(n * RUN, seed=seed)
        with pytest.raises(StoreError, match="No room"):
            await kept_cold(store, hot, 40 * RUN, seed=4)
        assert not {name for name in names_in(cold) if name.endswith(".tmp")}
