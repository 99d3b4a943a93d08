"""Two engines of which one fails requests, though it answers /health: clients see no error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
import pytest

from chaos.conftest import ready, settings
from chaos.fake_answers import PATHS, looks_whole, request_body
from chaos.fake_control import error
from chaos.fake_engine import FakeEngine, Fault
from chaos.fake_http import LAST_CHUNK, STREAM_HEAD, chunk, whole
from chaos.raw import dial, until
from patience import PATIENCE
from slotkeeper.api.head import Api
from slotkeeper.app import Sidecar, running
from slotkeeper.scheduler import rates
from slotkeeper.scheduler.rates import TRIPS
from slotkeeper.scheduler.types import EngineId


async def posted(sidecar, api=Api.CHAT, **more) -> tuple[int, bytes]:
    async with dial(sidecar.addresses[0]) as wire:
        await wire.post(PATHS[api], request_body(api, **{"stream": False, **more}))
        head = await wire.head()
        return head.status, await wire.body(head)


@asynccontextmanager
async def two(*faults: Fault) -> AsyncIterator[tuple[Sidecar, dict[str, FakeEngine]]]:
    """Run two fake engines, each with these faults to come."""
    async with FakeEngine() as one, FakeEngine() as other:
        for fake in (one, other):
            fake.script.extend(faults)
        async with running(settings(f"one={one.base}", f"other={other.base}")) as sidecar:
            await ready(sidecar)
            yield sidecar, {"one": one, "other": other}


def last_engine(sidecar: Sidecar) -> str:
    return str(next(iter(sidecar.driver.journal)).engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_failed_before_its_first_byte_is_sent_to_the_other_engine(stream):
    async with two(Fault.DIE_BEFORE_HEAD) as (sidecar, engines):
        status, body = await posted(sidecar, stream=stream)
        assert status == 200
        assert b"four" in body
        assert sorted(len(engine.ran) for engine in engines.values()) == [1, 2]


async def test_a_request_is_sent_to_the_other_engine_although_the_engine_has_sent_a_ping():
    """llama-server sends one after 30 s of prefill (--sse-ping-interval)."""
    async with two(Fault.CUSTOM_AND_END) as (sidecar, engines):
        for engine in engines.values():
            engine.custom = STREAM_HEAD + chunk(b":\n\n")
        _, body = await posted(sidecar, stream=True)
        assert looks_whole(Api.CHAT, body)
        assert sorted(len(engine.ran) for engine in engines.values()) == [1, 2]


async def test_a_request_that_failed_after_its_first_byte_is_not_sent_again():
    async with two(Fault.DIE_IN_STREAM) as (sidecar, engines):
        async with dial(sidecar.addresses[0]) as wire:
            await wire.post(PATHS[Api.CHAT], request_body(Api.CHAT, stream=True))
            await wire.head()
            assert b"broke off" in await wire.cut()
        assert sum(len(engine.ran) for engine in engines.values()) == 1


async def test_an_engine_that_answers_with_errors_gets_no_more_requests(monkeypatch):
    monkeypatch.setattr(rates, "FIRST_REST", PATIENCE)  # seconds: it is not tried again meanwhile
    monkeypatch.setattr(rates, "LONGEST_REST", PATIENCE)
    async with two() as (sidecar, engines):
        await posted(sidecar)
        name = last_engine(sidecar)
        (other,) = engines.keys() - {name}
        fake, table = engines[name], sidecar.driver.placement.tables[EngineId(name)]
        fake.script.extend([Fault.LOADING] * TRIPS)  # 503, though its /health is 200
        async with asyncio.timeout(PATIENCE):
            while not table.failing:
                await posted(sidecar)
        assert not fake.script

        def failures() -> float | None:
            return sidecar.metrics.registry.get_sample_value(
                "slotkeeper_engine_failures_total", {"engine": name}
            )

        assert failures() == TRIPS
        assert (await posted(sidecar))[0] == 200
        assert (last_engine(sidecar), failures()) == (other, TRIPS)  # what it runs for us does not count
        url = f"http://{sidecar.addresses[1]}/api/state"
        async with aiohttp.ClientSession() as client, client.get(url) as answer:
            state = (await answer.json())["engines"]
        assert {one["engine"]: one["failing"] for one in state} == {name: True, other: False}


# As b11549 writes them: the head of a stream is sent when its task begins, so an error of the computation is
# its last event, behind the first progress of the prefill.
PROGRESS = (
    b'data: {"choices":[{"index":0,"delta":{}}],'
    b'"prompt_progress":{"total":14,"cache":0,"processed":0,"time_ms":0}}\n\n'
)
OF_MESSAGES = b'event: error\ndata: {"code":500,"message":"Compute error.","type":"server_error"}\n\n'
OF_OTHERS = b'data: {"error":{"code":500,"message":"Compute error.","type":"server_error"}}\n\n'


def counted(sidecar: Sidecar) -> float:
    """Return the requests that failed by the fault of an engine."""
    value = sidecar.metrics.registry.get_sample_value
    engines = sidecar.driver.placement.tables
    return sum(value("slotkeeper_engine_failures_total", {"engine": name}) or 0 for name in engines)


async def test_requests_that_the_engines_template_refuses_do_not_count_as_failures_of_the_engine():
    async with two(*[Fault.CUSTOM] * (2 * TRIPS)) as (sidecar, engines):
        for fake in engines.values():
            fake.custom = whole(500, error(500))
            fake.broken["/apply-template"] = 500
        for api in (Api.CHAT, Api.MESSAGES, Api.RESPONSES, Api.CHAT):
            assert (await posted(sidecar, api))[0] == 500
        asked = [heard for fake in engines.values() for heard in fake.heard if "apply" in heard.path]
        assert len(asked) >= TRIPS
        assert counted(sidecar) == 0
        assert not any(table.failing for table in sidecar.driver.placement.tables.values())


FAILURE: Final = whole(500, error(500))


@pytest.mark.parametrize(
    ("api", "answer"),
    [
        (Api.CHAT, FAILURE),
        (Api.COMPLETION, FAILURE),
        (Api.MESSAGES, FAILURE),
        (Api.CHAT, STREAM_HEAD + chunk(PROGRESS) + chunk(OF_OTHERS) + LAST_CHUNK),
        (Api.RESPONSES, STREAM_HEAD + chunk(OF_OTHERS) + LAST_CHUNK),
        (Api.MESSAGES, STREAM_HEAD + chunk(OF_MESSAGES) + LAST_CHUNK),
    ],
    ids=lambda value: ("500" if value == FAILURE else "stream") if isinstance(value, bytes) else value,
)
async def test_an_engine_that_fails_all_requests_is_taken_out(monkeypatch, api, answer):
    monkeypatch.setattr(rates, "FIRST_REST", PATIENCE)  # seconds: it is not tried again meanwhile
    stream = answer != FAILURE
    async with two() as (sidecar, engines):
        await posted(sidecar, api, stream=stream)
        name = last_engine(sidecar)
        fake, table = engines[name], sidecar.driver.placement.tables[EngineId(name)]
        fake.script.extend([Fault.CUSTOM] * TRIPS)
        fake.custom = answer
        async with asyncio.timeout(PATIENCE):
            while fake.script:
                await posted(sidecar, api, stream=stream)
        await until(lambda: table.failing, "it is taken out")


async def test_the_only_engine_gets_requests_although_it_fails():
    async with FakeEngine() as one:
        one.script.extend([Fault.LOADING] * (TRIPS + 1))
        async with running(settings(one.base)) as sidecar:
            await ready(sidecar)
            found = [(await posted(sidecar))[0] for _ in range(TRIPS + 2)]
            assert found == [503] * (TRIPS + 1) + [200]
