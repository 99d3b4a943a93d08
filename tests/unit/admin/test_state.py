"""The admin port's document of the present state: engines, slots, figures, tiers, and the prompt tree."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from slotkeeper import __version__
from slotkeeper.admin.admin import AdminPort
from slotkeeper.api.answers.answer import Progress
from slotkeeper.conversation.naming import Name
from slotkeeper.engine.answers import Health
from slotkeeper.observe.journal import Journal
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.request_record import Record
from slotkeeper.runtime.driver import Driver
from slotkeeper.scheduler.events import EngineLost, SnapshotsChanged
from slotkeeper.scheduler.policies import priority
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import Checkpoint, SlotContents, Snapshot, SnapshotId
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import EngineId, Priority, RequestId, Tier
from slotkeeper.store.store import Store
from slotkeeper.values import Address
from unit.observe.watched import record
from unit.runtime.stubs import ENGINE, PROMPT, TRAITS, StubLink, admit, finish, granted, settled

LIMITS = Limits(hot_bytes=1 << 30, cold_bytes=1 << 31)
HEAD = Tokens(range(1000, 1100))
FITTING = replace(TRAITS, slot_files=True, state_version=4, fingerprint="f")


class Served:
    """The admin port of a running sidecar, and the sidecar's parts."""

    def __init__(self, client: TestClient, driver: Driver, admin: AdminPort) -> None:
        self.client = client
        self.driver = driver
        self.admin = admin

    async def get(self, path: str) -> dict[str, Any]:
        async with self.client.get(path) as answer:
            assert answer.status == 200
            return await answer.json()

    async def slot(self, n: int) -> dict[str, Any]:
        return (await self.get("/api/state"))["engines"][0]["slots"][n]

    async def serves(self, name: str, prompt: Tokens, *, cached: int = 0) -> None:
        await granted(admit(self.driver, name, prompt))
        finish(self.driver, name, prompt, cached)


@asynccontextmanager
async def port(*links: StubLink, store: Store | None = None, why_text: bool = False) -> AsyncIterator[Served]:
    driver = Driver(
        {link.engine: link for link in links}, Metrics(), store=store, limits=LIMITS, journal=Journal(10)
    )
    driver.start()
    if driver.snapshots:
        await driver.snapshots.tried.wait()
    await settled()
    admin = AdminPort(driver, driver.metrics, None, LIMITS, why_text=why_text)
    async with TestClient(TestServer(admin.app())) as client:
        yield Served(client, driver, admin)
    await driver.close()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with port(StubLink()) as served:
        yield served


# -- the sidecar -----------------------------------------------------------------------------------------


async def test_a_new_sidecar_has_an_empty_state(served):
    state = await served.get("/api/state")
    assert (state["version"], state["draining"], state["queued"]) == (__version__, False, 0)
    assert (state["why_text"], state["history"], state["tiers"]) == (False, [], [])
    assert (state["totals"].pop("unknown"), state["totals"].pop("unknown_text")) == ({}, "")
    assert set(state["totals"].values()) == {0, None}
    assert state["uptime_seconds"] >= 0
    assert state["tasks"] >= 1, "the one that answers"


async def test_the_state_shows_settings_and_draining(served):
    served.admin.drain()
    assert (await served.get("/api/state"))["draining"] is True
    async with port(StubLink(), why_text=True) as other:
        assert (await other.get("/api/state"))["why_text"] is True


async def test_totals_and_history_are_those_of_the_metrics(served):
    served.driver.metrics.history.add(requests=2, computed=30, reused_seconds=1.5)
    state = await served.get("/api/state")
    assert (state["totals"]["requests"], state["totals"]["computed"]) == (2, 30)
    (bucket,) = state["history"]
    assert {"at": bucket["at"], "unknown_text": "", **state["totals"]} == {"unknown_text": "", **bucket}
    assert bucket["at"] % 10 == 0


async def test_queued_requests_are_counted(served):
    for name in "abc":
        admit(served.driver, name, Tokens([ord(name)] * 300))
    assert (await served.get("/api/state"))["queued"] == 1


# -- engines and slots -----------------------------------------------------------------------------------


async def test_an_engine_is_shown_with_its_empty_slots(served):
    (engine,) = (await served.get("/api/state"))["engines"]
    assert (engine["engine"], engine["up"], engine["health"]) == (ENGINE, True, "ok")
    assert (engine["memory"], engine["context_tokens"]) == ("dense", 4096)
    assert engine["checkpoint_limit"] == TRAITS.checkpoint_cap
    assert {"flag": "--checkpoint-min-step", "value": 8192, "how": "default"} in engine["flags"]
    assert (engine["prefill_tokens_per_second"], engine["ram_cache_entries_tokens"]) == (None, [])
    empty = {
        "state": "idle",
        "held_tokens": 0,
        "checkpoints": [],
        "request": None,
        "conversation": None,
        "name": None,
        "about": None,
        "idle_seconds": None,
        "saved": False,
    }
    assert engine["slots"] == [{"slot": 0, **empty}, {"slot": 1, **empty}]


async def test_a_used_slot_shows_its_last_request_and_conversation(served):
    for number in (1, 2):
        came = record(f"turn-{number}", conversation=7)
        served.driver.journal.arrived(came)
        served.driver.journal.follow(RequestId(f"{number}:turn-{number}"), came)
        await served.serves(f"{number}:turn-{number}", PROMPT)
    slot = await served.slot(0)
    assert (slot["state"], slot["held_tokens"]) == ("idle", len(PROMPT) + 1)
    assert (slot["request"], slot["conversation"]) == ("turn-2", 7)
    assert slot["idle_seconds"] >= 0


async def test_a_slot_whose_request_left_the_journal_names_no_request(served):
    await served.serves("12:turn-1", PROMPT)
    slot = await served.slot(0)
    assert (slot["held_tokens"], slot["request"], slot["conversation"]) == (len(PROMPT) + 1, None, None)


async def test_a_slot_with_a_running_request_is_not_idle(served):
    await granted(admit(served.driver, "1:a"))
    assert (await served.slot(0))["state"] == "running"


async def test_checkpoints_and_the_prompt_cache_are_shown(served):
    table = served.driver.placement.tables[ENGINE]
    kept = (Checkpoint(50, 1), Checkpoint(96, 1))
    table.shadow.slots[1] = SlotContents(tokens=HEAD, opaque=5, checkpoints=kept, used=served.driver.now())
    table.shadow.ram = [SlotContents(tokens=HEAD), SlotContents(tokens=HEAD, opaque=7)]
    (engine,) = (await served.get("/api/state"))["engines"]
    assert (engine["slots"][1]["held_tokens"], engine["slots"][1]["checkpoints"]) == (105, [50, 96])
    assert engine["slots"][1]["request"] is None
    assert engine["ram_cache_entries_tokens"] == [100, 107]


async def test_the_prefill_rate_is_shown_after_it_was_measured(served):
    served.driver.placement.tables[ENGINE].rates.prefilled(1000, 2.0)
    (engine,) = (await served.get("/api/state"))["engines"]
    assert engine["prefill_tokens_per_second"] == 500.0


async def test_lost_engines_are_shown_too():
    other = EngineId("http://other")
    async with port(StubLink(), StubLink(other)) as served:
        served.driver.post(EngineLost(at=served.driver.now(), engine=other))
        engines = (await served.get("/api/state"))["engines"]
        assert [(e["engine"], e["up"]) for e in engines] == [(ENGINE, True), (other, False)]


async def test_an_engine_that_was_never_up_is_shown_as_down():
    class Absent(StubLink):
        async def watch(self, on_up: Any, on_lost: Any, on_router: Any = None) -> None:
            self.health = Health.DOWN

    async with port(Absent()) as served:
        (engine,) = (await served.get("/api/state"))["engines"]
        assert (engine["engine"], engine["up"], engine["health"]) == (ENGINE, False, "down")
        assert (engine["slots"], engine["memory"]) == ([], "unknown")
        assert engine["down_seconds"] >= 0


# -- running requests and clients --------------------------------------------------------------------------


async def arrives(served: Served, request: str, **given: Any) -> Record:
    came = record(request, at=served.driver.now(), **given)
    served.driver.journal.arrived(came)
    served.driver.journal.follow(RequestId(f"1:{request}"), came)
    return came


async def test_queued_requests_have_a_place_and_running_requests_have_none(served):
    for name in "abcd":
        await arrives(served, name, name=Name("opencode", ord(name), task="Do it"), model="m")
        admit(served.driver, f"1:{name}", Tokens([ord(name)] * 300))
    running = (await served.get("/api/state"))["running"]
    assert [(one["id"], one["now"]["place"]) for one in running[:2]] == [("c", 1), ("d", 2)]
    assert {(one["id"], one["now"]["doing"]) for one in running[2:]} == {("a", "prefill"), ("b", "prefill")}
    assert (running[0]["name"], running[0]["about"], running[0]["model"]) == (
        "opencode #99: Do it",
        "Do it",
        "m",
    )
    listed = (await served.get("/api/requests"))["requests"]
    assert {one["id"]: one["now"]["place"] for one in listed} == {"a": None, "b": None, "c": 1, "d": 2}


@pytest.mark.parametrize("count", [20, 200])
async def test_the_order_of_the_queue_is_found_once_for_each_document(served, count, monkeypatch):
    """If it is found for each request, the document of 4,000 queued requests takes two seconds."""
    for number in range(count):
        await arrives(served, f"r{number}")
        admit(served.driver, f"1:r{number}", Tokens([number] * 300))
    await settled()
    asked, in_turn = [], priority.in_turn

    def counted(*given: Any) -> Sequence[RequestId]:
        asked.append(given)
        return in_turn(*given)

    monkeypatch.setattr(priority, "in_turn", counted)
    running = (await served.get("/api/state"))["running"]
    assert [one["now"]["place"] for one in running[:-2]] == [*range(1, count - 1)]
    assert len(asked) == 1
    assert (await served.get("/api/requests"))["requests"]
    assert len(asked) == 2


async def test_a_request_has_its_priority_also_when_it_is_no_longer_queued(served):
    for name in "abc":
        came = await arrives(served, name)
        admit(served.driver, f"1:{name}", Tokens([ord(name)] * 300))
        came.priority = Priority.LOW
    running = (await served.get("/api/state"))["running"]
    assert [(one["now"]["doing"], one["now"]["priority"]) for one in running] == [
        ("queued", "low"),
        ("prefill", "low"),
        ("prefill", "low"),
    ]


async def test_a_prefill_shows_the_progress_of_the_engine_until_the_first_token(served):
    came = await arrives(served, "a")
    await granted(admit(served.driver, "1:a"))
    came.work.progress = Progress(total=400, reused=200, processed=250, seconds=1000.0)
    came.work.progress_at = served.driver.now()
    (one,) = (await served.get("/api/state"))["running"]
    assert (one["slot"], one["now"]["percent"], one["now"]["to_compute_tokens"]) == (0, 25, 200)
    assert 0 < one["now"]["seconds_left"] <= 3000.0
    came.first_token = 1.0
    (one,) = (await served.get("/api/state"))["running"]
    assert (one["now"]["doing"], one["now"]["percent"]) == ("generating", None)
    came.outcome = "ok"
    assert (await served.get("/api/state"))["running"] == []
    assert (await served.get("/api/requests/a"))["now"] is None


async def test_each_client_has_its_sums(served):
    await arrives(served, "a", name=Name("opencode", 1), client="0123456789abcdef/f")
    await served.serves("1:a", PROMPT)
    (client,) = (await served.get("/api/state"))["clients"]
    assert (client["agent"], client["key"], client["requests"]) == ("opencode", "01234567", 1)
    totals = (await served.get("/api/state"))["totals"]
    shared = ("requests", "prompt_tokens", "reused", "computed", "saved_seconds", "hit_rate")
    assert {name: client[name] for name in shared} == {name: totals[name] for name in shared}


@pytest.mark.parametrize(
    ("host", "address", "everywhere"),
    [
        ("127.0.0.1", "127.0.0.1:8080", False),
        ("0.0.0.0", "127.0.0.1:8080", True),  # noqa: S104 - nothing is bound
        ("::1", "[::1]:8080", False),
    ],
)
async def test_the_address_for_clients_is_shown(served, host, address, everywhere):
    assert (await served.get("/api/state"))["data_port"] is None
    served.admin.listens(Address(host, 8080))
    port = (await served.get("/api/state"))["data_port"]
    assert port == {"scheme": "http", "address": address, "port": 8080, "everywhere": everywhere}


# -- snapshots -------------------------------------------------------------------------------------------


def file(name: str, tokens: Tokens, **more: Any) -> Snapshot:
    return Snapshot(id=SnapshotId(name), fingerprint="f", tokens=tokens, size=1000, used=0.0, **more)


async def test_each_tier_is_shown_with_its_use_and_budget(tmp_path: Path):
    async with port(StubLink(traits=FITTING), store=Store(tmp_path / "hot", tmp_path / "cold")) as served:
        files = (file("a", HEAD), file("b", PROMPT, tier=Tier.COLD), file("c", HEAD + PROMPT))
        served.driver.post(SnapshotsChanged(at=served.driver.now(), snapshots=files))
        assert (await served.get("/api/state"))["tiers"] == [
            {"tier": "hot", "snapshots": 2, "bytes": 2000, "budget_bytes": 1 << 30, "advice": ""},
            {"tier": "cold", "snapshots": 1, "bytes": 1000, "budget_bytes": 1 << 31, "advice": ""},
        ]


@pytest.mark.parametrize(("tokens", "saved"), [(0, False), (100, False), (250, True), (399, True)])
async def test_a_slot_counts_as_saved_if_most_of_it_is_in_a_snapshot(tokens, saved):
    async with port(StubLink(traits=FITTING)) as served:
        await served.serves("1:a", PROMPT)
        if tokens:
            kept = file("a", PROMPT.cut(0, tokens))
            served.driver.post(SnapshotsChanged(at=served.driver.now(), snapshots=(kept,)))
        assert (await served.slot(0))["saved"] is saved


# -- the tree --------------------------------------------------------------------------------------------


async def test_a_new_prompt_tree_is_empty(served):
    assert await served.get("/api/tree") == {"tokens": 0, "leaves": 0, "nodes": []}


async def test_the_prompt_tree_shows_where_prompts_diverge_and_which_slots_hold_them(served):
    prompts = {name: HEAD + Tokens([letter] * 300) for name, letter in (("1:a", 5), ("2:b", 6))}
    for name, prompt in prompts.items():  # at once, so that each has a slot of its own
        await granted(admit(served.driver, name, prompt))
    for name, prompt in prompts.items():
        finish(served.driver, name, prompt)
    files = (file("head", HEAD), file("gone", Tokens([9] * 50)))
    served.driver.post(SnapshotsChanged(at=served.driver.now(), snapshots=files))
    tree = await served.get("/api/tree")
    assert (tree["tokens"], tree["leaves"]) == (700, 2)
    stem, *twigs = tree["nodes"]
    assert (stem["parent"], stem["begin"], stem["end"], stem["ways"], stem["passed"]) == (None, 0, 100, 2, 2)
    assert (stem["snapshots"], stem["slots"]) == (1, [])
    assert {(twig["parent"], twig["begin"], twig["end"]) for twig in twigs} == {(stem["id"], 100, 400)}
    held = [slot for twig in twigs for slot in twig["slots"]]
    assert sorted(slot["slot"] for slot in held) == [0, 1]
    assert {slot["engine"] for slot in held} == {ENGINE}
    assert all(node["idle_seconds"] >= 0 for node in tree["nodes"])


async def test_a_limited_tree_shows_the_most_recently_used_nodes(served):
    tree = served.driver.placement.tree()
    for n in range(50):
        tree.add(HEAD + Tokens([n + 1] * 10), float(n))
    nodes = (await served.get("/api/tree?limit=3"))["nodes"]
    newest = {tree.twig(HEAD + Tokens([n + 1])) for n in (48, 49)}
    assert newest < {int(node["id"]) for node in nodes}
    assert len(nodes) < 6
    known = {None}
    for node in (await served.get("/api/tree"))["nodes"]:
        assert node["parent"] in known
        known.add(node["id"])
    assert len(known) == 1 + 1 + 50


async def test_a_slot_with_a_prompt_outside_the_tree_is_left_out(served):
    await served.serves("1:a", PROMPT)
    table = served.driver.placement.tables[ENGINE]
    table.shadow.slots[1] = SlotContents(tokens=Tokens([9] * 10), request=RequestId("2:b"))
    nodes = (await served.get("/api/tree"))["nodes"]
    assert [slot["slot"] for node in nodes for slot in node["slots"]] == [0]


@pytest.mark.parametrize("value", ["-1", "x", ""])
async def test_a_limit_that_is_not_a_number_is_refused(served, value):
    async with served.client.get("/api/tree", params={"limit": value}) as answer:
        assert answer.status == 400
        assert "limit" in (await answer.json())["error"]
