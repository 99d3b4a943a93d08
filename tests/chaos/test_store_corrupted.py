"""Hundreds of kinds of damage to a store: it only ever offers the exact bytes that were kept."""

from __future__ import annotations

import hmac
import os
import random
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store import files
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import SnapshotError
from unit.engine.slotfiles import slot_file
from unit.store.saving import file_of, keep, offered, opened

ROUNDS = 5  # with each damage that chance places, in each tier; another damage is always the same
FEWER = 4  # with states in runs, which take several files each

Damage = Callable[[Path, SnapshotId, SnapshotId, random.Random], None]


def slot(folder: Path, snapshot: SnapshotId) -> Path:
    return folder / f"{snapshot}.slot"


def manifest(folder: Path, snapshot: SnapshotId) -> Path:
    return folder / f"{snapshot}.json"


def flip(path: Path, chance: random.Random) -> None:
    """Flip one bit in place: the file keeps its inode."""
    with path.open("r+b") as file:
        place = chance.randrange(path.stat().st_size)
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ 1 << chance.randrange(8)]))


def flipped(folder: Path, one: SnapshotId, _: SnapshotId, chance: random.Random) -> None:
    flip(slot(folder, one), chance)


def flipped_and_dated_back(folder: Path, one: SnapshotId, _: SnapshotId, chance: random.Random) -> None:
    before = slot(folder, one).stat()
    flip(slot(folder, one), chance)
    os.utime(slot(folder, one), ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(folder: Path, one: SnapshotId, _: SnapshotId, chance: random.Random) -> None:
    os.truncate(slot(folder, one), chance.randrange(slot(folder, one).stat().st_size))


def cut_and_filled(folder: Path, one: SnapshotId, two: SnapshotId, chance: random.Random) -> None:
    """Damage as after a file system crash: the right length, with zeros at the end."""
    size = slot(folder, one).stat().st_size
    cut(folder, one, two, chance)
    os.truncate(slot(folder, one), size)


def longer(folder: Path, one: SnapshotId, _: SnapshotId, chance: random.Random) -> None:
    with slot(folder, one).open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 100)))


def swapped(folder: Path, one: SnapshotId, two: SnapshotId, _: random.Random) -> None:
    aside = folder / "aside"
    slot(folder, one).rename(aside)
    slot(folder, two).rename(slot(folder, one))
    aside.rename(slot(folder, two))


def replaced(folder: Path, one: SnapshotId, _: SnapshotId, chance: random.Random) -> None:
    """Replace the file by a complete one of other tokens, and of the same size."""
    aside = folder / "aside"
    aside.write_bytes(file_of(chance.randrange(10_000, 20_000)))
    aside.replace(slot(folder, one))


def gone(folder: Path, one: SnapshotId, _: SnapshotId, __: random.Random) -> None:
    slot(folder, one).unlink()


def manifest_flipped(folder: Path, one: SnapshotId, _: SnapshotId, chance: random.Random) -> None:
    flip(manifest(folder, one), chance)


def manifest_cut(folder: Path, one: SnapshotId, _: SnapshotId, chance: random.Random) -> None:
    os.truncate(manifest(folder, one), chance.randrange(manifest(folder, one).stat().st_size))


def manifest_of_another(folder: Path, one: SnapshotId, two: SnapshotId, _: random.Random) -> None:
    manifest(folder, one).write_bytes(manifest(folder, two).read_bytes())


def both_of_another(folder: Path, one: SnapshotId, two: SnapshotId, chance: random.Random) -> None:
    manifest_of_another(folder, one, two, chance)
    slot(folder, one).write_bytes(slot(folder, two).read_bytes())


def forged(folder: Path, one: SnapshotId, two: SnapshotId, chance: random.Random) -> None:
    """Write some fields of another file's manifest, or fields that no file has, with a valid seal."""
    body, other = (orjson.loads(manifest(folder, id_).read_bytes()) for id_ in (one, two))
    for name in chance.sample(["size", "sha256", "chain", "layout", "version", "checkpoints"], 2):
        differs = other[name] != body[name]
        body[name] = (
            other[name]
            if differs
            else {"size": 999, "version": 2}.get(name, [4] if name == "checkpoints" else "f00d")
        )
    reseal(folder, one, body)


def of_another_engine(folder: Path, one: SnapshotId, _: SnapshotId, __: random.Random) -> None:
    body = orjson.loads(manifest(folder, one).read_bytes())
    reseal(folder, one, body | {"fingerprint": "of another engine"})


def reseal(folder: Path, snapshot: SnapshotId, body: dict[str, object]) -> None:
    del body["seal"]
    secret = (folder / files.SEAL).read_bytes()
    seal = hmac.digest(secret, orjson.dumps(body, option=orjson.OPT_SORT_KEYS), "sha256").hex()
    manifest(folder, snapshot).write_bytes(orjson.dumps(body | {"seal": seal}))


FILES: list[Damage] = [flipped, flipped_and_dated_back, cut, cut_and_filled, longer, swapped, replaced, gone]
MANIFESTS: list[Damage] = [
    manifest_flipped,
    manifest_cut,
    manifest_of_another,
    both_of_another,
    forged,
    of_another_engine,
]


# What chance changes in these is where, or which fields: each round is another damage.
PLACED_BY_CHANCE = {
    flipped,
    flipped_and_dated_back,
    cut,
    cut_and_filled,
    manifest_flipped,
    manifest_cut,
    forged,
}


def rounds(damage: Damage) -> range:
    return range(ROUNDS if damage in PLACED_BY_CHANCE else 1)


async def survives(store: Store, hot: Path, whole: dict[SnapshotId, bytes]) -> int:
    """Ask for every snapshot, twice; return how many are lost."""
    lost = 0
    for id_, data in whole.items():
        try:
            assert await offered(store, hot, id_) == data
        except SnapshotError:
            lost += 1
            with pytest.raises(SnapshotError):
                await store.offer(id_, "0123456789abcdef")
    return lost


async def three(store: Store, hot: Path) -> dict[SnapshotId, bytes]:
    whole = {}
    for seed in (1, 2, 3):
        kept = await keep(store, hot, file_of(seed), seed=seed)
        whole[kept.id] = file_of(seed)
    return whole


@pytest.mark.parametrize("damage", FILES)
async def test_a_file_that_is_damaged_while_the_sidecar_runs_is_never_offered(tmp_path: Path, damage: Damage):
    """The damage happens while the sidecar runs, just after it has hashed the file."""
    chance = random.Random(damage.__name__)
    for number in rounds(damage):
        hot = tmp_path / str(number)
        async with opened(hot) as store:
            whole = await three(store, hot)
            one, two, _ = whole
            damage(hot, one, two, chance)
            assert await survives(store, hot, whole) == (2 if damage is swapped else 1)


@pytest.mark.parametrize("damage", FILES + MANIFESTS)
async def test_files_damaged_while_no_sidecar_runs_are_never_offered(tmp_path: Path, damage: Damage):
    chance = random.Random(damage.__name__)
    for number in rounds(damage):
        hot = tmp_path / str(number)
        async with opened(hot) as store:
            whole = await three(store, hot)
        one, two, _ = whole
        damage(hot, one, two, chance)
        async with opened(hot) as store:
            assert await survives(store, hot, whole) == (2 if damage is swapped else 1)


@pytest.mark.parametrize("damage", FILES + MANIFESTS)
async def test_a_damaged_cold_copy_never_becomes_a_hot_file(tmp_path: Path, damage: Damage):
    chance = random.Random(damage.__name__)
    for number in rounds(damage):
        hot, cold = tmp_path / f"hot{number}", tmp_path / f"cold{number}"
        async with opened(hot, cold) as store:
            whole = await three(store, hot)
            for id_ in whole:
                await store.demote(id_)
            one, two, _ = whole
            if damage in FILES:
                damage(cold, one, two, chance)
                assert await survives(store, hot, whole) == (2 if damage is swapped else 1)
                continue
        damage(cold, one, two, chance)
        async with opened(hot, cold) as store:
            assert await survives(store, hot, whole) == 1


def of_cold(cold: Path, chance: random.Random) -> tuple[Path, Path]:
    """Return two files of states in runs: runs, lists, manifests."""
    found = [*(cold / files.RUN_FOLDER).iterdir(), *cold.glob("*.runs"), *cold.glob("*.json")]
    one, two = chance.sample(sorted(found), 2)
    return one, two


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "swap", "replace", "gone"])
async def test_damage_to_states_in_runs_never_changes_a_byte_that_is_offered(tmp_path: Path, damage: str):
    """Three states with a common beginning. Each is offered as it was kept, or not any more.

    The damage happens while the sidecar runs, and every second time while none does.
    """
    chance, lost = random.Random(damage), 0
    for number in range(FEWER):
        hot, cold = tmp_path / f"hot{number}", tmp_path / f"cold{number}"
        async with opened(hot, cold) as store:
            whole = {}
            for n in (200, 300, 400):
                data = slot_file("hybrid", 4, range(n), cuts=(n - 60, n - 50), seed=1)
                kept = await keep(store, hot, data, tokens=Tokens(range(n)))
                whole[kept.id] = data
                await store.demote(kept.id)
            one, two = of_cold(cold, chance)
            match damage:
                case "flip":
                    flip(one, chance)
                case "cut":
                    os.truncate(one, chance.randrange(one.stat().st_size))
                case "longer":
                    with one.open("ab") as file:
                        file.write(b"more")
                case "swap":
                    data = one.read_bytes()
                    one.write_bytes(two.read_bytes())
                    two.write_bytes(data)
                case "replace":
                    one.write_bytes(chance.randbytes(one.stat().st_size))
                case "gone":
                    one.unlink()
            if number % 2:
                lost += await survives(store, hot, whole)
                continue
        async with opened(hot, cold) as store:
            lost += await survives(store, hot, whole)
    assert FEWER / 2 <= lost < 3 * FEWER


@pytest.mark.parametrize("damage", FILES + MANIFESTS)
async def test_an_undamaged_copy_in_the_other_tier_is_offered(tmp_path: Path, damage: Damage):
    """Except a complete manifest of another engine: it says what the hot file is."""
    chance = random.Random(damage.__name__)
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    async with opened(hot, cold) as store:
        whole = await three(store, hot)
        for id_ in whole:
            await store.copy_cold(id_)
    one, two, _ = whole
    damage(hot, one, two, chance)
    async with opened(hot, cold) as store:
        assert await survives(store, hot, whole) == (1 if damage is of_another_engine else 0)
