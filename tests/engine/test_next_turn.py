"""The predicted tokens are a prefix of the next prompt: on real engines, on every API.

Nothing is asked of the engine but its template and its answers, so one model is enough: tiny-hybrid, which
ends its thoughts and calls tools.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import pytest
from benchmarks.sessions import SESSIONS

from chaos.raw import until
from compatibility import Feature
from engine.dialects import BODIES, PATHS
from patience import PATIENCE
from slotkeeper.api.answers.answer import AnswerReader
from slotkeeper.api.answers.echo import words
from slotkeeper.api.head import Api
from slotkeeper.api.request import parse
from slotkeeper.bench import lab
from slotkeeper.bench.target import Turn
from slotkeeper.exchange import exchange
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.render import NextTurns
from slotkeeper.scheduler.effects import Report
from slotkeeper.scheduler.events import Event, NextKnown
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.figures import Unknown
from slotkeeper.scheduler.types import RequestId

pytestmark = pytest.mark.one_in(8)

Message = dict[str, Any]


class Listening(NextTurns):
    """Records the prediction of every turn, and passes it on."""

    def __init__(self) -> None:
        super().__init__()
        self.told: asyncio.Queue[Tokens | None] = asyncio.Queue()

    async def prefix(self, *args: Any, **more: Any) -> Tokens | None:
        begins = await super().prefix(*args, **more)
        self.told.put_nowait(begins)
        return begins


@dataclass
class Client:
    """Plays a session through a sidecar, and compares each prompt with its prediction."""

    driver: Driver
    http: aiohttp.ClientSession
    api: Api
    keeps: bool  # whether it sends reasoning back
    predictions: list[Tokens] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)  # turns without a prediction

    async def play(self, session: str, most: int = 100) -> None:
        turns = Listening()
        self.driver.next_turns = turns
        script = SESSIONS[session]()
        turn, begins = next(script), None
        for _ in range(most):
            body = orjson.dumps(BODIES[self.api](turn))
            if begins is not None:
                await self._compare(begins, turn, body)
            reply = await self._ask(body)
            async with asyncio.timeout(PATIENCE):
                begins = await turns.told.get()
            try:
                turn = script.send(self._echo(reply))
            except StopIteration:
                return
            if turn.messages[-1]["role"] == "tool" and not reply.get("tool_calls"):
                begins = None  # the model did not call a tool, so no client would send a result
            elif begins is None and words(reply):  # otherwise it was cut off during its reasoning
                self.silent.append(turn.label)

    async def _compare(self, begins: Tokens, turn: Turn, body: bytes) -> None:
        """Check that the prediction is a prefix of the prompt and ends where the client's new text begins."""
        link, chat = self.driver.engines.front(), parse(self.api, body).chat
        real = await link.render_chat(chat, {})
        assert real.begins_with(begins), f"{turn.label}: {real.lcp(begins)} of {len(begins)}"
        said = next(m for m in reversed(turn.messages) if m["role"] in ("user", "tool"))["content"]
        text = await link.client.apply_template(chat)
        before = await link.tokenize(text[: text.rindex(said)], add_special=True, parse_special=True)
        # The line feed before a text may be merged with line feeds in it.
        assert len(begins) >= len(before) - 1, turn.label
        self.predictions.append(begins)

    async def _ask(self, body: bytes) -> Message:
        headers = {"Content-Type": "application/json"}
        async with self.http.post(PATHS[self.api], data=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            reader = AnswerReader(self.api, stream=False)
            reader.feed(await response.read())
        reply = reader.close().reply
        assert reply is not None
        return reply

    def _echo(self, reply: Message) -> Message:
        """Return the arguments as a client in JavaScript writes them."""
        echo = json.loads(json.dumps(reply))
        for call in echo.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(given, separators=(",", ":"))
        return echo if self.keeps else {k: v for k, v in echo.items() if k != "reasoning_content"}


@asynccontextmanager
async def client(engine, api: Api, *, keeps: bool = True) -> AsyncIterator[Client]:
    async with lab.in_front_of(engine.base, engine.flags) as started:
        async with aiohttp.ClientSession(lab.url_of(started)) as http:
            yield Client(started.driver, http, api, keeps)


@pytest.mark.shows(Feature.NEXT)
@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("session", ["append", "thinking"])
async def test_the_next_prompt_begins_with_the_predicted_tokens(engine, session, api):
    """From the first turn on: this template always leaves the reasoning out of the history."""
    async with client(engine, api) as playing:
        await playing.play(session)
    assert playing.silent == []
    assert len(playing.predictions) >= 3


@pytest.mark.parametrize("keeps", [True, False], ids=["keeps reasoning", "drops reasoning"])
@pytest.mark.parametrize("api", BODIES)
async def test_in_a_tool_loop_the_next_prompt_is_predicted_from_the_second_call_on(engine, api, keeps):
    async with client(engine, api, keeps=keeps) as playing:
        await playing.play("tool-loop", most=8)
    assert playing.silent == ["task 1 call 2"]
    assert len(playing.predictions) >= 4


async def test_the_scheduler_gets_the_predicted_prompt_before_the_next_request(engine, monkeypatch):
    """The prediction is posted, under the request that it follows."""
    posted: list[NextKnown] = []
    async with client(engine, Api.CHAT) as playing:
        post = playing.driver.post

        def listen(event: Event) -> None:
            if isinstance(event, NextKnown):
                posted.append(event)
            post(event)

        monkeypatch.setattr(playing.driver, "post", listen)
        await playing.play("append")
    told = [event.tokens for event in posted]
    assert told[: len(playing.predictions)] == playing.predictions
    assert len({event.request for event in posted}) == len(posted) == 6


async def test_brief_requests_are_rendered_in_idle_time_if_their_slots_still_hold_them(engine, monkeypatch):
    """Otherwise requests that follow at once would wait for the rendering."""
    idle, rendered, reports = asyncio.Event(), list[str](), list[Report]()
    async with client(engine, Api.CHAT) as playing:
        driver, link = playing.driver, playing.driver.engines.front()
        render = link.render_chat

        async def idle_moment(request: RequestId, **_: Any) -> bool:
            await idle.wait()
            return driver.placement.holds(request)

        async def spied(chat: Message, auth: Any) -> Tokens:
            rendered.append(chat["messages"][0]["content"])
            return await render(chat, auth)

        async def ask(question: str) -> None:
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 4}
            await playing._ask(orjson.dumps(body))

        monkeypatch.setattr(driver, "idle_moment", idle_moment)
        monkeypatch.setattr(Placement, "serving", True)  # or they would be rendered at once
        monkeypatch.setattr(driver, "reports", reports.append)
        monkeypatch.setattr(link, "render_chat", spied)
        await ask("Is it raining?")
        (first,) = driver.learning
        others = 0
        while driver.placement.holds(first):
            others += 1
            await ask(f"{others}. Is it snowing?")
        assert rendered == []
        idle.set()
        await until(lambda: not driver.learning, "all that can be known is")
        slots = len(next(iter(driver.placement.tables.values())).states)
        assert "Is it raining?" not in rendered
        assert len(set(rendered)) == len(rendered) == min(slots, others)  # and so short a reply is not
    unknown = [report.unknown for report in reports]
    assert unknown.count(Unknown.BRIEF) == 1 + others - min(slots, others)
    assert unknown.count(None) == min(slots, others)


@pytest.mark.parametrize("more", [0, 1])
async def test_a_reply_to_a_brief_request_is_learned_if_it_is_long(engine, monkeypatch, more):
    learned = list[int]()

    async def spied(*_: Any, generated: int, **__: Any) -> None:
        learned.append(generated)

    monkeypatch.setattr(exchange, "BRIEF_REPLY_TOKENS", 8)
    monkeypatch.setattr(exchange, "with_reply", spied)
    async with client(engine, Api.CHAT) as playing:
        body = {"messages": [{"role": "user", "content": "Is it raining?"}]}
        await playing._ask(orjson.dumps({**body, "max_tokens": 8 + more, "ignore_eos": True}))
        await until(lambda: not playing.driver.learning, "all that is to be known is")
    assert learned == [9] * more
    assert "1 replies" in repr(
        playing.driver.next_turns
    )  # how the client sends it back is learned in any case
