"""MinIO, an S3 server in wide use, which moto only imitates. Skipped if it is not installed."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import boto3
import pytest

from fleet.servers import BUCKET, CREDENTIALS, wait_for
from fleet.test_killed import let_go
from programs import program
from slotkeeper.engine.launch import free_port
from slotkeeper.store import shared as module
from slotkeeper.store.collector import StoreCollector
from slotkeeper.store.trouble import StoreError
from unit.store.saving import offered
from unit.store.sharing import KEY, LONG, found, kept_state, sidecar
from unit.store.test_shared import prompt

pytestmark = pytest.mark.fleet

LARGE = 100_000  # their file has several parts
DEATHS = 10


@contextmanager
def minio(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    user = {
        "MINIO_ROOT_USER": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "MINIO_ROOT_PASSWORD": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    words = [program("minio"), "server", str(folder), "--address", f"127.0.0.1:{port}", "--quiet"]
    process = subprocess.Popen(
        words, env=os.environ | user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(port, process)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    found_ = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{found_}")
    return found_


def make_bucket(port: int) -> None:
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
    client.create_bucket(Bucket=BUCKET)


async def test_conditional_writes_parts_and_listings(port: int, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 1 << 20)
    one, other, url = tmp_path / "one", tmp_path / "other", f"s3://{BUCKET}/real"
    with minio(tmp_path / "data", port):
        await asyncio.to_thread(make_bucket, port)
        async with sidecar(one, url, KEY) as (store, writer), sidecar(other, url, KEY) as (second, shared):
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


async def test_the_server_is_killed_in_the_middle_and_nothing_that_was_reported_is_lost(
    port: int, tmp_path: Path
):
    one, url, chance = tmp_path / "one", f"s3://{BUCKET}/killed", random.Random(15)
    reported: dict[int, str] = {}
    seed = 0
    for death in range(DEATHS + 1):
        with minio(tmp_path / "data", port) as process:
            if not death:
                await asyncio.to_thread(make_bucket, port)
            if death == DEATHS:
                break
            async with sidecar(one, url, KEY) as (store, _):
                asyncio.get_running_loop().call_later(chance.random(), process.kill)
                with suppress(StoreError):
                    while True:
                        seed += 1
                        kept = await kept_state(store, one, seed)
                        await store.copy_cold(kept.id)
                        reported[seed] = kept.manifest.sha256
                        await let_go(store, kept.id)
    with minio(tmp_path / "data", port):
        async with sidecar(tmp_path / "reader", url, KEY) as (_, shared):
            for number, digest in reported.items():
                (there,) = await found(shared, prompt(number))
                assert there.manifest.sha256 == digest
                await shared.check(there)
