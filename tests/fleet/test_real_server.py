"""versitygw, an S3 server in wide use, which moto only imitates. Skipped if it is not installed."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import pytest

from fleet.servers import BUCKET, CREDENTIALS, versitygw
from fleet.test_killed import drop_local_copy
from slotkeeper.engine.child.launch import free_port
from slotkeeper.engine.slotfile import RUN
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.store.shared_store import shared as module
from slotkeeper.store.shared_store.objects import Objects
from slotkeeper.store.shared_store.shared import StoreCollector
from slotkeeper.store.trouble import StoreError, Trouble
from unit.store.saving import offered
from unit.store.sharing import ALL_IN_PARTS, ALL_WHOLE, KEY, LONG, found, kept_state, sidecar, unheard
from unit.store.test_part_objects import fetched, uploaded
from unit.store.test_shared import prompt

pytestmark = pytest.mark.fleet

LARGE = 100_000  # their file has several parts
KILLS = 10
RACES = 50
RIVALS = 8  # that create one object at once


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    found_ = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{found_}")
    return found_


async def test_conditional_writes_multipart_uploads_and_listings_work(port: int, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 1 << 20)
    one, other, url = tmp_path / "one", tmp_path / "other", f"s3://{BUCKET}/real"
    with versitygw(tmp_path / "data", port):
        async with (
            sidecar(one, url, KEY, sizes=ALL_WHOLE) as (store, writer),
            sidecar(other, url, KEY, sizes=ALL_WHOLE) as (second, shared),
        ):
            assert await writer.objects.create("heads/x", b"1")
            assert not await writer.objects.create("heads/x", b"2")
            await writer.objects.remove("heads/x")
            small, large = await kept_state(store, one, 1), await kept_state(store, one, 2, LARGE)
            for kept in (small, large):
                await store.copy_cold(kept.id)
            for seed, length in ((1, LONG), (2, LARGE)):
                (there,) = await found(shared, prompt(seed, length=length))
                await second.found(there)
                assert await offered(second, other, there.id) == (one / f"{there.id}.slot").read_bytes()
            assert len([seen async for seen in shared.objects.listing("blobs")]) == 2
            done = await StoreCollector(shared, 1, spared=-1.0).collect()
            assert done.states == 2
            assert [seen async for seen in shared.objects.listing("heads")] == []


async def test_states_in_parts_are_written_read_and_collected(port: int, tmp_path: Path):
    one, other, url = tmp_path / "one", tmp_path / "other", f"s3://{BUCKET}/parts"
    with versitygw(tmp_path / "data", port):
        async with (
            sidecar(one, url, KEY, sizes=ALL_IN_PARTS) as (store, writer),
            sidecar(other, url, KEY, sizes=ALL_IN_PARTS) as (second, shared),
        ):
            old = await uploaded(store, one, 20 * RUN)
            before = {seen.path async for seen in shared.objects.listing("parts")}
            await uploaded(store, one, 22 * RUN)
            assert await fetched(second, shared, other, 22 * RUN)
            await store.forget(old.id)
            collector = StoreCollector(writer, 0, grace=-1.0)
            for _ in range(2):  # in the first round they are doomed
                await collector.collect()
            after = {seen.path async for seen in shared.objects.listing("parts")}
            assert len(before - after) == 2, "the frame and the checkpoint that only the old state had"
            await second.verify((await found(shared, Tokens(range(22 * RUN))))[0].id)


async def test_one_of_many_concurrent_creations_of_an_object_succeeds(port: int, tmp_path: Path):
    """Heads and elections rely on this."""
    with versitygw(tmp_path / "data", port):
        rivals = [Objects(f"s3://{BUCKET}/races", unheard) for _ in range(RIVALS)]
        for race in range(RACES):
            path = f"elections/{race}"
            made = await asyncio.gather(
                *(rival.create(path, b"%d" % number) for number, rival in enumerate(rivals))
            )
            assert made.count(True) == 1
            assert await rivals[0].read(path, 10) == b"%d" % made.index(True)


async def test_a_listing_of_several_pages_is_complete(port: int, tmp_path: Path):
    """S3 lists a thousand at a time."""
    with versitygw(tmp_path / "data", port):
        objects = Objects(f"s3://{BUCKET}/pages", unheard)
        names = {f"heads/a/b/{number:04d}" for number in range(1100)}
        await asyncio.gather(*map(objects.mark, names))
        assert {seen.path async for seen in objects.listing("heads/a/b")} == names


async def test_wrong_credentials_are_refused(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not " + CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
    with versitygw(tmp_path / "data", port):
        with pytest.raises(StoreError) as caught:
            await Objects(f"s3://{BUCKET}/refused", unheard).create("heads/x", b"1")
        assert caught.value.trouble is Trouble.REFUSED
        assert CREDENTIALS["AWS_ACCESS_KEY_ID"] not in str(caught.value)


async def test_no_reported_upload_is_lost_if_the_server_is_killed(port: int, tmp_path: Path):
    one, url, chance = tmp_path / "one", f"s3://{BUCKET}/killed", random.Random(15)
    reported: dict[int, str] = {}
    seed = 0
    for _ in range(KILLS):
        with versitygw(tmp_path / "data", port) as process:
            async with sidecar(one, url, KEY) as (store, _):
                asyncio.get_running_loop().call_later(chance.random(), process.kill)
                with suppress(StoreError):
                    while True:
                        seed += 1
                        kept = await kept_state(store, one, seed)
                        await store.copy_cold(kept.id)
                        reported[seed] = kept.manifest.sha256
                        await drop_local_copy(store, kept.id)
    assert reported
    with versitygw(tmp_path / "data", port):
        async with sidecar(tmp_path / "reader", url, KEY) as (_, shared):
            for number, digest in reported.items():
                (there,) = await found(shared, prompt(number))
                assert there.manifest.sha256 == digest
                await shared.check(there)
