"""States in parts in a shared store: only what is new is uploaded, and exactly the kept bytes come back."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from slotkeeper.engine.slotfile import RUN, PartSizes
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.store.index import Kept
from slotkeeper.store.shared_store import object_names, part_objects
from slotkeeper.store.shared_store import shared as module
from slotkeeper.store.shared_store.object_names import part_at, part_path
from slotkeeper.store.shared_store.part_objects import StoredParts
from slotkeeper.store.shared_store.sealing import SALT_BYTES, TAG, StoreKey
from slotkeeper.store.shared_store.shared import SharedStore
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import MissingError, UnfitError
from unit.store.saving import ENGINE, changed, cut, grown, keep, names_in, offered, state
from unit.store.sharing import ALL_IN_PARTS, ALL_WHOLE, KEY, found, sidecar
from unit.store.test_shared import objects

KEYS = pytest.mark.parametrize("key", [None, KEY], ids=["open", "sealed"])
ROW = 4 * 16  # bytes of a token in all layers of these files


async def kept_here(store: Store, hot: Path, n: int, kind: str = "dense", space: str = "") -> Kept:
    tokens = Tokens(range(n)).within(space)
    return await keep(store, hot, state(n, kind), tokens=tokens)


async def uploaded(store: Store, hot: Path, n: int, kind: str = "dense", space: str = "") -> Kept:
    kept = await kept_here(store, hot, n, kind, space)
    await store.copy_cold(kept.id)
    return kept


async def fetched(store: Store, shared: SharedStore, hot: Path, n: int, space: str = "") -> bytes:
    """Return the file of a state that another sidecar has uploaded."""
    there, *_ = await found(shared, Tokens(range(n)).within(space))
    await store.found(there)
    return await offered(store, hot, there.id)


def written(cold: Path) -> dict[Path, int]:
    """Return the bytes of all parts and heads."""
    return {path: path.stat().st_size for kind in ("parts", "heads") for path in objects(cold, kind)}


@pytest.fixture
def three(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return two hot folders, and what they share."""
    return tmp_path / "one", tmp_path / "other", tmp_path / "shared"


@pytest.mark.parametrize(
    ("key", "sizes"),
    [(None, PartSizes(least=5000, most=7000)), (KEY, ALL_IN_PARTS)],
    ids=["open, larger", "sealed, as they are"],
)
@pytest.mark.parametrize("kind", ["dense", "latent", "swa", "hybrid", "transposed"])
async def test_another_sidecar_gets_a_state_byte_for_byte(three, key, sizes, kind):
    one, other, cold = three
    n = 5 * RUN + 9
    async with (
        sidecar(one, cold, key, sizes=sizes) as (store, _),
        sidecar(other, cold, key, sizes=sizes) as (second, shared),
    ):
        kept = await uploaded(store, one, n, kind)
        in_parts = kind != "transposed"
        assert (bool(objects(cold, "parts")), bool(objects(cold, "blobs"))) == (in_parts, not in_parts)
        assert await fetched(second, shared, other, n) == (one / f"{kept.id}.slot").read_bytes()
        await second.verify(kept.id)
        assert await store.copy_cold(kept.id)


async def test_parts_have_the_size_that_a_store_wants(three):
    one, _, cold = three
    sizes = PartSizes(least=20_000, most=40_000)
    async with sidecar(one, cold, sizes=sizes) as (store, _):
        await uploaded(store, one, 20 * RUN)
    stored = sorted(path.stat().st_size for path in objects(cold, "parts"))
    assert len(stored) == 6, "five runs of four times as many tokens, and the frame"
    assert sizes.least <= stored[1] <= stored[-1] <= sizes.most


async def test_a_small_state_stays_whole(three):
    one, _, cold = three
    async with sidecar(one, cold) as (store, _):
        kept = await uploaded(store, one, 5 * RUN)
        assert kept.manifest.size < part_objects.SMALLEST * part_objects.IN_STORE.least
    assert objects(cold, "parts") == []


async def test_a_save_asks_for_no_part_that_was_seen_a_moment_ago(three, monkeypatch):
    """Else a long conversation would cost a request for each of its parts in each turn."""
    one, _, cold = three
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared):
        await uploaded(store, one, 8 * RUN)
        asked: list[str] = []
        monkeypatch.setattr(module, "CHEAP", 0)
        for name in ("size", "create", "read"):
            monkeypatch.setattr(shared.objects, name, noting(asked, getattr(shared.objects, name)))
        await uploaded(store, one, 9 * RUN)
    parts = [path for path in asked if path.startswith("parts/")]
    assert len(parts) == 2 * 2 + 1, "it looks for a run and a checkpoint, and writes them and the frame"
    assert len(asked) - len(parts) == 3, "it asks whether the state is there, both ways, and writes the head"


def noting(asked: list[str], call: Callable) -> Callable:
    async def noted(path: str, *rest: object) -> object:
        asked.append(path)
        return await call(path, *rest)

    return noted


@KEYS
async def test_two_agents_share_the_runs_of_their_beginning_but_two_namespaces_do_not(three, key):
    one, other, cold = three
    async with (
        sidecar(one, cold, key, sizes=ALL_IN_PARTS) as (store, _),
        sidecar(other, cold, key, sizes=ALL_IN_PARTS) as (second, _),
    ):
        await uploaded(store, one, 4 * RUN, space="mine")
        alone = len(objects(cold, "parts"))
        await uploaded(second, other, 5 * RUN, space="mine")
        both = len(objects(cold, "parts"))
        assert both == alone + 3, "a run, a checkpoint, and the frame"
        await uploaded(store, one, 4 * RUN, space="yours")
        assert len(objects(cold, "parts")) == both + alone


async def test_names_and_contents_of_parts_tell_nothing_without_the_key(three):
    one, _, cold = three
    async with sidecar(one, cold, KEY, sizes=ALL_IN_PARTS) as (store, _):
        kept = await uploaded(store, one, 4 * RUN)
    data = (one / f"{kept.id}.slot").read_bytes()
    row = data[len(data) // 2 :][:32]
    assert not any(row in path.read_bytes() for path in objects(cold, "parts"))
    async with sidecar(one, cold.with_name("another"), StoreKey(b"z" * 32), sizes=ALL_IN_PARTS) as (
        _,
        shared,
    ):
        await shared.take(kept, store._tiers.hot)
    names = [{path.name for path in objects(folder, "parts")} for folder in (cold, cold.with_name("another"))]
    assert names[0].isdisjoint(names[1])


@KEYS
@pytest.mark.parametrize("damage", [cut, grown, changed, os.unlink])
@pytest.mark.parametrize("which", ["run", "frame", "head"])
async def test_a_damaged_part_never_reaches_the_slot_folder_and_is_written_again(three, key, damage, which):
    one, other, cold = three
    n = 4 * RUN
    async with (
        sidecar(one, cold, key, sizes=ALL_IN_PARTS) as (store, _),
        sidecar(other, cold, key, sizes=ALL_IN_PARTS) as (second, shared),
    ):
        kept = await uploaded(store, one, n)
        (there,) = await found(shared, Tokens(range(n)))
        await second.found(there)
        head = objects(cold, "heads")[0]
        run = RUN * ROW + (SALT_BYTES + TAG) * (key is not None)
        runs = {path for path in objects(cold, "parts") if path.stat().st_size == run}
        others = set(objects(cold, "parts")) - runs
        frame = max(others, key=lambda path: path.stat().st_size)
        damage({"run": min(runs), "frame": frame, "head": head}[which])
        with pytest.raises((UnfitError, MissingError)):
            await second.offer(kept.id, ENGINE)
        assert names_in(other) == set()
        assert await found(shared, Tokens(range(n))) == []
        again = await uploaded(second, other, n)
        await second.verify(again.id)
        assert await fetched(store, shared, one, n) == state(n)


@pytest.mark.parametrize("number", [0, -1], ids=["run", "frame"])
async def test_verify_finds_a_damaged_part(three, number):
    one, _, cold = three
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared):
        kept = await uploaded(store, one, 4 * RUN)
        head = await shared._head(shared._names.entry(kept.manifest, kept.tokens).parted)
        assert isinstance(head.body, StoredParts)
        changed(cold / part_path(head.body.names[number]))
        await store._drop(kept, next(iter(kept.tiers)))
        with pytest.raises(UnfitError):
            await store.verify(kept.id)


@KEYS
async def test_the_whole_states_of_an_earlier_release_are_read_and_not_written_again(three, key):
    one, other, cold = three
    n = 4 * RUN
    async with sidecar(one, cold, key, sizes=ALL_WHOLE) as (store, _):
        kept = await uploaded(store, one, n)
    async with sidecar(other, cold, key, sizes=ALL_IN_PARTS) as (second, shared):
        assert await fetched(second, shared, other, n) == (one / f"{kept.id}.slot").read_bytes()
    async with sidecar(one, cold, key, sizes=ALL_IN_PARTS) as (store, _):
        shared_before = set(objects(cold, "blobs"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "CHEAP", 0)
            assert await store.copy_cold(kept.id)
        assert objects(cold, "parts") == []
        await store.forget(kept.id)
        assert shared_before
        assert objects(cold, "blobs") == objects(cold, "heads") == []


async def test_a_sidecar_of_an_earlier_release_neither_reads_nor_removes_states_in_parts(three):
    """0.7.0 lists heads, blobs, used and elections, and parses names by this pattern."""
    one, _, cold = three
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared):
        await uploaded(store, one, 4 * RUN)
        await shared.check((await found(shared, Tokens(range(4 * RUN))))[0])
    names = {path.name for path in objects(cold, "heads")}
    assert names
    assert not any(re.fullmatch(r"([0-9a-f]{8})-([0-9a-f]+)-([0-9a-f]{32})", name) for name in names)
    assert {path.name for path in cold.iterdir()} == {"heads", "parts", "marks", "seal"}


async def test_a_file_that_is_changed_while_it_is_uploaded_gets_no_head(three, monkeypatch):
    one, _, cold = three
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared):
        kept = await kept_here(store, one, 4 * RUN)
        doomed = shared.parts.doomed

        async def slow() -> object:
            found_ = await doomed()
            changed(one / f"{kept.id}.slot")
            return found_

        monkeypatch.setattr(shared.parts, "doomed", slow)
        with pytest.raises(UnfitError):
            await store.copy_cold(kept.id)
        assert objects(cold, "heads") == []


async def test_the_number_of_parts_that_are_remembered_is_bounded(three, monkeypatch):
    monkeypatch.setattr(part_objects, "MOST_KNOWN", 3)
    one, _, cold = three
    async with sidecar(one, cold, sizes=ALL_IN_PARTS) as (store, shared):
        await uploaded(store, one, 6 * RUN)
        assert len(shared.parts._there) == 3


def test_the_path_of_a_part_says_which_part_it_is():
    for part in (bytes(21), b"\xab" * 20 + b"\x07", b"\xab" * 20 + b"\xff"):
        assert part_at(part_path(part)) == part
    name = "ab" * 20
    for path in ("", f"parts/{name}", f"parts/cd/{name}", f"parts/ab/{name}-0", f"parts/ab/{name}-256"):
        assert part_at(path) is None
    assert object_names.PART_BYTES == 21
