"""A router's whole answers are assembled from streams and equal the engine's own, field for field.

The engine here is not a router; a router would only change the form that is requested.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Final

import httpx
import orjson
import pytest

from chaos.raw import dial, until
from patience import PATIENCE
from slotkeeper.api.answers.assembling import Assembler, as_stream
from slotkeeper.api.head import Api
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.engine.client import EngineAddress
from slotkeeper.exchange import exchange
from slotkeeper.scheduler.types import ModelName

Doc = dict[str, Any]

ASKED: Final = [{"role": "user", "content": "Hello there, how are you?"}]
PLACE: Final = {"path": {"type": "string", "enum": ["a", "bcd"]}, "deep": {"type": "boolean"}}
SCHEMA: Final = {"type": "object", "properties": PLACE, "required": ["path", "deep"]}
TOOL: Final = {"name": "ls", "description": "lists", "parameters": SCHEMA}
CALLS: Final = {"tool_choice": "required", "chat_template_kwargs": {"enable_thinking": False}}
PATHS: Final = {
    Api.CHAT: "/v1/chat/completions",
    Api.COMPLETION: "/completion",
    Api.MESSAGES: "/v1/messages",
    Api.RESPONSES: "/v1/responses",
}
CASES: Final[dict[str, tuple[Api, Doc]]] = {
    "chat": (Api.CHAT, {"messages": ASKED, "max_tokens": 60}),
    "chat, sampled": (Api.CHAT, {"messages": ASKED, "max_tokens": 60, "temperature": 1.5, "seed": 3}),
    "chat, only reasoning": (Api.CHAT, {"messages": ASKED, "max_tokens": 3}),
    "chat, a call": (
        Api.CHAT,
        {"messages": ASKED, "max_tokens": 200, "tools": [{"type": "function", "function": TOOL}], **CALLS},
    ),
    "chat, a call cut off": (
        Api.CHAT,
        {"messages": ASKED, "max_tokens": 25, "tools": [{"type": "function", "function": TOOL}], **CALLS},
    ),
    "completion": (Api.COMPLETION, {"prompt": "Hello there", "n_predict": 40}),
    "completion, sampled": (
        Api.COMPLETION,
        {"prompt": "Hello there", "n_predict": 60, "temperature": 2.0, "seed": 8, "ignore_eos": True},
    ),
    "completion, stopped": (
        Api.COMPLETION,
        {"prompt": "Hello there", "n_predict": 60, "stop": [" prevent"], "stream": False},
    ),
    "messages": (Api.MESSAGES, {"messages": ASKED, "max_tokens": 60}),
    "messages, stopped": (Api.MESSAGES, {"messages": ASKED, "max_tokens": 60, "stop_sequences": ["exec"]}),
    "messages, a call": (
        Api.MESSAGES,
        {
            "messages": ASKED,
            "max_tokens": 200,
            "tools": [{"name": "ls", "description": "lists", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    "responses": (Api.RESPONSES, {"input": "Hello there", "max_output_tokens": 60}),
    "responses, a call": (
        Api.RESPONSES,
        {"input": "Hello", "max_output_tokens": 200, "tools": [{"type": "function", **TOOL}], **CALLS},
    ),
}
RANDOM: Final = frozenset({"id", "call_id"})
# The sidecar chooses another slot, which holds more or less.
OF_SLOTS: Final = frozenset(
    {"id_slot", "cache_n", "prompt_n", "cached_tokens", "cache_read_input_tokens", "input_tokens"}
)
TIMES: Final = ("_ms", "_per_second", "created", "created_at", "completed_at")


def lasting(value: Any, *, but: frozenset[str] = frozenset()) -> Any:
    """Return the fields that are equal in all answers; of names, times and `but` only their presence."""
    if isinstance(value, list):
        return [lasting(each, but=but) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: type(each).__name__ if name in RANDOM | but or name.endswith(TIMES) else lasting(each, but=but)
        for name, each in value.items()
    }


@pytest.fixture
async def client(engine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.base, timeout=PATIENCE) as made:
        yield made


async def whole(client: httpx.AsyncClient, api: Api, body: Doc) -> httpx.Response:
    """Return the engine's own answer from a slot that already holds as much of the prompt as it can."""
    await client.post(PATHS[api], json=body)
    answer = await client.post(PATHS[api], json=body)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_an_answer_assembled_from_a_stream_equals_the_engines_whole_answer(client, case):
    api, asked = case
    body = {"temperature": 0, "seed": 1, **asked}
    own = await whole(client, api, body)
    streamed = await client.post(PATHS[api], content=as_stream(orjson.dumps(body), api, progress=True))
    made = Assembler(api)
    made.feed(streamed.content)
    answer = made.close()
    assert answer
    assert answer.status == 200
    assert lasting(orjson.loads(answer.body)) == lasting(own.json())


# -- through a sidecar ---------------------------------------------------------------------------------


@pytest.fixture
async def sidecar(engine) -> AsyncIterator[Sidecar]:
    async with lab.in_front_of(engine.base) as made:
        yield made


@pytest.fixture
async def user(sidecar) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=lab.url_of(sidecar), timeout=PATIENCE) as made:
        yield made


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[exchange.AnswerForm]:
    """Request answers as from a router's model from now on; return the list of chosen forms."""
    chosen: list[exchange.AnswerForm] = []
    own = exchange.form_for

    def form_for(ask: Any, body: bytes, forward: Any, link: Any) -> exchange.AnswerForm:
        as_model = SimpleNamespace(
            address=EngineAddress(link.address.base, ModelName("m")),
            assembles=link.assembles,
            health=link.health,
        )
        chosen.append(own(ask, body, forward, as_model))  # type: ignore[arg-type]
        return chosen[-1]

    monkeypatch.setattr(exchange, "form_for", form_for)
    return chosen


@pytest.mark.parametrize("name", ["chat, a call", "completion", "messages", "responses"])
async def test_a_client_gets_an_assembled_answer_equal_to_the_engines(user, client, name, routed):
    api, asked = CASES[name]
    body = {"temperature": 0, "seed": 1, **asked}
    answer = (await whole(user, api, body)).json()
    assert all(form.assembler for form in routed)
    own = (await whole(client, api, body)).json()
    assert lasting(answer, but=OF_SLOTS) == lasting(own, but=OF_SLOTS)


async def test_an_assembled_answer_has_the_headers_of_a_whole_answer(user, routed):
    api, asked = CASES["chat"]
    answer = await whole(user, api, asked)
    assert routed[-1].assembler
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert answer.headers["Content-Length"] == str(len(answer.content))
    assert {"x-request-id", "x-slotkeeper-decision", "x-slotkeeper-slot"} <= set(answer.headers)
    assert "X-Accel-Buffering" not in answer.headers


async def test_an_error_without_a_stream_is_forwarded_unchanged(user, client, routed):
    body = {"messages": [{"role": "user"}]}
    answer, own = [await each.post(PATHS[Api.CHAT], json=body) for each in (user, client)]
    assert (answer.status_code, answer.content) == (own.status_code, own.content)


async def test_a_client_that_disconnects_frees_its_slot_while_another_answer_continues(
    sidecar, client, routed
):
    """For a whole answer the engine checks the connection only after a second without any token."""
    endless = {"prompt": "Hello there", "n_predict": -1, "ignore_eos": True}

    async def busy(slot: int) -> bool:
        return bool((await client.get("/slots")).json()[slot]["is_processing"])

    async with client.stream("POST", PATHS[Api.COMPLETION], json={**endless, "id_slot": 0, "stream": True}):
        async with asyncio.timeout(PATIENCE), dial(sidecar.addresses[0]) as wire:
            await wire.post(PATHS[Api.COMPLETION], {**endless, "id_slot": 1})
            while not await busy(1):
                await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENCE):
            while await busy(1):
                await asyncio.sleep(0.01)
        assert await busy(0), "it began before, and would have ended before"
    assert routed[-1].assembler


async def test_after_a_failed_assembly_the_sidecar_requests_whole_answers(sidecar, user, routed, monkeypatch):
    monkeypatch.setattr(Assembler, "close", lambda _: None)
    api, asked = CASES["chat"]
    for _ in range(2):
        answer = await user.post(PATHS[api], json=asked)
        assert answer.status_code == 200
        assert answer.json()["object"] == "chat.completion"
    assert [form.assembler is not None for form in routed] == [True, False, False]
    value, labels = sidecar.metrics.registry.get_sample_value, {"route": "chat", "outcome": "ok"}
    await until(lambda: (value("slotkeeper_requests_total", labels) or 0) >= 2)  # counted after the last byte
    assert value("slotkeeper_requests_total", labels) == 2
