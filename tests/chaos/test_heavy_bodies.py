"""Bodies that take long to read, or much memory: refused first, or read outside the event loop."""

from __future__ import annotations

import asyncio
import gc
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import orjson
import psutil
import pytest

from chaos.conftest import ready, settings
from chaos.fake_answers import PATHS, looks_whole, request_body
from chaos.raw import dial, until
from patience import PATIENCE
from slotkeeper.api import request
from slotkeeper.api.head import Api
from slotkeeper.api.request import BRACES, HEAVY, LARGE, MOST_DEEP, MOST_MESSAGES, PromptSize, size_of
from slotkeeper.app import Sidecar, running
from slotkeeper.engine.answers import EngineError
from slotkeeper.engine.client import EngineClient
from slotkeeper.exchange import exchange
from slotkeeper.runtime import link
from slotkeeper.runtime.heavy import Weighed, weigh
from slotkeeper.runtime.tasks import Aside
from slotkeeper.vocab.gguf import read_vocabulary
from slotkeeper.vocab.tokenizer import Tokenizer

CHAT = PATHS[Api.CHAT]
EMPTY_LISTS = b'{"messages":[' + b"[]," * 6_700_000 + b"[]]}"  # 20 MB
MESSAGE = b'{"role":"user","content":"x"}'
MILLION = b'{"messages":[' + (MESSAGE + b",") * 999_999 + MESSAGE + b"]}"
ROOM = 2**20
TRIES = 10
OURS = str(Path(exchange.__file__).parents[1])


async def refused(address: str, path: str, body: bytes) -> dict[str, Any]:
    async with dial(address) as wire:
        await wire.post(path, body)
        head = await wire.head()
        assert head.status == 413
        return orjson.loads(await wire.body(head))


@pytest.mark.parametrize("body", [EMPTY_LISTS, MILLION], ids=["empty lists", "a million messages"])
async def test_a_body_with_too_many_values_is_refused_without_being_parsed(sidecar, data, body, monkeypatch):
    def parsed(_: bytes) -> None:
        raise AssertionError("it was parsed: half a second on the loop, and a gigabyte")

    monkeypatch.setattr(request, "load", parsed)
    gc.collect()
    before = psutil.Process().memory_info().rss
    assert "values" in str((await refused(data, CHAT, body))["error"])
    await until(lambda: sidecar._intake.free == sidecar._intake.total, "its room was given back")
    gc.collect()
    await until(lambda: psutil.Process().memory_info().rss < before + 4 * len(body), "no lasting memory")


@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES, Api.RESPONSES])
async def test_a_body_with_too_many_messages_is_refused_in_the_shape_of_its_api(fake, data, api):
    name = "input" if api is Api.RESPONSES else "messages"
    body = orjson.dumps({name: [{"role": "user", "content": "x"}] * (MOST_MESSAGES + 1)})
    error = (await refused(data, PATHS[api], body))["error"]
    assert str(f"{MOST_MESSAGES:,}") in str(error["message"])
    if api is Api.MESSAGES:
        assert error["type"] == "request_too_large"
    assert not fake.ran


@pytest.mark.parametrize("more", [0, 1])
async def test_a_body_that_is_nested_too_deeply_is_refused(fake, data, more):
    """Both the engine's parser and ours go deeper, but code that walks the document does not."""
    lists = MOST_DEEP - 1 + more  # the object itself counts as one
    body = orjson.dumps(request_body(Api.CHAT, stream=False))[:-1] + b',"x":' + b"[" * lists + b"]" * lists
    async with dial(data) as wire:
        await wire.post(CHAT, body + b"}")
        head = await wire.head()
        assert (head.status, b"nested" in await wire.body(head)) == ((400, True) if more else (200, False))
    assert len(fake.ran) == 1 - more


async def test_a_body_with_the_maximum_number_of_messages_is_served(fake, data):
    body = {"messages": [{"role": "user", "content": "x"}] * MOST_MESSAGES, "stream": True}
    async with dial(data) as wire:
        await wire.post(CHAT, body)
        head = await wire.head()
        assert (head.status, looks_whole(Api.CHAT, await wire.body(head))) == (200, True)


@pytest.mark.parametrize("text", ["x" * LARGE, "{" * (BRACES + 1)], ids=["large", "many objects"])
async def test_a_large_body_is_read_outside_the_event_loop_and_a_small_one_in_it(
    fake, sidecar, data, text, monkeypatch
):
    ran = []
    original = Aside.__call__

    async def noted(self, do, /, *args, **more):
        ran.append(do.__name__)
        return await original(self, do, *args, **more)

    monkeypatch.setattr(Aside, "__call__", noted)
    for said, aside in (("short", False), (text, True)):
        async with dial(data) as wire:
            await wire.post(CHAT, request_body(Api.CHAT, stream=True, text=said))
            assert looks_whole(Api.CHAT, await wire.body(await wire.head()))
        assert bool(ran) == aside


async def test_a_client_that_leaves_while_its_body_is_read_leaves_no_request(fake, sidecar, data):
    async with dial(data) as wire:
        await wire.post(CHAT, request_body(Api.CHAT, stream=True, text="a b c " * 2**20))
    await until(lambda: sidecar._intake.free == sidecar._intake.total, "its room was given back")
    await until(lambda: "0 requests" in repr(sidecar.driver.placement))


async def test_a_body_that_exceeds_the_total_budget_gets_429_until_there_is_room(fake):
    """Bytes count when they arrive: an announced length takes no room."""
    small = settings(fake.base, all_bodies_bytes=ROOM, drain_timeout=1.0)
    async with running(small) as sidecar, AsyncExitStack() as stack:
        await ready(sidecar)
        address, intake = sidecar.addresses[0], sidecar._intake
        for _ in range(4):
            wire = await stack.enter_async_context(dial(address))
            await wire.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {ROOM}\r\n\r\n".encode())
        await wire.send(b" " * (ROOM - 100))
        await until(lambda: intake.free == 100)
        async with dial(address) as other:
            await other.post(CHAT, request_body(Api.CHAT, stream=False, text="x" * 200))
            head = await other.head()
            assert head.status == 429
            assert int(head["Retry-After"]) > 0
            assert b"--max-body-bytes" in await other.body(head)
        wire.leave()
        await until(lambda: intake.free == ROOM, "a client that left frees its bytes")
        async with dial(address) as other:
            await other.post(CHAT, request_body(Api.CHAT, stream=False, text="x" * 200))
            assert (await other.head()).status == 200
        await until(lambda: intake.free == ROOM, "a client that was answered frees its bytes")


async def test_other_clients_are_answered_while_a_large_body_is_read(fake, sidecar, data, monkeypatch):
    """Checked by the order of events: the large body is read on only after another client was answered."""
    answered = asyncio.Event()
    original = Aside.__call__

    async def slow(self, do, /, *args, **more):
        await answered.wait()
        return await original(self, do, *args, **more)

    monkeypatch.setattr(Aside, "__call__", slow)
    async with dial(data) as large, dial(data) as small:
        await large.post(CHAT, request_body(Api.CHAT, stream=False, text="x" * LARGE))
        await small.post(CHAT, request_body(Api.CHAT, stream=False))
        assert (await small.head()).status == 200
        answered.set()
        assert (await large.head()).status == 200


def turns(text: str) -> list[dict[str, object]]:
    """Return a conversation whose long message differs the next time, so that all of it is compared."""
    said = [{"role": "user", "content": "Count to four."}, {"role": "assistant", "content": "one"}]
    first = [*said, {"role": "user", "content": f"{text} once"}]
    edited = [*said, {"role": "user", "content": f"{text} twice"}, said[1], said[0]]
    return [{"messages": messages, "stream": True} for messages in (first, edited)]


async def test_the_event_loops_work_grows_far_less_than_a_body(fake, monkeypatch):
    """Counted in function calls, which do not depend on other programs of the machine.

    A body four times as large may take some calls for each batch of the engine, which has 512 tokens. A call
    for each of its lines, which have six, would make ten times as many.
    """
    monkeypatch.setattr(link, "CALM", PATIENCE)  # else there are more looks at the engine the longer it takes

    async def calls(sidecar: Sidecar, size: int) -> int:
        made = 0

        def count(frame: FrameType, event: str, _what: object) -> None:
            nonlocal made
            made += event == "call" and frame.f_code.co_filename.startswith(OURS)

        for body in turns("Today\n" * (size // 6)):
            async with dial(sidecar.addresses[0]) as wire:
                sys.setprofile(count)  # of this thread
                await wire.post(CHAT, body)
                assert looks_whole(Api.CHAT, await wire.body(await wire.head()))
                await until(lambda: sidecar.driver.learning == set())
                sys.setprofile(None)
                await until(lambda: "0 requests" in repr(sidecar.driver.placement))
        return made

    async with running(settings(fake.base, drain_timeout=1.0)) as sidecar:
        await ready(sidecar)
        smaller = await calls(sidecar, LARGE + 6)
        assert await calls(sidecar, 4 * LARGE) < 3 * smaller


# -- bodies that cannot fit the context: refused before anything is done for them ---------------------------

WORDS_OF_TEXT = "lorem ipsum dolor sit amet consectetur\n"
SMALL_CONTEXT = ["-np", "2", "-c", "4096", "-t", "1"]  # 2048 tokens a slot


def long_body(api: Api, size: int) -> dict[str, Any]:
    text = WORDS_OF_TEXT * (size // len(WORDS_OF_TEXT))
    if api in {Api.COMPLETION, Api.COMPLETIONS}:
        return {"prompt": text}
    name = "input" if api is Api.RESPONSES else "messages"
    return {name: [{"role": "user", "content": text}], "max_tokens": 1}


@pytest.mark.parametrize("size", [2**20, HEAVY + 2**16], ids=["large", "heavy"])
async def test_a_prompt_that_cannot_fit_the_context_gets_the_engines_error_without_being_tokenized(
    engine_factory, build, monkeypatch, size
):
    """The engine's own error is that for a shorter prompt, which only tokenizing shows to be too long."""
    engine = engine_factory("tiny-dense", build, args=SMALL_CONTEXT)

    def tokenized(*_: object) -> None:
        raise AssertionError("it was tokenized")

    async with running(settings(engine.base, drain_timeout=1.0)) as sidecar:
        await ready(sidecar)
        for api in (Api.CHAT, Api.MESSAGES, Api.RESPONSES, Api.COMPLETION, Api.COMPLETIONS):
            shown = []
            for length in (60_000, size):
                if length == size:
                    monkeypatch.setattr(Tokenizer, "tokenize", tokenized)
                async with dial(sidecar.addresses[0]) as wire:
                    await wire.post(PATHS[api], long_body(api, length))
                    head = await wire.head()
                    error = orjson.loads(await wire.body(head))["error"]
                shown.append(
                    (head.status, "exceeds the available context size (2048 tokens)" in error["message"])
                )
                assert length != size or api is Api.MESSAGES or error["type"] == "exceed_context_size_error"
                monkeypatch.undo()
            assert shown == [(400, True)] * 2
            if api is Api.MESSAGES:
                assert error["type"] == "invalid_request_error"
                assert error["message"].startswith("prompt is too long: ")
            else:
                assert 2048 < error["n_prompt_tokens"] <= size // 3
        await until(lambda: sidecar._intake.free == sidecar._intake.total, "its room was given back")


def of_images(*sizes: int) -> bytes:
    """Return a chat with images of these sizes, in characters of base64."""
    urls = ["data:image/png;base64," + "QUJD" * (size // 4) for size in sizes]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return orjson.dumps({"messages": [{"role": "user", "content": parts}]})


def test_images_of_a_heavy_body_are_not_read_by_the_parser(monkeypatch):
    """It keeps the interpreter's lock: a body of 64 MiB held `/livez` up for 1.3 s."""
    parsed: list[int] = []

    def loads(body: bytes) -> Any:
        parsed.append(len(body))
        return orjson.loads(body)

    seen = SimpleNamespace(JSONDecodeError=orjson.JSONDecodeError, loads=loads)
    monkeypatch.setattr(request, "orjson", seen)
    asked = request.parse(Api.CHAT, of_images(5 * 2**20, 6 * 2**20))
    assert [len(picture.data) for picture in asked.images] == [5 * 2**20, 6 * 2**20]
    assert sum(parsed) < 2**20


def test_a_body_with_too_long_a_string_is_read_by_the_other_process_alone():
    texts = {"messages": [{"role": "user", "content": "a word " * 2**21}]}
    bodies = [of_images(5 * 2**20, 6 * 2**20), of_images(17 * 2**20), orjson.dumps(texts)]
    found = [weigh(Api.CHAT, body) for body in bodies]
    assert [isinstance(one, Weighed) and one.readable for one in found] == [True, False, False]


def test_what_a_template_may_leave_out_is_not_counted():
    """Replies, reasoning, tools, blanks and media: the prompt may be shorter by them."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}
    said = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": " \n\thello  you\r\n"}, picture]},
        {"role": "assistant", "content": "x" * 1000, "reasoning_content": "y" * 1000},
        {"role": "tool", "content": "four"},
    ]
    tools = [{"type": "function", "function": {"name": "z" * 1000}}]
    assert size_of(Api.CHAT, {"messages": said, "tools": tools}).characters == len("bebriefhelloyoufour")
    assert size_of(Api.CHAT, {"messages": said, "chat_template": "{{ 1 }}"}).characters == 0
    assert size_of(Api.COMPLETION, {"prompt": [1, 2, "ab c"]}) == PromptSize(2, 3, 4)
    assert size_of(Api.COMPLETION, {"prompt": ["several", "prompts"]}) == PromptSize()


async def test_the_longest_token_is_the_longest_of_the_engines_vocabulary(engine_factory, build):
    engine = engine_factory("tiny-dense", build)
    vocabulary = read_vocabulary(engine.model)
    async with EngineClient(engine.base) as client:
        assert await client.longest_token() == max(len(token) for token in vocabulary.tokens)


async def test_a_heavy_body_is_read_outside_this_process_and_killed_when_its_client_leaves(
    fake, sidecar, data, monkeypatch
):
    """A heavy body that may fit is forwarded as it came."""
    body = request_body(Api.CHAT, stream=False, text=" " * (HEAVY + 1))
    monkeypatch.setattr(request, "load", lambda *_: pytest.fail("it was parsed in this process"))
    async with dial(data) as wire:
        await wire.post(CHAT, body)
        head = await wire.head()
        assert (head.status, "choices" in orjson.loads(await wire.body(head))) == (200, True)
    assert len(fake.ran) == 1
    for _ in range(TRIES):
        async with dial(data) as wire:
            ran = len(fake.ran)
            await wire.post(CHAT, body)
            # On a busy machine the other process may have ended before this one looks again.
            await until(lambda: readers() or len(fake.ran) > ran, "it is read")  # noqa: B023
            if readers():
                break
    else:
        pytest.fail("nobody was seen to read it")
    await until(lambda: not readers(), "it was killed")
    await until(lambda: sidecar._intake.free == sidecar._intake.total, "its room was given back")


def readers() -> list[psutil.Process]:
    """Return the processes that read a body for this one."""
    return [one for one in psutil.Process().children() if "slotkeeper.runtime.heavy" in words(one)]


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


async def test_a_client_that_leaves_ends_the_rendering_of_its_prompt(fake, sidecar, data, monkeypatch):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def for_ever(*_: object, **__: object) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    monkeypatch.setattr(EngineClient, "apply_template", for_ever)
    async with dial(data) as wire:
        await wire.post(CHAT, request_body(Api.CHAT, stream=True, text="x" * LARGE))
        await begun.wait()
    async with asyncio.timeout(PATIENCE):
        await ended.wait()


async def test_the_memory_for_parsing_counts_against_the_budget(fake, monkeypatch):
    """A large body takes four times its size; one that no room is left for gets 429."""
    body = orjson.dumps(request_body(Api.CHAT, stream=False, text="x" * LARGE))
    for room, status in ((4 * len(body), 200), (4 * len(body) - 1, 429)):
        small = settings(fake.base, all_bodies_bytes=room, drain_timeout=1.0)
        async with running(small) as sidecar, dial(sidecar.addresses[0]) as wire:
            await ready(sidecar)
            await wire.post(CHAT, body)
            assert (await wire.head()).status == status


async def test_the_ids_of_a_long_answer_are_read_piece_by_piece_up_to_a_limit(fake):
    async with EngineClient(fake.base) as client:
        text = "some words " * 40_000
        ids = await client.tokenize(text, add_special=False, parse_special=True)
        assert list(await client.tokenize_long(text, add_special=False, parse_special=True)) == ids
        with pytest.raises(EngineError, match="more than"):
            await client.tokenize_long(text, add_special=False, parse_special=True, most=len(ids) // 2)
