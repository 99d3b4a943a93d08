"""llama-swap behind the sidecar: state survives its swaps, and no request is lost in one.

Each case runs in front of `SwapLike`, which starts and stops real engines and answers as llama-swap's source
says, and in front of the program itself if `llama-swap` is on PATH (never in CI).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path
from typing import Final

import httpx
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from benchmarks.routers import ALIAS, MODELS, PROGRAM, Talk, fresh_client, talks
from rich.console import Console

from chaos.raw import until
from compatibility import Feature
from engine.swappers import (
    MORE,
    ROUNDS,
    STAND_IN,
    TOGETHER,
    computed,
    gateway,
    keeping,
    resident,
    saved_turn,
    turn_that_reuses,
    wanted,
)
from patience import PATIENCE
from slotkeeper.bench import lab
from slotkeeper.cli.doctor import doctor
from slotkeeper.runtime import router_link
from swap_like import Swapped

pytestmark = pytest.mark.one_in(8)

IDLE_SECONDS: Final = 2.0  # in which a sidecar that looks each second would have loaded a model
TTL: Final = 3  # seconds
REST_SECONDS: Final = 4.0
LOOKS: Final = frozenset({"/health", "/running", "/v1/models"})
LOOKS_IN_SWAP: Final = 20  # 8 to 11 on a quiet machine; each of four changes of a state is worth two


@pytest.fixture(params=[STAND_IN, PROGRAM])
def kind(request: pytest.FixtureRequest) -> str:
    return wanted(request.param)


@pytest.mark.shows(Feature.SWAPPED, *MODELS.values())
async def test_swaps_compute_no_more_tokens_than_models_that_stay_loaded(
    kind: str, build: str, tmp_path: Path
) -> None:
    """One model is loaded at a time, with two agents on each; every turn is a swap."""
    (tmp_path / "stay").mkdir()
    oracle = await resident(kind, build, tmp_path / "stay", ROUNDS)
    found = talks()
    async with gateway(kind, build, tmp_path) as there, keeping(there) as (sidecar, client):
        for _ in range(ROUNDS):
            for talk in found:
                await talk.turn(client)
        assert computed(found, sidecar) <= MORE * oracle
        if there.stand_in:
            loaded = [model for model, _ in there.stand_in.loads]
            assert loaded == [*MODELS] * (2 * ROUNDS)
            assert {path for _, path in there.stand_in.loads} == {
                f"/upstream/{model}/health" for model in MODELS
            }


async def test_clients_of_two_models_all_get_answers(kind: str, build: str, tmp_path: Path) -> None:
    async with gateway(kind, build, tmp_path) as there, keeping(there, swap_wait=0.5) as (_, client):

        async def chats(talk: Talk) -> None:
            for _ in range(4):
                await talk.turn(client)

        await asyncio.gather(*(chats(talk) for talk in talks()))


async def test_a_request_for_another_model_does_not_break_a_running_stream(
    kind: str, build: str, tmp_path: Path
) -> None:
    async with gateway(kind, build, tmp_path) as there, keeping(there, swap_wait=0) as (_, client):
        body = {"model": "coder", "messages": [{"role": "user", "content": "count"}], "max_tokens": 400}
        whole = {**body, "stream": True, "ignore_eos": True, "temperature": 0}
        async with client.stream("POST", "/v1/chat/completions", json=whole) as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            rest, _ = await asyncio.gather(_whole(lines), Talk("writer", "w").turn(client))
        assert rest[-1] == "data: [DONE]"
        assert orjson.loads(rest[-2][6:])["timings"]["predicted_n"] == body["max_tokens"]
        await there.comes_to("writer")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/unload"), ("POST", "/api/models/unload"), ("POST", "/api/models/unload/gpt-x")],
)
async def test_an_unload_by_a_client_breaks_no_answer_and_loses_no_state(
    kind: str, build: str, tmp_path: Path, method: str, path: str
) -> None:
    """llama-swap itself ends running answers as if they were whole. Saves in pauses are off here."""
    async with gateway(kind, build, tmp_path) as there, keeping(there, save_pause=600) as (_, client):
        talk = Talk("coder", "a")
        await talk.turn(client)
        body = {"model": "coder", "messages": [{"role": "user", "content": "count"}], "max_tokens": 400}
        whole = {**body, "stream": True, "ignore_eos": True, "temperature": 0}
        async with client.stream("POST", "/v1/chat/completions", json=whole) as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            rest, answer = await asyncio.gather(_whole(lines), client.request(method, path))
        assert rest[-1] == "data: [DONE]"
        assert orjson.loads(rest[-2][6:])["timings"]["predicted_n"] == body["max_tokens"]
        assert answer.status_code == 200
        await there.comes_to()
        answer = await turn_that_reuses(talk, client)
        assert answer.headers["X-Slotkeeper-Decision"] == "snapshot"


async def _whole(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines if line]


async def test_nothing_of_the_sidecar_loads_an_unloaded_model(kind: str, build: str, tmp_path: Path) -> None:
    async with gateway(kind, build, tmp_path) as there, keeping(there) as (sidecar, client):
        await asyncio.sleep(IDLE_SECONDS)
        assert await there.running() == {}
        talk = Talk("coder", "a")
        await talk.turn(client)
        await lab.rested(sidecar)
        async with fresh_client(there.base) as elsewhere:
            await elsewhere.post("/api/models/unload/coder")
        await there.comes_to()
        assert [entry["id"] for entry in (await client.get("/v1/models")).json()["data"]] == [*MODELS]
        out = StringIO()
        await doctor(there.base, None, Console(file=out, width=200))
        assert "It is unloaded" in out.getvalue()
        await asyncio.sleep(IDLE_SECONDS)
        assert await there.running() == {}
        await turn_that_reuses(talk, client)


async def test_at_rest_and_in_a_swap_it_is_asked_little(kind: str, build: str, tmp_path: Path) -> None:
    """It logs every request. Its events say when a state has changed, so only then its states are read."""
    async with gateway(kind, build, tmp_path) as there, keeping(there) as (sidecar, client):

        def looks() -> int:
            return sum(path in LOOKS for path in there.asked())

        await Talk("coder", "a").turn(client)
        await lab.rested(sidecar)
        (router,) = sidecar.driver.engines.routers.values()
        await until(lambda: not (router._swaps or router._since), "the load is over for its watch too")
        before, began = looks(), time.monotonic()
        await asyncio.sleep(REST_SECONDS)
        at_rest = looks() - before
        assert at_rest <= 1 + (time.monotonic() - began) / router_link.QUIET
        before, began = looks(), time.monotonic()
        await Talk("writer", "a").turn(client)
        assert looks() - before <= LOOKS_IN_SWAP + (time.monotonic() - began) / router_link.CALM


async def test_a_restart_during_a_load_is_waited_for(kind: str, build: str, tmp_path: Path) -> None:
    """Also with requests for the model that was being loaded: it is not the model's fault."""
    async with gateway(kind, build, tmp_path) as there, keeping(there) as (_, client):
        if there.program is None:
            pytest.skip("the stand-in cannot be restarted; tests/unit/runtime/test_router_link.py does that")
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            turn = group.create_task(Talk("writer", "a").turn(client))
            while (await there.running()).get("writer") != "starting":
                await asyncio.sleep(0.01)
            await there.program.stop()
            await there.program.start()
        assert turn.result().headers["X-Slotkeeper-Decision"] != "fail_open"


async def test_an_idle_model_is_unloaded_by_its_ttl_and_its_state_is_reused(
    kind: str, build: str, tmp_path: Path
) -> None:
    async with gateway(kind, build, tmp_path, ttl=TTL) as there, keeping(there) as (sidecar, client):

        async def loaded() -> bool:
            return bool(await there.running())

        talk = await saved_turn(client, sidecar, loaded, there.comes_to)
        await turn_that_reuses(talk, client)


async def test_models_that_a_group_keeps_loaded_stay_loaded(kind: str, build: str, tmp_path: Path) -> None:
    async with gateway(kind, build, tmp_path, group=TOGETHER) as there, keeping(there) as (sidecar, client):
        found = talks()
        for _ in range(2):
            for talk in found:
                await talk.turn(client)
                await lab.rested(sidecar)
        await there.comes_to(*MODELS)
        if there.stand_in:
            assert there.stand_in.stops == []
            assert len(there.stand_in.loads) == len(MODELS)


async def test_each_name_of_a_model_leads_to_it_and_other_names_to_the_gateways_own_answer(
    kind: str, build: str, tmp_path: Path
) -> None:
    """An unknown name, an alias, a model that cannot be loaded, and a route that llama-swap has not."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    async with (
        gateway(kind, build, tmp_path, broken=broken) as there,
        keeping(there) as (_, client),
        fresh_client(there.base) as direct,
    ):

        async def asked(at: httpx.AsyncClient, model: str) -> httpx.Response:
            body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
            return await at.post("/v1/chat/completions", json=body)

        ours, theirs = [await asked(at, "zzz") for at in (client, direct)]
        assert (ours.status_code, ours.text) == (theirs.status_code, theirs.text)
        assert await there.running() == {}
        talk = Talk("coder", "a")
        await talk.turn(client)
        talk.model = ALIAS
        assert "X-Slotkeeper-Slot" in (await turn_that_reuses(talk, client)).headers
        for path in ("/models?reload=1", "/v1/models?reload=1"):  # not of llama-server's router
            lists = [(await at.get(path)).json()["data"] for at in (client, direct)]
            assert [[one["id"] for one in listed] for listed in lists] == [["broken", *MODELS]] * 2
        await there.comes_to("coder")
        failed = await asked(client, "broken")
        assert failed.status_code == 503
        assert "broken could not be loaded" in failed.json()["error"]["message"]
        assert (await talk.turn(client)).headers["X-Slotkeeper-Decision"] == "snapshot"
        for model in MODELS:
            answer = await client.post("/tokenize", json={"model": model, "content": "hello"})
            assert answer.json()["tokens"]
            await there.comes_to(model)


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/images/edits"])
async def test_a_form_goes_to_the_model_that_it_names_and_loses_no_state_of_another(
    kind: str, build: str, tmp_path: Path, path: str
) -> None:
    """These engines refuse both forms. Saves in pauses are off here: only a swap of ours saves."""
    file = {"file": ("a.wav", b"RIFF\r\n\r\nname=model")}
    async with gateway(kind, build, tmp_path) as there, keeping(there, save_pause=600) as (_, client):
        talk = Talk("coder", "a")
        await talk.turn(client)
        ours = await client.post(path, data={"model": "writer"}, files=file)
        await there.comes_to("writer")
        async with fresh_client(there.base) as direct:
            theirs = await direct.post(path, data={"model": "writer"}, files=file)
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())
        answer = await turn_that_reuses(talk, client)
        assert answer.headers["X-Slotkeeper-Decision"] == "snapshot"


async def test_a_turn_on_a_route_without_a_version_is_placed_where_its_conversation_is(
    kind: str, build: str, tmp_path: Path
) -> None:
    """llama-swap passes /v/chat/completions on as /chat/completions."""
    async with gateway(kind, build, tmp_path) as there, keeping(there, save_pause=600) as (_, client):
        talk = Talk("coder", "a", path="/v/chat/completions")
        slot = (await talk.turn(client)).headers["X-Slotkeeper-Slot"]
        await Talk("coder", "b").turn(client)
        answer = await turn_that_reuses(talk, client)
        assert answer.headers["X-Slotkeeper-Slot"] == slot
        assert "/v/chat/completions" in there.asked()
        await Talk("writer", "c", path="/v/chat/completions").turn(client)  # a swap, as on any other route
        assert (await talk.turn(client)).headers["X-Slotkeeper-Decision"] == "snapshot"


async def test_requests_to_a_model_of_another_server_pass_unpinned(build: str, tmp_path: Path) -> None:
    """Such as vLLM; only the stand-in can run a server of the test."""
    said = {"choices": [{"message": {"role": "assistant", "content": "hello"}}]}
    app = web.Application()

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def answer_chat(_: web.Request) -> web.Response:
        return web.json_response(said)

    app.router.add_get("/health", health)
    app.router.add_post("/v1/chat/completions", answer_chat)
    server = TestServer(app)
    await server.start_server()

    async def start() -> str:
        return str(server.make_url("")).rstrip("/")

    async def stop() -> None:
        """The server of a test stays."""

    other = Swapped(start=start, stop=stop)
    async with gateway(STAND_IN, build, tmp_path, other=other) as there, keeping(there) as (_, client):
        talk = Talk("coder", "a")
        await talk.turn(client)
        for _ in range(2):
            body = {"model": "other", "messages": [{"role": "user", "content": "hello"}]}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.json() == said
            assert "X-Slotkeeper-Slot" not in answer.headers
        await there.comes_to("other")
        await turn_that_reuses(talk, client)
    await server.close()
