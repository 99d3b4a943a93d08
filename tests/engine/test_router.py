"""A real router behind the sidecar: state survives its swaps, and no request is lost in one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from io import StringIO
from pathlib import Path

import httpx
import orjson
import pytest
from benchmarks.routers import (
    ALIAS,
    MODELS,
    Talk,
    child_of,
    comes_to,
    resident,
    router,
    status,
    talks,
)
from rich.console import Console

from builds import needs_b10434
from chaos.raw import until
from compatibility import Feature
from engine.conftest import client_of
from engine.swappers import computed, saved_turn, turn_that_reuses
from patience import PATIENCE
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny, build
from slotkeeper.cli.doctor import doctor
from slotkeeper.scheduler.policies.router import ModelStatus

# Only this build's program is a router.
pytestmark = needs_b10434

ROUNDS = 3  # turns of each conversation
MORE = 1.05  # times the oracle may be computed
TRIES = 20
WHOLE = ("[DONE]", "message_stop", "response.completed", '"stop":true')  # the last events of complete streams


@asynccontextmanager
async def unsaved(folder: Path, **settings: float) -> AsyncIterator[tuple[str, Talk, httpx.AsyncClient]]:
    """Run a sidecar without saves in pauses; yield the URL of its router, a conversation, and a client."""
    async with (
        router(folder) as started,
        lab.keeping(started, save_pause=600, **settings) as sidecar,
        client_of(sidecar) as client,
    ):
        talk = Talk("coder", "a")
        await talk.turn(client)
        yield started.base, talk, client


async def noticed(sidecar: Sidecar) -> None:
    """Wait until the sidecar has learnt that the coder is unloaded."""
    (coder,) = (table for table in sidecar.driver.placement.tables.values() if table.model == "coder")
    await until(lambda: not coder.up, "it is known to be unloaded")


async def _rest(lines: AsyncIterator[str]) -> list[str]:
    """Return the lines of a stream, also of one that is cut off."""
    rest = []
    with suppress(httpx.RemoteProtocolError):
        async for line in lines:
            rest += [line] if line else []
    return rest


@pytest.mark.shows(Feature.SWAPS, *MODELS.values())
async def test_swaps_compute_no_more_tokens_than_models_that_stay_loaded(tmp_path: Path) -> None:
    """One model is loaded at a time, with two agents on each; every turn is a swap."""
    (tmp_path / "stay").mkdir()
    oracle = computed(await resident(tmp_path / "stay", ROUNDS))
    found = talks()
    async with router(tmp_path) as started, lab.keeping(started) as sidecar, client_of(sidecar) as client:
        for _ in range(ROUNDS):
            for talk in found:
                await talk.turn(client)
        assert computed(found, sidecar) <= MORE * oracle


async def test_clients_of_two_models_all_get_answers(tmp_path: Path) -> None:
    """Stock fails with 500 for one request in seven, and stalls."""
    async with (
        router(tmp_path) as started,
        lab.keeping(started, swap_wait=0.5) as sidecar,
        client_of(sidecar) as client,
    ):

        async def chats(talk: Talk) -> None:
            for _ in range(6):
                await talk.turn(client)

        await asyncio.gather(*(chats(talk) for talk in talks()))


async def test_a_request_for_another_model_does_not_break_a_running_stream(tmp_path: Path) -> None:
    async with (
        router(tmp_path) as started,
        lab.keeping(started, swap_wait=0) as sidecar,
        client_of(sidecar) as client,
    ):
        body = {"model": "coder", "messages": [{"role": "user", "content": "count"}], "max_tokens": 400}
        whole = {**body, "stream": True, "ignore_eos": True, "temperature": 0}
        async with client.stream("POST", "/v1/chat/completions", json=whole) as stream:
            lines = stream.aiter_lines()
            while not (await anext(lines)).startswith("data: "):
                pass  # a comment, while the model is loaded
            other = Talk("writer", "w")
            rest, _ = await asyncio.gather(_rest(lines), other.turn(client))
        assert rest[-1] == "data: [DONE]"
        assert orjson.loads(rest[-2][6:])["timings"]["predicted_n"] == body["max_tokens"]
        assert await status(started.base, "coder") is ModelStatus.UNLOADED


async def test_a_sleeping_model_is_not_woken_by_the_sidecar_and_its_state_is_reused(tmp_path: Path) -> None:
    sleepy = ("--sleep-idle-seconds", "2")
    async with (
        router(tmp_path, *sleepy) as started,
        lab.keeping(started) as sidecar,
        client_of(sidecar) as client,
    ):

        async def loaded() -> bool:
            return await status(started.base, "coder") is ModelStatus.LOADED

        asleep = partial(comes_to, started.base, "coder", ModelStatus.SLEEPING)
        talk = await saved_turn(client, sidecar, loaded, asleep)
        for _ in range(20):
            assert await status(started.base, "coder") is ModelStatus.SLEEPING
            await asyncio.sleep(0.1)
        await turn_that_reuses(talk, client)


async def test_a_swap_by_another_client_loses_at_most_the_last_turn(tmp_path: Path) -> None:
    async with router(tmp_path) as started, lab.keeping(started) as sidecar, client_of(sidecar) as client:
        talk = Talk("coder", "a")
        await talk.turn(client)
        await lab.rested(sidecar)
        async with httpx.AsyncClient(base_url=started.base, timeout=PATIENCE) as elsewhere:
            await Talk("writer", "b").turn(elsewhere)
        await comes_to(started.base, "coder", ModelStatus.UNLOADED)
        await noticed(sidecar)
        await turn_that_reuses(talk, client)


async def test_states_are_reused_after_a_router_was_killed(tmp_path: Path) -> None:
    async with router(tmp_path) as started, lab.keeping(started) as sidecar, client_of(sidecar) as client:
        found = [Talk("coder", "a"), Talk("writer", "b")]
        for talk in found:
            await talk.turn(client)
        await lab.rested(sidecar)
        await started.restart()
        for talk in found:
            await turn_that_reuses(talk, client)


async def test_a_model_that_cannot_be_loaded_gives_an_error_and_other_models_keep_serving(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    async with router(tmp_path, broken=str(broken)) as started, lab.keeping(started) as sidecar:
        async with client_of(sidecar) as client:
            talk = Talk("coder", "a")
            await talk.turn(client)
            body = {"model": "broken", "messages": [{"role": "user", "content": "hello"}]}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 503
            assert "broken could not be loaded" in answer.json()["error"]["message"]
            assert int(answer.headers["Retry-After"]) > 0
            await turn_that_reuses(talk, client)


async def test_a_request_for_an_unlisted_model_gets_the_routers_400_and_loads_no_model(
    tmp_path: Path,
) -> None:
    async with router(tmp_path) as started, lab.keeping(started) as sidecar, client_of(sidecar) as client:
        body = {"model": "zzz", "messages": [{"role": "user", "content": "hello"}]}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("model 'zzz' not found")
        assert await status(started.base, "coder") is ModelStatus.UNLOADED


@pytest.mark.parametrize("named", [{"model": None}, {}])
async def test_a_request_without_a_model_gets_the_routers_own_answer(
    tmp_path: Path, named: dict[str, str]
) -> None:
    async with router(tmp_path) as started, lab.keeping(started) as sidecar, client_of(sidecar) as client:
        body = {**named, "messages": [{"role": "user", "content": "hello"}]}
        async with httpx.AsyncClient(base_url=started.base, timeout=PATIENCE) as direct:
            theirs = await direct.post("/v1/chat/completions", json=body)
        ours = await client.post("/v1/chat/completions", json=body)
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())


async def test_a_request_that_uses_no_slot_goes_to_its_model_and_loses_no_state(tmp_path: Path) -> None:
    """A conversation of the model that is unloaded for it is not lost."""
    async with router(tmp_path) as started, lab.keeping(started) as sidecar, client_of(sidecar) as client:
        talk = Talk(ALIAS, "a")
        await talk.turn(client)
        for model in ("writer", ALIAS):
            answer = await client.post("/tokenize", json={"model": model, "content": "hello"})
            assert answer.json()["tokens"]
        assert await status(started.base, "coder") is ModelStatus.LOADED
        await turn_that_reuses(talk, client)


async def test_models_are_listed_as_the_router_lists_them(tmp_path: Path) -> None:
    async with router(tmp_path) as started, lab.keeping(started) as sidecar, client_of(sidecar) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == list(MODELS)
        assert {entry["status"]["value"] for entry in listed} == {"unloaded"}
        ready = await client.get(f"http://{sidecar.addresses[1]}/readyz")
        assert ready.status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/completion"])
async def test_a_stream_whose_engine_dies_ends_with_an_error(tmp_path: Path, path: str) -> None:
    """The router ends the stream cleanly.

    A route that drops `ignore_eos` may end its answer before the kill; the test then tries again.
    """
    async with router(tmp_path) as started, lab.keeping(started) as sidecar, client_of(sidecar) as client:
        asked = {"messages": [{"role": "user", "content": "count"}], "input": "count", "prompt": "count"}
        most = {"max_tokens": 4000, "n_predict": 4000, "max_output_tokens": 4000, "ignore_eos": True}
        body = {"model": "coder", "stream": True, **asked, **most}
        for _ in range(TRIES):
            async with client.stream("POST", path, json=body) as stream:
                lines = stream.aiter_lines()
                first = await anext(lines)
                os.kill(child_of(started, "coder"), signal.SIGKILL)
                rest = [first, *await _rest(lines)]
            if not any(end in line for line in rest[-2:] for end in WHOLE):
                break
        assert '"error"' in rest[-1], rest[-3:]


async def test_doctor_probes_loaded_models_and_loads_none(tmp_path: Path) -> None:
    async with router(tmp_path) as started, lab.keeping(started) as sidecar, client_of(sidecar) as client:
        await Talk("coder", "a").turn(client)
        await lab.rested(sidecar)
        out = StringIO()
        console = Console(file=out, width=200)
        assert await doctor(started.base, None, console) == 0
        said = out.getvalue()
        assert f"{started.base}#coder" in said
        assert "2 of 8192 tokens" in said
        assert "It is unloaded" in said.partition(f"{started.base}#writer")[2]
        assert await status(started.base, "writer") is ModelStatus.UNLOADED


async def test_an_unload_by_a_client_breaks_no_answer_and_loses_no_state(tmp_path: Path) -> None:
    """The router itself cuts running answers."""
    async with unsaved(tmp_path) as (base, talk, client):
        body = {"model": "coder", "messages": [{"role": "user", "content": "count"}], "max_tokens": 400}
        whole = {**body, "stream": True, "ignore_eos": True, "temperature": 0}
        unload = client.post("/models/unload", json={"model": ALIAS})
        async with client.stream("POST", "/v1/chat/completions", json=whole) as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            rest, answer = await asyncio.gather(_rest(lines), unload)
        assert rest[-1] == "data: [DONE]"
        assert orjson.loads(rest[-2][6:])["timings"]["predicted_n"] == body["max_tokens"]
        assert (answer.status_code, answer.json()) == (200, {"success": True})
        await comes_to(base, "coder", ModelStatus.UNLOADED)
        answer = await turn_that_reuses(talk, client)
        assert answer.headers["X-Slotkeeper-Decision"] == "snapshot"


async def test_a_load_by_a_client_is_a_swap_of_ours(tmp_path: Path) -> None:
    """The router itself would evict the other model and its unsaved state."""
    async with unsaved(tmp_path) as (base, talk, client):
        answer = await client.post("/models/load", json={"model": "writer"})
        assert (answer.status_code, answer.json()) == (200, {"success": True})
        await comes_to(base, "writer", ModelStatus.LOADED)
        again = await client.post("/models/load", json={"model": "writer"})
        assert (again.status_code, again.json()["error"]["message"]) == (400, "model is already running")
        answer = await turn_that_reuses(talk, client)
        assert answer.headers["X-Slotkeeper-Decision"] == "snapshot"


async def test_a_reload_of_presets_loses_no_saved_state(tmp_path: Path) -> None:
    """It unloads a model whose section changed, and the router does not say which ones before."""
    async with router(tmp_path) as started, lab.keeping(started) as sidecar, client_of(sidecar) as client:
        talk = Talk("coder", "a")
        await talk.turn(client)
        await lab.rested(sidecar)
        presets = tmp_path / "models.ini"
        more = f"n-predict = 4000\n[third]\nmodel = {build(Tiny.DENSE)}\n[writer]\n"
        presets.write_text(presets.read_text().replace("[writer]\n", more))
        listed = (await client.get("/models?reload=1")).json()["data"]
        assert {entry["id"] for entry in listed} == {*MODELS, "third"}
        await comes_to(started.base, "coder", ModelStatus.UNLOADED)
        await noticed(sidecar)
        answer = await turn_that_reuses(talk, client)
        assert answer.headers["X-Slotkeeper-Decision"] == "snapshot"
        await Talk("third", "b").turn(client)


async def test_an_unload_by_a_client_waits_for_an_answer_no_longer_than_the_drain_timeout(
    tmp_path: Path,
) -> None:
    """The router then cuts that answer; the client sees an error, not a whole answer."""
    async with unsaved(tmp_path, drain_timeout=0.1) as (base, _, client):
        body = {"model": "coder", "messages": [{"role": "user", "content": "count"}], "max_tokens": 12000}
        endless = {**body, "stream": True, "ignore_eos": True}
        unload = client.post("/models/unload", json={"model": "coder"})
        async with client.stream("POST", "/v1/chat/completions", json=endless) as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            rest, answer = await asyncio.gather(_rest(lines), unload)
        assert answer.status_code == 200
        assert '"error"' in rest[-1]
        await comes_to(base, "coder", ModelStatus.UNLOADED)
