"""A store that sidecars share: found by tokens, written once, verified, sealed, separated by namespace."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path

import orjson
import pytest

from patience import PATIENCE
from slotkeeper.scheduler.policies.adapters import space_of
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.types import Tier
from slotkeeper.store import files
from slotkeeper.store.folders.snapshot_folder import SnapshotFolder
from slotkeeper.store.index import Kept
from slotkeeper.store.shared_store import object_names
from slotkeeper.store.shared_store import shared as module
from slotkeeper.store.shared_store.object_names import HeadName, parsed
from slotkeeper.store.shared_store.sealing import StoreKey
from slotkeeper.store.shared_store.shared import StoreCollector
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import LateError, MissingError, StoreError, UnfitError
from unit.engine.slotfiles import slot_file
from unit.store.saving import ENGINE, changed, cut, grown, ids, keep, names_in, offered
from unit.store.sharing import KEY, LONG, found, kept_state, sidecar

KEYS = pytest.mark.parametrize("key", [None, KEY], ids=["open", "sealed"])


def objects(folder: Path, kind: str) -> list[Path]:
    return sorted(path for path in (folder / kind).rglob("*") if path.is_file())


def prompt(seed: int, *, length: int = LONG) -> Tokens:
    return Tokens([*ids(seed, length), *range(5, 45)])


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return two hot folders, and what they share."""
    return tmp_path / "one", tmp_path / "other", tmp_path / "shared"


@asynccontextmanager
async def one_found(
    two: tuple[Path, Path, Path], key: StoreKey | None = None
) -> AsyncIterator[tuple[Store, Store, Kept]]:
    """Yield the stores of two sidecars, and a state that the first has uploaded and the second has found."""
    one, other, cold = two
    async with sidecar(one, cold, key) as (store, _), sidecar(other, cold, key) as (second, shared):
        kept = await kept_state(store, one, 1)
        await store.copy_cold(kept.id)
        (there,) = await found(shared, prompt(1))
        await second.found(there)
        yield store, second, kept


@KEYS
async def test_a_state_that_one_sidecar_uploads_can_be_found_and_restored_by_another(two, key):
    one, other, cold = two
    async with sidecar(one, cold, key) as (store, _), sidecar(other, cold, key) as (second, shared):
        kept = await kept_state(store, one, 1)
        assert await store.copy_cold(kept.id)
        assert store.listing()[0].tiers == {Tier.HOT, Tier.COLD}
        (there,) = await found(shared, prompt(1))
        assert (there.id, there.tokens, there.tiers) == (kept.id, kept.tokens, frozenset({Tier.COLD}))
        await second.found(there)
        assert await offered(second, other, kept.id) == (one / f"{kept.id}.slot").read_bytes()
        assert second.listing()[0].tiers == {Tier.HOT, Tier.COLD}, "others may want it too"


@KEYS
async def test_a_large_state_is_uploaded_in_parts(two, key, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 100)
    one, other, _ = two
    async with one_found(two, key) as (_, second, kept):
        assert await offered(second, other, kept.id) == (one / f"{kept.id}.slot").read_bytes()


async def test_other_engines_and_namespaces_and_prompts_and_keys_find_no_state(two):
    one, _, cold = two
    async with sidecar(one, cold, KEY) as (store, shared):
        await store.copy_cold((await kept_state(store, one, 1, space="mine")).id)
        mine = prompt(1).within("mine")
        assert await found(shared, mine)
        assert await found(shared, prompt(1)) == []
        assert await found(shared, prompt(1).within("yours")) == []
        assert await found(shared, mine, fingerprint="another") == []
        assert await found(shared, prompt(2).within("mine")) == []
        assert await found(shared, mine.cut(0, 255)) == []
    for key in (None, StoreKey(b"z" * 32)):
        async with sidecar(one, cold, key) as (_, shared):
            assert await found(shared, mine) == []


@pytest.mark.parametrize("namespace", ["", "mine"])
async def test_a_state_is_found_only_under_its_own_adapters(two, namespace):
    one, other, cold = two
    spaces = {adapters: space_of(namespace, adapters) for adapters in ("", "base", "aa*1", "aa*0.5", "bb*1")}
    async with sidecar(one, cold, KEY) as (store, _):
        kept = await kept_state(store, one, 1, space=spaces["aa*1"])
        await store.copy_cold(kept.id)
    assert (kept.manifest.namespace, kept.manifest.adapters) == (namespace, "aa*1")
    async with sidecar(other, cold, KEY) as (_, shared):
        where = {name: await found(shared, prompt(1).within(space)) for name, space in spaces.items()}
    assert [name for name, states in where.items() if states] == ["aa*1"]
    assert where["aa*1"][0].manifest.space == spaces["aa*1"]


async def test_a_state_that_is_not_better_than_a_local_one_is_not_read(two):
    one, _, cold = two
    async with sidecar(one, cold) as (store, shared):
        kept = await kept_state(store, one, 1)
        await store.copy_cold(kept.id)
        assert await found(shared, prompt(1), beyond=LONG + 255) == []
        assert await shared.find(prompt(1), ENGINE, beyond=0, known=[kept.id]) != []
        assert await shared.find(prompt(1), ENGINE, beyond=0, known=[kept.id]) == []


async def test_the_deepest_of_many_states_is_found(two):
    """The states of one conversation, and others that begin with the same system prompt."""
    one, _, cold = two
    async with sidecar(one, cold) as (store, shared):
        own = [*ids(1, 300)]
        for seed in range(2, 9):
            tokens = [*own, *ids(seed, 500)]
            await _saved(store, one, tokens)
        for length in (400, 900, 1500):
            await _saved(store, one, [*own, *ids(1, length)])
        best = (await found(shared, Tokens([*own, *ids(1, 1600)])))[0]
        assert len(best.tokens) == 1800


async def test_the_entries_of_a_prompt_are_read_and_sorted_in_a_thread(two, monkeypatch):
    """Thousands of states may begin with one system prompt: 60 ms with 8,192 of them, for each look."""
    one, _, cold = two
    threads = []

    def parsed_somewhere(path: str) -> HeadName | None:
        threads.append(threading.current_thread())
        return parsed(path)

    async with sidecar(one, cold) as (store, shared):
        for end in range(3):
            kept = await kept_state(store, one, 1, length=LONG + 256 * end)
            await store.copy_cold(kept.id)
        monkeypatch.setattr(object_names, "parsed", parsed_somewhere)
        assert await found(shared, prompt(1, length=LONG + 700))
    assert len(threads) == 3
    assert threading.main_thread() not in threads


async def test_of_states_that_end_in_one_block_the_longest_beginnings_of_the_prompt_are_read(two):
    """A name shows only whole blocks, and of such states only two are read."""
    one, _, cold = two
    async with sidecar(one, cold) as (store, shared):
        for length in (515, 530, 560, 580, 700):
            await _saved(store, one, ids(1, length))
        best = await found(shared, Tokens(ids(1, 600)))
        assert [len(kept.tokens) for kept in best] == [580, 560]


async def _saved(store, hot, tokens) -> None:
    data = slot_file("hybrid", 4, tuple(tokens), cuts=(8,))
    kept = await keep(store, hot, data, tokens=Tokens(tokens))
    await store.copy_cold(kept.id)


@KEYS
async def test_the_same_state_of_two_sidecars_is_written_once(two, key):
    """Two sidecars save the same state: one head, one blob, and both can restore it."""
    one, other, cold = two
    async with sidecar(one, cold, key) as (store, _), sidecar(other, cold, key) as (second, _):
        first, again = await kept_state(store, one, 1), await kept_state(second, other, 1)
        assert first.id != again.id
        await store.copy_cold(first.id)
        await second.copy_cold(again.id)
        assert len(objects(cold, "heads")) == len(objects(cold, "blobs")) == 1
        await second.demote(again.id)
        assert names_in(other) == set()
        assert await offered(second, other, again.id) == (one / f"{first.id}.slot").read_bytes()


@pytest.mark.parametrize("cheap", [0, module.CHEAP], ids=["large", "small"])
@pytest.mark.parametrize(("kind", "damage"), [("heads", "cut"), ("heads", "emptied"), ("blobs", "unlink")])
async def test_a_state_whose_objects_are_damaged_is_written_again(two, kind, damage, cheap, monkeypatch):
    """A file would leave the slot folder for a copy that does not exist."""
    monkeypatch.setattr(module, "CHEAP", cheap)
    one, other, cold = two
    async with sidecar(one, cold, KEY) as (store, _), sidecar(other, cold, KEY) as (second, _):
        await store.copy_cold((await kept_state(store, one, 1)).id)
        kept = await kept_state(second, other, 1)
        bytes_here = (other / f"{kept.id}.slot").read_bytes()
        {"cut": cut, "emptied": emptied, "unlink": os.unlink}[damage](objects(cold, kind)[0])
        await second.demote(kept.id)
        assert names_in(other) == set()
        assert await offered(second, other, kept.id) == bytes_here


async def test_a_sidecar_that_is_second_to_write_a_head_leaves_no_objects(two, monkeypatch):
    one, other, cold = two
    async with sidecar(one, cold) as (store, _), sidecar(other, cold) as (second, shared):
        first, again = await kept_state(store, one, 1), await kept_state(second, other, 1)
        size = shared.objects.size
        monkeypatch.setattr(module, "CHEAP", 0)

        async def late(path: str):
            if path.startswith("heads/"):  # another sidecar writes the head between the lookup and the write
                await store.copy_cold(first.id)
                return None
            return await size(path)

        monkeypatch.setattr(shared.objects, "size", late)
        assert await second.copy_cold(again.id)
        assert len(objects(cold, "heads")) == len(objects(cold, "blobs")) == 1


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@KEYS
@pytest.mark.parametrize("damage", [cut, grown, changed, emptied, os.unlink])
@pytest.mark.parametrize("kind", ["heads", "blobs"])
async def test_a_damaged_object_never_reaches_the_slot_folder(two, key, damage, kind):
    one, other, cold = two
    async with one_found(two, key) as (store, second, kept):
        (path,) = objects(cold, kind)
        damage(path)
        with pytest.raises((UnfitError, MissingError)):
            await second.offer(kept.id, ENGINE)
        assert names_in(other) == set()
        assert kept.id not in {each.id for each in second.listing()}
        assert objects(cold, "heads") == [] or damage is os.unlink
        assert await offered(store, one, kept.id), "it still has its own"


async def test_a_fetch_ends_when_the_object_has_more_bytes_than_the_state(two, monkeypatch):
    """It would fill the disk of the slot folder before its hash shows that it is wrong."""
    _, other, cold = two
    written = 0
    write_all = files.write_all

    def counted(out: FileIO, data: bytes | memoryview) -> None:
        nonlocal written
        written += len(data)
        write_all(out, data)

    async with one_found(two) as (_, second, kept):
        objects(cold, "blobs")[0].write_bytes(bytes(32 << 20))
        monkeypatch.setattr(files, "write_all", counted)
        with pytest.raises(UnfitError):
            await second.offer(kept.id, ENGINE)
        assert written <= 8 << 20
        assert names_in(other) == set()


async def test_a_head_under_another_name_is_not_accepted(two):
    one, _, cold = two
    async with sidecar(one, cold, KEY) as (store, shared):
        for seed in (1, 2):
            await store.copy_cold((await kept_state(store, one, seed)).id)
        first, second = objects(cold, "heads")
        first.write_bytes(second.read_bytes())
        assert [await found(shared, prompt(seed)) for seed in (1, 2)].count([]) == 1


@pytest.mark.parametrize("more", ["/../../x", "//", "0"])
async def test_a_head_that_names_another_blob_than_its_own_is_not_accepted(two, more):
    """Without a key the blob's name is not signed; obstore raises ValueError for a name that is no path."""
    one, other, cold = two
    async with sidecar(one, cold) as (store, _), sidecar(other, cold) as (_, shared):
        await store.copy_cold((await kept_state(store, one, 1)).id)
        (path,) = objects(cold, "heads")
        data = path.read_bytes()
        size = int.from_bytes(data[:4], "big")
        facts = orjson.loads(data[4 : 4 + size])
        forged = orjson.dumps(facts | {"blob": facts["blob"] + more})
        path.write_bytes(len(forged).to_bytes(4, "big") + forged + data[4 + size :])
        for there in await found(shared, prompt(1)):
            with pytest.raises((UnfitError, MissingError)):
                await shared.check(there)
        assert shared.objects.up


@pytest.mark.parametrize("name", ["Icon\r", "odd\udcff", "a b", "x#1"])
@pytest.mark.parametrize("folder", [False, True])
async def test_files_with_odd_names_do_not_make_a_shared_folder_unusable(two, name, folder):
    """The first two are no paths for obstore, which then lists nothing at all. Finder makes the first one."""
    one, _, cold = two
    async with sidecar(one, cold) as (store, shared):
        await store.copy_cold((await kept_state(store, one, 1)).id)
        add_everywhere(cold, name, folder=folder)
        assert await found(shared, prompt(1))
        assert (await StoreCollector(shared, 1, grace=0.0).collect()).left_bytes > 0
        assert await found(shared, prompt(1))
        assert shared.objects.up


def add_everywhere(root: Path, name: str, *, folder: bool) -> None:
    """Add a file to each folder, or a folder with files that have names of ours."""
    for path in [path for path in root.rglob("*") if path.is_dir()]:
        own = [each.name for each in path.iterdir() if each.is_file()]
        if folder:
            (path / name).mkdir()
        for each in own:
            (path / name / each if folder else path / (each + name)).touch()
        if not folder:
            (path / name).touch()


async def test_a_listing_fails_if_a_folder_cannot_be_read(two, monkeypatch):
    """The collector would take the states for leftovers whose blobs it does not see."""
    one, _, cold = two
    async with sidecar(one, cold) as (store, shared):
        await store.copy_cold((await kept_state(store, one, 1)).id)
        assert [seen.size async for seen in shared.objects.listing("nowhere")] == []
        monkeypatch.setattr(os, "scandir", refused)
        with pytest.raises(StoreError):
            await StoreCollector(shared, 1, grace=0.0).collect()


def refused(path: object) -> None:
    raise PermissionError(13, "Permission denied", str(path))


async def test_objects_in_a_store_with_a_key_contain_no_tokens(two):
    one, _, cold = two
    async with sidecar(one, cold, KEY) as (store, _):
        kept = await kept_state(store, one, 1)
        await store.copy_cold(kept.id)
        told = b"".join(path.read_bytes() for path in cold.rglob("*") if path.is_file())
        names = " ".join(map(str, cold.rglob("*")))
        assert kept.tokens.packed[:64] not in told
        assert kept.manifest.fingerprint.encode() not in told
        assert kept.manifest.sha256 not in names


async def test_a_forgotten_state_is_removed_for_all_and_an_unlisted_state_is_not(two):
    one, _, cold = two
    async with sidecar(one, cold) as (store, shared):
        kept = await kept_state(store, one, 1)
        await store.demote(kept.id)
        assert names_in(one) == set()
        await store.unlist(kept.id)
        assert store.listing() == []
        (there,) = await found(shared, prompt(1))
        await store.found(there)
        await store.forget(kept.id)
        assert objects(cold, "heads") == objects(cold, "blobs") == []


async def test_a_download_that_is_late_is_abandoned_and_leaves_no_file(two):
    _, other, _ = two
    async with one_found(two) as (_, second, kept):
        with pytest.raises(LateError):
            await second.offer(kept.id, ENGINE, within=0.0)
        assert names_in(other) == set()
        assert await offered(second, other, kept.id)


async def test_a_fetch_that_is_cancelled_while_its_file_is_created_leaves_no_file(two, monkeypatch):
    _, other, _ = two
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        begun.set()
        assert goes_on.wait(PATIENCE)

    async with one_found(two) as (_, second, kept):
        monkeypatch.setattr(SnapshotFolder, "demand", slow)
        async with asyncio.TaskGroup() as group:
            fetch = group.create_task(second.offer(kept.id, ENGINE))
            assert await asyncio.to_thread(begun.wait, PATIENCE)
            fetch.cancel()
            await asyncio.sleep(0)
            goes_on.set()
        assert names_in(other) == set()


async def test_a_lookup_that_takes_too_long_is_abandoned(two, monkeypatch):
    one, _, cold = two
    async with sidecar(one, cold) as (store, shared):
        await store.copy_cold((await kept_state(store, one, 1)).id)
        with monkeypatch.context() as hurried:
            hurried.setattr(module, "LONGEST_LOOK", 0.0)
            with pytest.raises(LateError):
                await found(shared, prompt(1))
        assert await found(shared, prompt(1))


async def test_a_failing_store_is_reported_once_and_is_not_used_for_a_while(two):
    one, _, cold = two
    async with sidecar(one, cold) as (store, shared):
        kept = await kept_state(store, one, 1)
        heard: list[bool] = []
        shared.objects._changed = lambda up, _: heard.append(up)
        heads = cold / "heads"
        heads.write_text("a file where a folder should be")
        for _ in range(3):
            with pytest.raises(StoreError):
                await store.copy_cold(kept.id)
        assert heard == [False]
        heads.unlink()
        shared.objects._silent_until = 0.0
        assert await store.copy_cold(kept.id)
        assert heard == [False, True]


@KEYS
async def test_a_missing_bucket_costs_no_snapshot_in_the_slot_folder(two, key, monkeypatch):
    """S3 answers 404 to a write into a bucket that does not exist, as to a read of a missing object."""

    async def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("Object at location heads not found: 404 Not Found")

    one, _, cold = two
    async with sidecar(one, cold, key) as (store, shared):
        kept = await kept_state(store, one, 1)
        with monkeypatch.context() as gone:
            gone.setattr("slotkeeper.store.shared_store.objects.obstore.put_async", refuse)
            with pytest.raises(StoreError):
                await store.copy_cold(kept.id)
        assert not shared.objects.up
        assert await offered(store, one, kept.id)


@pytest.mark.parametrize("seal", [b"", b"s" * 31, b"s" * 33], ids=["empty", "short", "long"])
async def test_a_damaged_seal_of_a_store_is_not_used_and_costs_no_snapshot(two, seal):
    one, _, cold = two
    cold.mkdir()
    (cold / "seal").write_bytes(seal)
    async with sidecar(one, cold) as (store, shared):
        assert shared.secret is None
        kept = await kept_state(store, one, 1)
        with pytest.raises(StoreError):
            await store.copy_cold(kept.id)
        assert await offered(store, one, kept.id)


async def test_a_store_whose_bucket_is_missing_opens_with_the_slot_folder_alone(two, monkeypatch):
    async def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("Object at location seal not found: 404 Not Found")

    one, _, cold = two
    monkeypatch.setattr("slotkeeper.store.shared_store.objects.obstore.put_async", refuse)
    async with sidecar(one, cold) as (store, _):
        assert (await kept_state(store, one, 1)).id in {kept.id for kept in store.listing()}


async def test_the_number_of_remembered_head_names_is_bounded(two, monkeypatch):
    monkeypatch.setattr(module, "SEEN", 2)
    one, _, cold = two
    async with sidecar(one, cold) as (store, shared):
        for seed in range(1, 5):
            await store.copy_cold((await kept_state(store, one, seed)).id)
            assert await found(shared, prompt(seed))
        assert len(shared._seen) == 2


async def test_verify_reads_the_object_in_the_shared_store(two):
    one, _, cold = two
    async with sidecar(one, cold, KEY) as (store, _):
        kept = await kept_state(store, one, 1)
        await store.demote(kept.id)
        await store.verify(kept.id)
        changed(objects(cold, "blobs")[0])
        with pytest.raises(UnfitError):
            await store.verify(kept.id)


def test_other_object_names_are_not_parsed_as_heads():
    for name in (
        "",
        "heads",
        "heads/a/b",
        "blobs/a/b/c",
        "heads/a/b/fffffd43-zz-" + "0" * 32,
        "heads/a/b/../x",
    ):
        assert parsed(name) is None
