"""An engine with --api-key: a client without a valid key costs it nothing and learns nothing."""

from __future__ import annotations

from typing import Any, Final

import aiohttp
import httpx
import pytest
from yarl import URL

from chaos.raw import until, until_async
from engine.conftest import probed
from patience import PATIENCE
from slotkeeper.api.head import AUTH
from slotkeeper.app import Sidecar, running
from slotkeeper.bench import lab
from slotkeeper.bench.lab import url_of
from slotkeeper.bench.target import counted
from slotkeeper.engine.answers import EngineError
from slotkeeper.engine.client import EngineClient
from slotkeeper.exchange.credentials import Door, KeyCheck
from slotkeeper.scheduler.types import SlotId
from slotkeeper.settings import Settings

KEY: Final = {"Authorization": "Bearer sesame"}
STRANGERS: Final[tuple[dict[str, str], ...]] = (
    {},
    {"Authorization": "Bearer open"},
    {"X-Api-Key": "open"},
)
STORY: Final = "The heron stood in the reeds and counted the frogs of the pond. " * 40
ASKS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": STORY}], "max_tokens": 4},
    "/chat/completions": {
        "messages": [{"role": "user", "content": STORY[:900]}],
        "max_tokens": 4,
        "stream": True,
    },
    "/v1/completions": {"prompt": STORY, "max_tokens": 4},
    "/completion": {"prompt": STORY, "n_predict": 4},
    "/completions": {"prompt": STORY, "n_predict": 4, "stream": True},
    "/infill": {"input_prefix": STORY, "input_suffix": "", "n_predict": 4},
    "/v1/responses": {"input": STORY, "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": STORY}], "max_tokens": 4},
    "/v1/embeddings": {"input": STORY},
    "/rerank": {"query": STORY, "documents": [STORY]},
    "/v1/audio/transcriptions": {"prompt": STORY},
    "/slots/0?action=erase": {},
}


def before(engine: Any, **more: Any) -> Settings:
    return lab.settings_of(
        upstream=(engine.base,),
        listen="127.0.0.1:0",
        admin_listen="127.0.0.1:0",
        idle_tokens=0,
        drain_timeout=1.0,
        **{"engine_api_key": "sesame", "save_pause": 3600.0, **more},
    )


async def tokens_and_slots(engine: Any) -> tuple[int, list[Any]]:
    """Return the prompt tokens that it has computed, and the contents of its slots."""
    async with httpx.AsyncClient(base_url=engine.base, headers=KEY, timeout=PATIENCE) as own:
        tokens = counted((await own.get("/metrics")).text)
        slots = (await own.get("/slots")).json()
        return tokens, [(slot["id"], slot.get("n_prompt_tokens")) for slot in slots]


def sidecar_headers(answer: httpx.Response) -> list[str]:
    return [name for name in answer.headers if name.lower().startswith("x-slotkeeper")]


async def served(sidecar: Sidecar) -> None:
    """Send the story as a client with the key."""
    async with httpx.AsyncClient(base_url=url_of(sidecar), headers=KEY, timeout=PATIENCE) as friend:
        for path in ("/v1/chat/completions", "/completion"):
            answer = await friend.post(path, json=ASKS[path])
            assert answer.status_code == 200
            assert "x-slotkeeper-predicted" in answer.headers


async def test_clients_without_a_valid_key_cost_no_tokens_and_get_no_information(engine_factory, build):
    engine = engine_factory(build=build, args=["--api-key", "sesame,other"])
    async with probed(before(engine, slot_dir=engine.slot_dir)) as sidecar:
        await served(sidecar)
        was = await tokens_and_slots(engine)
        async with httpx.AsyncClient(base_url=url_of(sidecar), timeout=PATIENCE) as client:
            answers = [
                await client.post(path, json=ask, headers=key)
                for path, ask in ASKS.items()
                for key in STRANGERS
            ]
        assert len(answers) == 36
        assert await tokens_and_slots(engine) == was
        assert {answer.status_code for answer in answers} == {401}
        assert {answer.json()["error"]["message"] for answer in answers} == {"Invalid API Key"}
        assert [sidecar_headers(answer) for answer in answers] == [[]] * 36
        assert {"x-request-id" in answer.headers for answer in answers} == {True}
        assert len(sidecar.driver.journal) == 2  # only the request with the key is recorded


async def test_a_request_whose_key_cannot_be_checked_is_only_forwarded(engine, monkeypatch):
    async def unsure(*_: object) -> KeyCheck:
        return KeyCheck.UNSURE

    async def not_known(*_: object) -> bool:
        return False

    async with probed(before(engine)) as sidecar:
        await served(sidecar)
        monkeypatch.setattr(Door, "_ask", unsure)
        monkeypatch.setattr(Door, "_wants_no_key", not_known)
        # Else, if the engine is just being looked at again, the request goes on as accepted before.
        monkeypatch.setattr(Door, "_was_let_in", lambda *_: False)
        async with httpx.AsyncClient(base_url=url_of(sidecar), timeout=PATIENCE) as client:
            answer = await client.post("/v1/chat/completions", json=ASKS["/v1/chat/completions"])
        assert answer.status_code == 200
        assert answer.headers["x-slotkeeper-decision"] == "key_unchecked"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_answer_has_no_headers_of_the_sidecar(engine, stream):
    async with probed(before(engine)) as sidecar:
        await served(sidecar)
        async with httpx.AsyncClient(base_url=url_of(sidecar), timeout=PATIENCE) as client:
            ask = {**ASKS["/completion"], "stream": stream, "grammar": "no grammar"}
            answer = await client.post("/completion", json=ask)
        assert answer.status_code == 400
        assert sidecar_headers(answer) == []


OTHER: Final = {"X-Api-Key": "other"}


async def test_calls_and_prefills_for_a_request_use_the_clients_key(engine_factory, build, monkeypatch):
    """Its template, its tokens and its plants use its key; idle work without a request uses ours."""
    calls: list[tuple[str, dict[str, str]]] = []
    send = aiohttp.ClientSession.request

    def heard(session: aiohttp.ClientSession, method: str, url: Any, **more: Any) -> Any:
        headers = {**session.headers, **(more.get("headers") or {})}
        calls.append((URL(str(url)).path, {name: headers[name] for name in AUTH if name in headers}))
        return send(session, method, url, **more)

    lasting = ["--checkpoint-min-step", "0"]  # b10434 keeps no other checkpoint in the middle of a prompt
    engine = engine_factory(build=build, args=["--api-key", "sesame,other", *lasting])
    async with probed(before(engine)) as sidecar:
        (link,) = sidecar.driver.links.values()
        assert link.tokenizer is not None
        while link.tokenizer.mode != "whole":  # so that the engine is asked for tokens
            link.tokenizer.distrust("for this test")
        monkeypatch.setattr(aiohttp.ClientSession, "request", heard)
        async with httpx.AsyncClient(base_url=url_of(sidecar), headers=OTHER, timeout=PATIENCE) as client:
            for number in range(4):  # they diverge in the system text, where the engine makes no checkpoint
                system = {"role": "system", "content": f"{STORY} {number} frogs. {STORY}"}
                messages = [system, {"role": "user", "content": "How many?"}]
                body = {"messages": messages, "max_tokens": 2}
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            answer = await client.post("/v1/messages", json={**body, "messages": messages[1:]})
            assert answer.status_code == 200
        monkeypatch.undo()
    ours = [(path, auth) for path, auth in calls if auth == KEY]
    theirs = {path for path, auth in calls if auth == OTHER}
    assert {"/apply-template", "/tokenize", "/completion"} <= theirs
    assert {path for path, _ in ours} <= {"/health", "/props", "/slots"}
    assert [auth for _, auth in calls if len(auth) > 1] == []
    assert sidecar.driver.effect_runner.lent == {}


async def test_without_a_key_of_its_own_the_sidecar_borrows_an_accepted_one(engine_factory):
    """Saving a slot after the answer is no work for a request, and needs a key."""
    engine = engine_factory("tiny-dense", args=["--api-key", "sesame"])
    borrowing = before(engine, engine_api_key=None, slot_dir=engine.slot_dir, save_pause=0.0)
    async with (
        running(borrowing) as sidecar,
        httpx.AsyncClient(base_url=url_of(sidecar), timeout=PATIENCE) as client,
    ):
        refused = await client.post("/completion", json=ASKS["/completion"], headers=STRANGERS[1])
        assert refused.status_code == 401
        (link,) = sidecar.driver.links.values()
        assert link.auth == {}

        async def placed() -> bool:
            answer = await client.post("/completion", json=ASKS["/completion"], headers=KEY)
            return answer.status_code == 200 and answer.headers["x-slotkeeper-decision"] in {"cold", "prefix"}

        await until_async(placed, "a slot was chosen for it")
        await until(lambda: any(engine.slot_dir.glob("slotkeeper-*.json")), "its slot was saved in the pause")
        assert link.auth == KEY


async def test_a_clients_key_replaces_the_sidecars_own_key_in_a_call(engine_factory, build):
    """The engine reads Authorization first: our key beside a client's X-Api-Key would win."""
    engine = engine_factory("tiny-dense", build, args=["--api-key", "sesame"])
    async with EngineClient(engine.base, api_key="wrong") as client:
        with pytest.raises(EngineError):
            await client.tokenize("a", add_special=False, parse_special=False)
        lent = {"X-Api-Key": "sesame"}
        ids = await client.tokenize("a b c d", add_special=False, parse_special=False, headers=lent)
        assert (await client.prefill(ids, SlotId(0), headers=lent)).computed > 0
