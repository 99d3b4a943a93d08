"""Manifests of other writers are rejected; those of earlier releases are taken over once."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import orjson
import pytest

from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store import files
from slotkeeper.store.trouble import StoreError, Trouble
from unit.store.saving import ENGINE, keep, mode, offered, opened


def unkeyed(folder: Path, snapshot: SnapshotId, **changes: object) -> None:
    """Write its manifest as releases without a secret did, which anyone can."""
    path = folder / (snapshot + files.MANIFEST)
    body = orjson.loads(path.read_bytes()) | {"format": 1} | changes
    del body["seal"]
    digest = hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()
    path.write_bytes(orjson.dumps(body | {"seal": digest}))


async def test_the_secret_file_is_private_and_is_kept(hot: Path):
    async with opened(hot):
        first = (hot / files.SEAL).read_bytes()
    assert mode(hot / files.SEAL) == 0o600
    assert not (hot / files.FIRST_SEAL).exists()
    (hot / files.SEAL).chmod(0o660)  # as Kubernetes' fsGroup sets it
    async with opened(hot):
        assert (hot / files.SEAL).read_bytes() == first
    assert mode(hot / files.SEAL) == 0o600


async def test_a_snapshot_with_a_forged_manifest_is_not_listed(hot: Path):
    """A forged manifest could give a file to the wrong engine, or have any bytes loaded."""
    async with opened(hot) as store:
        one, two = await keep(store, hot), await keep(store, hot)
    unkeyed(hot, one.id, fingerprint="of another engine")
    async with opened(hot) as store:
        assert [kept.id for kept in store.listing()] == [two.id]
    assert (hot / files.QUARANTINE / f"{one.id}.slot").exists()


async def test_manifests_of_earlier_releases_are_adopted_once(hot: Path):
    async with opened(hot) as store:
        kept = [await keep(store, hot) for _ in range(3)]
    (hot / files.SEAL).unlink()
    for one in kept:
        unkeyed(hot, one.id)
    async with opened(hot) as store:
        assert {found.id for found in store.listing()} == {one.id for one in kept}
        assert await offered(store, hot, kept[0].id)
    assert [orjson.loads((hot / f"{one.id}.json").read_bytes())["format"] for one in kept] == [2, 2, 2]
    unkeyed(hot, kept[0].id)
    async with opened(hot) as store:
        assert len(store.listing()) == 2


async def test_adopting_earlier_manifests_continues_after_a_kill(hot: Path):
    async with opened(hot) as store:
        kept = [await keep(store, hot) for _ in range(3)]
    (hot / files.SEAL).rename(hot / files.FIRST_SEAL)
    unkeyed(hot, kept[0].id)  # the other manifests have the seal already
    async with opened(hot) as store:
        assert len(store.listing()) == 3
    assert not (hot / files.FIRST_SEAL).exists()
    async with opened(hot) as store:
        assert len(store.listing()) == 3


async def test_each_tier_has_its_own_secret(hot: Path, tmp_path: Path):
    cold = tmp_path / "cold"
    async with opened(hot, cold) as store:
        kept = await keep(store, hot)
        await store.demote(kept.id)
    assert (hot / files.SEAL).read_bytes() != (cold / files.SEAL).read_bytes()
    shutil.rmtree(hot)  # as a tmpfs after a restart of the machine
    async with opened(hot, cold) as store:
        assert await store.offer(kept.id, ENGINE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_a_secret_file_of_another_user_is_refused(hot: Path):
    async with opened(hot):
        pass
    os.chown(hot / files.SEAL, 4321, -1)
    with pytest.raises(StoreError) as caught:
        async with opened(hot):
            pass
    assert caught.value.trouble is Trouble.NOT_OURS
