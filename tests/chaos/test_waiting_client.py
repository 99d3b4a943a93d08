"""A client that waits for its stream gets comments, then the stream, or an error in its API's shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import orjson
import pytest

from chaos.conftest import quiet, ready, settings
from chaos.fake_answers import PATHS, WORDS, looks_whole, request_body
from chaos.fake_engine import FakeEngine, Fault
from chaos.fake_http import whole
from chaos.raw import Wire, dial, until
from patience import PATIENCE
from slotkeeper.api.answers.answer import Answer, AnswerReader
from slotkeeper.api.head import BYPASS, Api
from slotkeeper.app import Sidecar, running
from slotkeeper.exchange import exchange
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.types import EngineId

KEEP_ALIVE = 0.05
WAITING = b": waiting: "  # what it waits for follows
CHAT = PATHS[Api.CHAT]
SHAPES = pytest.mark.parametrize("api", PATHS)
SAID = {Fault.LOADING: "so the script says", Fault.DIE_BEFORE_HEAD: "closed the connection"}
patient = partial(settings, keep_alive=KEEP_ALIVE, drain_timeout=1.0)


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    """Run an engine with one slot, so that the second request waits."""
    async with FakeEngine(slots=1) as engine:
        yield engine


@pytest.fixture
async def sidecar(fake: FakeEngine) -> AsyncIterator[Sidecar]:
    async with running(patient(fake.base)) as sidecar:
        await ready(sidecar)
        yield sidecar


def spoken(stream: bytes) -> bytes:
    """Return the stream without its comments, which must be complete."""
    assert stream.endswith(b"\n\n")
    return b"".join(block + b"\n\n" for block in stream.split(b"\n\n")[:-1] if not block.startswith(b":"))


async def two_comments(wire: Wire) -> None:
    """Read until the client has got a comment that it waits, and another one later."""
    pieces, heard = wire.chunks(), 0
    while heard < 2:
        piece = await anext(pieces)
        assert piece.startswith(b": ")
        heard += piece.startswith(WAITING)


async def hold(fake: FakeEngine, wire: Wire) -> None:
    """Occupy the engine's only slot until `free_slot` is called."""
    fake.script.appendleft(Fault.TRICKLE)
    await wire.post(CHAT, request_body(Api.CHAT, stream=True, text="who holds the slot"))
    await until(lambda: fake.ran, "the slot is taken")


def free_slot(fake: FakeEngine) -> None:
    for _ in range(len(WORDS) + 3):
        fake.go.release()


def error_in(api: Api, stream: bytes) -> dict[str, object]:
    """Return the error in the only event of a stream, in the API's own shape."""
    lines = spoken(stream).strip().split(b"\n")
    if api in {Api.MESSAGES, Api.RESPONSES}:
        assert lines.pop(0) == b"event: error"
    (data,) = lines
    doc = orjson.loads(data.removeprefix(b"data: "))
    assert doc.get("type") == ("error" if api in {Api.MESSAGES, Api.RESPONSES} else None)
    return doc["error"]


def outcomes(sidecar: Sidecar, api: Api) -> dict[str, float]:
    known = sidecar.metrics.registry.get_sample_value
    labels = ("ok", "client_error", "upstream_error", "client_gone", "broken")
    counted = {
        outcome: known("slotkeeper_requests_total", {"route": api.value, "outcome": outcome}) or 0
        for outcome in labels
    }
    return {outcome: count for outcome, count in counted.items() if count}


# -- the client waits, and is served -------------------------------------------------------------------


@SHAPES
async def test_a_queued_stream_gets_a_head_and_comments_and_then_the_engines_stream(fake, sidecar, data, api):
    body = request_body(api, stream=True)
    async with dial(data) as first, dial(data) as second:
        await hold(fake, first)
        await second.post(PATHS[api], body, {"X-Request-Id": "patience"})
        head = await second.head()
        await two_comments(second)
        assert len(fake.ran) == 1, "it still waits"
        free_slot(fake)
        stream = await second.body(head)
    async with dial(fake.base) as direct:
        await direct.post(PATHS[api], body)
        theirs = await direct.body(await direct.head())
    assert (head.status, head["Content-Type"], head["X-Request-Id"]) == (200, "text/event-stream", "patience")
    assert spoken(stream) == theirs
    assert looks_whole(api, stream)
    assert not head.all("X-Slotkeeper-Decision"), "the decision was not made yet"
    assert b"\n: X-Slotkeeper-Decision: " in b"\n" + stream
    assert stream.index(b"X-Slotkeeper-") < stream.index(theirs[:20]), (
        "comments in place of headers come first"
    )
    await until(lambda: quiet(sidecar, fake))


@SHAPES
async def test_a_stream_gets_comments_between_the_engines_head_and_its_first_event(fake, sidecar, data, api):
    fake.script.append(Fault.TRICKLE)
    async with dial(data) as wire:
        await wire.post(PATHS[api], request_body(api, stream=True))
        head = await wire.head()
        await two_comments(wire)
        free_slot(fake)
        stream = await wire.body(head)
    assert looks_whole(api, stream)
    assert spoken(stream).count(b"data: ") == stream.count(b"data: ")


async def test_a_stream_gets_comments_during_a_plant():
    """/v1/messages: the prompt is first planted in the slot that the engine will choose."""
    long, other = "a long story " * 400, "a long story " * 40 + "that ends otherwise " * 40
    async with FakeEngine(slots=2) as fake, running(patient(fake.base)) as sidecar:
        await ready(sidecar)
        async with dial(sidecar.addresses[0]) as wire:
            await wire.post(CHAT, request_body(Api.CHAT, stream=True, text=long))
            await wire.body(await wire.head())
        fake.script.append(Fault.HANG)
        async with dial(sidecar.addresses[0]) as wire:
            await wire.post(PATHS[Api.MESSAGES], request_body(Api.MESSAGES, stream=True, text=other))
            head = await wire.head()
            await two_comments(wire)
        assert not head.all("X-Slotkeeper-Decision"), "it was not sent yet"
        assert fake.ran[-1].path == PATHS[Api.COMPLETION], "the running request is the sidecar's prefill"
        await until(lambda: fake.left == 1, "the sidecar has ended its prefill")
        await until(lambda: quiet(sidecar, fake))
        assert outcomes(sidecar, Api.MESSAGES) == {"client_gone": 1}


async def test_the_time_to_first_token_does_not_count_comments(fake, sidecar, data):
    def first_tokens() -> float | None:
        return sidecar.metrics.registry.get_sample_value("slotkeeper_time_to_first_token_seconds_count")

    fake.script.append(Fault.TRICKLE)
    async with dial(data) as wire:
        await wire.post(CHAT, request_body(Api.CHAT, stream=True))
        head = await wire.head()
        begun = asyncio.get_running_loop().time()
        await two_comments(wire)
        heard = asyncio.get_running_loop().time() - begun
        free_slot(fake)
        await wire.body(head)
    assert first_tokens() == 1
    seconds = sidecar.metrics.registry.get_sample_value("slotkeeper_time_to_first_token_seconds_sum")
    assert seconds > heard, "it came after the comments"


async def test_the_longest_stall_of_an_answer_is_counted(fake, sidecar, data):
    clock, seen = asyncio.get_running_loop().time, b""
    fake.script.append(Fault.TRICKLE)
    async with dial(data) as wire:
        await wire.post(CHAT, request_body(Api.CHAT, stream=True))
        await wire.head()
        pieces = wire.chunks()
        while WORDS[0].encode() not in seen:
            fake.go.release()
            while (piece := await anext(pieces)).startswith(b":"):
                pass
            seen += piece
        begun = clock()
        await asyncio.sleep(2 * KEEP_ALIVE)
        still = clock() - begun
        free_slot(fake)
        async for _ in pieces:
            pass
    counted = sidecar.metrics.registry.get_sample_value
    assert counted("slotkeeper_answer_stall_seconds_count") == 1
    assert counted("slotkeeper_answer_stall_seconds_sum") >= still


async def test_a_request_without_stream_or_with_bypass_gets_no_comments(fake, sidecar, data):
    async with dial(data) as first, dial(data) as waiting, dial(data) as plain, dial(data) as alone:
        await hold(fake, first)
        await plain.post(CHAT, request_body(Api.CHAT, stream=False, text="plain"))
        await alone.post(CHAT, request_body(Api.CHAT, stream=True, text="b"), {"X-Slotkeeper-Bypass": "1"})
        await until(lambda: sidecar.driver.placement.queued)
        await waiting.post(CHAT, request_body(Api.CHAT, stream=True, text="waiting"))
        head = await waiting.head()
        await two_comments(waiting)
        free_slot(fake)
        assert looks_whole(Api.CHAT, await waiting.body(head))
        head = await plain.head()
        assert head["Content-Type"] == "application/json"
        assert orjson.loads(await plain.body(head))["choices"]
        stream = await alone.body(await alone.head())
        assert WAITING not in stream
        assert looks_whole(Api.CHAT, stream)


async def test_an_http_1_0_client_that_waits_gets_comments_too(fake, data):
    body = orjson.dumps(request_body(Api.CHAT, stream=True))
    async with dial(data) as first, dial(data) as second:
        await hold(fake, first)
        await second.send(f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        assert (await second.head()).status == 200
        for _ in range(2):
            assert (await second.reader.readuntil(b"\n\n")).startswith(WAITING)
        free_slot(fake)
        rest, reset = await second.rest()
    assert not reset
    assert looks_whole(Api.CHAT, rest)


# -- the client waits, and a fault happens ---------------------------------------------------------------


async def heard_after_comments(
    fake: FakeEngine, data: str, api: Api, fault: Fault, *, cut: bool = False
) -> bytes:
    """Return what a waiting client gets, comments first, from an engine with this fault. `cut`: no end."""
    async with dial(data) as first, dial(data) as second:
        fake.script.append(fault)
        await hold(fake, first)
        await second.post(PATHS[api], request_body(api, stream=True))
        head = await second.head()
        await two_comments(second)
        free_slot(fake)
        stream = await (second.cut() if cut else second.body(head))
        await first.body(await first.head())
    return stream


@SHAPES
@pytest.mark.parametrize("fault", SAID)
async def test_an_error_after_comments_is_an_error_event_of_the_api(fake, sidecar, data, api, fault):
    stream = await heard_after_comments(fake, data, api, fault)
    assert SAID[fault] in str(error_in(api, stream)["message"])
    assert not looks_whole(api, stream)
    assert outcomes(sidecar, api)["upstream_error"] == 1
    await until(lambda: quiet(sidecar, fake), "its slot is free again")


@pytest.mark.parametrize(("status", "outcome"), [(400, "client_error"), (500, "upstream_error")])
async def test_an_engines_refusal_after_comments_keeps_all_its_fields(fake, sidecar, data, status, outcome):
    said = {"code": status, "message": "too long", "type": "exceed_context_size_error", "n_ctx": 512}
    fake.custom = whole(status, {"error": said})
    stream = await heard_after_comments(fake, data, Api.CHAT, Fault.CUSTOM)
    assert error_in(Api.CHAT, stream) == {**said, "param": None}
    assert outcomes(sidecar, Api.CHAT) == {"ok": 1, outcome: 1}


async def test_a_whole_answer_in_place_of_a_stream_gives_an_error_event(fake, sidecar, data):
    fake.custom = whole(200, {"choices": []})
    stream = await heard_after_comments(fake, data, Api.CHAT, Fault.CUSTOM)
    assert "application/json" in str(error_in(Api.CHAT, stream)["message"])


async def test_a_stream_that_breaks_off_after_comments_ends_with_one_error(fake, sidecar, data):
    stream = await heard_after_comments(fake, data, Api.CHAT, Fault.DIE_IN_STREAM, cut=True)
    assert b"one" in stream
    assert b"broke off" in stream.rpartition(b"data: ")[2]
    assert not looks_whole(Api.CHAT, stream)


async def test_a_waiting_request_is_sent_to_another_engine_even_after_the_sidecars_head(monkeypatch):
    """The engine that it was sent to dies before the connection is made."""
    async with FakeEngine() as one, FakeEngine() as other, running(patient(one.base, other.base)) as sidecar:
        await ready(sidecar)
        upstream, dead = sidecar._upstream, asyncio.Event()
        asked: list[EngineId] = []
        send = upstream.send

        async def late(address, *more, **named):
            asked.append(address.engine)
            await dead.wait()
            return await send(address, *more, **named)

        monkeypatch.setattr(upstream, "send", late)
        async with dial(sidecar.addresses[0]) as wire:
            await wire.post(CHAT, request_body(Api.CHAT, stream=True))
            head = await wire.head()
            await two_comments(wire)
            engines = {engine.base: engine for engine in (one, other)}
            await engines.pop(asked[0]).die()
            dead.set()
            stream = await wire.body(head)
        (alive,) = engines.values()
        assert asked[1:] == [alive.base]
        assert looks_whole(Api.CHAT, stream)
        assert outcomes(sidecar, Api.CHAT) == {"ok": 1}
        await until(lambda: quiet(sidecar, alive))


# -- the client leaves -----------------------------------------------------------------------------------


async def test_a_queued_client_that_leaves_after_comments_frees_its_place(fake, sidecar, data):
    async with dial(data) as first, dial(data) as second:
        await hold(fake, first)
        tasks = len(sidecar.driver.tasks)
        await second.post(CHAT, request_body(Api.CHAT, stream=True, text="second"))
        await second.head()
        await two_comments(second)
        second.leave()
        await until(lambda: sidecar.driver.placement.queued == 0, "its place is free")
        await until(lambda: len(sidecar.driver.tasks) <= tasks, "no task serves it any more")
        free_slot(fake)
        await first.body(await first.head())
    await until(lambda: quiet(sidecar, fake))
    assert len(fake.ran) == 1, "it never reached the engine"
    assert not sidecar.driver._grants
    assert outcomes(sidecar, Api.CHAT) == {"ok": 1, "client_gone": 1}


@SHAPES
@pytest.mark.parametrize("fault", [Fault.HANG, Fault.TRICKLE], ids=["before the head", "after it"])
async def test_a_client_that_leaves_during_prefill_after_comments_ends_the_engines_request(
    fake, sidecar, data, api, fault
):
    fake.script.append(fault)
    async with dial(data) as wire:
        await wire.post(PATHS[api], request_body(api, stream=True))
        await wire.head()
        await two_comments(wire)
    await until(lambda: fake.left, "the engine sees that the client left")
    await until(lambda: quiet(sidecar, fake), "the slot is free again")


# -- a real engine ---------------------------------------------------------------------------------------

STORY = "the keeper lights the lamp. "
ORIGIN = {"Origin": "http://page.example"}
QUESTION = [{"role": "user", "content": "Who lights the lamp?"}]
REAL = {
    Api.CHAT: {"messages": QUESTION, "max_tokens": 12, "temperature": 0},
    Api.MESSAGES: {"messages": QUESTION, "max_tokens": 12, "temperature": 0},
    Api.RESPONSES: {"input": "What does he light?", "max_output_tokens": 12, "temperature": 0},
}


def read(api: Api, stream: bytes) -> Answer:
    reader = AnswerReader(api, stream=True)
    reader.feed(stream)
    return reader.close()


def told(text: str, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "stream": True, "max_tokens": 4, "temperature": 0, **more}


async def asked(address: str, api: Api, body: object) -> bytes:
    async with dial(address) as wire:
        await wire.post(PATHS[api], body)
        return await wire.body(await wire.head())


async def test_clients_that_wait_behind_a_long_prefill_get_comments_and_then_the_direct_answer(
    engine_factory, build
):
    """One slot has a prompt of 16,000 tokens; a request of each streaming API waits for it."""
    engine = engine_factory("tiny-hybrid", build, args=["-np", "1", "-c", "32768"])
    requests = {api: {**body, "stream": True} for api, body in REAL.items()}
    too_long = told(STORY * 3500)
    async with running(patient(engine.base)) as sidecar:
        await ready(sidecar)
        address = sidecar.addresses[0]
        async with asyncio.TaskGroup() as group, dial(address) as leaving:
            first = group.create_task(asked(address, Api.CHAT, told(STORY * 1500)))
            (table,) = sidecar.driver.placement.tables.values()
            await until(lambda: not table.idle, "the slot is taken")
            waiting = {api: group.create_task(asked(address, api, body)) for api, body in requests.items()}
            refused = {
                api: group.create_task(asked(address, api, too_long)) for api in (Api.CHAT, Api.MESSAGES)
            }
            await leaving.post(CHAT, told("And then?"), ORIGIN)
            ours = await leaving.head()
        await until(lambda: len(table.idle) == 1, "the slot is free")
    async with dial(engine.base) as wire:
        await wire.post(CHAT, told("And then?"), ORIGIN)
        theirs = await wire.head()
    for name in ("Content-Type", "X-Accel-Buffering", "Access-Control-Allow-Origin"):
        assert ours[name] == theirs[name], "the sidecar's head has the engine's headers"
    assert WAITING in first.result(), "the engine's head comes at once, its first event after the prefill"
    assert b"prompt_progress" not in first.result()
    assert read(Api.CHAT, first.result()).complete
    for api, task in waiting.items():
        stream = task.result()
        assert stream.startswith(WAITING)
        direct = read(api, await asked(engine.base, api, requests[api]))
        assert (direct.complete, direct.error) == (True, None)
        assert (read(api, stream).complete, read(api, stream).reply) == (True, direct.reply)
    for api, task in refused.items():
        assert task.result().startswith(WAITING)
        assert "exceeds the available context size" in str(error_in(api, task.result())["message"])
    assert error_in(Api.CHAT, refused[Api.CHAT].result())["n_ctx"] == 32768


async def test_no_answer_waits_long_for_our_own_prediction(monkeypatch, sidecar):
    """Its head has the prediction only if that is ready: a fast engine answers before we have rendered."""
    monkeypatch.setattr(exchange, "PREDICTION_SECONDS", PATIENCE)
    rendered = asyncio.Event()

    async def render_chat(*_: object) -> Tokens:
        await rendered.wait()
        return Tokens()

    monkeypatch.setattr(EngineLink, "render_chat", render_chat)
    body = request_body(Api.CHAT, stream=True, text="not brief, " * 100)
    async with (
        asyncio.timeout(PATIENCE / 2),
        aiohttp.ClientSession(f"http://{sidecar.addresses[0]}") as client,
        client.post(CHAT, json=body, headers={BYPASS: "1"}) as answer,
    ):
        assert "X-Slotkeeper-Predicted" not in answer.headers
        assert looks_whole(Api.CHAT, await answer.read())
    rendered.set()
