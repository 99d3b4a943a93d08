"""Engines that start late, die, and come back: no request is sent for a state that died with them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import pytest

from chaos.raw import until_async
from compatibility import Feature
from patience import PATIENCE
from slotkeeper.app import Sidecar, running
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.engine.answers import Health
from slotkeeper.engine.child.launch import find_engine
from slotkeeper.scheduler.rates import Measured

ONE = ["-t", "1"]
AWAKE_SECONDS = 2  # without requests, until an engine sleeps
CHAT = "/v1/chat/completions"
LONG = "The lighthouse keeper counts the ships that pass by night. " * 30


@asynccontextmanager
async def in_front_of(*bases: str, **more: Any) -> AsyncIterator[tuple[Sidecar, aiohttp.ClientSession]]:
    settings = lab.settings_of(
        upstream=bases,
        listen="127.0.0.1:0",
        admin_listen="127.0.0.1:0",
        drain_timeout=1.0,
        drain_delay=0,
        **more,
    )
    async with (
        running(settings) as sidecar,
        aiohttp.ClientSession(f"http://{sidecar.addresses[0]}") as client,
    ):
        yield sidecar, client


async def readyz(sidecar: Sidecar) -> tuple[int, str]:
    url = f"http://{sidecar.addresses[1]}/readyz"
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        return answer.status, await answer.text()


async def is_ready(sidecar: Sidecar) -> None:
    async def ready() -> bool:
        return all(link.ready for link in sidecar.driver.links.values())

    await until_async(ready, "all engines are probed")


@asynccontextmanager
async def kept_awake(base: str) -> AsyncIterator[None]:
    """Use the engine inside the block: on a busy machine it could sleep before the next step of a test."""

    async def use() -> None:
        async with aiohttp.ClientSession(base) as direct:
            while True:
                async with direct.get("/slots") as answer:
                    assert answer.status == 200
                await asyncio.sleep(AWAKE_SECONDS / 10)

    using = asyncio.get_running_loop().create_task(use())
    try:
        yield
    finally:
        using.cancel()
        await asyncio.wait([using])


async def settled(sidecar: Sidecar) -> None:
    """Wait until the last reply's tokens are known: only two watching tasks of each engine are left."""

    async def quiet() -> bool:
        return len(sidecar.driver.tasks) <= 2 * len(sidecar.driver.links) + (
            sidecar.driver.snapshots is not None
        )

    await until_async(quiet, "nothing is left to do")


# An answer long enough that its prompt is rendered before its head comes, so the head has the prediction.
TOLD: Final = {"max_tokens": 96, "ignore_eos": True}


def body(*said: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(said)]
    plain = {"chat_template_kwargs": {"plain": True}, "temperature": 0, "max_tokens": 8}
    return {"messages": turns, **plain, **more}


async def asked(client: aiohttp.ClientSession, *said: str, **more: Any) -> tuple[str, dict[str, str], int]:
    """Return the reply, the sidecar's headers, and the cached tokens."""
    async with client.post(CHAT, json=body(*said, **more)) as answer:
        assert answer.status == 200, await answer.text()
        doc = await answer.json()
        return doc["choices"][0]["message"]["content"], dict(answer.headers), doc["timings"]["cache_n"]


async def refused(client: aiohttp.ClientSession) -> str:
    """Return what a request is answered that no engine serves."""
    async with client.post(CHAT, json=body("Hello")) as answer:
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) > 0
        error = (await answer.json())["error"]
        assert error["type"] == "unavailable_error"
        return str(error["message"])


async def test_a_restart_between_two_health_checks_is_noticed(engine_factory, build):
    """/health is "ok" before and after: only the media marker shows the restart."""
    engine = engine_factory("tiny-hybrid", build, args=ONE)
    async with in_front_of(engine.base) as (sidecar, client):
        await is_ready(sidecar)
        await asked(client, LONG)
        await lab.rested(sidecar)  # work that the dead engine would fail makes the slot's contents unknown
        (link,) = sidecar.driver.links.values()
        (table,) = sidecar.driver.placement.tables.values()
        before = link.process
        look, gate, waits = link._look, asyncio.Event(), asyncio.Event()

        async def later(*args: Any) -> None:
            waits.set()
            await gate.wait()
            await look(*args)

        link._look = later  # type: ignore[method-assign, assignment]  # the watch waits before its next poll
        async with asyncio.timeout(PATIENCE):
            await waits.wait()
        engine.process.kill()
        engine_factory("tiny-hybrid", build, args=ONE, port=engine.flags.port)
        assert any(table.shadow.slots), "the sidecar has not polled the engine yet"
        gate.set()

        async def noticed() -> bool:
            return link.ready and link.process != before

        await until_async(noticed, "the new process is known")
        assert not any(table.shadow.slots)
        _, headers, cached = await asked(client, LONG)
        assert int(headers["X-Slotkeeper-Predicted"]) == cached == 0


@pytest.mark.shows(Feature.MOVES, Tiny.HYBRID)
async def test_a_conversation_stays_with_its_engine_and_moves_if_that_engine_dies(
    engine_factory, build, monkeypatch
):
    # Else one of two equal engines may seem several times as fast: a busy machine holds up short answers.
    monkeypatch.setattr(Measured, "comparable", False)
    engines = [engine_factory("tiny-hybrid", build, args=ONE) for _ in range(2)]
    async with in_front_of(*(engine.base for engine in engines)) as (sidecar, client):
        await is_ready(sidecar)
        told: dict[str, list[str]] = {}
        for name in ("red", "green", "blue", "black"):
            first = f"A story of the {name} ship. {LONG}"
            told[name] = [first, (await asked(client, first))[0]]
        for turn in ("And then?", "And how does it end?"):
            for said in told.values():
                reply, _, cached = await asked(client, *said, turn)
                assert cached > 100, "its engine held its state"
                said += [turn, reply]
        used = [
            len([h for h in table.shadow.slots if h]) for table in sidecar.driver.placement.tables.values()
        ]
        assert used == [2, 2], "four stories, four slots, two engines"

        engines[0].process.kill()  # it is dead when this returns
        async with asyncio.TaskGroup() as group:
            for said in told.values():
                group.create_task(asked(client, *said, "Again, please."))
        assert (await readyz(sidecar))[0] == 200, "one engine is enough"


async def test_a_request_waits_while_its_engine_loads_and_no_longer(build, tmp_path):
    model, binary = tmp_path / "endless.gguf", find_engine(build)
    os.mkfifo(model)  # the engine waits until someone writes there, and says that it loads its model
    engine = lab.Restartable(binary, lab.stock_flags(binary, model, tmp_path), tmp_path / "engine.log")
    async with in_front_of(engine.base) as (sidecar, client), asyncio.TaskGroup() as group:
        (link,) = sidecar.driver.links.values()

        async def loads() -> bool:
            return link.health is Health.LOADING

        engine.process.start()
        try:
            await until_async(loads, "the engine loads its model")
            waits = group.create_task(refused(client))
            for _ in range(5):
                await link.was_lost(link.losses)  # looks again
            assert not waits.done()
        finally:
            engine.kill()
            await engine.process.stop()
        assert "does not accept connections" in await waits


@pytest.mark.shows(Feature.SLEEP, Tiny.HYBRID)
@pytest.mark.parametrize("files", [True, False], ids=["files", "no files"])
async def test_a_sleeping_engine_is_woken_only_by_requests(engine_factory, build, files):
    """The slots of a woken engine are empty.

    A request waits until a slot can be chosen, and its state is restored if there is a file.
    """
    engine = engine_factory("tiny-hybrid", build, args=[*ONE, "--sleep-idle-seconds", str(AWAKE_SECONDS)])
    folder = {"slot_dir": engine.slot_dir, "save_pause": 0.05} if files else {}

    async def asleep() -> bool:
        async with aiohttp.ClientSession(engine.base) as direct, direct.get("/props") as answer:
            return (await answer.json())["is_sleeping"]

    async with in_front_of(engine.base, **folder) as (sidecar, client):
        async with kept_awake(engine.base):
            await is_ready(sidecar)
            reply, _, _ = await asked(client, LONG)
            await lab.rested(sidecar)
        await until_async(asleep, "the engine sleeps although the sidecar polls it")
        await asyncio.sleep(AWAKE_SECONDS + 0.5)  # more polls
        assert await asleep()
        assert await readyz(sidecar) == (200, "asleep: the next request wakes it\n")
        for path in ("/v1/models", "/health"):
            async with client.get(path) as answer:
                assert answer.status == 200
        assert await asleep()
        again, headers, cached = await asked(client, LONG, reply, "And then?", **TOLD)
        assert headers["X-Slotkeeper-Decision"] == ("snapshot" if files else "cold")
        assert int(headers["X-Slotkeeper-Predicted"]) <= cached
        assert (cached > 500) == files
        async with kept_awake(engine.base):
            _, headers, cached = await asked(
                client, LONG, reply, "And then?", again, "And after that?", **TOLD
            )
        assert 500 < int(headers["X-Slotkeeper-Predicted"]) <= cached


async def test_requests_that_exceed_the_context_get_the_engines_answer_and_others_are_not_affected(
    engine_factory, build
):
    """A prompt without room, an answer without room, and slots that share cells and run out together."""
    engine = engine_factory("tiny-hybrid", build, args=[*ONE, "-np", "2", "-c", "2048", "-kvu"])
    endless = {"max_tokens": 5000, "ignore_eos": True}
    async with in_front_of(engine.base) as (sidecar, client):
        await is_ready(sidecar)
        async with client.post(CHAT, json=body(LONG * 8)) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "exceed_context_size_error"
        async with client.post(CHAT, json=body("Go on for ever.", **endless)) as answer:
            assert answer.status == 200
            assert (await answer.json())["choices"][0]["finish_reason"] == "length"

        async def crowded(number: int) -> tuple[int, dict[str, Any]]:
            async with client.post(CHAT, json=body(f"{number}. {LONG * 2}", **endless)) as answer:
                return answer.status, await answer.json()

        async with asyncio.TaskGroup() as group:
            both = [group.create_task(crowded(number)) for number in range(2)]
        told = [task.result() for task in both]
        refused = [doc["error"] for status, doc in told if status != 200]
        assert all({"code", "message", "type"} <= set(error) for error in refused), told
        assert all(doc["choices"][0]["finish_reason"] == "length" for status, doc in told if status == 200)
        reply, _, _ = await asked(client, LONG)
        await settled(sidecar)
        _, headers, cached = await asked(client, LONG, reply, "And then?", **TOLD)
        assert int(headers["X-Slotkeeper-Predicted"]) == cached > 100
