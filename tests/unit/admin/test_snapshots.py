"""Snapshots on the admin port: list, verify, remove; the scheduler learns of a removal."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import orjson
import pytest
from aiohttp.test_utils import TestClient, TestServer

from slotkeeper.admin import admin as module
from slotkeeper.admin.admin import AdminPort, SnapshotRoutes, rfc3339
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.driver import Driver
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import Tier
from slotkeeper.store.index import Kept
from slotkeeper.store.store import Store
from unit.runtime.stubs import ENGINE as ENGINE_URL
from unit.runtime.stubs import TRAITS, StubLink, settled
from unit.store.saving import ENGINE, keep, names_in, opened

FITTING = replace(TRAITS, slot_files=True, state_version=4, fingerprint=ENGINE)
ROUTES = (
    ("GET", "/api/snapshots"),
    ("POST", "/api/snapshots/verify"),
    ("DELETE", "/api/snapshots/slotkeeper-0123456789ab-01234567"),
)


@pytest.fixture
async def three(hot: Path, cold: Path) -> list[Kept]:
    """Keep three snapshots: in the hot tier, in both, and in the cold one; the last one was used last."""
    async with opened(hot, cold) as store:
        kept = [await keep(store, hot) for _ in range(3)]
        await store.copy_cold(kept[1].id)
        await store.demote(kept[2].id)
        for one in kept:
            await store.used(one.id, paid=True)
        return [one for id_ in kept for one in store.listing() if one.id == id_.id]


@asynccontextmanager
async def port(store: Store | None, token: str | None = None) -> AsyncIterator[tuple[TestClient, Driver]]:
    """Run the admin port of a driver that has read its folders."""
    limits = Limits(hot_bytes=1 << 30, cold_bytes=1 << 31)
    driver = Driver({ENGINE_URL: StubLink(traits=FITTING)}, Metrics(), store=store, limits=limits)
    driver.start()
    if driver.snapshots:
        await driver.snapshots.tried.wait()
    await settled()
    app = AdminPort(driver, driver.metrics, token, limits).app()
    async with TestClient(TestServer(app)) as client:
        yield client, driver
    await driver.close()


@pytest.fixture
async def served(hot: Path, cold: Path, three: list[Kept]) -> AsyncIterator[tuple[TestClient, Driver]]:
    async with port(Store(hot, cold)) as both:
        yield both


async def verified(client: TestClient, *ids: str) -> dict[str, dict]:
    body = orjson.dumps({"ids": ids}) if ids else None
    async with client.post("/api/snapshots/verify", data=body) as answer:
        assert answer.status == 200
        assert answer.content_type == "application/x-ndjson"
        lines = [orjson.loads(line) async for line in answer.content]
    return {line["id"]: line for line in lines}


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# -- the list ------------------------------------------------------------------------------------------


async def test_the_list_shows_all_snapshots_and_the_use_of_each_tier(served, three):
    client, _ = served
    document = await (await client.get("/api/snapshots")).json()
    assert [one["id"] for one in document["snapshots"]] == [kept.id for kept in reversed(three)]
    size = three[0].manifest.size
    assert document["tiers"] == [
        {"tier": "hot", "snapshots": 2, "bytes": 2 * size, "budget_bytes": 1 << 30},
        {"tier": "cold", "snapshots": 2, "bytes": 2 * size, "budget_bytes": 1 << 31},
    ]
    assert document["trouble"] is None


async def test_each_snapshot_is_described_by_its_manifest_and_use(served, three):
    client, _ = served
    document = await (await client.get("/api/snapshots")).json()
    one = next(one for one in document["snapshots"] if one["id"] == three[1].id)
    manifest = three[1].manifest
    assert (one["tokens"], one["bytes"]) == (20, manifest.size)
    assert (one["tiers"], one["checkpoints"]) == (["hot", "cold"], [8, 16])
    assert (one["golden"], one["draft"], one["repaired"]) == (False, True, False)
    assert (one["restores"], one["failures"]) == (1, 0)
    for name, when in (("created", manifest.created), ("used", three[1].use.used)):
        assert 0 <= when - datetime.fromisoformat(one[name]).timestamp() < 1
    assert (one["fingerprint"], one["engines"]) == (ENGINE, [ENGINE_URL])


async def test_a_snapshot_of_another_kind_of_engine_fits_no_present_engine(hot):
    async with opened(hot) as store:
        await keep(store, hot, fingerprint="another")
    async with port(Store(hot)) as (client, _):
        document = await (await client.get("/api/snapshots")).json()
    assert [one["engines"] for one in document["snapshots"]] == [[]]


@pytest.mark.parametrize("count", [4, 12])
async def test_the_list_is_made_in_a_thread_and_engines_are_looked_up_once_for_each_kind(
    hot, count, monkeypatch
):
    """With 8,192 snapshots the list takes 100 ms, and more with many engines."""
    made, asked = [], []
    overview, engines = module.overview, SnapshotRoutes._engines

    def overview_somewhere(*given):
        made.append(threading.current_thread())
        return overview(*given)

    def counted(routes, fingerprint):
        asked.append(fingerprint)
        return engines(routes, fingerprint)

    async with opened(hot) as store:
        for n in range(count):
            await keep(store, hot, fingerprint=ENGINE if n % 2 else "another")
    monkeypatch.setattr(module, "overview", overview_somewhere)
    monkeypatch.setattr(SnapshotRoutes, "_engines", counted)
    async with port(Store(hot)) as (client, _):
        document = await (await client.get("/api/snapshots")).json()
    assert len(document["snapshots"]) == count
    assert {tuple(one["engines"]) for one in document["snapshots"]} == {(), (ENGINE_URL,)}
    assert threading.main_thread() not in made
    assert sorted(asked) == sorted((ENGINE, "another"))


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 1e300, float("inf"), float("nan")])
def test_an_impossible_time_is_shown_as_the_nearest_valid_one(seconds):
    assert datetime.fromisoformat(rfc3339(seconds)).year in {1970, 9999}


def test_times_are_written_as_in_rfc_3339():
    assert rfc3339(1_000_000_000.7) == "2001-09-09T01:46:40Z"


# -- verify --------------------------------------------------------------------------------------------


async def test_intact_snapshots_are_verified_as_whole(served, three):
    client, driver = served
    lines = await verified(client)
    assert {id_: line["verdict"] for id_, line in lines.items()} == {kept.id: "whole" for kept in three}
    assert lines[three[1].id] == {"id": three[1].id, "verdict": "whole", "why": "", "tiers": ["hot", "cold"]}
    assert len(driver.placement.catalog) == 3


async def test_only_the_named_snapshots_are_verified(served, three, hot):
    client, _ = served
    damage(hot / f"{three[1].id}.slot")
    assert list(await verified(client, three[0].id)) == [three[0].id]
    assert (hot / f"{three[1].id}.slot").exists()


async def test_a_damaged_snapshot_is_quarantined_and_not_offered_again(served, three, hot):
    client, driver = served
    damage(hot / f"{three[0].id}.slot")
    line = (await verified(client))[three[0].id]
    assert (line["verdict"], line["tiers"]) == ("damaged", [])
    assert "changed" in line["why"]
    assert three[0].id not in driver.placement.catalog
    assert f"slotkeeper-quarantine/{three[0].id}.slot" in names_in(hot)


async def test_after_one_of_two_copies_is_damaged_the_scheduler_uses_the_other(served, three, hot):
    client, driver = served
    assert driver.placement.catalog.get(three[1].id).tier is Tier.HOT
    damage(hot / f"{three[1].id}.slot")
    line = (await verified(client, three[1].id))[three[1].id]
    assert (line["verdict"], line["tiers"]) == ("damaged", ["cold"])
    known = driver.placement.catalog.get(three[1].id)
    assert known.tier is Tier.COLD
    assert known.tokens == three[1].tokens


async def test_a_snapshot_that_the_scheduler_dropped_is_not_added_again(served, three, hot):
    client, driver = served
    driver.placement.catalog.take(three[1].id)
    damage(hot / f"{three[1].id}.slot")
    await verified(client, three[1].id)
    assert three[1].id not in driver.placement.catalog


async def test_a_snapshot_without_its_file_is_missing(served, three, hot):
    client, driver = served
    (hot / f"{three[0].id}.slot").unlink()
    assert (await verified(client, three[0].id))[three[0].id]["verdict"] == "missing"
    assert three[0].id not in driver.placement.catalog


async def test_an_unreadable_folder_gives_no_verdict_on_its_snapshots(served, three, hot):
    client, driver = served
    hot.rename(hot.with_name("away"))
    line = (await verified(client, three[0].id))[three[0].id]
    assert line["verdict"] == "unread"
    assert "Make the folder" in line["why"]
    assert three[0].id in driver.placement.catalog


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b'"x"', b"{}", b'{"ids": []}', b'{"ids": "x"}', b'{"ids": [1]}', b'{"ids": ["../x"]}'],
)
async def test_a_verify_body_without_valid_ids_is_refused(body, served):
    client, _ = served
    answer = await client.post("/api/snapshots/verify", data=body)
    assert answer.status == 400
    assert (await answer.json())["error"]


async def test_an_unknown_id_is_refused_before_any_file_is_read(served, three):
    client, _ = served
    ids = [three[0].id, "slotkeeper-0123456789ab-01234567"]
    answer = await client.post("/api/snapshots/verify", json={"ids": ids})
    assert answer.status == 404
    assert ids[1] in (await answer.json())["error"]


# -- remove --------------------------------------------------------------------------------------------


async def test_a_removed_snapshot_is_gone_from_all_tiers_and_the_scheduler(served, three, hot, cold):
    client, driver = served
    answer = await client.delete(f"/api/snapshots/{three[1].id}")
    assert (answer.status, await answer.json()) == (200, {"removed": three[1].id})
    assert three[1].id not in driver.placement.catalog
    assert not any(three[1].id in name for name in names_in(hot) | names_in(cold))
    assert (await client.delete(f"/api/snapshots/{three[1].id}")).status == 404


@pytest.mark.parametrize(
    "name", ["x", "..%2Fhot", "slotkeeper-0123456789ab-01234567.slot", "slotkeeper.lock"]
)
async def test_only_snapshot_ids_can_be_removed(name, served, hot):
    client, _ = served
    before = names_in(hot)
    assert (await client.delete(f"/api/snapshots/{name}")).status == 400
    assert names_in(hot) == before
    assert (hot / "slotkeeper.lock").exists()


# -- without snapshots ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_a_slot_folder_the_error_names_the_setting(method, path):
    async with port(None) as (client, _):
        answer = await client.request(method, path)
        assert answer.status == 404
        assert "--slot-dir" in (await answer.json())["error"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_requires_the_token(method, path, hot):
    async with port(Store(hot), token="s3cret") as (client, _):  # noqa: S106
        assert (await client.request(method, path)).status == 401
        key = {"Authorization": "Bearer s3cret"}
        assert (await client.request(method, path, headers=key)).status in {200, 404}


async def test_an_unusable_folder_is_reported(hot):
    async with opened(hot), port(Store(hot)) as (client, _):
        document = await (await client.get("/api/snapshots")).json()
        assert document["trouble"]["kind"] == "in_use"
        assert "Another sidecar" in document["trouble"]["what"]
        assert document["snapshots"] == []
        for method, path in ROUTES[1:]:
            answer = await client.request(method, path)
            assert answer.status == 503
            assert "Another sidecar" in (await answer.json())["error"]
