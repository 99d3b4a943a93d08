"""A shared store that fails in every way that S3 does, and a Redis that is lost: slower, but never wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from chaos.lab_snapshots import Witness, bench, in_front_of, operations, settled, take_turn, undisturbed
from chaos.raw import until
from fleet.servers import BUCKET, CREDENTIALS, Fault, FaultyProxy, faulty, running_redis
from fleet.test_moving import BUILD, MODEL, uploaded
from patience import PATIENCE
from slotkeeper.engine.child.launch import free_port
from slotkeeper.engine.slotfile import PartSizes
from slotkeeper.runtime import sharing
from slotkeeper.runtime.sharing import PATIENT
from slotkeeper.scheduler.snapshots import retention
from slotkeeper.scheduler.types import Tier
from slotkeeper.store.shared_store import objects
from slotkeeper.store.shared_store import shared as module
from slotkeeper.store.shared_store.hints import Hints
from slotkeeper.store.shared_store.objects import Objects
from slotkeeper.store.shared_store.part_objects import IN_STORE
from slotkeeper.store.shared_store.shared import StoreCollector
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import LateError, StoreError, Trouble
from unit.store.saving import ENGINE, names_in, offered
from unit.store.sharing import ALL_IN_PARTS, KEY, found, kept_state, sidecar
from unit.store.test_shared import prompt


@pytest.fixture
async def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultyProxy]:
    async with faulty(s3) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


def heal(proxy: FaultyProxy, objects: Objects) -> None:
    """End the fault, and the time in which the sidecar does not use the store."""
    proxy.fault = Fault.NONE
    objects._silent_until = 0.0


TROUBLES = {
    Fault.ERROR: Trouble.UNREACHABLE,
    Fault.FULL: Trouble.DISK_FULL,
    Fault.EXPIRED: Trouble.REFUSED,
    Fault.TORN: Trouble.UNREACHABLE,
    Fault.GONE: Trouble.UNREACHABLE,
}


@pytest.mark.parametrize("fault", TROUBLES)
@pytest.mark.parametrize("way", ["at once", "multipart", "in parts"])
async def test_a_failed_upload_is_not_found_and_is_repeated_later(
    fault: Fault, way: str, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if way == "multipart":
        monkeypatch.setattr(module, "AT_ONCE", 100)
    sizes, body = (ALL_IN_PARTS, "/parts/") if way == "in parts" else (IN_STORE, "/blobs/")
    one, url = tmp_path / "one", f"s3://{BUCKET}/{tmp_path.name}"
    async with sidecar(one, url, KEY, sizes=sizes) as (store, shared):
        kept = await kept_state(store, one, 1)
        proxy.fault, proxy.only = fault, body if fault is Fault.TORN else ""
        with pytest.raises(StoreError) as raised:
            await store.copy_cold(kept.id)
        assert raised.value.trouble is TROUBLES[fault]
        assert not any(secret in str(raised.value) for secret in CREDENTIALS.values() if len(secret) > 9)
        assert not shared.objects.up
        heal(proxy, shared.objects)
        assert await found(shared, prompt(1)) == []
        assert await store.copy_cold(kept.id)
        assert shared.objects.up
        (there,) = await found(shared, prompt(1))
        await shared.check(there)


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.EXPIRED, Fault.CUT, Fault.GONE, Fault.SLOW])
@pytest.mark.parametrize(("sizes", "body"), [(IN_STORE, "/blobs/"), (ALL_IN_PARTS, "/parts/")])
async def test_a_failed_fetch_leaves_no_file_and_loses_no_state(
    fault: Fault, sizes: PartSizes, body: str, proxy: FaultyProxy, tmp_path: Path
):
    one, other, url = tmp_path / "one", tmp_path / "other", f"s3://{BUCKET}/{tmp_path.name}"
    async with (
        sidecar(one, url, sizes=sizes) as (store, _),
        sidecar(other, url, sizes=sizes) as (second, shared),
    ):
        kept = await kept_state(store, one, 1)
        await store.copy_cold(kept.id)
        (there,) = await found(shared, prompt(1))
        await second.found(there)
        proxy.fault, proxy.only = fault, body
        with pytest.raises((StoreError, LateError)):
            await second.offer(kept.id, ENGINE, within=0.5 if fault is Fault.SLOW else 60.0)
        assert names_in(other) == set()
        heal(proxy, shared.objects)
        assert await offered(second, other, kept.id) == (one / f"{kept.id}.slot").read_bytes()


async def test_requests_stop_waiting_for_a_slow_store_after_a_few_lookups(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # All turns must be sent before the sidecar asks again, and before a silent upload counts as failed.
    monkeypatch.setattr(sharing, "AGAIN", PATIENCE)
    monkeypatch.setattr(objects, "SILENCE", timedelta(seconds=PATIENCE))
    url = f"s3://{BUCKET}/{tmp_path.name}"
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(bench(MODEL, BUILD, tmp_path / "one"))
        talks = await undisturbed(one, PATIENT + 2, turns=1)
        slow, client = await stack.enter_async_context(in_front_of(one, cold_store=url))
        with monkeypatch.context() as patient:  # the store is not slow yet, but the machine may be
            patient.setattr(retention, "LEAST_SECONDS", PATIENCE)
            patient.setattr(retention, "MOST_SECONDS", PATIENCE)
            await take_turn(client, talks[0])
        assert operations(slow)["find", "late"] == 0
        await uploaded(slow)
        proxy.fault, proxy.seconds = Fault.SLOW, 600.0
        for talk in talks[1:]:
            await take_turn(client, talk)
        assert operations(slow)["find", "late"] == PATIENT
        proxy.fault = Fault.NONE


async def test_no_request_fails_while_the_store_is_lost_and_uploads_resume(
    proxy: FaultyProxy, redis: str, tmp_path: Path
):
    """The store's server and Redis work; the path between them and the sidecar fails."""
    url = f"s3://{BUCKET}/{tmp_path.name}"
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(bench(MODEL, BUILD, tmp_path / "one"))
        other = await stack.enter_async_context(bench(MODEL, BUILD, tmp_path / "other"))
        (talk,) = await undisturbed(one, 1, turns=4)
        witness = Witness(other.slots)
        first, client = await stack.enter_async_context(in_front_of(one, cold_store=url, hints=redis))
        second, elsewhere = await stack.enter_async_context(
            in_front_of(other, witness, cold_store=url, hints=redis)
        )
        proxy.fault = Fault.GONE
        await take_turn(client, talk)
        await until(lambda: operations(first)["upload", "failed"] > 0, "it was noticed")
        await take_turn(elsewhere, talk)  # it does not wait for the look's last attempt
        await until(lambda: operations(second)["find", "failed"] > 0, "it was noticed there as well")
        for sidecar_ in (first, second):
            losses = sidecar_.metrics.shared_losses.labels(part="store")._value.get()
            assert losses == 1, "counted once"
        proxy.fault = Fault.NONE
        await until(lambda: operations(first)["upload", "ok"] > 0, "uploads resume")
        assert first.metrics.shared_up.labels(part="store")._value.get() == 1
        await settled(second)
        await until(lambda: operations(second)["upload", "ok"] > 0, "here as well")
        await uploaded(second)
        await take_turn(client, talk)
        assert witness.refused == 0


async def test_lookups_work_without_redis_and_with_an_empty_one(s3: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    one, other, url = tmp_path / "one", tmp_path / "other", f"s3://{BUCKET}/{tmp_path.name}"
    port, heard = free_port(), list[bool]()

    def hints() -> Hints:
        return Hints(f"redis://127.0.0.1:{port}/0", url, lambda up, _: heard.append(up))

    async with (
        sidecar(one, url, hints=hints()) as (store, writer),
        sidecar(other, url, hints=hints()) as (_, shared),
    ):
        with running_redis(tmp_path, port):
            await store.copy_cold((await kept_state(store, one, 1)).id)
            assert await found(shared, prompt(1))
            assert await writer.hints.names(next(iter(await _folders(shared)))) is not None
        for seed in (2, 3):  # without a server
            await store.copy_cold((await kept_state(store, one, seed)).id)
            assert await found(shared, prompt(seed))
        assert heard.count(False) == 2
        for each in (writer, shared):
            each.hints._silent_until = 0.0
        with running_redis(tmp_path, port):  # a new server without any data
            for seed in (1, 2, 3):
                shared._seen.clear()
                assert await found(shared, prompt(seed))
            assert heard.count(True) >= 1


async def _folders(shared) -> set[str]:
    return {seen.path.rpartition("/")[0] async for seen in shared.objects.listing("heads")}


async def test_two_sidecars_that_save_one_state_write_it_once(
    s3: str, redis: str, tmp_path: Path, monkeypatch
):
    """The second sidecar learns that the first one is writing, and finds the state there afterwards."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    one, other, url = tmp_path / "one", tmp_path / "other", f"s3://{BUCKET}/{tmp_path.name}"

    def hints() -> Hints:
        return Hints(redis, url, lambda *_: None)

    async with (
        sidecar(one, url, hints=hints()) as (store, writer),
        sidecar(other, url, hints=hints()) as (second, shared),
    ):
        first, again = await kept_state(store, one, 1), await kept_state(second, other, 1)
        going, create = asyncio.Event(), writer.objects.create
        may = asyncio.Event()

        async def held(path: str, data: bytes) -> bool:
            going.set()
            await may.wait()
            return await create(path, data)

        monkeypatch.setattr(writer.objects, "create", held)
        async with asyncio.TaskGroup() as group:
            group.create_task(store.copy_cold(first.id))
            await going.wait()
            assert await second.copy_cold(again.id) is False
            assert _tiers(second) == [{Tier.HOT}]
            may.set()
        assert await second.copy_cold(again.id)
        blobs = [seen async for seen in shared.objects.listing("blobs")]
        assert len(blobs) == 1


def _tiers(store: Store) -> list[frozenset[Tier]]:
    return [kept.tiers for kept in store.listing()]


async def test_a_state_that_was_used_lately_is_not_removed_by_the_collector(
    s3: str, redis: str, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    one, url = tmp_path / "one", f"s3://{BUCKET}/{tmp_path.name}"
    async with sidecar(one, url, hints=Hints(redis, url, lambda *_: None)) as (store, shared):
        for seed in (1, 2):
            await store.copy_cold((await kept_state(store, one, seed)).id)
        (reading,) = await found(shared, prompt(1))
        await shared.check(reading)
        done = await StoreCollector(shared, 1, spared=-1.0).collect()
        assert done.states == 1
        assert await found(shared, prompt(1))
        assert await found(shared, prompt(2)) == []


async def test_redis_elects_one_collector(redis: str, s3: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    url = f"s3://{BUCKET}/{tmp_path.name}"

    def hints() -> Hints:
        return Hints(redis, url, lambda *_: None)

    async with (
        sidecar(tmp_path / "one", url, hints=hints()) as (_, one),
        sidecar(tmp_path / "other", url, hints=hints()) as (_, other),
    ):
        assert [await StoreCollector(each, 0).elected(0.0) for each in (one, other)] == [True, False]
        assert [seen async for seen in one.objects.listing("elections")] == []


async def test_a_sidecar_that_stops_does_not_wait_for_a_lost_store(proxy: FaultyProxy, tmp_path: Path):
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(bench(MODEL, BUILD, tmp_path / "one"))
        (talk,) = await undisturbed(one, 1, turns=1)
        url = f"s3://{BUCKET}/{tmp_path.name}"
        stopping, client = await stack.enter_async_context(in_front_of(one, cold_store=url, hints=None))
        proxy.fault = Fault.GONE
        await take_turn(client, talk)
        await until(lambda: operations(stopping)["upload", "failed"] >= 3, "it was noticed, and tried again")
        async with asyncio.timeout(60):
            await stopping.driver.save_all(600.0)
        assert operations(stopping)["save", "ok"] > 0
