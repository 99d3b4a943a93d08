"""An engine that is killed and restarted costs its clients a wait, not an error."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from patience import PATIENCE
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.scheduler.slots.table import SlotState

CHAT = "/v1/chat/completions"
CONTEXT = 131072
VERY_LONG = "night and day " * 5000  # seconds of prefill
CLIENTS = 8
TURNS = 4
KILLS = 2
DOWN = 3.0  # seconds
WAITING = b": waiting: "  # what it waits for follows
# Half a minute of answers at least: none ends before the test has done to its engine what it wants to.
ENDLESS = {"stream": True, "max_tokens": 50_000, "ignore_eos": True}
HEAD = "The lighthouse keeper counts the ships that pass by night. " * 40


@dataclass
class Chat:
    """One client: each turn has the history, and a new message."""

    name: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def asks(self, **more: Any) -> dict[str, Any]:
        new = f"{self.name} asks for the {len(self.messages)}. time: what does the keeper see?"
        self.messages.append(
            {"role": "user", "content": new if self.messages else f"{self.name}. {HEAD} {new}"}
        )
        plain = {"chat_template_kwargs": {"plain": True}, "temperature": 0, "max_tokens": 24}
        return {"messages": self.messages, **plain, **more}

    def hears(self, reply: str) -> None:
        self.messages.append({"role": "assistant", "content": reply})


@pytest.fixture
async def mortal(build, tmp_path) -> AsyncIterator[lab.Restartable]:
    async with lab.tiny_engine(Tiny.HYBRID, build, tmp_path, context_tokens=CONTEXT) as mortal:
        yield mortal


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.001)


def stop(mortal: lab.Restartable) -> None:
    """Stop the engine: it computes nothing more, and its connections stay open."""
    assert mortal.process.pid is not None
    os.kill(mortal.process.pid, signal.SIGSTOP)


async def is_down(sidecar: Sidecar) -> None:
    (link,) = sidecar.driver.links.values()
    await until(lambda: not link.up)


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


async def asked(
    client: aiohttp.ClientSession, body: dict[str, Any], **headers: str
) -> tuple[int, dict[str, Any]]:
    async with client.post(CHAT, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def opening(client: aiohttp.ClientSession, body: dict[str, Any]) -> asyncio.Task[aiohttp.ClientResponse]:
    """Send a request; the task ends with the head of its answer."""

    async def opened() -> aiohttp.ClientResponse:
        return await client.post(CHAT, json=body)

    return asyncio.get_running_loop().create_task(opened())


async def hears_it_waits(answer: aiohttp.ClientResponse, heard: bytearray) -> None:
    """Read until three more comments have come."""
    enough = heard.count(WAITING) + 3
    while heard.count(WAITING) < enough:
        piece = await answer.content.readany()
        assert piece, f"the stream has ended: {bytes(heard)!r}"
        heard += piece


async def test_eight_clients_get_no_error_while_their_engine_is_killed_twice(mortal):
    async with lab.keeping(mortal) as sidecar, aiohttp.ClientSession(lab.url_of(sidecar)) as client:
        chats, failed, killed = [Chat(f"Client {n}") for n in range(CLIENTS)], [], asyncio.Event()

        async def talk(chat: Chat) -> None:
            turns = 0
            while turns < TURNS or not killed.is_set():
                status, doc = await asked(client, chat.asks())
                turns += 1
                if status != 200:
                    failed.append(doc)
                    return
                chat.hears(doc["choices"][0]["message"]["content"])

        async def kill() -> None:
            (table,) = sidecar.driver.placement.tables.values()
            for _ in range(KILLS):
                await until(lambda: table.serving and sidecar.driver.placement.queued > 0)
                mortal.kill()
                await asyncio.sleep(DOWN)
                await mortal.start()
                await lab.ready(sidecar)
            killed.set()

        async with asyncio.TaskGroup() as group:
            for chat in chats:
                group.create_task(talk(chat))
            group.create_task(kill())
        assert failed == []
        value = sidecar.metrics.registry.get_sample_value
        assert value("slotkeeper_requests_sent_again_total") >= 1
        outcomes = ("client_error", "upstream_error", "broken")
        routes = [value("slotkeeper_requests_total", {"route": "chat", "outcome": o}) for o in outcomes]
        assert not any(routes)


@pytest.mark.parametrize("at", ["in the engine", "in line"])
async def test_a_waiting_stream_gets_comments_and_then_its_whole_answer(mortal, at):
    async with (
        lab.keeping(mortal, keep_alive=0.1) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar)) as client,
        AsyncExitStack() as stack,
    ):
        (table,) = sidecar.driver.placement.tables.values()
        if at == "in line":
            for n in range(2):
                endless = said(f"{n} ships", **ENDLESS)
                await (await stack.enter_async_context(client.post(CHAT, json=endless))).content.readany()
        opens, heard = opening(client, said(VERY_LONG, stream=True)), bytearray()
        if at == "in the engine":
            await until(lambda: SlotState.RUNNING in table.states)
            stop(mortal)  # before its first token
        else:
            await until(lambda: sidecar.driver.placement.queued == 1)
        answer = await opens  # its head, and no event yet
        mortal.kill()
        await is_down(sidecar)
        await hears_it_waits(answer, heard)
        await mortal.start()
        heard += await answer.read()
        assert answer.status == 200
        assert b'"error":' not in heard  # the model may well say "error"
        assert heard.endswith(b"data: [DONE]\n\n")
        assert b"prompt_progress" not in heard


@pytest.mark.parametrize("key", [None, "good"])
async def test_a_stream_that_arrives_while_the_engine_is_down_gets_comments(build, tmp_path, key):
    """This needs a key that the engine has accepted. Bodies with other keys are read once an engine is up."""
    wants = ("--api-key", key) if key else ()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        lab.tiny_engine(Tiny.HYBRID, build, tmp_path, *wants, context_tokens=CONTEXT) as mortal,
        lab.keeping(mortal, keep_alive=0.1, engine_api_key=key) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar)) as client,
    ):
        assert (await asked(client, said("Good day"), **headers))[0] == 200
        mortal.kill()
        await is_down(sidecar)
        stranger = None
        if key:
            knocks = asked(client, said("Good day", stream=True), Authorization="Bearer bad")
            stranger = asyncio.get_running_loop().create_task(knocks)
        async with client.post(CHAT, json=said("Good day", stream=True), headers=headers) as answer:
            heard = bytearray()
            await hears_it_waits(answer, heard)
            await mortal.start()
            heard += await answer.read()
        assert b'"error":' not in heard
        assert heard.endswith(b"data: [DONE]\n\n")
        if stranger:
            assert (await stranger)[0] == 401


async def test_a_request_gets_503_after_the_engine_wait_if_the_engine_does_not_return(mortal):
    async with (
        lab.keeping(mortal, engine_wait=1.0) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar)) as client,
    ):
        mortal.kill()
        await is_down(sidecar)
        status, doc = await asked(client, Chat("Anna").asks())
        assert status == 503
        assert "does not accept connections" in doc["error"]["message"]


async def test_a_request_that_kills_its_engine_is_sent_at_most_three_times(mortal):
    async with lab.keeping(mortal) as sidecar, aiohttp.ClientSession(lab.url_of(sidecar)) as client:
        (table,) = sidecar.driver.placement.tables.values()
        deadly = said(VERY_LONG)
        dies = asyncio.get_running_loop().create_task(asked(client, deadly, **{"X-Slotkeeper-Bypass": "1"}))
        kills = 0
        while not dies.done():
            if table.up and table.serving:
                mortal.kill()
                await is_down(sidecar)
                kills += 1
                await mortal.start()
            await asyncio.sleep(0.005)
        status, doc = dies.result()
        assert status == 502
        assert "has ended 3 times" in doc["error"]["message"]
        assert kills >= 3  # a kill before the request has reached the engine is no death of that request
