"""The figures of a measured server, read with its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slotkeeper.api.head import PLANTED, REWRITTEN
from slotkeeper.bench.target import EVALUATED, Counter, Shot, Target, _said, counted

ANSWER = {"choices": [], "timings": {"prompt_n": 4, "cache_n": 96, "predicted_n": 1}}
SHOT = Shot(session="s", label="x", path="/completion", body={"prompt": "hello"}, headers={})


GAP_SECONDS = 0.2


def exposed(count: float) -> str:
    return f"# HELP {EVALUATED} tokens\n# TYPE {EVALUATED} counter\n{EVALUATED} {count}\n"


class Server:
    """Answers as an engine; its counter grows by `work` with each request."""

    def __init__(self, *, work: int = 4, headers: dict[str, str] | None = None) -> None:
        self.count, self.work, self.headers = 1000, work, headers
        self.tells = True
        self.tokenized = 0  # requests to /tokenize

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=exposed(self.count)) if self.tells else web.Response(status=501)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.count += self.work
        if (await request.json()).get("stream"):
            return await self._stream(request)
        return web.json_response(ANSWER, headers=self.headers)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Send three tokens: a comment, as from a sidecar, does not shorten the gap between the last two."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for line in (": waiting", 'data: {"content":"a"}', 'data: {"content":"b"}'):
            await response.write(f"{line}\n\n".encode())
        for line in (": waiting", 'data: {"content":"c","stop":true}'):
            await asyncio.sleep(GAP_SECONDS / 2)
            await response.write(f"{line}\n\n".encode())
        return response

    async def tokens(self, _: web.Request) -> web.Response:
        self.tokenized += 1
        return web.json_response({"tokens": list(range(100))})


@asynccontextmanager
async def served(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/completion", server.answer)
    app.router.add_post("/tokenize", server.tokens)
    async with TestServer(app) as at:
        yield str(at.make_url("")).rstrip("/")


async def test_planted_tokens_count_as_waiting_and_other_work_as_idle():
    server = Server(work=4 + 30, headers={"X-Slotkeeper-Planted": "30"})
    async with served(server) as base, Target(base) as target:
        first = (await target.fire(SHOT)).sample
        server.count += 7  # idle work between two requests
        second = (await target.fire(SHOT)).sample
    assert first.usage is not None
    assert (first.usage.computed, first.usage.reused, first.idle) == (34, 66, 0)
    assert second.idle == 7


async def test_a_stall_is_the_longest_gap_between_two_events_of_a_stream():
    streamed = replace(SHOT, body={**SHOT.body, "stream": True})
    async with served(Server()) as base, Target(base) as target:
        stalled, whole = [(await target.fire(shot)).sample for shot in (streamed, SHOT)]
    assert stalled.failure is None
    assert stalled.stall_seconds >= 0.9 * GAP_SECONDS
    assert whole.stall_seconds is None


async def test_a_target_that_does_not_watch_knows_no_oracle_and_sends_only_the_request():
    server = Server()
    async with served(server) as base, Target(base, watches=False) as target:
        sample = (await target.fire(SHOT)).sample
    assert (sample.oracle, sample.idle, sample.prompt, server.tokenized) == (None, None, 100, 0)


async def test_idle_work_before_a_restart_of_the_engine_is_counted():
    server = Server()
    async with served(server) as base, Target(base) as target:
        await target.fire(SHOT)
        server.count += 900
        await target.counter.read()  # before the engine ends, since its counter is lost then
        server.count = 0
        assert (await target.fire(SHOT)).sample.idle == 900


async def test_a_request_that_a_rule_changed_is_marked():
    async with served(Server(headers={"X-Slotkeeper-Rewritten": "date"})) as base, Target(base) as target:
        assert (await target.fire(SHOT)).sample.rewritten


async def test_an_engine_without_a_counter_leaves_idle_work_unknown():
    server = Server()
    server.tells = False
    async with served(server) as base, Target(base) as target:
        sample = (await target.fire(SHOT)).sample
    assert sample.idle is None
    assert sample.computed == 4


async def test_a_counter_that_does_not_fit_the_request_is_ignored():
    async with served(Server(work=0)) as base, Target(base) as target:
        assert (await target.fire(SHOT)).sample.idle is None


async def test_a_counter_that_restarts_continues_the_count():
    server = Server()
    async with served(server) as base, Counter([base]) as counter:
        assert await counter.read() == 0
        server.count = 1500
        assert await counter.read() == 500
        server.count = 20
        assert await counter.read() == 520


def test_only_the_prompt_token_counter_of_the_engine_is_read():
    assert counted(exposed(12)) == 12
    with pytest.raises(ValueError, match="prompt_tokens_total"):
        counted("# TYPE other counter\nother 1\n")


def test_figures_that_came_after_the_head_are_read_from_a_comment():
    response = httpx.Response(200, headers={PLANTED: "0"})
    body = b": waiting\n\n: X-Slotkeeper-Planted: 512\n\ndata: {}\n\n"
    assert _said(PLANTED, response, body) == "512"
    assert _said(PLANTED, response, b"data: {}\n\n") == "0"
    assert _said(REWRITTEN, response, body) is None
