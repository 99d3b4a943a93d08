"""The sidecar's own keys in front of a real engine: which clients are served, and their limits."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from structlog.testing import capture_logs

from builds import needs_b10434
from chaos.raw import dial, until, until_async
from engine.conftest import client_of
from engine.test_keys import ASKS, STRANGERS, before, sidecar_headers, tokens_and_slots
from patience import PATIENCE
from slotkeeper.api.head import DECISION
from slotkeeper.app import Sidecar, running, serve
from slotkeeper.bench import lab
from slotkeeper.bench.lab import ready
from slotkeeper.engine.child.launch import EngineKind, free_port
from slotkeeper.scheduler.types import Crowded, Reason

ALICE: Final = {"Authorization": "Bearer a-long-key-of-alice"}
ROOT: Final = {"X-Api-Key": "a-long-key-of-root"}
ENGINES: Final = {"Authorization": "Bearer sesame"}
ASK: Final = {"prompt": "The heron stood in the reeds.", "n_predict": 4}
LONG: Final = {**ASK, "n_predict": 30_000, "stream": True, "ignore_eos": True}
FILE: Final = """
[alice]
key = "a-long-key-of-alice"
{limits}
[root]
key = "a-long-key-of-root"
operator = true
"""


def written(folder: Path, limits: str = "", text: str = FILE) -> Path:
    path = folder / "keys.toml"
    path.write_text(text.format(limits=limits))
    path.chmod(0o600)
    return path


@asynccontextmanager
async def in_front(engine: Any, folder: Path, limits: str = "", **more: Any) -> AsyncIterator[Sidecar]:
    """Run a sidecar without namespaces, which have their own tests: on /v1/messages they need slot files."""
    alone = {"namespaces": "off"} | more
    async with running(before(engine, keys_file=written(folder, limits), **alone)) as sidecar:
        await ready(sidecar)
        yield sidecar


def refusals(sidecar: Sidecar, reason: Crowded) -> float | None:
    return sidecar.metrics.registry.get_sample_value(
        "slotkeeper_crowded_requests_total", {"reason": reason.value}
    )


def idle(sidecar: Sidecar) -> bool:
    """Whether no request of alice runs, and the engine works for none whose client has left."""
    used = sidecar._keys._used["alice"] if sidecar._keys else None
    return used is not None and used.running == used.leaving == 0


async def at_rest(engine: Any) -> bool:
    return await busy(engine) == 0


async def test_a_listed_key_is_served_and_routes_that_affect_all_clients_need_an_operators(
    engine_factory, build, tmp_path
):
    engine = engine_factory("tiny-dense", build, args=["--api-key", "sesame"])
    async with in_front(engine, tmp_path) as sidecar:
        seen = {}
        for name, key in {"alice": ALICE, "root": ROOT}.items():
            async with client_of(sidecar, key) as client:
                for path in ("/v1/chat/completions", "/completion", "/v1/responses", "/v1/messages"):
                    answer = await client.post(path, json=ASKS[path])
                    assert answer.status_code == 200, answer.text
                    assert answer.headers[DECISION] not in {Reason.BYPASS, Reason.FAIL_OPEN}
                assert (await client.post("/tokenize", json={"content": "a"})).status_code == 200
                assert (await client.get("/props")).status_code == 200
                gets = [await client.get(path) for path in ("/slots", "/metrics", "/", "/lora-adapters")]
                acts = await client.post("/slots/0?action=erase")
                seen[name] = [answer.status_code for answer in (*gets, acts)]
        assert seen == {"alice": [403] * 5, "root": [200] * 5}


async def test_the_engines_key_and_unknown_keys_cost_no_tokens_and_get_no_information(
    engine_factory, build, tmp_path
):
    engine = engine_factory("tiny-dense", build, args=["--api-key", "sesame"])
    async with in_front(engine, tmp_path) as sidecar:
        async with client_of(sidecar, ALICE) as client:
            assert (await client.post("/completion", json=ASKS["/completion"])).status_code == 200
        was = await tokens_and_slots(engine)
        async with client_of(sidecar) as client:
            answers = [
                await client.post(path, json=ask, headers=key)
                for path, ask in ASKS.items()
                for key in (*STRANGERS, ENGINES)
            ]
            answers += [
                await client.get(path, headers=key)
                for path in ("/slots", "/props", "/metrics", "/v1/models", "/", "/index.html")
                for key in (*STRANGERS, ENGINES)
            ]
            assert (await client.get("/health")).status_code == 200
        assert {answer.status_code for answer in answers} == {401}
        assert {tuple(sidecar_headers(answer)) for answer in answers} == {()}
        assert await tokens_and_slots(engine) == was


async def test_a_wrong_engine_key_gives_502_and_names_the_setting(engine_factory, build, tmp_path):
    engine = engine_factory("tiny-dense", build, args=["--api-key", "other"])
    async with running(before(engine, keys_file=written(tmp_path))) as sidecar:
        async with client_of(sidecar, ALICE) as client:
            answer = await client.post("/completion", json=ASK)
        assert answer.status_code == 502
        assert "--engine-api-key" in answer.json()["error"]["message"]


async def test_a_key_over_its_tokens_per_minute_gets_429(engine, tmp_path):
    path = "/completion"
    async with in_front(engine, tmp_path, "tokens_per_minute = 60") as sidecar:
        async with client_of(sidecar, ALICE) as client, client_of(sidecar, ROOT) as other:
            first = await client.post(path, json=ASKS[path])  # costs far more; the client owes the rest
            assert first.status_code == 200
            again = await client.post(path, json=ASKS[path])
            assert again.status_code == 429
            assert int(again.headers["Retry-After"]) > 60
            assert sidecar_headers(again) == []
            assert (await other.post(path, json=ASKS[path])).status_code == 200
        assert refusals(sidecar, Crowded.KEY_TOKENS) == 1


async def test_a_key_over_its_number_of_queued_requests_gets_429(engine, tmp_path):
    async with in_front(engine, tmp_path, "queued = 1") as sidecar:
        placement = sidecar.driver.placement
        async with client_of(sidecar, ROOT) as other, client_of(sidecar, ALICE) as client:
            async with (
                other.stream("POST", "/completion", json=LONG),
                other.stream("POST", "/completion", json={**LONG, "prompt": "Another."}),
            ):
                waits = asyncio.ensure_future(client.post("/completion", json=ASK))  # noqa: TID251
                await until(lambda: placement.queued == 1, "one waits")
                second = await client.post("/completion", json=ASK)
                assert second.status_code == 429
                assert refusals(sidecar, Crowded.KEY_QUEUED) == 1
            assert (await waits).status_code == 200


async def busy(engine: Any) -> int:
    """Return how many slots the engine works in, by its own listing."""
    async with httpx.AsyncClient(base_url=engine.base, timeout=PATIENCE) as stock:
        return sum(slot["is_processing"] for slot in (await stock.get("/slots", headers=ENGINES)).json())


async def generated(engine: Any) -> list[int]:
    """Return the tokens that each slot's task has generated."""
    async with httpx.AsyncClient(base_url=engine.base, timeout=PATIENCE) as stock:
        slots = (await stock.get("/slots", headers=ENGINES)).json()
        return [slot["next_token"][0]["n_decoded"] if slot.get("next_token") else 0 for slot in slots]


async def first_event(client: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> int:
    """Start a stream, read of it until its first event and leave. Returns the status."""
    async with client.stream("POST", "/completion", json=body, headers=headers) as answer:
        async for _ in answer.aiter_bytes():
            break
        return answer.status_code


async def test_a_key_cannot_keep_more_slots_than_its_requests_by_leaving_resumable_streams(
    engine_factory, build, tmp_path
):
    """Each stream with a fresh X-Conversation-Id, which the engine would continue without its client."""
    engine = engine_factory("tiny-dense", build, args=["-np", "3"])
    async with in_front(engine, tmp_path, "concurrent = 1") as sidecar, client_of(sidecar, ALICE) as client:
        for n in range(4):
            ask = {**LONG, "prompt": f"Story {n}."}
            status = await first_event(client, ask, **{"X-Conversation-Id": f"chat-{n}"})
            assert status in {200, 429}
            assert await busy(engine) <= 1
        await until_async(lambda: at_rest(engine), "the engine works for no client that left")
        # The sidecar sees it at its next look at the slots.
        await until(lambda: idle(sidecar), "the sidecar has seen it")


async def test_a_request_counts_until_the_engine_has_released_its_slot(engine, tmp_path, monkeypatch):
    """The engine notices late that its client has left."""
    monkeypatch.setattr("slotkeeper.exchange.keys.RELEASE_SECONDS", 0.0)
    async with in_front(engine, tmp_path, "concurrent = 1") as sidecar, client_of(sidecar, ALICE) as client:
        placement, keys = sidecar.driver.placement, sidecar._keys
        assert keys is not None
        ask = {**LONG, "stream": False}
        gone = asyncio.ensure_future(client.post("/completion", json=ask))  # noqa: TID251
        await until_async(lambda: busy(engine), "it runs")
        os.kill(engine.process.pid, signal.SIGSTOP)  # so that it releases nothing meanwhile
        try:
            gone.cancel()
            await until(lambda: keys._used["alice"].leaving == 1, "its client has left")
            assert (await client.post("/completion", json=ASK)).status_code == 429
        finally:
            os.kill(engine.process.pid, signal.SIGCONT)
        await until(lambda: keys._used["alice"].leaving == 0, "the engine has released its slot")
        assert "draining" not in repr(list(placement.tables.values()))
        assert (await client.post("/completion", json=ASK)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_the_tokens_of_an_answer_count_although_its_client_left(engine, tmp_path, stream):
    limits = "tokens_per_minute = 60"
    async with in_front(engine, tmp_path, limits) as sidecar, client_of(sidecar, ALICE) as client:
        gone = asyncio.ensure_future(client.post("/completion", json=LONG | {"stream": stream}))  # noqa: TID251

        async def many() -> bool:
            return max(await generated(engine)) >= 100

        await until_async(many, "a hundred tokens were generated")
        gone.cancel()
        await until(lambda: idle(sidecar), "the engine has released its slot")
        assert (await client.post("/completion", json=ASK)).status_code == 429


async def test_a_stream_cannot_be_cut_by_another_key_with_the_same_conversation_id(
    engine_factory, build, tmp_path
):
    """On any route: the engine ends a stream as soon as a request with its id arrives."""
    engine = engine_factory("tiny-dense", build)
    mine = {"X-Conversation-Id": "chat"}
    async with in_front(engine, tmp_path) as sidecar:
        async with client_of(sidecar, ALICE) as client, client_of(sidecar, ROOT) as other:
            for many in (4000, 16_000, 64_000):  # on a busy machine a short one may end too early
                ask_many = {**LONG, "n_predict": many}
                async with client.stream("POST", "/completion", json=ask_many, headers=mine) as answer:
                    pieces = answer.aiter_bytes()
                    heard = await anext(pieces)
                    for path, ask in (("/completion", ASK), ("/tokenize", {"content": "a"})):
                        assert (await other.post(path, json=ask, headers=mine)).status_code == 200
                    assert (await other.delete("/v1/stream?conv_id=chat")).status_code in {204, 404}
                    still = await busy(engine)
                    heard += b"".join([piece async for piece in pieces])
                assert b'"stop":true' in heard
                assert b'"tokens_predicted":%d' % many in heard
                if still:
                    break
    assert still, "the stream ran still"


COSTLY: Final[dict[str, dict[str, Any]]] = {
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
    "/embedding": {"content": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}


@pytest.mark.parametrize("limit", ["concurrent = 1", "tokens_per_minute = 1"])
async def test_the_limits_of_a_key_hold_on_every_route_that_costs_work(engine, tmp_path, limit):
    """Before the body is read: it may be large."""
    async with in_front(engine, tmp_path, limit) as sidecar, client_of(sidecar, ALICE) as client:
        if limit == "tokens_per_minute = 1":
            assert (await client.post("/completion", json=ASK)).status_code == 200
        async with client.stream("POST", "/completion", json=LONG):
            for path, ask in COSTLY.items():
                answer = await client.post(path, json=ask)
                assert answer.status_code == 429, path
                assert int(answer.headers["Retry-After"]) > 0, path
                assert answer.json()["error"]["type"] == "rate_limit_error", path
                shape = {"type", "message"} if path.startswith("/v1/messages") else {"code", "param"}
                assert shape <= set(answer.json()["error"]), path
            for path in ("/v1/models", "/props", "/health"):
                assert (await client.get(path)).status_code == 200, path
        async with dial(sidecar.addresses[0]) as wire:
            head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
            if limit != "concurrent = 1":
                await wire.send(f"{head}Authorization: {ALICE['Authorization']}\r\n\r\n".encode())
                assert (await wire.head()).status == 429


@pytest.mark.parametrize("most", ["high", "normal", "low"])
async def test_a_request_is_served_with_no_more_priority_than_its_key_allows(engine, tmp_path, most):
    """By header and by body; the other key is not limited. An answer tells no priority that is normal."""
    hint = {"nvext": {"agent_hints": {"priority": 1}}}
    async with in_front(engine, tmp_path, f'priority = "{most}"') as sidecar:
        async with client_of(sidecar, ALICE) as client, client_of(sidecar, ROOT) as other:
            for headers, body in (({"X-Slotkeeper-Priority": "high"}, ASK), ({}, {**ASK, **hint})):
                found = [
                    await each.post("/completion", json=body, headers=headers) for each in (client, other)
                ]
                shown = [answer.headers.get("X-Slotkeeper-Priority", "normal") for answer in found]
                assert shown == [most, "high"]


async def test_the_keys_file_is_read_again_at_sighup(engine, tmp_path):
    path, data = written(tmp_path), f"127.0.0.1:{free_port()}"
    settings = before(engine, keys_file=path).model_copy(update={"listen": data, "drain_delay": 0.0})
    up = asyncio.Event()
    work = asyncio.ensure_future(serve(settings, listening=lambda *_: up.set()))  # noqa: TID251
    try:
        await up.wait()
        async with httpx.AsyncClient(base_url=f"http://{data}", timeout=PATIENCE) as client:

            async def status(headers: dict[str, str]) -> int:
                return (await client.get("/v1/models", headers=headers)).status_code

            assert [await status(ALICE), await status(ROOT)] == [200, 200]
            path.write_text('[root]\nkey = "a-long-key-of-root"\n')
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(PATIENCE):
                while await status(ALICE) != 401:
                    await asyncio.sleep(0.02)
            assert await status(ROOT) == 200
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        await work


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ({}, True),
        ({"namespaces": "key", "keys_file": None}, True),
        ({"namespaces": "off"}, False),
        ({"slot_dir": "slots"}, False),
    ],
)
async def test_a_warning_is_logged_for_namespaces_without_a_slot_folder(
    tmp_path: Path, more: dict[str, Any], warned: bool
):
    if "slot_dir" in more:
        more = {"slot_dir": tmp_path / "slots"}
    settings = lab.settings_of(
        upstream=("http://127.0.0.1:1",),
        listen="127.0.0.1:0",
        admin_listen="127.0.0.1:0",
        drain_timeout=1.0,
        **{"keys_file": written(tmp_path), **more},
    )
    with capture_logs() as log:
        async with running(settings):
            pass
    assert ("namespaces_without_files" in {line["event"] for line in log}) == warned


def owed(sidecar: Sidecar) -> float:
    """Return the tokens that alice's requests have cost so far."""
    return sidecar._keys._used["alice"].owed if sidecar._keys else 0.0


WORDS: Final = [f"{word} heron stood in the reeds" for word in ("One", "Another", "No")]
SEVERAL: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "embeddings": ("/v1/embeddings", {"input": WORDS}),
    "native embeddings": ("/embedding", {"content": WORDS}),
    "native embeddings, named input": ("/embeddings", {"input": WORDS[0]}),
    "a ranking": ("/v1/rerank", {"query": "a bird", "documents": WORDS}),
    "a ranking without usage": ("/reranking", {"query": "a bird", "texts": WORDS}),
    "several prompts": ("/completion", {"prompt": WORDS, "n_predict": 3}),
    "several prompts, OpenAI's": ("/v1/completions", {"prompt": WORDS, "max_tokens": 3}),
    "several answers": ("/completion", {"prompt": WORDS[0], "n": 2, "n_predict": 3}),
    "several answers of a chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": WORDS[0]}], "n": 2, "max_tokens": 3},
    ),
}


async def work_of(engine: Any) -> int:
    """Return how many tokens an engine has computed and generated since its start."""
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        lines = (await client.get(f"{engine.base}/metrics")).text.splitlines()
    counts = ("llamacpp:prompt_tokens_total ", "llamacpp:tokens_predicted_total ")
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(counts))


async def cost(engine: Any, path: str, ask: dict[str, Any]) -> int:
    """Return what a request costs the engine, without a sidecar.

    Its counters leave out embeddings and rankings, so that is what it says for them in OpenAI's answer.
    """
    async with httpx.AsyncClient(base_url=engine.base, timeout=PATIENCE) as client:
        if "embed" in path:
            said = await client.post("/v1/embeddings", json={"input": ask.get("input", ask.get("content"))})
        elif "rank" in path:
            rows = ask.get("documents", ask.get("texts"))
            said = await client.post("/v1/rerank", json={"query": ask["query"], "documents": rows})
        else:
            was = await work_of(engine)
            await client.post(path, json=ask)
            return await work_of(engine) - was
    return int(said.json()["usage"]["prompt_tokens"])


async def check_charge(engine: Any, folder: Path, path: str, ask: dict[str, Any]) -> None:
    async with in_front(engine, folder, "tokens_per_minute = 600", probe=False) as sidecar:
        async with client_of(sidecar, ALICE) as client:
            assert (await client.post(path, json=ask)).status_code == 200
        await until(lambda: idle(sidecar), "it has ended")
        charged = owed(sidecar)
        assert charged == await cost(engine, path, ask) > 4


@pytest.mark.parametrize("case", [case for case in SEVERAL if case.startswith("several")])
async def test_every_prompt_and_answer_of_a_request_is_charged(engine_factory, build, tmp_path, case):
    """The engine's figures in its answer are those of one prompt and one answer."""
    path, ask = SEVERAL[case]
    ask = {**ask, "ignore_eos": True, "cache_prompt": False}
    await check_charge(engine_factory("tiny-dense", build), tmp_path, path, ask)


@needs_b10434  # the other build has no --pooling and no --rerank
@pytest.mark.parametrize("case", [case for case in SEVERAL if not case.startswith("several")])
async def test_embeddings_and_rankings_are_charged_although_their_answer_has_no_figures(
    engine_factory, tmp_path, case
):
    path, ask = SEVERAL[case]
    flags = ["--rerank"] if "rank" in path else ["--embeddings", "--pooling", "mean"]
    engine = engine_factory("tiny-dense", EngineKind.SKULK, args=flags)
    await check_charge(engine, tmp_path, path, ask)


async def begun(engine: Any, sidecar: Sidecar) -> bool:
    return idle(sidecar) or await busy(engine) > 0


async def test_embeddings_are_charged_although_their_client_leaves(engine_factory, build, tmp_path):
    engine = engine_factory("tiny-dense", build, args=["--embeddings"])
    ask = {"content": [f"{number} " + WORDS[0] * 4 for number in range(50)]}
    async with in_front(engine, tmp_path, "tokens_per_minute = 60") as sidecar:
        async with dial(sidecar.addresses[0]) as wire:
            await wire.post("/embedding", ask, ALICE)
            await until(lambda: sidecar._keys and sidecar._keys._used, "it is with the sidecar")
            await until_async(lambda: begun(engine, sidecar), "the engine computes it, or has done so")
        await until(lambda: idle(sidecar) and owed(sidecar), "it has ended")
        assert owed(sidecar) >= 50 * 4 * 5 - 60  # it can use some of the next minute meanwhile
