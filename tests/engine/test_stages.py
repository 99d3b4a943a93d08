"""On what the time of requests is spent: `why`, metrics and durations agree, on real engines."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import aiohttp
import pytest

from patience import PATIENCE
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.texts import prose
from slotkeeper.observe.states import Spent

CHAT: Final = "/v1/chat/completions"
SYSTEM: Final = {"role": "system", "content": "Stages of this test. " + prose(9000, 3)}
SLACK: Final = 0.0051  # seconds: less than the shortest gap that counts as a stage, and rounding
Document = dict[str, Any]


def body(number: int, **more: Any) -> Document:
    messages = [SYSTEM, {"role": "user", "content": prose(3000, 40 + number)}]
    return {"messages": messages, "max_tokens": 8, "temperature": 0, "stream": True} | more


@asynccontextmanager
async def in_front(build: str, folder: Any, *, slots: int, context_tokens: int = 16384):
    flags = partial(lab.up_flags, slots=slots)
    async with (
        lab.tiny_engine(Tiny.HYBRID, build, folder, context_tokens=context_tokens, recipe=flags) as engine,
        lab.in_front_of(engine.base, slot_dir=engine.flags.slot_save_path, save_pause=0.05) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar), timeout=aiohttp.ClientTimeout(PATIENCE)) as client,
    ):
        yield sidecar, client


async def listed(sidecar: Sidecar) -> list[Document]:
    async with (
        aiohttp.ClientSession(f"http://{sidecar.addresses[1]}") as admin,
        admin.get("/api/requests") as answer,
    ):
        return list(reversed((await answer.json())["requests"]))


def histogram(sidecar: Sidecar, name: str, **labels: str) -> tuple[float, float]:
    """Return the number and the sum of what a histogram has observed."""
    value = sidecar.driver.metrics.registry.get_sample_value
    count, total = (value(f"slotkeeper_{name}_{part}", labels) or 0.0 for part in ("count", "sum"))
    return count, total


async def ask(client: aiohttp.ClientSession, sent: Document) -> None:
    async with client.post(CHAT, json=sent) as answer:
        assert answer.status == 200
        await answer.read()


async def test_one_client_at_a_time_waits_in_no_queue_whatever_its_slot_needs(build, tmp_path):
    """Plants, saves and restores come before its requests, but no slot is taken."""
    async with in_front(build, tmp_path, slots=2) as (sidecar, client):
        for number in range(5):
            await ask(client, body(number))
            await lab.rested(sidecar)
        requests = await listed(sidecar)
        assert sum(one["stages"].get("prepare", 0.0) for one in requests) > 0, "no request had a plant"
        for stage in Spent:
            had = [one["stages"][stage.value] for one in requests if stage.value in one["stages"]]
            seen = histogram(sidecar, "stage_seconds", stage=stage.value)
            assert seen == pytest.approx((len(had), sum(had)), abs=1e-4), stage
        queued = [one["stages"]["queue"] for one in requests]
        assert histogram(sidecar, "queue_wait_seconds") == pytest.approx((5, sum(queued)), abs=1e-4)
    for one in requests:
        assert one["stage"] is None
        assert sum(one["stages"].values()) == pytest.approx(one["seconds"], abs=SLACK)
        to_first = sum(seconds for stage, seconds in one["stages"].items() if stage != "answer")
        assert to_first == pytest.approx(one["first_token_seconds"], abs=SLACK)
    # The first one cannot have waited for another, yet its plants took most of the time to its first token.
    assert queued[0] < requests[0]["stages"]["prepare"] + requests[0]["stages"]["prefill"]


async def test_a_request_that_waits_for_a_slot_shows_the_queue_while_it_waits(build, tmp_path):
    shown = in_front(build, tmp_path, slots=1, context_tokens=65536)
    async with shown as (sidecar, client), asyncio.TaskGroup() as group:

        async def stages_are(*stages: str) -> list[Document]:
            async with asyncio.timeout(PATIENCE):
                while True:
                    seen = await listed(sidecar)
                    if [one["stage"] for one in seen] == [*stages]:
                        return seen
                    await asyncio.sleep(0.02)

        first = group.create_task(ask(client, body(1, max_tokens=50_000, ignore_eos=True)))
        await stages_are("answer")
        second = group.create_task(ask(client, body(2)))
        early = late = (await stages_are("answer", "queue"))[1]
        while late["stages"]["queue"] < early["stages"]["queue"] + 0.2:  # it may count its tokens meanwhile
            late = (await stages_are("answer", "queue"))[1]
        first.cancel()
        await second
        (_, ended) = await listed(sidecar)
    assert "prefill" not in late["stages"]
    assert ended["stages"]["queue"] >= late["stages"]["queue"]
    assert ended["stages"].keys() >= {"read", "queue", "prefill", "answer"}
