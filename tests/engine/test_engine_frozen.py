"""The sidecar distinguishes a stopped engine (SIGSTOP) from a slow one, and no client waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import aiohttp
import pytest

from chaos.raw import cut_short
from engine.test_engine_waits import (
    CHAT,
    CONTEXT,
    ENDLESS,
    VERY_LONG,
    Chat,
    asked,
    opening,
    said,
    stop,
    until,
)
from patience import PATIENCE
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny

pytestmark = pytest.mark.one_in(8)

SOON = 0.2  # seconds without output, for an engine that never answers
SHORT = 3.0  # seconds, for a slow engine
# Each begins otherwise, so that nothing that an earlier one has computed is reused.
BODIES = {
    CHAT: said(VERY_LONG),
    "/v1/messages": said(f"Messages: {VERY_LONG}"),
    "/v1/responses": {"input": f"Responses: {VERY_LONG}", "max_output_tokens": 8},
    "/completion": {"prompt": VERY_LONG, "n_predict": 8},
}


@pytest.fixture
async def mortal(build, tmp_path) -> AsyncIterator[lab.Restartable]:
    async with lab.tiny_engine(Tiny.HYBRID, build, tmp_path, context_tokens=CONTEXT) as mortal:
        yield mortal


def resume(mortal: lab.Restartable) -> None:
    assert mortal.process.pid is not None
    os.kill(mortal.process.pid, signal.SIGCONT)


@contextmanager
def frozen(mortal: lab.Restartable, sidecar: Sidecar) -> Iterator[None]:
    """Stop the engine inside the block, and wait until that is detected."""
    (link,) = sidecar.driver.links.values()
    stop(mortal)
    usual, link.frozen_after = link.frozen_after, SOON
    try:
        yield
    finally:
        link.frozen_after = usual
        resume(mortal)


async def is_frozen(sidecar: Sidecar) -> None:
    (link,) = sidecar.driver.links.values()
    await until(lambda: link.pulse.frozen)


def count(sidecar: Sidecar, name: str, **labels: str) -> float:
    return sidecar.metrics.registry.get_sample_value(f"slotkeeper_{name}", labels) or 0.0


async def post(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with client.post(path, json=body) as answer:
        return answer.status, await answer.json()


def message(path: str, doc: dict[str, Any]) -> str:
    """Return the message of an error in the API's own shape."""
    if path == "/v1/messages":
        assert doc["type"] == "error"
        assert doc["error"]["type"] == "timeout_error"
    else:
        assert doc["error"]["code"] == 504
    return str(doc["error"]["message"])


async def serves_again(sidecar: Sidecar, client: aiohttp.ClientSession) -> None:
    """Check that all slots are free and that a request is answered."""
    await lab.ready(sidecar)
    status, doc = await asked(client, said("Is anybody there?"))
    assert status == 200, doc
    await lab.rested(sidecar)


async def test_a_request_in_prefill_gets_504_in_the_shape_of_its_api(mortal):
    async with lab.keeping(mortal) as sidecar, aiohttp.ClientSession(lab.url_of(sidecar)) as client:
        (table,) = sidecar.driver.placement.tables.values()
        for times, (path, body) in enumerate(BODIES.items(), 1):
            waits = asyncio.get_running_loop().create_task(post(client, path, body))
            await until(lambda: table.serving)
            with frozen(mortal, sidecar):
                status, doc = await waits
                assert status == 504, path
                assert "has said nothing for" in message(path, doc)
            assert count(sidecar, "engine_freezes_total", engine=mortal.base) == times
            assert count(sidecar, "requests_sent_again_total") == 0
            await serves_again(sidecar, client)


async def test_queued_requests_get_504_and_running_answers_end_with_an_error(mortal):
    async with (
        lab.keeping(mortal) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar)) as client,
        AsyncExitStack() as stack,
    ):
        begun = []
        for n in range(2):
            answer = await stack.enter_async_context(client.post(CHAT, json=said(f"{n} ships", **ENDLESS)))
            await answer.content.readany()
            begun.append(answer)
        in_line = asyncio.get_running_loop().create_task(asked(client, said("Good day")))
        await until(lambda: sidecar.driver.placement.queued == 1)
        with frozen(mortal, sidecar):
            status, doc = await in_line
            assert (status, doc["error"]["code"]) == (504, 504)
            for answer in begun:
                assert b"[DONE]" not in await cut_short(answer)
        await serves_again(sidecar, client)


async def test_a_stream_that_had_no_token_yet_ends_with_an_error_event(mortal):
    async with (
        lab.keeping(mortal, keep_alive=0.05) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar)) as client,
    ):
        (table,) = sidecar.driver.placement.tables.values()
        opens = opening(client, said(VERY_LONG, stream=True))
        await until(lambda: table.serving)
        stop(mortal)
        answer = await opens
        assert answer.status == 200, "the sidecar had to send a comment"
        with frozen(mortal, sidecar):
            heard = await answer.read()
        assert b'"code":504' in heard
        assert b"[DONE]" not in heard
        await serves_again(sidecar, client)


async def test_requests_to_a_frozen_engine_get_504_at_once(mortal):
    async with lab.keeping(mortal) as sidecar, aiohttp.ClientSession(lab.url_of(sidecar)) as client:
        (link,) = sidecar.driver.links.values()
        with frozen(mortal, sidecar):
            first = asyncio.get_running_loop().create_task(asked(client, said("Good day")))
            await is_frozen(sidecar)
            assert (await first)[0] == 504
            link.frozen_after = 10 * PATIENCE  # so long that no waiting request is broken off in time
            for path in ("/tokenize", CHAT):
                assert (await post(client, path, said("Good day", content="x")))[0] == 504
            async with client.get("/v1/models") as answer:
                assert answer.status == 504
        await serves_again(sidecar, client)


@pytest.mark.parametrize("action", ["save", "restore", "prefill"])
async def test_a_step_that_a_frozen_engine_does_not_finish_holds_no_slot(
    build, tmp_path, action, monkeypatch
):
    files_only = ("--cache-ram", "0")
    async with (
        lab.tiny_engine(Tiny.HYBRID, build, tmp_path, *files_only, context_tokens=CONTEXT) as mortal,
        lab.keeping(mortal) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar)) as client,
    ):
        (link,), began = sidecar.driver.links.values(), asyncio.Event()
        chats = [Chat(name) for name in ("Anna", "Berta", "Clara")]
        for chat in chats:
            _, doc = await asked(client, chat.asks())
            chat.hears(doc["choices"][0]["message"]["content"])
            await lab.rested(sidecar)
        real = getattr(link.client, action)

        async def freezes(*args: Any, **more: Any) -> Any:
            if not began.is_set():
                stop(mortal)
                began.set()
            return await real(*args, **more)

        monkeypatch.setattr(link.client, action, freezes)

        async def ended(turn: asyncio.Task[Any]) -> None:
            await asyncio.wait([turn])
            if action != "restore":  # the others begin after its answer
                await lab.rested(sidecar)

        # One of them is in no slot; measured times decide which. A next turn is prepared after some turns.
        for chat in chats * 6:
            turn = asyncio.get_running_loop().create_task(asked(client, chat.asks()))
            over = asyncio.get_running_loop().create_task(ended(turn))

            def either(over: asyncio.Task[None] = over) -> bool:
                return began.is_set() or over.done()

            await until(either)
            over.cancel()
            if began.is_set():
                break
            chat.hears(turn.result()[1]["choices"][0]["message"]["content"])
        with frozen(mortal, sidecar):
            await is_frozen(sidecar)
            status, doc = await turn
            assert status == (504 if action == "restore" else 200), "the others were begun after its answer"
        await serves_again(sidecar, client)
        if status == 200:
            chat.hears(doc["choices"][0]["message"]["content"])
        else:
            chat.messages.pop()
        status, doc = await asked(client, chat.asks())
        assert status == 200, doc


async def test_an_engine_that_continues_in_time_loses_no_request(mortal):
    async with lab.keeping(mortal) as sidecar, aiohttp.ClientSession(lab.url_of(sidecar)) as client:
        (link,) = sidecar.driver.links.values()
        async with client.post(CHAT, json=said(VERY_LONG, stream=True)) as answer:
            stop(mortal)
            await until(lambda: link.health.value == "silent")
            resume(mortal)
            heard = await answer.read()
        assert heard.endswith(b"data: [DONE]\n\n")
        assert count(sidecar, "engine_freezes_total", engine=mortal.base) == 0
        assert link.losses == 0


async def test_an_engine_that_computes_for_long_is_not_taken_as_frozen(mortal):
    """The request asks for no stream, so the engine sends nothing before the end."""
    async with (
        lab.keeping(mortal, engine_frozen_after=SHORT) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar)) as client,
    ):
        (link,), began = sidecar.driver.links.values(), sidecar.driver.now()
        endless = said(VERY_LONG, max_tokens=50_000, ignore_eos=True)
        computes = asyncio.get_running_loop().create_task(asked(client, endless))
        await until(lambda: sidecar.driver.now() > began + 2 * SHORT)
        assert not computes.done()
        assert link.losses == 0
        computes.cancel()
