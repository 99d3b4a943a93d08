"""Slots that share one KV buffer: on stock, growing answers fail together; behind the sidecar none fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from benchmarks.pool import ENGINES, Way, played, shared_engine, with_room

from compatibility import Feature
from engine.conftest import client_of
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.texts import prose
from slotkeeper.scheduler.effects import PoolAct

CHATS, TURNS = 4, 3
SMALL = ("-np", "4", "--kv-unified", "-c", "2048", "--cache-ram", "0")  # cells for two of `STORIES`
STORIES = 3
ATTEMPTS = 20


# Times the oracle. Where each task moves all idle slots to the RAM cache, a load from there may find no
# contiguous cells, and a conversation is then computed again.
FILES = 1.10
MOST = {"as it comes": 2.0, "no RAM cache": FILES}


@pytest.mark.shows(Feature.POOL, Tiny.DENSE)
@pytest.mark.parametrize("flags", ENGINES)
async def test_growing_chats_do_not_fail_and_get_the_answers_of_a_larger_buffer(flags):
    oracle = await with_room(Tiny.DENSE, CHATS, TURNS)
    ours = await played(Tiny.DENSE, oracle, TURNS, Way.FILES, ENGINES[flags])
    assert ours.failed == 0
    assert ours.others(oracle) == 0
    assert ours.computed <= MOST[flags] * oracle.computed
    if flags == "no RAM cache":  # otherwise the engine itself clears idle slots when a task begins
        assert ours.acts["waited"] + ours.acts["parked"] + ours.acts["erased"] > 0
    assert ours.acts["failed"] == ours.acts["retried"] == 0


@pytest.mark.shows(Feature.POOL, Tiny.HYBRID)
async def test_growing_chats_of_a_hybrid_model_do_not_fail_either():
    oracle = await with_room(Tiny.HYBRID, CHATS, TURNS)
    ours = await played(Tiny.HYBRID, oracle, TURNS, Way.FILES, ENGINES["no RAM cache"])
    assert ours.failed == 0
    assert ours.others(oracle) == 0
    assert ours.computed <= FILES * oracle.computed


def story(number: int, **more: Any) -> dict[str, Any]:
    fixed = {"prompt": f"{number}. " + prose(1000, number), "n_predict": 700, "ignore_eos": True}
    return {**fixed, "temperature": 0, **more}


async def together(client: httpx.AsyncClient, first: int, **more: Any) -> list[httpx.Response]:
    """Send `STORIES` at the same time."""
    asked = (client.post("/completion", json=story(first + n, **more)) for n in range(STORIES))
    return await asyncio.gather(*asked)


async def until(met: Callable[[list[httpx.Response]], Any], client: httpx.AsyncClient, **more: Any) -> None:
    """Send `STORIES` until they have met: on a busy machine one may end before another begins."""
    for attempt in range(ATTEMPTS):
        if met(await together(client, STORIES * attempt, **more)):
            return
    pytest.fail(f"in {ATTEMPTS} attempts the requests have never met")


def count(sidecar: Sidecar, act: PoolAct) -> int:
    value = sidecar.driver.metrics.registry.get_sample_value
    return int(value("slotkeeper_kv_pool_total", {"reason": act.value}) or 0)


async def until_before_it_is_known(
    met: Callable[[Sidecar, httpx.AsyncClient, list[httpx.Response]], Awaitable[bool]],
    folder: Path,
    **more: Any,
) -> None:
    """Send `STORIES` through a new sidecar to a new engine until they have met.

    If they do not meet, slots hold more tokens than one may have, which shows the sidecar the shared buffer.
    """
    for attempt in range(ATTEMPTS):
        (own := folder / str(attempt)).mkdir()
        async with (
            shared_engine(Tiny.DENSE, own, *SMALL) as engine,
            lab.in_front_of(engine.base) as sidecar,
            client_of(sidecar) as client,
        ):
            if await met(sidecar, client, await together(client, 0, **more)):
                return
    pytest.fail(f"in {ATTEMPTS} attempts the requests have never met")


async def test_requests_that_failed_together_are_sent_again_and_the_shared_buffer_is_then_known(
    tmp_path: Path,
):
    """Nothing showed that the slots share one buffer before the first failure."""

    async def retried(sidecar: Sidecar, client: httpx.AsyncClient, answers: list[httpx.Response]) -> bool:
        assert [answer.status_code for answer in answers] == [200] * STORIES
        assert {answer.json()["tokens_predicted"] for answer in answers} == {700}
        if not (before := count(sidecar, PoolAct.RETRIED)):
            return False
        (table,) = sidecar.driver.placement.tables.values()
        assert table.traits.unified
        assert {answer.status_code for answer in await together(client, STORIES)} == {200}
        assert count(sidecar, PoolAct.RETRIED) == before
        assert count(sidecar, PoolAct.FAILED) == 0
        return True

    await until_before_it_is_known(retried, tmp_path)


async def test_a_shared_buffer_with_a_limit_for_each_slot_is_modelled(tmp_path: Path):
    """GET /props shows what one slot may have, not the buffer's size."""
    flags = (*SMALL, "--kv-unified-per-slot", "1024")
    async with (
        shared_engine(Tiny.DENSE, tmp_path, *flags) as engine,
        lab.in_front_of(engine.base, engine.flags) as sidecar,
        client_of(sidecar) as client,
    ):

        def waited(answers: list[httpx.Response]) -> bool:
            assert {answer.status_code for answer in answers} == {200}
            return count(sidecar, PoolAct.WAITED) > 0

        await until(waited, client)
        assert count(sidecar, PoolAct.RETRIED) == 0


async def test_a_running_stream_ends_with_the_engines_error_and_is_counted_as_failed(tmp_path: Path):
    async def breaks(sidecar: Sidecar, _: httpx.AsyncClient, answers: list[httpx.Response]) -> bool:
        ends = [orjson.loads(answer.text.strip().rpartition("data: ")[2]) for answer in answers]
        errors = [end["error"]["message"] for end in ends if "error" in end]
        assert all(error.startswith("Context size has been exceeded") for error in errors)
        assert count(sidecar, PoolAct.FAILED) == len(errors)
        return bool(errors)

    await until_before_it_is_known(breaks, tmp_path, stream=True)
