"""Two keys, one engine: what was computed for one is never reused for the other, nor visible in an answer."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

import httpx
import pytest

from compatibility import Feature
from engine import test_keys
from engine.conftest import client_of, probed
from patience import PATIENCE
from slotkeeper.bench.models import Tiny
from slotkeeper.settings import Settings

pytestmark = pytest.mark.one_in(8)

ANN: Final = {"Authorization": "Bearer ann"}
BOB: Final = {"X-Api-Key": "bob"}
SKY: Final = "The heron stood in the reeds and counted the frogs of the pond, {} by {}. "
HINTS: Final[tuple[dict[str, str], ...]] = ({}, {"X-Slotkeeper-Bypass": "1"})
RAM: Final = {"no-ram-cache": ["--cache-ram", "0"], "ram-cache": []}


def story(about: str) -> str:
    """Return a prompt that shares no beginning with other cases."""
    return "".join(SKY.format(about, n) for n in range(30))


def asks(about: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return requests with one prompt of some hundred tokens for every generating route, in several ways."""
    text = story(about)
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return {
        "chat": ("/v1/chat/completions", chat),
        "chat, cached": ("/v1/chat/completions", {**chat, "cache_prompt": True}),
        "its own slot": ("/v1/chat/completions", {**chat, "id_slot": 0}),
        "two answers": ("/v1/chat/completions", {**chat, "n": 2}),
        "completion": ("/completion", {"prompt": text, "n_predict": 2}),
        "completions": ("/v1/completions", {"prompt": text, "max_tokens": 2}),
        "responses": ("/v1/responses", {"input": text, "max_output_tokens": 2}),
        "messages": ("/v1/messages", chat),
        "brief": ("/completion", {"prompt": text[:300], "n_predict": 1}),
    }


def reused(answer: httpx.Response) -> int:
    """Return the tokens of the prompt that were not computed for it, by the answer."""
    planted = int(answer.headers["x-slotkeeper-planted"])
    return max(0, cached(answer) - planted)  # of planted tokens, some may be computed twice


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "timings" in body:
        return int(body["timings"]["cache_n"])
    usage = body["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    return int(usage["input_tokens_details"]["cached_tokens"])


def told(answer: httpx.Response) -> dict[str, str]:
    """Return all that the sidecar reports on a request, except its id."""
    ours = {k: v for k, v in answer.headers.items() if k.startswith("x-slotkeeper")}
    if name := ours.pop("x-slotkeeper-conversation", None):  # random, so it reveals nothing
        assert re.fullmatch("[0-9a-f]{16}", name)
    return ours


def before(engine: Any, **more: Any) -> Settings:
    apart = {"engine_api_key": "ann", "namespaces": "key", "slot_dir": engine.slot_dir}
    return test_keys.before(engine, **{**apart, **more})


@pytest.mark.parametrize("flags", RAM.values(), ids=RAM)
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-hybrid"])
async def test_a_prompt_that_another_key_sent_is_computed_in_full(engine_factory, build, model, flags):
    """Each time with a key that was never used before, so anything reused is another key's."""
    cases = [(name, hints) for hints in HINTS for name in asks("")]
    keys = [f"ann{n}" for n in range(len(cases))]
    engine = engine_factory(model, build, args=["--api-key", ",".join(["ann", "bob", *keys]), *flags])
    async with probed(before(engine)) as sidecar, client_of(sidecar, BOB) as bob:
        for key, (name, hints) in zip(keys, cases, strict=True):
            about = f"{name} {hints}"
            path, body = asks(about)[name]
            for _ in range(2):  # it is in both slots, and in the RAM cache
                await bob.post(path, json=body)
                await bob.post("/completion", json={"prompt": story(f"else {about}"), "n_predict": 1})
                await bob.post(path, json=body)
            async with client_of(sidecar, {"X-Api-Key": key}) as ann:
                found = reused(await ann.post(path, json=body, headers=hints))
            assert (about, found) == (about, 0)


@pytest.mark.shows(Feature.KEYS, Tiny.DENSE)
@pytest.mark.parametrize("flags", RAM.values(), ids=RAM)
async def test_a_key_reuses_its_own_prompts(engine_factory, build, flags):
    """Except a prompt so short that its tokens are not looked up, and that a RAM cache might hold."""
    engine = engine_factory("tiny-dense", build, args=["--api-key", "ann,bob", "-np", "1", *flags])
    async with (
        probed(before(engine)) as sidecar,
        client_of(sidecar, ANN) as ann,
        client_of(sidecar, BOB) as bob,
    ):
        for name in asks(""):
            if name == "two answers":  # more than there are slots
                continue
            path, body = asks(name)[name]
            other = asks(f"other {name}")["completion"]
            await ann.post(path, json=body)
            again = reused(await ann.post(path, json=body))
            await bob.post(other[0], json=other[1])
            assert (name, again > 0) == (name, name != "brief" or bool(flags))


async def test_an_answer_is_the_same_whether_or_not_another_key_sent_its_prompt(engine_factory, build):
    said = []
    for bob_was_there in (False, True):
        engine = engine_factory("tiny-hybrid", build, args=["--api-key", "ann,bob"])
        heard = []
        async with (
            probed(before(engine)) as sidecar,
            client_of(sidecar, ANN) as ann,
            client_of(sidecar, BOB) as bob,
        ):
            for name in asks(""):
                path, body = asks(name)[name]
                if bob_was_there:
                    await bob.post(path, json=body)
                    await bob.post(path, json=body)
                answer = await ann.post(path, json=body)
                heard.append((name, told(answer), cached(answer)))
        said.append(heard)
    assert said[0] == said[1]


async def test_without_slot_files_a_prompt_that_another_key_sent_is_computed_in_full(engine_factory, build):
    engine = engine_factory("tiny-dense", build, args=["--api-key", "ann,bob"])
    async with (
        probed(before(engine, slot_dir=None)) as sidecar,
        client_of(sidecar, ANN) as ann,
        client_of(sidecar, BOB) as bob,
    ):
        for name in asks(""):
            path, body = asks(name)[name]
            for _ in range(2):
                await bob.post(path, json=body)
            answer = await ann.post(path, json=body)
            if name == "messages":
                assert answer.status_code == 403, (
                    "no status that clients send again: it would be refused again"
                )
                assert "retry-after" not in answer.headers
                assert answer.json()["error"]["message"].startswith("this route cannot be kept apart")
            else:
                assert (name, reused(answer)) == (name, 0)


async def test_the_second_key_turns_namespaces_on(engine_factory, build):
    engine = engine_factory("tiny-dense", build, args=["--api-key", "ann,bob"])
    path, body = asks("auto")["chat"]
    settings = before(engine, namespaces="auto")
    async with (
        probed(settings) as sidecar,
        client_of(sidecar, ANN) as ann,
        client_of(sidecar, BOB) as bob,
    ):
        first = await ann.post(path, json=body)
        assert "x-slotkeeper-slot" in first.headers
        assert reused(await ann.post(path, json=body)) > 0
        other = await bob.post(path, json=body)
        assert reused(other) == 0
        assert "x-slotkeeper-slot" not in other.headers
        assert (await bob.post("/slots/0?action=erase", json={})).status_code == 403
    async with probed(settings) as sidecar, client_of(sidecar, BOB) as bob:
        assert "x-slotkeeper-slot" in (await bob.post(path, json=body)).headers


async def test_files_of_namespaces_turn_them_on_at_the_first_key(engine_factory, build):
    engine = engine_factory("tiny-dense", build, args=["--api-key", "ann,bob"])
    path, body = asks("files")["chat"]
    for namespaces in ("key", "auto"):
        async with probed(before(engine, namespaces=namespaces)) as sidecar, client_of(sidecar, ANN) as ann:
            assert "x-slotkeeper-slot" not in (await ann.post(path, json=body)).headers
            await sidecar.drain(delay=0.0)
        assert list(engine.slot_dir.glob("slotkeeper-*.json"))


async def test_with_namespaces_off_all_keys_share_one_cache(engine_factory, build):
    engine = engine_factory("tiny-dense", build, args=["--api-key", "ann,bob"])
    path, body = asks("off")["chat"]
    async with (
        probed(before(engine, namespaces="off")) as sidecar,
        client_of(sidecar, ANN) as ann,
        client_of(sidecar, BOB) as bob,
    ):
        await bob.post(path, json=body)
        assert reused(await ann.post(path, json=body)) > 0


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-hybrid"])
async def test_a_file_is_restored_only_for_the_key_whose_prompt_it_holds(engine_factory, build, model):
    """Also files of shared beginnings, and also for another sidecar and another engine."""
    system = {"role": "system", "content": story("the system prompt")}
    talks = [
        {"messages": [system, {"role": "user", "content": f"{n}: {story(f'talk {n}')}"}], "max_tokens": 2}
        for n in range(3)
    ]
    first = engine_factory(model, build, args=["--api-key", "ann,bob"])
    async with probed(before(first)) as sidecar, client_of(sidecar, ANN) as ann:
        for talk in talks[:2]:
            await ann.post("/v1/chat/completions", json=talk)
        await sidecar.drain(delay=0.0)
    assert list(first.slot_dir.glob("slotkeeper-*"))
    again = engine_factory(
        model, build, args=["--api-key", "ann,bob", "--slot-save-path", str(first.slot_dir)]
    )
    async with (
        probed(before(again, slot_dir=first.slot_dir)) as sidecar,
        client_of(sidecar, ANN) as ann,
        client_of(sidecar, BOB) as bob,
    ):
        for talk in talks:
            answer = await bob.post("/v1/chat/completions", json=talk)
            if talk is talks[0]:  # the others begin as its own first one does
                assert (reused(answer), answer.headers["x-slotkeeper-decision"]) == (0, "cold")
        assert reused(await ann.post("/v1/chat/completions", json=talks[0])) > 500


CHAT_ID: Final = {"X-Conversation-Id": "chat"}
ENDLESS: Final = {"prompt": "A story.", "n_predict": 60_000, "ignore_eos": True, "stream": True}


async def left(client_: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Start a resumable stream and leave it after its first event."""
    async with client_.stream("POST", "/completion", json=body, headers=CHAT_ID) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_bytes():
            return


async def looked_up(client_: httpx.AsyncClient) -> list[tuple[str, bool]]:
    answer = await client_.post("/v1/streams/lookup", json={"conversation_ids": ["chat"]})
    assert answer.status_code == 200, answer.text
    return [(row["conversation_id"], row["is_done"]) for row in answer.json()]


async def test_a_resumable_stream_is_read_and_stopped_only_by_its_own_namespace(engine_factory, build):
    engine = engine_factory("tiny-dense", build, args=["--api-key", "ann,bob", "--cache-ram", "0"])
    async with (
        probed(before(engine)) as sidecar,
        client_of(sidecar, ANN) as ann,
        client_of(sidecar, BOB) as bob,
    ):
        await left(ann, ENDLESS)
        assert await looked_up(ann) == [("chat", False)]
        assert await looked_up(bob) == []
        assert (await bob.get("/v1/stream?conv_id=chat")).status_code == 404
        assert (await bob.delete("/v1/stream?conv_id=chat")).status_code == 204
        short = await bob.post("/completion", json={"prompt": "A.", "n_predict": 2}, headers=CHAT_ID)
        assert short.status_code == 200
        assert await looked_up(ann) == [("chat", False)]
        async with ann.stream("GET", "/v1/stream?conv_id=chat&from=0") as again:
            assert again.status_code == 200
            async for piece in again.aiter_bytes():
                assert piece.startswith(b"data: ")
                break
        assert (await ann.delete("/v1/stream?conv_id=chat")).status_code == 204
        assert await looked_up(ann) == []


async def test_with_namespaces_off_a_stream_has_the_id_that_its_client_gave(engine_factory, build):
    engine = engine_factory("tiny-dense", build, args=["--api-key", "ann,bob"])
    async with (
        probed(before(engine, namespaces="off")) as sidecar,
        client_of(sidecar, ANN) as ann,
        httpx.AsyncClient(base_url=engine.base, headers=BOB, timeout=PATIENCE) as direct,
    ):
        await left(ann, ENDLESS)
        assert await looked_up(direct) == [("chat", False)]
        assert (await ann.delete("/v1/stream?conv_id=chat")).status_code == 204
        assert await looked_up(direct) == []


async def test_a_resumed_stream_that_is_stopped_does_not_look_whole(engine_factory, build):
    engine = engine_factory("tiny-dense", build, args=["--api-key", "ann,bob", "--cache-ram", "0"])
    async with probed(before(engine)) as sidecar, client_of(sidecar, ANN) as ann:
        await left(ann, ENDLESS)
        async with ann.stream("GET", "/v1/stream?conv_id=chat&from=0") as again:
            pieces = again.aiter_bytes()
            await anext(pieces)
            assert (await ann.delete("/v1/stream?conv_id=chat")).status_code == 204
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                async for _ in pieces:
                    pass
        await left(ann, {**ENDLESS, "n_predict": 20})
        async with asyncio.timeout(PATIENCE):
            while await looked_up(ann) != [("chat", True)]:
                await asyncio.sleep(0.02)
        assert b'"stop":true' in (await ann.get("/v1/stream?conv_id=chat&from=0")).content


SHARED: Final = (
    *(
        ("GET", path)
        for path in ("/slots", "/sl%6fts", "/%u0073lots", "/slots%09", "/tools", "/cors-proxy?url=x")
    ),
    *(("POST", path) for path in ("/props", "/lora-adapters", "/tools", "/v1/chat/completions/control")),
)


@pytest.mark.parametrize("namespaces", ["key", "off"])
async def test_routes_by_which_a_key_sees_or_changes_the_work_of_others_are_closed(
    engine_factory, build, namespaces
):
    """Also under each way of writing the path that the engine reads alike."""
    engine = engine_factory("tiny-dense", build, args=["--api-key", "ann,bob"])
    async with probed(before(engine, namespaces=namespaces)) as sidecar, client_of(sidecar, BOB) as bob:
        seen = {}
        for method, path in SHARED:
            answer = await bob.request(method, path, json=[] if "lora" in path else {"id": "x"})
            seen[path] = answer.status_code == 403 and "--namespaces" in answer.text
        for path in ("/props", "/v1/models", "/metrics"):
            assert (await bob.get(path)).status_code == 200, path
    assert set(seen.values()) == {namespaces == "key"}, seen


# All that a request can say of a slot, a stream, a state or another server, besides what `asks` sends.
SAID: Final[dict[str, tuple[dict[str, str], dict[str, Any]]]] = {
    "a stream": ({"X-Conversation-Id": "chat"}, {}),
    "where a stream goes on": ({"Last-Event-ID": "1"}, {}),
    "tools": ({"X-Tool-Cwd": "/", "X-Tool-Runtime": "docker", "X-Resp-Type": "base64"}, {}),
    "a header for another server": ({"X-Llama-Server-Proxy-Header-Authorization": "x"}, {}),
    "a slot": ({}, {"id_slot": 0}),
    "no slot": ({}, {"id_slot": -1}),
    "reuse": ({}, {"cache_prompt": True, "n_cache_reuse": 1, "n_keep": -1}),
    "a control": ({}, {"reasoning_control": True}),
    "stored answers": ({}, {"store": True, "conversation": "chat", "session_id": "chat", "user": "ann"}),
    "samplers in the engine's backend": ({}, {"backend_sampling": True}),
    "adapters": ({}, {"lora": []}),
}


@pytest.mark.parametrize("said", SAID)
async def test_nothing_that_a_request_says_gives_it_a_state_or_ends_a_stream_of_another_key(
    engine_factory, build, said
):
    engine = engine_factory("tiny-dense", build, args=["--api-key", "ann,bob", "--cache-ram", "0"])
    headers, fields = SAID[said]
    ask = {"prompt": story("said"), "n_predict": 2, **fields}
    async with (
        probed(before(engine)) as sidecar,
        client_of(sidecar, ANN) as ann,
        client_of(sidecar, BOB) as bob,
    ):
        assert (await ann.post("/completion", json=ask, headers=headers)).status_code == 200
        async with ann.stream(
            "POST", "/completion", json={**ENDLESS, "n_predict": 4000}, headers=CHAT_ID
        ) as long:
            pieces = long.aiter_bytes()
            heard = await anext(pieces)
            assert cached(await bob.post("/completion", json=ask, headers=headers)) == 0
            heard += b"".join([piece async for piece in pieces])
    assert b'"tokens_predicted":4000' in heard
